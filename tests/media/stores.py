"""File systems of fsspec in memory that fail on demand: object stores, and such as rename.

Import this only after ``pytest.importorskip("fsspec")``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import fsspec
from fsspec.spec import AbstractBufferedFile

# Gets number, operation and path of a call; gives an error to raise before it, one to raise after it has been carried
# out (in a tuple), or None.
Fate = Callable[[int, str, str], "Exception | tuple[Exception] | None"]


class Disk:
    """What all instances of a file system share.

    Attributes:
        files: Bytes by path.
        calls: ``(operation, path)`` of every call so far.
        fate: Decides which calls fail.
    """

    def __init__(self) -> None:
        """An empty one that never fails."""
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.fate: Fate | None = None
        self._lock = threading.RLock()

    def call(self, operation: str, path: str, action: Callable[[], object]) -> object:
        """Carries out a call, unless it is to fail."""
        with self._lock:
            number = len(self.calls)
            self.calls.append((operation, path))
            fate = self.fate(number, operation, path) if self.fate else None
            if isinstance(fate, Exception):
                raise fate
            result = action()
            if isinstance(fate, tuple):
                raise fate[0]
            return result

    def count(self, operation: str, end: str = "") -> int:
        """How many calls of one kind there were, to paths with a certain end."""
        return sum(kind == operation and path.endswith(end) for kind, path in self.calls)


class StoreFileSystem(fsspec.AbstractFileSystem):
    """An object store: objects appear whole. fsspec's own ``mv`` copies and removes."""

    protocol = "teststore"
    cachable = False
    disk = Disk()

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.listings: dict[str, list] = {}

    def invalidate_cache(self, path=None):
        self.listings.clear()

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        # What an instance has listed once it lists again, as many file systems of fsspec do.
        if path not in self.listings:
            self.listings[path] = self.disk.call("ls", path, lambda: self._ls(path))
        return self.listings[path] if detail else [entry["name"] for entry in self.listings[path]]

    def _ls(self, path):
        if path in self.disk.files:
            return [{"name": path, "size": len(self.disk.files[path]), "type": "file"}]
        found = {}
        for name, data in self.disk.files.items():
            if name.startswith(f"{path}/"):
                first, _, rest = name[len(path) + 1 :].partition("/")
                kind = {"size": 0, "type": "directory"} if rest else {"size": len(data), "type": "file"}
                found[first] = {"name": f"{path}/{first}", **kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        return self.disk.call("info", path, lambda: self._info(path))

    def _info(self, path):
        if path in self.disk.files:
            return {"name": path, "size": len(self.disk.files[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.disk.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        path = self._strip_protocol(path)

        def get():
            if path not in self.disk.files:
                raise FileNotFoundError(path)
            return self.disk.files[path][start:end]

        return self.disk.call("cat", path, get)

    def pipe_file(self, path, value, **kwargs):
        path = self._strip_protocol(path)
        self.disk.call("put", path, lambda: self.disk.files.update({path: bytes(value)}))

    def rm_file(self, path):
        path = self._strip_protocol(path)

        def remove():
            if path not in self.disk.files:
                raise FileNotFoundError(path)
            del self.disk.files[path]

        self.disk.call("rm", path, remove)

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        return StoreFile(self, self._strip_protocol(path), mode, block_size or "default", **kwargs)


class StoreFile(AbstractBufferedFile):
    """A file that is sent in parts."""

    def _initiate_upload(self):
        self.sent = b""

    def _upload_chunk(self, final=False):
        data = self.buffer.getvalue()

        def send():
            self.sent += data
            if final or self.fs.files_grow:
                self.fs.disk.files[self.path] = self.sent

        self.fs.disk.call("part", self.path, send)
        return True


StoreFileSystem.files_grow = False


class RenamingFileSystem(StoreFileSystem):
    """A file system whose files grow visibly, whose renaming is atomic, and fails where the target exists."""

    protocol = "testrename"
    disk = Disk()
    files_grow = True

    def pipe_file(self, path, value, **kwargs):
        path = self._strip_protocol(path)
        # Half of it is there when it fails.
        self.disk.files[path] = bytes(value)[: len(value) // 2]
        self.disk.call("put", path, lambda: self.disk.files.update({path: bytes(value)}))

    def mv(self, path1, path2, **kwargs):
        def rename():
            if path2 in self.disk.files:
                raise FileExistsError(path2)
            self.disk.files[path2] = self.disk.files.pop(path1)

        self.disk.call("mv", path2, rename)

    def makedirs(self, path, exist_ok=False):
        self.disk.call("makedirs", path, lambda: None)

    def rmdir(self, path):
        self.disk.call("rmdir", path, lambda: None)


class ReplacingFileSystem(RenamingFileSystem):
    """The same with a renaming that replaces."""

    protocol = "testreplace"
    disk = Disk()

    def mv(self, path1, path2, **kwargs):
        self.disk.call("mv", path2, lambda: self.disk.files.update({path2: self.disk.files.pop(path1)}))


KINDS = {"put": StoreFileSystem, "rename": RenamingFileSystem, "replace": ReplacingFileSystem}
for each in KINDS.values():
    fsspec.register_implementation(each.protocol, each, clobber=True)
