"""Write the JSON Schemas of reports and of what commands print with ``--json``: ``python docs/schemas.py``.

They follow from the dataclasses: names and types of their fields, and what their docstrings say of these. A test fails
where docs/schemas is not what this writes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from pathlib import Path
from typing import Any

import paddle_flexckpt
from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.report import Report

OUTPUT = Path(__file__).resolve().parent / "schemas"
#: Rooms in which reports are defined; none of them needs Paddle.
ROOMS = ("report", "transfer", "tools", "cli", "rollout.push_reports")
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
PLAIN: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: NUMBER,
    str: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
_ATTRIBUTE = re.compile(r"^    (\w+): ", re.MULTILINE)


def reports() -> dict[str, type[Report]]:
    """Return all classes of reports by the names of their schemas."""
    for room in ROOMS:
        module = importlib.import_module(f"paddle_flexckpt.{room}")
        for each in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"paddle_flexckpt.{room}.{each.name}")
    found: dict[str, type[Report]] = {}
    left = list(Report.__subclasses__())
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if not cls.__module__.startswith(f"{paddle_flexckpt.__name__}."):
            continue
        if found.setdefault(cls.schema_name(), cls) is not cls:
            raise ValueError(f"two reports have the schema {cls.schema_name()!r}: {cls} and {found[cls.schema_name()]}")
    return dict(sorted(found.items()))


def schema_of(cls: type[Report]) -> dict[str, Any]:
    """Return the JSON Schema of a report's ``to_dict()``."""
    name, version = cls.schema_name(), cls.schema_version
    head = {
        "type": "object",
        "properties": {"name": {"const": name}, "version": {"const": version}},
        "required": ["name", "version"],
    }
    body = _of_dataclass(cls)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:flexckpt:{name}:{version}",
        "title": name,
        **body,
        "properties": {"schema": head, **body["properties"]},
        "required": ["schema", *body["required"]],
    }


def _of_dataclass(cls: type) -> dict[str, Any]:
    hints, said = typing.get_type_hints(cls, localns={"Problem": Problem}), _said(cls)
    properties = {each.name: _described(hints[each.name], said.get(each.name)) for each in dataclasses.fields(cls)}
    for name in getattr(cls, "derived", ()):
        getter = getattr(cls, name).fget
        properties[name] = _described(typing.get_type_hints(getter)["return"], inspect.getdoc(getter))
    text = (inspect.getdoc(cls) or "").partition("\n")[0]
    return {"description": text, "type": "object", "properties": properties, "required": list(properties)}


def _described(hint: Any, text: str | None) -> dict[str, Any]:
    return {"description": text, **_of_type(hint)} if text else _of_type(hint)


def _of_type(hint: Any) -> dict[str, Any]:
    """Return the schema of a type.

    Raises:
        TypeError: It is none that JSON has.
    """
    if hint in PLAIN:
        return PLAIN[hint]
    if dataclasses.is_dataclass(hint):
        return _of_dataclass(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(each) for each in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return {"type": "object", "additionalProperties": _of_type(arguments[1])}
    if origin in (list, tuple):
        return {"type": "array", "items": _of_type(arguments[0])}
    raise TypeError(f"JSON has no such type: {hint!r}")


def _said(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class, and of those below it, say of each attribute."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        text = (inspect.getdoc(each) or "").partition("\nAttributes:\n")[2] if dataclasses.is_dataclass(each) else ""
        starts = [*_ATTRIBUTE.finditer(text)]
        ends = [*(start.start() for start in starts[1:]), len(text)]
        for start, end in zip(starts, ends):
            found[start[1]] = " ".join(text[start.end() : end].split())
    return found


def files() -> dict[str, str]:
    """Return the text of each file."""
    return {f"{name}.json": json.dumps(schema_of(cls), indent=2) + "\n" for name, cls in reports().items()}


def main() -> None:
    """Write the files, and remove those of reports that are no more."""
    OUTPUT.mkdir(exist_ok=True)
    wanted = files()
    for path in OUTPUT.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (OUTPUT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
