"""A local copy of a model that follows the versions of its weights: ``flexckpt apply``.

New files are written beside the copy, in ``.weight_sync/next``. When all of them are durable, ``next.json`` says so,
and they are renamed. So an interrupted call changes nothing, or the next one finishes it. ``.weight_sync/lock`` and
``state.json`` are those of the format, and other receivers understand them; meanwhile they refuse the copy.

Tested in tests/rollout/test_local_copy.py and tests/crash/test_weight_versions.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.foreign.resolved_weights import ResolvedWeights
from paddle_flexckpt.foreign.weight_versions import (
    WeightVersion,
    list_versions,
    read_chain,
    read_whole,
    version_directory,
)
from paddle_flexckpt.media.backend import Backend, InputFile, Location, fill, publish
from paddle_flexckpt.media.local import LocalBackend, OutputParts
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.removals import leads_elsewhere
from paddle_flexckpt.native.row_files import ReadThreads
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.report import Report

SYNC, LOCK, STATE, NEXT, RECORD = ".weight_sync", "lock", "state.json", "next", "next.json"
# The version of a copy of which some files are new; no number, so that no other receiver goes on with it.
_UNFINISHED = "unfinished"
# The bytes that a thread copies at a time, and those at each end of a file that its mark covers.
_COPY_BYTES, _MARK_BYTES = 16 << 20, 64 << 10
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class ApplyReport(Report):
    """The result of bringing a local copy to a version.

    Attributes:
        path: The copy's directory.
        version: The version that it has now.
        before: The version that it had; None if it had none, or was not used.
        full_version: The full version that was copied; None if the deltas were enough.
        files: Names of the files that were written.
        tensors: Number of tensors to which deltas were applied.
        unverified: Number of tensors that were copied from a version that has no checksums.
        seconds: Wall time.
    """

    path: str
    version: int
    before: int | None
    full_version: int | None
    files: list[str]
    tensors: int
    unverified: int
    seconds: float

    def summary(self) -> str:
        """Return one line for people."""
        since = f"version {self.before}" if self.full_version is None else f"full version {self.full_version}"
        work = f"{self.tensors} tensors changed, {len(self.files)} files written in {self.seconds:.2f} s"
        work += f"; {self.unverified} tensors have no checksums" if self.unverified else ""
        return f"{self.path} has version {self.version}, from {since}: {work}"


def apply_version(
    root: Location,
    local: str | os.PathLike[str],
    version: int | None = None,
    *,
    base: Location | None = None,
    full: bool = False,
) -> ApplyReport:
    """Bring a local copy of a model to a version. Calls for one copy wait for each other.

    Args:
        root: The directory of the versions: a path, a URL, or what ``open_storage`` gives.
        local: The copy's directory, made if it is not there. Only its weights are replaced and removed; other
            files are copied where it has none of their name.
        version: The version; None: the newest.
        base: The directory of version 0, the model with which the engines have started, if deltas are based on it.
        full: Whether to begin with a full version, whatever the copy has.

    Returns:
        The report.

    Raises:
        ValidationError: There is no version, or the directory has a model that is no such copy.
        CorruptCheckpointError: A version is missing or damaged; the text names a full version to take. The copy is as
            it was.
        OSError: The file system failed; the copy is as it was, or the next call finishes it.
    """
    begin, source, started = time.perf_counter(), open_backend(root), None if base is None else open_backend(base)
    while True:
        there = list_versions(source)
        if version is None and not there:
            raise ValidationError(f"{source.path} has no version of weights. Remedy (FC301): correct the path")
        copy = _LocalCopy(os.fspath(local), full, started)
        try:
            with copy.lock():
                return _bring(copy, source, there[-1] if version is None else version, started, full, begin)
        except (CorruptCheckpointError, FileNotFoundError):
            if there == list_versions(source):
                raise
            # What was read may have been removed, as newer versions do without it.


def _bring(
    copy: _LocalCopy, source: Backend, version: int, base: Backend | None, full: bool, begin: float
) -> ApplyReport:
    """Bring a copy that is locked to a version."""
    copy.finish()
    before = None if full else copy.applied(source, version)
    chain, files = list[WeightVersion](), list[str]()
    if before != version:
        from_base = base is not None and before is None
        chain = read_chain(source, version, 0 if from_base else before)
        if base is not None and from_base and (not chain or chain[0].base is not None):
            chain.insert(0, WeightVersion(0, base, read_whole(base)))
        files = copy.take(source, chain)
        copy.finish()
    tensors = {name for each in chain if each.base is not None for name in each.weights.file_of}
    first = chain[0] if chain and chain[0].base is None else None
    bare = len(first.weights.file_of.keys() - tensors - first.sums.keys()) if first else 0
    seed, seconds = first.number if first else None, time.perf_counter() - begin
    return ApplyReport(copy.path, version, before, seed, files, len(tensors), bare, seconds)


def _mark_of(directory: Backend) -> str:
    """Return a hash of the headers and ends of a version's files; "" if there are none.

    ``WeightPublisher`` writes a random id there. Deltas of other programs have the checksums of what they change.
    """
    mark, names = xxhash.xxh3_128(), sorted(name for name in directory.names() if name.endswith(_WEIGHTS))
    with contextlib.suppress(FileNotFoundError):  # it is being removed
        for name in names:
            with directory.open(name) as file:
                header = 8 + min(int.from_bytes(file.read(0, 8), "little"), MAX_HEADER_BYTES)
                ends = file.read(0, max(header, _MARK_BYTES)), file.read(max(0, file.size - _MARK_BYTES), _MARK_BYTES)
                mark.update(f"{name}\0{file.size}\0".encode() + b"".join(ends))
        return str(mark.hexdigest()) if names else ""
    return ""


class _LocalCopy:
    """A copy's directory, with the record of its version."""

    def __init__(self, path: str, full: bool, base: Backend | None) -> None:
        self.path, self._files, self._base = os.path.abspath(path), LocalBackend(path, lock=False), base
        self._sync, self._next = self._files.child(SYNC), self._files.child(SYNC).child(NEXT)
        if leads_elsewhere(self._next):
            raise self._next.no_directory()
        # In this order: a call beside this one writes a record before it renames the first file.
        has_weights = any(name.endswith(_WEIGHTS) for name in self._files.names())
        if not full and has_weights and not {STATE, RECORD} & {*self._sync.names()}:
            raise ValidationError(
                f"{self.path} has a model that is no copy of versions of weights. Remedy (FC405): give another "
                "directory, or --full to replace its weights"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the copy's lock; wait for it."""
        self._sync.make_directory()
        descriptor = os.open(self._sync.where(LOCK), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._sync.read(name))
            version = found["version"]
            found["weights"], found["marks"] = dict(found.get("weights", {})), [*found.get("marks", ())]
            return found if version == _UNFINISHED else {**found, "version": int(version)}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptCheckpointError(
                f"{self._sync.where(name)} is no record of a version: {error}. Remedy (FC305): remove it, and give "
                "--full"
            ) from error

    def applied(self, source: Backend, version: int) -> int | None:
        """Return the version that the copy has; None if it cannot be used for this one; errors as of its check."""
        state = self._read(STATE)
        number = state.get("version")
        if number in (None, _UNFINISHED) or number > version:
            return None
        marks = zip(state["marks"], self._marks(source, state.get("full", 0), number))
        if any(before and now and before != now for before, now in marks):
            return None
        self._check(number, state["weights"])
        return int(number)

    def _marks(self, source: Backend, *numbers: int) -> list[str]:
        """Return the marks of versions, by which those of another run are told from them; "" where one is not there."""
        directories = [version_directory(source, number) if number else self._base for number in numbers]
        return ["" if directory is None else _mark_of(directory) for directory in directories]

    def _check(self, number: int, expected: dict[str, Any]) -> None:
        there, why = self._weights(), ""
        for name in sorted(name for name in expected if there.get(name) != expected[name]):
            got = there.get(name, "no file")
            why = why or f"{name}: size and time of change are {got}; expected {expected[name]}"
        try:
            read_whole(self._files)
        except CorruptCheckpointError as error:
            why = why or without_remedy(error)
        if why:
            raise CorruptCheckpointError(
                f"{self.path} is not version {number} any more: {why}. Remedy (FC308): give --full, which replaces its "
                "weights"
            )

    def _weights(self) -> dict[str, list[int]]:
        """Return size and time of change of the files of its weights."""
        found = {name: os.stat(self._files.where(name)) for name in self._files.names() if name.endswith(_WEIGHTS)}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}

    def take(self, source: Backend, chain: Sequence[WeightVersion]) -> list[str]:
        """Write all files that change, and record that they are complete; return their names."""
        seeds, version = chain[0].base is None, chain[-1].number
        if not seeds:
            chain = [WeightVersion(0, self._files, read_whole(self._files)), *chain]
        resolved = ResolvedWeights(source, chain)
        there = resolved.names()
        own = {name for name in self._files.names() if not name.endswith(_WEIGHTS)}
        files = [name for name in there if resolved.touched(name) or (seeds and name not in own)]
        stale = [name for name in self._files.names() if name.endswith(_WEIGHTS) and name not in there]
        self._next.make_directory()
        for name in files:
            self._write(name, resolved)
        # What was listed is all of it only if nothing has been removed meanwhile.
        read_chain(source, chain[0].number, 0)
        self._next.sync()
        state = self._read(STATE)
        full = chain[0].number if seeds else state.get("full", 0)
        record = {"version": f"{version:06d}", "full": full, "marks": self._marks(source, full, version)}
        record |= {"files": files, "stale": stale, "before": state.get("version")}
        publish(self._sync, RECORD, json.dumps(record).encode())
        return files

    def _write(self, name: str, resolved: ResolvedWeights) -> None:
        threads = ReadThreads()
        with resolved.source.open(name) as source, OutputParts(self._next.where(name)) as output:
            jobs, position = list[Callable[[], None]](), 0
            for begin, end, tensor in [*resolved.checked(name), (source.size, source.size, "")]:
                for low in range(position, begin, _COPY_BYTES):
                    jobs.append(functools.partial(_copy, source, output, low, min(begin, low + _COPY_BYTES)))
                if tensor:
                    jobs.append(functools.partial(_change, resolved, tensor, output, begin))
                position = end
            try:
                threads.each(lambda i: jobs[i](), len(jobs))
            finally:
                threads.close()
            output.make_durable()

    def finish(self) -> None:
        """Put complete new files in their place, and remove incomplete ones."""
        record = self._read(RECORD)
        # Another receiver may have changed the copy meanwhile.
        if record and self._read(STATE).get("version") in (_UNFINISHED, record["before"], record["version"]):
            publish(self._sync, STATE, json.dumps({"version": _UNFINISHED}).encode())
            for name in record["files"]:
                with contextlib.suppress(FileNotFoundError):  # it was renamed before the interruption
                    os.rename(self._next.where(name), self._files.where(name))
            for name in record["stale"]:
                self._files.remove(name)
            self._files.sync()
            found = {"version": f"{record['version']:06d}", "full": record["full"], "marks": record["marks"]}
            publish(self._sync, STATE, json.dumps({**found, "weights": self._weights()}).encode())
        for name in self._sync.names():
            if name not in (LOCK, STATE):
                self._sync.remove(name)
        for name in self._next.names():
            self._next.remove(name)


def _copy(source: InputFile, output: OutputParts, begin: int, end: int) -> None:
    data = np.empty(end - begin, dtype=np.uint8)
    if fill(source, memoryview(data), begin) != len(data):
        raise CorruptCheckpointError(f"a file became shorter than {end} bytes while it was copied")
    output.write_at(memoryview(data), begin)


def _change(resolved: ResolvedWeights, tensor: str, output: OutputParts, begin: int) -> None:
    for at, part in resolved.chunks(tensor):
        output.write_at(memoryview(part), begin + at)
