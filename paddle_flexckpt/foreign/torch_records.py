"""Read runs of equal records in DCP's ``.metadata`` at once: a regular expression does what the operations would.

``.metadata`` has two records for each chunk, of some seventy operations in all. Python's pickler always writes them in
the same way, so one expression takes a record, and a run of them is one call. An expression takes only what the stack
machine would take, and makes the same of it; whatever looks different is left to the machine.

Tested in tests/foreign/test_torch_records.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.foreign.pickle_values import UNKEPT, Batch, Symbol, is_integer, is_integers

# Operations of protocol 4 and 5: a reference to the memo, and numbers.
_REFERENCE = rb"h.|j.{4}"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7})"
_EACH_NUMBER = re.compile(_NUMBER, re.DOTALL)
# The tuple of a torch.Size. The number of axes is compared where it is read.
_NUMBERS = rb"\)|" + _NUMBER + rb"{1,3}[\x85-\x87]\x94|\(" + _NUMBER + rb"{4,64}t\x94"
_SIZE = rb"(?:(" + _REFERENCE + rb")(" + _NUMBERS + rb")\x85\x94R\x94|(" + _REFERENCE + rb"))"
# Text of other characters is rare; in ASCII no byte of it can be an operation of protocol 4.
_TEXT = rb"(?:\x8c(.[ -~]{1,255})\x94|(" + _REFERENCE + rb"))"
_BEGIN, _END = rb"(" + _REFERENCE + rb")\)\x81\x94\}\x94\(", rb"ub"
# The value of each field: its expression, and how many groups that has.
_VALUES = {
    "offsets": (_SIZE, 3), "sizes": (_SIZE, 3), "fqn": (_TEXT, 2), "index": (rb"(?:N|" + _NUMBER + rb")", 0),
    "index.offset": (rb"(?:" + _SIZE + rb"|N)", 3), "relative_path": (_TEXT, 2), "offset": (rb"(" + _NUMBER + rb")", 1),
    "length": (rb"(" + _NUMBER + rb")", 1), "transform_descriptors": (rb"N", 0),
}  # fmt: skip
# Memory for what one call finds; and where a run ends, no more than this is looked through in vain.
_LEAST_WINDOW, _LARGEST_WINDOW = 1 << 10, 1 << 16
# Shapes and offsets are few or many; the memory for those that are known is bounded.
_MOST_KNOWN = 1 << 16
# What an element of a run makes in the machine: two records and dicts and a size of two tuples, or one and two sizes.
_CONTAINERS = 6
# As of texts and tuples that the machine takes twice.
_LONGEST_SHARED = 64


_Columns = Sequence[Sequence[bytes]]
# Makes the objects of a class of the columns of their fields.
Makers = Mapping[str, Callable[[Mapping[str, Sequence[Any]]], Iterable[Any]]]


class _Known(dict[bytes, Any]):
    """Decode each operand once; what is not there is None."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, text: bytes) -> Any:
        if not text:
            return None
        if len(self) >= _MOST_KNOWN:
            self.clear()
        value = self[text] = self._decode(text)
        return value


def _number(text: bytes) -> int:
    code = text[:1]
    value = int.from_bytes(text[2:] if code == b"\x8a" else text[1:], "little", signed=code in b"J\x8a")
    if not is_integer(value):
        raise ValueError("the machine refuses it")
    return value


def _numbers(text: bytes) -> tuple[int, ...]:
    if text == b")":
        return ()
    marked = text[:1] == b"("
    numbers = tuple(map(_number, _EACH_NUMBER.findall(text, int(marked), len(text) - 2)))
    if not is_integers(numbers) or (not marked and text[-2] != 0x84 + len(numbers)):
        raise ValueError("the machine refuses it")
    return numbers


def _text(text: bytes) -> str:
    if text[0] != len(text) - 1:
        raise ValueError("the machine reads it otherwise")
    return str(text[1:], "ascii")


class _Record(NamedTuple):
    """Describe the records of a class: its name, and their fields in order, each with its kind of value."""

    name: str
    fields: tuple[str, ...]
    kinds: tuple[str, ...]


# What follows a record of the first class, and of the second; and the kinds of fields of the same name.
_RUNS = {"ChunkStorageMetadata": ("ChunkStorageMetadata",), "_StorageInfo": ("MetadataIndex", "_StorageInfo")}
_KINDS = {("MetadataIndex", "offset"): "index.offset"}


