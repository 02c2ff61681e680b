"""Puts whole tensors together from the shards that ranks left, by painting; knows nothing of the library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def assemble(folder: str | Path, ranks: int) -> dict[str, np.ndarray]:
    """Whole tensors by name.

    Raises:
        AssertionError: Two ranks disagree about an element, or nobody has one.
    """
    whole: dict[str, np.ndarray] = {}
    painted: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        arrays = np.load(Path(folder) / f"{rank}.npz")
        for number, (key, global_shape, offset, shape, flat) in enumerate(
            json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
        ):
            values = arrays[str(number)].reshape(-1)
            tensor = whole.setdefault(key, np.zeros(global_shape, values.dtype))
            seen = painted.setdefault(key, np.zeros(global_shape, bool))
            positions = np.arange(tensor.size).reshape(global_shape)
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape))
            mine = positions[box].reshape(-1)
            mine = mine if flat is None else mine[flat[0] : flat[1]]
            assert len(mine) == len(values), f"{key} on rank {rank}: {len(values)} values for {len(mine)} elements"
            before = seen.reshape(-1)[mine]
            agree = tensor.reshape(-1)[mine][before].tobytes() == values[before].tobytes()
            assert agree, f"{key}: rank {rank} and an earlier one disagree"
            tensor.reshape(-1)[mine] = values
            seen.reshape(-1)[mine] = True
    for key, seen in painted.items():
        assert seen.all(), f"{key}: {int((~seen).sum())} of {seen.size} elements are on no rank"
    return whole


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names that only one of the two has, or whose bytes differ."""
    return sorted(k for k in set(a) | set(b) if k not in a or k not in b or a[k].tobytes() != b[k].tobytes())
