"""Write files that Paddle reads, without Paddle: its own checkpoints, and the companion of this library's.

Paddle's own checkpoint is ``{id}.metadata``, a pickle of its class ``Metadata``, and ``{rank}_{id}.distcp``, one of a
dict of arrays, as ``paddle.save`` makes it. This module makes the bytes around each array: so a file is written tensor
by tensor, and is never in memory as a whole. Opcodes are of protocol 4, without frames; a repeated value is read from
the reader's memo.

The companion is a file beside the manifest. Paddle takes numbered safetensors files for a Hugging Face directory, and
every shard in them for a whole tensor, unless it finds this file, which is a ``Metadata`` too. Where Paddle would read
other values than those saved, the file makes Paddle fail with an error that has the reason.

Tested in tests/foreign/test_paddle_files.py and tests/saving/test_paddle_reads.py.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, group_replicas
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.companion import Companion
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.node_directory import NodeDirectory

# The only name that Paddle looks for, whatever the id.
PADDLE_METADATA = "flex-ckpt.auto_generated.metadata"
# The types that Paddle 3.3.1 reads bit for bit: from any file, and from safetensors files.
_COMMON_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"}
)
_COMPANION_DTYPES = _COMMON_DTYPES | {"float8_e4m3fn", "float8_e5m2"}
# An entry that paddle.save puts into every dict of arrays: names of tensors to names of parameters.
PARAMETER_NAMES = "StructuredToParameterName@@"
_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"
# Numpy's substitutes for element types that it lacks; the metadata has the true type.
STAND_INS = {"bfloat16": "uint16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
# And from .distcp files. Where Paddle moves nothing, it turns their float8 into int8.
DISTCP_DTYPES = _COMMON_DTYPES | {"complex128"}
_MINUS_ONE = b"J\xff\xff\xff\xff"
# The end of an array's state, and of the array.
_ARRAY_END = b"tb"
BEGIN, END = b"\x80\x04", b"."
# Readers that stop in the middle expect frames after protocol 4, and none after 3; no reader checks opcodes against it.
UNFRAMED = b"\x80\x03"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
EMPTY_DICT = b"}"
# An instance of the class on the stack, whose fields follow up to FILLED.
NEW, FILLED = b")\x81}(", b"ub"


def text(value: str) -> bytes:
    """Return the opcodes of a text."""
    data = value.encode()
    return (b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data


def integer(value: int) -> bytes:
    """Return the opcodes of an integer of up to 64 bits."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"\x8a\x08" + struct.pack("<q", value)


def sequence(items: Sequence[bytes]) -> bytes:
    """Return the opcodes of a tuple, given those of its elements."""
    ends = (b")", b"\x85", b"\x86", b"\x87")
    return b"".join(items) + ends[len(items)] if len(items) < len(ends) else b"(" + b"".join(items) + b"t"


def integers(values: Sequence[int]) -> bytes:
    """Return the opcodes of a tuple of integers."""
    return sequence(list(map(integer, values)))


def named(module: str, name: str) -> bytes:
    """Return the opcodes of a class or function."""
    return text(module) + text(name) + b"\x93"


def call(function: bytes, arguments: Sequence[bytes]) -> bytes:
    """Return the opcodes of a call of a function."""
    return function + sequence(arguments) + b"R"


def short_bytes(data: bytes) -> bytes:
    """Return the opcodes of up to 255 bytes."""
    return b"C" + bytes([len(data)]) + data


def long_bytes(length: int) -> bytes:
    """Return the opcode of so many bytes, which follow it."""
    return b"\x8e" + struct.pack("<Q", length)


class Memo(dict[bytes, bytes]):
    """The opcodes that put a value on the stack: its own the first time, later its number in the reader's memo."""

    def __missing__(self, code: bytes) -> bytes:
        self[code] = b"j" + struct.pack("<I", len(self))
        return code + b"\x94"


