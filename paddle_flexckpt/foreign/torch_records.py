"""Read runs of equal records in DCP's ``.metadata`` at once, into columns: the results of the operations, in numpy.

``.metadata`` has two records for each chunk, of some seventy operations in all. Python's pickler always writes them in
the same way: the first record of a run is parsed, and all others are compared with it, field by field. Only numbers,
texts and sizes may differ. The fast way accepts only records that the stack machine accepts, with the same result; all
others are left to the machine.

Tested in tests/foreign/test_torch_records.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.foreign.pickle_values import UNKEPT, Batch, Place, Symbol, is_integers
from paddle_flexckpt.foreign.record_bytes import RecordBytes, Sizes, Window

# Memory for the records of one call; and at the end of a run, the most bytes that are examined in vain.
_LEAST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 18
# Fewer records are quicker one by one.
_FEWEST = 4
# The containers of a run's element in the machine: two records and dicts and a size of two tuples, or one and two
# sizes.
_CONTAINERS = 6
# As for texts and tuples that the machine reads twice.
_LONGEST_TEXT, _MOST_SHARED_AXES = 4096, 64
_NEW, _DONE = b")\x81\x94}\x94(", b"ub"
# The operations after a record of the first class, and of the second.
_RUNS = {"ChunkStorageMetadata": ("ChunkStorageMetadata",), "_StorageInfo": ("MetadataIndex", "_StorageInfo")}
# The kinds of a field.
_KINDS = {
    "ChunkStorageMetadata": {"offsets": "size", "sizes": "size"},
    "MetadataIndex": {"fqn": "text", "index": "number or none", "offset": "size or none"},
    "_StorageInfo": {
        "relative_path": "text", "offset": "number", "length": "number", "transform_descriptors": "none",
    },
}  # fmt: skip
_OPTIONAL = frozenset({"index", "transform_descriptors"})


class _TextNumbers(dict[bytes, int]):
    """Numbers of texts: a new text gets the next one. UnicodeDecodeError if it is not valid."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, data: bytes) -> int:
        self._texts.append(str(data, "utf-8"))
        number = self[data] = len(self._texts) - 1
        return number


class RecordTables:
    """The texts and sizes of all records of a pickle, each with a number.

    Attributes:
        texts: The texts by their numbers.
        numbers: The numbers of texts by their bytes.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.numbers = _TextNumbers(self.texts)
        # A size's number is its position in these, one after the other: the number of axes, and its extents.
        self._sizes: list[np.ndarray] = []
        self._begins: list[int] = []
        self._end = 0

    def size(self, values: Sequence[int]) -> int:
        """Return the number of a size."""
        return int(self._add(np.asarray([len(values), *values], dtype=np.int64)))

    def add_sizes(self, axes: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the numbers of many sizes: of so many axes each, with the extents in columns, int64 ``[axes, n]``."""
        begins = np.cumsum(axes + 1) - (axes + 1)
        flat = np.empty(int((axes + 1).sum()), dtype=np.int64)
        flat[begins] = axes
        for axis, column in enumerate(values):
            rows = axes > axis
            flat[begins[rows] + 1 + axis] = column[rows]
        return begins + self._add(flat)

    def _add(self, flat: np.ndarray) -> int:
        begin = self._end
        self._sizes.append(flat)
        self._begins.append(begin)
        self._end += len(flat)
        return begin

    def flat_sizes(self) -> np.ndarray:
        """Return all sizes, in the order of their numbers: the number of axes, and the extents."""
        flat = np.concatenate([*self._sizes, np.zeros(0, dtype=np.int64)])
        self._sizes, self._begins = [flat], [0]
        return flat

    def size_of(self, number: int) -> tuple[int, ...]:
        """Return a size by its number."""
        part = int(np.searchsorted(self._begins, number, side="right")) - 1
        flat, begin = self._sizes[part], number - self._begins[part]
        return tuple(flat[begin + 1 : begin + 1 + int(flat[begin])].tolist())


class ChunkColumns(NamedTuple):
    """The columns of chunks' records: int64 ``[n]`` each, numbers of sizes."""

    tables: RecordTables
    offsets: np.ndarray
    sizes: np.ndarray


class IndexColumns:
    """The columns of items' names: the numbers of texts, and of sizes or -1 for none."""

    __slots__ = ("offset", "tables", "text")

    def __init__(self, tables: RecordTables, text: np.ndarray, offset: np.ndarray) -> None:
        self.tables, self.text, self.offset = tables, text, offset


