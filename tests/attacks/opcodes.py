"""Pickles written operation by operation, and a canary that tells whether anything in them was carried out."""

from __future__ import annotations

import struct


def short(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    """STACK_GLOBAL, of protocol 4."""
    return short(module) + short(name) + b"\x93"


def named_by_line(module: str, name: str) -> bytes:
    """GLOBAL, of protocols 0 to 3."""
    return b"c" + f"{module}\n{name}\n".encode()


def program(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def call(name: bytes, *arguments: str) -> bytes:
    return name + b"(" + b"".join(map(short, arguments)) + b"tR"


def long8(code: bytes, length: int, data: bytes = b"") -> bytes:
    return code + struct.pack("<Q", length) + data


def long4(code: bytes, length: int, data: bytes = b"") -> bytes:
    return code + struct.pack("<I", length) + data


DTYPE = (
    named("numpy", "dtype")
    + short("f4")
    + b"\x89\x88\x87R(K\x03"
    + short("<")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)


def array(shape: bytes, dtype: bytes = DTYPE, payload: bytes = b"C\x04\0\0\0\0") -> bytes:
    """An array: ``shape`` and ``payload`` are operations that push them."""
    begin = named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
    return begin + b"(K\x01" + shape + dtype + b"\x89" + payload + b"tb"
