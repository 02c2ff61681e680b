"""Read single tensors of a checkpoint, and slices of them, on demand.

Tested in tests/tools/test_tensor_reader.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from difflib import get_close_matches
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import AoaConfig, TensorInfo, TensorMapping
from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.partition_files import read_partition, read_rows
from paddle_flexckpt.native.partitions import partition_of
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.tools.whole_tensors import PartReader, WholeTensors, compare_head
from paddle_flexckpt.transfer.mapping import permuted, tensor_infos, whole_mapping
from paddle_flexckpt.transfer.options import FileOptions
from paddle_flexckpt.transfer.targets import Targets

# An integer, a slice, ``...``, or a tuple of these; Python 3.9 has no name for the type of the last.
Index = Any


class _Opened(NamedTuple):
    """A manifest with rows, the mapping of the statements, shape and dtype by key, and keys in other orders."""

    manifest: Manifest
    mapping: TensorMapping | None
    infos: dict[str, TensorInfo]
    permuted: Collection[str] = ()

    @classmethod
    def of(cls, manifest: Manifest, aoa_config: AoaConfig | None = None) -> _Opened:
        """Compile statements for the rows of a manifest."""
        mapping = whole_mapping(aoa_config, manifest.catalog)
        return cls(manifest, mapping, tensor_infos(manifest.catalog, mapping, extra_state=True))


class TensorReader:
    """A reader of single tensors of a checkpoint of any format, in one process and without Paddle.

    The checkpoint is kept from removal until :meth:`close`; leaving the context calls it.
    """

    def __init__(
        self,
        path: Location,
        unique_id: int | None = None,
        aoa_config: AoaConfig | None = None,
        *,
        verify: bool | VerifyMode = "read",
        use_replicas: bool = True,
    ) -> None:
        """Open a checkpoint; only its manifest is read.

        A partition of a large manifest is read when one of its keys is needed; with statements, all are read at once.

        Args:
            path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
            unique_id: Its id there; None takes the highest.
            aoa_config: AOA statements; tensors are then the resulting ones.
            verify: As in :class:`~paddle_flexckpt.transfer.options.FileOptions`.
            use_replicas: Likewise.

        Raises:
            ValidationError: There is no such checkpoint, or the statements do not fit.
            CorruptCheckpointError: Its manifest is damaged.
        """
        self._options, self._is_closed = FileOptions(verify=verify, use_replicas=use_replicas), False
        self._directory, self._partitions = SourceDirectory(path), dict[int, _Opened]()
        with contextlib.ExitStack() as stack:
            keys = () if aoa_config is None else None
            self._manifest = stack.enter_context(LockedManifest(self._directory, unique_id, keys))
            rules = compare_head(aoa_config, self._directory.backend, self._manifest)
            self._all = _Opened.of(self._manifest, rules) if self._manifest.has_rows else None
            self._closing = stack.pop_all()

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Return global shape and name of the element type by key; this reads all partitions of a manifest."""
        return dict(self._everything().infos)

    def __contains__(self, key: str) -> bool:
        """Return whether there is a tensor of that name."""
        return key in self._having(key).infos

    def _everything(self) -> _Opened:
        """Return all rows; errors as in :meth:`read`."""
        if self._all is None:
            self._check_open()
            self._all = _Opened.of(read_rows(self._directory.backend, self._manifest))
            self._partitions.clear()
        return self._all

    def _having(self, key: str) -> _Opened:
        """Return rows with all of a key, if it exists: those of its partition, or all; errors as in :meth:`read`."""
        if self._all is not None:
            return self._all
        # Statements that bring a parameter into natural order move its states too.
        parameter, _ = split_state(key, {key.rpartition(".")[0]})
        own, other = partition_of([key, parameter], len(self._manifest.partitions)).tolist()
        opened = self._partition(own)
        is_moved = key in opened.permuted or parameter in self._partition(other).permuted
        return self._everything() if is_moved else opened

    def _partition(self, number: int) -> _Opened:
        """Return the rows of one partition, which is read once."""
        if number not in self._partitions:
            self._check_open()
            rows = read_partition(self._directory.backend, self._manifest, number)
            infos = tensor_infos(rows.catalog, extra_state=True)
            self._partitions[number] = _Opened(rows, None, infos, permuted(rows.catalog))
        return self._partitions[number]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(
                f"the reader of {self._directory.path} is closed. Remedy (FC102): open another TensorReader"
            )

    def read(self, key: str, index: Index = ...) -> np.ndarray:
        """Return a tensor, or a slice of it; of the rest of the tensor, only the rest of blocks is read.

        Args:
            key: Its name.
            index: An integer, a slice with a positive step, ``...``, or a tuple of these, as numpy takes them.

        Returns:
            An array of its own (ml_dtypes' types for those that numpy lacks).

        Raises:
            ValidationError: There is no such key.
            IndexError: The index does not fit the shape, or is something else.
            CorruptCheckpointError: The data is damaged.
            OSError: The file system failed.
            ValueError: The reader is closed.
        """
        self._check_open()
        opened = self._having(key)
        info = opened.infos.get(key)
        if info is None:
            infos = self._everything().infos
            similar = get_close_matches(key, infos, 3) or sorted(infos)[:3]
            got = f"{len(infos)} keys, such as {similar}"
            raise ValidationError([Problem("there is no such key", key=key, got=got)])
        box, rest = _box_of(index, info.shape)
        if not box.size:
            return np.empty(box.shape, dtype=dtype_of(info.dtype).numpy)[rest]

        def describe(memory: WholeTensors) -> Targets:
            return memory.targets({key: info}, opened.mapping, [(key, box)])

        with PartReader(self._directory.backend, opened.manifest, self._options, describe) as reader:
            (array,) = reader.arrays()
            return array[rest]

    def close(self) -> None:
        """Release the checkpoint."""
        self._is_closed = True
        self._closing.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _box_of(index: Index, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box with the elements of an index, and the index within the box.

    Raises:
        IndexError: The index does not fit the shape.
    """
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    for axis, part in enumerate(parts):
        if isinstance(part, bool) or not isinstance(part, (int, np.integer, slice, type(...))):
            raise IndexError(f"axis {axis}: expected an integer, a slice or '...'; got {part!r}")
    if parts.count(...) > 1:
        raise IndexError("an index has at most one '...'")
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) != len(shape):
        raise IndexError(f"{len(parts)} indices for a tensor of shape {list(shape)}")
    offset: list[int] = []
    extents: list[int] = []
    rest: list[Any] = []
    for axis, (part, extent) in enumerate(zip(parts, shape)):
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step < 1:
                raise IndexError(f"axis {axis}: steps have to be positive; got {part}")
            offset.append(start)
            extents.append(max(0, stop - start))
            rest.append(slice(None, None, step))
            continue
        place = int(part)
        if not -extent <= place < extent:
            raise IndexError(f"axis {axis}: {place} is not in a tensor of shape {list(shape)}")
        offset.append(place % extent)
        extents.append(1)
        rest.append(0)
    return Box(tuple(offset), tuple(extents)), tuple(rest)
