"""Segments: each is one version of a model's weights, as one safetensors file in shared memory that an engine maps.

A segment is immutable from the moment it is staged. Memory whose engine has released it is written again under another
name: its pages exist already, which saves half of the time of a write.

Tested in tests/rollout/test_segment.py.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import xxhash

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media import removals

DIRECTORY = "/dev/shm"
_NAME = re.compile(r"flexckpt-[0-9a-z]+-[0-9a-z]+\.safetensors", re.ASCII)
# Hashed at a time.
BLOCK_BYTES = 64 << 20
# numpy's types by the size of an element; regions are moved, not computed with.
ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class SegmentNames:
    """The segments of a channel in one push, by their tokens, which are short hexadecimal texts.

    Attributes:
        channel: The channel, which is part of the names of its files.
        token: The segment to write.
        recycled: A segment that nobody maps any more, whose memory is to be used for it; "" if there is none.
        kept: Segments that the engine uses. All others of the channel are removed.
        nbytes: The size of the file.
        leads: Whether this process renames and removes files. One of those that write does.
    """

    channel: str
    token: str
    recycled: str
    kept: tuple[str, ...]
    nbytes: int
    leads: bool

    def file(self, token: str) -> str:
        """Return the name of a segment's file."""
        return f"flexckpt-{self.channel}-{token}.safetensors"

    def token_of(self, file: str) -> str | None:
        """Return the token of a file's name; None if it is no segment of this channel."""
        start, end = self.file("\0").split("\0")
        return file[len(start) : -len(end)] if file.startswith(start) and file.endswith(end) else None


class Sink(Protocol):
    """The destination of a segment's bytes."""

    def write(self, region: Region, values: np.ndarray) -> None:
        """Write values, C-contiguous and in the order of the region."""

    def finish(self) -> None:
        """Return when all bytes have arrived."""

    def seal(self) -> str:
        """Have the segment opened for writing no more, and return its digest; all writers have finished."""

    def close(self) -> None:
        """Release what is needed to write."""


@dataclass(frozen=True)
class Region:
    """A strided region of a segment's file; numbers are bytes.

    Attributes:
        base: Where its first element begins.
        extents: Elements along each axis.
        strides: From one element to the next.
        itemsize: The size of an element.
    """

    base: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def of(self, memory: np.ndarray) -> np.ndarray:
        """Return the view of this region of a segment's bytes; ValueError if it leaves the segment."""
        last = sum((extent - 1) * stride for extent, stride in zip(self.extents, self.strides))
        end = self.base + (last + self.itemsize) * all(self.extents)
        if min(self.base, *self.strides, 0) < 0 or end > memory.nbytes:
            raise ValueError(f"a region of {self.extents} elements from byte {self.base} on")
        return np.ndarray(self.extents, ELEMENTS[self.itemsize], memory, self.base, self.strides)


def place_of_directory(directory: str = DIRECTORY) -> str:
    """Return a text that is equal in two processes only if this is the same directory of one machine for both."""
    state = os.stat(directory)
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}:{state.st_dev}:{state.st_ino}"


def channel_of(url: str) -> str:
    """Return the channel of this user to an engine."""
    return hashlib.sha256(f"{os.getuid()} {url}".encode()).hexdigest()[:12]


