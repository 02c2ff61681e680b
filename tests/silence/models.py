"""Random models and strategies: which rank holds which part of which tensor, and the whole values, kept apart."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from tests.property.layouts import Pick

HALF = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)
#: Components of a fused parameter, in columns, and the statement of its rule. Degrees 1, 2 and 4 divide them.
FUSED = {
    "fused_ffn": (8, 8),
    "fused_qkv_old, num_heads=8, num_key_value_groups=4": (8, 4, 4),
}
MOMENTS = ("moment1_0", "moment2_0")
BETA = "beta1_pow_acc_0"
MASTER = "w_0"
State = dict[str, ShardedWeight]


@dataclass(frozen=True)
class Parameter:
    """A parameter. ``statement`` is that of its rule if it is fused; ``tied`` another name of it."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    statement: str | None = None
    tied: str | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        return FUSED[self.statement or ""]


@dataclass(frozen=True)
class Model:
    """Parameters, and whether an optimizer with its states and master weights belongs to them."""

    parameters: tuple[Parameter, ...]
    optimizer: bool = True
    masters: bool = True

    def tensors(self) -> dict[str, tuple[Parameter, tuple[int, ...], np.dtype]]:
        """Every key: the parameter that it belongs to, its shape and dtype."""
        found = {}
        for parameter in self.parameters:
            found[parameter.key] = (parameter, parameter.shape, parameter.dtype)
            if not self.optimizer:
                continue
            for moment in MOMENTS:
                found[f"{parameter.key}.{moment}"] = (parameter, parameter.shape, SINGLE)
            found[f"{parameter.key}.{BETA}"] = (parameter, (1,), SINGLE)
            if self.masters and parameter.dtype == HALF:
                found[f"{parameter.key}.{MASTER}"] = (parameter, parameter.shape, SINGLE)
        return found


def random_model(pick: Pick, prefix: str = "") -> Model:
    """A model of two to five parameters, no two extents alike more often than not."""
    dtype = pick.choice((SINGLE, SINGLE, HALF))
    parameters = [Parameter(f"{prefix}embed.weight", (pick.integer(3, 9), 4), dtype, tied=f"{prefix}head.weight")]
    for i in range(pick.integer(1, 4)):
        if pick.integer(0, 2) == 0:
            statement = pick.choice(tuple(FUSED))
            name, shape = f"layers.{i}.fused.weight", (pick.integer(2, 5), sum(FUSED[statement]))
            parameters.append(Parameter(prefix + name, shape, dtype, statement))
        else:
            shape = tuple(pick.integer(1, 8) for _ in range(pick.integer(1, 3)))
            parameters.append(Parameter(f"{prefix}layers.{i}.weight", shape, dtype))
    return Model(tuple(parameters), bool(pick.integer(0, 4)), bool(pick.integer(0, 3)))


def value(key: str, shape: tuple[int, ...], dtype: np.dtype, salt: str) -> np.ndarray:
    """The whole value of a tensor; of a fused one with its components one after the other."""
    rng = np.random.default_rng(zlib.crc32(f"{salt} {key}".encode()))
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def interleaved(whole: np.ndarray, widths: tuple[int, ...], parts: int) -> np.ndarray:
    """Components that follow each other, as the parts of a degree hold them: each part a share of each in turn."""
    shares = [np.split(component, parts, 1) for component in np.split(whole, np.cumsum(widths)[:-1], 1)]
    return np.concatenate([share[part] for part in range(parts) for share in shares], 1)


