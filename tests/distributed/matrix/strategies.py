"""The table of strategies, and the pairs that it makes."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
BY_NAME = {strategy.name: strategy for strategy in (*STRATEGIES, *FURTHER, *REHEARSED)}

# Pairs that differ in one thing, and those that differ in most: what CI runs of each model besides its sample.
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


def sample(model: str, count: int, largest_world: int, seed: int = 0) -> list[tuple[str, str]]:
    """The diagonal, the neighbours and a seeded sample of the rest, up to a size of world."""
    fitting = [p for p in pairs(model) if max(BY_NAME[name].world for name in p) <= largest_world]
    chosen = [p for p in fitting if p[0] == p[1] or p in NEIGHBOURS]
    rest = [p for p in fitting if p not in chosen]
    return chosen + sorted(random.Random(seed).sample(rest, min(count, len(rest))))
