"""Write pickles opcode by opcode, as Paddle's own files need, without Paddle, and never as a whole in memory.

Opcodes of protocol 4, without frames. A repeated value is read from the reader's memo. Tested in
tests/foreign/test_paddle_files.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
