"""Memory shared by several targets of a rank: tied targets are filled once, others would overwrite each other.

Tested in tests/transfer/test_shared_targets.py and tests/memory/test_shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.transfer.targets import Targets


def share_memory(
    targets: Targets, names: Mapping[int, str], mapping: TensorMapping | None
) -> tuple[list[int], dict[int, int]]:
    """Return the rows to fill, and those only to compare with an earlier row of the same memory.

    ``names`` has the key of the source or the mapping by row to fill.

    Raises:
        ValidationError: Targets share memory without being the same part of a tensor, or elements of one do.
    """
    map_rows = {} if mapping is None else mapping.maps.rows_by_target

    def made_of(row: int) -> object:
        """Return a key that is equal for targets with the same values: the source's name, or part of the mapping."""
        name = names[row]
        if mapping is None or name not in mapping.tensors:
            return name
        own = map_rows.get(name, slice(0, 0))
        maps = mapping.maps.take(np.arange(own.start, own.stop))
        columns = (maps.source, maps.target_offset, maps.target_shape, maps.source_offset, maps.target_axis)
        moved = tuple(column.tobytes() for column in columns)
        return mapping.tensors[name], moved, tuple(mapping.regions.get(name, ()))

    rows = np.fromiter(names, dtype=np.int64, count=len(names))
    seen: dict[object, list[int]] = {}
    left_out, same_memory = set(), {}
    # Most targets have memory of their own, and need no check.
    for row in rows[_begin_together(targets.spans[rows])].tolist():
        earlier = seen.setdefault(targets.place(row), [])
        if any(made_of(row) == made_of(other) for other in earlier):
            left_out.add(row)  # the same memory and the same source: filled already
            continue
        if earlier:
            same_memory[row] = earlier[0]
        earlier.append(row)
    keep = [row for row in names if row not in left_out]
    _refuse_overlaps(targets, [row for row in keep if row not in same_memory])
    return keep, same_memory


def _begin_together(spans: np.ndarray) -> np.ndarray:
    """Return bool per span: whether it has elements, and another begins at the same address."""
    _, number, count = np.unique(spans[:, 0], return_inverse=True, return_counts=True)
    return (count[number] > 1) & (spans[:, 0] < spans[:, 1])


def _refuse_overlaps(targets: Targets, chosen: list[int]) -> None:
    """Raise ValidationError if elements of a target share memory, with each other or with another target's.

    ``chosen`` has one of the targets that are the same part of one memory.
    """
    rows = np.asarray(chosen, dtype=np.int64)
    rows = rows[targets.spans[rows, 0] < targets.spans[rows, 1]]
    begin, end = targets.spans[rows].T
    order = np.lexsort((end, begin))
    rows, begin, end = rows[order], begin[order], end[order]
    catalog, overlap = targets.catalog, targets.memory.overlap
    problems = [
        Problem(
            "elements of a target share memory, and one would overwrite another",
            key=catalog.key_name(row),
            rank=int(catalog.rank[row]),
            expected="memory for each element",
            got=f"steps of {list(targets.strides[row])} bytes, along axes of {catalog.unpadded(row, catalog.shape)}",
            remedy="load into a contiguous copy of it, and use that in its place",
        )
        for row in targets.overlapping
        if row in chosen
    ]
    # Most targets begin at or after the end of all earlier ones.
    for place in np.flatnonzero(begin[1:] < np.maximum.accumulate(end)[:-1]).tolist():
        row = int(rows[place + 1])
        earlier = np.flatnonzero(end[: place + 1] > begin[place + 1])[::-1]
        other = next((int(rows[i]) for i in earlier.tolist() if overlap(int(rows[i]), row)), None)
        if other is not None:
            problems.append(
                Problem(
                    "a target shares memory with another, and one would overwrite the other",
                    key=catalog.key_name(row),
                    rank=int(catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of target {catalog.key_name(other)} {catalog.describe(other)}",
                    remedy="load into a clone of one of the two, and use that in its place",
                )
            )
    if problems:
        raise ValidationError(problems)
