"""Every remedy that the package's errors and warnings have, read from its source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paddle_flexckpt"
# Their functions return remedies, or parts of them.
_TEXTS = ("transfer/problems.py", "transfer/name_fits.py")
_MARK = re.compile(r"Remedy(?: \((FC\d{3})\))?: ")
_CODE = re.compile(r"FC\d{3}")
# A Problem with so many positional arguments has a remedy.
_UP_TO_REMEDY = 7
_HOLE = "{}"


@dataclass(frozen=True)
class Remedy:
    """A remedy's text in one module; ``{}`` stands for each value that is put in."""

    module: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}: {self.text}"

    def has(self, words: str) -> bool:
        """Whether an error with this remedy may have these words."""
        return words in self.text


@functools.cache
def remedies(package: Path = PACKAGE) -> list[Remedy]:
    """All remedies of the package, each once, in the order of modules."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if not module.startswith("testing/"):
            found += [
                Remedy(module, text) for text in dict.fromkeys(_remedies_of(module, ast.parse(path.read_text("utf-8"))))
            ]
    return found


def codes(package: Path = PACKAGE) -> dict[str, list[str]]:
    """The codes of the package's remedies, each with the lines that have it."""
    found: dict[str, list[str]] = {}
    for place, node in _nodes(package):
        if isinstance(node, ast.Constant) and _CODE.fullmatch(str(node.value)):
            found.setdefault(node.value, []).append(place)
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            for text in _texts(node):
                for code in filter(None, _MARK.findall(text)):
                    found.setdefault(code, []).append(place)
    return found


def uncoded(package: Path = PACKAGE) -> list[str]:
    """The lines of the package that give a remedy without a code."""
    found = {}
    for place, node in _nodes(package):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            lacks = any(not code for text in _texts(node) for code in _MARK.findall(text))
        elif isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            is_problem = isinstance(node.func, ast.Name) and node.func.id == "Problem"
            code = given.get("code")
            is_code = isinstance(code, ast.Name) or (
                isinstance(code, ast.Constant) and _CODE.fullmatch(str(code.value)) is not None
            )
            lacks = not is_code and ("remedy" in given or (is_problem and len(node.args) >= _UP_TO_REMEDY))
        else:
            continue
        if lacks:
            found[place] = None
    return list(found)


def _nodes(package: Path) -> Iterator[tuple[str, ast.AST]]:
    """All nodes of the package, but for docstrings and what is inside a text, each with its place."""
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if not module.startswith("testing/"):
            tree = ast.parse(path.read_text("utf-8"))
            skipped: set[int] = set()
            for node in ast.walk(tree):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    skipped.add(id(node.value))
                if isinstance(node, ast.JoinedStr):
                    skipped |= set(map(id, node.values))
                if id(node) not in skipped and hasattr(node, "lineno"):
                    yield f"{module}:{node.lineno}", node


def _remedies_of(module: str, tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = set(_names_of_remedies(tree))
    for node in _outermost(tree):
        texts: list[str] = []
        if isinstance(node, ast.keyword) and node.arg == "remedy":
            texts = _texts(node.value)
        elif isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _assigned(target, node.value)]
            texts = [text for name, value in pairs if name in named for text in _texts(value)]
        elif isinstance(node, ast.Return) and node.value is not None and module in _TEXTS:
            texts = _texts(node.value)
        for text in texts:
            if not _MARK.search(text):
                yield from _useful(text)
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and id(node) not in docstrings:
            for text in _texts(node):
                for part in _MARK.split(text)[2::2]:
                    yield from _useful(part.partition("\n")[0])


def _outermost(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for those inside a text."""
    yield tree
    if isinstance(tree, ast.JoinedStr) or (isinstance(tree, ast.BinOp) and _is_text(tree)):
        return
    for child in ast.iter_child_nodes(tree):
        yield from _outermost(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _names_of_remedies(tree: ast.Module) -> Iterator[str]:
    """The names of values that are remedies: called so, or given as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and "remedy" in node.id.lower():
            yield node.id
        if isinstance(node, ast.keyword) and node.arg == "remedy":
            yield from (part.id for part in ast.walk(node.value) if isinstance(part, ast.Name))


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, given in zip(target.elts, value.elts):
            yield from _assigned(each, given)


def _texts(node: ast.expr) -> list[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in _texts(node.left) or [_HOLE] for right in _texts(node.right) or [_HOLE]]
    return []


def _useful(text: str) -> Iterator[str]:
    """The text, if it has words of its own."""
    if re.search(r"[a-z]{2}", text.replace(_HOLE, "")):
        yield text.strip()
