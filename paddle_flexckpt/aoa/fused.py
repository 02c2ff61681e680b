"""The macros of fused parameters: q, k and v in one tensor, gate and up in one tensor.

Tested in tests/aoa/test_invert.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from paddle_flexckpt.aoa.errors import StatementError
from paddle_flexckpt.aoa.lexer import quoted
from paddle_flexckpt.aoa.parser import Statement
from paddle_flexckpt.aoa.sides import split_state

FUSED = ("fused_qkv", "fused_qkv_old", "fused_ffn")
FUSED_ATTRIBUTES = frozenset({*FUSED, "axis", "num_heads", "num_key_value_groups", "optional", "states"})


def expand_fused(statement: Statement, tag: str, source_parts: int, target_parts: int) -> tuple[str, ...]:
    """Expand a fused layout to cuts and joins.

    Raises:
        StatementError: The names or numbers do not fit the layout.
    """
    names = [variable.name for variable in statement.left], [variable.name for variable in statement.right]
    expand = {"fused_qkv": _qkv, "fused_qkv_old": _qkv_old, "fused_ffn": _ffn}[tag]
    return expand(statement, names[0], names[1], source_parts, target_parts)


def fused_statement(source: str, target: str, tags: str, keys: Collection[str]) -> str:
    """Return the statement that moves a fused parameter and its states to another number of parts.

    Args:
        source: Key of the parameter, or of one of its states, in the source.
        target: Its key in the destination.
        tags: Tags and attributes; none leave it as it is.
        keys: The keys of both sides, which tell states from parameters.
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


def _commas(names: Sequence[str]) -> str:
    return ",".join(map(quoted, names))


def _qkv(statement: Statement, left: list[str], right: list[str], _source: int, _target: int) -> tuple[str, ...]:
    heads, groups = _heads(statement, "fused_qkv")
    axis = _axis(statement)
    if (len(left), len(right)) == (1, 1):
        raise StatementError(
            "fused_qkv is the same layout under every tensor-parallel degree, so nothing would move. Remedy: if every "
            "rank holds [Q | K | V] of its own heads, write fused_qkv_old; otherwise leave the macro out"
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


Numbered = Callable[[str, int], str]


def _interleaved(counts: Sequence[tuple[str, int]], degree: int, temporary: Numbered, tag: str) -> list[str]:
    """Return the temporaries of one tensor, part by part: every part holds its share of each component."""
    names = []
    for rank in range(degree):
        for component, count in counts:
            if count % degree:
                raise StatementError(
                    f"{tag}: {count} {component} heads cannot be cut into {degree} equal tensor-parallel parts"
                    + _other_meaning(counts, degree)
                )
            share = count // degree
            names += [temporary(component, rank * share + i) for i in range(share)]
    return names


def _other_meaning(counts: Sequence[tuple[str, int]], degree: int) -> str:
    """Return the remedy for num_key_value_groups= that counts query heads per key-value head; "" where it cannot."""
    numbers = dict(counts)
    heads, groups = numbers.get("Q", 0), numbers.get("K", 1)
    if heads % groups or (heads // groups) % degree or heads % degree:
        return ""
    return (
        f". Remedy: num_key_value_groups= is the number of key-value heads. If {groups} query heads share one of them, "
        f"write num_key_value_groups={heads // groups}"
    )


def _qkv_old(statement: Statement, left: list[str], right: list[str], source: int, target: int) -> tuple[str, ...]:
    heads, groups = _heads(statement, "fused_qkv_old")
    counts = (("Q", heads), ("K", groups), ("V", groups))
    return _split_and_merge(statement, left, right, (source, target), "fused_qkv_old", counts)


def _ffn(statement: Statement, left: list[str], right: list[str], source: int, target: int) -> tuple[str, ...]:
    if len(left) == 1 and len(right) == 2:
        target = 1
    number = math.lcm(source if len(left) == 1 else 1, target)
    counts = (("GATE", number), ("UP", number))
    return _split_and_merge(statement, left, right, (source, target), "fused_ffn", counts)


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

    def temporary(component: str, i: int) -> str:
        return f"{tag}_tmp.{component}_{i}"

    # The in-tree fused_ffn writes two blanks before its first arrow.
    first = "  -> " if tag == "fused_ffn" else " -> "
    texts = []
    whole = left[0]
    if len(left) > 1:
        whole, source = ".".join((*left, "tmp")), 1
        texts.append(f"{_commas(left)}  ->  {quoted(whole)}, axis={axis}")
    cut = _interleaved(counts, source, temporary, tag)
    texts.append(f"{quoted(whole)}{first}{_commas(cut)}, axis={axis}")
    if len(right) == 1:
        texts.append(f"{_commas(_interleaved(counts, target, temporary, tag))} -> {quoted(right[0])}, axis={axis}")
    else:
        for (component, count), name in zip(counts, right):
            pieces = [temporary(component, i) for i in range(count)]
            texts.append(f"{_commas(pieces)} -> {quoted(name)}, axis={axis}")
    return tuple(texts)
