"""Small files that trainers leave beside a checkpoint: pickles of numbers and texts, read without unpickling."""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.foreign.safe_pickle import load_pickle
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_backend

# What paddle.save puts into every dict of arrays.
_PARAMETER_NAMES = "StructuredToParameterName@@"


def read_plain_file(path: Location, name: str) -> Any:
    """What ``paddle.save`` has written of plain data: an LR scheduler's, a loss scaler's or a random generator's state.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        name: The file in it: ``scheduler.pdparams``, ``scaler.pdparams``.

    Returns:
        The data: numbers, texts, tuples, lists, dicts and arrays. Arrays are read-only.

    Raises:
        FileNotFoundError: There is no such file.
        UnsafePickleError: It has other things in it, such as Paddle's own random generator; nothing was called.
        CorruptCheckpointError: It is damaged, or the name leads out of the directory.
    """
    backend = open_backend(path)
    data = load_pickle(backend.read(name), backend.where(name))
    if isinstance(data, dict):
        names = data.pop(_PARAMETER_NAMES, {})
        if not isinstance(names, dict):
            raise CorruptCheckpointError(f"{backend.where(name)} is not what paddle.save writes. Remedy: restore it")
    return data
