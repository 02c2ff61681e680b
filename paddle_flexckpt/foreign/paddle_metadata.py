"""Write the file beside the manifest by which Paddle's own loader reads the data files, or refuses them.

Paddle takes numbered safetensors files for a Hugging Face directory, and every shard in them for a whole tensor,
unless it finds this file. It is a pickle of Paddle's class ``Metadata``, written here opcode by opcode. Where Paddle
would read something else than what was saved, it makes Paddle fail with an error that says why.

Tested in tests/live/test_paddle_reads.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, group_replicas
from paddle_flexckpt.native.companion import Companion
from paddle_flexckpt.native.manifest import Manifest

# The one name that Paddle looks for whatever id it is asked for.
PADDLE_METADATA = "flex-ckpt.auto_generated.metadata"
_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"
# What Paddle 3.3.1 reads bit for bit.
_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
    | {"float8_e4m3fn", "float8_e5m2", "complex64"}
)
# Protocol 4 and a string. Python's own pickler puts a frame between them: that tells whose file it is.
_BEGIN = b"\x80\x04\x8c"
# An instance of the class on the stack, whose fields follow.
_NEW = b")\x81}("


class PaddleMetadata(Companion):
    """Make the file for Paddle's own loader."""

    name = PADDLE_METADATA
    # Of so many it takes seconds, and the rows have to be at hand: a manifest in one file has no more.
    most_rows = 100_000

    def refuse(self, reason: str) -> bytes:
        """Return a file that stops Paddle: it names a module that no Python has, so that the error says the reason."""
        # Of a name with dots in it the error would show the beginning alone.
        return _BEGIN[:2] + _text(_sentence(reason)) + _text("Metadata") + b"\x93."

    def encode(self, manifest: Manifest) -> bytes:
        """Say which keys the only checkpoint of a directory has, and where.

        What Paddle would read wrong has, instead of its files, one that is not there, whose name says why.
        """
        catalog = manifest.catalog
        reason = _why_not(catalog)
        if reason:
            catalog = replace(catalog, files=(_sentence(reason),) * len(catalog.files))
        return _pickle(catalog)

    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name has been written here, if only in part.

        When power goes a file may keep its length without its bytes: they read as zeros.
        """
        return _BEGIN.startswith(data[: len(_BEGIN)]) or not any(data)


def _sentence(reason: str) -> str:
    return f"paddle_flexckpt wrote this and can load it; Paddle cannot, because {reason}"


def _why_not(catalog: Catalog) -> str:
    """Return why Paddle would read these shards wrong; empty if it reads them right."""
    unknown = sorted({catalog.dtypes[dtype] for dtype in np.unique(catalog.dtype)} - _DTYPES)
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
    return _why_not_flattened(catalog, rows[catalog.is_flattened[rows]])


def _why_not_flattened(catalog: Catalog, rows: np.ndarray) -> str:
    """Return the same for flattened ranges.

    Paddle makes a range the smallest box around it, wrongly where there are three axes, and fills the box from those
    ranges alone that are no boxes themselves.
    """
    start, stop = catalog.flat_start[rows], catalog.flat_stop[rows]
    first_axis = catalog.width - catalog.ndim[rows, None]
    below = np.where(np.arange(catalog.width) > first_axis, catalog.shape[rows], 1).prod(axis=1)
    below = np.maximum(below, 1)
    partial = (start % below != 0) | (stop % below != 0)
    if (partial & (catalog.ndim[rows] > 2)).any():
        return "a flattened range of a tensor with three or more axes begins or ends inside a row"
    places = [(int(key), *offset) for key, offset in zip(catalog.key[rows], catalog.offset[rows].tolist())]
    first, last = start // below, (stop - 1) // below
    inside = {(places[i], int(first[i])) for i in np.flatnonzero(partial & (first == last))}
    for i in np.flatnonzero(partial & (first != last)):
        cut = [int(first[i])] * bool(start[i] % below[i]) + [int(last[i])] * bool(stop[i] % below[i])
        if any((places[i], row) in inside for row in cut):
            return "flattened ranges that cross rows meet ranges inside a row"
    return ""


def _text(value: str) -> bytes:
    data = value.encode()
    return (b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(values: Sequence[int]) -> bytes:
    items = b"".join(map(_integer, values))
    ends = (b")", b"\x85", b"\x86", b"\x87")
    return items + ends[len(values)] if len(values) < len(ends) else b"(" + items + b"t"


class _Memo(dict[bytes, bytes]):
    """Give the opcodes that put a value on the stack: its own the first time, later its number in the reader's memo."""

    def __missing__(self, code: bytes) -> bytes:
        self[code] = b"j" + struct.pack("<I", len(self))
        return code + b"\x94"


