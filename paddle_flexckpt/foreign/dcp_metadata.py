"""Write ``.metadata`` of torch.distributed.checkpoint without torch: a pickle of its classes, operation by operation.

It contains only names, shapes, numbers and torch's own names, in the form in which Python pickles them.

Tested in tests/foreign/test_torch_saving.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from paddle_flexckpt.foreign.torch_saving import pickled_integer

# The version of torch.distributed.checkpoint, which writes it since torch 2.7 and compares it with nothing.
_VERSION = "1.0.0"
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
# The most items that become part of a list or dict at once, as in Python's pickler; the most bytes of a piece.
_BATCH = 1000
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
        # Parts of a nested state dict would be distinguished by separate names in the pickle: these are flat.
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
