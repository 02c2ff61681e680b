"""The table of strategies, and the pairs that it makes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# Steps that a job trains after its state has come from elsewhere.
AFTER = 2


@dataclass(frozen=True)
class Strategy:
    """How one job is parallel.

    Attributes:
        name: As in the table of results.
        world: Ranks.
        dp: Data parallel degree, and so on for ``mp``, ``pp`` and ``sharding``.
        split: Sharding V2 instead of V1.
        level: Group-sharded level (``os_g`` is stage 2, ``p_g_os`` stage 3) over all ranks, instead of fleet's.
        sequence: Sequence-parallel linears.
        chunks: Virtual pipeline stages per rank.
        experts: Ranks that a layer's experts are spread over.
        over: Which ranks these are: neighbours with different data, those of dp alone, or those of tp too.
        sep: Segment parallel degree.
        models: Which models it can train: ``tied``, ``untied``, and ``experts``.
        semi: Semi-automatic: distributed tensors over all ranks, cut on their first axis where it divides evenly.
        cp: Context parallel degree: so many of the ranks of sharding have parts of the same sequences.
        exclude: Classes of layers that stage 3 leaves whole.
        pipelined: A PipelineLayer, in a pipeline of one stage too.
        main_gradients: Gradients are summed in main_grad, and given back after each step.
        switches: Of sharding_configs, by name.
        pp_switches: Of pp_configs, likewise.
        runner: The class of Paddle's that has to run it.
    """

    name: str
    world: int
    dp: int = 1
    mp: int = 1
    pp: int = 1
    sharding: int = 1
    split: bool = False
    level: str | None = None
    sequence: bool = False
    chunks: int = 1
    experts: int = 1
    over: str = "data"
    sep: int = 1
    models: tuple[str, ...] = ("tied", "untied")
    semi: bool = False
    cp: int = 1
    exclude: tuple[str, ...] = ()
    pipelined: bool = False
    main_gradients: bool = False
    switches: tuple[tuple[str, Any], ...] = ()
    pp_switches: tuple[tuple[str, Any], ...] = ()
    runner: str | None = None


MODELS = ("tied", "untied", "experts")
STRATEGIES = (
    Strategy("single", 1, models=MODELS),
    Strategy("dp2", 2, dp=2, models=MODELS),
    Strategy("tp2", 2, mp=2, models=MODELS),
    Strategy("tp4", 4, mp=4),
    Strategy("tp2+sp", 2, mp=2, sequence=True),
    Strategy("v1x2", 2, sharding=2),
    Strategy("v2x2", 2, sharding=2, split=True),
    Strategy("v2x4", 4, sharding=4, split=True),
    Strategy("stage2x2", 2, level="os_g"),
    # Paddle's stage 3 releases a parameter after its own layer has used it: a tied one "holds no memory" in the head.
    Strategy("stage3x2", 2, level="p_g_os", models=("untied",)),
    Strategy("stage3x4", 4, level="p_g_os", models=("untied",)),
    Strategy("pp2", 2, pp=2),
    Strategy("pp4", 4, pp=4),
    # Paddle's interleaved schedule asks for more than two stages.
    Strategy("pp4xvpp2", 4, pp=4, chunks=2),
    Strategy("tp2xpp2", 4, mp=2, pp=2),
    Strategy("tp2xv1x2", 4, mp=2, sharding=2),
    Strategy("tp2xv2x2", 4, mp=2, sharding=2, split=True),
    Strategy("v2x2xpp2", 4, sharding=2, split=True, pp=2),
    Strategy("dp2xpp2", 4, dp=2, pp=2),
    Strategy("ep2", 2, dp=2, experts=2, models=("experts",)),
    Strategy("ep4", 4, dp=4, experts=4, models=("experts",)),
    Strategy("ep2xtp2", 4, dp=2, mp=2, experts=2, models=("experts",)),
    Strategy("tp2xpp2xv2x2", 8, mp=2, pp=2, sharding=2, split=True),
)
# What users switch on besides: each is saved, resumed under two other layouts, and resumed from another one.
_RELEASE, _SPLIT = (("release_gradients", True),), {"sharding": 2, "split": True}
FLOWS = (
    Strategy("v2x2+release", 2, main_gradients=True, switches=_RELEASE, **_SPLIT),
    Strategy(
        "v2x2xpp2+release",
        4,
        pp=2,
        main_gradients=True,
        pp_switches=(*_RELEASE, ("sharding_comm_overlap", True)),
        **_SPLIT,
    ),
    Strategy("v2x2+offload", 2, switches=(("offload_opt_buffer_size", -1),), **_SPLIT),
    Strategy("stage3x2+exclude", 2, level="p_g_os", exclude=("Embedding",)),
    Strategy("dp2xstage2x2", 4, dp=2, sharding=2, level="os_g"),
    Strategy("dp2xstage3x2", 4, dp=2, sharding=2, level="p_g_os", models=("untied",)),
    Strategy("cp2xv2x2", 2, cp=2, **_SPLIT),
    Strategy("cp2xv2x4", 4, cp=2, sharding=4, split=True),
    Strategy("cp2xv1x2", 2, cp=2, sharding=2),
    Strategy("nopp-v2x2", 2, pipelined=True, runner="NoPipelineParallel", **_SPLIT),
    Strategy("nopp-tp2", 2, mp=2, pipelined=True, runner="NoPipelineParallel"),
    Strategy(
        "pp4xvpp2+balanced",
        4,
        pp=4,
        chunks=2,
        pp_switches=(("best_unbalanced_scheduler", True),),
        runner="VPPFhenBInBalancedMemory",
    ),
)
_MOE = {"models": ("mixture",)}
# A mixture of experts, under names of its own: the first two are what the others exchange with.
EXPERT_FLOWS = (
    Strategy("moe-single", 1, **_MOE),
    Strategy("moe-ep2", 2, dp=2, experts=2, **_MOE),
    Strategy("moe-ep2topo-v2x2", 2, experts=2, over="tp", **_SPLIT, **_MOE),
    Strategy("moe-ep2topo-v2x4", 4, experts=2, over="tp", sharding=4, split=True, **_MOE),
    Strategy("moe-mp2", 2, mp=2, experts=2, over="mp", **_MOE),
    Strategy("moe-tp2ep2+sp", 2, mp=2, experts=2, over="mp", sequence=True, **_MOE),
    Strategy("moe-tp2ep2+spxv2x2", 4, mp=2, experts=2, over="mp", sequence=True, **_SPLIT, **_MOE),
    Strategy("moe-tp2ep2+spxpp2", 4, mp=2, experts=2, over="mp", sequence=True, pp=2, **_MOE),
)


# Those of the matrix on devices which the matrix above does without: the tests of semi-automatic parallelism have their
# own there.
FURTHER = (Strategy("semi2", 2, semi=True), Strategy("semi4", 4, semi=True))
# Experts whose optimizer is sharded: described, saved and loaded, but not trained here.
_SHARDED = {"models": ("experts",), "sharding": 2}
_V2 = {**_SHARDED, "split": True}
REHEARSED = (
    Strategy("v2x2+ep1", 2, **_V2),
    Strategy("v2x2+ep2", 2, experts=2, **_V2),
    Strategy("v2x4+ep2", 4, experts=2, **{**_V2, "sharding": 4}),
    Strategy("v2x4+ep4", 4, experts=4, **{**_V2, "sharding": 4}),
    Strategy("dp2xv2x2+ep2", 4, dp=2, experts=2, **_V2),
    Strategy("dp2xv2x2+ep4", 4, dp=2, experts=4, **_V2),
    Strategy("tp2xv2x2+ep2", 4, mp=2, experts=2, **_V2),
    Strategy("tp2xv2x2+ep2tp", 4, mp=2, experts=2, over="tp", **_V2),
    Strategy("tp2xv2x2+ep4tp", 4, mp=2, experts=4, over="tp", **_V2),
    Strategy("tp2xv1x2+ep2tp", 4, mp=2, experts=2, over="tp", **_SHARDED),
    Strategy("sep2xv2x2+ep2", 4, sep=2, experts=2, **_V2),
    Strategy("dp2xv1x2+ep2dp", 4, dp=2, experts=2, over="dp", **_SHARDED),
    Strategy("dp2xv2x2+ep2dp", 4, dp=2, experts=2, over="dp", **_V2),
    Strategy("dp2xstage2x2+ep2dp", 4, dp=2, experts=2, over="dp", level="os_g", **_SHARDED),
    Strategy("dp2xstage3x2+ep2dp", 4, dp=2, experts=2, over="dp", level="p_g_os", **_SHARDED),
)
BY_NAME = {strategy.name: strategy for strategy in (*STRATEGIES, *FLOWS, *EXPERT_FLOWS, *FURTHER, *REHEARSED)}

# Of the flows, those of which CI runs one pair: the others are theirs with other degrees.
FLOWS_IN_SHORT = frozenset(flow.name for flow in (*FLOWS, *EXPERT_FLOWS)) - {
    *("cp2xv2x4", "cp2xv1x2", "nopp-tp2"),
    *("moe-ep2topo-v2x4", "moe-tp2ep2+sp"),
}

# Pairs that differ in one thing, and those that differ in most: what tests have of each model besides its sample.
NEIGHBOURS = (
    ("single", "tp2"),
    ("tp2", "single"),
    ("tp2", "tp4"),
    ("tp4", "tp2+sp"),
    ("v1x2", "v2x2"),
    ("v2x2", "v2x4"),
    ("v2x4", "stage2x2"),
    ("stage2x2", "stage3x2"),
    ("stage3x2", "stage3x4"),
    ("stage3x4", "single"),
    ("pp2", "single"),
    ("pp2", "pp4"),
    ("pp4", "pp4xvpp2"),
    ("dp2", "v1x2"),
    ("tp2xv2x2", "v2x2xpp2"),
)


def pairs(model: str) -> list[tuple[str, str]]:
    """All (saved under, loaded under) of a model."""
    names = [strategy.name for strategy in STRATEGIES if model in strategy.models]
    return [(saved, loaded) for saved in names for loaded in names]


def flow_pairs() -> list[tuple[str, str, str]]:
    """All (model, saved under, loaded under): each flow under two others and itself, and from one other."""
    found = []
    for model in ("untied", "tied"):
        for flow in (each.name for each in FLOWS if model in each.models):
            found += [(model, flow, "single"), (model, flow, "stage2x2"), (model, "tp2", flow), (model, flow, flow)]
    single, two, *flows = (each.name for each in EXPERT_FLOWS)
    for flow in flows:
        found += [("mixture", *pair) for pair in ((flow, single), (flow, two), (two, flow), (flow, flow))]
    return found


def sample(model: str, count: int, largest_world: int, seed: int = 0) -> list[tuple[str, str]]:
    """The diagonal, the neighbours and a seeded sample of the rest, up to a size of world."""
    fitting = [p for p in pairs(model) if max(BY_NAME[name].world for name in p) <= largest_world]
    chosen = [p for p in fitting if p[0] == p[1] or p in NEIGHBOURS]
    rest = [p for p in fitting if p not in chosen]
    return chosen + sorted(random.Random(seed).sample(rest, min(count, len(rest))))
