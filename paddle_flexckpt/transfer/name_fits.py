"""Fits of names: the parameter of a source that a target of another name clearly means.

Tested in tests/transfer/test_resolution.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from paddle_flexckpt.aoa.parser import quoted

# Words of layers and parameters that say nothing about which of several it is.
_COMMON = frozenset(["weight", "bias", "proj", "projection", "linear", "layer", "layernorm", "norm", "ln", "dense"])
_WRAPPERS = frozenset(["model", "module"])


class _Name(NamedTuple):
    """A name, taken apart: its numbers and last part, the words of its layer, of the path there, and of all parts."""

    kind: tuple[str, ...]
    layer: frozenset[str]
    path: frozenset[str]
    words: frozenset[str]


class NameFits:
    """Names by their kinds, to find those that fit another."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names."""
        self._by_kind: dict[tuple[str, ...], list[tuple[str, _Name]]] = {}
        self._numbers: dict[str, set[tuple[str, ...]]] = {}
        for name in names:
            parts = _taken_apart(name)
            self._by_kind.setdefault(parts.kind, []).append((name, parts))
            self._numbers.setdefault(_unnumbered(name), set()).add(parts.kind)

    def numbers(self, name: str) -> set[tuple[str, ...]]:
        """Return the kinds of the names that differ from one of them in numbers alone, and its own."""
        return self._numbers[_unnumbered(name)]

    def best(self, name: str) -> list[str]:
        """Return the names that fit one best: none, one, or several of which none fits better than the others."""
        wanted = _taken_apart(name)
        fitting = [(other, parts) for other, parts in self._by_kind.get(wanted.kind, ()) if _fit(parts, wanted)]
        most = max((len(parts.words & wanted.words) for _, parts in fitting), default=0)
        return [other for other, parts in fitting if len(parts.words & wanted.words) == most]


class MovedParameters:
    """The parameters that a source may have under other names than the targets that lack them."""

    def __init__(
        self,
        keys: Collection[str],
        filled: Collection[str],
        shapes: Mapping[str, tuple[int, ...]],
        used: Collection[str],
    ) -> None:
        """Take the names of both sides."""
        self._shapes, self._unused = shapes, shapes.keys() - {*used, *keys}
        self._unused_shapes = {shapes[name] for name in self._unused}
        self._source_names, self._target_names = NameFits(shapes), NameFits(keys)
        self._lacking = NameFits(key for key in keys if key not in filled)
        # By names with marks in place of numbers: of the source, and of this rank.
        self._numbers_equal: dict[tuple[str, str], bool] = {}

    def statement(self, key: str, shape: tuple[int, ...]) -> str:
        """Return the start of a remedy, which gives the statement for a parameter; "" without a candidate."""
        sides = (shape, shape[::-1]) if len(shape) == 2 else (shape,)
        if self._unused_shapes.isdisjoint(sides):
            return ""
        # A name that statements use counts too: it may have been given to another target by mistake.
        fitting = [name for name in self._source_names.best(key) if self._shapes[name] in sides]
        is_clear = len(fitting) == 1 and fitting[0] in self._unused and self._lacking.best(fitting[0]) == [key]
        # Else one side may count the embedding as a layer, or is a part of the layers: their numbers mean nothing.
        is_clear = is_clear and self._have_equal_numbers(fitting[0], key)
        name = fitting[0] if is_clear else "NAME"
        plain, turned = (f"'{quoted(name)}{axes} -> {quoted(key)}'" for axes in ("", "^T"))
        if not is_clear:
            turn = f" ({turned} if its axes are in another order)" * (len(shape) == 2)
            return (
                f"if it is there under another name, give the AOA statement {plain} with that name{turn}: its states "
                "follow; or "
            )
        if len(shape) == 2 and shape[0] == shape[1]:
            return (
                f"if it is {name!r} under another name, give the AOA statement {plain}, or {turned} if the source's "
                "axes are in another order, which a square shape does not tell: its states follow; or "
            )
        text = plain if self._shapes[name] == shape else turned
        return f"if it is {name!r} under another name, give the AOA statement {text}: its states follow; or "

    def _have_equal_numbers(self, name: str, key: str) -> bool:
        """Return whether names like one in the source, and like another on this rank, have the same numbers."""
        pair = _unnumbered(name), _unnumbered(key)
        if pair not in self._numbers_equal:
            self._numbers_equal[pair] = self._source_names.numbers(name) == self._target_names.numbers(key)
        return self._numbers_equal[pair]


def _taken_apart(name: str) -> _Name:
    parts = name.lower().split(".")
    numbers = [part for part in parts if part.isdigit()]
    # A stack of layers has a name of its own in each library: the part before a number.
    named = [part for part, after in zip(parts, [*parts[1:], ""]) if not part.isdigit() and not after.isdigit()]
    layer = _words(named[-2:-1] or named[-1:])
    path = _words(named[:-2]) - _WRAPPERS
    return _Name((*numbers, *named[-1:]), layer, path, _words(parts))


def _unnumbered(name: str) -> str:
    """Return a name with a mark in place of each number."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _words(parts: Iterable[str]) -> frozenset[str]:
    return frozenset(word for part in parts for word in part.split("_") if word)


def _fit(one: _Name, other: _Name) -> bool:
    """Return whether the words of one layer are among the other's, and the paths do not contradict."""
    shared = one.layer & other.layer
    same = one.layer == other.layer or (shared in (one.layer, other.layer) and bool(shared - _COMMON))
    return same and (bool(one.path & other.path) or not one.path or not other.path)
