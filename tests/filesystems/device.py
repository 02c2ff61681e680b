"""A disk whose writes are logged: a loop device on a file that a process of its own serves."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.filesystems import linux

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 60.0
# Not allowed, no such device or command, no such file system in this kernel.
_UNAVAILABLE = (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class FileSystem:
    """One that is looked at.

    Attributes:
        kind: As mount knows it.
        options: Of the mount.
        make: The command that makes it, without the device.
        size: Bytes of its disk.
    """

    kind: str
    options: str
    make: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.options}" if self.kind == "ext4" else self.kind


_EXT4 = ("mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
FILE_SYSTEMS = (
    *(FileSystem("ext4", f"data={mode}", _EXT4, 64 << 20) for mode in ("ordered", "journal", "writeback")),
    # States of one file system: they all have its number.
    FileSystem("xfs", "nouuid", ("mkfs.xfs", "-q", "-K"), 320 << 20),
    FileSystem("btrfs", "", ("mkfs.btrfs", "-q", "-K"), 128 << 20),
)


class Unavailable(Exception):
    """This machine, or this user, cannot do it."""


def why_not(system: FileSystem) -> str | None:
    """Why a file system cannot be looked at here, as far as that can be told without doing it."""
    if shutil.which(system.make[0]) is None:
        return f"there is no {system.make[0]}"
    closed = [path for path in ("/dev/fuse", "/dev/loop-control") if not os.access(path, os.R_OK | os.W_OK)]
    return f"{' and '.join(closed)} cannot be opened" if closed else None


class Device:
    """The disk of one file system.

    Attributes:
        path: Of the loop device.
        folder: Where the file system is mounted.
    """

    def __init__(self, system: FileSystem, scratch: Path) -> None:
        """Args: system: what is to be made on it. scratch: an empty directory for what it needs."""
        self.system = system
        self.folder = str(scratch / "mounted")
        self._file = str(scratch / "blocks")
        os.mkdir(self.folder)
        Path(self._file).touch()

    def __enter__(self) -> Device:
        with contextlib.ExitStack() as stack:
            try:
                self._start(stack)
            except OSError as error:
                if error.errno in _UNAVAILABLE:
                    raise Unavailable(f"{self.system.name}: {error}") from error
                raise
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: contextlib.ExitStack) -> None:
        linux.own_mounts()
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._control, theirs = Pipe()
        stack.callback(self._control.close)
        try:
            linux.mount("blocks", self._file, "fuse", f"fd={descriptor},rootmode=100000,user_id=0,group_id=0")
            stack.callback(linux.unmount, self._file)
            module = [sys.executable, "-m", "tests.filesystems.block_file"]
            numbers = (descriptor, theirs.fileno(), self.system.size)
            self._server = subprocess.Popen([*module, *map(str, numbers)], cwd=ROOT, pass_fds=numbers[:2])
        finally:
            os.close(descriptor)
            theirs.close()
        self.path = linux.attach_loop(self._file)
        stack.callback(linux.detach_loop, self.path)
        if Path(f"/sys/block/{os.path.basename(self.path)}/loop/dio").read_text().strip() != "1":
            raise OSError(errno.EOPNOTSUPP, "loop devices write through the page cache here", self.path)
        subprocess.run([*self.system.make, self.path], check=True, stdout=subprocess.DEVNULL)
        with self.mounted():
            pass

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._server.wait(_PATIENCE_SECONDS)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Has the server call a method of its image."""
        self._control.send((name, *arguments))
        return self._control.recv()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[str]:
        """The file system is mounted here, as it is on the disk now."""
        linux.mount(self.path, self.folder, self.system.kind, self.system.options)
        try:
            yield self.folder
        finally:
            linux.unmount(self.folder)
            if self.system.kind == "btrfs":
                linux.forget_btrfs(self.path)
