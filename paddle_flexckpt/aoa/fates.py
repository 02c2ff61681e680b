"""Fates of names: which values an inverse has, while it reads a program backwards.

Two names may stand for the same key, as ``l.$L.w`` and ``l.0.w`` do. Such names are never treated as different.

Tested in tests/aoa/test_invert.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from paddle_flexckpt.aoa.placeholders import Placeholder, Template, form_of, parse_name
from paddle_flexckpt.aoa.statement_errors import Place

T = TypeVar("T")
_STAR = Placeholder("*")


class _Name(NamedTuple):
    """A name that can be compared whatever its placeholders are called: equal ``text`` means the same keys.

    Attributes:
        text: The name.
        form: The name with every number and placeholder as ``#``.
        slots: The content of each ``#``; empty where runs of digits do not separate placeholders.
        is_pattern: Whether it may stand for several keys.
    """

    text: str
    form: str
    slots: tuple[str | Placeholder, ...]
    is_pattern: bool

    def may_be(self, other: _Name) -> bool:
        """Return whether both names, which have the same form, may stand for one key."""
        if not (self.is_pattern or other.is_pattern):
            return self.text == other.text
        if len(self.slots) != len(other.slots):
            return True
        return all(_may_be(a, b) for a, b in zip(self.slots, other.slots))


def _may_be(one: str | Placeholder, other: str | Placeholder) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one == other
    number, slot = (one, other) if isinstance(one, str) else (other, one)
    if isinstance(number, Placeholder) or isinstance(slot, str) or not slot.is_solvable:
        return True
    found = slot.solve(int(number))
    return found is not None and found >= 0 and str(slot.value(found)) == number


@lru_cache(maxsize=1 << 16)
def _read(name: str) -> _Name:
    parts: list[str | Placeholder] = []
    for part in parse_name(name).parts:
        pieces = re.split(r"(\*)", part) if isinstance(part, str) else [part]
        parts += [_STAR if piece == "*" else piece for piece in pieces if piece]
    ids: dict[str, int] = {}
    texts, forms = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            forms.append(re.sub(r"\d+", "#", part))
        else:
            texts.append("*" if part == _STAR else f"${ids.setdefault(part.name, len(ids))}{part.terms or ''}")
            forms.append("#")
    form, slots = form_of(Template(name, tuple(parts), ()))
    is_pattern = any(isinstance(part, Placeholder) for part in parts)
    return _Name("".join(texts), re.sub("#+", "#", "".join(forms)), () if form is None else tuple(slots), is_pattern)


class NameTable(Generic[T]):
    """A map from names to values, in which any name that may stand for the same keys finds a value."""

    def __init__(self) -> None:
        """Begin empty."""
        self._items: dict[str, tuple[str, T]] = {}
        self._alike: dict[tuple[str, bool], dict[str, _Name]] = {}

    def put(self, name: str, item: T) -> None:
        """Set the item of a name."""
        own = _read(name)
        self._items[own.text] = name, item
        self._alike.setdefault((own.form, own.is_pattern), {})[own.text] = own

    def get(self, name: str) -> T | None:
        """Return the item of a name, whatever its placeholders are called."""
        found = self._items.get(_read(name).text)
        return None if found is None else found[1]

    def like(self, name: str) -> Iterator[T]:
        """Yield the items of names that may stand for the same key as this one."""
        own = _read(name)
        if own.text in self._items:
            yield self._items[own.text][1]
        # Names without placeholders, of which there may be a million, are not compared with each other.
        for is_pattern in (True, False) if own.is_pattern else (True,):
            for text, other in self._alike.get((own.form, is_pattern), {}).items():
                if text != own.text and own.may_be(other):
                    yield self._items[text][1]

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield names and their items."""
        return iter(self._items.values())


class _Fate(NamedTuple):
    """When a fate was noted, why the value is lost (empty if it is not), and the place of the statement that reads it.

    A value that is overwritten and that no statement reads has no place.
    """

    order: int
    why: str = ""
    place: Place | None = None


class Fates:
    """The fates of names before a statement. Other names have the values of the program's end."""

    def __init__(self) -> None:
        """Begin at the end of a program."""
        self._table: NameTable[_Fate] = NameTable()
        self._count = 0

    def have(self, names: Iterable[str]) -> None:
        """Note that the inverse has made these names' values."""
        self._note(names, "", None)

    def overwrite(self, names: Iterable[str], place: Place) -> None:
        """Note that a statement assigns names again: their earlier values are lost."""
        for name in names:
            self._note([name], f"AOA statement {place.number} overwrites {name!r}", None)

    def miss(self, names: Iterable[str], place: Place, why: str) -> None:
        """Note that values which a statement reads are lost."""
        self._note(names, why, place)

    def is_had(self, name: str) -> bool:
        """Return whether the inverse has made a name's value."""
        own = self._table.get(name)
        return own is not None and not own.why and not self.why_lost(name)

    def why_lost(self, name: str) -> str:
        """Return why a name's value is lost; an empty text if it is not."""
        own = self._table.get(name)
        since = own.order if own is not None and not own.why else -1
        lost = (fate for fate in self._table.like(name) if fate.why and fate.order > since)
        return max(lost, key=lambda fate: fate.order, default=_Fate(0)).why

    def missed(self) -> dict[str, tuple[Place, str]]:
        """Return the lost values that a statement reads: where, and why."""
        return {name: (fate.place, fate.why) for name, fate in self._table.items() if fate.place is not None}

    def overwritten(self) -> Iterator[str]:
        """Yield the names that are assigned before they are read."""
        return (name for name, fate in self._table.items() if fate.why and fate.place is None)

    def _note(self, names: Iterable[str], why: str, place: Place | None) -> None:
        for name in names:
            self._table.put(name, _Fate(self._count, why, place))
            self._count += 1
