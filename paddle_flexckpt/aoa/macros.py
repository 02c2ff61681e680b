"""Macros: statements that stand for several simpler ones, expanded as text.

A macro of the in-tree language expands to the in-tree engine's text, character by character (the exceptions are in
``tests/aoa/test_expansion.py``). Temporaries have the in-tree names too, but are private to the statement: a parameter
of the same name is safe.
Tested in tests/aoa/test_expansion.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from paddle_flexckpt.aoa.parser import Statement, Variable, parse, quoted, written
from paddle_flexckpt.aoa.placeholders import name_hint
from paddle_flexckpt.aoa.statements import StatementError
from paddle_flexckpt.optimizer_states import split_state

FUSED = ("fused_qkv", "fused_qkv_old", "fused_ffn")
FUSED_ATTRIBUTES = frozenset({*FUSED, "axis", "num_heads", "num_key_value_groups", "optional", "states"})


def joined(statement: Statement, write: Callable[[Variable, bool], Sequence[str]]) -> str:
    """Write the statement without blanks, as the in-tree macros do.

    ``write`` returns the texts, to be joined by commas, of a variable (``^T`` included) on the left or not.
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
    """Replace every name with a star by its keys; a name without keys is an error.

    ``keys`` returns the keys of a name on the left or not. The statement has no placeholders any more.
    """

    def write(variable: Variable, is_left: bool) -> list[str]:
        if "*" not in variable.name:
            return _plain(variable)
        found = keys(variable.name, is_left)
        if not found:
            side = "source key or variable" if is_left else "destination key"
            raise StatementError(
                f"no {side} matches {variable.name!r}. Remedy (FC601): correct the name{name_hint(variable.name)}",
                variable.column,
            )
        return [quoted(key) + ("^T" if variable.transposed else "") for key in found]

    return joined(statement, write)


def expand_transposes(statement: Statement) -> tuple[str, ...]:
    """Replace every ``A^T`` on the left by a temporary that is A with all axes reversed."""
    temporaries = {v.name: quoted(f"{v.name}_transpose_tmp") for v in statement.left if v.transposed}
    if not temporaries:
        return (statement.place.text,)

    def write(variable: Variable, is_left: bool) -> list[str]:
        return [temporaries[variable.name]] if variable.transposed else _plain(variable)

    first = [f'{quoted(name)} -> {temporary}, permute = "[]"' for name, temporary in temporaries.items()]
    return (*first, joined(statement, write))


def fused_tag(statement: Statement) -> str | None:
    """Return the statement's fused layout, if it has one; more are an error."""
    tags = [attribute for attribute in statement.attributes if attribute.key in FUSED]
    if len(tags) > 1:
        raise StatementError(f"a statement has one fused layout; got {[tag.key for tag in tags]}", tags[1].column)
    return tags[0].key if tags else None


def expand(statement: Statement, source_parts: int = 1, target_parts: int = 1) -> tuple[str, ...]:
    """Write out transposes and fused layouts; the statement has no stars and arrays any more."""
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
    """Return a fused statement without attributes of single variables, and the ones with these before and after."""
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


def expand_fused(statement: Statement, tag: str, source: int, target: int) -> tuple[str, ...]:
    """Expand a fused layout, from ``source`` parts to ``target`` parts, to cuts and joins."""
    left, right = [variable.name for variable in statement.left], [variable.name for variable in statement.right]
    if tag == "fused_qkv":
        return _qkv(statement, left, right)
    if tag == "fused_qkv_old":
        heads, groups = _heads(statement, tag)
        return _split_and_merge(
            statement, left, right, (source, target), tag, (("Q", heads), ("K", groups), ("V", groups))
        )
    if len(left) == 1 and len(right) == 2:
        target = 1
    number = math.lcm(source if len(left) == 1 else 1, target)
    return _split_and_merge(statement, left, right, (source, target), tag, (("GATE", number), ("UP", number)))


def fused_statement(source: str, target: str, tags: str, keys: Collection[str]) -> str:
    """Return the statement that moves a fused parameter and its states to another number of parts.

    Args:
        source: Key of the parameter, or of one of its states, in the source.
        target: Its key in the destination.
        tags: Tags and attributes; empty: it stays as it is.
        keys: The keys of both sides, by which states and parameters differ.
    """
    known = set(keys)
    names = (quoted(split_state(key, known)[0]) for key in (source, target))
    return " -> ".join(names) + (f", {tags}" if tags else "")


def _axis(statement: Statement) -> object:
    attribute = statement.get("axis")
    return 1 if attribute is None else attribute.value


def _heads(statement: Statement, tag: str) -> tuple[int, int]:
    """Return numbers of query heads and of key-value heads."""
    values = []
    for key in ("num_heads", "num_key_value_groups"):
        attribute = statement.get(key)
        if attribute is None or not isinstance(attribute.value, int) or attribute.value < 1:
            got = "nothing" if attribute is None else repr(attribute.value)
            raise StatementError(f"{tag} needs {key}=, a positive number; got {got}")
        values.append(attribute.value)
    heads, groups = values
    if heads % groups:
        raise StatementError(f"num_heads ({heads}) has to be a multiple of num_key_value_groups ({groups})")
    return heads, groups


