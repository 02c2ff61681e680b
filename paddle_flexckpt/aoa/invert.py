"""Write the inverse of statements, as far as it follows from the statements alone.

Each statement becomes one that reads its right names and undoes its attributes in reverse order. Where a destination is
known, a load needs no such text: see :mod:`paddle_flexckpt.aoa.reverse`.

A program is read backwards. :class:`Fates` tracks which names its inverse has restored so far.
It is for callers that know no destination: :func:`invert`, rules to Hugging Face, and a reverse load that wants a part
of the tensors.
Tested in tests/aoa/test_invert.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from paddle_flexckpt.aoa.casts import COMPLEX, is_exact
from paddle_flexckpt.aoa.macros import FUSED, array_names, fused_tag
from paddle_flexckpt.aoa.operations import MODIFIERS, joiner_of
from paddle_flexckpt.aoa.parser import Attribute, Statement, parse_program, quoted, written
from paddle_flexckpt.aoa.placeholders import NameTable, Placeholder, parse_name
from paddle_flexckpt.aoa.rule import NOTHING
from paddle_flexckpt.aoa.statements import (
    NOT_EXACT,
    AoaConfig,
    AoaError,
    Place,
    StatementError,
    Statements,
    describe_problem,
    read_config,
)
from paddle_flexckpt.optimizer_states import STATES

_NEVER = {
    "slice": "a slice leaves elements out",
    "scale": "a product is rounded",
    "sum": "a sum does not tell its terms",
    "average": "a mean does not tell its terms",
    "lora_merge": "a merged weight does not tell its factors",
    "dequant": "what is dequantized does not tell its scales",
}
_TRANSPOSE = 'permute="[]"'


class _NotInvertible(ValueError):
    pass


def invert(aoa_config: AoaConfig | Statements) -> dict[str, Any]:
    """Return the configuration that undoes another: from the other's result it makes the other's source.

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
        exact: Whether statements that lose something are an error; else the opposite cast undoes a rounding cast, and
            removed tensors stay as they are in the destination (``aoa_config_reverse``).

    Raises:
        AoaError: A statement has no inverse.
    """
    return _undo(statements, exact)[0]


def overwritten_names(statements: Sequence[Statement]) -> list[str]:
    """Return the names that a program assigns before it reads them: their earlier values are lost."""
    return list(_undo(statements, exact=False)[1].overwritten())


def _undo(statements: Sequence[Statement], exact: bool) -> tuple[list[str], Fates]:
    """Return the texts of the inverse, and the fates of all names before the first statement."""
    texts: list[str] = []
    fates = Fates()
    problems = _check_states(statements)
    for number in range(len(statements) - 1, -1, -1):
        statement = statements[number]
        try:
            texts += _undo_one(statement, number, exact, fates)
        except StatementError as error:
            problems.append(describe_problem(str(error), statement.place.at(error.column)))
    for name, (place, why) in fates.lost().items():
        text = f"has no exact inverse: {name!r} cannot be restored, as {why}"
        problems.append(describe_problem(text, place, (), NOT_EXACT))
    if problems:
        raise AoaError(problems)
    return texts, fates


def _undo_one(statement: Statement, number: int, exact: bool, fates: Fates) -> list[str]:
    """Return the texts that undo a statement; ``fates`` are those after it, and become those before it."""
    left, right = _names(statement)
    lost: dict[str, str] = {}
    for name in right:
        why = next(filter(None, (fates.why_lost(key) for key in _keys(statement, name))), "")
        if why:
            lost[name] = why
    is_same = left == right and not statement.attributes and not any(v.transposed for v in statement.left)
    if is_same and all(map(fates.is_restored, left)):
        return []  # every name stays as it is
    for name in right:
        if name != NOTHING:
            fates.overwrite(_keys(statement, name), statement.place)
    if left == [NOTHING]:
        return [] if lost or right == left else _Inverse(statement, left, right, number, exact).texts()
    wanted = [key for name in left for key in _keys(statement, name) if not fates.is_restored(key)]
    if not wanted:
        return []
    try:
        there = [name for name in right if name not in lost]
        if lost and not (statement.has("copy") and there):
            raise _NotInvertible(next(iter(lost.values())))
        if len({*there}) < len(there) and NOTHING not in there:
            raise _NotInvertible(f"AOA statement {statement.place.number} makes a name twice, which has the last value")
        texts = _Inverse(statement, left, there, number, exact).texts()
    except _NotInvertible as error:
        fates.lose(wanted, statement.place, str(error))
        return []
    fates.restore([key for name in left for key in _keys(statement, name)])
    return texts


def _names(statement: Statement) -> tuple[list[str], list[str]]:
    """Return the names of both sides, with $LAYER_ID_OFFSET written out (on the right: the id less 1)."""
    left = [name.replace("$LAYER_ID_OFFSET", "$LAYER_ID") for name in array_names(statement.left)]
    return left, [name.replace("$LAYER_ID_OFFSET", "${LAYER_ID-1}") for name in array_names(statement.right)]


def _keys(statement: Statement, name: str) -> list[str]:
    """Return the name, or the keys of the states that a statement with ``states=`` is about."""
    states = statement.get("states")
    return [name] if states is None else [f"{name}.{state.strip()}" for state in str(states.value).split(",")]


def _check_states(statements: Sequence[Statement]) -> list[str]:
    """Return problems of statements about states alone, which override what follows from the parameter.

    Their inverse overrides too, at any place of the program. So these parameters have to mean the same throughout.
    """
    about_states: list[tuple[int, list[str], list[str]]] = []
    readers: NameTable[list[int]] = NameTable()
    makers: NameTable[list[int]] = NameTable()
    sides = [_names(statement) for statement in statements]
    for number, (statement, (left, right)) in enumerate(zip(statements, sides)):
        if statement.has("states"):
            about_states.append((number, left, right))
        elif all(name.rpartition(".")[2] in STATES for name in (*left, *right)):
            about_states.append((number, [n.rpartition(".")[0] for n in left], [n.rpartition(".")[0] for n in right]))
        else:
            for table, names in ((readers, left), (makers, right)):
                for name in names:
                    table.put(name, [*(table.get(name) or ()), number])
    problems = []
    for number, left, right in about_states:
        if left == [NOTHING]:
            continue
        made = {j for name in right for found in makers.like(name) for j in found}
        made = {j for j in made if sides[j][0] not in (left, [NOTHING])}
        made |= {j for name in right for found in readers.like(name) for j in found if j > number}
        made |= {j for name in left for found in makers.like(name) for j in found if j < number}
        if made:
            place = statements[min(made)].place
            problems.append(
                describe_problem(
                    f"has no exact inverse: it is about states of parameters that AOA statement {place.number} makes "
                    f"or reads otherwise ({place.text.strip()})",
                    statements[number].place,
                )
            )
    return problems


class _Inverse:
    """The inverse of one statement: one text or, where attributes exclude each other, several."""

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
        """Return the texts: attributes are undone in reverse order.

        A transpose of all operands is moved in front of the cut that undoes a join.
        """
        statement = self._statement
        if [v.name for v in statement.right] == [NOTHING]:
            if self._exact:
                raise _NotInvertible("it is removed")
            return [self._text([NOTHING], [name], []) for name in self._left]
        if self._left == [NOTHING]:
            return [self._text([name], [NOTHING], []) for name in self._right]
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
            # The transpose comes before the cut, so that sizes="auto" finds the left names' extents along its axis.
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
        """Undo one more attribute, in a new statement if this one has that attribute already."""
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
        """Refuse right names that do not determine the ids, from which an inverse statement gets its own."""
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
        """Return the inverse of an attribute of single names; ``is_last``: no later one changes the value."""
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
                f'dtype="{after}" does not tell the dtype that there was. Remedy (FC605): write src_dtype="...", '
                f'dst_dtype="{after}"'
            )
        before = str(source.value)
        if after in COMPLEX and before not in COMPLEX:
            raise _NotInvertible(f"there is no cast from {after} to {before}")
        if self._exact and not is_exact(before, after):
            raise _NotInvertible(f"a cast from {before} to {after} loses digits")
        return [f'src_dtype="{after}"', f'dst_dtype="{before}"']


class _Fate(NamedTuple):
    """When a fate was noted, why the value is lost (empty if it is not), and the place of the statement that reads it.

    A value that is overwritten and that no statement reads has no place.
    """

    order: int
    why: str = ""
    place: Place | None = None


class Fates:
    """The names whose values the inverse has restored, and those whose values are lost, before a statement.

    Other names have the values of the program's end.
    """

    def __init__(self) -> None:
        """Begin at the end of a program."""
        self._table: NameTable[_Fate] = NameTable()
        self._count = 0

    def restore(self, names: Iterable[str]) -> None:
        """Note that the inverse has made these names' values."""
        self._note(names, "", None)

    def overwrite(self, names: Iterable[str], place: Place) -> None:
        """Note that a statement assigns names again: their earlier values are lost."""
        for name in names:
            self._note([name], f"AOA statement {place.number} overwrites {name!r}", None)

    def lose(self, names: Iterable[str], place: Place, why: str) -> None:
        """Note that values which a statement reads are lost."""
        self._note(names, why, place)

    def is_restored(self, name: str) -> bool:
        """Return whether the inverse has made a name's value."""
        own = self._table.get(name)
        return own is not None and not own.why and not self.why_lost(name)

    def why_lost(self, name: str) -> str:
        """Return why a name's value is lost; an empty text if it is not."""
        own = self._table.get(name)
        since = own.order if own is not None and not own.why else -1
        lost = (fate for fate in self._table.like(name) if fate.why and fate.order > since)
        return max(lost, key=lambda fate: fate.order, default=_Fate(0)).why

    def lost(self) -> dict[str, tuple[Place, str]]:
        """Return the lost values that a statement reads: where, and why."""
        return {name: (fate.place, fate.why) for name, fate in self._table.items() if fate.place is not None}

    def overwritten(self) -> Iterator[str]:
        """Yield the names that are assigned before they are read."""
        return (name for name, fate in self._table.items() if fate.why and fate.place is None)

    def _note(self, names: Iterable[str], why: str, place: Place | None) -> None:
        for name in names:
            self._table.put(name, _Fate(self._count, why, place))
            self._count += 1
