"""A user's statements: the ways to give them, and the errors that show the statement and the column.

``aoa_config`` is a dict, a list, a JSON text, or the path of a JSON or YAML file.
Tested in tests/aoa/test_compile_errors.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from paddle_flexckpt.catalog import AoaError

AoaConfig = Union[Mapping[str, Any], Sequence[str], "os.PathLike[str]"]
KEYS = ("aoa_statements", "aoa_config_reverse", "enable_traceback")
# The arrow of a statement, and what people write for it.
ARROW = re.compile(r"[-–—=]*\s?>|[→⟶⇒⟹➔➜]")
# A macro may expand to hundreds of names; the two ends of a line identify it.
MAX_LINE = 400


class FamilyRules(dict[str, list[str]]):
    """The rules of a family of models as an ``aoa_config``, which knows whose rules they are.

    Attributes:
        family: The family.
        variant: What the Paddle model fuses.
        direction: ``"from_hf"`` or ``"to_hf"``.
        parameters: The rules' parameters by name.
        is_compared: Whether the source's head is known to have the values of its embedding.
    """

    is_compared = False

    def __init__(
        self, statements: list[str], family: str, variant: str, direction: str, parameters: Mapping[str, Any]
    ) -> None:
        """Take the statements and what they are."""
        super().__init__(aoa_statements=statements)
        self.family, self.variant, self.direction, self.parameters = family, variant, direction, parameters


@dataclass(frozen=True)
class Statements:
    """A user's ``aoa_config``, read and checked.

    Attributes:
        statements: The program's texts.
        reverse: Whether to use the inverse of the program.
        is_lenient: Whether statements with placeholders are left out, with a warning, where they match nothing.
        rules: The rules of a family that these are, untouched; None: they are not known to be any.
    """

    statements: tuple[str, ...]
    reverse: bool = False
    is_lenient: bool = False
    rules: FamilyRules | None = field(default=None, compare=False, repr=False)


def read_config(aoa_config: AoaConfig | Statements) -> Statements:
    """Read and check a configuration.

    Args:
        aoa_config: ``{"aoa_statements": [...]}``, the list alone, the same as a JSON text, a statement, or the path of
            a ``.json``, ``.yaml`` or ``.yml`` file (or any other file with JSON in it), or what this function returned.

    Raises:
        AoaError: It is none of these, or has unknown keys or values of other types.
    """
    if isinstance(aoa_config, Statements):
        return aoa_config
    value: Any = aoa_config
    if isinstance(aoa_config, (str, os.PathLike)):
        value = _from_text(os.fspath(aoa_config))
    value = inner_config(value)
    if isinstance(value, (list, tuple)):
        value = {"aoa_statements": list(value)}
    if not isinstance(value, Mapping):
        raise _malformed(f"aoa_config has to be a dict with 'aoa_statements'; got a {type(value).__name__}")
    unknown = sorted(str(key) for key in value if key not in KEYS)
    if unknown:
        raise _malformed(f"aoa_config has unknown keys {unknown}; known are {', '.join(KEYS)}")
    statements = value.get("aoa_statements", [])
    if not isinstance(statements, (list, tuple)) or not all(isinstance(text, str) for text in statements):
        raise _malformed(f"aoa_statements has to be a list of texts; got {statements!r}")
    for key in KEYS[1:]:
        if not isinstance(value.get(key, False), bool):
            raise _malformed(f"{key} has to be true or false; got {value[key]!r}")
    rules = value if isinstance(value, FamilyRules) and set(value) == {"aoa_statements"} else None
    return Statements(tuple(statements), bool(value.get("aoa_config_reverse", False)), rules=rules)


def inner_config(value: Any) -> Any:
    """Return a configuration without the key ``aoa_config`` around it, as files of trainers have it."""
    return value["aoa_config"] if isinstance(value, Mapping) and set(value) == {"aoa_config"} else value


def _malformed(text: str) -> AoaError:
    return AoaError([f"{text}. Remedy (FC602): write {{'aoa_statements': ['A -> B', ...]}}, or the list alone"])


def _from_text(text: str) -> Any:
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        return _json(stripped, "aoa_config")
    if ARROW.search(text) and not os.path.exists(text):
        return [text]
    try:
        with open(text, encoding="utf-8") as file:
            content = file.read()
    except (OSError, ValueError) as error:
        raise AoaError(
            [
                f"aoa_config {text!r} is neither JSON nor a file that can be read ({error}). Remedy (FC602): correct "
                "the path"
            ]
        ) from error
    if not text.endswith((".yaml", ".yml")):
        return _json(content, text)
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise AoaError([f"reading {text!r} needs PyYAML. Remedy (FC901): pip install pyyaml, or use JSON"]) from error
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise AoaError([f"{text!r} is not valid YAML: {error}. Remedy (FC602): correct the file there"]) from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise AoaError([f"{where} is not valid JSON: {error}. Remedy (FC602): correct the text there"]) from error


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
        number: Number of the text in ``aoa_statements``, from 1.
        text: The statement as the user wrote it.
        column: Column in it, from 1; 0: the whole statement.
    """

    number: int
    text: str
    column: int = 0

    def at(self, column: int) -> Place:
        """Return the place of another column in the same statement."""
        return Place(self.number, self.text, column)


UNREADABLE = "Remedy (FC602): correct the statement at that place"
NOT_EXACT = "Remedy (FC605): write the statements of that direction by hand, with what the reverse cannot know"
UNFIT = "Remedy (FC603): correct the statement by these names, shapes and numbers"


class StatementError(ValueError):
    """An error in a statement whose place is not known yet; an unknown column is 0."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column


def shorten(text: str) -> str:
    """Return a line of bounded length."""
    text = text.strip()
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE // 2]} ... {text[-MAX_LINE // 2 :]}"


def describe_problem(message: str, place: Place, expansion: Sequence[str] = (), remedy: str = UNFIT) -> str:
    """Return a problem with its statement, a mark under the column, and the statements it was expanded to.

    ``remedy`` is that of a message without one.
    """
    message += "" if "Remedy (" in message else f". {remedy}"
    where = f"AOA statement {place.number}"
    if place.column:
        where += f", column {place.column}"
    lines = [f"{where}: {message}", f"    {shorten(place.text)}"]
    if place.column and len(place.text) <= MAX_LINE:
        lines.append("    " + " " * (place.column - 1) + "^")
    lines += [f"    expanded to: {shorten(text)}" for text in expansion if text.strip() != place.text.strip()]
    return "\n".join(lines)
