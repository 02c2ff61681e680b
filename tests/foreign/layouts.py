"""Load what another program has written into three layouts, and compare bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld


def _cut(whole: np.ndarray, axis: int, rank: int, ranks: int) -> tuple[slice, ...]:
    """A rank's part along an axis: parts differ by one where it is not divisible."""
    if not whole.ndim:
        return ()
    axis %= whole.ndim
    size = whole.shape[axis]
    part = slice(size * rank // ranks, size * (rank + 1) // ranks)
    return tuple(part if each == axis else slice(0, extent) for each, extent in enumerate(whole.shape))


def _flat(whole: np.ndarray, rank: int, ranks: int) -> tuple[int, int]:
    return whole.size * rank // ranks, whole.size * (rank + 1) // ranks


def load_into_three_layouts(path, expected: Mapping[str, np.ndarray]) -> float:
    """Compares every byte; returns bytes read / bytes needed, of the layout where that is the most."""
    most = 0.0
    for name, ranks in (("columns", 2), ("rows", 3), ("flat", 4)):

        def job(comm, name=name, ranks=ranks):
            targets, views = {}, {}
            for key, whole in expected.items():
                if name == "flat" and whole.ndim:
                    begin, end = _flat(whole, comm.position, ranks)
                    if begin == end:
                        continue
                    views[key] = whole.reshape(-1)[begin:end]
                    local = np.zeros(end - begin, dtype=whole.dtype)
                    targets[key] = ShardedWeight(
                        key, local, whole.shape, whole.shape, (0,) * whole.ndim, True, slice(begin, end)
                    )
                    continue
                index = _cut(whole, -1 if name == "columns" else 0, comm.position, ranks)
                views[key] = whole[index]
                if not views[key].size:
                    continue
                offset = tuple(each.start for each in index)
                local = np.zeros(views[key].shape, dtype=whole.dtype)
                targets[key] = ShardedWeight(key, local, local.shape, whole.shape, offset)
            report = load_state_dict(targets, path, comm)
            for key, target in targets.items():
                assert target.local_tensor.tobytes() == np.ascontiguousarray(views[key]).tobytes(), (name, key)
            return report.bytes_read, report.bytes_needed

        read, needed = (sum(column) for column in zip(*SimulatedWorld(ranks).run(job)))
        most = max(most, read / needed)
    return most
