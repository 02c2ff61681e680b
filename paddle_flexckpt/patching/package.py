"""The installed package: found, read and written without being imported."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paddle_flexckpt.patching.errors import PatchError


@dataclass(frozen=True)
class Package:
    """A package on this machine.

    Attributes:
        name: As it is imported.
        root: The directory that it is in: ``site-packages``, as a rule.
        version: What its distribution says; None if nothing does.
    """

    name: str
    root: Path
    version: str | None

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None if there is none.

        Args:
            path: Relative to :attr:`root`.

        Raises:
            PatchError: It is a link, or not a file: replacing it would change something else than this package.
        """
        file = self.root / path
        try:
            if not stat.S_ISREG(os.lstat(file).st_mode):
                raise PatchError(
                    f"{file} is a link or not a file, and is not replaced. Remedy: pass --package-dir with the "
                    "directory that the package itself is in"
                )
            return file.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, path: str, content: bytes) -> None:
        """Replaces a file at once, and forgets what was compiled from it.

        The new file has the permissions of the old one. It is another file, so that one that shares its storage with
        a cache (hard links) is left alone there.
        """
        file = self.root / path
        old = os.stat(file)
        # The same name each time: what a crash leaves is overwritten by the next attempt.
        temporary = self._temporary(path)
        try:
            with open(temporary, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fchmod(stream.fileno(), stat.S_IMODE(old.st_mode))
                if (os.geteuid(), os.getegid()) != (old.st_uid, old.st_gid):
                    with contextlib.suppress(PermissionError):
                        os.fchown(stream.fileno(), old.st_uid, old.st_gid)
                os.fsync(stream.fileno())
            # Python takes compiled code for current if whole seconds and size of its source are as they were.
            new = os.stat(temporary)
            if int(new.st_mtime) == int(old.st_mtime):
                os.utime(temporary, ns=(new.st_atime_ns, new.st_mtime_ns + 10**9))
            os.replace(temporary, file)
        except OSError:
            self.discard(path)
            raise
        sync_directory(file.parent)
        self._remove_compiled(file)

    def discard(self, path: str) -> None:
        """Removes what a write that was cut short has left."""
        with contextlib.suppress(FileNotFoundError):
            self._temporary(path).unlink()

    def _temporary(self, path: str) -> Path:
        file = self.root / path
        return file.with_name(f".{file.name}.flexckpt.tmp")

    def _remove_compiled(self, file: Path) -> None:
        # Code compiled with unchecked hashes is never compared with its source.
        caches = {file.parent / "__pycache__", Path(importlib.util.cache_from_source(str(file))).parent}
        for cache in caches:
            for compiled in cache.glob(f"{file.stem}.*.pyc"):
                with contextlib.suppress(FileNotFoundError):
                    compiled.unlink()


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locate_package(name: str, distributions: Iterable[str], directory: Path | None = None) -> Package | None:
    """Where a package is; None if it is not installed.

    Args:
        name: As it is imported.
        distributions: The names that it may be installed under.
        directory: The directory that it is in; by default it is looked for where Python would.
    """
    if directory is None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).resolve().parent.parent
    else:
        root = directory.resolve()
        if not (root / name / "__init__.py").is_file():
            return None
    wanted = {_normalised(distribution) for distribution in distributions}
    versions = {
        distribution.version
        for distribution in importlib.metadata.distributions(path=[str(root)])
        if _normalised(distribution.metadata["Name"] or "") in wanted
    }
    return Package(name, root, "+".join(sorted(versions)) or None)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
