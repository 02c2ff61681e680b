"""Write the files of Paddle's own checkpoints, without Paddle: ``{id}.metadata`` and ``{rank}_{id}.distcp``.

The first is a pickle of Paddle's class ``Metadata``, the second one of a dict of arrays, as ``paddle.save`` makes it.
This module makes the bytes around each array: so a file is written tensor by tensor, and is never in memory as a whole.

Tested in tests/foreign/test_paddle_files.py and tests/save/test_paddle_reads.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, group_replicas
from paddle_flexckpt.foreign.paddle_pickles import PARAMETER_NAMES
from paddle_flexckpt.foreign.pickle_writer import (
    BEGIN,
    EMPTY_DICT,
    END,
    FALSE,
    FILLED,
    NEW,
    NONE,
    TRUE,
    UNFRAMED,
    Memo,
    call,
    integer,
    integers,
    long_bytes,
    named,
    sequence,
    short_bytes,
    text,
)

_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"
# Numpy's substitutes for element types that it lacks; the metadata has the true type.
STAND_INS = {"bfloat16": "uint16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
# The types that Paddle 3.3.1 reads from a .distcp file bit for bit; where it moves nothing, it turns float8 into int8.
DISTCP_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
    | {"complex64", "complex128"}
)
_MINUS_ONE = b"J\xff\xff\xff\xff"
# The end of an array's state, and of the array.
_ARRAY_END = b"tb"


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
        """Yield the bytes of the file, given the elements of its shards in their order.

        Args:
            data: Any number of arrays, none of which has elements of two shards; none for an empty shard.

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

    Args:
        catalog: The shards; replicas are numbered by rank.
        flat_mapping: Whether it maps each key to itself in the state dict, as Paddle does.
    """
    groups, descriptions = group_replicas(catalog), catalog.descriptions()
    row_of = dict(zip(descriptions, range(len(catalog))))

    def index_of(each: tuple[bytes, int]) -> dict[str, bytes]:
        """Return the fields of an index except the key: of a description, and the replica's number or -1."""
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
