"""Describe the shards of each rank of a job, without the job: one catalog for each rank.

The rules are those of Paddle's own wrappers, named at each rule; the catalogs equal those of real ranks.
Tested in tests/planning/test_layouts.py and tests/distributed/test_layouts.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.planning.job_layout import (
    ADAMW,
    JobLayout,
    LayoutLines,
    Model,
    ModelTensor,
    Shares,
    State,
    share_buffers,
)
from paddle_flexckpt.planning.strategy import Strategy, aligned, stage_layers

__all__ = ["ADAMW", "JobLayout", "Layout", "Model", "ModelTensor", "State"]

# The most degrees that a remedy lists.
_DEGREES = 16


@dataclass(frozen=True)
class _Part:
    """A rank's part of the model before its optimizer is sharded, in columns.

    Attributes:
        tensor: Which tensors, int64 ``[t]``.
        shape: Extents of the local boxes, int64 ``[t, d]``, padded on the left.
        size: Elements of these, int64 ``[t]``.
        trained: Positions in ``tensor`` of those that the optimizer has, in the order in which it gets their states.
        has_expert_color: For each of these, whether sharding V2 puts it into the buffers of experts.
        order: Positions in ``tensor`` in the order of the model's state: a tied tensor is at the place of its layer.
    """

    tensor: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    trained: np.ndarray
    has_expert_color: np.ndarray
    order: np.ndarray


@dataclass(frozen=True, eq=False)
class _Shared:
    """The shares of ranks in a part, in columns.

    Attributes:
        shares: Each member's share of each tensor.
        ranks: Number of neighbours in the sharding group with the same share of a tensor, int64 ``[t]``.
        lines: Tensors and states of the ranks.
        row: The tensor of each line, as numbered in the part, int64 ``[k]``.
        shape: Extents of their local boxes, int64 ``[k, d]``.
        step: Distance between the boxes of neighbours in tensor parallelism, int64 ``[k, d]``.
        size: Elements of the tensors' boxes, int64 ``[k]``.
        is_box: Whether it is stored as a box even if a rank owns only a part, bool ``[k]``.
        may_be_box: Whether it is stored as a box if a rank owns all of it, bool ``[k]``.
    """

    shares: Shares
    ranks: np.ndarray
    lines: LayoutLines
    row: np.ndarray
    shape: np.ndarray
    step: np.ndarray
    size: np.ndarray
    is_box: np.ndarray
    may_be_box: np.ndarray


class Layout(JobLayout):
    """The catalogs of a job's ranks, from its strategy and its model."""

    def __init__(self, model: Model, strategy: Strategy) -> None:
        """Check that the strategy can cut the model."""
        super().__init__(model)
        self.strategy: Strategy = strategy
        # A single rank has its optimizer for itself.
        self._kind = strategy.kind if strategy.sharding > 1 else "none"
        self._check()
        self._stages = stage_layers(strategy, model.layers, model.counted)
        self._bounds = [frozenset(stage) for stage in self._stages]
        # The padded axis that tensor parallelism cuts, or -1.
        self._cut = np.full(len(model.tensors), -1, dtype=np.int64)
        for row, each in enumerate(model.tensors):
            if each.tp_axis is not None and self._cuts(each):
                self._cut[row] = self._width - len(each.shape) + each.tp_axis % len(each.shape)
        # The tensors that Muon updates as whole matrices.
        lacking = [bool(each.lacks) and self._kind == "muon" for each in model.tensors]
        self._is_matrix = np.asarray(lacking, dtype=bool)
        self._is_expert = np.asarray([each.expert is not None for each in model.tensors], dtype=bool)
        self._part = functools.lru_cache(maxsize=None)(self._find_part)
        self._shared = functools.lru_cache(maxsize=None)(self._find_shared)

    def _cuts(self, tensor: ModelTensor) -> bool:
        """Return whether tensor parallelism cuts a tensor that has an axis for it."""
        over_experts = tensor.expert is not None and self.strategy.experts == "tp" and self.strategy.ep > 1
        return self.strategy.tp > 1 and not over_experts

    def _check(self) -> None:
        strategy, problems = self.strategy, self._repeated()
        for each in self._model.tensors:
            if each.tp_axis is not None and not -len(each.shape) <= each.tp_axis < len(each.shape):
                axes = f"an axis of {list(each.shape)}"
                problems.append(
                    Problem("tensor parallelism cuts along no axis", each.name, expected=axes, got=each.tp_axis)
                )
            if each.expert is not None and not 0 <= each.expert[0] < each.expert[1]:
                expected = f"a number from 0 to {each.expert[1] - 1}"
                problems.append(Problem("there is no such expert", each.name, expected=expected, got=each.expert[0]))
        problems += [] if problems else [*self._uneven(), *self._uneven_experts()]
        if self._kind == "muon" and self._model.states and not any(each.lacks for each in self._model.tensors):
            remedy = "take the model of a checkpoint that Muon has trained (--model), or sharding=v2"
            problems.append(Problem("nothing says which parameters are Muon's matrices", code="FC704", remedy=remedy))
        first = next((each.name for each in self._model.tensors if each.expert is not None and each.is_trained), None)
        if first is not None and self._kind != "none" and strategy.expert_stride != 1:
            problems += self._mixed_experts(first)
        if problems:
            raise ValidationError(problems, f"{strategy} does not fit the model")

    def _uneven(self) -> list[Problem | str]:
        """Return why tensor parallelism does not cut all tensors evenly."""
        degree = self.strategy.tp
        extents = [
            (each, each.shape[each.tp_axis])
            for each in self._model.tensors
            if each.tp_axis is not None and self._cuts(each)
        ]
        return _undivided(
            "tensor parallelism cannot cut a tensor evenly",
            extents,
            ("tp", degree),
            lambda first: (f"a multiple of tp={degree} along axis {first.tp_axis}", f"shape {list(first.shape)}"),
        )

    def _uneven_experts(self) -> list[Problem | str]:
        """Return why experts cannot be spread evenly."""
        degree, counts = self.strategy.ep, [(each, each.expert[1]) for each in self._model.tensors if each.expert]
        return _undivided(
            "experts cannot be spread evenly",
            counts,
            ("ep", degree),
            lambda first: (
                f"a number of experts that ep={degree} divides",
                f"{first.expert[1] if first.expert else 0} experts",
            ),
        )

    def _mixed_experts(self, name: str) -> list[Problem | str]:
        """Return why experts cannot be spread over ranks that share an optimizer; the text names an expert."""
        strategy, remedy = self.strategy, "spread experts over dp alone, ep=dp:DEGREE, or leave the sharding out"
        if self._kind not in ("v2", "muon"):
            # See check_experts() in parallel/experts.py.
            what = "experts are sharded among ranks that hold others: Paddle trains these as if they were one"
            remedy = f"sharding=v2:{strategy.sharding}, with experts' parameters of a color of their own; or {remedy}"
            return [
                Problem(
                    what, name, expected="sharding v2, or ep=dp:DEGREE", got=str(strategy), code="FC704", remedy=remedy
                )
            ]
        if not strategy.expert_stride:
            what = "ranks that share an optimizer cannot hold each expert equally often"
            expected = f"ep to divide sharding = {strategy.sharding}, or to be more"
            return [Problem(what, name, expected=expected, got=str(strategy), code="FC704", remedy=remedy)]
        return []

    def kind(self, rank: int) -> tuple[int, ...]:
        """Return the kind of a rank: ranks of one kind have equal catalogs, but for the rank number."""
        place = self.strategy.place(rank)
        member = place.sharding if self._kind == "stage3" or (self._kind != "none" and self._model.states) else 0
        return place.pp, self.strategy.expert_place(place), member, place.tp

    def _catalogs(self, ranks: np.ndarray) -> Iterator[Catalog]:
        place = self.strategy.place(ranks)
        experts = self.strategy.expert_place(place)
        parts, part_of = np.unique(np.stack([place.pp, experts], axis=1), axis=0, return_inverse=True)
        for number, (stage, expert_place) in enumerate(parts.tolist()):
            some = np.flatnonzero(part_of.reshape(-1) == number)
            yield self._catalog_at(ranks[some], self._shared(stage, expert_place), place.sharding[some], place.tp[some])

    def _catalog_at(self, ranks: np.ndarray, shared: _Shared, member: np.ndarray, tp: np.ndarray) -> Catalog:
        """Return the catalog of one part's ranks, by their places in the sharding group and in tensor parallelism."""
        begin, end = shared.shares.ranges(member[:, None] // shared.ranks)
        # A rank without a share of a parameter has none of its states, not even scalars.
        who, line = np.nonzero((shared.lines.state == 0) | (end > begin)[:, shared.row])
        begin, end = begin[who, shared.row[line]], end[who, shared.row[line]]
        is_box = shared.is_box[line] | (shared.may_be_box[line] & (begin == 0) & (end == shared.size[line]))
        flat = np.where(is_box, NOT_FLATTENED, begin), np.where(is_box, NOT_FLATTENED, end)
        boxes = shared.step[line] * tp[who][:, None], shared.shape[line]
        return self._catalog_of(shared.lines, line, ranks[who], boxes, flat)

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
        trained, size = np.flatnonzero(self._is_trained[tensor]), shape.prod(axis=1)
        # Where experts are spread over dp alone, all ranks that share an optimizer hold the same ones.
        has_expert_color = self._is_expert[tensor[trained]] & (self.strategy.ep > 1 and self.strategy.experts != "dp")
        ordered = self._in_order(tensor[trained], size[trained], has_expert_color)
        return _Part(
            tensor, shape, size, trained[ordered], has_expert_color[ordered], np.asarray(order, dtype=np.int64)
        )

    def _in_order(self, tensor: np.ndarray, size: np.ndarray, has_expert_color: np.ndarray) -> np.ndarray:
        """Return the order in which the optimizer gets the states of parameters.

        Sharding V1 sorts them by size, the largest first; V2 by buffer: those of a color together, the color of the
        first one first, and among these by name of dtype. So does MuonShardingOptimizer, and matrices follow by size.
        """
        if self._kind == "v1":
            return np.argsort(-size, kind="stable")
        if self._kind not in ("v2", "muon") or not len(tensor):
            return np.arange(len(tensor))
        names = [self._model.tensors[row].dtype for row in tensor.tolist()]
        places = {name: place for place, name in enumerate(sorted(set(names)))}
        is_matrix, dtype = self._is_matrix[tensor], [places[name] for name in names]
        return np.lexsort((np.where(is_matrix, -size, dtype), has_expert_color != has_expert_color[0], is_matrix))

    def _find_shared(self, stage: int, expert_place: int) -> _Shared:
        """Return the shares of the ranks of a part.

        Sharding V2 shares experts out among those of the group that hold the same ones (``parameter.color``).
        """
        part, degree = self._part(stage, expert_place), self.strategy.sharding
        ranks = np.full(len(part.size), degree, dtype=np.int64)
        index, each = np.zeros(len(part.size), dtype=np.int64), part.size.copy()
        sliced = (part.size > self._model.segment_size) & (self._kind == "stage3")
        names = [self._model.tensors[row].dtype for row in part.tensor.tolist()]
        is_matrix = self._is_matrix[part.tensor]
        if self._kind in ("v1", "stage2"):
            # V1 gives the largest first, stage 2 in order: each to the rank with the least so far.
            index[part.trained] = part.size[part.trained] * _least_loaded(part.size[part.trained].tolist(), degree)
            ranks[part.trained] = 1
        elif self._kind in ("v2", "muon"):
            stride = self.strategy.expert_stride or 1  # 0: there are no experts
            for is_expert, neighbours in ((False, 1), (True, stride)):
                rows, count = part.trained[part.has_expert_color == is_expert], degree // neighbours
                ranks[rows] = neighbours
                # Muon gives whole matrices, the largest first, to the rank with the least so far.
                whole, rows = rows[is_matrix[rows]], rows[~is_matrix[rows]]
                index[whole] = part.size[whole] * _least_loaded(part.size[whole].tolist(), count)
                own = [names[row] for row in rows.tolist()]
                shares = share_buffers(part.size[rows], own, self._model.alignment, count)
                index[rows], each[rows] = shares.index, shares.each
        elif self._kind == "stage3":
            itemsize = np.asarray([dtype_of(name).itemsize for name in names], dtype=np.int64)
            each[sliced] = -(-aligned(part.size, itemsize, self._model.alignment)[sliced] // degree)
            ranks[sliced] = 1
        lines = self._lines(part.tensor[part.order], part.tensor[part.trained])
        number = np.zeros(len(self._shape), dtype=np.int64)
        number[part.tensor] = np.arange(len(part.tensor))
        row = number[lines.tensor]
        shape = np.where(lines.is_scalar[:, None], 1, part.shape[row])
        cut, step = np.where(lines.is_scalar, -1, self._cut[lines.tensor]), np.zeros_like(shape)
        rows = np.flatnonzero(cut >= 0)
        step[rows, cut[rows]] = shape[rows, cut[rows]]
        return _Shared(
            Shares(part.size, index, each),
            ranks,
            lines,
            row,
            shape,
            step,
            part.size[row],
            is_box=lines.is_scalar | ((lines.state == 0) & ~sliced[row]),
            may_be_box=~sliced[row] & (is_matrix[row] | (self._kind not in ("v2", "muon"))),
        )


def _undivided(
    what: str,
    extents: Sequence[tuple[ModelTensor, int]],
    degree: tuple[str, int],
    describe: Callable[[ModelTensor], tuple[str, str]],
) -> list[Problem | str]:
    """Return one problem if a degree does not divide some of the numbers; its remedy has the degrees that do."""
    name, number = degree
    uneven = [each for each, extent in extents if extent % number]
    if not uneven:
        return []
    common = math.gcd(*(extent for _, extent in extents))
    fit = [str(each) for each in range(1, common + 1) if common % each == 0]
    (expected, got), others = describe(uneven[0]), len(uneven) - 1
    more = f", and {others} more tensor{'s' * (others > 1)}" if others else ""
    remedy = f"{name} can be {listed(fit, _DEGREES)}"
    return [Problem(what, uneven[0].name, expected=expected, got=got + more, code="FC704", remedy=remedy)]


def _least_loaded(sizes: Sequence[int], ranks: int) -> np.ndarray:
    """Return the rank of each tensor: the one with the least so far, the first of several."""
    loads, owner = [0] * ranks, np.zeros(len(sizes), dtype=np.int64)
    for row, size in enumerate(sizes):
        rank = loads.index(min(loads))
        owner[row] = rank
        loads[rank] += size
    return owner
