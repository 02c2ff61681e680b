"""Whole tensors, or boxes of them, as targets: numpy arrays, of which one, or one band, is in memory at a time."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.aoa.placeholders import EMBEDDING, HEADS
from paddle_flexckpt.aoa.statements import FamilyRules
from paddle_flexckpt.catalog import CatalogBuilder, Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.texts import order_warning, replica_warning
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.progress import Meter
from paddle_flexckpt.transfer.agreement import Solo
from paddle_flexckpt.transfer.files import Files, reads_of
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.transfer.options import FileOptions, TransferOptions
from paddle_flexckpt.transfer.plan import split_tiles
from paddle_flexckpt.transfer.targets import Memory, OpenArray, Targets
from paddle_flexckpt.transfer.transfer import Transfer

logger = logging.getLogger("paddle_flexckpt")

# Bytes of the bands of larger tensors, for callers that need no whole tensors.
BAND_BYTES = 64 << 20
# The options of a transfer whose keys are the source's own: nothing is renamed or refused.
AS_STORED = TransferOptions(optimizer_states="ignore", mw_name_compatibility=False, raw_names="trusted")
# The key of a tensor, and a box in it.
TensorBox = tuple[str, Box]


class WholeTensors(Memory):
    """The memory of whole tensors, or of parts, from when each is filled until it is taken.

    Attributes:
        keys: By row, the key of each part.
    """

    one_at_a_time = True
    keys: list[str]

    def __init__(self, rank: int = 0) -> None:
        """Begin without arrays; ``rank``: the rank that fills them."""
        self._rank = rank
        self._arrays: dict[int, np.ndarray] = {}

    def targets(
        self,
        infos: Mapping[str, TensorInfo],
        mapping: TensorMapping | None,
        parts: Sequence[TensorBox] | None = None,
        is_cut: bool = False,
    ) -> Targets:
        """Return the targets.

        Args:
            infos: Shape and dtype by key.
            mapping: The mapping of the statements, compiled without a target; None: the source's own tensors.
            parts: Key and box of each part, in the order in which they are filled. A tensor may have several, with
                others in between. None: all of each tensor.
            is_cut: Whether parts are bands of whole tensors, so that every block is verified, even if each tensor has
                one. It is assumed if one has several.
        """
        parts = whole_parts(infos) if parts is None else parts
        self.keys, self._boxes = [key for key, _ in parts], [box for _, box in parts]
        self._infos = [replace(infos[key], shape=box.shape) for key, box in parts]
        boxes = dict(parts)
        rows = {key: row for row, key in enumerate(boxes)}
        is_cut = is_cut or len(parts) > len(boxes)
        builder = CatalogBuilder(self._rank)
        for key, box in boxes.items():
            info = infos[key]
            place = whole_box(info) if is_cut else box
            builder.add(key, info.dtype, info.shape, place.offset, place.shape)
        no_names, nowhere = ((),) * len(rows), np.zeros((len(rows), 2), dtype=np.int64)
        bands = tuple((rows[key], box) for key, box in parts) if is_cut else ()
        return Targets(builder.build(), no_names, no_names, nowhere, self, mapping, bands)

    def open(self, row: int, fresh: bool) -> OpenArray:
        """Return a new array, and hold it."""
        info = self._infos[row]
        array = self._arrays[row] = np.empty(math.prod(info.shape), dtype=dtype_of(info.dtype).numpy)
        return OpenArray(array)

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


def whole_box(info: TensorInfo) -> Box:
    """Return the box of all of a tensor."""
    return Box((0,) * len(info.shape), info.shape)


def whole_parts(infos: Mapping[str, TensorInfo], part_bytes: int | None = None) -> list[TensorBox]:
    """Return key and box of tensors: of each one all, or parts of its rows of at most so many bytes, in order."""
    parts: list[TensorBox] = []
    for key, info in infos.items():
        box = whole_box(info)
        itemsize = dtype_of(info.dtype).itemsize
        parts += ((key, each) for each in ([box] if part_bytes is None else split_box(box, itemsize, part_bytes)))
    return parts


def split_box(box: Box, itemsize: int, part_bytes: int) -> Iterator[Box]:
    """Yield the boxes of at most so many bytes that make up a box, in the order of its elements."""
    yield from split_tiles(box, max(part_bytes // itemsize, 1), aligned=False) if box.size else (box,)


class PartReader:
    """A reader of parts of a checkpoint's tensors, one after the other: at most one is in memory here."""

    def __init__(
        self,
        directory: Location,
        manifest: Manifest,
        options: FileOptions,
        describe: Callable[[WholeTensors], Targets],
        transfer: TransferOptions = AS_STORED,
    ) -> None:
        """Plan the reads, and check the files' headers and sizes."""
        self._options, self._memory = options, WholeTensors()
        self._files = Files(directory, options, manifest, plain_errors=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._files.closing)
            self._task = Transfer(Solo(), self._files, lambda: describe(self._memory), transfer).prepare()
            self._closing = stack.pop_all()

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the parts' elements; they are freed here before the next part is read."""
        return (self._memory.take(row)[1] for row in self._files.fill(self._task))

    def bands(self) -> Iterator[tuple[str, Box, np.ndarray]]:
        """Yield key, box and elements of each part, likewise."""
        return (self._memory.take_band(row) for row in self._files.fill(self._task))

    def meter(self, phase: str) -> Meter:
        """Return a meter of a phase, on which everything counts that is read from now on."""
        meter = self._options.meter(phase, self._files.planned.needed_bytes)
        self._files.reader.tell(meter)
        return meter

    def report(self) -> dict[str, Any]:
        """Return a report's fields about the reads, of all of them when all parts have been read."""
        return {
            "maybe_fused": self._task.resolution.report()["maybe_fused"],
            "peak_scratch_bytes": self._files.peak_scratch_bytes,
            **reads_of(self._files.reader),
        }

    def warn(self, of_orders: bool = True) -> None:
        """Log which parts are of unknown order, and which were read from replicas."""
        unknown = self._task.resolution.report()["maybe_fused"] if of_orders else []
        if unknown:
            logger.warning(order_warning(self._files.path, unknown))
        if self._files.reader.replicas_used:
            logger.warning(replica_warning(self._files.path, self._files.reader.replicas_used))

    def __enter__(self) -> PartReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()


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
        verify: As in :class:`~paddle_flexckpt.transfer.options.FileOptions`.
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
) -> Generator[tuple[str, Box, np.ndarray], None, None]:
    """Read tensors of a checkpoint, those above 64 MiB in bands of their rows, one at a time.

    Arguments and errors are those of :func:`iterate_tensors`. Where there are bands, blocks are read whole, and
    verified.

    Yields:
        Key, and box and elements of the band: those of a tensor in their order, one after the other.
    """
    return _iterate(directory, manifest, mapping, names, FileOptions(), BAND_BYTES)


