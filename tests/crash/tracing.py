"""What a process does to files, as strace tells it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# System calls that take paths or descriptors and change nothing on a disk, nor what is durable.
READING = frozenset(
    """access close dup dup2 dup3 epoll_ctl execve faccessat faccessat2 fadvise64 fchdir chdir fcntl fgetxattr fstat
    fstatfs getcwd getdents getdents64 getxattr ioctl lgetxattr lseek lstat mmap newfstatat poll ppoll pread64 preadv
    preadv2 pselect6 read readahead readlink readlinkat readv select stat statfs statx""".split()
)
_CHANGING_FLAGS = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")
_NAMES = {
    "openat": "open",
    "pwrite64": "write",
    "writev": "write",
    "pwritev": "write",
    "fdatasync": "fsync",
    "renameat": "rename",
    "renameat2": "rename",
    "unlinkat": "unlink",
    "mkdirat": "mkdir",
    "linkat": "link",
}
TOKEN = re.compile("[0-9a-f]{32}")


def victim(root: str, scenario: str, *more: str, tracer: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run :mod:`tests.crash.victim` to its end."""
    return subprocess.run(
        [*tracer, sys.executable, "-m", "tests.crash.victim", root, scenario, *more],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def strace(*options: str) -> list[str]:
    """Return the beginning of a command that is to be traced; skip the test where that is not possible."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([path, "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"processes cannot be traced here: {probe.stderr[:200]}")
    return [path, "-f", "-y", "-qq", "-s", "0", *options]


def changes(trace: str, root: str) -> list[str]:
    """Return the calls of a trace that are not known to change nothing, on paths beneath a root.

    Args:
        trace: Output of strace with ``-f -y -s 0`` and the classes ``file`` and ``desc``.
        root: Real path of the directory.

    Returns:
        ``"name path"`` of each; of renames and links with the new path as well. Tokens are left out of names.
    """
    found = []
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        process, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[process] = call[: -len("<unfinished ...>")]
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>", call)
        if resumed:
            call = begun.pop(process) + call[resumed.end() :]
        match = re.match(r"(\w+)\((.*)", call)
        if not match:
            continue
        # Descriptors are shown as 3</path>, paths in quotes; a relative one stands after its directory's descriptor.
        paths = [
            path
            for path in (os.path.normpath(p or q) for p, q in re.findall(r'\d<(/[^>]*)>|"(/[^"]*)"', match[2]))
            if path == root or path.startswith(root + os.sep)
        ]
        name = _NAMES.get(match[1], match[1])
        if not paths or (match[1] in READING and "PROT_WRITE" not in match[2]):
            continue
        if name == "open":
            if not _CHANGING_FLAGS.search(match[2]):
                continue
            paths = paths[:1]
        if name == "unlink" and "AT_REMOVEDIR" in match[2]:
            name = "rmdir"
        if name == "flock" and "LOCK_UN" in match[2]:
            name = "unlock"
        found.append(TOKEN.sub("*", " ".join([name, *(os.path.relpath(path, root) for path in paths)])))
    return found
