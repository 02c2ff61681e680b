"""Folding: one statement with placeholders instead of one for every layer and expert.

Tested in tests/parallel/test_gen_aoa_statements.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = ("hf", "paddle", "hf_layer", "hf_parent")
# One name for each number that differs; a model with more levels gets a statement for every parameter.
_PLACEHOLDERS = ("LAYER_ID", "EXPERT_ID", "PART_ID", "SLICE_ID")
_FIELD = re.compile(rf"\{{({'|'.join(FIELDS)})\}}")
# Quoted texts, and names with fields in them.
_NAMES = re.compile(rf"\"[^\"]*\"|'[^']*'|[\w.$*]*(?:{_FIELD.pattern}[\w.$*]*)+")
_NUMBER = r"\$(?:[A-Z_]+|\{[A-Z_]+[-+]\d+\})"
_UNQUOTED = re.compile(rf"(?:[A-Za-z_]|{_NUMBER})(?:[A-Za-z0-9_.]|{_NUMBER})*")
# What ends a quoted name, or means something in it.
_UNWRITABLE = re.compile(r"[\"$*\n]")
# Words of the language that stand where a name could.
_WORDS = frozenset("_ fused_qkv fused_qkv_old fused_ffn copy stack unstack sum average lora_merge optional".split())


@dataclass(frozen=True)
class Rename:
    """Hold the statement of one parameter.

    Attributes:
        key: The model's name.
        hf: The checkpoint's name; empty where the template does not ask for it.
        template: The statement, with fields for both.
        from_hf: Whether the checkpoint's name is read and the model's assigned.
        folds: Whether it may become one statement with its like.
    """

    key: str
    hf: str
    template: str
    from_hf: bool
    folds: bool = True


def fold(renames: Sequence[Rename]) -> list[str]:
    """Return statements, one for all parameters treated alike whose names differ in numbers alone.

    The first number that differs becomes ``$LAYER_ID``, the second ``$EXPERT_ID``. Where the numbers of model and
    checkpoint differ by a constant, it is added to those that are assigned: ``${LAYER_ID+1}``.

    Raises:
        ValueError: A name cannot be written in a statement.
    """
    families: dict[str, list[Rename]] = {}
    for rename in renames:
        for name in (rename.key, rename.hf):
            if _UNWRITABLE.search(name):
                raise ValueError(f"{name!r} cannot be written as a name in an AOA statement: no quotes can hold it")
        families.setdefault(_pattern(rename.key), []).append(rename)
    folded = {pattern: _folded(members) for pattern, members in families.items()}
    statements: dict[str, None] = {}  # in order, each once
    for rename in renames:
        one = folded[_pattern(rename.key)]
        statements[_filled(rename.template, rename.key, rename.hf) if one is None else one] = None
    return list(statements)


def _quoted(name: str) -> str:
    """Return a name as it stands in a statement: between quotes where it has to be."""
    return name if _UNQUOTED.fullmatch(name) and name not in _WORDS else f'"{name}"'


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _folded(members: list[Rename]) -> str | None:
    """Return one statement for several parameters, or None if there is none."""
    first = members[0]
    if len(members) < 2 or not first.folds:
        return None
    if {(m.template, _pattern(m.hf), m.from_hf, m.folds) for m in members} != {
        (first.template, _pattern(first.hf), first.from_hf, True)
    }:
        return None
    keys, names = _varying([m.key for m in members]), _varying([m.hf for m in members])
    if len(keys) > len(_PLACEHOLDERS) or (first.hf and len(keys) != len(names)):
        return None
    key_parts, hf_parts = first.key.split("."), first.hf.split(".")
    for placeholder, at, there in zip(_PLACEHOLDERS, keys, names or keys):
        # Shifts of what is assigned against what is read, which has the plain number.
        shifts = {_shift(m, at, there) for m in members} if first.hf else {0}
        if len(shifts) > 1:
            return None
        plain, shifted = f"${placeholder}", _shifted(placeholder, shifts.pop())
        key_parts[at] = shifted if first.from_hf and first.hf else plain
        if first.hf:
            hf_parts[there] = plain if first.from_hf else shifted
    return _filled(first.template, ".".join(key_parts), ".".join(hf_parts))


def _varying(names: list[str]) -> list[int]:
    """Return the positions of the parts, numbers all, that are not the same in names of one pattern."""
    parts = [name.split(".") for name in names]
    return [at for at, column in enumerate(zip(*parts)) if len(set(column)) > 1]


def _shift(rename: Rename, at: int, there: int) -> int:
    shift = int(rename.key.split(".")[at]) - int(rename.hf.split(".")[there])
    return shift if rename.from_hf else -shift


def _shifted(placeholder: str, shift: int) -> str:
    return f"${{{placeholder}{shift:+d}}}" if shift else f"${placeholder}"


def _filled(template: str, key: str, hf: str) -> str:
    """Return the statement of a template, its names quoted where they have to be."""
    parts = hf.split(".")
    values = {"paddle": key, "hf": hf, "hf_layer": ".".join(parts[:-1]), "hf_parent": ".".join(parts[:-2])}

    def value(field: re.Match[str]) -> str:
        text = values[field.group(1)]
        if not text:
            raise ValueError(
                f"the AOA rule {template!r} asks for {field.group()}, but the checkpoint's name of {key!r} is {hf!r}"
            )
        return text

    def name(found: re.Match[str]) -> str:
        text = _FIELD.sub(value, found.group())
        return text if found.group()[0] in "\"'" else _quoted(text)

    return _NAMES.sub(name, template)
