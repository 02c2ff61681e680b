"""The common part of all kinds of layouts: columns of a model's tensors, catalogs of rows, buffers.

Tested in tests/planning/test_layouts.py and tests/planning/test_mesh_layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, concat, dtype_of
from paddle_flexckpt.optimizer_states import ADAM, MASTER, SCALARS
from paddle_flexckpt.planning.strategy import aligned

# Bytes of the alignment of each parameter on a device: `alignment` in
# paddle/distributed/fleet/utils/tensor_fusion_helper.py.
ALIGNMENT = 256
# Stage 3 cuts parameters of more elements (`segment_size` of group_sharded_parallel); its alignment on a CPU is 4,096.
SEGMENT_SIZE = 1 << 20
# Bytes of a buffer of sharding V2: `comm_buffer_size_MB`.
BUFFER_BYTES = 256 << 20
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a model.

    Attributes:
        name: Its structured name.
        shape: Global shape, in elements.
        dtype: Name of the element type.
        tp_axis: The axis along which tensor parallelism cuts it; None: each rank has all of it.
        layers: The positions of its layers in the description of the model, by which a pipeline is cut; several where
            it is tied. Empty: every stage has it.
        is_trained: Whether the optimizer has it.
        expert: Number of its expert and of all experts of the layer, for a tensor that expert parallelism spreads.
        lacks: Suffixes of states that the optimizer does not have of it: Muon has one momentum of a matrix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tp_axis: int | None = None
    layers: tuple[int, ...] = ()
    is_trained: bool = True
    expert: tuple[int, int] | None = None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """One state that an optimizer has of each parameter.

    Attributes:
        suffix: What follows the parameter's name and a dot.
        is_scalar: Whether it is one number, of the shape [1]; otherwise it has the parameter's shape.
        is_master: Whether it is the master weight, which only parameters in half precision have.
    """

    suffix: str
    is_scalar: bool = False
    is_master: bool = False


ADAMW = (*(State(f"{name}_0", is_scalar=name in SCALARS) for name in ADAM), State(MASTER, is_master=True))


@dataclass(frozen=True)
class Model:
    """A model and the states of its optimizer.

    Attributes:
        tensors: All tensors, in the order in which the optimizer was given them.
        layers: How many layers the description of the pipeline has.
        counted: The layers that stages share evenly; None: all (see :func:`~.strategy.stage_layers`).
        states: The optimizer's states of each trained parameter; empty: no optimizer.
        state_dtype: Element type of these states.
        segment_size: Stage 3 cuts parameters with more elements.
        alignment: Bytes to which stage 3 and sharding V2 pad each parameter.
    """

    tensors: tuple[ModelTensor, ...]
    layers: int = 1
    counted: frozenset[int] | None = None
    states: tuple[State, ...] = ADAMW
    state_dtype: str = "float32"
    segment_size: int = SEGMENT_SIZE
    alignment: int = ALIGNMENT


class _Ranks(Protocol):
    """The number of ranks of a job; its text is what a user would write."""

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""


@dataclass(frozen=True, eq=False)
class LayoutLines:
    """Tensors and states that ranks may have parts of, a line for each, in columns.

    Attributes:
        tensor: Number of the tensor, or of a state's tensor, int64 ``[k]``.
        state: Number of the state, from 1, int64 ``[k]``; 0: the tensor itself.
        is_scalar: Whether it is a state of one number, bool ``[k]``.
        key: Number of its name, int32 ``[k]``.
        dtype: Number of its type, int16 ``[k]``.
        ndim: Its axes, int16 ``[k]``.
        global_shape: Its extents, int64 ``[k, d]``.
    """

    tensor: np.ndarray
    state: np.ndarray
    is_scalar: np.ndarray
    key: np.ndarray
    dtype: np.ndarray
    ndim: np.ndarray
    global_shape: np.ndarray


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of a group's members in parameters that lie end to end in buffers; int64 ``[n]`` each.

    Attributes:
        size: Elements of a parameter.
        index: Its first element in its buffer.
        each: Elements of this buffer that one member gets.
    """

    size: np.ndarray
    index: np.ndarray
    each: np.ndarray

    def ranges(self, member: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranges of members, int64 ``[m, n]`` twice, for numbers that broadcast to ``[m, n]``."""
        first = self.each * member - self.index
        return np.clip(first, 0, self.size), np.clip(first + self.each, 0, self.size)


class JobLayout:
    """The catalogs of a job's ranks; the base of all kinds of layouts.

    Attributes:
        strategy: The strategy.
        keys: Names of all tensors and states of the job.
    """

    strategy: _Ranks

    def __init__(self, model: Model) -> None:
        """Convert the model's tensors to columns."""
        self._model = model
        count, width = len(model.tensors), max((len(each.shape) for each in model.tensors), default=1) or 1
        self._width = width
        self._ndim = np.asarray([len(each.shape) for each in model.tensors], dtype=np.int16)
        self._shape = np.ones((count, width), dtype=np.int64)
        for row, each in enumerate(model.tensors):
            self._shape[row, width - len(each.shape) :] = each.shape
        self._is_trained = np.asarray([each.is_trained for each in model.tensors], dtype=bool)
        kept = [[state.suffix not in each.lacks for each in model.tensors] for state in model.states]
        self._is_kept = np.asarray(kept, dtype=bool).reshape(len(model.states), count)
        self._is_half = np.asarray([each.dtype in _HALF for each in model.tensors], dtype=bool)
        self._dtypes = tuple(dict.fromkeys([*(each.dtype for each in model.tensors), model.state_dtype, "float32"]))
        self._dtype = np.asarray([self._dtypes.index(each.dtype) for each in model.tensors], dtype=np.int16)
        states = [f"{each.name}.{state.suffix}" for state in model.states for each in model.tensors]
        self.keys = (*(each.name for each in model.tensors), *states)

    def kind(self, rank: int) -> tuple[int, ...]:
        """Return the kind of a rank: ranks of one kind have equal catalogs, but for the rank number."""
        raise NotImplementedError

    def catalog(self, rank: int) -> Catalog:
        """Return a rank's catalog: first the model's tensors, then the states, state by state."""
        return self.catalogs([rank])

    def catalogs(self, ranks: Sequence[int]) -> Catalog:
        """Return the catalogs of several ranks in one table, one after the other."""
        numbers = np.asarray(ranks, dtype=np.int64)
        found = concat([*self._catalogs(numbers)])
        place = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
        place[numbers] = np.arange(len(numbers))
        place = place[found.rank]
        return found if (place[1:] >= place[:-1]).all() else found.take(np.argsort(place, kind="stable"))

    def _catalogs(self, ranks: np.ndarray) -> Iterator[Catalog]:
        """Yield catalogs of ranks, one for all ranks with parts of the same tensors."""
        raise NotImplementedError

    @property
    def held(self) -> np.ndarray:
        """Return bool per key: whether some rank has a part of it."""
        states = [self._is_trained & self._has_state(number) for number in range(len(self._model.states))]
        return np.concatenate([np.ones(len(self._is_trained), dtype=bool), *states])

    def _has_state(self, number: int) -> np.ndarray:
        """Return bool ``[t]``: whether a tensor has a state, if it is trained."""
        return self._is_kept[number] & (self._is_half | (not self._model.states[number].is_master))

    def _repeated(self) -> list[Problem | str]:
        """Return the names that several tensors have."""
        names = [each.name for each in self._model.tensors]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        return [Problem("two tensors have one name", key=name) for name in repeated]

    def _lines(self, tensor: np.ndarray, trained: np.ndarray) -> LayoutLines:
        """Return a line for each of some tensors, and for each state of those that are trained, state by state."""
        chosen = [tensor]
        chosen += [trained[self._has_state(number)[trained]] for number in range(len(self._model.states))]
        row = np.concatenate(chosen)
        number = np.repeat(np.arange(len(chosen)), [len(each) for each in chosen])
        states = self._model.states
        is_scalar = np.asarray([False, *(state.is_scalar for state in states)])[number]
        types = ["float32" if state.is_master else self._model.state_dtype for state in states]
        of_state = np.asarray([0, *map(self._dtypes.index, types)], dtype=np.int16)[number]
        return LayoutLines(
            tensor=row,
            state=number,
            is_scalar=is_scalar,
            key=(row + number * len(self._model.tensors)).astype(np.int32),
            dtype=np.where(number > 0, of_state, self._dtype[row]),
            ndim=np.where(is_scalar, np.int16(1), self._ndim[row]),
            global_shape=np.where(is_scalar[:, None], 1, self._shape[row]),
        )

    def _catalog_of(
        self,
        lines: LayoutLines,
        line: np.ndarray,
        rank: np.ndarray,
        boxes: tuple[np.ndarray, ...],
        flat: tuple[np.ndarray, ...],
    ) -> Catalog:
        """Return a row for each of some lines: its rank, offset and shape of its box, and its flattened range."""
        count = len(line)
        return Catalog(
            keys=self.keys,
            dtypes=self._dtypes,
            files=(),
            key=lines.key[line],
            dtype=lines.dtype[line],
            ndim=lines.ndim[line],
            global_shape=lines.global_shape[line],
            offset=boxes[0],
            shape=boxes[1],
            flat_start=flat[0],
            flat_stop=flat[1],
            rank=rank.astype(np.int32),
            file=np.full(count, -1, dtype=np.int32),
            byte_offset=np.zeros(count, dtype=np.int64),
        )


def share_buffers(sizes: np.ndarray, dtypes: Sequence[str], alignment: int, degree: int) -> Shares:
    """Share out parameters that lie end to end in buffers, each split evenly.

    Args:
        sizes: Elements of each parameter, int64 ``[n]``.
        dtypes: Their types; a buffer has parameters of one.
        alignment: Bytes to which each parameter is padded, for each of the ranks.
        degree: Ranks that share the buffers.
    """
    index, each = np.zeros((2, len(sizes)), dtype=np.int64)
    for dtype in dict.fromkeys(dtypes):
        itemsize = dtype_of(dtype).itemsize
        rows = np.asarray([row for row, name in enumerate(dtypes) if name == dtype])
        for group in _groups(sizes[rows] * itemsize, BUFFER_BYTES):
            members = rows[group]
            padded = aligned(sizes[members], itemsize, alignment, degree)
            index[members] = np.cumsum(padded) - padded
            each[members] = int(padded.sum()) // degree
    return Shares(sizes, index, each)


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