class _Said(dict[Any, bytes]):
    """Give the opcodes of an instance's fields by what they say; most instances say what others have said before."""

    def __init__(self, memo: _Memo, fields: Callable[[Any], dict[str, bytes]]) -> None:
        super().__init__()
        self._memo, self._fields = memo, fields

    def __missing__(self, each: Any) -> bytes:
        first, self[each] = self._encode(each), self._encode(each)  # in the second all is known to the memo
        return first

    def _encode(self, each: Any) -> bytes:
        memo = self._memo
        codes = [code for name, value in self._fields(each).items() for code in (memo[_text(name)], memo[value])]
        return b"".join([*codes, b"ub"])


def _class(name: str) -> bytes:
    return _text(_CLASSES) + _text(name) + b"\x93"


def _pickle(catalog: Catalog) -> bytes:
    """Return the pickle, in which what is said again is called up from the reader's memo."""
    groups, descriptions = group_replicas(catalog), catalog.descriptions()
    row_of = dict(zip(descriptions, range(len(catalog))))

    def index_of(each: tuple[bytes, int]) -> dict[str, bytes]:
        """Return the fields of an index but for the key: of a description, and the replica's number or -1."""
        row, replica = row_of[each[0]], each[1]
        offset, shape = (_tuple(catalog.unpadded(row, column)) for column in (catalog.offset, catalog.shape))
        span = int(catalog.flat_start[row]), int(catalog.flat_stop[row])
        flat = {} if span[0] < 0 else {"is_flattened": b"\x88", "flattened_range": _tuple(span)}
        number = {} if replica < 0 else {"replica_id": _integer(replica)}
        return {"global_offset": offset, "local_shape": shape, **flat, **number}

    def shard_of(each: bytes) -> dict[str, bytes]:
        """Return the fields of a shard, of a description."""
        row, place = row_of[each], index_of((each, -1))
        box = {"global_offset": place.pop("global_offset"), "local_shape": place.pop("local_shape")}
        whole = _tuple(catalog.unpadded(row, catalog.global_shape))
        return {**box, "dtype": _text(catalog.dtype_name(row)), "global_shape": whole, **place}

    memo = _Memo()
    shards, indices = _Said(memo, shard_of), _Said(memo, index_of)
    keys, files = (list(map(_text, names)) for names in (catalog.keys, catalog.files))
    key, file, last = catalog.key.tolist(), catalog.file.tolist(), -1
    codes = [_BEGIN[:2], memo[_class("Metadata")], _NEW, memo[_text("state_dict_metadata")], b"}("]
    begin = _class("LocalTensorMetadata")
    for row in groups.first.tolist():  # by key
        if key[row] != last:
            codes += (b"e" if last >= 0 else b"", memo[keys[key[row]]], b"](")
            last = key[row]
        codes += (memo[begin], _NEW, shards[descriptions[row]])
    codes += (b"e" if last >= 0 else b"", b"u", memo[_text("storage_metadata")], b"}(")
    begin, name = _class("LocalTensorIndex"), _text("tensor_key")
    number = np.arange(len(groups.order)) - np.repeat(groups.start[:-1], groups.count)
    replicas = np.where(np.repeat(groups.count, groups.count) > 1, number, -1)
    for row, replica in zip(groups.order.tolist(), replicas.tolist()):
        index = indices[descriptions[row], replica]
        codes += (memo[begin], _NEW, memo[name], memo[keys[key[row]]], index, memo[files[file[row]]])
    return b"".join([*codes, b"u", memo[_text("flat_mapping")], b"}ub."])