def natural(whole: np.ndarray, widths: tuple[int, ...], parts: int) -> np.ndarray:
    """What :func:`interleaved` makes, undone."""
    rows = [np.split(part, np.cumsum([w // parts for w in widths])[:-1], 1) for part in np.split(whole, parts, 1)]
    return np.concatenate([np.concatenate(component, 1) for component in zip(*rows)], 1)


@dataclass(frozen=True)
class Strategy:
    """How a job is parallel.

    Attributes:
        tp: Tensor-parallel degree.
        zero: Ranks that share the optimizer's states.
        dp: Replicas of all that.
        kind: How states are shared: "flat" (ranges, uneven), "owned" (whole, by one rank each) or "whole" (by all).
        flat_parameters: Whether parameters are ranges too, as in stage 3.
        salt: Makes the choices of two strategies of equal degrees differ.
    """

    tp: int
    zero: int
    dp: int
    kind: str
    flat_parameters: bool
    salt: int

    @property
    def world(self) -> int:
        return self.tp * self.zero * self.dp


def random_strategy(pick: Pick, most: int = 4) -> Strategy:
    tp, zero, dp = pick.choice([s for s in DEGREES if math.prod(s) <= most])
    return Strategy(tp, zero, dp, pick.choice(("flat", "flat", "owned", "whole")), pick.integer(0, 3) == 0,
                    pick.integer(0, 1 << 20))  # fmt: skip


DEGREES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 3, 1),
           (1, 1, 4))  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor; ``parts`` is the degree that a fused one is cut into."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    parts: int = 1


def place(strategy: Strategy, rank: int, key: str, parameter: Parameter, shape: tuple[int, ...]) -> Part | None:
    """A rank's part of a tensor; None: it holds nothing of it."""
    pick = Pick.from_seed(zlib.crc32(f"{strategy.salt} {parameter.key}".encode()))
    tp_rank, zero_rank = rank % strategy.tp, rank // strategy.tp % strategy.zero
    offset, extents, parts = [0] * len(shape), list(shape), 1
    axis = 1 if parameter.statement else pick.integer(0, len(parameter.shape) - 1)
    is_scalar = key.endswith(BETA)
    cut = parameter.statement is not None or pick.integer(0, 3) > 0
    if strategy.tp > 1 and cut and not is_scalar:
        edges = [shape[axis] * i // strategy.tp for i in range(strategy.tp + 1)]
        offset[axis], extents[axis] = edges[tp_rank], edges[tp_rank + 1] - edges[tp_rank]
        parts = strategy.tp
    is_state = key != parameter.key
    flat = None
    if strategy.zero > 1 and (is_state or strategy.flat_parameters) and not is_scalar:
        size = math.prod(extents)
        if strategy.kind == "flat" or not is_state:
            cuts = Pick.from_seed(zlib.crc32(f"{strategy.salt} {key} {offset}".encode()))
            inner = sorted(cuts.integer(0, size) for _ in range(strategy.zero - 1))
            edges = [0, *inner, size]
            flat = (edges[zero_rank], edges[zero_rank + 1])
        elif strategy.kind == "owned" and zlib.crc32(parameter.key.encode()) % strategy.zero != zero_rank:
            return None
    return Part(tuple(offset), tuple(extents), flat, parts)


@dataclass
class Side:
    """One job's live state on all of its ranks, and how fused parameters are cut.

    Attributes:
        states: By rank.
        parts: Degree of fused tensors, by key.
    """

    states: list[State]
    parts: dict[str, int] = field(default_factory=dict)


def sentinel(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Content that no saved tensor has."""
    return np.full(math.prod(shape) * dtype.itemsize, 0x5A, dtype=np.uint8).view(dtype).reshape(shape)


def build(model: Model, strategy: Strategy, salt: str | None) -> Side:
    """The live state of a job: values of a salt, or targets to be filled."""
    side = Side([{} for _ in range(strategy.world)])
    for key, (parameter, shape, dtype) in model.tensors().items():
        whole = None if salt is None else value(key, shape, dtype, salt)
        for rank, state in enumerate(side.states):
            part = place(strategy, rank, key, parameter, shape)
            if part is None:
                continue
            is_fused = parameter.statement is not None and len(shape) == 2
            local = part.shape if part.flat is None else (part.flat[1] - part.flat[0],)
            if whole is None:
                array = sentinel(local, dtype)
            else:
                held = interleaved(whole, parameter.widths, part.parts) if is_fused else whole
                box = held[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape))]
                array = box.copy() if part.flat is None else box.reshape(-1)[slice(*part.flat)].copy()
            if is_fused:
                side.parts[key] = part.parts
            state[key] = ShardedWeight(
                key, array, part.shape, shape, part.offset, part.flat is not None,
                None if part.flat is None else slice(*part.flat),
                aliases=(parameter.tied + key[len(parameter.key) :],) if parameter.tied else (),
                fused=FusedAxis(1, parameter.statement) if is_fused else None,
            )  # fmt: skip
    return side
