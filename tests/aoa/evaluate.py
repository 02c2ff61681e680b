"""A compiled program carried out on numpy arrays: what it moves by pieces, what it computes box by box."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.algebra import Box, flat_range_to_boxes
from paddle_flexckpt.aoa.element_maps import TensorMapping
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.planning.matching import ShardMatcher
from tests.property.layouts import Shard


def intersection(low: Sequence[int], shape: Sequence[int], box: Box) -> Box | None:
    """The common box, if it has elements."""
    first = [max(a, b) for a, b in zip(low, box.offset)]
    stop = [min(a + n, b) for a, n, b in zip(low, shape, box.stop)]
    extents = tuple(b - a for a, b in zip(first, stop))
    return Box(tuple(first), extents) if min(extents, default=1) > 0 else None


def turned(array: np.ndarray, target_axis: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """An array whose axes run along the given axes of a box, as an array of the box's shape."""
    order = sorted(range(array.ndim), key=lambda axis: (target_axis[axis] >= 0, target_axis[axis]))
    return array.transpose(order).reshape(tuple(shape))


class Evaluator:
    """Evaluates any box of anything that a mapping defines, from the whole source arrays."""

    def __init__(self, mapping: TensorMapping, source: dict[str, np.ndarray]) -> None:
        self.mapping, self.source = mapping, source
        maps = mapping.maps
        self.rows: dict[str, list[tuple]] = {}
        for row in range(len(maps)):
            self.rows.setdefault(maps.targets[maps.target[row]], []).append(
                (
                    maps.sources[maps.source[row]],
                    maps.target_offset[row].tolist(),
                    maps.target_shape[row].tolist(),
                    maps.source_offset[row].tolist(),
                    maps.target_axis[row].tolist(),
                )
            )

    def box(self, name: str, box: Box) -> np.ndarray:
        """A box of a defined name (an operand, say)."""
        info = self.mapping.tensors[name]
        out = np.zeros(box.shape, dtype=np.dtype(info.dtype))
        count = np.zeros(box.shape, dtype=np.int64)
        width = self.mapping.maps.width
        pad = width - len(box.shape)
        wide = Box((*(0,) * pad, *box.offset), (*(1,) * pad, *box.shape))
        wide_out, wide_count = out.reshape(wide.shape), count.reshape(wide.shape)
        for source, offset, shape, source_offset, axes in self.rows.get(name, []):
            common = intersection(offset, shape, wide)
            if common is None:
                continue
            array = self.source[source]
            array = array.reshape((*(1,) * (width - array.ndim), *array.shape))
            low = [s + (common.offset[t] - offset[t] if t >= 0 else 0) for s, t in zip(source_offset, axes)]
            extents = [common.shape[t] if t >= 0 else 1 for t in axes]
            block = array[tuple(slice(a, a + n) for a, n in zip(low, extents))]
            window = tuple(slice(a - b, a - b + n) for a, b, n in zip(common.offset, wide.offset, common.shape))
            wide_out[window] = turned(block, axes, common.shape).astype(out.dtype)
            wide_count[window] += 1
        kept = self.compute(name, box, out, count)
        if kept.any() or (count != 1).any():
            raise AssertionError(f"operand {name}: elements are filled {np.unique(count)} times, kept: {kept.any()}")
        return out

    def compute(self, name: str, box: Box, out: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Computes what a box has of regions into ``out``, counts it, and returns where elements are kept."""
        kept = np.zeros(box.shape, dtype=bool)
        for region in self.mapping.regions.get(name, ()):
            common = intersection(region.offset, region.shape, box)
            if common is None:
                continue
            window = tuple(slice(a - b, a - b + n) for a, b, n in zip(common.offset, box.offset, common.shape))
            if region.node is None:
                kept[window] = True
                continue
            node = self.mapping.nodes[region.node]
            axes = region.target_axis
            low = tuple(
                s + (common.offset[t] - region.offset[t] if t >= 0 else 0) for s, t in zip(region.node_offset, axes)
            )
            inner = Box(low, tuple(common.shape[t] if t >= 0 else 1 for t in axes))
            boxes = node.step.operand_boxes(inner)
            result = node.step.run(inner, [self.box(n, b) for n, b in zip(node.operands, boxes)])
            if result.shape != inner.shape:
                raise AssertionError(f"{name}: a step gave {result.shape} for {inner}")
            result = result.astype(np.dtype(node.info.dtype))
            out[window] = turned(result, axes, common.shape).astype(out.dtype)
            count[window] += 1
        return kept


def carry_out(
    mapping: TensorMapping,
    source: tuple[Catalog, Sequence[Shard]],
    target: tuple[Catalog, Sequence[Shard]],
    values: dict[str, np.ndarray],
    storages: list[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Fills target shards.

    Args:
        mapping: The compiled program.
        source: Catalog and shards.
        target: Catalog and shards.
        values: Whole source arrays.
        storages: The memory of every target shard, flat.

    Returns:
        How often each element was written, which elements are kept, and how many elements were moved.
    """
    memory = [shard.of(values[shard.key]) for shard in source[1]]
    written = [np.zeros(storage.size, dtype=np.int64) for storage in storages]
    pieces = ShardMatcher(source[0]).match(target[0], maps=mapping.maps)
    for i, copy in enumerate(pieces.copies()):
        into = int(pieces.target[i])
        moved = copy.gather_from(memory[int(pieces.source[i])])
        copy.scatter_into(storages[into])[...] = moved.astype(storages[into].dtype)
        copy.scatter_into(written[into])[...] += 1
    evaluator = Evaluator(mapping, values)
    kept = [np.zeros(storage.size, dtype=bool) for storage in storages]
    for row, shard in enumerate(target[1]):
        if not mapping.regions.get(shard.key):
            continue
        whole = shard.flat is None
        low, high = (0, shard.size) if whole else shard.flat
        # The shard's elements box by box, as they lie in its storage.
        at = 0
        boxes = [Box((0,) * len(shard.shape), shard.shape)] if whole else flat_range_to_boxes(shard.shape, low, high)
        for part in boxes:
            place = slice(at, at + part.size)
            at += part.size
            box = Box(tuple(a + b for a, b in zip(shard.offset, part.offset)), part.shape)
            out, count = storages[row][place].reshape(box.shape), written[row][place].reshape(box.shape)
            kept[row][place] = evaluator.compute(shard.key, box, out, count).reshape(-1)
    return written, kept, int(pieces.size.sum())
