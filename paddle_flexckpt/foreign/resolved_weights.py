"""The files of a model with deltas applied to them while they are read.

Bytes of tensors that no delta touches are read as they are. Of others the whole tensor is made, and compared with the
checksum of the last delta that touches it. Who asks for a tensor has it compared with that of a full version, too.

Tested in tests/foreign/test_weight_versions.py.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.foreign.huggingface import TensorFile
from paddle_flexckpt.foreign.weight_deltas import CHUNK_BYTES, DeltaDecoder, new_hasher
from paddle_flexckpt.foreign.weight_versions import DIRECTORY, WeightVersion, broken, read_chain
from paddle_flexckpt.media.backend import Backend, InputFile, Kind, Location, Mode, OutputFile, exists, fill
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.verify import Verification
from paddle_flexckpt.progress import Meter


def resolve_version(location: Location, full: bool = False) -> Backend:
    """Return the directory of a version; of a delta, and with ``full`` of a full one, as :class:`ResolvedWeights`.

    Raises:
        CorruptCheckpointError: A version that it needs is missing or damaged.
    """
    backend = open_backend(location)
    local = isinstance(backend, LocalBackend)
    parent, name = os.path.split(os.path.abspath(backend.path) if local else backend.path.rstrip("/"))
    match = DIRECTORY.fullmatch(name)
    # The options of another backend than a local one do not reach the directory above.
    if match is None or not exists(backend) or (isinstance(location, Backend) and not local):
        return backend
    root = open_backend(parent)
    chain = read_chain(root, int(match[1]))
    return ResolvedWeights(root, chain) if len(chain) > 1 or full else backend


class ResolvedWeights(Backend):
    """A directory of a model's files that cannot be written to.

    Attributes:
        source: The directory before the deltas.
        weights: Its weights.
    """

    def __init__(self, root: Backend, chain: Sequence[WeightVersion]) -> None:
        """Take a model and the deltas on it; CorruptCheckpointError if one is about a tensor that is not there."""
        self.source, self.weights, self._root, self._deltas = chain[0].backend, chain[0].weights, root, chain[1:]
        self._first = chain[0]
        self.path, self.locks, self.at_once = chain[-1].backend.path, self.source.locks, self.source.at_once
        self._lock, self._kept = threading.Lock(), functools.lru_cache(2)(self.tensor)
        self._touched: dict[str, set[tuple[int, int, str]]] = {}
        for delta in self._deltas:
            for name in delta.weights.file_of:
                if name not in self.weights.file_of:
                    raise broken(root, delta.number, f"there is no tensor {name!r} to change")
                file = self.weights.files.get(self.weights.file_of[name])
                if file is not None:  # it is wanted
                    place = file.tensors[name].begin, file.tensors[name].end, name
                    self._touched.setdefault(file.name, set()).add(place)

    @property
    def files(self) -> Collection[TensorFile]:
        """Return the files of its weights, as far as they are wanted."""
        return self.weights.files.values()

    def touched(self, file: str) -> list[tuple[int, int, str]]:
        """Return first byte, end and name of the tensors of a file that deltas touch, in the order of their bytes."""
        return sorted(self._touched.get(file, ()))

    def checked(self, file: str) -> list[tuple[int, int, str]]:
        """Return the same of all tensors of a file that have checksums."""
        whole = self.weights.files[file].tensors if file in self.weights.files else {}
        sums = self._first.sums
        return sorted({*self.touched(file), *((t.begin, t.end, name) for name, t in whole.items() if name in sums)})

    def chunks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the place and the bytes of each part of a tensor in order; the parts share memory.

        CorruptCheckpointError: they do not have the checksum of the last version that has one.
        """
        file = self.weights.files[self.weights.file_of[name]]
        tensor, nbytes = file.tensors[name], file.tensors[name].end - file.tensors[name].begin
        of, decoders = self._first, list[DeltaDecoder]()
        try:
            for delta in self._deltas:
                if name in delta.weights.file_of:
                    of, stored = delta, delta.weights.files[delta.weights.file_of[name]]
                    begin, end = stored.tensors[name].begin, stored.tensors[name].end
                    with delta.backend.open(stored.name) as frames:
                        decoders.append(DeltaDecoder(frames.read(begin, end - begin), delta.encoding, nbytes))
            hasher = new_hasher(of.checksum) if name in of.sums else None
            buffer = np.empty(min(CHUNK_BYTES, nbytes), dtype=np.uint8)
            with self.source.open(file.name) as source:
                mapped = source.memory_map() if nbytes > CHUNK_BYTES else None
                for begin in range(0, nbytes, CHUNK_BYTES):
                    part, at = buffer[: nbytes - begin], tensor.begin + begin
                    if mapped is not None:
                        part[:] = np.frombuffer(mapped, np.uint8, len(part), at)
                    elif fill(source, memoryview(part), at) != len(part):
                        raise ValueError(f"{self.source.where(file.name)} became shorter")
                    for decoder in decoders:
                        decoder.apply(part, begin)
                    if hasher is not None:
                        hasher.update(part)
                    yield begin, part
            if hasher is not None and hasher.hexdigest() != of.sums[name]:
                raise ValueError(f"the checksum is {hasher.hexdigest()}; expected {of.sums[name]}")
        except (ValueError, FileNotFoundError) as error:
            if isinstance(error, ValidationError):  # a package is not installed
                raise
            raise broken(self._root, of.number, f"key {name!r}: {error}") from error

    def tensor(self, name: str) -> np.ndarray:
        """Return all bytes of a tensor, uint8; errors of :meth:`chunks`."""
        stored = self.weights.files[self.weights.file_of[name]].tensors[name]
        made = np.empty(stored.end - stored.begin, dtype=np.uint8)
        for begin, part in self.chunks(name):
            made[begin : begin + len(part)] = part
        return made

    def verify(self, meter: Meter) -> Verification:
        """Compare the tensors that have checksums with them; one that differs is a problem."""
        found = Verification()
        for begin, end, name in (place for file in self.weights.files for place in self.checked(file)):
            found.bytes_read += end - begin
            try:
                for _ in self.chunks(name):
                    pass
                found.bytes_verified += end - begin
            except CorruptCheckpointError as error:
                found.problems.append(Problem(str(error)))
            meter.add(end - begin)
        found.recoverable = not found.problems
        return found

    @property
    def checked_bytes(self) -> int:
        """Return the number of bytes of all tensors that have checksums."""
        return sum(end - begin for file in self.weights.files for begin, end, _ in self.checked(file))

    def kept_tensor(self, name: str) -> np.ndarray:
        """Return the same; two are kept, for a reader that wants parts of them."""
        with self._lock:
            return self._kept(name)

    def names(self, kind: Kind = "files") -> list[str]:
        """Implement the base class."""
        return self.source.names(kind)

    def child(self, name: str) -> Backend:
        """Implement the base class."""
        return self.source.child(name)

    def where(self, name: str) -> str:
        """Implement the base class."""
        return self.source.where(name)

    def open(self, name: str) -> InputFile:
        """Implement the base class."""
        return _ResolvedFile(self, name) if name in self._touched else self.source.open(name)

    def create(self, name: str, mode: Mode = "new", size: int | None = None) -> OutputFile:
        """Refuse, as all that would change it."""
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValidationError([f"{self.path} is a version of weights, which does not change"])

    remove = make_directory = remove_directory = sync = reopen_token = _refuse  # type: ignore[assignment]


class _ResolvedFile(InputFile):
    def __init__(self, weights: ResolvedWeights, name: str) -> None:
        self._weights, self._file, self._touched = weights, weights.source.open(name), weights.touched(name)
        self._ends = [end for _, end, _ in self._touched]
        self.size, self.version = self._file.size, self._file.version

    def read_into(self, buffer: memoryview, offset: int) -> int:
        count = self._file.read_into(buffer, offset)
        data = np.asarray(buffer)
        for begin, end, name in self._touched[bisect.bisect_right(self._ends, offset) :]:
            low, high = max(begin, offset), min(end, offset + count)
            if low >= high:
                break
            data[low - offset : high - offset] = self._weights.kept_tensor(name)[low - begin : high - begin]
        return count

    def close(self) -> None:
        self._file.close()
