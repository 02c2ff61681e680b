"""Statements taken apart: each of the results does one thing, with temporaries between them.

``a^T, b^T -> c, axis=0, dtype="bfloat16"`` becomes two transposes, a join and a cast. The inverse of a program is made
of the inverses of these, in reverse order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_flexckpt.aoa.errors import Place, StatementError
from paddle_flexckpt.aoa.fused import FUSED
from paddle_flexckpt.aoa.lexer import quoted
from paddle_flexckpt.aoa.macros import array_names
from paddle_flexckpt.aoa.parser import Attribute, Statement, written

# What stands beside another attribute and means nothing alone.
_COMPANIONS = {
    "rename": (),
    "remove": (),
    "add": ("fill",),
    "permute": (),
    "reshape": (),
    "slice": (),
    "pad": ("fill",),
    "resize": ("fill",),
    "repeat": ("axis", "block"),
    "dtype": (),
    "dst_dtype": ("src_dtype",),
    "scale": (),
    "axis": ("sizes",),
    "stack": ("axis",),
    "unstack": ("axis",),
    "copy": (),
    "sum": ("weights",),
    "average": (),
    "lora_merge": ("scale",),
    "dequant": ("block",),
    **{tag: ("axis", "num_heads", "num_key_value_groups") for tag in FUSED},
}
_JOINERS = ("stack", "unstack", "copy", "sum", "average", "lora_merge", "dequant", *FUSED)
_SINGLE = frozenset({"permute", "reshape", "slice", "pad", "resize", "repeat", "dtype", "dst_dtype", "scale"})


_TEMPORARY = "_step_"
_TEMPORARY_END = re.compile(rf"{_TEMPORARY}\d+_\d+$")


@dataclass(frozen=True)
class Primitive:
    """A statement that does one thing.

    Attributes:
        kind: Its one attribute or tag, ``"rename"``, ``"remove"`` or ``"add"``.
        left: Names that it reads.
        right: Names that it assigns.
        attributes: The attribute and what belongs to it, as written: ``axis=0``.
        values: Their values by name.
        place: The statement that it is part of.
        suffix: ``optional`` and ``states``, as written.
    """

    kind: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: tuple[str, ...]
    values: Mapping[str, object]
    place: Place
    suffix: tuple[str, ...] = ()

    def text(self) -> str:
        """The statement as text."""
        left, right = (", ".join(map(quoted, names)) for names in (self.left, self.right))
        return ", ".join([f"{left} -> {right}", *self.attributes, *self.suffix])


def is_temporary(name: str) -> bool:
    """Whether a name is one between the parts of a statement."""
    return _TEMPORARY_END.search(name) is not None


def without_end(name: str) -> str:
    """The name of the user's that a temporary belongs to; other names as they are."""
    return _TEMPORARY_END.sub("", name)


def primitives(statement: Statement, number: int) -> list[Primitive]:
    """A statement, taken apart.

    Args:
        statement: The statement.
        number: Its number; it makes the names of temporaries different from other statements'.

    Raises:
        StatementError: Attributes exclude each other.
    """
    # $LAYER_ID_OFFSET is the id on the left and the id less 1 on the right; written out, a name means the same on both.
    left = [name.replace("$LAYER_ID_OFFSET", "$LAYER_ID") for name in array_names(statement.left)]
    right = [name.replace("$LAYER_ID_OFFSET", "${LAYER_ID-1}") for name in array_names(statement.right)]
    suffix = tuple(written(a) for a in statement.attributes if a.key in ("optional", "states"))

    def make(main: Attribute | str, reads: Sequence[str], assigns: Sequence[str]) -> Primitive:
        kind, given = (main, []) if isinstance(main, str) else (main.key, [main])
        given += [a for a in statement.attributes if a.key in _COMPANIONS[kind]]
        values = {a.key: a.value for a in given}
        return Primitive(
            kind, tuple(reads), tuple(assigns), tuple(map(written, given)), values, statement.place, suffix
        )

    if right == ["_"]:
        return [make("remove", left, right)]
    if left == ["_"]:
        return [make("add", left, right)]
    result: list[Primitive] = []
    names = list(left)
    count = 0

    def temporaries(old: Sequence[str]) -> list[str]:
        nonlocal count
        count += 1
        return [f"{name}{_TEMPORARY}{number}_{count}" for name in old]

    joiner = _joiner(statement, len(left), len(right))
    before: list[Attribute] = []
    after: list[Attribute] = []
    for position, attribute in enumerate(statement.attributes):
        if attribute.key in _SINGLE and not (attribute.key == "scale" and joiner and joiner.key == "lora_merge"):
            late = joiner is None or position > statement.attributes.index(joiner)
            (after if late else before).append(attribute)
    transposed = [variable.transposed for variable in statement.left for _ in array_names([variable])]
    reverse = Attribute("permute", (), 0)
    if all(transposed) and not before and (joiner is None or (joiner.key == "axis" and len(right) == 1)):
        # Transposing after a join keeps the extents of the left names in sight: so the inverse knows them.
        after.insert(0, reverse)
        if joiner is not None:
            joiner = Attribute("axis", -1 - int(joiner.value), joiner.column)  # type: ignore[arg-type]
    elif any(transposed):
        new = temporaries(names)
        for name, temporary, flag in zip(names, new, transposed):
            if flag:
                result.append(make(reverse, [name], [temporary]))
        names = [temporary if flag else name for name, temporary, flag in zip(names, new, transposed)]
    for attribute in before:
        new = temporaries(names)
        result += [make(attribute, [a], [b]) for a, b in zip(names, new)]
        names = new
    if joiner is not None:
        new = temporaries(right) if after else list(right)
        result.append(make(joiner, names, new))
        names = new
    for position, attribute in enumerate(after):
        new = temporaries(right) if position < len(after) - 1 else list(right)
        result += [make(attribute, [a], [b]) for a, b in zip(names, new)]
        names = new
    if joiner is None and not after:
        result.append(make("rename", names, right))
    return result


def _joiner(statement: Statement, left: int, right: int) -> Attribute | None:
    for attribute in statement.attributes:
        if attribute.key in _JOINERS:
            return attribute
    star = any("*" in variable.name for variable in (*statement.left, *statement.right))
    if left == right and ((left == 1 and not star) or not statement.has("axis")):
        return None
    axis = statement.get("axis")
    if axis is None:
        raise StatementError("axis= is needed to join or cut")
    return axis
