"""Give the library's modules simulated modules in place of the real ones, for the time of a run.

A module of the library has the standard library's modules, and single names of them, among its globals. Those globals
are replaced, and put back. What stands for one process only (its presence, its writers) is kept with the process.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, MutableSequence
from types import ModuleType, SimpleNamespace
from typing import Any

from paddle_flexckpt.undo import Undo
from tests.simulated.scheduler import Scheduler

_PACKAGE = "paddle_flexckpt"
# What runs in the simulation. The others speak to Paddle, to people or to other programs' files.
ROOMS = (
    "background",
    "catalog",
    "communication",
    "foreign",
    "loading",
    "manager",
    "media",
    "memory",
    "native",
    "ranks",
    "run_state",
    "saving",
    "tools",
    "transfer",
)
SINGLE = ("observers", "progress", "report")


class PerProcess(MutableSequence):  # type: ignore[type-arg]
    """Hold a list for each simulated process, as each has its own module globals."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def _list(self) -> list[Any]:
        found: list[Any] = self._scheduler.process.state.setdefault(self, [])
        return found

    def __getitem__(self, place: Any) -> Any:
        return self._list()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._list()[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._list()[place]

    def __len__(self) -> int:
        return len(self._list()) if self._scheduler.running is not None else 0

    def insert(self, place: int, value: Any) -> None:
        self._list().insert(place, value)

    def add(self, value: Any) -> None:
        """Add a value, as to a set."""
        if value not in self._list():
            self._list().append(value)


def cached_per_process(scheduler: Scheduler, function: Callable[..., Any]) -> Callable[..., Any]:
    """Imitate ``functools.cache``, with a cache of its own for each simulated process."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        known = scheduler.process.state.setdefault(call, {})
        if args not in known:
            known[args] = function(*args)
        return known[args]

    call.cache_clear = lambda: scheduler.process.state.pop(call, None)  # type: ignore[attr-defined]
    return call


@functools.cache
def library_modules() -> tuple[ModuleType, ...]:
    """Return the library's modules that run in the simulation."""
    names = [f"{_PACKAGE}.{name}" for name in SINGLE]
    for room in ROOMS:
        package = importlib.import_module(f"{_PACKAGE}.{room}")
        names.append(package.__name__)
        names += [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return tuple(map(importlib.import_module, names))


@contextlib.contextmanager
def simulated(
    scheduler: Scheduler,
    modules: dict[str, Any],
    names: dict[Any, Any],
    replacement: Callable[[Any], Any],
    overrides: dict[tuple[str, str], Any],
) -> Iterator[None]:
    """Replace what library modules have of the standard library.

    Args:
        scheduler: Whose processes run meanwhile.
        modules: By name of a real module, what stands for it.
        names: By real function or class, what stands for it where a module has imported that alone.
        replacement: Gives what stands for a lock that a module holds; None for what is none.
        overrides: By module and name, further replacements.
    """
    real = {id(sys.modules[name]): value for name, value in modules.items() if name in sys.modules}
    owners = {key: importlib.import_module(f"{_PACKAGE}.{key[0]}") for key in overrides}
    single = {id(value): stand_in for value, stand_in in names.items()}
    # Other modules may have imported them by name.
    single.update({id(getattr(owners[key], key[1])): value for key, value in overrides.items()})
    replaced = {**single, **real}
    undo = Undo()
    try:
        for module in library_modules():
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    undo.set(module, name, replaced[id(value)])
                elif (stand_in := replacement(value)) is not None and not name.startswith("__"):
                    undo.set(module, name, stand_in)
            if "open" in modules:
                undo.set(module, "open", modules["open"])
        for key, value in overrides.items():
            undo.set(owners[key], key[1], value)
        with finalizing_at_the_end(scheduler):
            yield
    finally:
        undo.put_back()


@contextlib.contextmanager
def finalizing_at_the_end(scheduler: Scheduler) -> Iterator[None]:
    """Keep the collector of cycles from running frames of one process while another one runs, or another world.

    A frame that is left in a cycle, as of a ``with`` statement in a generator, is ended when the collector finds it.
    What it calls then would be done by whoever runs: files removed, descriptors closed. So the collector runs once, in
    the end, while nobody does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # each call of theirs is refused
        try:
            for process in scheduler.processes:
                process.forget()
            gc.collect(0)  # where all is that was made meanwhile
        finally:
            sys.unraisablehook = hook
            if was_enabled:
                gc.enable()


def process_state(scheduler: Scheduler) -> dict[tuple[str, str], Any]:
    """Return what modules hold for their process, and what would act on the real one."""
    from paddle_flexckpt.background import writer
    from paddle_flexckpt.ranks import lost_ranks

    def keep_status() -> None:
        scheduler.process.state["exit status"] = 1

    return {
        ("ranks.lost_ranks", "own_presence"): cached_per_process(scheduler, lost_ranks.own_presence.__wrapped__),
        ("ranks.lost_ranks", "_announced"): PerProcess(scheduler),
        ("background.earlier_saves", "WRITERS"): PerProcess(scheduler),
        ("background.writer", "_writer_of"): cached_per_process(scheduler, writer._writer_of.__wrapped__),
        ("background.writer", "_exit_with_status_1"): keep_status,
        ("background.worker", "lower_priority"): lambda nice, io_class: [],
        # No simulated process has data loaders.
        ("manager.preemption", "loader_workers"): lambda trainer: SimpleNamespace(count=lambda signals, change: None),
        ("observers", "_OBSERVATIONS"): PerProcess(scheduler),
    }
