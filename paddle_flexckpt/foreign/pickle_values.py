"""Values for the names that a foreign pickle may use: arrays, numpy's numbers, three metadata classes.

Nothing is looked up or imported by the names in a pickle. Each name in the table stands for a function of this module,
which checks its arguments and makes plain data of them.

Tested in tests/foreign/test_pickle_reader.py and tests/attacks/test_pickles.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import UnsafePickleError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

logger = logging.getLogger("paddle_flexckpt")

# Elements of such types are plain bytes: no objects, no text, no records, no other byte order than the machine's.
ELEMENT_TYPES = frozenset("b1 i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16".split())
_MAX_AXES = 64
_MAX_EXTENT = 1 << 60


@dataclass(frozen=True)
class Symbol:
    """The stand-in for a name in a pickle. No code of the named class or function runs.

    Attributes:
        name: The name, for errors.
        call: Computes plain data from the arguments of a call.
        make: Begins a record, which a dict of fields completes.
    """

    name: str
    call: Callable[[tuple[Any, ...]], Any] | None = None
    make: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The names that the pickles of one program may use.

    Attributes:
        names: (module, name) as a pickle writes it -> the value that it stands for here.
        records: The classes of the records, tuples among them.
        keys: The classes of records that may be keys of dicts.
        persistent: Makes the value of a persistent id; None if the program has no such ids.
        has_ordered_dicts: Whether OrderedDicts become dicts. Their attributes are left out, and so are dicts in tuples,
            which are hooks of tensors.
    """

    names: Mapping[tuple[str, str], Symbol]
    records: frozenset[type]
    keys: frozenset[type]
    persistent: Callable[[Any], Any] | None = None
    has_ordered_dicts: bool = False


@dataclass(frozen=True)
class Arguments:
    """A tuple of values that are not data by themselves (bytes, element types, names); inert."""

    items: tuple[Any, ...]


class Unfinished:
    """An object that a name has made and that the state which follows in the pickle will finish; inert.

    Attributes:
        name: The name of what is being made.
        finish: Makes the object from its state.
        memo: Its place in the memo, or -1.
    """

    # A file can have very many.
    __slots__ = ("finish", "memo", "name")

    def __init__(self, name: str, finish: Callable[[Any], Any]) -> None:
        self.name, self.finish, self.memo = name, finish, -1


ATOMS = frozenset({str, int, float, complex, bool, type(None)})
# None of these may be an element of a list, dict or tuple of data.
INERT = frozenset({Symbol, Arguments, Unfinished, memoryview, *(type(np.dtype(name)) for name in ELEMENT_TYPES)})