class PlaceColumns(NamedTuple):
    """The columns of items' places: the numbers of files' names, first bytes, and numbers of bytes."""

    file: np.ndarray
    begin: np.ndarray
    length: np.ndarray


class _Template(NamedTuple):
    """The common form of the records of a run.

    Attributes:
        head: The bytes that each element begins with.
        literals: The bytes before each value, and behind the last.
        slots: Class, field and kind of each value.
        size: The operation that puts torch.Size onto the stack, if any was seen.
    """

    head: bytes
    literals: tuple[np.ndarray, ...]
    slots: tuple[tuple[str, str, str], ...]
    size: np.ndarray | None


class RecordRuns:
    """A reader of the runs of records of one pickle."""

    def __init__(self) -> None:
        """Begin; the order of fields is not known yet."""
        self._orders: dict[str, tuple[str, ...]] = {}
        self._templates: dict[str, _Template] = {}
        # By the class of the preceding record: the begin and end of the last run, and how much was examined.
        self._last = dict.fromkeys(_RUNS, (0, 0, 0))
        self._tables = RecordTables()
        self._size: bytes | None = None
        # By place in the memo: the number of a text, or -2 less the number of a size; -1 for anything else.
        self._codes = np.full(1 << 12, -1, dtype=np.int64)

    def value(self, place: int) -> Any:
        """Return the value of a run at a place of the memo; None if it was not kept."""
        code = int(self._codes[place]) if place < len(self._codes) else -1
        return None if code == -1 else self._tables.texts[code] if code >= 0 else self._tables.size_of(-2 - code)

    def read(self, data: memoryview, place: Place, name: str, fields: tuple[str, ...], memo: list[Any]) -> Batch | None:
        """Read the records that follow one of a class with these fields in this order; None if there are none.

        The memo grows as it would in the machine.
        """
        self._orders[name] = fields
        run = _RUNS.get(name, ("",))
        if any(each not in self._orders for each in run):
            return None
        text = Window.of(data, place, _LEAST_WINDOW)
        template = self._templates.get(name)
        if template is None or not text.text.startswith(template.head):
            template = _Reader(text.text, memo, self._size).template(run, self._orders)
            if template is None:
                return None
            self._templates[name] = template
            self._size = template.size.tobytes() if template.size is not None else None
        begin, end, size = self._last[name]
        if place.position == end:
            size *= 2
        else:  # a run is mostly as long as the one before
            begin, size = place.position, (end - begin) * 9 // 8
        size = min(max(size, _LEAST_WINDOW), _LARGEST_WINDOW)
        text = Window.of(data, place, size) if size > _LEAST_WINDOW else text
        starts = _starts(text.text, template.head)
        if len(starts) < _FEWEST:
            return None
        elements = _Elements(RecordBytes(text.text), starts, template, len(memo))
        count = self._take(elements, text, place.seam, memo)
        if not count:
            return None
        end, frame_end = text.place_of(int(elements.ends[count - 1]))
        self._last[name] = begin, end, size
        values = [elements.columns(each, count, self._tables) for each in run]
        return Batch(values, _CONTAINERS * count, end, frame_end)

    def _take(self, elements: _Elements, text: Window, seam: bytes, memo: list[Any]) -> int:
        """Store the elements' values in the memo, look up their references, and return how many are sound."""
        base = len(memo)
        count = elements.count(self._tables, text, seam)
        end = int(elements.memo[count]) if count else base
        if end > len(self._codes):
            self._codes = np.concatenate([self._codes, np.full(max(end, len(self._codes)), -1, dtype=np.int64)])
        for slot in elements.kept:
            rows = np.flatnonzero(slot.is_new[:count])
            self._codes[slot.places[rows]] = slot.numbers[rows] if slot.is_text else -2 - slot.numbers[rows]
        fine = count
        for slot in elements.kept:
            rows = np.flatnonzero(slot.refers[:fine] >= 0)
            found = self._look_up(slot.refers[rows], elements.memo[rows], slot.is_text, memo)
            bad = np.flatnonzero(found < 0)
            fine = int(rows[bad[0]]) if len(bad) else fine
            slot.numbers[rows] = found
        if fine < count:
            self._codes[int(elements.memo[fine]) : end] = -1
        memo.extend([UNKEPT] * (int(elements.memo[fine]) - base))
        return fine

    def _look_up(self, places: np.ndarray, before: np.ndarray, is_text: bool, memo: list[Any]) -> np.ndarray:
        """Return the numbers of references; -1 for a reference that records may not have."""
        known = places < np.minimum(before, len(self._codes))  # values of earlier elements, at the most
        codes = np.where(known, self._codes[np.where(known, places, 0)], -1)
        for place in set(places[known & (codes == -1) & (places < len(memo))].tolist()):
            self._codes[place] = self._code_of(memo[place])
        codes = np.where(known, self._codes[np.where(known, places, 0)], -1)
        return np.where(codes >= 0, codes, -1) if is_text else np.where(codes < -1, -2 - codes, -1)

    def _code_of(self, value: Any) -> int:
        if type(value) is str and len(value) <= _LONGEST_TEXT:
            return self._tables.numbers[value.encode()]
        if type(value) is tuple and len(value) <= _MOST_SHARED_AXES and is_integers(value):
            return -2 - self._tables.size(value)
        return -1


