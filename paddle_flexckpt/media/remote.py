"""The remote backend: a directory of anything that fsspec offers, by its URL."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.media.backend import REPLACING, Backend, InputFile, Kind, Locks, Mode, OutputFile, map_files
from paddle_flexckpt.media.file_names import Secrets, check_member, has_password, redacted
from paddle_flexckpt.media.lease import LEASE_FILE, LEASE_SECONDS, Conditions, LeaseLocks, check_lease_seconds
from paddle_flexckpt.media.medium import Medium
from paddle_flexckpt.media.protocols import COMMITS, Commit, commit_of, protocol_of
from paddle_flexckpt.media.read_ahead import LEAST_REQUEST, Budget
from paddle_flexckpt.media.remote_files import RemoteInputFile, RemoteOutputFile, Windows
from paddle_flexckpt.media.retrying import DEFAULT_RETRIES, Retrier
from paddle_flexckpt.media.s3 import LEAST_PART_BYTES, MOST_PARTS

# The bytes of a long file that are sent at a time.
PART_BYTES = 8 << 20
# The requests besides its parts: whether it exists, begin, and put together.
_UPLOAD_REQUESTS = 3


def count_sends(sizes: np.ndarray, part_bytes: int = PART_BYTES) -> np.ndarray:
    """Return how many requests send new files of these sizes to S3, none of them twice; int64, 0 for no bytes."""
    part = np.maximum(part_bytes, -(-sizes // MOST_PARTS))
    return np.where(sizes > part, -(-sizes // part) + _UPLOAD_REQUESTS, (sizes > 0).astype(np.int64))


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
        requests_at_once: int = Budget.requests,
        bytes_at_once: int = Budget.bytes,
        commit: Commit | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        """Connect to nothing yet; ``options`` are fsspec's, the others as of :func:`media.opening.open_storage`.

        ``conditions`` are those that another directory of the store has found out.
        """
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self.path = redacted(self._url)
        self._scheme = url.partition("://")[0].lower()
        self._protocol = protocol_of(self._scheme)
        self._options = dict(options or {})
        self._settings: dict[str, Any] = {
            "lock": lock,
            "lease_seconds": check_lease_seconds(lease_seconds),
            "retries": retries,
            "part_bytes": part_bytes,
            "requests_at_once": requests_at_once,
            "bytes_at_once": bytes_at_once,
            "commit": commit,
        }
        self._check_settings()
        self._secrets = Secrets(self._url, self._options)
        # fsspec's file systems belong to a process, and those that are not asynchronous to a thread.
        self._shared: Medium | None = None
        self._own = threading.local()
        self._windows = Windows()
        self._is_made = False
        # For a scheme that is not in the table it is found out later whether anything can be saved there.
        self.replaces = (commit or self._protocol.commit or "rename") != "rename"
        self._conditions = conditions or Conditions(lambda: self._medium.exclusive)
        self.locks = LeaseLocks(self, lease_seconds, self._conditions) if lock else Locks()

    def _check_settings(self) -> None:
        problems = []
        least_of = {
            "retries": 0,
            "part_bytes": LEAST_PART_BYTES,
            "requests_at_once": 1,
            "bytes_at_once": LEAST_REQUEST,  # requests are cut to it
        }
        for name, least in least_of.items():
            value = self._settings[name] = plain_integer(self._settings[name])
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name} has to be an integer of at least {least}; got {value!r}")
        if self._settings["commit"] not in (None, *COMMITS):
            problems.append(f"commit has to be one of {list(COMMITS)}; got {self._settings['commit']!r}")
        if not self._protocol.medium.takes_password and has_password(self._url):
            problems.append(
                f"{self.path}: {self._scheme.upper()} takes no credentials from URLs. Remedy (FC406): "
                "open_storage(url, key=..., secret=...), the environment, or a profile"
            )
        if problems:
            raise ValidationError(problems)

    @property
    def _medium(self) -> Medium:
        """Return this thread's access to the files."""
        known: Medium | None = self._shared or getattr(self._own, "medium", None)
        if known is None or known.pid != os.getpid():
            known = _open_medium(self._url, self.path, self._options, self._settings, self._secrets)
            if known.file_system.async_impl:
                self._shared, self.at_once = known, self._settings["requests_at_once"]
            else:
                self._own.medium = known
        return known

    def _commit(self) -> Commit:
        """Return how files are replaced here; ValidationError if it is not known."""
        chosen: Commit | None = self._settings["commit"] or commit_of(self._scheme, self._medium.file_system)
        if chosen is None:
            raise ValidationError(
                f"it is not known how {self._scheme!r} replaces a file at once, so nothing can be saved to "
                f"{self.path}. Remedy (FC406): if you know, open_storage(url, commit='put') (whole files appear at "
                "once), 'replace' (renaming is atomic and replaces) or 'rename' (renaming is atomic)"
            )
        return chosen

    def names(self, kind: Kind = "files") -> list[str]:
        """Implement the base class."""
        found = self._medium.entries()
        if kind == "any":
            return found.files + found.directories
        return found.directories if kind == "directories" else [name for name in found.files if name != LEASE_FILE]

    def child(self, name: str) -> FsspecBackend:
        """Implement the base class."""
        return FsspecBackend(f"{self._url}/{name}", self._options, **self._settings, conditions=self._conditions)

    def open(self, name: str) -> InputFile:
        """Implement the base class."""
        check_member(self.path, name)
        try:
            return RemoteInputFile(self._medium, name, self._windows)
        except IsADirectoryError as error:
            raise CorruptCheckpointError(
                f"{self.where(name)} is not a regular file. Remedy (FC305): load another checkpoint"
            ) from error

    def read(self, name: str) -> bytes:
        """Return a whole file, in one request if the medium can."""
        check_member(self.path, name)
        return self._medium.read(name)

    def create(self, name: str, mode: Mode = "new", size: int | None = None) -> OutputFile:
        """Begin a file as the base class does; a new one must not exist when it is begun, nor when it is finished.

        Raises:
            FileExistsError: It exists; also if it is to be replaced, where the file system cannot do that atomically.
        """
        # S3 accepts a certain number of parts; this many are fine for all stores.
        part_bytes = max(self._settings["part_bytes"], -(-(size or 0) // MOST_PARTS))
        # Only a holder of the save lock replaces files.
        before = self.locks.ensure_held if mode in REPLACING else lambda: None
        return RemoteOutputFile(self._medium, name, part_bytes, size, mode, self._commit(), before)

    def remove(self, name: str) -> None:
        """Implement the base class; each try needs the lease, if this process has taken one."""
        self._medium.remove(name, self.locks.ensure_held)

    def remove_unfinished(self, wanted: Callable[[str], bool]) -> None:
        """Implement the base class."""
        medium = self._medium
        map_files(self, lambda each: medium.abandon(*each), [each for each in medium.unfinished() if wanted(each[0])])

    def make_directory(self) -> None:
        """Create the directory, if the medium has directories.

        Raises:
            ValidationError: A file has its name, or nothing can be saved to this kind of storage.
        """
        if self._is_made:
            return
        commit, medium = self._commit(), self._medium
        # A bucket alone is nothing that can be requested.
        if "/" in medium.path("").strip("/"):
            with contextlib.suppress(FileNotFoundError):
                if medium.info("")["type"] == "file":
                    raise ValidationError(
                        f"{self.path} is not a directory, so nothing can be saved there. Remedy (FC406): give another "
                        "URL"
                    )
        if commit != "put":
            medium.make_directory()
        self._is_made = True

    def remove_directory(self) -> None:
        """Implement the base class."""
        self._is_made = False
        if self._commit() != "put":
            self._medium.remove_directory()

    def sync(self) -> None:
        """Do nothing: a finished request is durable."""

    def reopen_token(self) -> dict[str, Any]:
        """Implement the base class; there may be secrets in it, so it is for processes of this job, not for files."""
        if not self._protocol.medium.is_shared:
            raise ValidationError(
                f"{self.path} is in the memory of this process, where no other process can save. Remedy (FC406): save "
                "synchronously, or elsewhere"
            )
        for name, value in self._options.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ValidationError(
                    f"the option {name!r} of {self.path} cannot be passed to another process: it is a "
                    f"{type(value).__name__}. Remedy (FC406): save synchronously, or give it as text, or by the "
                    "environment"
                ) from error
        return {"url": self._url, "options": self._options, **self._settings}


def _open_medium(url: str, shown: str, options: dict[str, Any], settings: dict[str, Any], secrets: Secrets) -> Medium:
    """Return the medium of a URL; ValidationError if a package is missing or fsspec does not know the protocol."""
    scheme = url.partition("://")[0].lower()
    try:
        import fsspec
        from fsspec.core import url_to_fs

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ValidationError(
            f"{shown} needs a package that is not installed ({error}). Remedy (FC901): pip install "
            "'paddle-flexckpt[remote]'"
        ) from error
    except ValueError as error:
        raise ValidationError(
            f"{shown}: fsspec {fsspec.__version__} knows no file system {scheme!r}. Remedy (FC406): correct the URL"
        ) from error
    protocol = protocol_of(scheme)
    file_system, root = Retrier(0, secrets)(shown, url_to_fs, url, **protocol.medium.options(options))
    budget = Budget(settings["requests_at_once"], settings["bytes_at_once"])
    retries = settings["retries"]
    return protocol.medium(file_system, protocol.creates, root.rstrip("/"), shown, retries, budget, secrets)
