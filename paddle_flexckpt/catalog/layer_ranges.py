"""Ranges of layers, which stand for the keys of their tensors. Tested in tests/catalog/test_layer_ranges.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

_MOST_ENDS = 3
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?=\..)")


@dataclass(frozen=True)
class LayerRange:
    """Layers of one stack, side by side, of which the same tensors are meant.

    Attributes:
        stack: The path of the stack, with its dot: ``model.layers.``.
        first: The number of the first layer.
        last: That of the last one.
        ends: The names of the tensors within each layer, sorted.
    """

    stack: str
    first: int
    last: int
    ends: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """Return the keys that the range stands for."""
        return [f"{self.stack}{number}.{end}" for number in range(self.first, self.last + 1) for end in self.ends]

    def __str__(self) -> str:
        several, count = self.first != self.last, len(self.ends)
        which = f"layers {self.first} to {self.last}" if several else f"layer {self.first}"
        named = f": {', '.join(self.ends)}" if count <= _MOST_ENDS else f", such as {self.ends[0]}"
        return f"{which} of {self.stack}*, {count} tensor{'s' * (count > 1)}{' each' * several}{named}"


def numbered(key: str) -> Iterator[tuple[str, int, str]]:
    """Yield the stack, the layer's number and the name in the layer, for each number in a key's path."""
    for found in _NUMBER.finditer(key):
        yield key[: found.start()], int(found[0]), key[found.end() + 1 :]


def layer_ranges(tensors: Iterable[tuple[str, int, str]]) -> list[LayerRange]:
    """Return the ranges of layers, sorted, of tensors with stack, number and name in the layer."""
    layers: dict[tuple[str, int], set[str]] = {}
    for stack, number, end in tensors:
        layers.setdefault((stack, number), set()).add(end)
    ranges: list[LayerRange] = []
    for (stack, number), names in sorted(layers.items()):
        before, ends = ranges[-1] if ranges else None, tuple(sorted(names))
        if before is not None and (before.stack, before.last, before.ends) == (stack, number - 1, ends):
            ranges[-1] = LayerRange(stack, before.first, number, ends)
        else:
            ranges.append(LayerRange(stack, number, number, ends))
    return ranges


def grouped(keys: Iterable[str]) -> list[str]:
    """Return the texts of ranges of layers, by the first number of each key, and the keys that are alone."""
    names = sorted(keys)
    found = layer_ranges(each for key in names for each in islice(numbered(key), 1))
    ranges = [each for each in found if len(each.keys) > 1]
    within = {key for each in ranges for key in each.keys}
    return [*map(str, ranges), *(key for key in names if key not in within)]