def check_head_sizes(statement: Statement, shapes: Sequence[Sequence[int]]) -> None:
    """Raise StatementError where q, k and v of these shapes cannot have the statement's numbers of heads.

    Heads of q and of k are multiplied with each other, so they have one size. Those of v may have another.
    """
    tag = fused_tag(statement)
    if tag not in ("fused_qkv", "fused_qkv_old") or len(shapes) != 3:
        return
    heads, groups, axis = *_heads(statement, tag), _axis(statement)
    q, k, _ = (shape[::-1] if each.transposed else shape for each, shape in zip(statement.left, shapes))
    if not isinstance(axis, int) or not -min(len(q), len(k)) <= axis < min(len(q), len(k)):
        return  # the error of a cut says so
    if q[axis] * groups != k[axis] * heads:
        raise StatementError(
            f"q has {q[axis]} elements along axis {axis}, {q[axis] / heads:g} for each of {heads} heads, and k has "
            f"{k[axis]}, {k[axis] / groups:g} for each of {groups}: these are other numbers of heads than the tensors "
            "have, and q, k and v would be cut at wrong places. Remedy (FC606): give num_heads= and "
            "num_key_value_groups= of this model"
        )


def _commas(names: Sequence[str]) -> str:
    return ",".join(map(quoted, names))


def _qkv(statement: Statement, left: list[str], right: list[str]) -> tuple[str, ...]:
    heads, groups = _heads(statement, "fused_qkv")
    axis = _axis(statement)
    if (len(left), len(right)) == (1, 1):
        raise StatementError(
            "fused_qkv is the same layout under every tensor-parallel degree, so nothing would move. Remedy (FC603): "
            "if every rank holds [Q | K | V] of its own heads, write fused_qkv_old; otherwise leave the macro out"
        )
    if (len(left), len(right)) not in ((1, 3), (3, 1)):
        raise StatementError("fused_qkv takes 'A -> q, k, v' or 'q, k, v -> A'")
    q, k, v = left if len(left) == 3 else right
    fused = (right if len(left) == 3 else left)[0]
    parts = {name: [f"{name}{i}" for i in range(count)] for name, count in ((q, heads), (k, groups), (v, groups))}
    ratio = heads // groups
    order: list[str] = []
    for group in range(groups):
        order += parts[q][group * ratio : (group + 1) * ratio]
        order += [parts[k][group], parts[v][group]]
    if len(left) == 1:
        texts = [f"{quoted(fused)} -> {_commas(order)}, axis={axis}"]
        texts += [f"{_commas(parts[name])} -> {quoted(name)}, axis={axis}" for name in (q, k, v)]
    else:
        texts = [f"{quoted(name)} -> {_commas(parts[name])}, axis={axis}" for name in (q, k, v)]
        texts.append(f"{_commas(order)} -> {quoted(fused)}, axis={axis}")
    return tuple(texts)


def _part(tag: str, component: str, i: int) -> str:
    return f"{tag}_tmp.{component}_{i}"


def _interleaved(counts: Sequence[tuple[str, int]], degree: int, tag: str) -> list[str]:
    """Return the temporaries of one tensor, part by part; every part has its share of each component."""
    names = []
    for rank in range(degree):
        for component, count in counts:
            if count % degree:
                raise StatementError(
                    f"{tag}: {count} {component} heads cannot be cut into {degree} equal tensor-parallel parts"
                    + _other_meaning(counts, degree)
                )
            share = count // degree
            names += [_part(tag, component, rank * share + i) for i in range(share)]
    return names


def _other_meaning(counts: Sequence[tuple[str, int]], degree: int) -> str:
    """Return the remedy if num_key_value_groups= may count query heads per key-value head; else ""."""
    numbers = dict(counts)
    heads, groups = numbers.get("Q", 0), numbers.get("K", 1)
    if heads % groups or (heads // groups) % degree or heads % degree:
        return ""
    return (
        f". Remedy (FC603): num_key_value_groups= is the number of key-value heads. If {groups} query heads share one "
        f"of them, write num_key_value_groups={heads // groups}"
    )


def _split_and_merge(
    statement: Statement,
    left: list[str],
    right: list[str],
    degrees: tuple[int, int],
    tag: str,
    counts: Sequence[tuple[str, int]],
) -> tuple[str, ...]:
    """Cut the fused tensor on the left part by part, and join the pieces in the order of the right."""
    axis = _axis(statement)
    source, target = degrees
    if (len(left), len(right)) not in ((1, 1), (1, len(counts)), (len(counts), 1)):
        many = ", ".join(component.lower() for component, _ in counts)
        raise StatementError(f"{tag} takes 'A -> B', 'A -> {many}' or '{many} -> A'")
    # The in-tree fused_ffn writes two blanks before its first arrow.
    first = "  -> " if tag == "fused_ffn" else " -> "
    texts = []
    whole = left[0]
    if len(left) > 1:
        whole, source = ".".join((*left, "tmp")), 1
        texts.append(f"{_commas(left)}  ->  {quoted(whole)}, axis={axis}")
    cut = _interleaved(counts, source, tag)
    texts.append(f"{quoted(whole)}{first}{_commas(cut)}, axis={axis}")
    if len(right) == 1:
        texts.append(f"{_commas(_interleaved(counts, target, tag))} -> {quoted(right[0])}, axis={axis}")
    else:
        for (component, count), name in zip(counts, right):
            pieces = [_part(tag, component, i) for i in range(count)]
            texts.append(f"{_commas(pieces)} -> {quoted(name)}, axis={axis}")
    return tuple(texts)