@functools.lru_cache(maxsize=64)
def _compiled(orders: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[list[_Record], re.Pattern[bytes]] | None:
    """Return the expression of one element of a run, and what its groups are; None for fields that it cannot have."""
    records, text = [], b""
    for name, fields in orders:
        kinds = tuple(_KINDS.get((name, field), field) for field in fields)
        if any(kind not in _VALUES for kind in kinds) or not _NEEDED[name] <= set(fields):
            return None
        records.append(_Record(name, fields, kinds))
        values = (rb"(" + _REFERENCE + rb")" + _VALUES[kind][0] for kind in kinds)
        text += _BEGIN + b"".join(values) + _END
    # Whatever else there is ends the run, in one match without groups.
    return records, re.compile(rb"(" + text + rb")|.+", re.DOTALL)


_NEEDED = {
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "MetadataIndex": {"fqn", "offset"},
    "_StorageInfo": {"relative_path", "offset", "length"},
}


class RecordRuns:
    """Read the runs of records of one pickle."""

    def __init__(self, makers: Makers) -> None:
        """Begin; nothing is known of the order of fields yet."""
        self._makers = makers
        self._orders: dict[str, tuple[str, ...]] = {}
        self._window = _LEAST_WINDOW
        self._sizes, self._integers, self._texts = _Known(_numbers), _Known(_number), _Known(_text)

    def read(
        self, data: memoryview, position: int, name: str, fields: tuple[str, ...], memo: list[Any]
    ) -> Batch | None:
        """Read the records that follow one of a class, which has these fields in this order; None if there are none.

        The memo grows as it would in the machine.
        """
        self._orders[name] = fields
        run = _RUNS.get(name, ("",))
        if any(each not in self._orders for each in run):
            return None
        compiled = _compiled(tuple((each, self._orders[each]) for each in run))
        if compiled is None:
            return None
        records, pattern = compiled
        rows = pattern.findall(data, position, min(len(data), position + self._window))
        whole = [row[0] for row in rows]
        if b"" in whole:
            rows = rows[: whole.index(b"")]
        used = sum(map(len, whole[: len(rows)]))
        wider = 2 * used > self._window
        self._window = min(2 * self._window, _LARGEST_WINDOW) if wider else max(self._window // 2, _LEAST_WINDOW)
        if not rows:
            return None
        try:
            made = self._make(records, list(zip(*rows)), memo)
        except ValueError:
            return None  # for the machine to tell what is wrong
        return Batch(made, position + used, _CONTAINERS * len(rows))

    def _make(self, records: Sequence[_Record], groups: _Columns, memo: list[Any]) -> list[Any]:
        """Return the objects of a run, and extend the memo. ValueError where the machine might do otherwise."""
        count, begin, at = len(groups[0]), len(memo), 1
        columns: list[dict[str, list[Any]]] = []
        # Of what each row puts into the memo: how much so far, and what of it may be referred to.
        added = np.zeros(count, dtype=np.int64)
        kept: list[tuple[np.ndarray, np.ndarray, list[Any]]] = []
        references: list[tuple[list[Any], Sequence[bytes], type[Sized]]] = []
        for record in records:
            values: dict[str, list[Any]] = {}
            columns.append(values)
            symbol = _constant(groups[at], memo)
            if type(symbol) is not Symbol or symbol.name != record.name:
                raise ValueError("another class")
            at += 1
            added += 2
            for field, kind in zip(record.fields, record.kinds):
                if _constant(groups[at], memo) != field:
                    raise ValueError("another field")
                operands = groups[at + 1 : at + 1 + _VALUES[kind][1]]
                at += 1 + len(operands)
                if len(operands) == 1:
                    values[field] = list(map(self._integers.__getitem__, operands[0]))
                    continue
                if not operands:
                    continue
                *symbols, texts, refers = operands
                known = self._sizes if symbols else self._texts
                made = values[field] = list(map(known.__getitem__, texts))
                lengths = np.fromiter(map(len, texts), dtype=np.int64, count=count)
                if symbols:
                    for each in set(symbols[0]) - {b""}:
                        size = memo[_index(each, begin)]
                        if type(size) is not Symbol or size.name != "torch.Size":
                            raise ValueError("another call")
                # A size follows one or two tuples in the memo.
                before = np.minimum(lengths, 2) if symbols else np.zeros(count, dtype=np.int64)
                is_new = lengths > 0
                kept.append((added + before, is_new, made))
                added = added + before + is_new
                references.append((made, refers, tuple if symbols else str))
        starts = begin + np.cumsum(added) - added
        fresh: dict[int, Any] = {}
        for places, is_new, made in kept:
            fresh.update(zip((starts + places)[is_new].tolist(), (value for value in made if value is not None)))
        for made, refers, kind_of in references:
            _refer(made, refers, kind_of, memo, fresh, starts)
        memo.extend([UNKEPT] * int(added.sum()))
        for place, value in fresh.items():
            memo[place] = value
        objects = [self._makers[record.name](values) for record, values in zip(records, columns)]
        return list(objects[0]) if len(objects) == 1 else [each for pair in zip(*objects) for each in pair]


def _refer(
    made: list[Any],
    refers: Sequence[bytes],
    kind: type[Sized],
    memo: list[Any],
    fresh: Mapping[int, Any],
    starts: np.ndarray,
) -> None:
    """Put what rows refer to into their column."""
    distinct = set(refers)
    distinct.discard(b"")
    if not distinct:
        return
    found: dict[bytes, Any] = {}
    for text in distinct:
        place = int.from_bytes(text[1:], "little")
        value: Any = memo[place] if place < len(memo) else fresh.get(place)
        # Only what an earlier row has, and of what the machine would take a second time.
        is_later = place >= len(memo) and place >= starts[refers.index(text)]
        if is_later or type(value) is not kind or len(value) > _LONGEST_SHARED:
            raise ValueError("not what a run refers to")
        if kind is tuple and not is_integers(value):
            raise ValueError("not what a run refers to")
        found[text] = value
    for row, text in enumerate(refers):
        if text:
            made[row] = found[text]


def _constant(column: Sequence[bytes], memo: Sequence[Any]) -> Any:
    """Return what all rows refer to. ValueError if that differs."""
    distinct = set(column)
    if len(distinct) != 1:
        raise ValueError("rows differ")
    return memo[_index(distinct.pop(), len(memo))]


def _index(text: bytes, size: int) -> int:
    place = int.from_bytes(text[1:], "little")
    if place >= size:
        raise ValueError("not in the memo")
    return place
