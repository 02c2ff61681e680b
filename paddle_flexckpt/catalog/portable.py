"""Portable values: Python values as JSON and back, without pickle, so that reading cannot run code.

JSON's own types stand for themselves. Other values are an object with the key ``$``: tuples, bytes, arrays, numbers
that are not finite, dicts whose keys are not all text, and tensors, which are stored outside.

Tested in tests/run_state/test_extra_state.py.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError

_TAG = "$"


def encode(value: Any, name: str, tensors: MutableMapping[str, Any] | None = None) -> bytes:
    """Return a value as JSON text: numbers, text, bytes, None, arrays, and lists, tuples and dicts of such values.

    ``name`` is used in errors and in the names of Paddle tensors. These go to ``tensors`` as ``{name}.{path}``; without
    ``tensors`` they are refused.

    Raises:
        ValidationError: There is a value of another type, or two tensors would have the same name.
    """
    return json.dumps(_pack(value, name, tensors), allow_nan=False).encode()


def decode(data: bytes, name: str, tensors: Mapping[str, Any] | None = None) -> Any:
    """Return the value of :func:`encode`; ``tensors`` has the tensors that are stored outside.

    Raises:
        CorruptCheckpointError: The data is not what :func:`encode` makes, or a tensor is not there.
    """
    try:
        return _unpack(json.loads(data), tensors or {})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is damaged: {error!r}") from error


def _pack(value: Any, path: str, tensors: MutableMapping[str, Any] | None) -> Any:
    # Exact types: a subclass may carry more than its value.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        packed = [(key, _pack(item, f"{path}.{key}", tensors)) for key, item in value.items()]
        if all(type(key) is str and key != _TAG for key, _ in packed):
            return dict(packed)
        return {_TAG: "dict", "items": [[_pack(key, path, None), item] for key, item in packed]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    is_array = isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray)
    if is_array and value.dtype.kind in "biufc":
        return _pack_array(np.asarray(value), scalar=isinstance(value, np.generic))
    if tensors is not None and _is_tensor(value):
        if path in tensors:
            raise ValidationError(
                [f"two tensors of the extra state would have the name {path!r}. Remedy (FC108): rename one"]
            )
        tensors[path] = value
        return {_TAG: "tensor", "name": path}
    raise ValidationError(
        f"{path}: a {type(value).__name__} cannot be part of a checkpoint's extra state: only numbers, text, bytes, "
        "None, arrays, and lists, tuples and dicts of such values can. Remedy (FC108): convert it, or leave it out"
    )


def _pack_array(array: np.ndarray, scalar: bool) -> dict[str, Any]:
    return {
        _TAG: "scalar" if scalar else "array",
        "dtype": array.dtype.newbyteorder("<").str,
        "shape": list(array.shape),
        "data": base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode(),
    }


def _unpack(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in value["items"])
    if kind == "dict":
        return {_unpack(key, {}): _unpack(item, tensors) for key, item in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind in ("array", "scalar"):
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biufc":
            raise ValueError(f"dtype {dtype}")
        array = np.frombuffer(base64.b64decode(value["data"]), dtype).reshape(value["shape"]).copy()
        return array[()] if kind == "scalar" else array
    if kind == "tensor":
        return tensors[value["name"]]
    raise ValueError(f"kind {kind!r}")


def _is_tensor(value: Any) -> bool:
    # A process with a tensor has imported Paddle; others need not import it.
    paddle = sys.modules.get("paddle")
    return paddle is not None and isinstance(value, paddle.Tensor)
