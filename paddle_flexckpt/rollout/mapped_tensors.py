"""The tensors of safetensors files, mapped read-only: a segment, or the model directory of an engine.

Tested in tests/rollout/test_mapped_tensors.py.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.dtypes import CODES
from paddle_flexckpt.media.local import LocalInputFile
from paddle_flexckpt.native.safetensors_header import StoredTensor, read_header
from paddle_flexckpt.rollout.segment import digest_of, hold

_INDEX = "model.safetensors.index.json"
_NUMPY = {code: np.dtype(getattr(ml_dtypes, dtype.name, dtype.numpy)) for code, dtype in CODES.items()}

# The element type's code and the shape of each tensor.
Kinds = Mapping[str, "tuple[str, tuple[int, ...]]"]


class MappedTensors:
    """The tensors of safetensors files, mapped read-only.

    Attributes:
        arrays: The tensors by name.
        kinds: Their element types and shapes.
    """

    def __init__(self, paths: Iterable[str], held: bool = False) -> None:
        """Map the files; with ``held`` `flexckpt clean` leaves them alone.

        CorruptCheckpointError: one is no whole safetensors file. ValidationError: two have a tensor of the same name.
        """
        self.arrays: dict[str, np.ndarray] = {}
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._maps: list[mmap.mmap] = []
        for path in paths:
            tensors, memory = _map_file(path, held)
            self._maps.append(memory)
            # An array of numpy keeps the map from being closed; a tensor of torch over the map itself would not.
            whole = np.frombuffer(memory, np.uint8)
            for name, tensor in tensors.items():
                if name in self.arrays:
                    raise ValidationError(Problem("two files have a tensor of this name", name, file=path))
                array = whole[tensor.begin : tensor.end].view(_NUMPY[tensor.code])
                self.arrays[name] = array.reshape(tensor.shape)
                self.kinds[name] = tensor.code, tensor.shape

    def digest(self) -> str:
        """Return the digest of the first file, which is a segment."""
        return digest_of(np.frombuffer(self._maps[0], np.uint8))

    def close(self) -> bool:
        """Unmap the files; return False where something still uses the memory, which then stays until that ends."""
        self.arrays.clear()
        maps, self._maps = self._maps, []
        return all([_close(memory) for memory in maps])


def _map_file(path: str, held: bool) -> tuple[Mapping[str, StoredTensor], mmap.mmap]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    file = LocalInputFile(descriptor, path)
    try:
        if held:
            hold(descriptor)
        tensors = read_header(file, path).tensors
        memory = file.memory_map()
    finally:
        file.close()
    if memory is None:
        raise CorruptCheckpointError(f"{path!r} is empty")
    return tensors, memory


def _close(memory: mmap.mmap) -> bool:
    for _ in range(2):
        try:
            memory.close()
        except BufferError:
            gc.collect()
        else:
            return True
    return False


class ModelDirectory:
    """The safetensors files from which an engine was started.

    Attributes:
        kinds: The tensors' element types and shapes.
    """

    def __init__(self, path: str) -> None:
        """Read the headers; ValidationError if it is no directory with safetensors files."""
        self._path = path
        self._paths = self._find()
        self._states = self._stat()
        base = MappedTensors(self._paths)
        self.kinds: Kinds = base.kinds
        base.close()

    def _find(self) -> list[str]:
        index = Path(self._path, _INDEX)
        if index.is_file():
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        else:
            names = {path.name for path in Path(self._path).glob("*.safetensors")}
            names -= {name for name in names if name.startswith("consolidated")}  # as the engine does
        if not names:
            raise ValidationError(
                f"the engine's model {self._path!r} is no directory with safetensors files; start the engine with one"
            )
        return [os.path.join(self._path, name) for name in sorted(names)]

    def _stat(self) -> list[tuple[int, int, int]]:
        states = map(os.stat, self._paths)
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]

    def map(self) -> MappedTensors:
        """Map the files; CheckpointError if they have changed since the headers were read."""
        if self._stat() != self._states:
            raise CheckpointError(f"the files of the engine's model {self._path!r} have changed since it started")
        return MappedTensors(self._paths)
