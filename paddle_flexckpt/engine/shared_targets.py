"""Memory that several targets of a rank share: tied ones are filled once, others would overwrite each other.

Tested in tests/engine/test_shared_targets.py and tests/live/test_shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.engine.targets import Targets


def share_memory(
    targets: Targets, names: Mapping[int, str], mapping: TensorMapping | None
) -> tuple[list[int], dict[int, int]]:
    """Sort out tied targets: which rows to fill, and which of these only to compare with an earlier one.

    ``names`` has, by row that is to be filled, the key of the source, or of what statements make, that fills it.

    Raises:
        ValidationError: Targets share memory without being the same part of a tensor.
    """
    map_rows = {} if mapping is None else mapping.maps.rows_by_target()

    def made_of(row: int) -> object:
        """Equal for targets that get the same values: their source's name, or what a mapping says of them."""
        name = names[row]
        if mapping is None or name not in mapping.tensors:
            return name
        own = map_rows.get(name, slice(0, 0))
        maps = mapping.maps.take(np.arange(own.start, own.stop))
        columns = (maps.source, maps.target_offset, maps.target_shape, maps.source_offset, maps.target_axis)
        moved = tuple(column.tobytes() for column in columns)
        return mapping.tensors[name], moved, tuple(mapping.regions.get(name, ()))

    seen: dict[object, list[int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    keep, same_memory = [], {}
    for row in names:
        place = targets.places[row]
        if place is None:
            keep.append(row)
            continue
        earlier = seen.setdefault(place, [])
        if any(made_of(row) == made_of(other) for other in earlier):
            continue  # the same memory from the same source: filled already
        if earlier:
            same_memory[row] = earlier[0]
        else:
            spans[row] = place[0]
        earlier.append(row)
        keep.append(row)
    _refuse_overlaps(targets, spans)
    return keep, same_memory


def _refuse_overlaps(targets: Targets, spans: Mapping[int, tuple[int, int]]) -> None:
    """Raise ValidationError if a target shares memory with another that is not the very same part of a tensor.

    ``spans`` has first and last address (exclusive) by row, of one of the targets that are the same part of one memory.
    """
    rows = np.fromiter(spans, dtype=np.int64, count=len(spans))
    begin, end = np.asarray(list(spans.values()), dtype=np.int64).reshape(-1, 2).T
    order = np.lexsort((end, begin))
    rows, begin, end = rows[order], begin[order], end[order]
    problems, catalog, overlap = [], targets.catalog, targets.memory.overlap
    # Most targets begin where all earlier ones have ended.
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
                    remedy="clone one of the two, or load them in two calls",
                )
            )
    if problems:
        raise ValidationError(problems)
