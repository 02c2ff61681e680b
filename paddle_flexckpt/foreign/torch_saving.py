"""Write the files of torch.distributed.checkpoint without torch, and without having the elements at hand.

A tensor is an archive of ``torch.save``, which is zip without compression. Its members are ``data.pkl``, which is a
pickle of the tensor's type and shape, the elements, and small ones around them. Sizes and places are known before the
elements are; their checksum follows them.

``.metadata`` is a pickle of torch's classes, written operation by operation. It contains only names, shapes, numbers
and torch's own names, in the form in which Python pickles them.

Tested in tests/foreign/test_torch_saving.py.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.strided_boxes import row_major
from paddle_flexckpt.foreign.torch_archive import TYPED_STORAGES

_START = "archive/"
_ALIGNMENT = 64
_LOCAL, _ENTRY = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
# Names are UTF-8; members with bytes are followed by their checksum.
_TEXT_NAME, _CHECKSUM_FOLLOWS = 0x0800, 0x0008
# Larger sizes and places have 64 bits.
_MOST_32 = 0xFFFFFFFF
# torch's hashes of the names of these members, for the fingerprint that it puts into an archive.
_NAMES_HASH = 15728199511854643026
_STORAGE_TYPES = {dtype: name for name, dtype in TYPED_STORAGES.items()}


class TensorArchive(NamedTuple):
    """The archive of a tensor; :func:`head_of` and :func:`tail_of` are its bytes around the elements.

    Attributes:
        dtype: The name of its element type.
        shape: Its shape; the elements are in row-major order.
        data_bytes: Bytes of its elements.
        nbytes: Bytes of the archive.
    """

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    nbytes: int


@functools.lru_cache(maxsize=4096)
def plan_archive(dtype: str, shape: tuple[int, ...]) -> TensorArchive:
    """Lay out the archive of a tensor."""
    data_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    return TensorArchive(dtype, shape, data_bytes, sum(map(len, _around(dtype, shape, 0))) + data_bytes)


@functools.lru_cache(maxsize=1024)
def head_of(archive: TensorArchive) -> bytes:
    """Return the bytes before the elements."""
    return _around(archive.dtype, archive.shape, 0)[0]


def tail_of(archive: TensorArchive, checksum: int) -> bytes:
    """Return the bytes after the elements, given their CRC-32."""
    return _around(archive.dtype, archive.shape, checksum)[1]


def _around(dtype: str, shape: tuple[int, ...], checksum: int) -> tuple[bytes, bytes]:
    """Return the archive without its elements, in two parts."""
    zipped = _Zip()
    zipped.add("data.pkl", _pickle(dtype, shape))
    zipped.add(".format_version", b"1")
    zipped.add(".storage_alignment", b"%d" % _ALIGNMENT)
    zipped.add("byteorder", b"little")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    zipped.begin("data/0", size)
    head, zipped.written = b"".join(zipped.written), []
    zipped.end("data/0", size, checksum)
    zipped.add("version", b"3\n")
    zipped.add(".data/serialization_id", b"%020d%020d" % (_NAMES_HASH, zipped.fingerprint))
    zipped.finish()
    return head, b"".join(zipped.written)


class _Zip:
    """The bytes of an archive as torch's writer makes them: members are aligned, their sizes and checksums follow them.

    Attributes:
        written: The bytes so far, but for those of members that are not at hand.
        fingerprint: What torch makes of the checksums of members so far.
    """

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.fingerprint = 0
        self._at = self._header = 0
        self._entries: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        """Write a member."""
        self.begin(name, len(data))
        self.written.append(data)
        self.end(name, len(data), zlib.crc32(data))

    def begin(self, name: str, size: int) -> None:
        """Write the bytes before a member's contents, which come next."""
        text = (_START + name).encode()
        extra = self._large(size, self._at)
        begin = self._at + _LOCAL.size + len(text) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self._header = self._at
        flags = _TEXT_NAME | (_CHECKSUM_FOLLOWS if size else 0)
        self._put(_LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(text), len(extra)) + text + extra)
        self._at += size

    def end(self, name: str, size: int, checksum: int) -> None:
        """Write the bytes after a member's contents, and record its entry."""
        text, header = (_START + name).encode(), self._header
        extra = self._large(size, header)
        flags = _TEXT_NAME
        if size:
            flags |= _CHECKSUM_FOLLOWS
            self._put(struct.pack("<4sL2Q" if extra else "<4s3L", b"PK\7\x08", checksum, size, size))
            seed = self.fingerprint
            self.fingerprint = (seed ^ (checksum + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & (2**64 - 1)
        small = min(size, _MOST_32)
        numbers = (0, 0, flags, 0, 0, 0, checksum if size else 0, small, small, len(text), len(extra), 0, 0, 0, 0)
        self._entries.append(_ENTRY.pack(b"PK\1\2", *numbers, min(header, _MOST_32)) + text + extra)

    def finish(self) -> None:
        """Write the directory."""
        begin, count, directory = self._at, len(self._entries), b"".join(self._entries)
        self._put(directory)
        end = self._at
        self._put(_END64.pack(b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, count, count, len(directory), begin))
        self._put(_LOCATOR.pack(b"PK\6\7", 0, end, 1))
        self._put(_END.pack(b"PK\5\6", 0, 0, count, count, len(directory), min(begin, _MOST_32), 0))

    def _put(self, data: bytes) -> None:
        self.written.append(data)
        self._at += len(data)

    @staticmethod
    def _large(size: int, header: int) -> bytes:
        """Return the field for a size and place that do not fit into 32 bits; nothing if they do."""
        values = [size, size] * (size >= _MOST_32) + [header] * (header >= _MOST_32)
        return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor, of protocol 2, whose elements are in ``data/0``."""
    memo = 0

    def put(code: bytes) -> bytes:
        nonlocal memo
        memo += 1
        return code + b"q" + bytes([memo - 1])

    def named(module: str, name: str) -> bytes:
        return put(f"c{module}\n{name}\n".encode())

    def numbers(values: Sequence[int]) -> bytes:
        items = b"".join(map(pickled_integer, values))
        if len(values) > 3:
            return put(b"(" + items + b"t")
        return put(items + bytes([0x84 + len(values)])) if values else b")"

    storage = _STORAGE_TYPES.get(dtype)
    count = math.prod(shape)
    parts = [b"\x80\x02", named("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"), b"(("]
    parts += [put(_text("storage")), named("torch", storage) if storage else named("torch.storage", "UntypedStorage")]
    parts += [put(_text("0")), put(_text("cpu"))]
    parts += [
        put(pickled_integer(count if storage else count * DTYPES[dtype].itemsize) + b"t"),
        b"Q",
        pickled_integer(0),
    ]
    parts += [numbers(shape), numbers(_strides(shape)), b"\x89"]
    parts += [named("collections", "OrderedDict"), put(b")R")]
    if not storage:
        parts.append(named("torch", dtype))
    return b"".join([*parts, put(b"t"), put(b"R"), b"."])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a tensor in row-major order: an extent of 0 counts as 1."""
    return row_major([max(extent, 1) for extent in shape])


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def pickled_integer(value: int) -> bytes:
    """Return the operation that puts a nonnegative number onto the stack, as Python's pickler writes it."""
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little")


# The version of torch.distributed.checkpoint, which writes it since torch 2.7 and compares it with nothing.
_VERSION = "1.0.0"
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
# The most items that become part of a list or dict at once, as in Python's pickler.
_BATCH = 1000
# Opcodes are joined into pieces of about so many bytes.
_PIECE_BYTES = 1 << 16
_NEW = b")\x81\x94}\x94("
_DONE = b"ub"


class DcpChunk(NamedTuple):
    """A box of a tensor: its first element, its shape, its file, and the stretch of that where its archive is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


class DcpTensor(NamedTuple):
    """A tensor: its key, the name of its element type, its shape, its chunks."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]


def encode_dcp_metadata(tensors: Sequence[DcpTensor]) -> bytes:
    """Return the file; each key belongs to one tensor, and each tensor has a chunk."""
    return b"".join(_in_pieces(_Writer().write(tensors)))


def _in_pieces(codes: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same in fewer pieces: millions of short ones would take much memory."""
    found: list[bytes] = []
    size = 0
    for code in codes:
        found.append(code)
        size += len(code)
        if size >= _PIECE_BYTES:
            yield b"".join(found)
            found, size = [], 0
    yield b"".join(found)


class _Writer:
    """A generator of operations, which counts the values that they put into the reader's memo."""

    def __init__(self) -> None:
        self._memo = 0
        self._known: dict[bytes, bytes] = {}

    def write(self, tensors: Sequence[DcpTensor]) -> Iterator[bytes]:
        """Yield the operations of all of it."""
        yield b"\x80\x04" + self._begin(_METADATA, "Metadata")
        yield self._text("state_dict_metadata") + self._put(b"}")
        yield from self._batches((self._tensor(each) for each in tensors), b"u")
        # It maps each key to its path in a nested state dict. These state dicts are flat: the path is the key alone.
        yield self._text("planner_data") + self._put(b"}")
        yield from self._batches(([self._text(each.key), self._path(each.key)] for each in tensors), b"u")
        yield self._text("storage_data") + self._put(b"}")
        yield from self._batches((self._place(*each) for each in _numbered(tensors)), b"u")
        yield self._text("version") + self._text(_VERSION) + _DONE + b"."

    def _batches(self, items: Iterable[Iterable[bytes]], end: bytes) -> Iterator[bytes]:
        """Yield the operations of items, and those that add them to the list or dict below."""
        count = 0
        for item in items:
            if count % _BATCH == 0:
                yield b"(" if not count else end + b"("
            yield from item
            count += 1
        if count:
            yield end

    def _tensor(self, tensor: DcpTensor) -> Iterator[bytes]:
        yield self._text(tensor.key) + self._begin(_METADATA, "TensorStorageMetadata")
        yield self._text("properties") + self._properties(tensor.dtype)
        yield self._text("size") + self._size(tensor.shape)
        yield self._text("chunks") + self._put(b"]")
        yield from self._batches((self._chunk(each) for each in tensor.chunks), b"e")
        yield _DONE

    def _properties(self, dtype: str) -> bytes:
        """Make the properties that torch gives a tensor in row-major order on the host, without a gradient."""
        code = self._class(_METADATA, "TensorProperties") + self._put(b")\x81") + b"("
        code += self._class("torch", dtype)
        code += self._call("torch.serialization", "_get_layout", lambda: self._text("torch.strided"))
        code += b"\x89"
        code += self._call(_METADATA, "_MEM_FORMAT_ENCODING", lambda: b"K\x00")
        return code + b"\x89" + self._put(b"t") + b"b"

    def _chunk(self, chunk: DcpChunk) -> Iterator[bytes]:
        yield self._begin(_METADATA, "ChunkStorageMetadata")
        yield self._text("offsets") + self._size(chunk.offset)
        yield self._text("sizes") + self._size(chunk.shape)
        yield _DONE

    def _path(self, key: str) -> bytes:
        return self._put(self._text(key) + b"\x85")

    def _place(self, key: str, number: int, chunk: DcpChunk) -> Iterator[bytes]:
        yield self._begin(_METADATA, "MetadataIndex")
        yield self._text("fqn") + self._text(key)
        yield self._text("index") + pickled_integer(number)
        yield self._text("offset") + self._size(chunk.offset)
        yield _DONE
        yield self._begin(_FILES, "_StorageInfo")
        yield self._text("relative_path") + self._text(chunk.file)
        yield self._text("offset") + pickled_integer(chunk.begin)
        yield self._text("length") + pickled_integer(chunk.length)
        yield _DONE

    def _put(self, code: bytes) -> bytes:
        self._memo += 1
        return code + b"\x94"

    def _shared(self, name: bytes, make: Callable[[], bytes]) -> bytes:
        """Return the operations that make a value the first time, and read it from the memo later."""
        known = self._known.get(name)
        if known is not None:
            return known
        code = make()
        number = self._memo - 1
        self._known[name] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return code

    def _text(self, value: str) -> bytes:
        data = value.encode()
        head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        return self._shared(b"text " + data, lambda: self._put(head + data))

    def _class(self, module: str, name: str) -> bytes:
        def make() -> bytes:
            return self._put(self._text(module) + self._text(name) + b"\x93")

        return self._shared(f"class {module}.{name}".encode(), make)

    def _begin(self, module: str, name: str) -> bytes:
        """Begin an object, whose fields follow."""
        code = self._class(module, name) + _NEW
        self._memo += 2
        return code

    def _call(self, module: str, name: str, argument: Callable[[], bytes]) -> bytes:
        """Call a function, with the same argument each time."""

        def make() -> bytes:
            function = self._class(module, name)
            return self._put(function + self._put(argument() + b"\x85") + b"R")

        return self._shared(f"call {module}.{name}".encode(), make)

    def _size(self, values: Sequence[int]) -> bytes:
        size = self._class("torch", "Size")
        items = b"".join(map(pickled_integer, values))
        if len(values) > 3:
            items = self._put(b"(" + items + b"t")
        else:
            items = self._put(items + bytes([0x84 + len(values)])) if values else b")"
        return self._put(self._put(size + items + b"\x85") + b"R")


def _numbered(tensors: Iterable[DcpTensor]) -> Iterator[tuple[str, int, DcpChunk]]:
    for tensor in tensors:
        for number, chunk in enumerate(tensor.chunks):
            yield tensor.key, number, chunk
