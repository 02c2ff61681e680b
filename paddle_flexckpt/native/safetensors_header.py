"""Read headers of safetensors files strictly: bounded, without duplicates, every tensor inside the file.

Tested in tests/attacks/test_files.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import CODES
from paddle_flexckpt.media.backend import InputFile
from paddle_flexckpt.media.file_names import check_no_pointer
from paddle_flexckpt.native.json_cursor import JsonCursor

# safetensors' own limit (MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
_MAX_AXES = 64
_MAX_EXTENT = 1 << 60
_NUMBER = rb"(?:0|[1-9]\d{0,17})"
_TYPE = re.compile(r"[A-Z]{1,4}\d[A-Z0-9_]{0,14}")
_USUAL = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,11})","shape":\[((?:%b(?:,%b){0,31})?)\],"data_offsets":\[(%b),(%b)\]\}'
    % (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
)
_ITEMSIZE = {code: dtype.itemsize for code, dtype in CODES.items()}


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file.

    Attributes:
        code: Its element type's code.
        shape: Its shape.
        begin: Its first byte, counted from the start of the file.
        end: The first byte beyond it.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


# The contents of an entry: element type, shape, and where the tensor begins and ends behind the header.
_Entry = tuple[str, "list[int]", int, int]


class Header(NamedTuple):
    """A header's contents: its tensors by name, ``__metadata__``, and its text."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    text: bytes


def header_bytes(start: bytes, file_bytes: int, file: str, most: int = MAX_HEADER_BYTES) -> int:
    """Return the length of the header, by the first 8 bytes of a file.

    Raises:
        CorruptCheckpointError: It is longer than the file, or than ``most`` bytes.
    """
    check_no_pointer(file, start)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(most, file_bytes - 8):
        raise _damaged(file, f"its header has {length} bytes by its first 8 bytes; the file has {file_bytes}")
    return length


def read_header(file: InputFile, name: str) -> Header:
    """Read the header of a file.

    Raises:
        CorruptCheckpointError: The header is longer than the file, or is not a header.
    """
    length = header_bytes(file.read(0, 8), file.size, name)
    return parse_header(file.read(8, length), file.size, name)


def parse_header(text: bytes, file_bytes: int, file: str) -> Header:
    """Parse a header, entry by entry: text that is not an entry is refused before anything is built of it.

    ``text`` is JSON, without the 8 bytes before it; ``file`` is the file's name, for errors.

    Raises:
        CorruptCheckpointError: It is not a header, or tensors overlap, leave gaps or leave the file.
    """
    # JSON allows other whitespace; the padding of the format is spaces, at the end.
    if text[:1] != b"{" or text[len(text.rstrip(b" ")) - 1 :][:1] != b"}":
        raise _damaged(file, "its header is not a JSON object that is padded with spaces")
    start = 8 + len(text)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    position, in_order = start, True
    cursor = JsonCursor(text)
    try:
        for name in cursor.entries():
            if name == "__metadata__":
                metadata = cursor.texts()
                continue
            usual = cursor.match(_USUAL)
            entry = _checked(name, cursor.value(), file) if usual is None else _entry(*usual)
            tensor = tensors[name] = _tensor(name, entry, start, file)
            in_order = in_order and tensor.begin == position
            position = tensor.end
        cursor.end()
    except ValidationError:
        raise
    except ValueError as error:
        raise _damaged(file, f"its header is not that of a safetensors file: {error}") from error
    if not in_order:
        position = start
        for name in sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end)):
            if tensors[name].begin != position:
                raise _damaged(file, f"tensor {name!r} begins at byte {tensors[name].begin}; expected {position}")
            position = tensors[name].end
    if position != file_bytes:
        raise _damaged(file, f"its tensors end at byte {position}; the file has {file_bytes} bytes")
    return Header(tensors, metadata, text)


def _entry(code: bytes, shape: bytes, begin: bytes, end: bytes) -> _Entry:
    """Return the value of an entry, of which there may be very many, in the spelling of safetensors' own writer."""
    return code.decode(), list(map(int, shape.split(b","))) if shape else [], int(begin), int(end)


def _checked(name: str, entry: Any, file: str) -> _Entry:
    """Return the value of an entry in any spelling."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"the entry of tensor {name!r} is not dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _ITEMSIZE:
        raise _unknown(name, code, file)
    if not _are_extents(shape) or len(shape) > _MAX_AXES:
        raise _damaged(file, f"tensor {name!r} has a shape that is not a list of extents")
    if not _are_extents(offsets) or len(offsets) != 2:
        raise _damaged(file, f"tensor {name!r} has offsets that are not two positions")
    return code, shape, offsets[0], offsets[1]


def _tensor(name: str, entry: _Entry, start: int, file: str) -> StoredTensor:
    code, shape, begin, end = entry
    if code not in _ITEMSIZE:
        raise _unknown(name, code, file)
    expected = math.prod(shape) * _ITEMSIZE[code]
    if end - begin != expected:
        got = end - begin
        raise _damaged(file, f"tensor {name!r} of shape {shape} and type {code} has {got} bytes; expected {expected}")
    return StoredTensor(code, tuple(shape), start + begin, start + end)


def _unknown(name: str, code: Any, file: str) -> Exception:
    if isinstance(code, str) and _TYPE.fullmatch(code):
        what = f"tensor {name!r} has the element type {code}, which is not supported"
        return ValidationError(
            [f"{file}: {what}. Remedy (FC701): let the file's writer save the tensor in another type"]
        )
    return _damaged(file, f"tensor {name!r} has the unknown element type {str(code)[:20]!r}")


def _are_extents(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < _MAX_EXTENT for x in value)


def _damaged(file: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file} is damaged or not a safetensors file: {what}. Remedy (FC305): restore the file"
    )
