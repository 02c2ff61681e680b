"""Find the tensors of an archive of ``torch.save`` by byte ranges: nothing is unpickled, unpacked, or read as a whole.

``data.pkl`` has element types, shapes and strides; the members ``data/0``, ``data/1``, ... are the elements.

The module also has the vocabularies of pickles: ``data.pkl``, and ``.metadata`` of torch.distributed.checkpoint.
As in ``pickle_values.py`` nothing is looked up: each name stands for a function here, which makes plain data.

Tested in tests/foreign/test_torch_dcp.py and tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from paddle_flexckpt.catalog import UnsafePickleError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.pickle_values import (
    Arguments,
    Symbol,
    Unfinished,
    Vocabulary,
    has_type,
    is_integer,
    is_integers,
    make_record,
    or_none,
    refused,
)
from paddle_flexckpt.foreign.zip_directory import STORED, Read, ZipMember, damaged, find_bytes, read_directory


class Archive(NamedTuple):
    """An archive: the prefix of its members' names, the members, the pickled object, and the members read."""

    start: str
    members: Mapping[str, ZipMember]
    value: Any
    texts: Sequence[ZipMember]


def open_archive(
    read: Read, size: int, where: str, vocabulary: Vocabulary, most_bytes: int, known: dict[bytes, Any]
) -> Archive:
    """Read the directory and the pickle of an archive of so many bytes.

    ``known`` has the results of equal pickles; ``most_bytes`` is the most bytes that a pickle may have.

    Raises:
        CorruptCheckpointError: It is not an archive of torch.save; UnsafePickleError if the pickle is more than data.
        ValidationError: It was written on a machine with another byte order.
    """
    members = {member.name: member for member in read_directory(read, size, where)}
    found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise damaged(where, "it is no archive of torch.save")
    start, pickle = found[0][: -len("data.pkl")], members[found[0]]
    order = members.get(start + "byteorder")
    if order is not None and read(find_bytes(read, order, where), order.size) != b"little":
        remedy = "load it in torch on a machine of this byte order, and save it there"
        raise ValidationError(f"{where}: the machine that wrote it had another byte order. Remedy (FC701): {remedy}")
    if pickle.size > most_bytes or pickle.method != STORED:
        raise damaged(where, f"data.pkl has {pickle.size} bytes, compressed by method {pickle.method}")
    text = read(find_bytes(read, pickle, where), pickle.size)
    if text not in known:
        known[text] = load_pickle(text, where, vocabulary)
    return Archive(start, members, known[text], [pickle] if order is None else [pickle, order])


def place_elements(read: Read, archive: Archive, tensor: SavedTensor, where: str) -> tuple[int, ZipMember]:
    """Return the place of a tensor's first element in its archive, and its member.

    Raises:
        CorruptCheckpointError: The elements are missing, compressed, or fewer than the pickle says.
    """
    member = archive.members.get(f"{archive.start}data/{tensor.storage.member}")
    if member is None or member.method != STORED:
        raise damaged(where, f"the elements (data/{tensor.storage.member[:20]}) are missing or compressed")
    itemsize = DTYPES[tensor.dtype].itemsize
    count = tensor.storage.number * (1 if tensor.storage.dtype == UNTYPED else itemsize)
    is_empty = 0 in tensor.size
    reach = tensor.offset + 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.size, tensor.stride))
    reach = max(reach, math.prod(tensor.size))  # torch never stores one element for several
    if count != member.size or (not is_empty and reach * itemsize > member.size):
        raise damaged(where, f"a storage of {count} bytes, of which {reach * itemsize} are needed, has {member.size}")
    return find_bytes(read, member, where) + tensor.offset * itemsize, member


# Names of known element types that no catalog has.
_OTHER_DTYPES = "complex32 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32".split()
TYPED_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
UNTYPED = "bytes"


class Chunk(NamedTuple):
    """A chunk of a tensor: its first element, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor: the name of its element type, its shape, its chunks."""

    dtype: str
    size: tuple[int, ...]
    chunks: list[Chunk]


class BytesEntry(NamedTuple):
    """An entry that is not a tensor."""


class Properties(NamedTuple):
    """The properties of a tensor that matter here."""

    dtype: str


class ItemIndex(NamedTuple):
    """The index of an item: a tensor's chunk by its first element, or another entry."""

    fqn: str
    offset: tuple[int, ...] | None = None


