"""Kinds of optimizer states, by which the states of two optimizers differ.

Tested in tests/remedies/test_optimizers.py and tests/transfer/test_transfer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.catalog.texts import format_ranks
from paddle_flexckpt.optimizer_states import ACCUMULATORS, MASTER, SCALARS, is_torch_state, split_state
from paddle_flexckpt.transfer.names import MASTER_STATE, bare, split_raw

# States that optimizers of all kinds may have.
NO_KINDS = frozenset({MASTER, MASTER_STATE})
_POWERS = frozenset(f"{name}_0" for name in SCALARS)
_KINDS = frozenset(f"{name}_0" for name in ACCUMULATORS)
_LEAVES, _TAKES_POWERS = b"l", b"p"


def states_of_another(targets: Catalog, source: Catalog) -> list[int]:
    """Return the rows of all states, masters included, where the source has another optimizer's states, or none."""
    known = {*source.keys, *targets.keys}
    if kinds_of_two(targets, source, known) is None:
        return []
    return [row for row, key in enumerate(targets.keys) if state_of(key, known)]


def encode_stance(targets: Catalog, source: Catalog) -> bytes:
    """Return a rank's message to :func:`check_stances`: whether it leaves its states, or loads powers of beta alone."""
    known = {*source.keys, *targets.keys}
    if kinds_of_two(targets, source, known) is not None:
        return _LEAVES
    loaded = {state_of(key, known) for key in {*source.keys} & {*targets.keys}} - NO_KINDS - {""}
    return _TAKES_POWERS if loaded and loaded <= _POWERS else b""


def check_stances(stances: Sequence[bytes], ranks: Sequence[int], context: str) -> None:
    """Raise ValidationError where a rank leaves its states, and another, which cannot tell, loads its powers of beta.

    Args:
        stances: The message of each rank, of :func:`encode_stance`.
        ranks: Their numbers.
        context: The context of the error.
    """
    leaving, taking = ([r for r, each in zip(ranks, stances) if each == kind] for kind in (_LEAVES, _TAKES_POWERS))
    if leaving and taking:
        raise ValidationError(
            f"ranks would differ: {format_ranks(leaving)} leave their states, as the source has another optimizer's, "
            f"and {format_ranks(taking)} have powers of beta alone, and would load them. Remedy (FC204): leave the "
            "powers out of what these ranks load: they stay as they are, as the others' do",
            context,
        )


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
