"""The parallelism of a job: degrees, the places of ranks, and the layers of pipeline stages.

Tested in tests/planning/test_strategy.py and tests/planning/test_near_strategies.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from paddle_flexckpt.catalog.errors import Problem, ValidationError

# How a sharded optimizer gives states to ranks; "none": each rank has the states of all its parameters.
SHARDING_KINDS = ("none", "v1", "v2", "stage2", "stage3", "muon")
# The ranks that a layer's experts are spread over: neighbours among those with different data (dp x sharding), among
# those of dp alone, or among those of dp x sharding x tp, where tensor parallelism does not cut experts.
EXPERT_AXES = ("data", "dp", "tp")
_ALIASES = {"mp": "tp"}
CONTEXT = "cannot read a strategy"
_ENTRIES = (
    "NAME=DEGREE, with a name of tp (or mp), pp, vpp, dp, sep, ep; or sharding=KIND:DEGREE; or a mesh, such as "
    "mesh=2x4:dp,mp"
)

# The degrees that are varied, one at a time; the most lower ones that are tried of each.
_VARIED, _LOWER = ("tp", "pp", "vpp", "sharding", "sep", "ep"), 5


class Place(NamedTuple):
    """A rank's places along the axes of a strategy, as numbers; or those of many ranks, as arrays."""

    dp: Any
    pp: Any
    sharding: Any
    sep: Any
    tp: Any


