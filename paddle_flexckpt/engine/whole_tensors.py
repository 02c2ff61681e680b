"""Whole tensors, or boxes of them, as targets: numpy arrays, of which one, or one band, is in memory at a time."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import CatalogBuilder, Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.texts import replica_warning
from paddle_flexckpt.engine.agreement import Solo
from paddle_flexckpt.engine.files import Files
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import FileOptions, TransferOptions
from paddle_flexckpt.engine.plan import split_tiles
from paddle_flexckpt.engine.targets import Memory, Targets
from paddle_flexckpt.engine.transfer import Transfer
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.manifest import Manifest

logger = logging.getLogger("paddle_flexckpt")

# Bytes of the bands of larger tensors, for callers that need no whole tensors.
BAND_BYTES = 64 << 20
# Callers that read whole tensors have chosen the keys, and have their names from the source.
CHOSEN = TransferOptions(optimizer_states="ignore", mw_name_compatibility=False, raw_names="trusted")


@dataclass
class _Array:
    """A new array as an open target."""

    array: np.ndarray
    staged: bool = False

    def store(self) -> None:
        """Do nothing: it is not a copy."""


class WholeTensors(Memory):
    """The memory of whole tensors, or of bands, from when each is filled until it is taken.

    Attributes:
        keys: By row, the key of each band; of a tensor that is filled whole, once.
    """

    one_at_a_time = True
    keys: list[str]

    def __init__(self, band_bytes: int | None = None, rank: int = 0) -> None:
        """Begin without arrays.

        Args:
            band_bytes: Larger tensors are filled in bands of their rows, in order. None: no bands.
            rank: The rank that fills them.
        """
        self._band_bytes, self._rank = band_bytes, rank
        self._arrays: dict[int, np.ndarray] = {}

    def targets(
        self, infos: Mapping[str, TensorInfo], mapping: TensorMapping | None, boxes: Mapping[str, Box] | None = None
    ) -> Targets:
        """Return the targets.

        Args:
            infos: Shape and dtype by key, in the order in which tensors are filled.
            mapping: The mapping of the statements, compiled without a target; None: the source's own tensors.
            boxes: The box to fill of a tensor, by key; by default all of it.
        """
        builder, self.keys, self._infos, self._boxes = CatalogBuilder(self._rank), [], [], list[Box]()
        bands: list[tuple[int, Box]] = []
        for row, (key, info) in enumerate(infos.items()):
            box = (boxes or {}).get(key) or Box((0,) * len(info.shape), info.shape)
            builder.add(key, info.dtype, info.shape, box.offset, box.shape)
            limit = box.size if self._band_bytes is None else self._band_bytes // dtype_of(info.dtype).itemsize
            for band in split_tiles(box, max(limit, 1), aligned=False) if box.size else (box,):
                bands.append((row, band))
                self.keys.append(key)
                self._boxes.append(band)
                self._infos.append(replace(info, shape=band.shape))
        no_names, nowhere = ((),) * len(infos), np.zeros((len(infos), 2), dtype=np.int64)
        some = tuple(bands) if len(bands) > len(infos) else ()
        return Targets(builder.build(), no_names, no_names, nowhere, self, mapping, some)

    def parts(
        self, infos: Mapping[str, TensorInfo], mapping: TensorMapping | None, parts: Sequence[tuple[str, Box]]
    ) -> Targets:
        """Return targets that are filled in boxes; a tensor may have several, with others in between.

        Args:
            infos: Shape and dtype by key, of those that ``parts`` name.
            mapping: As in :meth:`targets`.
            parts: Key and box of each part, in the order in which they are filled.
        """
        builder = CatalogBuilder(self._rank)
        for key, info in infos.items():
            builder.add(key, info.dtype, info.shape, (0,) * len(info.shape), info.shape)
        rows = {key: row for row, key in enumerate(infos)}
        self.keys, self._boxes = [key for key, _ in parts], [box for _, box in parts]
        self._infos = [replace(infos[key], shape=box.shape) for key, box in parts]
        no_names, nowhere = ((),) * len(infos), np.zeros((len(infos), 2), dtype=np.int64)
        bands = tuple((rows[key], box) for key, box in parts)
        return Targets(builder.build(), no_names, no_names, nowhere, self, mapping, bands)

    def open(self, row: int, fresh: bool) -> _Array:
        """Return a new array, and hold it."""
        info = self._infos[row]
        array = self._arrays[row] = np.empty(math.prod(info.shape), dtype=dtype_of(info.dtype).numpy)
        return _Array(array)

    def take(self, row: int) -> tuple[str, np.ndarray]:
        """Return key and array of a filled tensor, or band, and release it."""
        key, info = self.keys[row], self._infos[row]
        array = self._arrays.pop(row, None)
        if array is None:  # without elements, so that nothing filled it
            array = np.empty(0, dtype=dtype_of(info.dtype).numpy)
        return key, array.reshape(info.shape)

    def take_band(self, row: int) -> tuple[str, Box, np.ndarray]:
        """Return the result of :meth:`take`, and its box in the tensor."""
        key, array = self.take(row)
        return key, self._boxes[row], array


def iterate_tensors(
    directory: Location,
    manifest: Manifest,
    mapping: TensorMapping | None = None,
    names: Iterable[str] | None = None,
    *,
    verify: bool | VerifyMode = "read",
    use_replicas: bool = True,
) -> Iterator[tuple[str, np.ndarray]]:
    """Read whole tensors of a checkpoint, one at a time, and only the bytes that they need.

    Args:
        directory: The checkpoint's directory.
        manifest: Its manifest.
        mapping: AOA statements, compiled without a destination; None takes the checkpoint's own tensors, in natural
            order.
        names: Keys, after the statements, each once; all but a run's extra state by default, sorted.
        verify: As in :class:`~paddle_flexckpt.engine.options.FileOptions`.
        use_replicas: Likewise.

    Yields:
        Key and array (ml_dtypes' types for those that numpy lacks). At most one array, and the operands of one tile of
        a computed one, are held here.

    Raises:
        ValidationError: There is no such key (before anything is read), or statements keep values of targets.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    options = FileOptions(verify=verify, use_replicas=use_replicas)
    with contextlib.closing(_iterate(directory, manifest, mapping, names, options, None)) as tensors:
        for key, _, array in tensors:
            yield key, array
            del array


def iterate_bands(
    directory: Location, manifest: Manifest, mapping: TensorMapping | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Box, np.ndarray]]:
    """Read tensors of a checkpoint, those above 64 MiB in bands of their rows, one at a time.

    Arguments and errors are those of :func:`iterate_tensors`. Where there are bands, blocks are read whole, and
    verified.

    Yields:
        Key, and box and elements of the band: those of a tensor in their order, one after the other.
    """
    return _iterate(directory, manifest, mapping, names, FileOptions(), BAND_BYTES)


