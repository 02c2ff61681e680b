"""Put this library behind Paddle's own checkpoint functions, for whoever calls them.

``paddle.distributed.save_state_dict``, ``load_state_dict``, ``load_merged_state_dict``, ``merge_sharded_state_dict``,
and ``full_param``, which ``Layer.full()`` calls, keep their signatures, their results and their way of choosing an id;
what they write and read is the native format (and they read Paddle's as well).
A library that opens the ``.metadata`` file of a checkpoint itself, as PaddleFormers does to see which keys there are,
finds the one that every save writes for Paddle's own loader, and no other.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.live.communicator import communicator_for
from paddle_flexckpt.live.full_param import full_param as whole_tensors
from paddle_flexckpt.live.loader import load_state_dict as load
from paddle_flexckpt.live.merged import load_merged_state_dict as load_merged
from paddle_flexckpt.live.merged import merge_sharded_state_dict as merge
from paddle_flexckpt.live.saver import save_state_dict as save
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.undo import Undo

_changes = Undo()
# Where Paddle has the functions.
_DCP = "paddle.distributed.flex_checkpoint.dcp"
_HOMES = ("paddle.distributed", f"{_DCP}.full_param", f"{_DCP}.load_state_dict")


def replace_in_tree() -> None:
    """Replace Paddle's functions, in ``paddle.distributed`` and in every module that has imported one by its name.

    Calling it again does nothing. Modules that import them by name afterwards get these, too.
    """
    if is_in_tree_replaced():
        return
    for function in (save_state_dict, load_state_dict, load_merged_state_dict, merge_sharded_state_dict, full_param):
        before = in_tree_function(function.__name__)
        if before is not None:
            _changes.replace_everywhere(function.__name__, before, function)


def in_tree_function(name: str) -> Callable[..., Any] | None:
    """Return Paddle's function of a name; None where there is none: before 3.2 only two of them are there."""
    for module in _HOMES:
        found = getattr(importlib.import_module(module), name, None) if _is_module(module) else None
        if found is not None and not isinstance(found, ModuleType):
            return found
    return None


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is its package
        return False


def restore_in_tree() -> None:
    """Take back what :func:`replace_in_tree` did; without it, do nothing."""
    _changes.put_back()


def is_in_tree_replaced() -> bool:
    """Return whether :func:`replace_in_tree` is in effect."""
    return bool(_changes)


def save_state_dict(
    state_dict: Any,
    path: str,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = False,
    save_replicas: bool = False,
) -> None:
    """Save as Paddle's function of this name, by :func:`paddle_flexckpt.save_state_dict`; errors are those of that.

    Without an id it takes the highest there is, as Paddle does, and replaces that checkpoint once the new one is
    complete. A save in the background (``async_save``) has no handle: it is complete before the interpreter exits, and
    the next save raises its failure.
    """
    comm = communicator_for(process_group)
    context = f"cannot save to {path!r}"
    if unique_id is None:

        def choose() -> tuple[None, bytes]:
            ids = CheckpointDirectory(path).list_ids() if comm.position == 0 and _is_there(path) else []
            return None, str(max(ids, default=0)).encode()

        unique_id = int(comm.together(choose, context)[1][0])
    save(state_dict, path, process_group, coordinator_rank, unique_id, async_save, safetensors, save_replicas)

    def tidy() -> tuple[None, bytes]:
        # What a save in the background replaces has to stay until that is done.
        if comm.position == 0 and not async_save and _is_there(path):
            for other in Path(path).glob("*.metadata"):
                if other.name != PADDLE_METADATA:
                    other.unlink()
        return None, b""

    comm.together(tidy, f"{path!r} is saved, but another .metadata file could not be removed")


def load_state_dict(
    state_dict: Any,
    path: str,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: Any = None,
    safetensors: bool = False,
    worker_groups: Any = None,
    comm_method: str = "broadcast",
    load_transform: Any = None,
    num_workers: int = 1,
) -> None:
    """Load as Paddle's function of this name, by :func:`paddle_flexckpt.load_state_dict`; errors are those of that.

    Paddle's develop branch has ``load_transform``, and ``num_workers``, which has no effect here.
    """
    options = {"mw_name_compatibility": mw_name_compatibility, "load_transform": load_transform}
    load(state_dict, path, process_group, coordinator_rank, unique_id, offload, aoa_config=aoa_config, **options)


def full_param(sharded_state_dict: Any, aoa_config: Any = None, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Give whole tensors as Paddle's function of this name, by :mod:`paddle_flexckpt.live.full_param`; errors likewise.

    ``Layer.full()`` calls it.
    """
    return whole_tensors(sharded_state_dict, aoa_config, **kwargs)


def merge_sharded_state_dict(
    load_path: str,
    save_path: str,
    prefix: str | None = None,
    safetensor_prefix: str = "model",
    skip_postfix_list: Sequence[str] = (),
    process_group: Any = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Any = None,
    safetensors: bool = False,
) -> None:
    """Write whole tensors as Paddle's function of this name, by :mod:`paddle_flexckpt.live.merged`; errors likewise."""
    kept = {"unique_id": unique_id, "aoa_config": aoa_config}
    merge(load_path, save_path, prefix, safetensor_prefix, skip_postfix_list, process_group, **kept)


def load_merged_state_dict(
    path: str,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Any = None,
    safetensors: bool = False,
) -> dict[str, Any]:
    """Load as Paddle's function of this name, by :func:`paddle_flexckpt.load_merged_state_dict`; errors likewise.

    Returns:
        Names to tensors; on the device, unless ``offload`` keeps them on the CPU.
    """
    import paddle

    merged = load_merged(path, prefix, unique_id, offload, aoa_config)
    if offload:
        return merged
    return {name: tensor.to(paddle.get_device()) for name, tensor in merged.items()}


def _is_there(path: Any) -> bool:
    """Return whether a path is a directory of this machine's file systems; a URL is not."""
    return "://" not in os.fspath(path) and os.path.isdir(path)
