"""Describe the shards of each rank of a semi-automatic job, without the job.

The rules are those of DistTensors and of ``dist.shard_optimizer``; the catalogs equal those of real ranks.
Tested in tests/planning/test_mesh_layouts.py and tests/semi_auto/test_layouts.py.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator

import numpy as np

from paddle_flexckpt.algebra.rows import all_axes, any_axis
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.planning.job_layout import JobLayout, LayoutLines, Model, ModelTensor, share_buffers
from paddle_flexckpt.planning.meshes import Mesh, Placement, Placements

TENSOR_AXES = ("tp", "mp")
_NO_AXIS = -1


class MeshLayout(JobLayout):
    """The catalogs of a job's ranks, from its mesh and its model."""

    def __init__(self, model: Model, strategy: Mesh) -> None:
        """Check that the mesh fits the model."""
        super().__init__(model)
        self.strategy: Mesh = strategy
        problems = [*self._repeated(), *self._unused()]
        stages = self._stages()
        placed = [self._placements(each, stages) for each in model.tensors]
        for each, placements in zip(model.tensors, placed):
            problems += _misplaced(each, placements)
        states = masters = placed
        stage = strategy.sharding
        if stage in ("stage1", "stage2", "stage3") and not problems:
            axis, wrong = self._sharded_axis(placed)
            problems += wrong
            sharded = list(placed) if wrong else self._with_sharding(placed, axis, problems)
            # Paddle does not shard the states of a tensor whose first extent is 1.
            alone = [each.shape[:1] == (1,) for each in model.tensors]
            masters = [own if skip else new for own, new, skip in zip(placed, sharded, alone)]
            states = sharded
            if stage == "stage3":
                placed = masters = sharded
        if problems:
            raise ValidationError(problems, f"{strategy} does not fit the model")
        dense = [(Placement(),) * len(each) if shape[:1] == (1,) else each for each, shape in self._with_shapes(states)]
        # By tensor and mesh axis: the padded axis that is cut, for the tensor, its states, and its master weight.
        self._cuts = tuple(self._columns(each) for each in (placed, dense, masters))
        only = [[_NO_AXIS if p.only is None else p.only for p in each] for each in placed]
        self._only = np.asarray(only, dtype=np.int64).reshape(len(placed), len(strategy.axes))
        # Mesh axes with stages of a pipeline. A rank's part of a tensor follows from its place on these axes, and on
        # those that cut the tensor.
        has_stages = np.asarray((self._only >= 0).any(axis=0))
        cuts = [(cut >= 0).any(axis=0) for cut in self._cuts]
        self._axes_of = tuple(tuple(map(bool, np.logical_or(each, has_stages))) for each in cuts)
        self._fused_axis = strategy.axes.index("dp") if stage == "fusion" else _NO_AXIS
        used = zip(*self._axes_of)
        self._used = tuple(any(each) or number == self._fused_axis for number, each in enumerate(used))
        # Ranks at different places on these axes have states of other tensors, or other parts of buffers.
        self._axes_of_kinds = self._used if stage == "fusion" else tuple(map(bool, has_stages))
        self._states = functools.lru_cache(maxsize=None)(self._find_states)

    def _with_shapes(self, placed: list[Placements]) -> Iterable[tuple[Placements, tuple[int, ...]]]:
        return zip(placed, (each.shape for each in self._model.tensors))

    def _unused(self) -> list[Problem | str]:
        """Return the placements that fit no tensor."""
        names = [each.name for each in self._model.tensors]
        return [
            Problem("placements fit no tensor", key=glob, expected=f"a glob of names such as {names[:3]}")
            for glob, _ in self.strategy.placements
            if not fnmatch.filter(names, glob)
        ]

    def _stages(self) -> dict[int, int]:
        """Return each layer's index on the axis called pp.

        The split is that of ``dist.parallelize`` by a prefix: the first stages get a layer more if the number does not
        divide (auto_parallel/intermediate/pipeline_parallel.py). Tensors before all layers go to the first stage.
        """
        model = self._model
        if "pp" not in self.strategy.axes or model.layers == 1:
            return {}
        stages = self.strategy.shape[self.strategy.axes.index("pp")]
        counted = sorted(range(model.layers) if model.counted is None else model.counted)
        each, more = divmod(len(counted), stages)
        if not each:
            remedy = "place tensors by @<index>, or take fewer stages"
            problem = Problem(
                "too few layers for the axis pp", expected=stages, got=len(counted), code="FC704", remedy=remedy
            )
            raise ValidationError([problem], f"{self.strategy} does not fit the model")
        ends = [counted[each * stage + min(stage, more) - 1] for stage in range(1, stages)]
        return {layer: sum(layer > end for end in ends) for layer in range(model.layers)}

    def _placements(self, tensor: ModelTensor, stages: dict[int, int]) -> Placements:
        """Return one placement for each axis of the mesh."""
        axes = self.strategy.axes
        for glob, placed in self.strategy.placements:
            if fnmatch.fnmatchcase(tensor.name, glob):
                return (*placed, *(Placement() for _ in axes[len(placed) :]))
        stage = stages.get(tensor.layers[0]) if tensor.layers else None
        # A negative axis counts from the end; Paddle's own placements have no negative axes.
        cut = tensor.tp_axis
        cut = cut + len(tensor.shape) if cut is not None and cut < 0 else cut
        usual = {"pp": Placement(only=stage), **dict.fromkeys(TENSOR_AXES, Placement(cut=cut))}
        return tuple(usual.get(axis, Placement()) for axis in axes)

    def _sharded_axis(self, placed: list[Placements]) -> tuple[int, list[Problem | str]]:
        """Return the mesh axis over which Paddle spreads states, and the problems with it.

        It is the first one, whatever name was given, or the last one along which a tensor is whole:
        ``_set_and_check_sharding_prop_from_param`` in paddle/distributed/auto_parallel/api.py. A mesh of one stage of a
        pipeline has no axis for that.
        """
        of_stages = {number for placements in placed for number, p in enumerate(placements) if p.only is not None}
        axis = next((number for number in range(len(self.strategy.axes)) if number not in of_stages), 0)
        for each, placements in zip(self._model.tensors, placed):
            if not each.is_trained:
                continue
            if placements[axis].cut is not None:
                whole = [number for number, p in enumerate(placements) if p == Placement()]
                axis = whole[-1] if whole else axis
            if placements[axis].cut is not None:
                what = "Paddle shards states over a mesh axis along which each parameter is whole"
                got = f"{each.name} cut along axis {self.strategy.axes[axis]!r}"
                remedy = "place it as R along one axis, or leave sharding= out"
                return axis, [
                    Problem(what, key=each.name, expected="such an axis", got=got, code="FC704", remedy=remedy)
                ]
        name = self.strategy.sharding_axis
        if self.strategy.axes[axis] != name:
            what = "Paddle spreads states over another axis of the mesh than the one that it is given"
            remedy = f"put axis {name!r} first"
            return axis, [Problem(what, expected=name, got=self.strategy.axes[axis], code="FC704", remedy=remedy)]
        return axis, []

    def _with_sharding(self, placed: list[Placements], axis: int, problems: list[Problem | str]) -> list[Placements]:
        """Return placements with one more cut: ``get_placement_with_sharding`` in auto_parallel/sharding.py."""
        found = []
        for each, placements in zip(self._model.tensors, placed):
            cuts = [p.cut for p in placements if p.cut is not None]
            free = [dim for dim in range(len(each.shape)) if dim not in cuts]
            if len(cuts) > 1 and each.is_trained:
                what = "Paddle shards no states of a tensor that is cut along several mesh axes"
                remedy = "cut it along one axis, or leave sharding= out"
                wrong = Problem(
                    what, each.name, expected="one Shard at most", got=_text(placements), code="FC704", remedy=remedy
                )
                problems.append(wrong)
            if free and each.is_trained:
                placements = (*placements[:axis], Placement(cut=free[0]), *placements[axis + 1 :])
            found.append(placements)
        return found

    def _columns(self, placed: list[Placements]) -> np.ndarray:
        """Return the padded axis that each mesh axis cuts, -1 where it cuts none, int64 ``[t, m]``."""
        cuts = np.full((len(placed), len(self.strategy.axes)), _NO_AXIS, dtype=np.int64)
        for row, (placements, shape) in enumerate(self._with_shapes(placed)):
            for number, each in enumerate(placements):
                if each.cut is not None:
                    cuts[row, number] = self._width - len(shape) + each.cut
        return cuts

    def kind(self, rank: int) -> tuple[int, ...]:
        """Return the kind of a rank: ranks of one kind have equal catalogs, but for the rank number."""
        return _reduced(self.strategy.place(rank), self._used)

    def _catalogs(self, ranks: np.ndarray) -> Iterator[Catalog]:
        places = np.stack(self.strategy.place(ranks), axis=1)
        kinds, kind_of = np.unique(np.where(self._axes_of_kinds, places, 0), axis=0, return_inverse=True)
        for number, kind in enumerate(kinds.tolist()):
            some = np.flatnonzero(kind_of.reshape(-1) == number)
            yield self._catalog_at(ranks[some], places[some], tuple(kind))

    def _catalog_at(self, ranks: np.ndarray, places: np.ndarray, kind: tuple[int, ...]) -> Catalog:
        """Return the catalog of ranks that differ only on axes that do not change their kind."""
        lines, begin, end = self._states(kind)
        boxes: dict[int, tuple[np.ndarray, ...]] = {}
        offsets, shapes, flats = [], [], []
        for number in range(len(self._model.states) + 1):
            state = self._model.states[number - 1] if number else None
            tensor = lines.tensor[lines.state == number]
            which = 0 if state is None or self._fused_axis >= 0 else 2 if state.is_master else 1
            if state is not None and state.is_scalar:
                ones = np.ones((len(ranks), len(tensor), self._width), dtype=np.int64)
                offset, shape, is_empty = ones * 0, ones, np.zeros(ones.shape[:2], dtype=bool)
            else:
                boxes[which] = boxes.get(which) or self._boxes(which, places)
                offset, shape, is_empty = (column.take(tensor, axis=1) for column in boxes[which])
            offsets.append(offset)
            shapes.append(shape)
            flats.append(np.where(is_empty, 0, NOT_FLATTENED))
        box = tuple(np.concatenate(each, axis=1).reshape(-1, self._width) for each in (offsets, shapes))
        start = stop = np.concatenate(flats, axis=1)
        if self._fused_axis >= 0:
            is_range = (lines.state > 0) & ~lines.is_scalar
            start, stop = np.where(is_range, begin, start), np.where(is_range, end, stop)
        line = np.tile(np.arange(len(lines.tensor)), len(ranks))
        rank = np.repeat(ranks, len(lines.tensor))
        return self._catalog_of(lines, line, rank, box, (start.reshape(-1), stop.reshape(-1)))

    def _is_here(self, places: np.ndarray) -> np.ndarray:
        """Return bool ``[p, t]``: whether the stage of ranks at a place has a tensor."""
        return all_axes((self._only < 0) | (self._only == places[:, None]))

    def _find_states(self, kind: tuple[int, ...]) -> tuple[LayoutLines, np.ndarray, np.ndarray]:
        """Return a line for each tensor and state of a kind of ranks, and the states' ranges under tensor fusion."""
        everything = np.arange(len(self._model.tensors))
        rows = np.flatnonzero(self._is_trained & self._is_here(np.asarray([kind]))[0])
        begin, end = np.zeros((2, len(everything)), dtype=np.int64)
        if self._fused_axis >= 0:
            names = [self._model.tensors[row].dtype for row in rows.tolist()]
            first = {name: number for number, name in enumerate(dict.fromkeys(names))}
            order = np.argsort([first[name] for name in names], kind="stable").astype(np.int64)
            rows, names = rows[order], [names[number] for number in order.tolist()]
            _, shape, is_empty = (column[0] for column in self._boxes(0, np.asarray([kind])))
            size = np.where(is_empty, 0, shape.prod(axis=1))[rows]
            degree, member = self.strategy.shape[self._fused_axis], kind[self._fused_axis]
            shares = share_buffers(size, names, self._model.alignment, degree)
            begin[rows], end[rows] = shares.ranges(np.asarray(member))
            rows = rows[end[rows] > begin[rows]]
        lines = self._lines(everything, rows)
        return lines, begin[lines.tensor], end[lines.tensor]

    def _boxes(self, which: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return offset and shape of each tensor's part at places, and whether the part is empty.

        Each mesh axis cuts the part that the axis before it has left, as in ``nested_piece`` of
        ``algebra.boxes``, here in columns. An empty part has the box of the whole tensor. The columns are
        ``[p, t, d]``, ``[p, t, d]`` and ``[p, t]``.
        """
        # Ranks along a mesh axis have equal parts of a tensor that it does not cut.
        places, of = np.unique(np.where(self._axes_of[which], places, 0), axis=0, return_inverse=True)
        shape = np.repeat(self._shape[None], len(places), axis=0)
        offset = np.zeros_like(shape)
        for cut, extent, index in zip(self._cuts[which].T, self.strategy.shape, places.T):
            rows = np.flatnonzero(cut >= 0)
            axis = cut[rows]
            size = shape[:, rows, axis]
            each = -(-size // extent)
            begin = np.minimum(each * index[:, None], size)
            offset[:, rows, axis] += begin
            shape[:, rows, axis] = np.minimum(each, size - begin)
        is_empty = ~self._is_here(places) | any_axis((shape == 0) & (self._shape > 0))
        offset = np.where(is_empty[:, :, None], 0, offset)
        shape = np.where(is_empty[:, :, None], self._shape, shape)
        of = of.reshape(-1)
        return offset.take(of, axis=0), shape.take(of, axis=0), is_empty.take(of, axis=0)


def _misplaced(tensor: ModelTensor, placements: Placements) -> list[Problem | str]:
    return [
        Problem("a placement cuts along no axis", tensor.name, expected=f"an axis of {list(tensor.shape)}", got=each)
        for each in placements
        if each.cut is not None and not 0 <= each.cut < len(tensor.shape)
    ]


def _reduced(place: tuple[int, ...], used: tuple[bool, ...]) -> tuple[int, ...]:
    """Return a place, with 0 on each axis that does not matter."""
    return tuple(index if matters else 0 for index, matters in zip(place, used))


def _text(placements: Placements) -> str:
    return ",".join(map(str, placements))
