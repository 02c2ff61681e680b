"""Read single tensors of a checkpoint, and slices of them, when they are asked for.

Tested in tests/engine/test_tensor_reader.py.
"""

from __future__ import annotations

import contextlib
from difflib import get_close_matches
from types import TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import AoaConfig, TensorInfo
from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.engine.agreement import Solo
from paddle_flexckpt.engine.files import Files
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import FileOptions
from paddle_flexckpt.engine.transfer import Transfer
from paddle_flexckpt.engine.whole_tensors import CHOSEN, WholeTensors
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.directory import LockedManifest

# An integer, a slice, ``...``, or a tuple of these; Python 3.9 has no name for the type of the last.
Index = Any


class TensorReader:
    """Read tensors of a checkpoint of any format, in one process and without Paddle.

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
        """Open a checkpoint; nothing but its manifest is read.

        Args:
            path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
            unique_id: Its id there; None takes the highest.
            aoa_config: AOA statements; tensors are then those that they make, and those that they leave alone.
            verify: As in :class:`~paddle_flexckpt.engine.options.FileOptions`.
            use_replicas: Likewise.

        Raises:
            ValidationError: There is no such checkpoint, or the statements do not fit.
            CorruptCheckpointError: Its manifest is damaged.
        """
        self._options, self._is_closed = FileOptions(verify=verify, use_replicas=use_replicas), False
        self._directory = SourceDirectory(path)
        with contextlib.ExitStack() as stack:
            self._manifest = stack.enter_context(LockedManifest(self._directory, unique_id))
            self._mapping = whole_mapping(aoa_config, self._manifest.catalog)
            self._infos = tensor_infos(self._manifest.catalog, self._mapping, extra_state=True)
            self._closing = stack.pop_all()

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Return global shape and name of the element type by key."""
        return dict(self._infos)

    def read(self, key: str, index: Index = ...) -> np.ndarray:
        """Return a tensor, or a slice of it; what of it is not asked for is not read, but for the rest of blocks.

        Args:
            key: Its name.
            index: An integer, a slice with a positive step, ``...``, or a tuple of these, as numpy takes them.

        Returns:
            An array of its own (ml_dtypes' types for those that numpy lacks).

        Raises:
            ValidationError: There is no such key.
            IndexError: The index does not fit the shape, or is something else.
            CorruptCheckpointError: What was read is damaged.
            ValueError: The reader is closed.
        """
        if self._is_closed:
            raise ValueError(f"the reader of {self._directory.path} is closed. Remedy: open another TensorReader")
        info = self._infos.get(key)
        if info is None:
            similar = get_close_matches(key, self._infos, 3) or sorted(self._infos)[:3]
            got = f"{len(self._infos)} keys, such as {similar}"
            raise ValidationError([Problem("there is no such key", key=key, got=got)])
        box, rest = _box_of(index, info.shape)
        if not box.size:
            return np.empty(box.shape, dtype=dtype_of(info.dtype).numpy)[rest]
        memory = WholeTensors()
        source = Files(self._directory.backend, self._options, self._manifest, plain_errors=True)
        with source.closing:
            targets = memory.targets({key: info}, self._mapping, {key: box})
            task = Transfer(Solo(), source, lambda: targets, CHOSEN).prepare()
            (row,) = source.fill(task)
            return memory.take(row)[1][rest]

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._is_closed = True
        self._closing.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _box_of(index: Index, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that has what an index asks for, and the index of that in the box.

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
