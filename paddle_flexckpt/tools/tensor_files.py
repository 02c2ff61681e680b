"""Divide tensors among safetensors files in the style of Hugging Face, and write them: names, headers, index.

Tested in tests/tools/test_export.py and tests/loading/test_publishing.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.foreign.formats import not_empty
from paddle_flexckpt.media.backend import Backend, OutputFile, exists, publish
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.transfer.mapping import Settings, tensor_infos, whole_mapping
from paddle_flexckpt.transfer.names import is_state

PREFIX = "model"


def index_file(prefix: str) -> str:
    """Return the name of the index of files whose names start like this."""
    return f"{prefix}.safetensors.index.json"


INDEX_FILE = index_file(PREFIX)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tensors that a call writes.

    Attributes:
        mapping: The mapping of the statements; None: they are the source's own tensors.
        keys: Their keys by the names under which they are written, sorted.
        infos: Shape and dtype by name.
        left_out: The number of states that are left out.
    """

    mapping: TensorMapping | None
    keys: dict[str, str]
    infos: dict[str, TensorInfo]
    left_out: int


def choose_tensors(
    source: Catalog,
    aoa_config: Any,
    start: str,
    states: bool,
    by_safetensors: bool = True,
    skips: Sequence[str] = (),
    extra_state: bool = True,
    settings: Settings = dict,
) -> Chosen:
    """Choose the tensors to write: keys that begin with ``start``, which is removed, and do not end as ``skips``.

    ``by_safetensors``: whether only safetensors' own dtypes are allowed. ``settings`` returns the model's
    ``config.json``, whose head counts those of statements have to be.

    Raises:
        ValidationError: There is nothing to write, the statements do not fit, or the files cannot hold a tensor.
    """
    mapping = whole_mapping(aoa_config, source, settings=settings)
    infos = tensor_infos(source, mapping, extra_state)
    skipped = {key for key in infos if key.endswith(tuple(skips))}
    everything = infos.keys() - skipped
    inside = [key for key in sorted(everything) if key.startswith(start)]
    chosen = [k for k in inside if states or not (k.startswith(EXTRA_STATE) or is_state(k, everything))]
    problems = [
        no_such_dtype("safetensors has no such dtype", key, infos[key].dtype)
        for key in chosen
        if by_safetensors and dtype_of(infos[key].dtype).trailing > 1
    ]
    names = {key[len(start) :]: key for key in chosen}
    if "__metadata__" in names:
        problems.append(Problem("safetensors has another use for this name", key=names["__metadata__"]))
    if not chosen:
        among = "no key" if not start else f"no key that starts with {start!r}"
        what = "optimizer states and extra state alone" if inside else f"{among} among {len(everything)}"
        remedy = "give states=True" if inside else "correct prefix" if start else "give tensors, and leave out fewer"
        problems.append(Problem("there is nothing to export", got=what, code="FC201", remedy=remedy))
    if problems:
        raise ValidationError(problems)
    left_out = len(inside) - len(chosen) + len(skipped)
    return Chosen(mapping, names, {name: infos[key] for name, key in names.items()}, left_out)


def no_such_dtype(what: str, key: str, dtype: str) -> Problem:
    """Return the problem of a tensor whose dtype a format lacks."""
    remedy = "cast it, or leave it out, with an AOA statement"
    return Problem(what, key, got=dtype, code="FC705", remedy=remedy)


@dataclass(frozen=True)
class TensorFile:
    """One file, complete but for its data.

    Attributes:
        name: Its name in the output directory.
        names: Names of its tensors, in the order of their data.
        header: Its first bytes.
        data_bytes: Bytes of its tensors.
    """

    name: str
    names: tuple[str, ...]
    header: bytes
    data_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole file."""
        return len(self.header) + self.data_bytes

    def arrays(self, data: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Return all bytes of the file; ``data``: the elements of its tensors in order, in any number of arrays."""
        return itertools.chain([np.frombuffer(self.header, dtype=np.uint8)], data)


def divide(infos: Mapping[str, TensorInfo], max_file_bytes: int) -> list[TensorFile]:
    """Divide tensors among files, in the order of their names, as many as fit into each."""
    return _files(group(infos, max_file_bytes), infos)


def one_file(infos: Mapping[str, TensorInfo]) -> TensorFile:
    """Return one file for all tensors."""
    return _files([sorted(infos)], infos)[0]


