"""What the simulation replaces in the library's modules, and that nothing escapes it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from paddle_flexckpt.testing.simulation.modules import library_modules

# What a run depends on besides its seed.
REPLACED = frozenset(
    "atexit concurrent.futures fcntl mmap os queue random secrets selectors signal socket subprocess threading time".split()
)
# Modules with processes, clocks and files of their own, of which nothing may be used.
FORBIDDEN = frozenset("asyncio.subprocess glob multiprocessing sched tempfile uuid".split())


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


@pytest.mark.parametrize("module", library_modules(), ids=lambda module: module.__name__)
def test_nothing_is_imported_or_kept_past_the_simulation(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    names = {name for name, _ in imports(tree)}
    assert not names & FORBIDDEN
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = {name for name, _ in imports(function)} if not isinstance(function, ast.Lambda) else set()
            assert not inner & REPLACED, "imported in a function, where the simulation does not see it"
            defaults = [each for each in (*function.args.defaults, *function.args.kw_defaults) if each is not None]
            assert not used(defaults), f"line {function.lineno}: the real one is kept in a default value"
        elif isinstance(function, ast.ClassDef):
            plain = [each for each in function.body if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value]
            kept = used([*function.bases, *(each.value for each in plain if each.value)])
            assert not kept, f"class {function.name} keeps the real one"


def used(nodes: list[ast.expr]) -> set[str]:
    """Functions and classes of replaced modules that are evaluated where a module is imported."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in REPLACED:
            if not node.attr.isupper():
                found.add(f"{node.value.id}.{node.attr}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    for node in nodes:
        visit(node)
    return found
