"""What a load's targets are made of: its statements, completed by those that put fused parameters right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddle_flexckpt.aoa import Mapping
from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.execution.mapping import compile_mapping
from paddle_flexckpt.runtime.state import LocalState
from paddle_flexckpt.runtime.targets import Policy, Wanted, resolve


def match(
    state: LocalState, source: Catalog, policy: Policy, aoa_config: Any, all_targets: Catalog | None
) -> tuple[Mapping | None, Wanted]:
    """What a rank's targets are made of, as the user says; what is left to be put right is in ``cuts``.

    Args:
        state: This rank's targets.
        source: The source's shards.
        policy: What is allowed.
        aoa_config: The user's statements, or None.
        all_targets: The targets of all ranks; None where there are no statements.

    Raises:
        ValidationError: Statements or targets do not fit.
    """
    if isinstance(aoa_config, Mapping):
        policy = replace(policy, fused="exact")  # nothing can be added to what is compiled
    mapping = None
    if aoa_config is not None:
        mapping = compile_mapping(aoa_config, source, all_targets, policy.master_weights)
    return mapping, resolve(state, source, policy, mapping)


def complete(
    first: Wanted,
    statements: Sequence[str],
    state: LocalState,
    source: Catalog,
    policy: Policy,
    aoa_config: Any,
    targets: Catalog,
) -> tuple[Mapping, Wanted]:
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
    mapping = compile_mapping(aoa_config, source, targets, policy.master_weights, statements)
    wanted = resolve(state, source, policy, mapping)
    if wanted.cuts:
        raise ValidationError([cut.problem() for cut in wanted.cuts])
    fused = {cut.key: cut.describe() for cut in first.cuts}
    return mapping, replace(wanted, fused=fused, aliases={**first.aliases, **wanted.aliases})