def group(infos: Mapping[str, TensorInfo], max_file_bytes: int, most: int = sys.maxsize) -> list[list[str]]:
    """Return the names of the tensors of each file, in order, as many as fit and no more than ``most``."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in sorted(infos):
        length = infos[name].nbytes
        if parts[-1] and (size + length > max_file_bytes or len(parts[-1]) >= most):
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += length
    return parts


def divide_evenly(
    infos: Mapping[str, TensorInfo], max_file_bytes: int, ranks: int, prefix: str = PREFIX
) -> list[TensorFile]:
    """Divide tensors among an equal number of files for each rank, in the order of their names, about equally large."""
    return _files(group_evenly(infos, max_file_bytes, ranks), infos, prefix)


def group_evenly(infos: Mapping[str, TensorInfo], max_file_bytes: int, ranks: int) -> list[list[str]]:
    """Return the names of the tensors of each file, as :func:`divide_evenly` divides them."""
    names = sorted(infos)
    total = sum(infos[name].nbytes for name in names)
    count = ranks * max(math.ceil(total / ranks / max_file_bytes), 1)
    parts: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name in names:
        length = infos[name].nbytes
        # By its middle, so that a large tensor is not always the last of its file.
        parts[min((2 * before + length) * count // (2 * max(total, 1)), count - 1)].append(name)
        before += length
    return [part for part in parts if part]


class OutputDirectory:
    """An output directory, empty or not there at first, whose files are removed if the context is left by an error.

    Attributes:
        backend: The directory.
        is_made: Whether it was made here; then :meth:`undo` removes it.
    """

    def __init__(self, backend: Backend) -> None:
        """Touch nothing yet."""
        self.backend, self.is_made = backend, False
        self._written: list[str] = []
        self._stream: OutputFile | None = None

    def __enter__(self) -> OutputDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.undo()

    def check_unused(self) -> None:
        """Raise ValidationError if anything is there."""
        if self.backend.names() or self.backend.names("directories"):
            raise not_empty(self.backend, "output")

    def make(self) -> None:
        """Make the directory, if it is not there."""
        self.is_made = not exists(self.backend)
        self.backend.make_directory()

    def open(self, file: TensorFile) -> OutputFile:
        """Return the current file; if there is none, begin this one."""
        if self._stream is None:
            self._written.append(file.name)
            self._stream = self.backend.create(file.name, "replace", size=file.nbytes)
            self._stream.write(file.header)
        return self._stream

    def write(self, file: TensorFile, data: Iterable[np.ndarray]) -> None:
        """Write a file, given the elements of its tensors in order, in any number of arrays."""
        self.will_write(file.name)
        write_arrays(self.backend, file.name, file.nbytes, file.arrays(data))

    def finish(self) -> None:
        """Finish the current file: it appears, complete."""
        if self._stream is not None:
            self._stream.finish()
        self._stream = None

    def will_write(self, *names: str) -> None:
        """Note files that are written elsewhere, so that :meth:`undo` removes them."""
        self._written += [name for name in names if name not in self._written]

    def publish(self, name: str, data: bytes) -> None:
        """Write a small file, which appears complete, after all others are durable."""
        self._written.append(name)
        publish(self.backend, name, data)

    def undo(self) -> None:
        """Remove the files written, the last first; an error in this does not hide the first error."""
        if self._stream is not None:
            self._stream.abort()
        with contextlib.suppress(OSError):
            for name in reversed(self._written):
                self.backend.remove(name)
            if self.is_made:
                self.backend.remove_directory()  # if several processes write to it, the last one finds it empty


def write_arrays(
    sink: Backend,
    name: str,
    nbytes: int,
    data: Iterable[np.ndarray],
    look: Callable[[memoryview], object] = lambda part: None,
) -> None:
    """Write the bytes of arrays as a file, which appears complete; ``look`` is called with those of each array."""
    with sink.create(name, "replace", size=nbytes) as stream:
        for array in data:
            part = memoryview(array.ravel().view(np.uint8))
            look(part)
            stream.write(part)
            del array, part


def make_index(files: Sequence[TensorFile], metadata: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return the text of the index: the file of each tensor."""
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files), **metadata},
        "weight_map": dict(sorted((name, file.name) for file in files for name in file.names)),
    }
    return (json.dumps(index, ensure_ascii=False, indent=2) + "\n").encode()


def _files(parts: Sequence[list[str]], infos: Mapping[str, TensorInfo], prefix: str = PREFIX) -> list[TensorFile]:
    files = []
    for number, part in enumerate(parts, 1):
        of_parts = "" if len(parts) == 1 else f"-{number:05d}-of-{len(parts):05d}"
        files.append(tensor_file(f"{prefix}{of_parts}.safetensors", part, infos))
    return files


def tensor_file(
    file: str,
    part: Sequence[str],
    infos: Mapping[str, TensorInfo],
    stored: Callable[[str], str] = str,
    metadata: Mapping[str, str] | None = None,
) -> TensorFile:
    """Return a file for some tensors, with metadata (None: a model's); ``stored`` returns a tensor's name in it.

    Raises:
        ValidationError: There are too many for one file.
    """
    # Wide elements first, so that all are aligned.
    names = sorted(part, key=lambda name: (-dtype_of(infos[name].dtype).itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    end = 0
    for name in names:
        begin, end = end, end + infos[name].nbytes
        code = dtype_of(infos[name].dtype).safetensors
        entries[stored(name)] = {"dtype": code, "shape": list(infos[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValidationError(
            f"the header of {file} would have {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}. "
            "Remedy (FC705): a smaller max_file_bytes"
        )
    return TensorFile(file, tuple(names), len(text).to_bytes(8, "little") + text, end)
