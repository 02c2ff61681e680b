"""Simulated ``os``: its constants and what is text are the real module's, the calls are those of a system.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paddle_flexckpt.testing.simulation.paths import path_module
from paddle_flexckpt.testing.simulation.threads import Namespace

if TYPE_CHECKING:
    from paddle_flexckpt.testing.simulation.system import System

_TEXT = (
    "PathLike DirEntry stat_result error fspath fsdecode fsencode strerror sysconf sep curdir pardir linesep devnull "
    "name"
)
_CPUS = 2


def constants(module: ModuleType) -> dict[str, Any]:
    """The numbers that a module names."""
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}


class Environ(MutableMapping):  # type: ignore[type-arg]
    """``os.environ``, of which each process has its own."""

    def __init__(self, system: System) -> None:
        self._system = system

    @property
    def _own(self) -> dict[str, str]:
        return self._system.process.environ

    def __getitem__(self, name: str) -> str:
        return self._own[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def os_module(system: System) -> Namespace:
    """``os`` for the processes of a system."""
    scheduler, environ, path = system.scheduler, Environ(system), path_module(system)

    def make_directories(name: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
        head, tail = os.path.split(os.fspath(name))
        if not tail:
            head, tail = os.path.split(head)
        if head and tail and not path.exists(head):
            with contextlib.suppress(FileExistsError):  # another was faster
                make_directories(head, exist_ok=exist_ok)
            if tail == os.curdir:
                return
        try:
            system.mkdir(name, mode)
        except OSError:
            if not exist_ok or not path.isdir(name):
                raise

    def nice(increment: int) -> int:
        state = system.process.state
        state["nice"] = min(19, max(-20, state.get("nice", 0) + increment))
        level: int = state["nice"]
        return level

    def parent_pid() -> int:
        parent = system.process.parent
        return parent.pid if parent is not None and parent.alive else 1

    def inheritable(descriptor: int, _: bool) -> None:
        system.process.lookup(descriptor)

    functions: dict[str, Callable[..., Any]] = {
        "listdir": lambda path=".": [entry.name for entry in system.entries("listdir", path)],
        "scandir": system.scan,
        "lstat": lambda path: system.stat(path, follow_symlinks=False),
        "remove": system.unlink,
        "replace": system.rename,
        "fdatasync": system.fsync,
        "makedirs": make_directories,
        "getcwd": lambda: "/",
        "getpid": lambda: system.process.pid,
        "getppid": parent_pid,
        "getsid": lambda pid: system.process.pid if pid == 0 else pid,
        "nice": nice,
        "getpriority": lambda which, who: system.process.state.get("nice", 0),
        "cpu_count": lambda: _CPUS,
        "sched_getaffinity": lambda pid: set(range(_CPUS)),
        "urandom": lambda size: scheduler.random.getrandbits(8 * size).to_bytes(size, "big") if size else b"",
        "register_at_fork": lambda **functions: system.process.kept.append(functions),
        "set_inheritable": inheritable,
        "posix_fadvise": lambda descriptor, offset, length, advice: system.opened(descriptor) and None,
        "_exit": system.exit,
    }
    own = (
        "open close dup memfd_create read readv pread preadv write writev pwrite lseek ftruncate truncate fsync stat "
        "fstat mkdir unlink rmdir rename link symlink readlink kill"
    )
    functions.update({name: getattr(system, name) for name in own.split()})
    texts = {name: getattr(os, name) for name in _TEXT.split()}
    return Namespace(__name__="os", environ=environ, path=path, **texts, **constants(os), **functions)
