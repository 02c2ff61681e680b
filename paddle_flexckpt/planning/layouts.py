"""Describe what each rank of a job would have, without the job: one catalog for each rank.

Rules are those of Paddle's own wrappers, each named where it stands; real ranks describe the same.
Tested in tests/planning/test_layouts.py and tests/distributed/test_layouts.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.planning.strategy import Strategy, aligned, stage_layers

# Bytes of a buffer of sharding V2, and of the alignment of each parameter on a device: `comm_buffer_size_MB` and
# `alignment` in paddle/distributed/fleet/utils/tensor_fusion_helper.py.
BUFFER_BYTES, ALIGNMENT = 256 << 20, 256
# Stage 3 cuts parameters of more elements (`segment_size` of group_sharded_parallel); its alignment on a CPU is 4,096.
SEGMENT_SIZE = 1 << 20
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class ModelTensor:
    """Describe one tensor of a model.

    Attributes:
        name: Its structured name.
        shape: Global shape, in elements.
        dtype: Name of the element type.
        tp_axis: The axis along which tensor parallelism cuts it; None: each rank has all of it.
        layers: The positions of its layers in the description of the model, by which a pipeline is cut; several where
            it is tied. Empty: every stage has it.
        is_trained: Whether the optimizer has it.
        expert: Number of its expert and of all experts of the layer, for a tensor that expert parallelism spreads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tp_axis: int | None = None
    layers: tuple[int, ...] = ()
    is_trained: bool = True
    expert: tuple[int, int] | None = None


@dataclass(frozen=True)
class State:
    """Describe one state that an optimizer keeps for each parameter.

    Attributes:
        suffix: What follows the parameter's name and a dot.
        is_scalar: Whether it is one number, of the shape [1]; otherwise it has the parameter's shape.
        is_master: Whether it is the master weight, which only parameters in half precision have.
    """

    suffix: str
    is_scalar: bool = False
    is_master: bool = False


ADAMW = (
    State("moment1_0"),
    State("moment2_0"),
    State("beta1_pow_acc_0", is_scalar=True),
    State("beta2_pow_acc_0", is_scalar=True),
    State("w_0", is_master=True),
)


@dataclass(frozen=True)
class Model:
    """Describe a model and the states of its optimizer.

    Attributes:
        tensors: All tensors, in the order in which the optimizer was given them.
        layers: How many layers the description of the pipeline has.
        counted: The layers that stages share evenly; None: all (see :func:`~.strategy.stage_layers`).
        states: What the optimizer keeps for each trained parameter; empty: no optimizer.
        state_dtype: Element type of these states.
        segment_size: Stage 3 cuts parameters of more elements.
        alignment: Bytes to which stage 3 and sharding V2 pad each parameter.
    """

    tensors: tuple[ModelTensor, ...]
    layers: int = 1
    counted: frozenset[int] | None = None
    states: tuple[State, ...] = ADAMW
    state_dtype: str = "float32"
    segment_size: int = SEGMENT_SIZE
    alignment: int = ALIGNMENT


@dataclass(frozen=True)
class _Part:
    """Hold what a rank has of the model before its optimizer is sharded, in columns.

    Attributes:
        tensor: Which tensors, int64 ``[t]``.
        shape: Extents of the local boxes, int64 ``[t, d]``, padded on the left.
        size: Elements of these, int64 ``[t]``.
        trained: Positions in ``tensor`` of those that the optimizer has.
        order: Positions in ``tensor`` in the order of the model's state: a tied tensor stands where its layer does.
    """

    tensor: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    trained: np.ndarray
    order: np.ndarray


