"""Read whole tensors out of a checkpoint, one at a time, as numpy arrays."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Problem, ValidationError, dtype_of
from paddle_flexckpt.engine.files import plan_reads, read_pieces
from paddle_flexckpt.engine.filling import Filling
from paddle_flexckpt.engine.mapping import stored, whole_mapping
from paddle_flexckpt.engine.plan import FillPlan, plan_fill
from paddle_flexckpt.engine.targets import Memory
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
    """Read what a checkpoint holds, or what AOA statements make of it, as whole tensors.

    Attributes:
        infos: Shape and dtype of all there is, by key, a run's extra state included.
        peak_scratch_bytes: The most memory that operands of computed values took so far.
    """

    def __init__(self, manifest: Manifest, mapping: TensorMapping | None = None) -> None:
        """Read nothing yet.

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
        """Check that some tensors are there, whole, and that their files look right; reads none of their bytes.

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
            reader.check_files(plan_reads(self._matcher, self._plan(part), self._mapping).pieces.source)

    def iterate(self, names: Iterable[str], reader: FileReader) -> Iterator[tuple[str, np.ndarray]]:
        """Read tensors one after the other.

        Args:
            names: Keys of :attr:`infos`; each stands once.
            reader: Of the checkpoint's files.

        Yields:
            Key and array, in the order of ``names``; at most one array and the operands of a tile are held here.
        """
        for part in _portions(list(names)):
            plan = self._plan(part)
            pieces = plan_reads(self._matcher, plan, self._mapping).pieces
            filling = Filling(plan, _Arrays(plan.catalog))
            # A tensor's scratch is filled after it, and before the next tensor.
            ends = [*plan.turn[1 : plan.targets].tolist(), len(plan.order)]
            edges = [0, *np.searchsorted(plan.turn[pieces.target], ends).tolist()]
            for row, end in enumerate(ends):
                own = pieces.take(np.arange(edges[row], edges[row + 1]))
                read_pieces(reader, own, filling, computes=bool(plan.tiles))
                filling.advance_to(end)
                self.peak_scratch_bytes = max(self.peak_scratch_bytes, filling.peak_scratch_bytes)
                yield part[row], filling.release(row).reshape(self.infos[part[row]].shape)

    def _plan(self, names: Sequence[str]) -> FillPlan:
        builder = CatalogBuilder(0)
        for name in names:
            info: TensorInfo = self.infos[name]
            builder.add(name, info.dtype, info.shape, (0,) * len(info.shape), info.shape)
        return plan_fill(builder.build(), np.arange(len(names)), self._mapping)


@dataclass
class _Array:
    """Show a fresh array as an open target."""

    array: np.ndarray
    staged: bool = False

    def store(self) -> None:
        """Do nothing: it is no copy."""


class _Arrays(Memory):
    """Make the memory of whole tensors when it is first asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def open(self, row: int, fresh: bool) -> _Array:
        """Return a fresh array."""
        count = math.prod(self._catalog.shape[row].tolist())
        return _Array(np.empty(count, dtype=dtype_of(self._catalog.dtype_name(row)).numpy))


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
    """Read whole tensors of a checkpoint, one at a time; exactly the bytes that they need.

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