def is_flat(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple holds atoms alone."""
    return all(type(item) in ATOMS for item in value)


def is_named_array(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple is a tensor inside a list or dict as ``paddle.save`` stores it: its name, its array."""
    return len(value) == 2 and type(value[0]) is str and type(value[1]) is np.ndarray


def describe(value: Any) -> str:
    """Name something on the stack, for errors."""
    if type(value) is Symbol or type(value) is Unfinished:
        return str(value.name)
    return {memoryview: "bytes", Arguments: "a tuple of arguments"}.get(type(value), type(value).__name__)


def refused(what: str, got: object) -> UnsafePickleError:
    """Return the error that names the value that was found instead."""
    return UnsafePickleError(f"{what}: got {_short(got)}")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _is(value: Any, *options: Any) -> bool:
    """Return whether the value is one of the options; arrays have an equality of their own, so types come first."""
    return any(type(value) is type(option) and value == option for option in options)


def _items(value: Any) -> tuple[Any, ...]:
    return value.items if type(value) is Arguments else value if type(value) is tuple else ()


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MAX_AXES:
        raise refused(f"the shape of an array has to be a tuple of at most {_MAX_AXES} integers", value)
    for extent in value:
        if not is_integer(extent):
            raise refused("an extent of an array has to be an integer >= 0", extent)
    return value


def _array(shape: Any, dtype: Any, payload: Any, order: Any) -> np.ndarray:
    shape = _shape(shape)
    if not isinstance(dtype, np.dtype):
        raise refused("the element type of an array has to be a numpy.dtype", dtype)
    if type(payload) is not memoryview:
        raise refused("the elements of an array have to be bytes (arrays of objects are refused)", payload)
    expected = math.prod(shape) * dtype.itemsize
    if len(payload) != expected:
        raise refused(f"an array of shape {list(shape)[:8]} and type {dtype} has {expected} bytes", len(payload))
    try:
        elements = np.frombuffer(payload, dtype=dtype) if expected else np.empty(0, dtype=dtype)
        return elements.reshape(shape, order=order)
    except ValueError as error:
        raise UnsafePickleError(f"an array of shape {list(shape)[:8]} cannot be made: {error}") from error


def _reconstruct(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 3 or not _is(arguments[0], NDARRAY) or not _is(arguments[1], (0,)):
        raise UnsafePickleError("numpy's _reconstruct with other arguments than numpy.ndarray and (0,)")

    def finish(state: Any) -> np.ndarray:
        items = _items(state)
        if len(items) != 5:
            raise refused("the state of an array has to be (version, shape, type, order, bytes)", state)
        return _array(items[1], items[2], items[4], "F" if items[3] is True else "C")

    return Unfinished("numpy.ndarray", finish)


def _frombuffer(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 4 or not _is(arguments[3], "C", "F"):
        raise UnsafePickleError("numpy's _frombuffer with other arguments than (bytes, type, shape, order)")
    return _array(arguments[2], arguments[1], arguments[0], arguments[3])


def _dtype(arguments: tuple[Any, ...]) -> Any:
    code = arguments[0] if arguments else None
    if type(code) is not str or code not in ELEMENT_TYPES:
        raise refused("numpy.dtype: object, text and record types are refused", code)

    def finish(state: Any) -> np.dtype:
        items = _items(state)
        if len(items) < 5 or not _is(items[1], "<", "|", "=") or any(item is not None for item in items[2:5]):
            raise refused(f"numpy.dtype: {code!r} has to be of native byte order and without fields", state)
        return np.dtype(code)

    return Unfinished("numpy.dtype", finish)


def _scalar(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 2:
        raise UnsafePickleError("numpy's scalar with other arguments than (type, bytes)")
    return _array((), arguments[0], arguments[1], "C").item()


def _encode(arguments: tuple[Any, ...]) -> Any:
    # The form in which protocol 2 writes bytes.
    if len(arguments) != 2 or type(arguments[0]) is not str or not _is(arguments[1], "latin1", "latin-1"):
        raise UnsafePickleError("_codecs.encode with other arguments than text and 'latin1'")
    try:
        return memoryview(arguments[0].encode("latin-1"))
    except UnicodeEncodeError as error:
        raise UnsafePickleError(f"_codecs.encode: {error}") from error


def _no_bytes(arguments: tuple[Any, ...]) -> Any:
    # The form in which protocol 2 writes no bytes.
    if arguments:
        raise UnsafePickleError("bytes with arguments")
    return memoryview(b"")


def _named_array(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 1 or type(arguments[0]) is not tuple or not is_named_array(arguments[0]):
        raise UnsafePickleError("tuple with other arguments than a pair of a name and an array")
    return arguments[0]


def is_integers(value: Any) -> bool:
    """Return whether a value is a tuple of integers from 0 on, of which an array may have as many axes."""
    return type(value) is tuple and len(value) <= _MAX_AXES and all(map(is_integer, value))


def _is_pair(value: Any) -> bool:
    return is_integers(value) and len(value) == 2


def or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that accepts None too."""
    return lambda value: value is None or check(value)


def has_type(kind: type) -> Callable[[Any], bool]:
    """Return a check for one type."""
    return lambda value: type(value) is kind


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer from 0 on, of a size that files and arrays have."""
    return type(value) is int and 0 <= value < _MAX_EXTENT


def _is_shards(value: Any) -> bool:
    return type(value) is dict and all(
        type(key) is str and type(shards) is list and all(type(shard) is LocalTensorMetadata for shard in shards)
        for key, shards in value.items()
    )


def _is_files(value: Any) -> bool:
    return type(value) is dict and all(
        type(index) is LocalTensorIndex and type(file) is str for index, file in value.items()
    )


def _is_flat_mapping(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


_FIELDS: dict[type, dict[str, Callable[[Any], bool]]] = {
    LocalTensorMetadata: {
        "global_offset": is_integers,
        "local_shape": is_integers,
        "dtype": has_type(str),
        "global_shape": or_none(is_integers),
        "is_flattened": has_type(bool),
        "flattened_range": or_none(_is_pair),
    },
    LocalTensorIndex: {
        "tensor_key": has_type(str),
        "global_offset": is_integers,
        "is_flattened": has_type(bool),
        "flattened_range": or_none(_is_pair),
        "replica_id": or_none(is_integer),
        "local_shape": or_none(is_integers),
    },
    Metadata: {
        "state_dict_metadata": _is_shards,
        "storage_metadata": _is_files,
        "flat_mapping": or_none(_is_flat_mapping),
    },
}


def make_record(
    name: str, cls: Callable[..., Any], checks: Mapping[str, Callable[[Any], bool]], required: frozenset[str]
) -> Callable[[], Unfinished]:
    """Return a function that makes a record from the dict of its fields, each of which it checks.

    Plain data in further fields is left out, with a warning: later versions of its program have more.
    """

    def finish(state: Any) -> Any:
        if type(state) is not dict:
            raise refused(f"the state of {name} has to be a dict", state)
        known, others = dict[str, Any](), list[str]()
        for field, value in state.items():
            check = checks.get(field) if type(field) is str else None
            if check is not None:
                known[field] = value
                if not check(value):
                    raise refused(f"{name}.{field} is not of its type", value)
            elif type(field) is not str or field[:1] == "_" or type(value) in INERT or not (is_open or value is None):
                raise refused(f"{name} has no field of that name", field)
            elif value is not None:
                others.append(_short(field))
        if others:
            logger.warning("%s has fields that are not known here, and are left out: %s", name, listed(others, 4))
        missing = sorted(required - set(state))
        if missing:
            raise UnsafePickleError(f"{name} lacks {', '.join(missing)}")
        return cls(**known)

    # A field of a shard may change what its bytes mean.
    is_open = name in ("Metadata", "MCoreMetadata")
    return lambda: Unfinished(name, finish)


def _record(cls: type) -> Callable[[], Unfinished]:
    required = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
    return make_record(cls.__name__, cls, _FIELDS[cls], frozenset(required))


NDARRAY = Symbol("numpy.ndarray")


# These are names of numpy 1 and numpy 2.
_NAMES = MappingProxyType(
    {
        ("numpy", "ndarray"): NDARRAY,
        ("numpy", "dtype"): Symbol("dtype", _dtype),
        ("_codecs", "encode"): Symbol("encode", _encode),
        ("__builtin__", "bytes"): Symbol("bytes", _no_bytes),
        ("builtins", "tuple"): Symbol("tuple", _named_array),
        ("__builtin__", "tuple"): Symbol("tuple", _named_array),
    }
    | {
        (f"{core}.{module}", name): Symbol(name, function)
        for core in ("numpy.core", "numpy._core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _frombuffer),
        )
    }
    | {
        (module, cls.__name__): Symbol(cls.__name__, make=_record(cls))
        for module in ("paddle.distributed.checkpoint.metadata", "paddle.distributed.flex_checkpoint.dcp.metadata")
        for cls in _FIELDS
    }
)
PADDLE = Vocabulary(_NAMES, frozenset({LocalTensorMetadata, LocalTensorIndex}), frozenset({LocalTensorIndex}))
