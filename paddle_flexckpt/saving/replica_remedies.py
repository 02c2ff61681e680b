"""The causes of differing replicas, and what a text advises for them.

Tested in tests/saving/test_replica_checks.py and tests/distributed/test_sharding.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import NamedTuple

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.optimizer_states import split_state


class About(NamedTuple):
    """A key whose replicas differ.

    Attributes:
        is_state: Whether it is an optimizer's state of a parameter whose replicas do not differ.
        has_states: Whether replicas of its states differ too.
        stepped: Whether steps may have moved replicas apart: states differ.
    """

    is_state: bool
    has_states: bool
    stepped: bool

    @property
    def states(self) -> str:
        """Return the end of a text about it."""
        return ", and those of its states" if self.has_states else ""

    @property
    def remedies(self) -> str:
        """Return the remedies for the causes, the likeliest first, except for ranks that may differ."""
        parts = (
            "if each rank has its own part of a tensor, describe it by shard_weight(key, tensor, axis, group): "
            "one rank's part would be saved as the whole; give different tensors (such as the experts of different "
            "ranks) different names"
        )
        seed = "call paddle.seed() with one number on every rank before the model is made"
        first = f"if they differ before the first step, {seed}"
        causes = (parts, first) if self.stepped else (first, parts)
        return "; ".join((*causes, "if they have drifted apart, make them equal again"))

    def policy(self, key: str) -> str:
        """Return the policy that lets it differ, with its states."""
        return repr({key: "first", **({f"{key}.*": "first"} if self.has_states else {})})


def about_keys(names: Mapping[int, str], keys: Collection[str]) -> dict[int, About]:
    """Return what a text says of keys, by number: parameters first, and states with their parameters if these differ.

    Args:
        names: The keys whose replicas differ, by a number of the caller's; several may have one key.
        keys: All keys.
    """
    known = {key: place for place, key in enumerate(keys)}
    parts = {line: split_state(name, known) for line, name in names.items()}
    own: dict[str, set[str]] = {}
    for parameter, state in parts.values():
        own.setdefault(parameter, set()).add(state)
    stepped = any(state for _, state in parts.values())
    kept = [line for line, (parameter, state) in parts.items() if not state or "" not in own[parameter]]
    kept.sort(key=lambda line: (bool(parts[line][1]), known[names[line]]))
    return {line: About(bool(parts[line][1]), len(own.get(names[line], "")) > 1, stepped) for line in kept}


def drift_remedy(ranks: Collection[int], may_be_tied: bool = True) -> str:
    """Return the remedy where Paddle itself lets replicas on these ranks drift apart; else an empty text.

    Sharding V2 updates slices of parameters, whose gradients fleet does not average over data and segment parallelism,
    nor, if its collectives overlap the backward, over the stages of a tied weight (``may_be_tied``).
    """
    hcg = getattr(sys.modules.get("paddle.distributed.fleet.base.topology"), "_HYBRID_PARALLEL_GROUP", None)
    topology = getattr(hcg, "_topo", None)
    if hcg is None or topology is None:
        return ""
    from paddle.distributed import fleet

    strategy = getattr(fleet.fleet, "_user_defined_strategy", None)
    if strategy is None or not strategy.hybrid_configs["sharding_configs"].split_param:
        return ""
    coordinates = [topology.get_coord(rank) for rank in ranks]
    axes = {"data": "data", "sep": "segment"}
    beside = [word for name, word in axes.items() if len({getattr(each, name, 0) for each in coordinates}) > 1]
    overlaps = strategy.hybrid_configs["pp_configs"].sharding_comm_overlap and may_be_tied
    are_tied = overlaps and len({getattr(each, "pipe", 0) for each in coordinates}) > 1
    if hcg.get_sharding_parallel_world_size() == 1 or not (beside or are_tied):
        return ""
    remedy = (
        "sharding V2 (split_param=True) with sharding_comm_overlap: the copies of a tied weight on several stages of a "
        "pipeline drift apart from the first step on. Begin again from a checkpoint that was saved before that step, "
        "without sharding_comm_overlap"
    )
    if not beside:
        return remedy
    remedy = (
        f"sharding V2 (split_param=True) beside {' and '.join(beside)} parallelism: fleet does not average its "
        "gradients over these ranks, so that each trains another model from the first step on. Begin again from a "
        "checkpoint that was saved before that step, and shard over all of these ranks (dp_degree=1, sep_degree=1), "
        "or use V1, or average the gradients over these ranks before step(), as PaddleNLP's trainer does"
    )
    return remedy


def drift_warning(ranks: Collection[int]) -> str:
    """Return what a check says where Paddle itself lets replicas on these ranks drift apart; else an empty text.

    It is no error: the program may average the gradients, which no description shows.
    """
    remedy = drift_remedy(ranks, may_be_tied=False)
    what = "the replicas of these ranks drift apart, unless the program averages the gradients itself"
    return str(Problem(what, code="FC106", remedy=remedy)) if remedy else ""