class StateFile:
    """The bytes around the arrays of a ``.distcp`` file.

    Attributes:
        nbytes: Bytes of the whole file.
    """

    def __init__(self, items: Catalog) -> None:
        """Take the shards of the file, in their order; each key occurs once."""
        self._items = items
        self._lengths = items.byte_length.tolist()
        self.nbytes = sum(map(len, self.around())) + sum(self._lengths)

    def around(self) -> Iterator[bytes]:
        """Yield what precedes the bytes of each array, then the end of the file."""
        items, memo = self._items, Memo()
        before = BEGIN + EMPTY_DICT + b"("
        for row, length in enumerate(self._lengths):
            name = items.dtype_name(row)
            is_flat = bool(items.is_flattened[row])
            shape = (int(items.size[row]),) if is_flat else items.unpadded(row, items.shape)
            yield before + text(items.key_name(row)) + _array_head(memo, STAND_INS.get(name, name), shape, length)
            before = _ARRAY_END
        keys = [text(items.key_name(row)) for row in range(len(items))]
        # Paddle makes tensors of only those arrays whose names are here, and gives them the names.
        table = EMPTY_DICT + (b"(" + b"".join(key + key for key in keys) + b"u" if keys else b"")
        yield (before + text(PARAMETER_NAMES) + table + b"u") + END

    def pieces(self, data: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of the file, given the elements of its shards in order: arrays, each of one shard.

        Raises:
            ValueError: An array does not end where its shard ends.
        """
        for head, length in zip(self.around(), [*self._lengths, 0]):
            yield np.frombuffer(head, dtype=np.uint8)
            left = length
            while left:
                part = next(data, None)
                if part is None or part.nbytes > left:
                    raise ValueError(f"the data does not end with a shard: {left} of {length} bytes are missing")
                left -= part.nbytes
                yield part
                del part


def _array_head(memo: Memo, dtype: str, shape: tuple[int, ...], length: int) -> bytes:
    """Return the bytes that numpy's own pickles have in front of the elements of an array in row-major order."""
    # The module that both numpy 1 and numpy 2 know.
    make, ndarray = named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray")
    begin = memo[make] + memo[ndarray] + integers((0,)) + short_bytes(b"b") + b"\x87R"
    return begin + b"(" + integer(1) + integers(shape) + memo[_dtype(dtype)] + FALSE + long_bytes(length)


@functools.cache
def _dtype(name: str) -> bytes:
    dtype = np.dtype(name)
    code, order = dtype.str[1:], "|" if dtype.itemsize == 1 else "<"
    made = call(named("numpy", "dtype"), [text(code), FALSE, TRUE])
    return made + sequence([integer(3), text(order), NONE, NONE, NONE, _MINUS_ONE, _MINUS_ONE, integer(0)]) + b"b"


class _FieldCodes(dict[Any, bytes]):
    """The opcodes of an instance's fields, by the fields' values; most instances repeat the values of others."""

    def __init__(self, memo: Memo, fields: Callable[[Any], dict[str, bytes]]) -> None:
        super().__init__()
        self._memo, self._fields = memo, fields

    def __missing__(self, each: Any) -> bytes:
        first, self[each] = self._encode(each), self._encode(each)  # in the second one the memo has all values
        return first

    def _encode(self, each: Any) -> bytes:
        memo = self._memo
        codes = [code for name, value in self._fields(each).items() for code in (memo[text(name)], memo[value])]
        return b"".join([*codes, FILLED])


def encode_metadata(catalog: Catalog, flat_mapping: bool = False) -> bytes:
    """Return the pickle of Paddle's ``Metadata`` for stored shards, each with its file.

    Replicas are numbered by rank. With ``flat_mapping`` each key stands for itself in the state dict, as in Paddle.
    """
    groups, descriptions = group_replicas(catalog), catalog.descriptions()
    row_of = dict(zip(descriptions, range(len(catalog))))

    def index_of(each: tuple[bytes, int]) -> dict[str, bytes]:
        """Return the fields of an index except the key, for a row's description and the replica's number or -1."""
        row, replica = row_of[each[0]], each[1]
        offset, shape = (integers(catalog.unpadded(row, column)) for column in (catalog.offset, catalog.shape))
        span = int(catalog.flat_start[row]), int(catalog.flat_stop[row])
        flat = {} if span[0] < 0 else {"is_flattened": TRUE, "flattened_range": integers(span)}
        number = {} if replica < 0 else {"replica_id": integer(replica)}
        return {"global_offset": offset, "local_shape": shape, **flat, **number}

    def shard_of(each: bytes) -> dict[str, bytes]:
        """Return the fields of a shard, from its description."""
        row, place = row_of[each], index_of((each, -1))
        box = {"global_offset": place.pop("global_offset"), "local_shape": place.pop("local_shape")}
        whole = integers(catalog.unpadded(row, catalog.global_shape))
        return {**box, "dtype": text(catalog.dtype_name(row)), "global_shape": whole, **place}

    memo = Memo()
    shards, indices = _FieldCodes(memo, shard_of), _FieldCodes(memo, index_of)
    keys, files = (list(map(text, names)) for names in (catalog.keys, catalog.files))
    key, file, last = catalog.key.tolist(), catalog.file.tolist(), -1
    codes = [UNFRAMED, memo[named(_CLASSES, "Metadata")], NEW, memo[text("state_dict_metadata")], b"}("]
    begin = named(_CLASSES, "LocalTensorMetadata")
    for row in groups.first.tolist():  # by key
        if key[row] != last:
            codes += (b"e" if last >= 0 else b"", memo[keys[key[row]]], b"](")
            last = key[row]
        codes += (memo[begin], NEW, shards[descriptions[row]])
    codes += (b"e" if last >= 0 else b"", b"u", memo[text("storage_metadata")], b"}(")
    begin, name = named(_CLASSES, "LocalTensorIndex"), text("tensor_key")
    number = np.arange(len(groups.order)) - np.repeat(groups.start[:-1], groups.count)
    replicas = np.where(np.repeat(groups.count, groups.count) > 1, number, -1)
    for row, replica in zip(groups.order.tolist(), replicas.tolist()):
        # In this order: the memo numbers new values.
        codes += (memo[begin], NEW, memo[name], memo[keys[key[row]]], indices[descriptions[row], replica])
        codes.append(memo[files[file[row]]])
    codes += (b"u", memo[text("flat_mapping")], b"}(")
    for each in np.unique(catalog.key).tolist() if flat_mapping else ():
        codes += (memo[keys[each]], memo[keys[each]] + b"\x85")
    return b"".join([*codes, b"u", FILLED, END])


# A protocol and a string. Python's own pickler puts a frame between them, and has another string in protocol 3: so
# these bytes identify this library's file.
_BEGINS = tuple(begin + text("")[:1] for begin in (UNFRAMED, BEGIN))


class PaddleMetadata(Companion):
    """The companion file for Paddle's own loader."""

    name = PADDLE_METADATA
    # More rows than this take seconds, and have to be at hand: a manifest in one file has no more.
    most_rows = 100_000

    def refuse(self, reason: str) -> bytes:
        """Return a file that Paddle cannot unpickle, with the reason."""
        # Paddle's error shows the name of the module, which does not exist. With dots it would show only the beginning.
        return BEGIN + named(_sentence(reason), "Metadata") + END

    def encode(self, manifest: Manifest) -> bytes:
        """Encode the keys of the only checkpoint of a directory, and their places.

        Keys that Paddle would read wrong have, instead of their files, a missing one, whose name is the reason.
        """
        catalog = manifest.catalog
        reason = _why_not(catalog)
        if reason:
            catalog = replace(catalog, files=(_sentence(reason),) * len(catalog.files))
        return encode_metadata(catalog)

    def stored(self, data: bytes, file: str) -> dict[str, set[str]]:
        """Return the keys by data file; keys that Paddle would read wrong are under the reason."""
        from paddle_flexckpt.catalog.metadata import Metadata
        from paddle_flexckpt.foreign.pickle_reader import load_pickle

        metadata = load_pickle(data, file)
        found: dict[str, set[str]] = {}
        for index, name in metadata.storage_metadata.items() if type(metadata) is Metadata else ():
            found.setdefault(name, set()).add(index.tensor_key)
        return found

    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name was written by this library, if only in part.

        After a loss of power a file may have its length without its bytes: they read as zeros.
        """
        return any(begin.startswith(data[: len(begin)]) for begin in _BEGINS) or not any(data)


def _sentence(reason: str) -> str:
    return f"paddle_flexckpt wrote this and can load it; Paddle cannot, because {reason}"


def _why_not(catalog: Catalog) -> str:
    """Return why Paddle would read these shards wrong; empty if it reads them right."""
    unknown = sorted({catalog.dtypes[dtype] for dtype in np.unique(catalog.dtype)} - _COMPANION_DTYPES)
    if unknown:
        return f"it has tensors of {' and '.join(unknown)}"
    if any(order.axis is not None for order in catalog.orders):
        return "it has fused parameters, which lie in another order under another tensor-parallel degree"
    if "__metadata__" in catalog.keys:
        return "it has a tensor called __metadata__"
    if (catalog.size == 0).any():
        return "it has a tensor without elements"
    if len(np.unique(catalog.key * np.int64(len(catalog.files)) + catalog.file)) != len(catalog):
        return "a file has several shards of one tensor"
    rows = group_replicas(catalog).first
    sizes = np.zeros(len(catalog.keys), dtype=np.int64)
    np.add.at(sizes, catalog.key[rows], catalog.size[rows])
    if (sizes[catalog.key[rows]] != catalog.global_shape[rows].prod(axis=1)).any():
        return "shards of one tensor overlap"
    return misread_range(catalog, rows[catalog.is_flattened[rows]])[0]


def misread_range(catalog: Catalog, rows: np.ndarray) -> tuple[str, str]:
    """Return why Paddle misreads flattened ranges that it has to assemble, and a key; empty if it does not.

    Paddle turns a range into the smallest box around it, wrongly with three axes, and fills the box from only those
    ranges that are not boxes themselves.

    Args:
        catalog: Stored shards.
        rows: Those of them that are flattened ranges, one of each replica group.
    """
    start, stop = catalog.flat_start[rows], catalog.flat_stop[rows]
    first_axis = catalog.width - catalog.ndim[rows, None]
    below = np.where(np.arange(catalog.width) > first_axis, catalog.shape[rows], 1).prod(axis=1)
    below = np.maximum(below, 1)
    partial = (start % below != 0) | (stop % below != 0)
    wide = np.flatnonzero(partial & (catalog.ndim[rows] > 2))
    if len(wide):
        reason = "a flattened range of a tensor with three or more axes begins or ends inside a row"
        return reason, catalog.key_name(int(rows[wide[0]]))
    places = [(int(key), *offset) for key, offset in zip(catalog.key[rows], catalog.offset[rows].tolist())]
    first, last = start // below, (stop - 1) // below
    inside = {(places[i], int(first[i])) for i in np.flatnonzero(partial & (first == last))}
    for i in np.flatnonzero(partial & (first != last)):
        cut = [int(first[i])] * bool(start[i] % below[i]) + [int(last[i])] * bool(stop[i] % below[i])
        if any((places[i], row) in inside for row in cut):
            return "flattened ranges that cross rows meet ranges inside a row", catalog.key_name(int(rows[i]))
    return "", ""


def open_to_save(location: Location) -> NodeDirectory:
    """Return a directory to save to, with the companion for Paddle; ValidationError if it has the name of a file."""
    return NodeDirectory(location, PaddleMetadata())