class ItemPlace(NamedTuple):
    """The place of an item's bytes, and the transforms applied to them."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | tuple[str, ...] | None = None


class DcpMetadata(NamedTuple):
    """The contents of ``.metadata``: entries by name, and the place of each item; the last field is Megatron-Core's."""

    state_dict_metadata: Mapping[str, TensorEntry | BytesEntry]
    storage_data: Mapping[ItemIndex, ItemPlace]
    planner_data: Any = None
    storage_meta: Any = None
    version: str | None = None
    mcore_data: Mapping[str, Any] | None = None
    all_local_plans: Any = None


class Storage(NamedTuple):
    """A storage of an archive: its element type, its member under ``data/``, its number of elements."""

    dtype: str
    member: str
    number: int


class SavedTensor(NamedTuple):
    """A tensor's elements in their storage; strides and offset are in elements."""

    storage: Storage
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if len(arguments) != 1 or not is_integers(arguments[0]):
        raise UnsafePickleError("torch.Size with other arguments than a tuple of integers >= 0")
    return tuple(arguments[0])


def _name(arguments: tuple[Any, ...]) -> str:
    # Layouts, memory formats and storages' paths: texts or small numbers that are not needed.
    if not all(type(each) in (str, int) for each in arguments):
        raise UnsafePickleError("a name of torch's with other arguments than texts and integers")
    return "/".join(map(str, arguments))


def _hooks(arguments: tuple[Any, ...]) -> tuple[()]:
    if arguments:
        raise UnsafePickleError("collections.OrderedDict with arguments")
    return ()


def _properties() -> Unfinished:
    def finish(state: Any) -> Properties:
        items = state.items if type(state) is Arguments else ()
        if len(items) != 5 or type(items[0]) is not Symbol:
            raise refused("the state of TensorProperties has to be five values, of which the first is a dtype", state)
        return Properties(items[0].name)

    return Unfinished("TensorProperties", finish)


def _tensor(arguments: tuple[Any, ...]) -> SavedTensor:
    typed = len(arguments) in (6, 7) and type(arguments[0]) is Storage
    if not typed or not is_integer(arguments[1]) or not all(map(is_integers, arguments[2:4])):
        raise UnsafePickleError("a tensor with other arguments than a storage, an offset, a size and strides")
    storage, offset, size, stride = arguments[:4]
    given = arguments[6] if len(arguments) == 7 else None
    # The seventh is metadata in the second version, and a dtype in the third, whose storage has none.
    dtype = given.name if type(given) is Symbol else storage.dtype
    if len(size) != len(stride) or dtype == UNTYPED or (given is not None and storage.dtype != UNTYPED):
        raise UnsafePickleError("a tensor whose size, strides, storage and type do not belong together")
    return SavedTensor(storage, dtype, offset, size, stride)


def _storage(identifier: Any) -> Storage:
    items = identifier.items if type(identifier) is Arguments else ()
    if len(items) != 5 or items[0] != "storage" or type(items[1]) is not Symbol or type(items[2]) is not str:
        raise refused("a persistent id has to be ('storage', type, key, location, number)", identifier)
    if items[1].name not in (UNTYPED, *TYPED_STORAGES.values()) or not is_integer(items[4]):
        raise refused("a storage has to have a type and a number of elements", items[4])
    return Storage(items[1].name, items[2], items[4])


def _is_entries(value: Any) -> bool:
    kinds = (TensorEntry, BytesEntry)
    return type(value) is dict and all(type(k) is str and type(v) in kinds for k, v in value.items())


def _is_places(value: Any) -> bool:
    return (
        type(value) is dict and set(map(type, value)) <= {ItemIndex} and set(map(type, value.values())) <= {ItemPlace}
    )


