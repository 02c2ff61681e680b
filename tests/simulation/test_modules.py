"""What the simulation replaces in the library's modules, and that nothing escapes it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from tests.simulated.modules import library_modules, process_state, simulated
from tests.simulated.scheduler import Scheduler

# What a run depends on besides its seed.
REPLACED = frozenset(
    "atexit concurrent.futures fcntl mmap os queue random secrets selectors signal socket subprocess threading "
    "time".split()
)
# Modules with processes, clocks and files of their own, of which nothing may be used.
# Versions of weights are published in no simulation, and no simulated process has data loaders.
ALLOWED = {
    ("paddle_flexckpt.loading.delta_files", "tempfile"),
    ("paddle_flexckpt.manager.preemption", "multiprocessing"),
}
FORBIDDEN = frozenset("asyncio.subprocess glob multiprocessing sched tempfile uuid".split())


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def test_nothing_is_imported_or_kept_past_the_simulation() -> None:
    modules = library_modules()
    assert len(modules) > 150
    assert not [problem for module in modules for problem in escapes(ast.parse(inspect.getsource(module)), module)]


def escapes(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    for name in {name for name, _ in imports(tree)} & FORBIDDEN:
        if (module.__name__, name) not in ALLOWED:
            yield f"{module.__name__} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = set() if isinstance(node, ast.Lambda) else {name for name, _ in imports(node)}
            for name in inner & REPLACED:
                yield f"{module.__name__}, line {node.lineno}: {name} is imported in a function, past the simulation"
            kept = used([each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None])
        elif isinstance(node, ast.ClassDef):
            values = [each.value for each in node.body if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value]
            kept = used([*node.bases, *values])
        else:
            continue
        for name in kept:
            yield f"{module.__name__}, line {node.lineno}: the real {name} is kept"


def test_what_escapes_is_seen() -> None:
    text = """
import threading, uuid
class A(threading.Thread):
    lock: object = field(default_factory=threading.RLock)
    late: object = field(default_factory=lambda: threading.RLock())
def f(clock=time.monotonic, flags=os.O_RDONLY):
    import socket
"""
    found = list(escapes(ast.parse(text), ModuleType("sample")))
    assert len(found) == 5
    assert {word for line in found for word in line.split()} >= {
        "uuid",
        "socket",
        "threading.Thread",
        "threading.RLock",
        "time.monotonic",
    }


def used(nodes: list[ast.expr]) -> set[str]:
    """Return functions and classes of replaced modules that are evaluated where a module is imported."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Lambda):
            return
        is_of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_of_module and node.value.id in REPLACED and not node.attr.isupper():
            found.add(f"{node.value.id}.{node.attr}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    for node in nodes:
        visit(node)
    return found


def test_what_a_process_has_for_itself_is_replaced_and_put_back() -> None:
    from paddle_flexckpt.ranks import lost_ranks

    scheduler, before = Scheduler(0), lost_ranks.own_presence
    with simulated(scheduler, {}, {}, lambda value: None, process_state(scheduler)):
        assert lost_ranks.own_presence is not before
    assert lost_ranks.own_presence is before