def _iterate(
    directory: Location,
    manifest: Manifest,
    mapping: TensorMapping | None,
    names: Iterable[str] | None,
    options: FileOptions,
    band_bytes: int | None,
) -> Generator[tuple[str, Box, np.ndarray], None, None]:
    memory, catalog = WholeTensors(band_bytes), manifest.catalog
    chosen = sorted(tensor_infos(catalog, mapping)) if names is None else list(names)
    source = Files(directory, options, manifest, plain_errors=True)

    def describe() -> Targets:
        made_by = mapping or whole_mapping(None, catalog, chosen)
        there = tensor_infos(catalog, made_by, extra_state=True)
        got = f"{len(there)} keys, such as {sorted(there)[:3]}"
        problems = [Problem("there is no such key", key=name, got=got) for name in chosen if name not in there]
        problems += [Problem("a key is asked for twice", key=name) for name, n in Counter(chosen).items() if n > 1]
        if problems:
            raise ValidationError(problems)
        return memory.targets({name: there[name] for name in chosen}, made_by)

    with source.closing:
        task = Transfer(Solo(), source, describe, CHOSEN).prepare()
        try:
            for row in source.fill(task):
                yield memory.take_band(row)
        finally:  # the requested tensors need not be all
            if source.reader.replicas_used:
                logger.warning(replica_warning(source.path, source.reader.replicas_used))