def compare_head(aoa_config: Any, directory: Location, manifest: Manifest) -> Any:
    """Return statements; rules of a family know then whether a checkpoint's head has the values of its embedding."""
    if not isinstance(aoa_config, FamilyRules) or not aoa_config.parameters.get("tied"):
        return aoa_config
    infos = tensor_infos(manifest.catalog)
    heads = [key for key in infos if key.endswith(HEADS)][:1]
    for key in [key for key in infos if heads and EMBEDDING.search(key) and infos[key] == infos[heads[0]]]:
        with (
            contextlib.closing(iterate_bands(directory, manifest, None, heads)) as one,
            contextlib.closing(iterate_bands(directory, manifest, None, [key])) as other,
        ):
            if all(mine[2].tobytes() == theirs[2].tobytes() for mine, theirs in zip(one, other)):
                aoa_config = copy.copy(aoa_config)
                aoa_config.is_compared = True
    return aoa_config


def _iterate(
    directory: Location,
    manifest: Manifest,
    mapping: TensorMapping | None,
    names: Iterable[str] | None,
    options: FileOptions,
    band_bytes: int | None,
) -> Generator[tuple[str, Box, np.ndarray], None, None]:
    catalog = manifest.catalog
    chosen = sorted(tensor_infos(catalog, mapping)) if names is None else list(names)

    def describe(memory: WholeTensors) -> Targets:
        made_by = mapping or whole_mapping(None, catalog, chosen)
        there = tensor_infos(catalog, made_by, extra_state=True)
        got = f"{len(there)} keys, such as {sorted(there)[:3]}"
        problems = [Problem("there is no such key", key=name, got=got) for name in chosen if name not in there]
        problems += [Problem("a key is asked for twice", key=name) for name, n in Counter(chosen).items() if n > 1]
        if problems:
            raise ValidationError(problems)
        infos = {name: there[name] for name in chosen}
        return memory.targets(infos, made_by, whole_parts(infos, band_bytes))

    with PartReader(directory, manifest, options, describe) as reader:
        try:
            yield from reader.bands()
        finally:  # the requested tensors need not be all
            reader.warn(of_orders=False)
