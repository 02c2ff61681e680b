"""Whole tensors out of a checkpoint, one at a time, as numpy arrays."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import CatalogBuilder, Problem, ValidationError, dtype_of
from paddle_flexckpt.engine.computation import Computation
from paddle_flexckpt.engine.mapping import stored, whole_mapping
from paddle_flexckpt.engine.plan import Work, plan_work
from paddle_flexckpt.engine.reading import plan_reads, read_pieces
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import ShardMatcher
from paddle_flexckpt.report import replica_warning

logger = logging.getLogger("paddle_flexckpt")

# Tensors that are planned at once: bounds the memory of plans, and how often names are looked up.
PLANNED_AT_ONCE = 256


class WholeTensors:
    """What a checkpoint holds, or what AOA statements make of it, as whole tensors.

    Attributes:
        infos: Shape and dtype of all there is, by key, a run's extra state included.
        peak_scratch_bytes: The most memory that operands of computed values took so far.
    """

    def __init__(self, manifest: Manifest, mapping: TensorMapping | None = None) -> None:
        """Reads nothing yet.

        Args:
            manifest: Of the checkpoint.
            mapping: Compiled without a destination; None takes the checkpoint's own tensors.

        Raises:
            ValidationError: Statements keep what targets have, and there are none.
        """
        self._mapping = mapping
        self._matcher = ShardMatcher(manifest.catalog)
        self.infos = stored(manifest.catalog, True) if mapping is None else mapping.output_infos(True)
        self.peak_scratch_bytes = 0

    def check(self, names: Iterable[str], reader: FileReader) -> None:
        """Checks that some tensors are there, whole, and that their files look right; reads none of their bytes.

        Raises:
            ValidationError: There is no such key, or the checkpoint does not hold all of a tensor.
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
        names = list(names)
        unknown = [name for name in names if name not in self.infos]
        if unknown:
            alike = sorted(self.infos)[:3]
            raise ValidationError(
                [
                    Problem("there is no such key", key=n, got=f"{len(self.infos)} keys, such as {alike}")
                    for n in unknown
                ]
            )
        for part in _portions(names):
            reader.check_files(plan_reads(self._matcher, self._work(part), self._mapping).pieces.source)

    def iterate(self, names: Iterable[str], reader: FileReader) -> Iterator[tuple[str, np.ndarray]]:
        """Reads tensors one after the other.

        Args:
            names: Keys of :attr:`infos`; each stands once.
            reader: Of the checkpoint's files.

        Yields:
            Key and array, in the order of ``names``; at most one array and the operands of a tile are held here.
        """
        for part in _portions(list(names)):
            work = self._work(part)
            pieces = plan_reads(self._matcher, work, self._mapping).pieces
            memory = _Memory(work)
            own = np.flatnonzero(work.origin >= 0)
            # A tensor's scratch stands between it and the next tensor.
            ends = [*own[1:].tolist(), len(work.origin)]
            edges = [0, *np.searchsorted(pieces.target, ends).tolist()]
            for i, (row, end) in enumerate(zip(own.tolist(), ends)):
                read_pieces(reader, pieces.take(np.arange(edges[i], edges[i + 1])), memory, computes=bool(work.tiles))
                memory.advance(end)
                self.peak_scratch_bytes = max(self.peak_scratch_bytes, memory.computation.peak_scratch_bytes)
                yield part[i], memory.release(row).reshape(self.infos[part[i]].shape)

    def _work(self, names: Sequence[str]) -> Work:
        builder = CatalogBuilder(0)
        for name in names:
            info: TensorInfo = self.infos[name]
            builder.add(name, info.dtype, info.shape, (0,) * len(info.shape), info.shape)
        return plan_work(builder.build(), np.arange(len(names)), self._mapping)


class _Memory:
    """Memory of whole tensors and of scratch, made when it is first asked for."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tensors: dict[int, np.ndarray] = {}
        self.computation = Computation(work, self.host_storage, self.piece_done)

    def host_storage(self, row: int) -> np.ndarray:
        """See :class:`~paddle_flexckpt.engine.reading.RowMemory`."""
        if self._work.origin[row] < 0:
            return self.computation.scratch(row)
        if row not in self._tensors:
            catalog = self._work.catalog
            count = math.prod(catalog.shape[row].tolist())
            self._tensors[row] = np.empty(count, dtype=dtype_of(catalog.dtype_name(row)).numpy)
        return self._tensors[row]

    def advance(self, row: int) -> None:
        self.computation.advance(row)

    def piece_done(self, row: int) -> None:
        """Nothing is staged here."""

    def release(self, row: int) -> np.ndarray:
        """The memory of a tensor, which is held here no longer."""
        self.host_storage(row)
        return self._tensors.pop(row)


def _portions(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), PLANNED_AT_ONCE):
        yield names[start : start + PLANNED_AT_ONCE]


def iterate_tensors(
    directory: Location,
    manifest: Manifest,
    mapping: TensorMapping | None = None,
    names: Iterable[str] | None = None,
    *,
    verify: bool | VerifyMode = "read",
    use_replicas: bool = True,
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads whole tensors of a checkpoint, one at a time; exactly the bytes that they need.

    Args:
        directory: The checkpoint's directory.
        manifest: Its manifest.
        mapping: AOA statements, compiled without a destination; None takes the checkpoint's own tensors, in natural
            order.
        names: Keys, after the statements, each once; all but a run's extra state by default, sorted.
        verify: Which blocks are compared with their checksums: ``"read"``, ``"full"`` or ``"off"``, as in
            :func:`export_safetensors`.
        use_replicas: Whether replicas are read where something is damaged, as there.

    Yields:
        Key and array (ml_dtypes' types for those that numpy lacks). At most one array, and the operands of one tile of
        a computed one, are held here.

    Raises:
        ValidationError: There is no such key (before anything is read), or statements keep what targets have.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    chosen = sorted(mapping.output_infos() if mapping else stored(manifest.catalog)) if names is None else list(names)
    tensors = WholeTensors(manifest, mapping or whole_mapping(None, manifest.catalog, chosen))
    with FileReader(directory, manifest, verify, use_replicas) as reader:
        tensors.check(chosen, reader)
        try:
            yield from tensors.iterate(chosen, reader)
        finally:  # whoever asks for tensors need not ask for all of them
            if reader.replicas_used:
                logger.warning(replica_warning(open_backend(directory).path, reader.replicas_used))
