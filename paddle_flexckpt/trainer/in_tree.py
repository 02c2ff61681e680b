"""Replacing Paddle's own checkpoint functions by this library's.

``paddle.distributed.save_state_dict``, ``load_state_dict``, ``load_merged_state_dict``, ``merge_sharded_state_dict``,
and ``full_param``, which ``Layer.full()`` calls, keep their signatures, their results and their way of choosing an id.
They write the native format, and read it and Paddle's.
Every save writes a ``.metadata`` file for Paddle's own loader; unless it is in the background, it removes others. A
library that opens the file itself, as PaddleFormers does to list the keys, finds only that one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from paddle_flexckpt.aoa.statements import KEYS, inner_config, read_config
from paddle_flexckpt.catalog import AoaError, CheckpointError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.loading.full_param import full_param as whole_tensors
from paddle_flexckpt.loading.loader import load_state_dict as load
from paddle_flexckpt.loading.merged import load_merged_state_dict as load_merged
from paddle_flexckpt.loading.merged import merge_sharded_state_dict as merge
from paddle_flexckpt.media.removals import remove
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import save_state_dict as save
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.undo import Undo

logger = logging.getLogger("paddle_flexckpt")
_changes = Undo()
# Options that Paddle's functions do not have, and the values that are set for all calls.
_OF_SAVES = ("check_replicas",)
_OF_LOADS = (
    "strict", "dtype", "tied_names", "raw_names", "master_weights", "fused", "optimizer_states", "verify",
    "use_replicas",
)  # fmt: skip
_defaults: dict[str, Any] = {}
# The modules in which Paddle defines the functions.
_DCP = "paddle.distributed.flex_checkpoint.dcp"
_HOMES = ("paddle.distributed", f"{_DCP}.full_param", f"{_DCP}.load_state_dict")


def replace_in_tree(**defaults: Any) -> None:
    """Replace Paddle's functions, in ``paddle.distributed`` and in every module that has imported one by its name.

    Modules that import them by name afterwards get the replacements too. A second call only sets the given defaults.

    Args:
        **defaults: Options that Paddle's functions do not have, for all of their calls: ``check_replicas`` of
            :func:`paddle_flexckpt.save_state_dict`; of :func:`paddle_flexckpt.load_state_dict` ``strict``, ``dtype``,
            ``tied_names``, ``raw_names``, ``master_weights``, ``fused``, ``optimizer_states``, ``verify`` and
            ``use_replicas``.

    Raises:
        TypeError: There is no such option, or Paddle's functions have it.
        ValidationError: An option has a value that it cannot have.
    """
    unknown = [name for name in defaults if name not in (*_OF_SAVES, *_OF_LOADS)]
    if unknown:
        known = ", ".join((*_OF_SAVES, *_OF_LOADS))
        raise TypeError(f"replace_in_tree() has no option {unknown[0]!r}; it sets {known}")
    SaveOptions(**_some(defaults, _OF_SAVES)).agreed()
    LoadOptions(**_some(defaults, _OF_LOADS)).agreed()
    _defaults.update(defaults)
    if is_in_tree_replaced():
        return
    for function in (save_state_dict, load_state_dict, load_merged_state_dict, merge_sharded_state_dict, full_param):
        before = in_tree_function(function.__name__)
        if before is not None:
            _changes.replace_everywhere(function.__name__, before, function)


def _some(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _load_options_of(function: Callable[..., Any]) -> list[str]:
    """Return the options of loads that a function also has."""
    return [name for name in _OF_LOADS if name in inspect.signature(function).parameters]


@contextmanager
def _of_paddle(name: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the default options for a function of Paddle's.

    To an error that advises an option which the function does not have, add how to set it for all calls.
    """
    try:
        yield _some(_defaults, options)
    except CheckpointError as error:
        text = "" if isinstance(error, AoaError) else str(error)  # statements have a dtype= of their own
        advised = [option for option in options if re.search(rf"\b{option}=", text)]
        if advised:
            given = ", ".join(f"{option}=..." for option in advised)
            error.args = (
                f"{error}\npaddle.distributed.{name} does not take {given}: set it for all calls with "
                f"paddle_flexckpt.trainer.replace_in_tree({given})",
                *error.args[1:],
            )
        raise


