"""Kinds of optimizer states, by which the states of two optimizers differ.

Tested in tests/remedies/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.optimizer_states import ACCUMULATORS, MASTER, SCALARS, is_torch_state, split_state
from paddle_flexckpt.transfer.names import MASTER_STATE, bare, split_raw

# States that optimizers of all kinds may have.
NO_KINDS = frozenset({MASTER, MASTER_STATE})
_POWERS = frozenset(f"{name}_0" for name in SCALARS)
_KINDS = frozenset(f"{name}_0" for name in ACCUMULATORS)


def states_of_another(targets: Catalog, source: Catalog) -> list[int]:
    """Return the rows of all states, masters included, where the source has another optimizer's states, or none."""
    known = {*source.keys, *targets.keys}
    if kinds_of_two(targets, source, known) is None:
        return []
    return [row for row, key in enumerate(targets.keys) if state_of(key, known)]


def kinds_of_two(targets: Catalog, source: Catalog, known: set[str]) -> tuple[set[str], set[str]] | None:
    """Return the kinds of states of both sides if they are of two optimizers, or the source has none; else None.

    Optimizers may share a kind, as AdamW and NAdam do: then each has kinds that the other lacks.
    """
    kinds = {state_of(key, known) for key in targets.keys}
    wanted = kinds - NO_KINDS - {""}
    there = {state_of(key, known) for key in source.keys} - NO_KINDS - {""}
    # A rank may have powers of beta alone, and an optimizer may be loaded by itself.
    are_two = not wanted & there or (wanted - there and (there - wanted) & _KINDS)
    if "" not in kinds or not wanted - _POWERS or not are_two or _has_others(source, targets.keys, known):
        return None
    return wanted, there


def state_of(key: str, known: set[str]) -> str:
    """Return the state of a key, such as ``moment1_0``; "" for a parameter."""
    raw = split_raw(bare(key))
    return split_state(key, known)[1] or (raw.state if raw else "")


def _has_others(source: Catalog, states: Sequence[str], known: set[str]) -> bool:
    """Return whether the source has states under names that are not Paddle's."""
    parameters = {split_state(key, known)[0] for key in states}
    return any(
        is_torch_state(key) or (not state_of(key, known) and key.rpartition(".")[0] in parameters)
        for key in source.keys
    )
