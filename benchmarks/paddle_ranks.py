"""What a rank under Paddle does in a comparison: the raw medium, memcpy, this library, and Paddle's own functions.

All of them save and load the same tensors, in the memory of the same processes. Paddle's own runs in the CPU world,
which makes its ``Tensor.cuda()`` harmless; without that it could send nothing between ranks on a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from benchmarks import reshard
from benchmarks.harness import MIB
from benchmarks.ranks import STATEMENT, Part, State, local_tensors, serve
from paddle_flexckpt.memory.tensor_memory import host_memory
from paddle_flexckpt.testing.cpu_world import tensor_cuda_stays
from paddle_flexckpt.tools.tensor_reader import TensorReader

AOA = {"aoa_statements": [STATEMENT]}


def job(address: list[Any], key: str) -> None:
    """Serve as one rank of a world."""
    quiet()
    memory = Memory(dist.get_rank(), dist.get_world_size())
    subjects = {
        "memory": memory,
        "raw": Raw(memory),
        "ours": Ours(memory),
        "Paddle": Paddle(memory, safetensors=False),
        "Paddle safetensors": Paddle(memory, safetensors=True),
        "reshard": reshard,
    }
    serve((address[0], address[1]), bytes.fromhex(key), memory.rank, subjects)


def quiet() -> None:
    """Let nobody log every call; Paddle's checkpoint modules have loggers with handlers of their own."""
    for name in ("paddle_flexckpt", "paddle", "root", *logging.root.manager.loggerDict):
        if name.startswith(("paddle", "root")):
            logging.getLogger(name).setLevel(logging.WARNING)


class Memory:
    """Hold the tensors that all subjects of a rank save, and those that they load into, by layout."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def prepare(self, source: str, targets: list[str], **state: Any) -> int:
        """Make the tensors; return the bytes of the source."""
        self._state = State(**state)
        self.source = self._make(source)
        self.targets = {layout: self._make(layout) for layout in targets}
        self.source_arrays = arrays_of(self.source)
        self.target_arrays = {layout: arrays_of(target) for layout, target in self.targets.items()}
        return sum(array.nbytes for array in self.source_arrays)

    def _make(self, layout: str) -> dict[str, fc.ShardedWeight]:
        made = {}
        shape = self._state.shape[::-1] if layout == "transposed" else self._state.shape
        for name, values, own in local_tensors(self._state, layout, self.rank, self.size):
            tensor = paddle.empty(values.shape, dtype=self._state.dtype)
            host_memory(tensor).view(values.dtype)[...] = values.ravel()
            made[name] = sharded(name, tensor, shape, own)
        return made

    def poison(self, layout: str) -> None:
        """Overwrite a target, so that what is there afterwards was loaded."""
        for array in self.target_arrays[layout]:
            array[...] = 255

    def equal(self, layout: str) -> bool:
        """Return whether a target has, bit for bit, what was saved."""
        tensors = local_tensors(self._state, layout, self.rank, self.size)
        return all(
            np.array_equal(array, values.reshape(-1).view(np.uint8))
            for array, (_, values, _) in zip(self.target_arrays[layout], tensors)
        )

    def published(self, path: str) -> bool:
        """Return whether the files of a published model have this rank's part of each tensor, bit for bit."""
        with TensorReader(path) as reader:
            return all(
                np.array_equal(own, np.ascontiguousarray(reader.read(name)[rows]).reshape(-1).view(np.uint8))
                for own, (name, rows) in zip(self.source_arrays, self._rows())
            )

    def _rows(self) -> Iterator[tuple[str, slice]]:
        for name, weight in self.source.items():
            begin = weight.global_offset[0]
            yield name, slice(begin, begin + weight.local_shape[0])

    def copy(self, layout: str) -> None:
        """Copy as many bytes as a target has from memory to memory."""
        for own, target in zip(self.source_arrays, self.target_arrays[layout]):
            target[...] = own[: target.nbytes]


