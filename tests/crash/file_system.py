"""A layer between the library and the operating system: it records calls on files, stops the caller, fails calls.

The functions of ``os`` and ``fcntl`` that open, change or make durable are replaced while the layer is entered. Calls
on paths beneath ``root`` are recorded; calls on others pass. Reading, listing and stating change nothing, so a stop
before one of them leaves the disk of a stop before the next recorded call.

A dead process does nothing more: once a rank is stopped, each of its calls is refused, also those in ``finally`` and
``except`` clauses, and its descriptors are taken from it, which gives its locks back as the kernel does. The clock
stands still, and moves on when somebody sleeps, which takes no time.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.crash.job import Interrupted, Job, Stopped

_WRITES = ("write", "pwrite", "writev", "pwritev")
# Calls that change files in ways that the power loss model does not know. Whoever starts to use one extends it.
_UNKNOWN = ("sendfile", "copy_file_range", "posix_fallocate", "symlink", "removexattr", "setxattr")
_PID = 4242
# Later than all that was prepared: checkpoints have their time in them.
_NOW = 4e9


@dataclass(frozen=True)
class Call:
    """Describe one call on a file beneath the root.

    Attributes:
        name: The system call: open, write, fsync, ...; unlock for the flock that gives a lock back.
        path: Path relative to the root, ``.`` for the root itself.
        rank: Who made it.
        by_writer: Whether it was the rank's background writer.
        target: New name, of rename and link.
        descriptor: Of the calls that have one; of open, the result.
        writes: Whether open was for writing.
        created: Whether open made the file.
        truncated: Whether open emptied it.
        offset: Where write began.
        data: What write wrote; of ftruncate, the length is ``offset``.
        refused: Whether the operating system refused; nothing has changed then.
    """

    name: str
    path: str
    rank: int = 0
    by_writer: bool = False
    target: str | None = None
    descriptor: int | None = None
    writes: bool = False
    created: bool = False
    truncated: bool = False
    offset: int = 0
    data: bytes = b""
    refused: bool = False

    def __str__(self) -> str:
        more = f" -> {self.target}" if self.target else f" ({len(self.data)} bytes)" if self.data else ""
        return f"rank {self.rank}{' (writer)' * self.by_writer}: {self.name} {self.path}{more}"


@dataclass(frozen=True)
class Fault:
    """Describe what happens at one call.

    Attributes:
        at: Number of the call, counted from 0 over all ranks; beyond the last one for no fault.
        kind: ``job`` (all ranks are dead), ``rank`` (the one that calls is; the others see their collectives fail),
            ``hang`` (the one that calls is; the others stop where they would wait for it), ``give up`` (nobody is: the
            others see their collectives fail, and the one that calls is slow, and goes on after them), ``writer`` (the
            background writer that calls is; its rank lives), ``kill`` (SIGKILL, in earnest), ``error`` (the call
            fails), ``full`` (like error, and so do all later calls that need space), ``tight`` (likewise, until a file
            is removed), ``short`` (a write writes a part), ``interrupt`` (Ctrl-C arrives before the call).
        errno: Of ``error``, ``full`` and ``tight``.
    """

    at: int
    kind: str
    errno: int = 0


class FileSystem:
    """Stand between the library and the operating system; a context manager. One at a time.

    Attributes:
        calls: Those that were made, in order.
        returns: For each step that was acknowledged, the number of calls until then.
        struck: The call that met the fault, if one did.
        failed: Calls that failed by the fault.
    """

    def __init__(self, root: str, job: Job, fault: Fault | None = None, salt: int = 0) -> None:
        """Prepare the layer.

        Args:
            root: Where calls are recorded.
            job: Who calls.
            fault: What happens, if anything.
            salt: Of the random bytes that the library gets meanwhile; other saves need others.
        """
        self.root = os.path.realpath(root)
        self.calls: list[Call] = []
        self.returns: list[int] = []
        self.struck: Call | None = None
        self.failed: list[Call] = []
        self._job = job
        self._fault = fault
        self._number = 0
        self._is_full = False
        self._lock = threading.RLock()
        # A process is a rank, and the number of its background writer; 0 for the rank itself.
        self._files: dict[int, tuple[str, tuple[int, int]]] = {}
        self._taken: set[int] = set()
        self._dead: set[tuple[int, int]] = set()
        self._dead_ranks: set[int] = set()
        self._random = random.Random(salt)
        self._real: dict[str, Callable[..., Any]] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> FileSystem:
        by_descriptor = ("fsync", "fdatasync", "ftruncate")
        by_path = ("unlink", "remove", "mkdir", "rmdir", "truncate")
        by_paths = ("rename", "replace", "link")
        for name in _WRITES:
            self._patch(os, name, lambda *args, name=name: self._write(name, *args))
        for name in by_descriptor:
            self._patch(os, name, lambda fd, *args, name=name: self._on_descriptor(name, fd, *args))
        for name in by_path:
            self._patch(os, name, lambda path, *a, name=name, **k: self._on_path(name, path, *a, **k))
        for name in by_paths:
            self._patch(os, name, lambda a, b, name=name, **k: self._on_paths(name, a, b, **k))
        for name in _UNKNOWN:
            self._patch(os, name, lambda *a, name=name, **k: self._refuse(name, a, k))
        self._patch(os, "open", self._open)
        self._patch(os, "close", self._close)
        self._patch(os, "dup", self._dup)
        self._patch(fcntl, "flock", self._flock)
        for module in (builtins, io):
            self._patch(module, "open", self._open_stream, "open_stream")
        # The same names and contents in every run.
        self._patch(os, "urandom", lambda size: self._random.getrandbits(8 * size).to_bytes(size, "big"))
        self._patch(os, "getpid", lambda: _PID)
        self._patch(time, "time", lambda: _NOW + self._job.slept)
        self._patch(time, "monotonic", lambda: self._job.slept)
        self._patch(time, "sleep", self._sleep)
        return self

    def _patch(self, module: Any, name: str, function: Callable[..., Any], real: str | None = None) -> None:
        self._real[real or name] = getattr(module, name)
        self._undo.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def __exit__(self, *exc_info: object) -> None:
        for module, name, function in reversed(self._undo):
            setattr(module, name, function)
        for descriptor in self._taken:
            os.close(descriptor)
        self._taken.clear()

    def acknowledge(self, step: int) -> None:
        """Note that a step has been reported as done."""
        if step == len(self.returns):
            self.returns.append(len(self.calls))

    def open_files(self) -> list[str]:
        """Return the paths of descriptors that living ranks have not closed."""
        return sorted(path for path, _ in self._files.values())

    # -- what every recorded call goes through

    def _step(self, call: Call, action: Callable[[], Any], finish: Callable[[Any], Call] | None = None) -> Any:
        """Do one call, unless the caller is dead or the fault strikes."""
        self._job.turn()
        if self._fault == Fault(self._number, "give up") and self.struck is None:
            self.struck = call
            self._job.fail_others()
        with self._lock:
            self._check_alive()
            number, fault = self._number, self._fault
            self._number += 1
            strikes = fault is not None and fault.kind != "give up" and number == fault.at
            if strikes:
                self.struck = call
                self._strike(fault, call, action)
            elif self._is_full and _needs_space(call):
                raise self._error(fault.errno, call)
            try:
                result = action()
            except OSError:
                # The system's own: mkdir of what is there, for one. Nothing has changed, but it was a call.
                self.calls.append(replace(call, refused=True))
                raise
            if call.name == "unlink" and fault is not None and fault.kind == "tight":
                self._is_full = False
            self.calls.append(finish(result) if finish else call)
            return result

    @property
    def _process(self) -> tuple[int, int]:
        return self._job.running, self._job.writers.get(self._job.running, 0)

    def _is_dead(self, process: tuple[int, int]) -> bool:
        return process in self._dead or process[0] in self._dead_ranks

    def _check_alive(self) -> None:
        if self._is_dead(self._process):
            raise Stopped(f"rank {self._job.running} is dead")

    def _sleep(self, seconds: float) -> None:
        self._check_alive()
        self._job.rest(seconds)
        self._check_alive()

    def _strike(self, fault: Fault, call: Call, action: Callable[[], Any]) -> None:
        if call.name == "close" and fault.kind in ("error", "full", "interrupt"):
            # Linux frees the descriptor whatever it answers.
            action()
        if fault.kind == "kill":
            os.kill(self._real["getpid"](), signal.SIGKILL)
        elif fault.kind == "interrupt":
            raise Interrupted(f"at call {fault.at} ({call})")
        elif fault.kind in ("error", "full", "tight"):
            self._is_full = fault.kind != "error"
            raise self._error(fault.errno, call)
        elif fault.kind != "short":
            if fault.kind == "writer":
                self._dead.add(self._process)
            else:
                self._dead_ranks |= set(range(self._job.size)) if fault.kind == "job" else {self._job.running}
            self._take_files()
            self._job.hang = fault.kind in ("job", "hang")
            raise Stopped(f"at call {fault.at} ({call})")

    def _error(self, errno: int, call: Call) -> OSError:
        self.failed.append(call)
        # As the operating system does it: an error of a descriptor does not know the name.
        if call.descriptor is not None:
            return OSError(errno, os.strerror(errno))
        return OSError(errno, os.strerror(errno), os.path.join(self.root, call.path))

    def _take_files(self) -> None:
        """Take the descriptors of the dead from them."""
        nowhere = self._real["open"](os.devnull, os.O_RDWR)
        for descriptor, (path, process) in list(self._files.items()):
            if self._is_dead(process):
                # The number stays in use, so that a late close of the dead closes nobody else's file.
                if self._below(os.readlink(f"/proc/self/fd/{descriptor}").replace(" (deleted)", "")) == path:
                    os.dup2(nowhere, descriptor)
                    self._taken.add(descriptor)
                del self._files[descriptor]
        self._real["close"](nowhere)

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the path relative to the root; None if it is elsewhere."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        relative = os.path.relpath(os.path.join(os.path.realpath(folder), name), self.root)
        return None if relative == os.pardir or relative.startswith(os.pardir + os.sep) else relative

    def _new(self, name: str, path: str, **more: Any) -> Call:
        rank, writer = self._process
        return Call(name, path, rank, bool(writer), **more)

    # -- the calls

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = self._below(path, dir_fd)
        if relative is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        existed, writes = False, flags & os.O_ACCMODE != os.O_RDONLY
        call = self._new("open", relative, writes=writes)

        def action() -> int:
            nonlocal existed
            existed = os.path.lexists(os.path.join(self.root, relative))
            descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if writes or stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._files[descriptor] = (relative, self._process)
            else:
                # Closed by a stream, maybe, which this layer does not see.
                self._files.pop(descriptor, None)
            return descriptor

        def finish(descriptor: int) -> Call:
            created = not existed and bool(flags & os.O_CREAT)
            truncated = existed and bool(flags & os.O_TRUNC)
            return replace(call, descriptor=descriptor, created=created, truncated=truncated)

        return self._step(call, action, finish)

    def _open_stream(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        below = file in self._files if isinstance(file, int) else self._below(file) is not None
        if below and set(mode) & set("wax+"):
            raise AssertionError(f"open({file!r}, {mode!r}): streams write past this layer")
        return self._real["open_stream"](file, mode, *args, **kwargs)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._taken:
            self._taken.discard(descriptor)
            self._real["close"](descriptor)
        elif descriptor not in self._files:
            self._real["close"](descriptor)
        else:
            path, _ = self._files[descriptor]

            def action() -> None:
                # Before the close: the number may be another thread's right after.
                del self._files[descriptor]
                self._real["close"](descriptor)

            self._step(self._new("close", path, descriptor=descriptor), action)

    def _dup(self, descriptor: int) -> int:
        self._check_alive()
        copy = self._real["dup"](descriptor)
        if descriptor in self._files:
            self._files[copy] = (self._files[descriptor][0], self._process)
        return copy

    def _write(self, name: str, descriptor: int, data: Any, *rest: Any) -> int:
        if descriptor not in self._files:
            return self._real[name](descriptor, data, *rest)
        path, _ = self._files[descriptor]
        buffers = data if name in ("writev", "pwritev") else [data]
        content = b"".join(bytes(memoryview(buffer)) for buffer in buffers)
        positioned = name.startswith("p")
        offset = rest[0] if positioned else os.lseek(descriptor, 0, os.SEEK_CUR)
        call = self._new("write", path, descriptor=descriptor, offset=offset, data=content)

        def action() -> int:
            # The fault is looked up here, as its number is counted by now.
            short = self._fault is not None and self._fault.kind == "short" and self.struck is call
            part = content[: max(1, len(content) // 2)] if short else content
            if positioned:
                return self._real["pwrite"](descriptor, part, offset)
            return self._real["write"](descriptor, part)

        return self._step(
            call,
            action,
            lambda count: self._new("write", path, descriptor=descriptor, offset=offset, data=content[:count]),
        )

    def _on_descriptor(self, name: str, descriptor: int, *args: Any) -> Any:
        if descriptor not in self._files:
            return self._real[name](descriptor, *args)
        path, _ = self._files[descriptor]
        offset = args[0] if name == "ftruncate" else 0
        call = self._new("fsync" if name == "fdatasync" else name, path, descriptor=descriptor, offset=offset)
        return self._step(call, lambda: self._real[name](descriptor, *args))

    def _on_path(self, name: str, path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, int):
            return self._on_descriptor("ftruncate", path, *args)
        relative = self._below(path, kwargs.get("dir_fd"))
        if relative is None:
            return self._real[name](path, *args, **kwargs)
        offset = args[0] if name == "truncate" else 0
        call = self._new("unlink" if name == "remove" else name, relative, offset=offset)
        return self._step(call, lambda: self._real[name](path, *args, **kwargs))

    def _on_paths(self, name: str, source: Any, target: Any, **kwargs: Any) -> Any:
        before = self._below(source, kwargs.get("src_dir_fd"))
        after = self._below(target, kwargs.get("dst_dir_fd"))
        if before is None and after is None:
            return self._real[name](source, target, **kwargs)
        if before is None or after is None:
            raise AssertionError(f"{name}({source!r}, {target!r}) goes across the root {self.root!r}")
        call = self._new("rename" if name == "replace" else name, before, target=after)
        return self._step(call, lambda: self._real[name](source, target, **kwargs))

    def _flock(self, descriptor: Any, operation: int) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if number not in self._files:
            relative = self._below(os.readlink(f"/proc/self/fd/{number}"))
            if relative is None:
                return self._real["flock"](descriptor, operation)
            self._files[number] = (relative, self._process)
        path, _ = self._files[number]
        name = "unlock" if operation & fcntl.LOCK_UN else "flock"
        return self._step(self._new(name, path, descriptor=number), lambda: self._real["flock"](descriptor, operation))

    def _refuse(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError(f"os.{name} is not known to this layer yet: {args!r} {kwargs!r}")


def _needs_space(call: Call) -> bool:
    return call.name in ("write", "mkdir")
