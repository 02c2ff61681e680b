"""Read the directory of a zip archive, which may be a part of a file, and find where its members' bytes are.

Only the directory's entries are read, and compared with the bytes of the archive; nothing is unpacked.

Tested in tests/foreign/test_npz.py.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.file_names import check_file_name, check_no_pointer

# Reads a length from an offset of the archive; fewer bytes where it ends.
Read = Callable[[int, int], bytes]
_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
# The directory of a short archive, with its end, fits into these bytes.
_TAIL_BYTES = 1024
_MOST_DIRECTORY_BYTES = 64 << 20
STORED = 0
_CHECKSUM_BYTES = 4
# Archives that are compared at once: some hundred bytes of each are copied.
_AT_ONCE = 4096


class ZipMember(NamedTuple):
    """A member of an archive.

    Attributes:
        name: The member's name.
        method: The method of its compression, or :data:`STORED`.
        size: The number of its bytes in the archive.
        header: The place of its header in the archive.
    """

    name: str
    method: int
    size: int
    header: int


def read_directory(read: Read, size: int, where: str) -> list[ZipMember]:
    """Return the members of an archive of so many bytes; ``where`` names it in errors.

    Raises:
        CorruptCheckpointError: It is not an archive, is damaged, or has a name twice, or one that leads out of it.
    """
    begin, count, text, _ = _read_text(read, size, where)
    members = []
    position = 0
    for _ in range(count):
        member, position = _read_entry(text, position, where)
        if member.header + _LOCAL.size + member.size > begin:
            raise damaged(where, f"member {member.name[:80]!r} is not inside it")
        members.append(member)
    if len({member.name for member in members}) != count:
        raise damaged(where, "two members have the same name")
    return members


class Layout:
    """The layout of one archive, to find others of the same size whose members are at the same places.

    These have the same directory, headers and small members, except for checksums, which are not compared.
    """

    def __init__(self, read: Read, size: int, where: str, members: Sequence[ZipMember], small: Sequence[ZipMember]):
        """Read an archive."""
        begin, count, directory, end = _read_text(read, size, where)
        pieces = [(begin, directory)]
        checksums = []
        position = 0
        for _ in range(count):
            checksums.append(begin + position + 16)
            position = _read_entry(directory, position, where)[1]
        pieces.append((end, read(end, size - end)))
        for member in members:
            pieces.append((member.header, read(member.header, _LOCAL.size + len(member.name.encode()))))
            checksums.append(member.header + 14)
        for member in small:
            at = find_bytes(read, member, where)
            pieces.append((at, read(at, member.size)))
        fixed = {at + i: text[i] for at, text in pieces for i in range(len(text))}
        for at in checksums:
            for i in range(_CHECKSUM_BYTES):
                fixed.pop(at + i, None)
        # Bytes that have to be equal, as stretches.
        self._stretches: list[tuple[int, bytes]] = []
        begin = 0
        places = sorted(fixed)
        for number, at in enumerate(places):
            if number + 1 == len(places) or places[number + 1] != at + 1:
                text = bytes(map(fixed.__getitem__, places[begin : number + 1]))
                self._stretches.append((places[begin], text))
                begin = number + 1

    def match_at(self, data: mmap.mmap, begins: np.ndarray) -> np.ndarray:
        """Return for each place whether such an archive begins there. It would end before the data does."""
        found = np.ones(len(begins), dtype=bool)
        for first in range(0, len(begins), _AT_ONCE):
            some = begins[first : first + _AT_ONCE]
            for at, text in self._stretches:
                # All stretches of the file, one from each byte on.
                stretches = np.ndarray((len(data) - len(text) + 1,), f"V{len(text)}", data, strides=(1,))
                there = stretches[some + at].tobytes()
                del stretches  # otherwise the map could not be closed
                if there != text * len(some):
                    rows = np.frombuffer(there, dtype=np.uint8).reshape(len(some), len(text))
                    found[first : first + _AT_ONCE] &= (rows == np.frombuffer(text, dtype=np.uint8)).all(axis=1)
        return found


def find_bytes(read: Read, member: ZipMember, where: str) -> int:
    """Return where the bytes of a member begin in the archive.

    Raises:
        CorruptCheckpointError: Another member is there than the one in the directory.
    """
    head = read(member.header, _LOCAL.size + len(member.name.encode()))
    if len(head) < _LOCAL.size or head[:4] != b"PK\3\4":
        raise damaged(where, f"there is no member {member.name[:80]!r} at byte {member.header}")
    *_, name, extra = _LOCAL.unpack_from(head)
    if head[_LOCAL.size :] != member.name.encode() or name != len(member.name.encode()):
        raise damaged(where, f"the member at byte {member.header} is not {member.name[:80]!r}")
    return member.header + _LOCAL.size + name + extra


def damaged(where: str, what: str) -> CorruptCheckpointError:
    """Return the error of an archive."""
    return CorruptCheckpointError(f"{where} is damaged: {what}. Remedy (FC305): restore it or load another checkpoint")


def _read_text(read: Read, size: int, where: str) -> tuple[int, int, bytes, int]:
    """Return the directory's place, its number of entries, its text, and the place of the archive's end record."""
    tail_begin = max(0, size - _TAIL_BYTES)
    tail = read(tail_begin, size - tail_begin)
    end = tail.rfind(b"PK\5\6")
    if end < 0 or end + _END.size > len(tail):
        check_no_pointer(where, read(0, min(size, 8)))
        raise damaged(where, "it does not end as a zip archive without a comment does")
    _, _, _, _, count, length, begin, _ = _END.unpack_from(tail, end)
    if count == 0xFFFF or length == 0xFFFFFFFF or begin == 0xFFFFFFFF:
        count, length, begin = _read_large_end(read, tail, end, where)
    if begin + length > tail_begin + end or length > _MOST_DIRECTORY_BYTES or count * _ENTRY.size > length:
        raise damaged(where, f"its directory, {length} bytes from byte {begin}, is not inside it")
    inside = begin - tail_begin
    text = tail[inside : inside + length] if inside >= 0 else read(begin, length)
    return begin, count, text, begin + length


def _read_large_end(read: Read, tail: bytes, end: int, where: str) -> tuple[int, int, int]:
    if end < _LOCATOR.size or tail[end - _LOCATOR.size :][:4] != b"PK\6\7":
        raise damaged(where, "the end of its directory is not complete")
    at = _LOCATOR.unpack_from(tail, end - _LOCATOR.size)[2]
    record = read(at, _END64.size)
    if len(record) < _END64.size or record[:4] != b"PK\6\6":
        raise damaged(where, "the end of its directory is not complete")
    return _END64.unpack(record)[-3:]


def _read_entry(text: bytes, position: int, where: str) -> tuple[ZipMember, int]:
    if text[position : position + 4] != b"PK\1\2" or position + _ENTRY.size > len(text):
        raise damaged(where, "its directory has something else than an entry")
    entry = _ENTRY.unpack_from(text, position)
    method, packed, unpacked, header = entry[4], entry[8], entry[9], entry[16]
    begin = position + _ENTRY.size
    names = begin + entry[10]
    beyond = names + entry[11] + entry[12]
    try:
        name = _name(text[begin:names])
    except ValueError as error:  # UnicodeDecodeError is one
        raise damaged(where, f"a member's name cannot be one: {str(error)[:200]}") from None
    large = _large_values(text[names : names + entry[11]])
    sizes = []
    for value in (unpacked, packed, header):
        if value == 0xFFFFFFFF:
            if not large:
                raise damaged(where, f"the size of member {name[:80]!r} is missing")
            value = large.pop(0)
        sizes.append(value)
    if method == STORED and sizes[0] != sizes[1]:
        raise damaged(where, f"member {name[:80]!r} has {sizes[1]} bytes, and {sizes[0]} when it is read")
    if entry[3] & 1:
        raise damaged(where, f"member {name[:80]!r} is encrypted")
    return ZipMember(name, method, sizes[1], sizes[2]), beyond


@functools.lru_cache(maxsize=64)
def _name(text: bytes) -> str:
    """Return a member's name; the archives of a checkpoint all have the same. ValueError if it leads out of it."""
    name = text.decode()
    for part in name.split("/"):
        check_file_name(part)
    return name


def _large_values(extra: bytes) -> list[int]:
    """Return the sizes that did not fit into an entry."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1:
            count = min(length, len(extra) - position) // 8
            return list(struct.unpack_from(f"<{count}Q", extra, position))
        position += length
    return []