def sharded(name: str, tensor: paddle.Tensor, shape: tuple[int, ...], own: Part) -> fc.ShardedWeight:
    """Describe a tensor as a shard."""
    flat = () if own.flat is None else (True, slice(*own.flat))
    return fc.ShardedWeight(name, tensor, own.shape, shape, own.offset, *flat)


def arrays_of(state: dict[str, fc.ShardedWeight]) -> list[np.ndarray]:
    """Return the tensors' memory, as bytes."""
    return [host_memory(weight.local_tensor).reshape(-1).view(np.uint8) for weight in state.values()]


class Raw:
    """The medium itself: each rank writes a file with its bytes, a MiB at a time, and fsyncs it; or reads it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def save(self, path: str, durable: bool = True) -> None:
        os.makedirs(path, exist_ok=True)
        descriptor = os.open(self._file(path), os.O_WRONLY | os.O_CREAT)
        for array in self._memory.source_arrays:
            in_steps(lambda view: os.write(descriptor, view), array)
        if durable:
            os.fsync(descriptor)
        os.close(descriptor)

    def load(self, path: str, layout: str) -> None:
        """Read as many bytes as the target has, from the beginning of this rank's file."""
        descriptor = os.open(self._file(path), os.O_RDONLY)
        for array in self._memory.target_arrays[layout]:
            in_steps(lambda view: os.readv(descriptor, [view]), array)
        os.close(descriptor)

    def export(self, path: str, output: str) -> None:
        """Copy the file, a MiB at a time, and make the copy durable."""
        os.makedirs(output)
        buffer = memoryview(bytearray(MIB))
        with open(self._file(path), "rb", buffering=0) as source, open(f"{output}/copy", "wb", buffering=0) as copy:
            while count := source.readinto(buffer):
                copy.write(buffer[:count])
            os.fsync(copy.fileno())

    def _file(self, path: str) -> Path:
        return Path(path) / f"raw_{self._memory.rank}"


def in_steps(call: Callable[[memoryview], int], array: np.ndarray) -> None:
    """Write or read an array, a MiB at a time."""
    view = memoryview(array)
    while len(view):
        view = view[call(view[:MIB]) :]


class Ours:
    """This library."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def save(self, path: str, durable: bool = True) -> dict[str, float]:
        """Save; return the seconds of its phases."""
        with contextlib.nullcontext() if durable else mock.patch("os.fsync"):
            return fc.save_state_dict(self._memory.source, path).seconds

    def save_in_background(self, path: str) -> None:
        """Save asynchronously, and wait for the end."""
        fc.save_state_dict(self._memory.source, path, async_save=True).result()

    def load(self, path: str, layout: str, **options: Any) -> dict[str, float]:
        """Load; return the seconds of its phases."""
        statements = {"aoa_config": AOA} if layout == "transposed" else {}
        return fc.load_state_dict(self._memory.targets[layout], path, **statements, **options).seconds

    def export(self, path: str, output: str) -> None:
        fc.export_safetensors(path, output)

    def publish(self, path: str) -> None:
        fc.publish(self._memory.source, path)

    def calls(self, method: str, **arguments: Any) -> int:
        """Count the Python calls that one of the methods above makes."""
        calls = 0

        def count(_frame: Any, event: str, _value: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            getattr(self, method)(**arguments)
        finally:
            sys.setprofile(None)
        return calls


class Paddle:
    """``paddle.distributed.save_state_dict`` and ``load_state_dict`` as installed, which make nothing durable."""

    def __init__(self, memory: Memory, safetensors: bool) -> None:
        self._memory, self._safetensors = memory, safetensors

    def save(self, path: str) -> None:
        dist.save_state_dict(self._memory.source, path, safetensors=self._safetensors)

    def load(self, path: str, layout: str) -> None:
        statements = {"aoa_config": AOA} if layout == "transposed" else {}
        with tensor_cuda_stays():
            dist.load_state_dict(self._memory.targets[layout], path, safetensors=self._safetensors, **statements)
