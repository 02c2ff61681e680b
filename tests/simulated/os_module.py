"""Simulated ``os``: its constants and what is text are the real module's, the calls are those of a calls.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from tests.simulated.name_calls import NameCalls
from tests.simulated.paths import path_module
from tests.simulated.tasks import Killed
from tests.simulated.threads import Namespace

_TEXT = (
    "PathLike DirEntry stat_result error fspath fsdecode fsencode strerror sysconf sep curdir pardir linesep devnull "
    "name"
)
_CPUS = 2


def constants(module: ModuleType) -> dict[str, Any]:
    """Return the numbers that a module names."""
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}


class Environ(MutableMapping):  # type: ignore[type-arg]
    """Imitate ``os.environ``, of which each process has its own."""

    def __init__(self, calls: NameCalls) -> None:
        self._calls = calls

    @property
    def _own(self) -> dict[str, str]:
        return self._calls.process.environ

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


def os_module(calls: NameCalls) -> Namespace:
    """Return ``os`` for the processes of a calls."""
    scheduler, environ, path = calls.scheduler, Environ(calls), path_module(calls)

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
            calls.mkdir(name, mode)
        except OSError:
            if not exist_ok or not path.isdir(name):
                raise

    def nice(increment: int) -> int:
        state = calls.process.state
        state["nice"] = min(19, max(-20, state.get("nice", 0) + increment))
        level: int = state["nice"]
        return level

    def parent_pid() -> int:
        parent = calls.process.parent
        return parent.pid if parent is not None and parent.alive else 1

    def inheritable(descriptor: int, _: bool) -> None:
        calls.process.lookup(descriptor)

    def kill(pid: int, number: int) -> None:
        scheduler.check_alive()
        node = calls.process.node
        found = [each for each in scheduler.processes if each.pid == pid and each.node is node and each.alive]
        if not found:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if number:
            found[0].signal(signal.Signals(number))
            scheduler.check_alive()

    def exit_now(status: int) -> None:
        calls.process.exit(status)
        raise Killed

    functions: dict[str, Callable[..., Any]] = {
        "listdir": lambda path=".": [entry.name for entry in calls.entries("listdir", path)],
        "scandir": calls.scan,
        "lstat": lambda path: calls.stat(path, follow_symlinks=False),
        "remove": calls.unlink,
        "walk": calls.walk_tree,
        "replace": calls.rename,
        "fdatasync": calls.fsync,
        "makedirs": make_directories,
        "getcwd": lambda: "/",
        "getpid": lambda: calls.process.pid,
        "getppid": parent_pid,
        "geteuid": lambda: 0,
        "getsid": lambda pid: calls.process.pid if pid == 0 else pid,
        "nice": nice,
        "getpriority": lambda which, who: calls.process.state.get("nice", 0),
        "cpu_count": lambda: _CPUS,
        "sched_getaffinity": lambda pid: set(range(_CPUS)),
        "urandom": lambda size: scheduler.luck.getrandbits(8 * size).to_bytes(size, "big") if size else b"",
        "register_at_fork": lambda **functions: calls.process.kept.append(functions),
        "set_inheritable": inheritable,
        "posix_fadvise": lambda descriptor, offset, length, advice: calls.opened(descriptor) and None,
        "_exit": exit_now,
        "kill": kill,
    }
    own = (
        "open close dup memfd_create read readv pread preadv write writev pwrite lseek ftruncate truncate fsync stat "
        "fstat statvfs access mkdir unlink rmdir rename link symlink readlink"
    )
    functions.update({name: getattr(calls, name) for name in own.split()})
    texts = {name: getattr(os, name) for name in _TEXT.split()}
    return Namespace(__name__="os", environ=environ, path=path, **texts, **constants(os), **functions)
