"""Names with placeholders, the index that finds their keys, and a table of names.

Matching every pattern against every key would take patterns times keys steps. Instead keys are grouped once by their
*form*, the name with every run of digits replaced by ``#``. A pattern has a form too and is matched in one group only.
Two names may stand for the same key, as ``l.$L.w`` and ``l.0.w`` do; the table finds both.
Tested in tests/aoa/test_language.py and tests/aoa/test_invert.py.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from paddle_flexckpt.aoa.statements import StatementError

_PLACEHOLDER = re.compile(
    # The in-tree names come first, so that $LAYER_ID_x is $LAYER_ID followed by _x.
    r"\$(?P<name>LAYER_ID_OFFSET|LAYER_ID|EXPERT_ID|[A-Z][A-Z0-9]*(?:_[A-Z][A-Z0-9]*)*)"
    r"|\$\{(?P<inner>[^}]*)\}"
)
_ARITHMETIC = re.compile(r"\s*([A-Z][A-Z0-9_]*)((?:\s*(?://|[-+*%])\s*\d{1,15})*)\s*$")
_TERM = re.compile(r"(//|[-+*%])\s*(\d+)")
_DIGITS = re.compile(r"(\d+)")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
# A path, and a star or a placeholder in the place of all that follows.
_ANYTHING = re.compile(r"((?:[^*$]+\.)?)(?:\*+|\$[A-Z][A-Z0-9_]*)")
OFFSET = "LAYER_ID_OFFSET"
T = TypeVar("T")


@dataclass(frozen=True)
class Placeholder:
    """``$NAME`` or ``${NAME+1}``: ``terms``, operators and numbers, apply to the id from left to right."""

    name: str
    terms: tuple[tuple[str, int], ...] = ()

    def value(self, number: int) -> int:
        """Return the number in the name for an id."""
        for symbol, term in self.terms:
            number = _OPERATORS[symbol](number, term)
        return number

    def solve(self, number: int) -> int | None:
        """Return the id for which :meth:`value` is the given number; None if there is none, or may be several."""
        for symbol, term in reversed(self.terms):
            if symbol == "+":
                number -= term
            elif symbol == "-":
                number += term
            elif symbol == "*" and term and number % term == 0:
                number //= term
            else:
                return None
        return number

    @property
    def is_solvable(self) -> bool:
        """Return whether the number determines the id."""
        return all(symbol in "+-*" for symbol, _ in self.terms)


@dataclass(frozen=True)
class Template:
    """A name, split into literal text and placeholders in turn; ``placeholders`` is sorted."""

    text: str
    parts: tuple[str | Placeholder, ...]
    placeholders: tuple[str, ...]

    @property
    def has_star(self) -> bool:
        """Return whether ``*`` is in it."""
        return "*" in self.text

    def formatter(self, order: tuple[str, ...]) -> Callable[[tuple[int, ...]], str]:
        """Return a function from ids, in the given order of placeholders, to the name."""
        if not self.placeholders:
            return lambda ids: self.text
        pattern = "".join(part.replace("%", "%%") if isinstance(part, str) else "%d" for part in self.parts)
        found = [part for part in self.parts if isinstance(part, Placeholder)]
        places = [(order.index(part.name), part) for part in found]
        if not any(part.terms for part in found):
            if [place for place, _ in places] == list(range(len(order))):
                return lambda ids: pattern % ids
            pick = operator.itemgetter(*(place for place, _ in places))
            return lambda ids: pattern % pick(ids)

        def format_name(ids: tuple[int, ...]) -> str:
            numbers = tuple(part.value(ids[place]) for place, part in places)
            if min(numbers) < 0:
                raise StatementError(f"{self.text} would be a name with a negative number for ids {ids}")
            return pattern % numbers

        return format_name


def parse_name(text: str, column: int = 0) -> Template:
    """Split a name at its placeholders; a ``$`` that begins none is a character like others."""
    if "$" not in text:
        return Template(text, (text,) if text else (), ())
    parts: list[str | Placeholder] = []
    position = 0
    for found in _PLACEHOLDER.finditer(text):
        if found.start() > position:
            parts.append(text[position : found.start()])
        parts.append(_placeholder(found, text, column))
        position = found.end()
    if position < len(text):
        parts.append(text[position:])
    names = sorted({part.name for part in parts if isinstance(part, Placeholder)})
    return Template(text, tuple(parts), tuple(names))


_SMALL = re.compile(r"\$\{?([a-z][a-z0-9_]*)")
# The names of output layers, which may be the embedding.
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDING = re.compile(r"(?:embed|wte)(?!_out\.)[^.]*\.weight$")


def _placeholder(found: re.Match[str], text: str, column: int) -> Placeholder:
    if found["name"] is not None:
        return Placeholder(found["name"])
    inner = _ARITHMETIC.match(found["inner"])
    if inner is None:
        raise StatementError(
            f"{text!r}: expected ${{NAME+1}} (operators + - * // %, numbers of at most 15 digits, left to right); got "
            f"{found.group()!r}",
            column,
        )
    terms = tuple((symbol, int(number)) for symbol, number in _TERM.findall(inner[2]))
    if any(symbol in ("//", "%") and number == 0 for symbol, number in terms):
        raise StatementError(f"{text!r}: division by zero in {found.group()!r}", column)
    return Placeholder(inner[1], terms)


def name_hint(name: str) -> str:
    """Return advice about a name that matches nothing; "" where nothing is known of it.

    Its end may be a star or a placeholder, as if that stood for any text; its placeholder may be in small letters; it
    may be a head, which a model with tied embeddings has not.
    """
    small = _SMALL.search(name)
    if small is not None:
        return f"; placeholders are written in capitals, ${small[1].upper()}"
    if name.endswith(HEADS):
        return "; where the model's embeddings are tied, give the rules tied=True"
    found = _ANYTHING.fullmatch(name)
    if found is None:
        return ""
    each = f'"{found[1]}{{key}}" -> "{{key}}"' if found[1] else '"{key.removeprefix("PREFIX.")}" -> "{key}"'
    return (
        f"; '*' and $NAME stand for numbers alone: for all keys give [f'{each}' for key in state_dict], a statement "
        "for each; the prefixes model., optimizer. and _layers. need none"
    )


# The runs of digits of names of one form, by those in some places.
_Table = dict[tuple[str, ...], list[tuple[str, ...]]]


def _enter(table: _Table, places: tuple[int, ...], pieces: Sequence[str]) -> None:
    """Enter a name, split at its runs of digits, into a table by those in ``places``."""
    ids = tuple(pieces[1::2])
    table.setdefault(tuple([ids[place] for place in places]), []).append(ids)


class KeyIndex:
    """An index of keys by names with placeholders or stars."""

    def __init__(self, keys: Iterable[str]) -> None:
        # By form: the keys, each as the pieces between and of its runs of digits.
        self._pieces: dict[str, list[list[str]]] = {}
        self._known: set[str] = set()
        # By form and the places of literal numbers in it.
        self._tables: dict[str, dict[tuple[int, ...], _Table]] = {}
        self._later: dict[str | None, list[str]] = {}
        for key in keys:
            pieces = _DIGITS.split(key)
            self._pieces.setdefault("#".join(pieces[::2]), []).append(pieces)

    def add(self, names: Iterable[str], template: Template) -> None:
        """Add the names that a template was expanded to; they are indexed when such names are first looked up."""
        self._later.setdefault(form_of(template)[0], []).extend(names)

    def _open(self, form: str | None) -> None:
        """Index the added names of a form (None: all)."""
        waiting = [form, None] if form is not None else list(self._later)
        for name in [name for kind in waiting for name in self._later.pop(kind, ())]:
            pieces = _DIGITS.split(name)
            own = "#".join(pieces[::2])
            if not self._known:
                self._known.update(self._names(*self._pieces))
            if name not in self._known:
                self._known.add(name)
                self._pieces.setdefault(own, []).append(pieces)
                for places, table in self._tables.get(own, {}).items():
                    _enter(table, places, pieces)

    def _ids(self, form: str, places: tuple[int, ...], numbers: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the runs of digits of all keys of a form that have the given numbers in the given places."""
        tables = self._tables.setdefault(form, {})
        table = tables.get(places)
        if table is None:
            table = tables[places] = {}
            for pieces in self._pieces.get(form, []):
                _enter(table, places, pieces)
        return table.get(numbers, [])

    def _names(self, *forms: str) -> Iterator[str]:
        return ("".join(pieces) for form in forms for pieces in self._pieces.get(form, []))

    def keys_like(self, key: str, count: int = 3) -> list[str]:
        """Return some keys that look like a name: the same last component, and the first ones if possible."""
        self._open(None)
        wanted = _DIGITS.sub("#", _PLACEHOLDER.sub("#", key))
        tail = wanted.rsplit(".", 1)[-1]
        alike = [form for form in self._pieces if form.endswith(tail)] or list(self._pieces)
        alike.sort(key=lambda form: -_shared(form.split("."), wanted.split(".")))
        return [next(self._names(form)) for form in alike[:count]]

    def bindings(self, template: Template, known: Mapping[str, int] | None = None) -> list[tuple[int, ...]]:
        """Return all ids, in the order of ``template.placeholders``, for which the name is a key; sorted."""
        if template.has_star:
            return self._starred_bindings(template, known)
        form, slots = form_of(template)
        names = template.placeholders
        self._open(form)
        if form is None:
            found = self._bindings_by_pattern(template)
        else:
            found = self._bindings_by_form(form, slots, names)
        if known:
            fixed = [(i, known[name]) for i, name in enumerate(names) if name in known]
            found = [ids for ids in found if all(ids[i] == value for i, value in fixed)]
        return sorted(set(found))

    def _starred_bindings(self, template: Template, known: Mapping[str, int] | None) -> list[tuple[int, ...]]:
        """Return the ids of a name that has stars too: a star is a placeholder whose id is not used."""
        parts: list[str | Placeholder] = []
        for part in template.parts:
            if isinstance(part, Placeholder):
                parts.append(part)
                continue
            for number, text in enumerate(part.split("*")):
                parts += [Placeholder(f"*{len(parts)}"), text] if number else [text]
        stars = tuple(part.name for part in parts if isinstance(part, Placeholder) and part.name.startswith("*"))
        whole = Template("", tuple(part for part in parts if part != ""), (*stars, *template.placeholders))
        return sorted({ids[len(stars) :] for ids in self.bindings(whole, known)})

    def _bindings_by_form(
        self, form: str, slots: list[str | Placeholder], names: tuple[str, ...]
    ) -> list[tuple[int, ...]]:
        literal = [(i, slot) for i, slot in enumerate(slots) if isinstance(slot, str)]
        candidates = self._ids(form, tuple(i for i, _ in literal), tuple(text for _, text in literal))
        placed = [(i, slot) for i, slot in enumerate(slots) if isinstance(slot, Placeholder)]
        plain = sorted(placed, key=lambda pair: pair[1].name)
        if [(slot.name, slot.terms) for _, slot in plain] == [(name, ()) for name in names]:
            order = [i for i, _ in plain]
            found = [tuple(int(ids[i]) for i in order) for ids in candidates]
            # A placeholder would write 007 as 7.
            if any(text[0] == "0" and len(text) > 1 for ids in candidates for text in ids):
                found = [t for t, ids in zip(found, candidates) if all(str(n) == ids[i] for n, i in zip(t, order))]
            return found
        solved = (_solve(names, [(slot, ids[i]) for i, slot in placed]) for ids in candidates)
        return [ids for ids in solved if ids is not None]

    def _bindings_by_pattern(self, template: Template) -> list[tuple[int, ...]]:
        slots = [part for part in template.parts if isinstance(part, Placeholder)]
        pattern = re.compile("".join(re.escape(p) if isinstance(p, str) else r"(\d+)" for p in template.parts))
        matches = (pattern.fullmatch(key) for key in self._names(*self._pieces))
        solved = (_solve(template.placeholders, list(zip(slots, match.groups()))) for match in matches if match)
        return [ids for ids in solved if ids is not None]

    def star(self, name: str) -> list[str]:
        """Return the keys that match a name whose stars stand for numbers, sorted by these numbers."""
        pattern = re.compile(r"(\d+)".join(re.escape(part) for part in name.split("*")))
        form, _ = form_of(parse_name(name))
        # A star next to a digit may share a run of digits with it: then every key is matched.
        beside = re.search(r"\d\*|\*\d|\*\*", name) is not None
        self._open(None if beside else form)
        found = []
        for key in self._names(*(self._pieces if beside else [str(form)])):
            match = pattern.fullmatch(key)
            if match:
                found.append((tuple(int(text) for text in match.groups()), key))
        return [key for _, key in sorted(found)]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many components two names have in common at their beginnings."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _solve(names: tuple[str, ...], slots: list[tuple[Placeholder, str]]) -> tuple[int, ...] | None:
    """Return the ids for which placeholders become the given texts, or None."""
    ids: dict[str, int] = {}
    for slot, text in slots:
        number = slot.solve(int(text)) if slot.is_solvable else None
        if number is not None and number >= 0 and ids.setdefault(slot.name, number) != number:
            return None
    if len(ids) != len(names) or any(str(slot.value(ids[slot.name])) != text for slot, text in slots):
        return None
    return tuple(ids[name] for name in names)


def form_of(template: Template) -> tuple[str | None, list[str | Placeholder]]:
    """Return the form of a name's keys, and the content of each run of digits.

    None where a placeholder touches a digit or another placeholder: runs of digits then do not separate them.
    """
    form: list[str] = []
    slots: list[str | Placeholder] = []
    for part in template.parts:
        if isinstance(part, Placeholder):
            if form and form[-1].endswith("#"):
                return None, []
            form.append("#")
            slots.append(part)
            continue
        text = part.replace("*", "0")
        if form and form[-1].endswith("#") and text[:1].isdigit():
            return None, []
        pieces = _DIGITS.split(text)
        form.append("#".join(pieces[::2]))
        slots += pieces[1::2]
    return "".join(form), slots


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
        """Yield the items of all names that can match a common key with this one."""
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