class _Reader:
    """A reader of the first element of a run."""

    def __init__(self, text: bytes, memo: Sequence[Any], size: bytes | None) -> None:
        self._text, self._memo, self._size, self._at = text, memo, size, 0

    def template(self, run: Sequence[str], orders: dict[str, tuple[str, ...]]) -> _Template | None:
        """Return the common form of the run's elements; None if the first is not one of a run."""
        try:
            return self._read(run, orders)
        except (IndexError, ValueError):
            return None

    def _read(self, run: Sequence[str], orders: dict[str, tuple[str, ...]]) -> _Template:
        literals, slots, begin = list[bytes](), list[tuple[str, str, str]](), 0
        for name in run:
            kinds = _KINDS[name]
            if not kinds.keys() - _OPTIONAL <= set(orders[name]) <= kinds.keys():
                raise ValueError("other fields")
            symbol = self._constant()
            if type(symbol) is not Symbol or symbol.name != name:
                raise ValueError("another class")
            self._expect(_NEW)
            for field in orders[name]:
                if self._constant() != field:
                    raise ValueError("another field")
                literals.append(self._text[begin : self._at])
                slots.append((name, field, kinds[field]))
                self._pass(kinds[field])
                begin = self._at
            self._expect(_DONE)
        literals.append(self._text[begin : self._at])
        size = None if self._size is None else np.frombuffer(self._size, dtype=np.uint8)
        return _Template(
            literals[0], tuple(np.frombuffer(each, dtype=np.uint8) for each in literals), tuple(slots), size
        )

    def _expect(self, text: bytes) -> None:
        if not self._text.startswith(text, self._at):
            raise ValueError("another operation")
        self._at += len(text)

    def _constant(self) -> Any:
        """Skip a reference, and return the value in the memo."""
        width = {ord("h"): 1, ord("j"): 4}.get(self._text[self._at])
        if width is None:
            raise ValueError("no reference")
        end = self._at + 1 + width
        place = int.from_bytes(self._text[self._at + 1 : end], "little")
        self._at = end
        return self._memo[place]

    def _pass(self, kind: str) -> None:
        """Skip a value: its kind is checked when all of the run are read."""
        code = self._text[self._at]
        if kind == "text" and code == 0x8C:
            self._at += 3 + self._text[self._at + 1]
        elif kind in ("text", "size", "size or none") and code in b"hj":
            begin = self._at
            value = self._constant()
            if kind != "text" and type(value) is Symbol and value.name == "torch.Size":
                self._size = self._text[begin : self._at]
                self._at = self._text.index(b"R\x94", self._tuple_end()) + 2
        elif "none" in kind and code == ord("N"):
            self._at += 1
        elif kind.startswith("number"):
            self._number()
        else:
            raise ValueError("another value")

    def _tuple_end(self) -> int:
        """Skip the numbers of a tuple."""
        self._at += self._text[self._at] == ord("(")
        while self._text[self._at] in b"KMJ\x8a":
            self._number()
        return self._at

    def _number(self) -> None:
        code = self._text[self._at]
        self._at += 2 + self._text[self._at + 1] if code == 0x8A else 1 + {75: 1, 77: 2, 74: 4}[code]


class _Slot:
    """A value of each element that is in the memo, or refers to it.

    Attributes:
        is_text: Whether it is a text; or a size.
        is_new: Whether it is written out here.
        refers: The place that it refers to, or -1.
        places: The place that it has, if it is new.
        numbers: The number of the text or size; -1 for none.
    """

    __slots__ = ("is_new", "is_text", "numbers", "places", "refers")

    def __init__(self, is_text: bool, is_new: np.ndarray, refers: np.ndarray, places: np.ndarray) -> None:
        self.is_text, self.is_new, self.refers, self.places = is_text, is_new, refers, places
        self.numbers = np.full(len(is_new), -1, dtype=np.int64)


