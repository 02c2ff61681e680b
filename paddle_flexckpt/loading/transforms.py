"""Load transforms: functions that make logical tensors from a checkpoint's, in the form of Paddle's develop branch.

A transform has ``logical_metadata()``: names to ``global_shape`` and ``dtype``; ``source_keys(name)``: the tensors of
the checkpoint that a logical tensor is made from; and ``apply(name, source_tensors, output_dtype)``, which makes it. If
it has a ``read_plan()``, which requests parts of sources, it is informed that they come whole. Here logical tensors are
in a file that no storage has: reading from it reads the sources whole, by the reader of every load, and makes the
tensor. So targets, statements and casts see logical tensors as they see stored ones.

Tested in tests/loading/test_transforms.py.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CheckpointError, Problem, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.metadata import LocalTensorMetadata
from paddle_flexckpt.loading.merged import empty_tensors
from paddle_flexckpt.media.backend import Backend, InputFile, Kind, Location, Mode, OutputFile
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.memory.tensor_memory import device_of, dtype_name, empty_on_host, host_memory, is_contiguous
from paddle_flexckpt.native.checksums import Checksums
from paddle_flexckpt.native.data_file import TOKEN_WINDOW
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.tools.whole_tensors import AS_STORED
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.options import FileOptions, LoadOptions
from paddle_flexckpt.transfer.source import Task
from paddle_flexckpt.transfer.transfer import Transfer, quiet_loads

# Fused parameters are read alternately from several tensors, which have to stay in memory meanwhile.
KEPT_BYTES = 1 << 30
# No program gives a data file this name.
_FILE = "load_transform"
_ALIGNMENT = 64
_REASON = "load_transform: every rank makes what it needs"


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor that a transform makes: its name, its description, and the names of its sources."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def logical_tensors(transform: Any, stored: Catalog) -> list[LogicalTensor]:
    """Return the tensors that a transform makes of a checkpoint, in the order of the names.

    Raises:
        ValidationError: Its answers are not those of a transform, or the checkpoint lacks a source.
    """
    described = _ask(transform, "logical_metadata")
    if not isinstance(described, dict):
        raise ValidationError([f"load_transform.logical_metadata() has to give a dict; got {type(described).__name__}"])
    there, found, problems = {*stored.keys}, list[LogicalTensor](), list[Problem | str]()
    for key in sorted(described, key=str):
        try:
            tensor = _logical_tensor(transform, key, described[key])
        except ValidationError as error:
            problems += error.problems
            continue
        found.append(tensor)
        for name in tensor.sources:
            if name not in there:
                remedy = "give the path of the checkpoint that the transform was made for"
                what = "load_transform makes a tensor of one that the checkpoint lacks"
                problems.append(
                    Problem(what, key, expected=name, got=f"{len(there)} other keys", code="FC101", remedy=remedy)
                )
    taken = {name for tensor in found for name in tensor.sources}
    for tensor in found:
        if tensor.key in there and tensor.key not in taken:
            what = "load_transform makes a tensor under the name of a stored one, and not of that"
            problems.append(
                Problem(what, tensor.key, got=f"sources {list(tensor.sources)}", code="FC101", remedy="rename it")
            )
    if problems:
        raise ValidationError(problems)
    return found


def _logical_tensor(transform: Any, key: Any, described: Any) -> LogicalTensor:
    if not isinstance(key, str) or not key:
        raise ValidationError([f"load_transform.logical_metadata() has to have names as its keys; got {key!r}"])
    sources = _ask(transform, "source_keys", key)
    if not isinstance(sources, (list, tuple)) or not sources or not all(isinstance(each, str) for each in sources):
        raise ValidationError([Problem("source_keys() has to give a list of names", key, got=repr(sources)[:200])])
    if len({*sources}) != len(sources):
        raise ValidationError([Problem("source_keys() gives a name twice", key, got=list(sources))])
    try:
        shape, dtype = tuple(described.global_shape), str(described.dtype)
    except (AttributeError, TypeError) as error:
        what = "logical_metadata() has to give global_shape and dtype of each tensor"
        raise ValidationError([Problem(what, key, got=repr(described)[:200])]) from error
    if not all(isinstance(extent, (int, np.integer)) and extent > 0 for extent in shape):
        raise ValidationError([Problem("logical_metadata() gives an invalid shape", key, got=list(shape))])
    return LogicalTensor(key, tuple(map(int, shape)), dtype_of(dtype).name, tuple(sources))


def _ask(transform: Any, name: str, *arguments: Any) -> Any:
    try:
        return getattr(transform, name)(*arguments)
    except Exception as error:
        given = ", ".join(map(repr, arguments))
        raise ValidationError(
            [
                f"load_transform.{name}({given}) raised {type(error).__name__}: {error}. Remedy (FC101): correct the "
                "transform"
            ]
        ) from error


class TransformedFiles(Files):
    """The files of a checkpoint, whose tensors a transform turns into others. Each rank makes those it needs, whole.

    The sources are reachable under their logical tensors' names only.
    """

    _made: MadeTensors

    def __init__(self, location: Location, options: LoadOptions) -> None:
        """Open nothing yet; arguments as of :class:`Files`."""
        super().__init__(location, options, reason=_REASON)
        self._transform = options.load_transform

    def open(self) -> dict[str, str]:
        """Open the checkpoint; return its description, with the tensors that are made of it."""
        description, stored, backend = super().open(), self.manifest, self.directory.backend
        tensors = logical_tensors(self._transform, stored.catalog)
        made = self._made = MadeTensors(self._transform, tensors, backend, stored, self._options)
        self.directory = CheckpointDirectory(_Overlay(backend, made))
        self.manifest = made.manifest()
        self.catalog = self.manifest.catalog
        return {**description, "load_transform": made.digest}

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Do what the base class does; also make the first tensor, to find errors before a target changes."""
        message, pieces = super().prepare(task), self.planned.pieces
        pieces = pieces.take(np.flatnonzero(self.catalog.file[pieces.source] == self._made.file))
        self._made.bytes_needed = int((pieces.size * self.catalog.itemsize[pieces.source]).sum())
        if len(pieces):
            self._made.make(self.catalog.key_name(int(pieces.source[0])))
        return message

    def move(self, task: Task) -> dict[str, Any]:
        """Read and make; the report counts the sources as read."""
        made, before = self._made, self._made.bytes_given
        made.touched = True
        moved = super().move(task)
        given = made.bytes_given - before
        return {
            **moved,
            "bytes_read": moved["bytes_read"] - given + made.bytes_read,
            "bytes_verified": moved["bytes_verified"] + made.bytes_verified,
            "bytes_extra": moved["bytes_extra"] - (given - made.bytes_needed) + made.bytes_extra,
        }


