"""Macros: statements that stand for several simpler ones, expanded as text.

What a macro of the in-tree language expands to is, character by character, what the in-tree engine makes of it, so that
those who know its output find their way (``tests/aoa/test_expansion.py`` compares them and lists the exceptions). The
names of temporaries are as in-tree too, but they are private to the statement: a parameter of the same name is safe.
Tested in tests/aoa/test_expansion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paddle_flexckpt.aoa.errors import StatementError
from paddle_flexckpt.aoa.fused import FUSED, FUSED_ATTRIBUTES, expand_fused
from paddle_flexckpt.aoa.lexer import quoted
from paddle_flexckpt.aoa.parser import Statement, Variable, parse, written


def joined(statement: Statement, write: Callable[[Variable, bool], Sequence[str]]) -> str:
    """Write the statement without blanks, as the in-tree macros do.

    Args:
        statement: The statement.
        write: Gives the texts, to be joined by commas, that stand for a variable (``^T`` included) on the left or not.
    """
    variables = {variable.column: variable for variable in (*statement.left, *statement.right)}
    text: list[str] = []
    is_left, skip = True, 0
    for token in statement.tokens:
        if skip:
            skip -= 1
            continue
        is_left = is_left and token.kind != "RARROW"
        variable = variables.get(token.column) if token.kind in ("NAME", "STRING") else None
        if variable is None:
            text.append(token.text)
            continue
        text.append(",".join(write(variable, is_left)))
        # '[' START ':' STOP ']' and '^T' belong to the variable.
        skip = 5 * (variable.items is not None) + variable.transposed
    return "".join(text)


def _plain(variable: Variable) -> list[str]:
    suffix = "^T" if variable.transposed else ""
    return [quoted(name) + suffix for name in array_names([variable])]


def array_names(variables: Sequence[Variable]) -> list[str]:
    """Return the names of variables, ``q[0:3]`` being ``q_0, q_1, q_2``."""
    names: list[str] = []
    for variable in variables:
        if variable.items is None:
            names.append(variable.name)
        else:
            names += [f"{variable.name}_{i}" for i in range(*variable.items)]
    return names


def expand_arrays(statement: Statement) -> str:
    """Write out every ``q[0:3]`` of a statement; without macros of names it stays as it is."""
    text = statement.place.text
    if "$" in text or "[" in text or "*" in text:
        return joined(statement, lambda variable, _: _plain(variable))
    return text


def expand_stars(statement: Statement, keys: Callable[[str, bool], Sequence[str]]) -> str:
    """Replace every name that has a star by the keys that it stands for.

    Args:
        statement: A statement without placeholders.
        keys: Gives the keys for a name on the left or not.

    Raises:
        StatementError: A name stands for nothing.
    """

    def write(variable: Variable, is_left: bool) -> list[str]:
        if "*" not in variable.name:
            return _plain(variable)
        found = keys(variable.name, is_left)
        if not found:
            side = "source key or variable" if is_left else "destination key"
            raise StatementError(f"no {side} matches {variable.name!r}. Remedy: correct the name", variable.column)
        return [quoted(key) + ("^T" if variable.transposed else "") for key in found]

    return joined(statement, write)


def expand_transposes(statement: Statement) -> tuple[str, ...]:
    """Replace every ``A^T`` on the left by a temporary that is A with all axes reversed."""
    transposed = list(dict.fromkeys(variable.name for variable in statement.left if variable.transposed))
    if not transposed:
        return (statement.place.text,)

    def write(variable: Variable, is_left: bool) -> list[str]:
        return [quoted(_temporary(variable.name))] if variable.transposed else _plain(variable)

    first = [f'{quoted(name)} -> {quoted(_temporary(name))}, permute = "[]"' for name in transposed]
    return (*first, joined(statement, write))


def _temporary(name: str) -> str:
    return f"{name}_transpose_tmp"


def fused_tag(statement: Statement) -> str | None:
    """Return the statement's fused layout, if it has one.

    Raises:
        StatementError: It has more than one.
    """
    tags = [attribute for attribute in statement.attributes if attribute.key in FUSED]
    if len(tags) > 1:
        raise StatementError(f"a statement has one fused layout; got {[tag.key for tag in tags]}", tags[1].column)
    return tags[0].key if tags else None


def expand(statement: Statement, source_parts: int = 1, target_parts: int = 1) -> tuple[str, ...]:
    """Write out transposes and fused layouts; the statement has no stars and arrays any more.

    Raises:
        StatementError: A macro's names or attributes do not fit.
    """
    first = expand_transposes(statement)
    (main,) = parse(first[-1])
    tag = fused_tag(main)
    if tag is None:
        return first
    before, middle, after = _around(main, tag)
    (fused,) = parse(middle)
    second = expand_fused(fused, tag, source_parts, target_parts)
    return (*first[:-1], *before, *second, *after)


def _around(statement: Statement, tag: str) -> tuple[list[str], str, list[str]]:
    """Return a fused statement without attributes of single variables, and these before and after it."""
    position = next(i for i, attribute in enumerate(statement.attributes) if attribute.key == tag)
    others = [(i < position, a) for i, a in enumerate(statement.attributes) if a.key not in FUSED_ATTRIBUTES]
    left = [variable.name for variable in statement.left]
    right = [variable.name for variable in statement.right]
    before = ", ".join(written(attribute) for early, attribute in others if early)
    after = ", ".join(written(attribute) for early, attribute in others if not early)
    reads = [f"{name}_before_tmp" for name in left] if before else left
    assigns = [f"{name}_after_tmp" for name in right] if after else right
    own = ", ".join(written(attribute) for attribute in statement.attributes if attribute.key in FUSED_ATTRIBUTES)
    return (
        [f"{quoted(name)} -> {quoted(name + '_before_tmp')}, {before}" for name in left] if before else [],
        f"{', '.join(map(quoted, reads))} -> {', '.join(map(quoted, assigns))}, {own}",
        [f"{quoted(name + '_after_tmp')} -> {quoted(name)}, {after}" for name in right] if after else [],
    )
