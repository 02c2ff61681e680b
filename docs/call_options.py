"""Write the options of calls into their own entries of the Python reference: an extension of griffe for mkdocs.

A call with ``@takes(LoadOptions, ...)`` takes fields of that dataclass as ``**options``. Its entry gets them with name,
type, default and text, as ``help()`` has them. Names of a few values (``Strict``) and of defaults give way to these.

Tested in tests/docs/test_site.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import griffe

_FIELD = re.compile(r"^    (\w+): ", re.M)
_OPTIONS = re.compile(r"\n +\*\*options: .*")


class CallOptions(griffe.Extension):
    """The completion of a package's calls."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete every function that ``takes`` decorates."""
        found = pkg.modules_collection
        for function in _functions(pkg):
            for decorator in function.decorators:
                call = decorator.value
                if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".options.takes"):
                    reasons = [each.value for each in call.arguments if isinstance(each, griffe.ExprKeyword)]
                    others = "ALONE" not in map(str, reasons)
                    _complete(function, found[call.arguments[0].canonical_path], others)
                    for parameter in function.parameters:
                        parameter.default = _spelled_out(parameter.default, found)
            for parameter in function.parameters:
                parameter.annotation = _spelled_out(parameter.annotation, found, "Literal[")


def _functions(owner: griffe.Module | griffe.Class) -> Iterator[griffe.Function]:
    for member in owner.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, (griffe.Module, griffe.Class)):
            yield from _functions(member)


def _complete(function: griffe.Function, options: griffe.Class, others: bool) -> None:
    """Give a function's signature and docstring the options that it takes.

    Args:
        function: The function.
        options: The dataclass.
        others: Whether there are other ranks, which compare their options.
    """
    texts: dict[str, str] = {}
    rules: dict[str, str] = {}
    for owner in reversed([options, *options.mro()]):
        text = owner.docstring.value.partition("\nAttributes:\n")[2] if owner.docstring else ""
        starts = [*_FIELD.finditer(text)]
        ends = [*(each.start() for each in starts[1:]), len(text)]
        texts |= {each[1]: text[each.start() : end].rstrip() for each, end in zip(starts, ends)}
        rules |= {name: str(each.value) for name, each in owner.attributes.items() if each.annotation}
    known = {each.name: each for each in options.parameters if "init=False" not in rules.get(each.name, "init=False")}
    if "options" in function.parameters:
        del function.parameters["options"]
    for name, each in known.items():
        if name not in function.parameters:
            kind = griffe.ParameterKind.keyword_only
            function.parameters.add(griffe.Parameter(name, annotation=each.annotation, kind=kind, default=each.default))
    text = _OPTIONS.sub("", function.docstring.value)
    head, blank, tail = text.partition("\n\nReturns:" if "\n\nReturns:" in text else "\n\nRaises:")
    text = "\n".join([head, *(texts[name] for name in known if name in texts)]) + blank + tail
    if others:
        names = ", ".join(f"`{name}`" for name in known if "may_differ=" not in rules[name])
        text += f"\n\nThe same on every rank, and compared: {names or 'what they stand for'}."
    function.docstring.value = text


def _spelled_out(text: Any, found: griffe.ModulesCollection, part: str = "") -> Any:
    """Return a type or a default in which names of the package have given way to values that have this part."""
    if isinstance(text, griffe.ExprName) and text.canonical_path.startswith("paddle_flexckpt."):
        named = found[text.canonical_path]
        return named.value if named.is_attribute and part in str(named.value) else text
    if isinstance(text, list):
        return [_spelled_out(each, found, part) for each in text]
    if isinstance(text, griffe.Expr):
        parts = {each.name: getattr(text, each.name) for each in dataclasses.fields(text) if each.init}
        return type(text)(**{name: _spelled_out(each, found, part) for name, each in parts.items()})
    return text