def _statements(aoa_config: Any) -> Any:
    """Return statements without those that Paddle's functions ignore, with a warning.

    Libraries have one list of statements for several models.
    """
    aoa_config = inner_config(aoa_config)
    if isinstance(aoa_config, Mapping):
        unknown = sorted(str(key) for key in aoa_config if key not in KEYS)
        if unknown:
            logger.warning(f"aoa_config has unknown keys {unknown}, which are ignored; known are {', '.join(KEYS)}")
        aoa_config = {key: aoa_config[key] for key in KEYS if key in aoa_config}
    try:
        return None if aoa_config is None else replace(read_config(aoa_config), is_lenient=True)
    except AoaError:
        return aoa_config  # the call raises the error, on all ranks


def in_tree_function(name: str) -> Callable[..., Any] | None:
    """Return Paddle's function of a name, or None; before 3.2 Paddle has only two of them."""
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
    """Undo :func:`replace_in_tree`; without it, do nothing."""
    _defaults.clear()
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
    """Save like Paddle's function of this name, by :func:`paddle_flexckpt.save_state_dict`, with its errors.

    Without an id it takes the highest existing one, as Paddle does, and replaces that checkpoint once the new one is
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
    with _of_paddle("save_state_dict", _OF_SAVES) as options:
        options.update(async_save=async_save, safetensors=safetensors, save_replicas=save_replicas)
        save(state_dict, path, process_group, coordinator_rank, unique_id, **options)

    def tidy() -> tuple[None, bytes]:
        # A save in the background keeps the old files until it is complete.
        if comm.position == 0 and not async_save and _is_there(path):
            for other in Path(path).glob("*.metadata"):
                if other.name != PADDLE_METADATA:
                    remove(other)
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
    """Load like Paddle's function of this name, by :func:`paddle_flexckpt.load_state_dict`, with its errors.

    Paddle's develop branch has ``load_transform``, and ``num_workers``, which has no effect here.
    """
    with _of_paddle("load_state_dict", _OF_LOADS) as options:
        options.update(mw_name_compatibility=mw_name_compatibility, load_transform=load_transform)
        options.update(aoa_config=_statements(aoa_config))
        load(state_dict, path, process_group, coordinator_rank, unique_id, offload, **options)


def full_param(sharded_state_dict: Any, aoa_config: Any = None, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Return whole tensors like Paddle's function of this name, by :mod:`paddle_flexckpt.loading.full_param`.

    ``Layer.full()`` calls it.
    """
    return whole_tensors(sharded_state_dict, _statements(aoa_config), **kwargs)


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
    """Write whole tensors like Paddle's function of this name, by :mod:`paddle_flexckpt.loading.merged`."""
    with _of_paddle("merge_sharded_state_dict", _load_options_of(merge)) as options:
        options.update(unique_id=unique_id, aoa_config=_statements(aoa_config))
        merge(load_path, save_path, prefix, safetensor_prefix, skip_postfix_list, process_group, **options)


def load_merged_state_dict(
    path: str,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Any = None,
    safetensors: bool = False,
) -> dict[str, Any]:
    """Load like Paddle's function of this name, by :func:`paddle_flexckpt.load_merged_state_dict`, with its errors.

    Returns:
        Names to tensors; on the device, unless ``offload`` keeps them on the CPU.
    """
    import paddle

    with _of_paddle("load_merged_state_dict", _load_options_of(load_merged)) as options:
        merged = load_merged(path, prefix, unique_id, offload, _statements(aoa_config), **options)
    if offload:
        return merged
    return {name: tensor.to(paddle.get_device()) for name, tensor in merged.items()}


def _is_there(path: Any) -> bool:
    """Return whether a path is a directory of this machine's file systems; a URL is not."""
    return "://" not in os.fspath(path) and os.path.isdir(path)
