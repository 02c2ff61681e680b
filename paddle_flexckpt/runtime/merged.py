"""load_merged_state_dict: a checkpoint as whole tensors in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.runtime.communicator import SoloCommunicator
from paddle_flexckpt.runtime.loader import load_state_dict, refuse_aoa
from paddle_flexckpt.runtime.state import EXTRA_STATE
from paddle_flexckpt.storage import CheckpointDirectory


def load_merged_state_dict(
    path: str | os.PathLike[str],
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: dict[str, Any] | None = None,
    safetensors: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint into whole, fresh tensors on the CPU; no other rank takes part.

    Args:
        path: The checkpoint's directory.
        prefix: Only keys that start with this and a dot, which are taken off; by default all keys but a run's extra
            state.
        unique_id: The checkpoint's id; None takes the highest.
        offload: Accepted for compatibility: the tensors are on the CPU always.
        aoa_config: Not available yet; anything but None is an error.
        safetensors: Accepted for compatibility.

    Returns:
        Names to Paddle tensors, sorted by name.

    Raises:
        ValidationError: There is no such checkpoint.
        CorruptCheckpointError: It is damaged.
    """
    refuse_aoa(aoa_config)
    manifest = CheckpointDirectory(os.fspath(path)).read_manifest(unique_id)
    catalog = manifest.catalog
    start = f"{prefix}." if prefix else ""
    names = [key for key in catalog.keys if key.startswith(start) and (start or not key.startswith(EXTRA_STATE))]
    tensors = empty_tensors(catalog, names)
    load_state_dict(tensors, path, SoloCommunicator(), unique_id=manifest.unique_id)
    return {name[len(start) :]: tensors[name] for name in sorted(tensors)}


def empty_tensors(catalog: Catalog, names: Iterable[str]) -> dict[str, Any]:
    """A fresh tensor on the CPU for each of some keys of a checkpoint, of its whole shape."""
    import paddle

    wanted = set(names)
    tensors = {}
    keys, first_rows = np.unique(catalog.key, return_index=True)
    for key, row in zip(keys.tolist(), first_rows.tolist()):
        if catalog.keys[key] in wanted:
            shape = list(catalog.unpadded(row, catalog.global_shape))
            with paddle.no_grad():
                tensors[catalog.keys[key]] = paddle.empty(shape, dtype=catalog.dtype_name(row)).cpu()
    return tensors
