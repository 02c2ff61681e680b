"""Write statements the other way round: as far as statements alone tell what there was.

Each statement becomes one that reads its right names and undoes its attributes in reverse order. Where a destination is
known, a load needs no such text: see :mod:`paddle_flexckpt.aoa.reverse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paddle_flexckpt.aoa.casts import COMPLEX, is_exact
from paddle_flexckpt.aoa.config import AoaConfig, Statements, read_config
from paddle_flexckpt.aoa.errors import AoaError, Place, StatementError, describe_problem
from paddle_flexckpt.aoa.macros import FUSED, array_names, fused_tag
from paddle_flexckpt.aoa.names import Placeholder, parse_name
from paddle_flexckpt.aoa.operations import MODIFIERS, joiner_of
from paddle_flexckpt.aoa.parser import Attribute, Statement, parse_program, quoted, written

_NEVER = {
    "slice": "a slice leaves elements out",
    "scale": "a product is rounded",
    "sum": "a sum does not tell its terms",
    "average": "a mean does not tell its terms",
    "lora_merge": "a merged weight does not tell its factors",
    "dequant": "what is dequantised does not tell its scales",
}
_TRANSPOSE = 'permute="[]"'


class _NotInvertible(ValueError):
    pass


def invert(aoa_config: AoaConfig | Statements) -> dict[str, Any]:
    """Return the configuration that undoes another: it makes the source of what the other made of it.

    Returns:
        ``{"aoa_statements": [...]}``.

    Raises:
        AoaError: The statements alone tell no exact inverse; the error names the statement.
    """
    config = read_config(aoa_config)
    statements = parse_program(config.statements)
    if config.reverse:
        statements = parse_program(inverse_texts(statements, exact=False))
    return {"aoa_statements": inverse_texts(statements, exact=True)}


def inverse_texts(statements: Sequence[Statement], exact: bool) -> list[str]:
    """Return the statements that undo others.

    Args:
        statements: A program.
        exact: Whether statements that lose something are an error; else rounding casts are undone by the opposite cast,
            and what was removed stays as it is in the destination (``aoa_config_reverse``).

    Raises:
        AoaError: A statement has no inverse.
    """
    texts: list[str] = []
    # Names that the inverse has made by now, and why others cannot be had, each as they are before the statement.
    known: set[str] = set()
    lost: dict[str, tuple[Place, str]] = {}
    for number in range(len(statements) - 1, -1, -1):
        statement = statements[number]
        # $LAYER_ID_OFFSET is the id on the left and the id less 1 on the right; written out, a name means the same.
        left = [name.replace("$LAYER_ID_OFFSET", "$LAYER_ID") for name in array_names(statement.left)]
        right = [name.replace("$LAYER_ID_OFFSET", "${LAYER_ID-1}") for name in array_names(statement.right)]
        needed = any(_form(name) not in known for name in left)
        why, made = "", []
        try:
            there = [name for name in right if _form(name) not in lost]
            if len(there) < len(right) and not (statement.has("copy") and there):
                raise _NotInvertible(next(lost[_form(name)][1] for name in right if _form(name) in lost))
            made = _Inverse(statement, left, there, number, exact).texts() if needed or left == ["_"] else []
        except _NotInvertible as error:
            why = str(error)
        except StatementError as error:
            raise AoaError([describe_problem(str(error), statement.place.at(error.column))]) from error
        for name in right:
            known.discard(_form(name))
            lost.pop(_form(name), None)
        texts += made
        if why:
            lost.update((_form(name), (statement.place, why)) for name in left if _form(name) not in known)
        else:
            known.update(map(_form, left))
            for name in left:
                lost.pop(_form(name), None)
    names = {_form(name): name for statement in statements for name in array_names(statement.left)}
    problems = [
        describe_problem(f"has no exact inverse: {names[form]!r} cannot be had back, as {why}", place)
        for form, (place, why) in lost.items()
    ]
    if problems:
        raise AoaError(problems)
    return texts


@lru_cache(maxsize=4096)
def _form(name: str) -> str:
    """Return a name whatever its placeholders are called: ``a.$L`` and ``a.${LAYER_ID-1}`` stand for the same names."""
    return "".join(part if isinstance(part, str) else "$" for part in parse_name(name).parts)


class _Inverse:
    """Write the inverse of one statement, in one text or, where attributes cannot stand together, in several."""

    def __init__(
        self, statement: Statement, left: Sequence[str], right: Sequence[str], number: int, exact: bool
    ) -> None:
        self._statement = statement
        self._left, self._right = list(left), list(right)
        self._number, self._exact = number, exact
        self._suffix = [written(a) for a in statement.attributes if a.key in ("optional", "states")]
        self._texts: list[str] = []
        self._have = self._right
        self._is_joined = False
        self._pending: list[str] = []

    def texts(self) -> list[str]:
        """Return the texts."""
        statement = self._statement
        if [v.name for v in statement.right] == ["_"]:
            if self._exact:
                raise _NotInvertible("it is removed")
            return [self._text(["_"], [name], []) for name in self._left]
        if self._left == ["_"]:
            return [self._text([name], ["_"], []) for name in self._right]
        self._check_ids()
        joiner = self._joiner()
        single = [a for a in statement.attributes if a.key in MODIFIERS and not (a.key == "scale" and joiner)]
        position = -1 if joiner is None else statement.attributes.index(joiner)
        before = [a for a in single if statement.attributes.index(a) < position]
        after = [a for a in single if statement.attributes.index(a) > position]
        flags = [v.transposed for v in statement.left for _ in array_names([v])]
        many_to_one = joiner is not None and joiner.key == "axis" and len(self._right) == 1
        flipped = all(flags) and many_to_one and not before
        for attribute in reversed(after):
            self._add(self._undone(attribute, attribute is single[0] and not any(flags)))
        if flipped:
            # Transposed before it is cut, so that sizes="auto" finds the extents of the left names along its axis.
            self._add([_TRANSPOSE])
        if joiner is not None:
            self._undo_joiner(joiner, flipped)
        self._is_joined = True
        for attribute in reversed(before):
            self._add(self._undone(attribute, attribute is single[0] and not any(flags)))
        if all(flags) and not flipped:
            self._add([_TRANSPOSE])
        elif any(flags) and not flipped:
            ends = [self._temporary(name) if flag else name for name, flag in zip(self._left, flags)]
            self._flush(ends)
            for end, name in zip(ends, self._left):
                if end != name:
                    self._texts.append(self._text([end], [name], [_TRANSPOSE]))
            return self._texts
        self._flush(self._left)
        return self._texts

    def _joiner(self) -> Attribute | None:
        tag = fused_tag(self._statement)
        if tag is not None:
            return self._statement.get(tag)
        stars = [any("*" in name for name in names) for names in (self._left, self._right)]
        counts = (len(names) + star for names, star in zip((self._left, self._right), stars))
        return joiner_of(self._statement, *counts)

    def _add(self, attributes: Sequence[str]) -> None:
        """Undo one more attribute, in a statement of its own where the same one stands in this one already."""
        keys = {text.partition("=")[0] for text in self._pending}
        if any(text.partition("=")[0] in keys for text in attributes):
            self._flush(None)
        self._pending += attributes

    def _flush(self, names: Sequence[str] | None) -> None:
        """Write the statement so far; it assigns ``names``, or temporaries."""
        if names is None:
            names = [self._temporary(name) for name in (self._left if self._is_joined else self._right)]
        self._texts.append(self._text(self._have, names, self._pending))
        self._have, self._pending = list(names), []

    def _temporary(self, name: str) -> str:
        return f"{name}_step_{self._number}_{len(self._texts)}"

    def _text(self, left: Sequence[str], right: Sequence[str], attributes: Sequence[str]) -> str:
        flag, rest = "", list(attributes)
        if rest[:1] == [_TRANSPOSE]:
            flag, rest = "^T", rest[1:]
        sides = ", ".join(quoted(name) + flag for name in left), ", ".join(map(quoted, right))
        return ", ".join([" -> ".join(sides), *rest, *self._suffix])

    def _check_ids(self) -> None:
        """Refuse right names that do not tell the ids: those of an inverse statement come from them."""
        for name in self._right:
            for part in parse_name(name).parts:
                if isinstance(part, Placeholder) and not part.is_solvable:
                    raise _NotInvertible(f"the id {part.name} cannot be told from {name!r}")

    def _undo_joiner(self, joiner: Attribute, flipped: bool) -> None:
        statement, key = self._statement, joiner.key
        if key in _NEVER:
            raise _NotInvertible(_NEVER[key])
        if key == "copy":
            self._have = self._have[:1]
            self._right = self._right[:1]
            return
        axis: Any = getattr(statement.get("axis"), "value", None)
        if key in FUSED:
            if self._pending:
                self._flush(None)
            companions = ("axis", "num_heads", "num_key_value_groups")
            self._pending = [written(a) for a in statement.attributes if a.key == key or a.key in companions]
            if any(v.transposed for v in statement.left):
                self._is_joined = True
                self._flush(None)
            return
        if key in ("stack", "unstack"):
            self._add(["unstack" if key == "stack" else "stack", f"axis={axis}"])
            return
        sizes = statement.get("sizes")
        is_cut = len(self._left) == 1 and "*" not in self._left[0]
        cuts = [] if is_cut else ['sizes="auto"' if sizes is None else written(sizes)]
        self._add([f"axis={-1 - axis if flipped else axis}", *cuts])

    def _undone(self, attribute: Attribute, is_last: bool) -> list[str]:
        """Return what undoes an attribute of single names; ``is_last``: nothing else happens to the name after that."""
        key, value = attribute.key, attribute.value
        if key in _NEVER:
            raise _NotInvertible(_NEVER[key])
        if key == "permute":
            positive = [axis % len(value) for axis in value]
            return [f'permute="{[positive.index(axis) for axis in range(len(positive))]}"']
        if key in ("dtype", "dst_dtype"):
            return self._cast(str(value))
        if key == "pad":
            return ['slice="[' + ", ".join(f"{before}:{-after if after else ''}" for before, after in value) + ']"']
        if key == "reshape" and is_last:
            return ['reshape="auto"']
        raise _NotInvertible(f"{key} does not tell the shape that there was")

    def _cast(self, after: str) -> list[str]:
        source = self._statement.get("src_dtype")
        if source is None:
            raise _NotInvertible(
                f'dtype="{after}" does not tell the dtype that there was. Remedy: write src_dtype="...", '
                f'dst_dtype="{after}"'
            )
        before = str(source.value)
        if after in COMPLEX and before not in COMPLEX:
            raise _NotInvertible(f"there is no cast from {after} to {before}")
        if self._exact and not is_exact(before, after):
            raise _NotInvertible(f"a cast from {before} to {after} loses digits")
        return [f'src_dtype="{after}"', f'dst_dtype="{before}"']
