"""The remote backend: a directory of anything that fsspec offers, by its URL."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Backend, InputFile, NoLock, OutputFile, SaveLock
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.media.lease import LEASE_FILE, LEASE_SECONDS, LeaseLock, check_lease_seconds
from paddle_flexckpt.media.media import COMMITS, S3_PROTOCOLS, Commit, Listing, Medium, commit_of, open_medium
from paddle_flexckpt.media.remote_files import RemoteInputFile, RemoteOutputFile, RenamedOutputFile, Windows
from paddle_flexckpt.media.retrying import DEFAULT_RETRIES, Retrier
from paddle_flexckpt.media.s3 import LEAST_PART_BYTES, MOST_PARTS
from paddle_flexckpt.media.urls import Secrets, has_password, redacted

Item = TypeVar("Item")
Result = TypeVar("Result")

# Four parts are under way, each three times in memory: here, and in the layers of HTTP.
PART_BYTES = 8 << 20
# Requests about several files that are under way at a time.
_REQUESTS_AT_ONCE = 16


class _Reached(NamedTuple):
    """A process's way to a directory."""

    pid: int
    medium: Medium
    root: str


class FsspecBackend(Backend):
    """A directory of a remote file system or object store."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        lock: bool = True,
        lease_seconds: float = LEASE_SECONDS,
        retries: int = DEFAULT_RETRIES,
        part_bytes: int = PART_BYTES,
        commit: Commit | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: The directory; it need not exist.
            options: fsspec's storage options.
            lock: Whether savers exclude each other. Without it, that is up to the caller.
            lease_seconds: How long a saver may be silent before another one may take its place.
            retries: Tries after the first one, where another may help.
            part_bytes: Bytes that are sent at a time; some such parts are in memory.
            commit: How a file takes another's place there: see ``media/media.py``; None: by the protocol.

        Raises:
            ValidationError: An argument is none, or the URL has a password in it that would not be used.
        """
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self.path = redacted(self._url)
        self._protocol = url.partition("://")[0].lower()
        self._options = dict(options or {})
        self._settings: dict[str, Any] = {
            "lock": lock,
            "lease_seconds": check_lease_seconds(lease_seconds),
            "retries": retries,
            "part_bytes": part_bytes,
            "commit": commit,
        }
        self._check_settings()
        self._secrets = Secrets(self._url, self._options)
        # fsspec's file systems belong to a process, and those that are not asynchronous to a thread.
        self._shared: _Reached | None = None
        self._own = threading.local()
        self._windows = Windows()
        self._prepared = False
        self._lease: LeaseLock | None = None

    def _check_settings(self) -> None:
        problems = []
        for name, least in (("retries", 0), ("part_bytes", LEAST_PART_BYTES)):
            value = self._settings[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name} has to be an integer of at least {least}; got {value!r}")
        if self._settings["commit"] not in (None, *COMMITS):
            problems.append(f"commit has to be one of {list(COMMITS)}; got {self._settings['commit']!r}")
        if self._protocol in S3_PROTOCOLS and has_password(self._url):
            problems.append(
                f"{self.path}: S3 takes no credentials from URLs. Remedy: open_storage(url, key=..., secret=...), the "
                "environment, or a profile"
            )
        if problems:
            raise ValidationError(problems)

    def _reach(self) -> tuple[Medium, str]:
        """This thread's way to the files, and the directory's path there."""
        known: _Reached | None = self._shared or getattr(self._own, "reached", None)
        if known is None or known.pid != os.getpid():
            retries = self._settings["retries"]
            retrier, once = Retrier(retries, self._secrets), Retrier(0, self._secrets)
            known = _Reached(os.getpid(), *open_medium(self._url, self.path, self._options, retrier, once))
            if known.medium.file_system.async_impl:
                self._shared = known
            else:
                self._own.reached = known
        return known.medium, known.root

    @property
    def _medium(self) -> Medium:
        return self._reach()[0]

    def _at(self, name: str) -> str:
        return f"{self._reach()[1]}/{name}"

    def _commit(self) -> Commit:
        """How files are replaced here.

        Raises:
            ValidationError: That is not known.
        """
        chosen: Commit | None = self._settings["commit"] or commit_of(self._protocol, self._medium.file_system)
        if chosen is None:
            raise ValidationError(
                [
                    f"it is not known how {self._protocol!r} replaces a file at once, so nothing can be saved to "
                    f"{self.path}. Remedy: if you know, open_storage(url, commit='put') (whole files appear at once), "
                    "'replace' (renaming is atomic and replaces) or 'rename' (renaming is atomic)"
                ]
            )
        return chosen

    def _list(self) -> Listing:
        medium, root = self._reach()
        return medium.entries(root)

    def names(self) -> list[str]:
        """As in the base class."""
        return [name for name in self._list().files if name != LEASE_FILE]

    def directories(self) -> list[str]:
        """As in the base class."""
        return self._list().directories

    def child(self, name: str) -> FsspecBackend:
        """As in the base class."""
        return FsspecBackend(f"{self._url}/{name}", self._options, **self._settings)

    def exists(self) -> bool:
        """As in the base class."""
        found = self._list()
        return bool(found.files or found.directories)

    def where(self, name: str) -> str:
        """As in the base class."""
        return f"{self.path}/{name}"

    def _check_name(self, name: str) -> None:
        try:
            check_file_name(name)
        except ValueError as error:
            raise CorruptCheckpointError(f"in {self.path}: {error}. Remedy: load another checkpoint") from error

    def open(self, name: str) -> InputFile:
        """As in the base class."""
        self._check_name(name)
        try:
            return RemoteInputFile(self._medium, self._at(name), self._windows)
        except IsADirectoryError as error:
            raise CorruptCheckpointError(
                f"{self.where(name)} is not a regular file. Remedy: load another checkpoint"
            ) from error

    def read(self, name: str) -> bytes:
        """As in the base class, in one request where the medium can."""
        self._check_name(name)
        return self._medium.read(self._at(name))

    def create(self, name: str, replace: bool = False, size: int | None = None) -> OutputFile:
        """As in the base class; there must be no such file when it is begun, and when it is finished.

        Raises:
            FileExistsError: There is; also if it is to be replaced, where the file system cannot do that at once.
        """
        medium, path = self._medium, self._at(name)
        # S3 takes a certain number of parts; this many are fine for everybody.
        part_bytes = max(self._settings["part_bytes"], -(-(size or 0) // MOST_PARTS))
        if not replace:
            return RemoteOutputFile(medium, path, part_bytes, exclusive=True)
        if self._commit() == "put":
            return RemoteOutputFile(medium, path, part_bytes, exclusive=False)
        temporary = f"{path}.{os.urandom(16).hex()}.tmp"
        inner = RemoteOutputFile(medium, temporary, part_bytes, exclusive=True)
        return RenamedOutputFile(inner, medium, temporary, path, self._commit() == "replace")

    def write(self, name: str, data: bytes) -> None:
        """As in the base class."""
        self._medium.put(self._at(name), data)

    def publish(self, name: str, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """As in the base class.

        Raises:
            CheckpointError: Somebody else has the right to save by now.
        """

        def check_all() -> None:
            if self._lease is not None:
                self._lease.check()
            check()

        if self._commit() == "put":
            check_all()
            self._medium.put(self._at(name), data)
        else:
            super().publish(name, data, check_all)

    @property
    def has_path(self) -> bool:
        """As in the base class."""
        return self._protocol in ("file", "local")

    @property
    def replaces(self) -> bool:
        """As in the base class."""
        return self._commit() != "rename"

    @property
    def exclusive(self) -> bool:
        """As in the base class."""
        return self._medium.exclusive

    def remove(self, name: str) -> None:
        """As in the base class."""
        self._medium.remove(self._at(name))

    def remove_unfinished(self, wanted: Callable[[str], bool]) -> int:
        """As in the base class."""
        medium, root = self._reach()
        found = [(name, upload) for name, upload in medium.unfinished(root) if wanted(name)]
        self.each(lambda each: medium.abandon(self._at(each[0]), each[1]), found)
        return len(found)

    def remove_directory(self) -> None:
        """As in the base class."""
        self._prepared = False
        if self._commit() != "put":
            medium, root = self._reach()
            medium.remove_directory(root)

    def sync(self) -> None:
        """Nothing: what a request has done is done."""

    def prepare(self) -> None:
        """As in the base class.

        Raises:
            ValidationError: There is a file in its place, or nothing can be saved to this kind of storage.
        """
        if self._prepared:
            return
        commit = self._commit()
        medium, root = self._reach()
        if "/" in root.strip("/"):
            try:
                kind = medium.info(root)["type"]
            except FileNotFoundError:
                kind = "nothing"
            if kind == "file":
                raise ValidationError(
                    [f"{self.path} is not a directory, so nothing can be saved there. Remedy: give another URL"]
                )
        if commit != "put":
            medium.make_directory(root)
        self._prepared = True

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """As in the base class; several at a time, as requests are mostly waited for."""
        items = list(items)
        if len(items) < 2 or not self._medium.file_system.async_impl:
            return super().each(function, items)
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(items)), thread_name_prefix="flexckpt") as pool:
            return list(pool.map(function, items))

    def lock(self) -> SaveLock:
        """As in the base class: a lease."""
        if not self._settings["lock"]:
            return NoLock()
        self._lease = LeaseLock.take(self, self._settings["lease_seconds"])
        return self._lease

    def adopt_lock(self, description: dict[str, Any], descriptor: int | None) -> SaveLock:
        """As in the base class."""
        if description["kind"] == "none":
            return NoLock()
        self._lease = LeaseLock.adopt(self, description)
        return self._lease

    def describe(self) -> dict[str, Any]:
        """As in the base class. There may be secrets in it: it is for other processes of this job, not for files."""
        if self._protocol == "memory":
            raise ValidationError(
                [
                    f"{self.path} is in the memory of this process, where no other process can save. Remedy: save "
                    "synchronously, or elsewhere"
                ]
            )
        for name, value in self._options.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ValidationError(
                    [
                        f"the option {name!r} of {self.path} cannot be passed to another process: it is a "
                        f"{type(value).__name__}. Remedy: save synchronously, or give it as text, or by the environment"
                    ]
                ) from error
        return {"url": self._url, "options": self._options, **self._settings}