class MadeTensors(InputFile):
    """Tensors that are made when they are read, as a file of all of them, one after the other. Threads may read it.

    Attributes:
        digest: The same for the same tensors.
        file: The file's number in the catalog.
        bytes_needed: The bytes of this file that targets need.
        bytes_given: The bytes that have been read of this file.
        bytes_read: The bytes that have been read of the checkpoint for them.
        bytes_verified: The part of ``bytes_read`` whose checksums were compared.
        bytes_extra: The part of ``bytes_read`` that no source needed.
        touched: Whether targets may have been written, for errors.
    """

    def __init__(
        self,
        transform: Any,
        tensors: Sequence[LogicalTensor],
        backend: Backend,
        stored: Manifest,
        options: FileOptions,
    ) -> None:
        """Make nothing yet."""
        self._transform, self._tensors = transform, {tensor.key: tensor for tensor in tensors}
        self._backend, self._stored = backend, stored
        self._options = FileOptions(verify=options.verify, use_replicas=options.use_replicas)
        # It begins as every data file of the checkpoint does.
        self._head = np.frombuffer(stored.save_token.encode().ljust(TOKEN_WINDOW, b"\0"), dtype=np.uint8)
        self._names = list(self._tensors)
        self._begins = list[int]()
        self.size = len(self._head)
        for tensor in self._tensors.values():
            self._begins.append(-(-self.size // _ALIGNMENT) * _ALIGNMENT)
            self.size = self._begins[-1] + tensor.nbytes
        self.digest = hashlib.sha256(json.dumps([vars(tensor) for tensor in tensors]).encode()).hexdigest()[:16]
        self.file = len(stored.catalog.files)
        self.bytes_needed = self.bytes_given = self.bytes_read = self.bytes_verified = self.bytes_extra = 0
        self.touched = False
        self._kept: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.RLock()

    def manifest(self) -> Manifest:
        """Return the checkpoint with these tensors in place of their sources."""
        stored = self._stored
        catalog, hidden = stored.catalog, {name for tensor in self._tensors.values() for name in tensor.sources}
        shown = np.asarray([key not in hidden for key in catalog.keys], dtype=bool)
        rows = np.flatnonzero(shown[catalog.key]) if len(catalog) else np.zeros(0, dtype=np.int64)
        builder = CatalogBuilder(0, _FILE)
        for tensor, begin in zip(self._tensors.values(), self._begins):
            start = (0,) * len(tensor.shape)
            builder.add(tensor.key, tensor.dtype, tensor.shape, start, tensor.shape, byte_offset=begin)
        made, kept = builder.build(), stored.checksums.take(rows)
        first = np.append(kept.first, np.full(len(made), kept.first[-1]))
        return replace(
            stored,
            catalog=concat([catalog.take(rows).compact(), made]),
            checksums=Checksums(kept.values, first, stored.checksums.block_bytes),
            file_bytes=np.append(stored.file_bytes, self.size),
            partitions=(),
        )

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Implement the base class; at most to the end of a tensor at a time."""
        if offset >= self.size:
            return 0
        number = bisect.bisect_right(self._begins, offset) - 1
        if number < 0:
            data, place = self._head, offset
        else:
            data, place = self.make(self._names[number]), offset - self._begins[number]
        if place >= len(data):  # between two
            data, place = np.zeros(self._begins[number + 1] - offset, dtype=np.uint8), 0
        count = min(len(buffer), len(data) - place)
        buffer[:count] = memoryview(data[place : place + count])
        with self._lock:
            self.bytes_given += count if number >= 0 else 0
        return count

    def make(self, key: str) -> np.ndarray:
        """Make a tensor; return its bytes, which stay in memory as long as there is room.

        Raises:
            CheckpointError: The transform failed, or its result does not fit.
            CorruptCheckpointError: A source is damaged.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            room = KEPT_BYTES - self._tensors[key].nbytes
            while self._kept and sum(map(len, self._kept.values())) > room:
                self._kept.popitem(last=False)
            found = self._kept[key] = self._make(self._tensors[key])
            return found

    def _make(self, tensor: LogicalTensor) -> np.ndarray:
        import paddle

        sources, targets = self._empty(tensor.sources)
        files = Files(self._backend, self._options, self._stored)
        with quiet_loads():
            describe = lambda: describe_targets(targets, 0)  # noqa: E731
            report = Transfer(
                SoloCommunicator(), files, describe, AS_STORED, context=f"cannot make {tensor.key!r}"
            ).run()
        self.bytes_read += report.bytes_read
        self.bytes_verified += report.bytes_verified
        self.bytes_extra += report.bytes_extra
        self._plan(tensor)
        try:
            with paddle.no_grad():
                made = self._transform.apply(tensor.key, sources, getattr(paddle, tensor.dtype))
        except Exception as error:
            raise self._failed(tensor, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(made, paddle.Tensor):
            raise self._failed(tensor, f"gave a {type(made).__name__}; expected a Tensor")
        got = f"{dtype_name(made)} {list(made.shape)}"
        expected = f"{tensor.dtype} {list(tensor.shape)}"
        if got != expected:
            raise self._failed(tensor, f"gave {got}; expected {expected}, as its logical_metadata() says")
        made = made if device_of(made) is None else made.cpu()
        return host_memory(made if is_contiguous(made) else made.contiguous()).view(np.uint8)

    def _empty(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tensors for sources, as a transform gets them and as they are filled: FP8 numbers come as bits.

        Paddle's reader returns those of safetensors files as uint8.
        """
        sources = empty_tensors(self._stored.catalog, names)
        targets = dict(sources)
        for name, tensor in targets.items():
            dtype = dtype_of(dtype_name(tensor))
            if dtype.name.startswith("float8"):
                bits = sources[name] = empty_on_host(tensor.shape, "uint8")
                targets[name] = host_memory(bits).view(dtype.numpy).reshape(tensor.shape)
        return sources, targets

    def _plan(self, tensor: LogicalTensor) -> None:
        """Inform a transform with a read plan that its sources come whole; Paddle's loader may request parts."""
        plan = getattr(self._transform, "read_plan", None)
        if plan is None:
            return
        whole = LocalTensorMetadata((0,) * len(tensor.shape), tensor.shape, tensor.dtype, tensor.shape)
        call = f"read_plan({tensor.key!r}, force_global=True)"
        try:
            mode = getattr(plan(tensor.key, whole, force_global=True), "mode", None)
        except Exception as error:
            raise self._failed(tensor, f"raised {type(error).__name__}: {error}", call) from error
        if mode != "global":
            raise self._failed(tensor, f"gave a plan of mode {mode!r}; expected 'global', for sources come whole", call)

    def _failed(self, tensor: LogicalTensor, how: str, call: str = "") -> CheckpointError:
        state = "targets may be partly overwritten" if self.touched else "no target was changed"
        what = call or f"apply({tensor.key!r})"
        return CheckpointError(
            f"load_transform.{what} {how}; {state}. Remedy (FC101): correct the transform, or load without it"
        )

    def close(self) -> None:
        """Free the tensors that have been made."""
        with self._lock:
            self._kept.clear()


class _Overlay(Backend):
    """A directory with one more file, which is made when it is read. Nothing is written to it."""

    def __init__(self, inner: Backend, made: MadeTensors) -> None:
        self._inner, self._made = inner, made
        self.path, self.locks, self.has_path, self.replaces = inner.path, inner.locks, inner.has_path, inner.replaces

    def names(self, kind: Kind = "files") -> list[str]:
        return self._inner.names(kind)

    def child(self, name: str) -> Backend:
        return self._inner.child(name)

    def where(self, name: str) -> str:
        return self._inner.where(name)

    def open(self, name: str) -> InputFile:
        return self._made if name == _FILE else self._inner.open(name)

    def create(self, name: str, mode: Mode = "new", size: int | None = None) -> OutputFile:
        return self._inner.create(name, mode, size)

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def make_directory(self) -> None:
        self._inner.make_directory()

    def remove_directory(self) -> None:
        self._inner.remove_directory()

    def sync(self) -> None:
        self._inner.sync()

    def reopen_token(self) -> dict[str, Any]:
        return self._inner.reopen_token()
