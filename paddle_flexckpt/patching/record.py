"""What is known about a package's patches between two commands: which ones are in, and a change that is under way.

It stands beside the package, in ``.flexckpt-patches/PACKAGE`` (a name that cannot be imported: a directory that is left
inside of the package would, once the package is uninstalled, be imported in its place):

- ``state.json``: the patches that are in, and of every file that they change the released and the present checksum;
- ``blobs/SHA256``: the released files, and the diffs as they were when applied;
- ``journal.json``: only while files are being replaced: the state before and the one after. All contents of both are in
  ``blobs`` by then, so that a change that was cut short can be finished or undone.

The installer's own ``RECORD`` is not touched: it goes on saying what was released, so that whoever compares the files
with it sees which ones differ. pip uninstalls by names and is not disturbed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.patching.errors import PatchError
from paddle_flexckpt.patching.index import FORMAT, Patch, sha256
from paddle_flexckpt.patching.package import Package, sync_directory


@dataclass(frozen=True)
class State:
    """The patches in a package.

    Attributes:
        version: The package's version when they were applied.
        patches: Name -> the index entry, with ``"text"`` the checksum of the diff, in the order of application.
        files: Path -> ``{"original": sha256, "current": sha256}``.
    """

    version: str | None = None
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def blobs(self) -> set[str]:
        """The contents that have to be kept."""
        return {file["original"] for file in self.files.values()} | {entry["text"] for entry in self.patches.values()}


@dataclass(frozen=True)
class Journal:
    """A change that is under way, or was cut short.

    Attributes:
        verb: ``"apply"`` or ``"revert"``.
        names: Of what patches.
        before: The state that it started from.
        after: The one that it leads to.
    """

    verb: str
    names: tuple[str, ...]
    before: State
    after: State

    def target(self, path: str, state: State) -> str:
        """The checksum that a file has in one of its two states."""
        if path in state.files:
            return state.files[path]["current"]
        return (self.before if state is self.after else self.after).files[path]["original"]

    def paths(self) -> list[str]:
        """The files that change."""
        paths = sorted({*self.before.files, *self.after.files})
        return [path for path in paths if self.target(path, self.before) != self.target(path, self.after)]


class Record:
    """The directory that all of this is in."""

    def __init__(self, package: Package) -> None:
        """Args: package: Whose patches it is about. Nothing is created before something is written."""
        self.directory = package.root / ".flexckpt-patches" / package.name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from changing the package.

        Raises:
            PatchError: One of them is at it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(descriptor), os.stat(self.directory / "lock")):
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                raise PatchError(
                    f"another process is patching the package (lock {self.directory / 'lock'}). Remedy: wait for it"
                ) from None
            try:
                yield
            finally:
                if not any((self.directory / name).exists() for name in ("state.json", "journal.json")):
                    self._remove()
        finally:
            os.close(descriptor)

    def state(self) -> State:
        """The patches that are in."""
        data = self._read("state.json")
        return State() if data is None else self._state(data, "state.json")

    def journal(self) -> Journal | None:
        """The change that was cut short, if one was."""
        data = self._read("journal.json")
        if data is None:
            return None
        before, after = (self._state(data[key], "journal.json") for key in ("before", "after"))
        return Journal(data["verb"], tuple(data["names"]), before, after)

    def patch(self, state: State, name: str) -> Patch:
        """A patch that is in, as it was when it was applied.

        Raises:
            PatchError: Its diff is not as it was kept.
        """
        entry = state.patches[name]
        return Patch.from_dict(entry, self.blob(entry["text"]))

    def blob(self, checksum: str) -> bytes:
        """Kept bytes.

        Raises:
            PatchError: They are missing or have changed.
        """
        path = self.directory / "blobs" / checksum
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b""
        if sha256(content) != checksum:
            raise PatchError(
                f"{path} is missing or damaged; got sha256 {sha256(content)}. Remedy: install the package again "
                "(pip install --force-reinstall --no-deps); its patches are gone then"
            )
        return content

    def keep(self, content: bytes) -> str:
        """Keeps bytes; their checksum."""
        checksum = sha256(content)
        (self.directory / "blobs").mkdir(exist_ok=True)
        self._write(f"blobs/{checksum}", content)
        return checksum

    def begin(self, journal: Journal) -> None:
        """Makes a change known before its first file is replaced."""
        data = {
            "format": FORMAT,
            "verb": journal.verb,
            "names": list(journal.names),
            "before": _as_dict(journal.before),
            "after": _as_dict(journal.after),
        }
        self._write("journal.json", _json(data))

    def finish(self, state: State) -> None:
        """Makes a state the present one, ends the change, and removes what is no longer needed."""
        self._write("state.json", _json(_as_dict(state)))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / "journal.json")
        sync_directory(self.directory)
        if not state.patches:
            os.unlink(self.directory / "state.json")
            return
        for blob in (self.directory / "blobs").iterdir():
            if blob.name not in state.blobs():
                blob.unlink()

    def _remove(self) -> None:
        shutil.rmtree(self.directory)
        with contextlib.suppress(OSError):  # it holds records of other packages
            os.rmdir(self.directory.parent)

    def _write(self, name: str, content: bytes) -> None:
        path = self.directory / name
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)

    def _read(self, name: str) -> Any:
        path = self.directory / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise PatchError(
                    f"{path} was written by another release of this library; expected format {FORMAT}; got "
                    f"{data['format']!r}. Remedy: use that release"
                )
            return data
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise PatchError(f"{path} cannot be read: {error}") from error

    def _state(self, data: Any, name: str) -> State:
        try:
            return State(data["version"], data["patches"], data["files"])
        except (KeyError, TypeError) as error:
            raise PatchError(f"{self.directory / name} cannot be read: {error!r}") from error


def _as_dict(state: State) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": state.version,
        "patches": {name: dict(entry) for name, entry in state.patches.items()},
        "files": {path: dict(file) for path, file in state.files.items()},
    }


def _json(data: object) -> bytes:
    return json.dumps(data, indent=2).encode()