class _Elements:
    """The elements of a run, up to the first that does not fit.

    Attributes:
        ends: The end of each.
        memo: int64 ``[n + 1]``, how long the memo is before each, and after the last.
        kept: The values that are texts and sizes.
    """

    def __init__(self, data: RecordBytes, starts: np.ndarray, template: _Template, base: int) -> None:
        count = len(starts)
        self._data, self._starts, self._sound = data, starts, np.ones(count, dtype=bool)
        self._texts: list[tuple[_Slot, np.ndarray, np.ndarray]] = []
        self._sizes: list[tuple[_Slot, Sizes]] = []
        self._values: dict[tuple[str, str], np.ndarray | _Slot] = {}
        self.kept: list[_Slot] = []
        at, sound, added, last = starts, self._sound, np.zeros(count, dtype=np.int64), ""
        for literal, (name, field, kind) in zip(template.literals, template.slots):
            at = data.skip(at, literal, sound)
            if name != last:
                added, last = added + 2, name
            if kind == "text":
                is_new, begin, end, refers, at = data.texts(at, sound)
                slot = _Slot(True, is_new, refers, added)
                added = added + is_new
                self._texts.append((slot, begin, end))
                self._keep(name, field, slot)
            elif kind == "number":
                self._values[name, field], at = data.numbers(at, sound)
            elif kind == "number or none":
                at = data.numbers_or_none(at, sound)
            elif kind == "none":
                at = data.nothing(at, sound)
            else:
                sizes, at = data.sizes(at, sound, template.size, kind == "size or none")
                before = sizes.is_new & (sizes.axes > 0)
                slot = _Slot(False, sizes.is_new, sizes.refers, added + before + 1)
                added = added + before + 2 * sizes.is_new
                self._sizes.append((slot, sizes))
                self._keep(name, field, slot)
        self.ends = data.skip(at, template.literals[-1], sound)
        self.memo = base + np.append(0, np.cumsum(added))
        for slot in self.kept:
            slot.places = slot.places + self.memo[:-1]

    def _keep(self, name: str, field: str, slot: _Slot) -> None:
        self.kept.append(slot)
        self._values[name, field] = slot

    def count(self, tables: RecordTables, window: Window, seam: bytes) -> int:
        """Return how many are sound, one behind the other or behind a seam, and number their texts and sizes."""
        text, gaps = window.text, self._starts[1:] - self.ends[:-1]
        follows = np.append(True, gaps == 0)
        if seam:
            near = np.flatnonzero(gaps == len(seam))
            follows[near + 1] = [text.startswith(seam, at) for at in self.ends[near].tolist()]
        wrong = np.flatnonzero(~(self._sound & follows & (self.ends <= len(text))))
        count = int(wrong[0]) if len(wrong) else len(self._sound)
        for cut in window.cuts:
            row = int(np.searchsorted(self._starts[:count], cut, side="right")) - 1
            if row >= 0 and cut < self.ends[row] and not window.is_between(int(self._starts[row]), cut):
                count = row
        for slot, begin, end in self._texts:
            rows = np.flatnonzero(slot.is_new[:count])
            found, known = list[int](), tables.numbers
            try:
                found += (known[text[a:b]] for a, b in zip(begin[rows].tolist(), end[rows].tolist()))
            except UnicodeDecodeError:
                count = int(rows[len(found)])
            slot.numbers[rows[: len(found)]] = found
        for slot, sizes in self._sizes:
            rows = np.flatnonzero(slot.is_new[:count])
            slot.numbers[rows] = tables.add_sizes(sizes.axes[rows], sizes.values[:, rows])
        return count

    def columns(self, name: str, count: int, tables: RecordTables) -> Any:
        """Return the columns for the first records of a class."""

        def column(field: str) -> np.ndarray:
            value = self._values[name, field]
            return (value.numbers if isinstance(value, _Slot) else value)[:count]

        if name == "ChunkStorageMetadata":
            return ChunkColumns(tables, column("offsets"), column("sizes"))
        if name == "MetadataIndex":
            return IndexColumns(tables, column("fqn"), column("offset"))
        return PlaceColumns(column("relative_path"), column("offset"), column("length"))


def _starts(text: bytes, head: bytes) -> np.ndarray:
    """Return where elements may begin, of which the first begins at once."""
    pieces = text.split(head)[1:]
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)) + len(head)
    return np.cumsum(lengths) - lengths