class Layout:
    """Make the catalogs of a job's ranks from its strategy and its model.

    Attributes:
        strategy: The strategy.
        keys: Names of all tensors and states of the job.
    """

    def __init__(self, model: Model, strategy: Strategy) -> None:
        """Check that the strategy can cut the model.

        Raises:
            ValidationError: It cannot: a tensor does not divide, a pipeline has too few layers, names repeat, or no
                rule is known for the combination.
        """
        self.strategy, self._model = strategy, model
        self._check()
        self._stages = stage_layers(strategy, model.layers, model.counted)
        self._bounds = [frozenset(stage) for stage in self._stages]
        count, width = len(model.tensors), max((len(each.shape) for each in model.tensors), default=1) or 1
        self._width = width
        self._ndim = np.asarray([len(each.shape) for each in model.tensors], dtype=np.int16)
        self._shape = np.ones((count, width), dtype=np.int64)
        # The padded axis that tensor parallelism cuts, or -1.
        self._cut = np.full(count, -1, dtype=np.int64)
        for row, each in enumerate(model.tensors):
            self._shape[row, width - len(each.shape) :] = each.shape
            if each.tp_axis is not None and strategy.tp > 1:
                self._cut[row] = width - len(each.shape) + each.tp_axis % len(each.shape)
        self._is_trained = np.asarray([each.is_trained for each in model.tensors], dtype=bool)
        self._is_half = np.asarray([each.dtype in _HALF for each in model.tensors], dtype=bool)
        self._dtypes = tuple(dict.fromkeys([*(each.dtype for each in model.tensors), model.state_dtype, "float32"]))
        self._dtype = np.asarray([self._dtypes.index(each.dtype) for each in model.tensors], dtype=np.int16)
        states = [f"{each.name}.{state.suffix}" for state in model.states for each in model.tensors]
        self.keys = (*(each.name for each in model.tensors), *states)
        self._part = functools.lru_cache(maxsize=None)(self._find_part)
        self._owned = functools.lru_cache(maxsize=None)(self._find_owned)

    def _check(self) -> None:
        strategy, problems = self.strategy, []
        names = [each.name for each in self._model.tensors]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        problems += [Problem("two tensors have one name", key=name) for name in repeated]
        for each in self._model.tensors:
            if each.tp_axis is not None and not -len(each.shape) <= each.tp_axis < len(each.shape):
                axes = f"an axis of {list(each.shape)}"
                problems.append(
                    Problem("tensor parallelism cuts along no axis", each.name, expected=axes, got=each.tp_axis)
                )
            elif each.tp_axis is not None and each.shape[each.tp_axis] % strategy.tp:
                expected = f"a multiple of tp={strategy.tp} along axis {each.tp_axis}"
                what = "tensor parallelism cannot cut a tensor evenly"
                problems.append(Problem(what, each.name, expected=expected, got=f"shape {list(each.shape)}"))
            if each.expert is not None and (each.expert[1] % strategy.ep or not 0 <= each.expert[0] < each.expert[1]):
                expected = f"a number of experts that ep={strategy.ep} divides"
                problems.append(
                    Problem("experts cannot be spread evenly", each.name, expected=expected, got=each.expert)
                )
        if strategy.ep > 1 and strategy.kind != "none":
            what = "no rule is known for experts spread over ranks whose optimizer is sharded"
            problems.append(Problem(what, expected="ep=1, or no sharding", got=str(strategy)))
        if problems:
            raise ValidationError(problems, f"{strategy} does not fit the model")

    def kind(self, rank: int) -> tuple[int, ...]:
        """Return what a rank's catalog follows from: ranks of one kind have the same, but for their number."""
        place = self.strategy.place(rank)
        member = 0 if self.strategy.kind == "none" else place.sharding
        return place.pp, self._expert_place(place.dp, place.sharding), member, place.tp

    def catalog(self, rank: int) -> Catalog:
        """Return what a rank has: first the model's tensors, then the states, state by state."""
        place = self.strategy.place(rank)
        part = self._part(place.pp, self._expert_place(place.dp, place.sharding))
        begin, end = self._owned(place.pp, self._expert_place(place.dp, place.sharding), place.sharding)
        stage3 = self.strategy.kind == "stage3"
        sliced = part.size > self._model.segment_size if stage3 else np.zeros(len(part.size), dtype=bool)
        parts = [self._rows(part.order, part, place.tp, np.where(sliced, begin, -1), end, 0)]
        # States of a parameter of which the rank owns nothing are not there, its scalars included.
        mine = self._trained_order(part)
        mine = mine[end[mine] > begin[mine]]
        whole = (begin == 0) & (end == part.size) & ~sliced & (self.strategy.kind != "v2")
        for number, state in enumerate(self._model.states, 1):
            rows = mine[self._is_half[part.tensor[mine]]] if state.is_master else mine
            if state.is_scalar:
                parts.append(self._scalar_rows(part.tensor[rows], number))
            else:
                parts.append(self._rows(rows, part, place.tp, np.where(whole, -1, begin), end, number))
        columns = [np.concatenate(column) for column in zip(*parts)]
        key, dtype, ndim, global_shape, offset, shape, start, stop = columns
        count = len(key)
        return Catalog(
            keys=self.keys,
            dtypes=self._dtypes,
            files=(),
            key=key.astype(np.int32),
            dtype=dtype,
            ndim=ndim,
            global_shape=global_shape,
            offset=offset,
            shape=shape,
            flat_start=start,
            flat_stop=stop,
            rank=np.full(count, rank, dtype=np.int32),
            file=np.full(count, -1, dtype=np.int32),
            byte_offset=np.zeros(count, dtype=np.int64),
        )

    def _expert_place(self, dp: int, sharding: int) -> int:
        return (dp * self.strategy.sharding + sharding) % self.strategy.ep

    def _find_part(self, stage: int, expert_place: int) -> _Part:
        chosen = [
            row
            for row, each in enumerate(self._model.tensors)
            if (not each.layers or not self._bounds[stage].isdisjoint(each.layers))
            and (each.expert is None or each.expert[0] * self.strategy.ep // each.expert[1] == expert_place)
        ]
        tensor = np.asarray(chosen, dtype=np.int64)
        shape = self._shape[tensor].copy()
        cut = np.flatnonzero(self._cut[tensor] >= 0)
        shape[cut, self._cut[tensor][cut]] //= self.strategy.tp
        layers = [min(self._bounds[stage].intersection(self._model.tensors[row].layers), default=-1) for row in chosen]
        tied = [place for place, row in enumerate(chosen) if len(self._model.tensors[row].layers) > 1]
        order = list(range(len(chosen)))
        for place in tied if self.strategy.pp > 1 else ():
            order.remove(place)
            before = [at for at, other in enumerate(order) if layers[other] < layers[place]]
            order.insert(before[-1] + 1 if before else 0, place)
        trained = np.flatnonzero(self._is_trained[tensor])
        return _Part(tensor, shape, shape.prod(axis=1), trained, np.asarray(order, dtype=np.int64))

    def _trained_order(self, part: _Part) -> np.ndarray:
        """Return the parameters of the optimizer in its order: sharding V1 sorts them by size, the largest first."""
        if self.strategy.kind != "v1" or self.strategy.sharding == 1:
            return part.trained
        return part.trained[np.argsort(-part.size[part.trained], kind="stable")]

    def _find_owned(self, stage: int, expert_place: int, member: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what a member of the sharding group owns: flattened ranges of local boxes, two int64 ``[t]``."""
        part, kind, degree = self._part(stage, expert_place), self.strategy.kind, self.strategy.sharding
        begin, end = np.zeros(len(part.size), dtype=np.int64), part.size.copy()
        if kind in ("v1", "stage2"):
            # V1 gives the largest first, stage 2 in order: each to the rank that has least so far.
            trained = self._trained_order(part)
            others = trained[_least_loaded(part.size[trained].tolist(), degree) != member]
            end[others] = 0
        elif kind == "v2":
            found = self._buffer_ranges(part, member)
            begin[part.trained], end[part.trained] = found
        elif kind == "stage3":
            sliced = np.flatnonzero(part.size > self._model.segment_size)
            for row in sliced.tolist():
                itemsize = dtype_of(self._model.tensors[part.tensor[row]].dtype).itemsize
                each = math.ceil(aligned(int(part.size[row]), itemsize, self._model.alignment) / degree)
                begin[row], end[row] = (min(part.size[row], each * at) for at in (member, member + 1))
        return begin, end

    def _buffer_ranges(self, part: _Part, member: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what sharding V2 gives to a member: parameters of one type end to end in buffers, split evenly."""
        degree = self.strategy.sharding
        begin, end = np.zeros((2, len(part.trained)), dtype=np.int64)
        names = [self._model.tensors[row].dtype for row in part.tensor[part.trained].tolist()]
        for dtype in dict.fromkeys(names):
            itemsize = dtype_of(dtype).itemsize
            rows = [row for row, name in enumerate(names) if name == dtype]
            for group in _groups(part.size[part.trained[rows]] * itemsize, BUFFER_BYTES):
                members = np.asarray(rows)[group]
                sizes = part.size[part.trained[members]]
                padded = aligned(sizes, itemsize, self._model.alignment, degree)
                index = np.cumsum(padded) - padded
                each = int(padded.sum()) // degree
                begin[members] = np.clip(each * member - index, 0, sizes)
                end[members] = np.clip(each * (member + 1) - index, 0, sizes)
        return begin, end

    def _rows(
        self, rows: np.ndarray, part: _Part, tp: int, begin: np.ndarray, end: np.ndarray, state: int
    ) -> tuple[np.ndarray, ...]:
        """Return columns of tensors (state 0) or of the states of them; a range that begins at -1 is the whole box."""
        tensor = part.tensor[rows]
        offset = np.zeros((len(rows), self._width), dtype=np.int64)
        cut = np.flatnonzero(self._cut[tensor] >= 0)
        offset[cut, self._cut[tensor][cut]] = part.shape[rows[cut], self._cut[tensor][cut]] * tp
        start = begin[rows]
        stop = np.where(start < 0, NOT_FLATTENED, end[rows])
        key = tensor + state * len(self._model.tensors)
        return (
            key,
            self._dtype_of(tensor, state),
            self._ndim[tensor],
            self._shape[tensor],
            offset,
            part.shape[rows],
            start,
            stop,
        )

    def _scalar_rows(self, tensor: np.ndarray, state: int) -> tuple[np.ndarray, ...]:
        ones, whole = np.ones((len(tensor), self._width), dtype=np.int64), np.full(len(tensor), NOT_FLATTENED)
        key, ndim = tensor + state * len(self._model.tensors), np.ones(len(tensor), dtype=np.int16)
        return key, self._dtype_of(tensor, state), ndim, ones, ones * 0, ones, whole, whole

    def _dtype_of(self, tensor: np.ndarray, state: int) -> np.ndarray:
        if not state:
            return self._dtype[tensor]
        is_master = self._model.states[state - 1].is_master
        name = "float32" if is_master else self._model.state_dtype
        return np.full(len(tensor), self._dtypes.index(name), dtype=np.int16)


def _least_loaded(sizes: Sequence[int], ranks: int) -> np.ndarray:
    """Return which rank each tensor goes to: the one that has least so far, the first of several."""
    loads, owner = [0] * ranks, np.zeros(len(sizes), dtype=np.int64)
    for row, size in enumerate(sizes):
        rank = loads.index(min(loads))
        owner[row] = rank
        loads[rank] += size
    return owner


def _groups(sizes: np.ndarray, limit: int) -> list[np.ndarray]:
    """Return the tensors of each buffer: a buffer is closed when it has reached the limit.

    As ``eager_assign_group_by_size`` does (``EagerGroupBySize`` in paddle/fluid/distributed/collective/reducer.cc).
    """
    groups: list[list[int]] = [[]]
    total = 0
    for row, size in enumerate(sizes.tolist()):
        groups[-1].append(row)
        total += size
        if total >= limit:
            groups.append([])
            total = 0
    return [np.asarray(group) for group in groups if group]
