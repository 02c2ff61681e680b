"""Fits of names: the key of a source that a target of another name clearly means.

Tested in tests/transfer/test_resolution.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
            self._numbers.setdefault(unnumbered(name), set()).add(parts.kind)

    def numbers(self, name: str) -> set[tuple[str, ...]]:
        """Return the kinds of the names that differ from one of them in numbers alone, and its own."""
        return self._numbers[unnumbered(name)]

    def best(self, name: str) -> list[str]:
        """Return the names that fit one best: none, one, or several of which none fits better than the others."""
        wanted = _taken_apart(name)
        fitting = [(other, parts) for other, parts in self._by_kind.get(wanted.kind, ()) if _fit(parts, wanted)]
        most = max((len(parts.words & wanted.words) for _, parts in fitting), default=0)
        return [other for other, parts in fitting if len(parts.words & wanted.words) == most]


def _taken_apart(name: str) -> _Name:
    parts = name.lower().split(".")
    numbers = [part for part in parts if part.isdigit()]
    # A stack of layers has a name of its own in each library: the part before a number.
    named = [part for part, after in zip(parts, [*parts[1:], ""]) if not part.isdigit() and not after.isdigit()]
    layer = _words(named[-2:-1] or named[-1:])
    path = _words(named[:-2]) - _WRAPPERS
    return _Name((*numbers, *named[-1:]), layer, path, _words(parts))


def unnumbered(name: str) -> str:
    """Return a name with a mark in place of each number."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _words(parts: Iterable[str]) -> frozenset[str]:
    return frozenset(word for part in parts for word in part.split("_") if word)


def _fit(one: _Name, other: _Name) -> bool:
    """Return whether the words of one layer are among the other's, and the paths do not contradict."""
    shared = one.layer & other.layer
    same = one.layer == other.layer or (shared in (one.layer, other.layer) and bool(shared - _COMMON))
    return same and (bool(one.path & other.path) or not one.path or not other.path)
