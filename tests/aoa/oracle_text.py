"""The oracle's reading of statements: parsing without a lexer, and expansion of placeholders and patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAGS = set("fused_qkv fused_qkv_old fused_ffn copy stack unstack sum average lora_merge optional".split())
NOTHING = "_"


class OracleError(Exception):
    """The program is not one that the oracle understands."""


@dataclass(frozen=True)
class Name:
    """A name of a statement; ``pattern`` may hold placeholders, a range and a star."""

    pattern: str
    transposed: bool = False


@dataclass(frozen=True)
class Statement:
    left: tuple[Name, ...]
    right: tuple[Name, ...]
    attributes: tuple[tuple[str, Any], ...]

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.attributes).get(key, default)


# ----------------------------------------------------------------------------------------------------------- parsing
# No lexer: quoted texts and escapes are put aside, and what is left is split at arrows, blanks and commas.

_QUOTED = "\x01"
DOLLAR = "\x02"


def parse(text: str) -> list[Statement]:
    """The statements of a text."""
    quoted: list[str] = []

    def put_aside(match: re.Match) -> str:
        if match[0].startswith("#"):
            return " "
        quoted.append(match[1])
        return f"{_QUOTED}{len(quoted) - 1}{_QUOTED}"

    text = re.sub(r'"([^"]*)"|#[^\n]*', put_aside, text.replace("\\$", DOLLAR)).strip()
    quoted = [each.replace("\\$", DOLLAR) for each in quoted]
    text = re.sub(r"\s*(,|=|->)\s*", r"\1", text)
    left, *rest = text.split("->")
    statements = []
    for i, segment in enumerate(rest):
        pieces = segment.split()
        if len(pieces) != (1 if i == len(rest) - 1 else 2):
            raise OracleError(f"where does a statement end in {segment!r}?")
        names, attributes = [], []
        for item in pieces[0].split(","):
            key, equals, value = item.partition("=")
            if equals:
                attributes.append((key, quoted[int(value[1:-1])] if value[0] == _QUOTED else _number(value)))
            elif item in TAGS:
                attributes.append((item, True))
            else:
                names.append(_name(item, quoted))
        lefts = tuple(_name(item, quoted) for item in left.split(","))
        statements.append(Statement(lefts, tuple(names), tuple(attributes)))
        left = pieces[-1]
    return statements


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _name(item: str, quoted: Sequence[str]) -> Name:
    transposed = item.endswith("^T")
    item = item[:-2] if transposed else item
    return Name(quoted[int(item[1:-1])] if item[0] == _QUOTED else item, transposed)


# --------------------------------------------------------------------------------------------------------- expansion

_PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*)([^}]*)\}|\$([A-Z][A-Z0-9_]*)")
OFFSET = "LAYER_ID_OFFSET"


def placeholders(pattern: str) -> list[str]:
    return list(dict.fromkeys(a or b for a, _, b in _PLACEHOLDER.findall(pattern)))


def substitute(pattern: str, ids: Mapping[str, int], on_right: bool) -> str:
    def value(match: re.Match) -> str:
        if match[3]:
            return str(ids[match[3]] - (1 if on_right and match[3] == OFFSET else 0))
        if not re.fullmatch(r"([-+*%]|//|\d|\s)*", match[2]):
            raise OracleError(f"arithmetic {match[2]!r}")
        return str(eval(f"{ids[match[1]]}{match[2]}"))

    return _PLACEHOLDER.sub(value, pattern)


def _matcher(pattern: str, ids: Mapping[str, int]) -> re.Pattern:
    """Names that fit a pattern, with a group for every placeholder that is not among ``ids``."""
    text, seen, at = "", set(), 0
    for match in _PLACEHOLDER.finditer(pattern):
        text += re.escape(pattern[at : match.start()])
        name, at = match[1] or match[3], match.end()
        if name in ids:
            text += substitute(match[0], ids, on_right=False)
        elif match[1] and match[2]:
            raise OracleError(f"{pattern}: arithmetic on what is not bound")
        else:
            text += f"(?P={name})" if name in seen else f"(?P<{name}>[0-9]+)"
            seen.add(name)
    text += re.escape(pattern[at:])
    return re.compile(text.replace(re.escape("*"), "[0-9]+"))


def _bind(pattern: str, ids: dict[str, int], known: Iterable[str]) -> list[dict[str, int]]:
    open_names = [name for name in placeholders(pattern) if name not in ids]
    if not open_names:
        return [ids]
    expression = _matcher(pattern, ids)
    found = {tuple(int(hit[name]) for name in open_names) for hit in map(expression.fullmatch, known) if hit}
    return [{**ids, **dict(zip(open_names, values))} for values in sorted(found)]


def combinations(left: Sequence[str], right: Sequence[str], known: Iterable[str], destination: Iterable[str]) -> list:
    """The ids for which a statement is repeated; ``[{}]`` if it has no placeholders."""
    first, names = (right, destination) if list(left) == [NOTHING] else (left, known)
    combos: list[dict[str, int]] = [{}]
    for pattern in first:
        combos = [longer for ids in combos for longer in _bind(pattern, ids, names)]
        if first is right and placeholders(pattern):
            break
    return sorted(combos, key=lambda ids: tuple(ids.values()))


def unrolled(name: Name) -> list[Name]:
    hit = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name.pattern)
    return [Name(f"{hit[1]}_{i}", name.transposed) for i in range(int(hit[2]), int(hit[3]))] if hit else [name]


def starred(pattern: str, names: Iterable[str]) -> list[str]:
    if "*" not in pattern:
        return [pattern]
    expression = re.compile(re.escape(pattern).replace(re.escape("*"), "([0-9]+)"))
    hits = [(tuple(map(int, hit.groups())), name) for name in names for hit in [expression.fullmatch(name)] if hit]
    return [name for _, name in sorted(hits)]