class SegmentDirectory:
    """The segments of one channel that this process has mapped to write them, in a directory of shared memory."""

    def __init__(self, directory: str = DIRECTORY) -> None:
        """Take the directory."""
        self.directory = directory
        self._maps: dict[str, np.ndarray] = {}

    @property
    def place(self) -> str:
        """Return the identity of the directory."""
        return place_of_directory(self.directory)

    def path(self, file: str) -> str:
        """Return the path of a segment's file."""
        return os.path.join(self.directory, file)

    def open(self, names: SegmentNames) -> np.ndarray:
        """Return the bytes of a new segment, to be written by several processes and senders; its memory exists.

        CheckpointError: the shared memory is full, and nothing is left. ValueError: the segment was sealed.
        """
        if self._is_sealed(names):
            raise ValueError(f"segment {names.token} is finished")
        if names.token in self._maps:  # another sender was first
            return self._maps[names.token]
        recycled = self._maps.pop(names.recycled, None)
        self._maps = {token: memory for token, memory in self._maps.items() if token in names.kept}
        path = self.path(names.file(names.token))
        if names.recycled and recycled is None:
            # Another process gives its file the new name. One that is made here would be lost.
            raise CheckpointError(
                "a process that writes segments was started again since the last push. The engine serves the version "
                "it had. Remedy (FC951): push again"
            )
        if names.recycled and names.leads:
            os.chmod(self.path(names.file(names.recycled)), 0o600)
            os.rename(self.path(names.file(names.recycled)), path)
        if names.leads:
            self.remove(names)
        self._maps[names.token] = self._create(path, names.nbytes) if recycled is None else recycled
        return self._maps[names.token]

    def _create(self, path: str, nbytes: int) -> np.ndarray:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            hold(descriptor)
            if not _is_at(descriptor, path):  # it was removed before it was held; other writers make another
                return self._create(path, nbytes)
            # A write to a page that shared memory has no room for would end the process.
            os.posix_fallocate(descriptor, 0, nbytes)
            return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        except OSError as error:
            removals.remove(path)
            free = os.statvfs(self.directory)
            raise CheckpointError(
                f"{path}: {nbytes} bytes of shared memory are needed, and {free.f_bavail * free.f_frsize} are free: "
                f"{error.strerror}. The engine serves the version it had. Remedy (FC402): enlarge the file system (an "
                "engine needs the size of its weights twice), or give another directory"
            ) from error
        finally:
            os.close(descriptor)

    def seal(self, names: SegmentNames) -> str:
        """Have a segment opened no more, by any process, and return its digest."""
        os.chmod(self.path(names.file(names.token)), 0o400)
        return digest_of(self._maps[names.token])

    def _is_sealed(self, names: SegmentNames) -> bool:
        try:
            return not os.stat(self.path(names.file(names.token))).st_mode & 0o200
        except FileNotFoundError:
            return False

    def remove(self, names: SegmentNames) -> None:
        """Remove the channel's other segments than the new one and those that are kept."""
        kept = {*names.kept, names.token}
        for file in os.listdir(self.directory):
            token = names.token_of(file)
            if token is not None and token not in kept:
                removals.remove(self.path(file))

    def forget(self, kept: Collection[str] = ()) -> None:
        """Unmap all segments but some."""
        self._maps = {token: memory for token, memory in self._maps.items() if token in kept}

    def clear(self, names: SegmentNames) -> None:
        """Unmap all segments but those that are kept, and remove their files if this process leads."""
        self.forget(names.kept)
        if names.leads:
            self.remove(replace(names, token=""))

    def drop(self, names: SegmentNames) -> None:
        """Unmap the new segment, and remove its file, if it was not sealed."""
        if not self._is_sealed(names) and self._maps.pop(names.token, None) is not None:
            removals.remove(self.path(names.file(names.token)))


class LocalSink:
    """A segment in this machine's shared memory as a destination."""

    def __init__(self, directory: SegmentDirectory, names: SegmentNames) -> None:
        """Open the segment; errors as of :meth:`SegmentDirectory.open`."""
        self.memory = directory.open(names)
        self.seal = functools.partial(directory.seal, names)

    def write(self, region: Region, values: np.ndarray) -> None:
        """Write values."""
        region.of(self.memory)[...] = values.view(ELEMENTS[region.itemsize]).reshape(region.extents)

    def finish(self) -> None:
        """Do nothing: what is written is there."""

    close = finish


@dataclass(frozen=True)
class SegmentFile:
    """A segment of any channel.

    Attributes:
        path: Its file.
        bytes: The file's size.
        held: Whether a process has it mapped, or cannot be asked.
    """

    path: str
    bytes: int
    held: bool


def find_segments(directory: str, remove: bool = False) -> list[SegmentFile]:
    """Return the segments in a directory; with ``remove`` remove those that no process holds."""
    found = []
    for name in sorted(filter(_NAME.fullmatch, os.listdir(directory))):
        path, held = os.path.join(directory, name), False
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except PermissionError:
            found.append(SegmentFile(path, os.stat(path).st_size, True))
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                removals.remove(path)
        except BlockingIOError:
            held = True
        finally:
            found.append(SegmentFile(path, os.fstat(descriptor).st_size, held))
            # Closing alone is not enough: a process that was forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
    return found


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether a file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def hold(descriptor: int) -> None:
    """Protect a segment from `flexckpt clean` until its memory map is closed."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def digest_of(memory: np.ndarray) -> str:
    """Return the digest of a segment's bytes, of which several threads hash blocks."""
    blocks = [memory[begin : begin + BLOCK_BYTES] for begin in range(0, len(memory), BLOCK_BYTES)]
    with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1, 8)) as pool:
        return xxhash.xxh3_128_hexdigest(b"".join(pool.map(xxhash.xxh3_128_digest, blocks)))


def bytes_region(base: int, nbytes: int) -> Region:
    """Return a region of bytes in a row."""
    return Region(base, (nbytes,), (1,), 1)