@dataclass(frozen=True)
class Strategy:
    """The degrees of a job.

    Attributes:
        dp: Data parallel degree.
        pp: Pipeline stages.
        sharding: Degree of the sharded optimizer.
        sep: Segment parallel degree.
        tp: Tensor parallel degree.
        vpp: Virtual stages of each rank of the pipeline.
        ep: Ranks that a layer's experts are spread over.
        kind: How the optimizer is sharded, one of :data:`SHARDING_KINDS`.
        experts: The ranks over which experts are spread, one of :data:`EXPERT_AXES`.
    """

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    tp: int = 1
    vpp: int = 1
    ep: int = 1
    kind: str = "none"
    experts: str = "data"

    def __post_init__(self) -> None:
        """Check that the degrees fit each other."""
        problems: list[Problem | str] = [
            Problem(
                "a degree has to be a positive number", key=each.name, expected=">= 1", got=getattr(self, each.name)
            )
            for each in fields(self)
            if each.name in _DEGREES and getattr(self, each.name) < 1
        ]
        if self.kind not in SHARDING_KINDS:
            problems.append(Problem("unknown kind of sharding", expected=f"one of {SHARDING_KINDS}", got=self.kind))
        elif (self.kind == "none") != (self.sharding == 1) and not (self.sharding == 1 and self.kind != "none"):
            problems.append(Problem("a sharded optimizer has a kind", expected="such as sharding=v2:4", got=str(self)))
        if self.kind == "muon" and self.tp > 1:
            remedy = "leave tp out"
            problems.append(
                Problem("MuonShardingOptimizer has no tensor parallelism", got=str(self), code="FC704", remedy=remedy)
            )
        if not problems and self.vpp > 1 and self.pp == 1:
            problems.append(Problem("virtual stages need a pipeline", expected="pp > 1 beside vpp", got=str(self)))
        problems += [] if problems else self._expert_problems()
        if problems:
            raise ValidationError(problems, CONTEXT)

    def _expert_problems(self) -> list[Problem | str]:
        """Return why experts cannot be spread like this."""
        if self.experts not in EXPERT_AXES:
            return [
                Problem("experts are spread over unknown ranks", expected=f"one of {EXPERT_AXES}", got=self.experts)
            ]
        data = self.dp * self.sharding
        names = {"data": ("dp x sharding", data), "dp": ("dp", self.dp), "tp": ("dp x sharding x tp", data * self.tp)}
        name, ranks = names[self.experts]
        if ranks % self.ep:
            what = "experts are spread over ranks with different data" if self.experts != "tp" else "experts are spread"
            return [Problem(what, expected=f"ep to divide {name} = {ranks}", got=self.ep)]
        if self.experts == "tp" and self.ep % self.tp:
            what = "experts are spread over all ranks of tensor parallelism"
            return [Problem(what, expected=f"ep=tp:DEGREE, a multiple of tp={self.tp}", got=self.ep)]
        return []

    def __str__(self) -> str:
        """Return the text that :func:`parse_strategy` reads."""
        parts = [
            f"{name}={getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "dp", "ep", "sep")
            if getattr(self, name) > 1
        ]
        if self.experts != "data" and self.ep > 1:
            parts[parts.index(f"ep={self.ep}")] = f"ep={self.experts}:{self.ep}"
        if self.kind != "none":
            parts.append(f"sharding={self.kind}:{self.sharding}")
        return ",".join(parts) or "dp=1"

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return self.dp * self.pp * self.sharding * self.sep * self.tp

    def place(self, rank: Any) -> Place:
        """Return the place of a rank, or of many ranks.

        The order is that of fleet's default ``hybrid_configs["order"]``: dp, pp, sharding, sep, mp; ranks of tensor
        parallelism are neighbours.
        """
        extents = (self.dp, self.pp, self.sharding, self.sep, self.tp)
        places = []
        for extent in reversed(extents):
            rank, place = divmod(rank, extent)
            places.append(place)
        return Place(*reversed(places))

    def expert_place(self, place: Place) -> Any:
        """Return the number of the part of a layer's experts, of ``ep`` parts, of a rank or of many ranks."""
        if self.experts == "dp":
            return place.dp % self.ep
        data = place.dp * self.sharding + place.sharding
        return (data * self.tp + place.tp if self.experts == "tp" else data) % self.ep

    @property
    def expert_stride(self) -> int:
        """Return the distance between ranks that share an optimizer and have the same part of the experts.

        0: they have different numbers of the parts.
        """
        parts = {"data": self.ep, "dp": 1, "tp": self.ep // self.tp}[self.experts]
        if self.sharding <= parts:
            return self.sharding
        return parts if self.sharding % parts == 0 else 0


# Fields that are degrees, which a text may name.
_DEGREES = tuple(each.name for each in fields(Strategy) if each.name not in ("kind", "experts"))


def parse_strategy(text: str) -> Strategy:
    """Return the strategy of a text such as ``"tp=8,pp=16,vpp=2,dp=4,sharding=v2:4,ep=8"``.

    ``ep=8`` spreads experts over ranks with different data, ``ep=dp:8`` over data parallel ones alone, ``ep=tp:8`` over
    those of tensor parallelism too.

    Raises:
        ValidationError: An entry is unknown, is there twice, or has no positive number.
    """
    found: dict[str, int] = {}
    kind, experts, names = "none", "data", list(_DEGREES)
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        name = _ALIASES.get(name, name)
        if not equals or name not in names:
            raise ValidationError([Problem("unknown entry", key=entry, expected=_ENTRIES)], CONTEXT)
        if name in found:
            raise ValidationError([Problem("an entry is there twice", key=entry)], CONTEXT)
        if name == "sharding":
            kind, colon, value = (part.strip() for part in value.partition(":"))
            if not colon or kind not in SHARDING_KINDS[1:]:
                what = "unknown kind of sharding" if colon else "sharding without its kind"
                expected = f"sharding=KIND:DEGREE, with a kind of {', '.join(SHARDING_KINDS[1:])}"
                raise ValidationError([Problem(what, key=entry, expected=expected)], CONTEXT)
        if name == "ep" and ":" in value:
            experts, _, value = (part.strip() for part in value.partition(":"))
            experts = _ALIASES.get(experts, experts)
            if experts not in EXPERT_AXES[1:]:
                expected = f"ep=DEGREE, or ep=AXIS:DEGREE with one of {EXPERT_AXES[1:]}"
                raise ValidationError([Problem("unknown axis of experts", key=entry, expected=expected)], CONTEXT)
        if not (value.isascii() and value.isdigit() and 0 < int(value) <= 1 << 20):
            raise ValidationError([Problem("not a degree", key=entry, expected="a number from 1 to 2 ** 20")], CONTEXT)
        found[name] = int(value)
    return Strategy(**found, kind=kind, experts=experts)


def stage_layers(
    strategy: Strategy, layers: int, counted: Collection[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each pipeline stage, by their position in the description of the model.

    Args:
        strategy: The degrees.
        layers: How many layers the description has.
        counted: The layers that are spread evenly (``seg_method="layer:Name"``); each other layer goes with the one
            before it, those before all with the first. None: all layers are alike (``"uniform"``). Rules as in
            ``SegmentLayers`` of ``paddle/distributed/fleet/meta_parallel/parallel_layers/pp_layers.py``.

    Raises:
        ValidationError: The layers cannot be spread like this.
    """
    parts = strategy.pp * strategy.vpp
    if parts == 1:
        return (tuple(range(layers)),)
    bounds = [0]
    if counted is None:
        if layers < parts:
            problem = Problem(
                "too few layers for the pipeline",
                expected=f"at least {parts}",
                got=layers,
                code="FC704",
                remedy=f"pp x vpp can be {layers} at most",
            )
            raise ValidationError([problem], f"{strategy} does not fit the model")
        for part in range(1, parts):
            bounds.append(bounds[-1] + layers // parts + (part > parts - layers % parts))
        bounds.append(layers)
    else:
        if not counted or len(counted) % parts:
            what = "layers cannot be spread evenly over the stages of the pipeline"
            expected = f"a multiple of pp x vpp = {parts}"
            remedy = "give another pp, or vpp, whose product divides the number of layers"
            problem = Problem(what, expected=expected, got=f"{len(counted)} layers", code="FC704", remedy=remedy)
            raise ValidationError([problem], f"{strategy} does not fit the model")
        ends = sorted(counted)[len(counted) // parts - 1 :: len(counted) // parts]
        bounds += [end + 1 for end in ends[:-1]] + [layers]
    stages: list[list[int]] = [[] for _ in range(strategy.pp)]
    for part in range(parts):
        stages[part % strategy.pp] += range(bounds[part], bounds[part + 1])
    return tuple(map(tuple, stages))


def aligned(size: Any, itemsize: Any, alignment: int, degree: int = 1) -> Any:
    """Return elements, a number or an array, rounded up to whole ``alignment`` bytes on each of ``degree`` ranks."""
    unit = alignment // itemsize * degree
    return -(-size // unit) * unit


def near_strategies(strategy: Strategy, fits: Callable[[Strategy], bool]) -> list[Strategy]:
    """Return strategies that fit, with one degree changed: to the nearest lower, and to the nearest higher one.

    Those come first whose number of ranks is the same, as data parallelism makes up for the degree, or nearly so.

    Args:
        strategy: One that does not fit.
        fits: Tells whether another one does. It is asked a few times for each degree above 1.
    """
    found: list[Strategy] = []
    for name in _VARIED:
        degree = getattr(strategy, name)
        # Divisors and powers of two are what models and machines have.
        lower = {degree - 1, *(each for each in range(1, degree) if degree % each == 0 or each & (each - 1) == 0)}
        for degrees in (sorted(lower, reverse=True)[:_LOWER], [degree + 1, 2 * degree]) if degree > 1 else ():
            made = (_changed(strategy, name, each) for each in degrees)
            found += itertools.islice((each for each in made if each is not None and fits(each)), 1)
    return sorted(dict.fromkeys(found), key=lambda each: abs(each.ranks - strategy.ranks))


def _changed(strategy: Strategy, name: str, degree: int) -> Strategy | None:
    """Return a strategy with another degree, and as many ranks if that can be; None if there is no such strategy."""
    places = strategy.dp * getattr(strategy, name)
    keeps = name not in ("vpp", "ep") and places % degree == 0
    for more in [{"dp": places // degree}, {}] if keeps else [{}]:
        try:
            return replace(strategy, **{name: degree, **more})  # type: ignore[arg-type]
        except ValidationError:
            continue
    return None
