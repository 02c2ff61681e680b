"""What a load's targets are made of: its statements, completed by those that put fused parameters right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.aoa.sides import split_state
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.engine.mapping import compile_mapping
from paddle_flexckpt.engine.options import TransferOptions
from paddle_flexckpt.live.state import LocalState
from paddle_flexckpt.live.targets import Wanted, resolve


def match(
    state: LocalState, source: Catalog, policy: TransferOptions, aoa_config: Any, all_targets: Catalog | None
) -> tuple[TensorMapping | None, Wanted]:
    """What a rank's targets are made of, as the user says; what is left to be put right is in ``reordered``.

    Args:
        state: This rank's targets.
        source: The source's shards.
        policy: What is allowed.
        aoa_config: The user's statements, or None.
        all_targets: The targets of all ranks; None where there are no statements.

    Raises:
        ValidationError: Statements or targets do not fit.
    """
    compiled = isinstance(aoa_config, TensorMapping)
    if compiled:
        policy = replace(policy, fused="exact")  # nothing can be added to it
    mapping = None
    if aoa_config is not None:
        mapping = compile_mapping(aoa_config, source, all_targets, policy.master_weights)
    return mapping, resolve(state, source, policy, mapping, complete=compiled)


def complete(
    first: Wanted,
    statements: Sequence[str],
    state: LocalState,
    source: Catalog,
    policy: TransferOptions,
    aoa_config: Any,
    targets: Catalog,
) -> tuple[TensorMapping, Wanted]:
    """What a rank's targets are made of, with statements of :meth:`Wanted.completion`.

    Each of these is about one parameter, and any part of that tells how it is cut. So those of one rank and its own
    targets serve where other ranks need not know, and mean what those of all ranks with all targets mean.

    Args:
        first: What :func:`match` found.
        statements: The statements.
        state: As of :func:`match`; so are source, policy and aoa_config.
        source: Likewise.
        policy: Likewise.
        aoa_config: Likewise.
        targets: The targets that statements are about: this rank's own, or those of all ranks.

    Raises:
        ValidationError: Statements or targets do not fit.
    """
    problems = _mixed(first, state, source)
    if problems:
        raise ValidationError(problems)
    mapping = compile_mapping(aoa_config, source, targets, policy.master_weights, statements)
    wanted = resolve(state, source, policy, mapping)
    if wanted.reordered:
        raise ValidationError([one.problem() for one in wanted.reordered])
    fused = {one.key: one.describe() for one in first.reordered}
    aliases = {**first.aliases, **wanted.aliases}
    return mapping, replace(wanted, fused=fused, aliases=aliases, maybe_fused=first.maybe_fused)


def _mixed(first: Wanted, state: LocalState, source: Catalog) -> list[Problem]:
    """Return the states that lie otherwise than their parameter, whose statement would move them too."""
    catalog = state.catalog
    keys = {*source.keys, *catalog.keys}
    moved = {one.key: one.describe() for one in first.reordered}
    rows = {catalog.key_name(row): row for row in range(len(catalog))}
    bases = {split_state(key, keys)[0]: key for key in sorted(moved, reverse=True)}
    problems = []
    for key, row in rows.items():
        base = split_state(key, keys)[0]
        if base not in bases or (key not in moved and row not in first.rows):
            continue
        like = rows[bases[base]]
        same = catalog.unpadded(row, catalog.global_shape) == catalog.unpadded(like, catalog.global_shape)
        if same and moved.get(key) != moved[bases[base]]:
            remedy = "mark parameter and states with the same FusedAxis, or give AOA statements for them"
            what = "a fused parameter and its states are not in the same order"
            got = moved.get(key, "nothing to do")
            problems.append(Problem(what, key, int(catalog.rank[row]), None, moved[bases[base]], got, remedy))
    return problems
