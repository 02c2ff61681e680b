"""Read operands of many records of a pickle at once, each at a place of its own: numbers, references, texts, sizes.

Every function receives the places where an operand of each record begins, and a mask of the records that are sound so
far. It clears the mask where the bytes are not such an operand, and returns the places behind the operand. Places of
records that are not sound mean nothing, but are inside the bytes.

Tested in tests/foreign/test_torch_records.py.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.foreign.pickle_values import Place

# The bytes behind the end that may be accessed.
_SPARE = 1024
# Sizes of more axes are left to the machine.
MOST_AXES = 8
_K, _M, _J, _LONG = ord("K"), ord("M"), ord("J"), 0x8A
_SHORT_REFERENCE, _REFERENCE = ord("h"), ord("j")
_SHORT_TEXT, _MEMOIZE, _MARK, _NONE = 0x8C, 0x94, ord("("), ord("N")
# By operation: the bytes of the number behind it, and the part of the eight bytes there that is the number.
_WIDTH = np.zeros(256, dtype=np.int64)
_WIDTH[[_K, _M, _J]] = 1, 2, 4
_MASKS = np.asarray([(1 << 8 * width) - 1 for width in range(9)], dtype=np.uint64)
# References likewise.
_PLACE_WIDTH = np.zeros(256, dtype=np.int64)
_PLACE_WIDTH[[_SHORT_REFERENCE, _REFERENCE]] = 1, 4
# The bytes of operands in records whose first byte is the number of those that follow.
_OPERANDS = {_K: 1, _M: 2, _J: 4, _LONG: 1, _SHORT_REFERENCE: 1, _REFERENCE: 4, _SHORT_TEXT: 1}
_COUNTED = frozenset({_LONG, _SHORT_TEXT})
# A frame's header; frames smaller than a pickler's end the search.
_FRAME, _FRAME_HEADER, _LEAST_FRAME = 0x95, 9, 1 << 12
# The operations that end a size behind its tuple.
_SIZE_END = np.frombuffer(b"\x85\x94R\x94", dtype=np.uint8)


class Window(NamedTuple):
    """Bytes of a pickle without the headers of its frames, which mean nothing but must not be inside an operation.

    Attributes:
        text: The bytes.
        begin: The position in the pickle where they begin.
        cuts: The positions in them where a frame begins.
        frame_ends: The ends, in the pickle, of the first frame and of each frame that begins in the bytes.
    """

    text: bytes
    begin: int
    cuts: list[int]
    frame_ends: list[int]

    @classmethod
    def of(cls, data: memoryview, place: Place, size: int) -> Window:
        """Return so many bytes from a place on; fewer at the end of the pickle, and of frames unlike a pickler's."""
        if place.frame_end <= place.position:
            return cls(bytes(data[place.position : place.position + size]), place.position, [], [place.frame_end])
        pieces, cuts, frame_ends = list[memoryview](), list[int](), [place.frame_end]
        at, length = place.position, 0
        while True:
            pieces.append(data[at : min(frame_ends[-1], at + size - length)])
            length += len(pieces[-1])
            header = data[frame_ends[-1] : frame_ends[-1] + _FRAME_HEADER]
            if length == size or len(header) < _FRAME_HEADER or header[0] != _FRAME:
                break
            at = frame_ends[-1] + _FRAME_HEADER
            end = at + int.from_bytes(header[1:], "little")
            if not at + _LEAST_FRAME <= end <= len(data):
                break
            cuts.append(length)
            frame_ends.append(end)
        return cls(b"".join(pieces), place.position, cuts, frame_ends)

    def place_of(self, offset: int) -> tuple[int, int]:
        """Return the place of an offset in the pickle, and the end of the frame that is open there."""
        frames = bisect_left(self.cuts, offset)
        return self.begin + offset + frames * _FRAME_HEADER, self.frame_ends[frames]

    def is_between(self, begin: int, cut: int) -> bool:
        """Return whether an operation of a sound record that starts at ``begin`` begins at a cut."""
        text = self.text
        while begin < cut:
            code = text[begin]
            begin += 1 + _OPERANDS.get(code, 0) + (text[begin + 1] if code in _COUNTED else 0)
        return begin == cut


class Sizes(NamedTuple):
    """An operand of each record: a torch.Size, a reference, or nothing.

    Attributes:
        is_new: bool ``[n]``, whether the size is written out here.
        axes: int64 ``[n]``, the number of axes of each size that is written out.
        values: int64 ``[axes, n]``, the numbers of these sizes.
        refers: int64 ``[n]``, the place in the memo that the operand refers to, or -1.
    """

    is_new: np.ndarray
    axes: np.ndarray
    values: np.ndarray
    refers: np.ndarray