def _is_chunks(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {Chunk}


def _is_names(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(each) is str for each in value)


def _is_any(value: Any) -> bool:
    return True


def _entry(properties: Properties, size: tuple[int, ...], chunks: list[Chunk]) -> TensorEntry:
    return TensorEntry(properties.dtype, size, chunks)


def _index(fqn: str, offset: tuple[int, ...] | None = None, index: int | None = None) -> ItemIndex:
    return ItemIndex(fqn, offset)  # the index is a hint


def _nothing(**fields: Any) -> None:
    """Leave a record out."""


_text, _numbers = has_type(str), is_integers
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_Checks = Mapping[str, Callable[[Any], bool]]
_RECORDS: dict[tuple[str, str], tuple[Callable[..., Any], _Checks, frozenset[str]]] = {
    (_METADATA, "Metadata"): (
        DcpMetadata,
        {
            "state_dict_metadata": _is_entries,
            "storage_data": _is_places,
            "planner_data": _is_any,
            "storage_meta": _is_any,
            "version": or_none(_text),
            "mcore_data": or_none(has_type(dict)),
            "all_local_plans": _is_any,
        },
        frozenset({"state_dict_metadata", "storage_data"}),
    ),
    (_METADATA, "TensorStorageMetadata"): (
        _entry,
        {"properties": has_type(Properties), "size": _numbers, "chunks": _is_chunks},
        frozenset({"properties", "size", "chunks"}),
    ),
    (_METADATA, "ChunkStorageMetadata"): (
        Chunk,
        {"offsets": _numbers, "sizes": _numbers},
        frozenset({"offsets", "sizes"}),
    ),
    (_METADATA, "MetadataIndex"): (
        _index,
        {"fqn": _text, "offset": or_none(_numbers), "index": or_none(is_integer)},
        frozenset({"fqn"}),
    ),
    (_FILES, "_StorageInfo"): (
        ItemPlace,
        {
            "relative_path": _text,
            "offset": is_integer,
            "length": is_integer,
            "transform_descriptors": or_none(_is_names),
        },
        frozenset({"relative_path", "offset", "length"}),
    ),
    (_METADATA, "StorageMeta"): (
        _nothing,
        dict.fromkeys(("checkpoint_id", "save_id", "load_id", "modules"), _is_any),
        frozenset(),
    ),
}
# Plans of the save, which Megatron-Core keeps for the next one: they are not needed here.
_PLANS = {
    "SavePlan": ("items", "storage_data", "planner_data", "usable"),
    "WriteItem": ("index", "type", "bytes_io_data", "tensor_data"),
    "TensorWriteData": ("chunk", "properties", "size"),
    "BytesIOWriteData": ("nbytes",),
}
_PLANNER, _MEGATRON = "torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS[_MEGATRON, "MCoreMetadata"] = _RECORDS[_METADATA, "Metadata"]
_RECORDS.update(
    ((_PLANNER, name), (_nothing, dict.fromkeys(fields, _is_any), frozenset())) for name, fields in _PLANS.items()
)
_RECORDS[_MEGATRON, "MCoreSavePlan"] = _RECORDS[_PLANNER, "SavePlan"]
_DTYPE_NAMES = {("torch", name): Symbol(name) for name in (*DTYPES, *_OTHER_DTYPES)}
_METADATA_NAMES = MappingProxyType(
    {(module, name): Symbol(name, make=make_record(name, *record)) for (module, name), record in _RECORDS.items()}
    | {(module, "TensorProperties"): Symbol("TensorProperties", make=_properties) for module in (_METADATA, _OLD)}
    | {
        (_METADATA, "BytesStorageMetadata"): Symbol("BytesStorageMetadata", make=BytesEntry),
        (_METADATA, "_MEM_FORMAT_ENCODING"): Symbol("_MEM_FORMAT_ENCODING", _name),
        (_OLD, "MEM_FORMAT_ENCODING"): Symbol("MEM_FORMAT_ENCODING", _name),
        ("torch.serialization", "_get_layout"): Symbol("_get_layout", _name),
        ("torch", "Size"): Symbol("torch.Size", _size),
        (_PLANNER, "WriteItemType"): Symbol("WriteItemType", _name),
        ("pathlib", "PosixPath"): Symbol("PosixPath", _name),
        ("pathlib._local", "PosixPath"): Symbol("PosixPath", _name),
    }
    | _DTYPE_NAMES
)
_TENSOR_NAMES = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor_v2"): Symbol("_rebuild_tensor_v2", _tensor),
        ("torch._utils", "_rebuild_tensor_v3"): Symbol("_rebuild_tensor_v3", _tensor),
        ("torch.storage", "UntypedStorage"): Symbol(UNTYPED),
        ("collections", "OrderedDict"): Symbol("OrderedDict", _hooks),
    }
    | {("torch", name): Symbol(dtype) for name, dtype in TYPED_STORAGES.items()}
    | _DTYPE_NAMES
)
# For ``.metadata``; and for ``data.pkl`` in the archive of an item.
DCP_METADATA = Vocabulary(
    _METADATA_NAMES,
    frozenset({TensorEntry, BytesEntry, Properties, Chunk, ItemIndex, ItemPlace}),
    frozenset({ItemIndex}),
)
DCP_TENSOR = Vocabulary(_TENSOR_NAMES, frozenset({Storage}), frozenset(), _storage)