class RecordBytes:
    """The bytes of the records."""

    def __init__(self, text: bytes) -> None:
        """Take the bytes."""
        self.text = text
        padded = text + bytes(_SPARE)
        self._padded = padded
        self._bytes = np.frombuffer(padded, dtype=np.uint8)
        self._eight = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))

    def has(self, places: np.ndarray, literal: np.ndarray) -> np.ndarray:
        """Return where the bytes equal some given ones, bool ``[n]``."""
        length = len(literal)
        rows = np.ndarray((len(self._padded) - length + 1,), dtype=f"V{length}", buffer=self._padded, strides=(1,))
        found = rows[places].tobytes()
        if found == literal.tobytes() * len(places):
            return np.ones(len(places), dtype=bool)  # the common case, and much quicker
        return (np.frombuffer(found, dtype=np.uint8).reshape(-1, length) == literal).all(axis=1)

    def skip(self, places: np.ndarray, literal: np.ndarray, sound: np.ndarray) -> np.ndarray:
        """Skip the same bytes in all records."""
        sound &= self.has(places, literal)
        return self._inside(places + len(literal))

    def numbers(self, places: np.ndarray, sound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read a nonnegative number of each record; return the numbers, and the places behind."""
        code, raw = self._bytes[places], self._eight[places + 1]
        width = _WIDTH[code]
        value = raw & _MASKS[width]
        signed = code == _J
        if signed.any():
            sound &= ~signed | (value < 1 << 31)
        after = places + 1 + width
        is_long = code == _LONG
        if is_long.any():
            count = np.where(is_long, raw & np.uint64(0xFF), np.uint64(1)).astype(np.int64)
            fine = (count > 0) & (count < 8)
            count = np.where(fine, count, 1)
            large = (raw >> np.uint64(8)) & _MASKS[count]
            # The highest bit is the sign.
            sound &= ~is_long | (fine & (large <= _MASKS[count] >> np.uint64(1)))
            value = np.where(is_long, large, value)
            after = np.where(is_long, places + 2 + count, after)
        sound &= is_long | (width > 0)
        return value.astype(np.int64), self._inside(after)

    def numbers_or_none(self, places: np.ndarray, sound: np.ndarray) -> np.ndarray:
        """Skip a number, or nothing."""
        none = self._bytes[places] == _NONE
        if none.all():
            return self._inside(places + 1)
        fine = np.ones(len(places), dtype=bool)
        _, after = self.numbers(places, fine)
        sound &= fine | none
        return np.where(none, self._inside(places + 1), after)

    def nothing(self, places: np.ndarray, sound: np.ndarray) -> np.ndarray:
        """Skip an operand for nothing, which has an operation too."""
        sound &= self._bytes[places] == _NONE
        return self._inside(places + 1)

    def references(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places in the memo of references (-1: it is not a reference), and the places behind."""
        code = self._bytes[places]
        width = _PLACE_WIDTH[code]
        refers = (self._eight[places + 1] & _MASKS[width]).astype(np.int64)
        return np.where(width > 0, refers, -1), self._inside(places + 1 + width)

    def texts(
        self, places: np.ndarray, sound: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Read a short text of each record, or a reference to one.

        Returns:
            Whether it is written out here, the begin and end of its bytes, its reference or -1, and the places behind.
        """
        refers, behind = self.references(places)
        is_new = self._bytes[places] == _SHORT_TEXT
        begin = self._inside(places + 2)
        end = self._inside(begin + self._bytes[self._inside(places + 1)])
        sound &= (refers >= 0) | (is_new & (self._bytes[end] == _MEMOIZE))
        return is_new, begin, end, refers, np.where(is_new, self._inside(end + 1), behind)

    def sizes(
        self, places: np.ndarray, sound: np.ndarray, function: np.ndarray | None, or_none: bool
    ) -> tuple[Sizes, np.ndarray]:
        """Read a size of each record, or a reference to one; return them, and the places behind.

        Args:
            places: The places of the operands.
            sound: The mask of sound records.
            function: The operation that puts torch.Size onto the stack; None: it is not known.
            or_none: Whether the operand may be nothing.
        """
        count = len(places)
        none = self._bytes[places] == _NONE if or_none else np.zeros(count, dtype=bool)
        refers, after = self.references(places)
        is_new = self.has(places, function) if function is not None else np.zeros(count, dtype=bool)
        refers[is_new] = -1
        sound &= is_new | none | (refers >= 0)
        after = np.where(none, self._inside(places + 1), after)
        axes = np.zeros(count, dtype=np.int64)
        if function is None or not is_new.any():
            return Sizes(is_new, axes, np.zeros((0, count), dtype=np.int64), refers), after
        rows = np.flatnonzero(is_new)
        fine = np.ones(len(rows), dtype=bool)
        at = self._inside(places[rows] + len(function))
        marked = self._bytes[at] == _MARK
        at = at + marked
        found, values, open_ = np.zeros(len(rows), dtype=np.int64), [], np.ones(len(rows), dtype=bool)
        for _ in range(MOST_AXES + 1):
            code = self._bytes[at]
            open_ = open_ & ((_WIDTH[code] > 0) | (code == _LONG))
            if not open_.any():
                break
            each = np.ones(len(rows), dtype=bool)
            numbers, behind = self.numbers(at, each)
            fine &= each | ~open_
            found += open_
            if open_.all():
                values.append(numbers)
                at = behind
                continue
            values.append(np.where(open_, numbers, 0))
            at = np.where(open_, behind, at)
        code = self._bytes[at]
        short = ~marked & (found < 4) & (code == np.where(found > 0, 0x84 + found, ord(")")))
        fine &= short | (marked & (found > 3) & (found <= MOST_AXES) & (code == ord("t")))
        # Not a tuple, or one that is put into the memo.
        at = self._inside(at + 1)
        fine &= (found == 0) | (self._bytes[at] == _MEMOIZE)
        at = self._inside(at + (found > 0))
        at = self.skip(at, _SIZE_END, fine)
        sound[rows] &= fine
        axes[rows] = found
        after[rows] = at
        table = np.zeros((len(values), count), dtype=np.int64)
        table[:, rows] = values if values else np.zeros((0, len(rows)), dtype=np.int64)
        return Sizes(is_new, axes, table, refers), after

    def _inside(self, places: np.ndarray) -> np.ndarray:
        return np.minimum(places, len(self.text))
