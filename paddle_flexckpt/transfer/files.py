"""Files as a source: plan the reads of a rank's targets, and carry them out row by row.

Tested in tests/transfer/test_files.py and tests/loading/test_policies.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.optimizer_states import is_torch_state
from paddle_flexckpt.planning.exchange_plan import ReadPlan, plan_read
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, uncovered_targets
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.options import FileOptions
from paddle_flexckpt.transfer.piece_columns import PieceColumns
from paddle_flexckpt.transfer.plan import FillPlan
from paddle_flexckpt.transfer.source import Source, Task

CONFIG_FILE = "config.json"
# The counter of torch's optimizers, a tensor for each parameter.
_STEP = ".step"


class Files(Source):
    """A checkpoint all of whose files this rank sees; each rank reads the bytes that its targets need.

    Attributes:
        directory: The checkpoint's directory; set by :meth:`open`.
        manifest: Its manifest; likewise.
        reader: The reader of its files; set by :meth:`open_reader`.
        planned: The reads of this rank; set by :meth:`prepare`.
    """

    directory: CheckpointDirectory
    manifest: Manifest
    reader: FileReader
    planned: ReadPlan
    # The keys whose rows ``open`` reads of a manifest in partitions; None: all.
    _first_keys: Sequence[str] | None = None
    _has_reader = False

    def __init__(
        self,
        location: Location,
        options: FileOptions,
        manifest: Manifest | None = None,
        plain_errors: bool = False,
        reason: str = "",
    ) -> None:
        """Open nothing yet."""
        super().__init__()
        self._location, self._options, self._kept, self._plain_errors = location, options, manifest, plain_errors
        self._reason = reason

    def open(self) -> dict[str, str]:
        """Take the checkpoint's lock and read its manifest; return the checkpoint's identity."""
        self._options.check()
        self.directory = SourceDirectory(self._location)
        self.path, manifest = self.directory.path, self._kept
        if manifest is None:
            with self._reading():
                locked = LockedManifest(self.directory, self._options.unique_id, self._first_keys)
                manifest = self.closing.enter_context(locked)
        self.manifest, self.catalog, self.unique_id = manifest, manifest.catalog, manifest.unique_id
        self.partial = manifest.partial
        return {"checkpoint": f"id {manifest.unique_id} ({manifest.save_token})", "reads": "directly"}

    def settings(self) -> Mapping[str, Any]:
        """Return the model's configuration in the directory; empty if there is none."""
        return read_settings(self.directory)

    def family(self) -> tuple[str, str]:
        """Return the family of models with rules that the configuration names, and its path; "" if there is none."""
        from paddle_flexckpt.aoa.model_rules import known_family

        family = known_family(self.settings()) if self.manifest.origin == "huggingface" else ""
        return family, self.directory.backend.where(CONFIG_FILE)

    def progress(self, key: str) -> tuple[float, tuple[float, ...]] | None:
        """Return the number of steps of a moment: from its program, or from the counter that torch stores beside it."""
        known = self.manifest.progress.get(key)
        steps = None if known is not None or not is_torch_state(key) else self._steps.get(key.rpartition(".")[0])
        return known if steps is None else (steps, ())

    @cached_property
    def _steps(self) -> Mapping[str, float]:
        numbers = [number for number, key in enumerate(self.catalog.keys) if key.endswith(_STEP)]
        single = (self.catalog.size == 1) & (self.catalog.global_shape.prod(axis=1) == 1)
        rows = np.flatnonzero(single & np.isin(self.catalog.key, numbers)).tolist()
        steps, found = dict[str, float](), np.empty(1)
        with FileReader(self.directory.backend, self.manifest, "read", True) as reader:
            for row in rows:
                reader.read(row, StridedCopy((1,), 0, (1,), 0, (1,)), found)
                steps[self.catalog.key_name(row)[: -len(_STEP)]] = float(found[0])
        return steps

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._plain_errors else reading(self.path)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Plan the reads, and check the files' headers and sizes."""
        self.planned = plan_reads(ShardMatcher(self.catalog), task.plan, task.mapping)
        self.open_reader()
        with self._reading():
            self.reader.check_files(self.planned.pieces.source)
        return ()

    def open_reader(self) -> FileReader:
        """Open the reader of the checkpoint's files, and return it."""
        reader = FileReader(self.directory.backend, self.manifest, self._options.verify, self._options.use_replicas)
        self.reader = self.closing.enter_context(reader)
        self._has_reader = True
        return reader

    def move(self, task: Task) -> dict[str, Any]:
        """Read every piece into its target, and compute the computed values."""
        meter = self._options.meter("read", self.planned.needed_bytes)
        self.reader.tell(meter)
        for row in self.fill(task):
            task.memory.filled(row)
        meter.finish()
        counts = {"bytes_needed": self.planned.needed_bytes, "peak_scratch_bytes": self.peak_scratch_bytes}
        method = {"comm_method": "direct", "comm_reason": self._reason}
        return {**counts, "reads": self.reader.count.reads, **reads_of(self.reader), **method}

    @property
    def peak_scratch_bytes(self) -> int:
        """Return the most memory that operands of computed values took at any time."""
        return self._filling.peak_scratch_bytes

    def damaged_files(self) -> list[str]:
        """Return the names of files in which a read found damage."""
        return self.reader.damaged_files if self._has_reader else []

    def damaged_shards(self, names: Collection[str]) -> list[tuple[str, int]]:
        """Check some files, as far as they are here; return file and first byte of all damaged shards."""
        from paddle_flexckpt.native.verify import verify_files

        backend, catalog = self.directory.backend, self.manifest.catalog
        found = verify_files(backend, self.manifest, names={*names} & {*backend.names()})
        rows = {*found.lost_blocks, *np.flatnonzero(np.isin(catalog.file, list(found.lost_files))).tolist()}
        return [(catalog.file_name(row) or "", int(catalog.byte_offset[row])) for row in sorted(rows)]

    def fill(self, task: Task) -> Iterator[int]:
        """Fill the targets; if memory holds one at a time, yield the row of each before the next begins."""
        task.memory.wait()
        self._filling = Filling(task.plan, task.memory, self.planned.pieces.target)
        if self.reader.files.reads_ahead:
            from paddle_flexckpt.transfer.announcing import announce

            with self._reading():
                announce(self.reader, self.planned.pieces, self._filling)
        if task.memory.one_at_a_time:
            yield from self._fill_one_by_one(task.plan)
        else:
            self._read(self.planned.pieces, task.plan)
        self._filling.finish()

    def _fill_one_by_one(self, plan: FillPlan) -> Iterator[int]:
        pieces = self.planned.pieces
        # A target's scratch is filled after the target and before the next one.
        starts = np.flatnonzero(plan.order < plan.targets)
        turns = np.append(starts, len(plan.order))
        edges = np.searchsorted(plan.turn[pieces.target], turns).tolist()
        for row, end, first, stop in zip(plan.order[starts].tolist(), turns[1:].tolist(), edges, edges[1:]):
            self._read(pieces.take(np.arange(first, stop)), plan)
            self._filling.advance_to(end)
            yield row

    def _read(self, pieces: Pieces, plan: FillPlan) -> None:
        with self._reading():
            read_pieces(self.reader, pieces, self._filling, computes=bool(plan.tiles))


def read_settings(directory: CheckpointDirectory) -> Mapping[str, Any]:
    """Return the model's configuration in a checkpoint's directory; empty if there is none."""
    backend = directory.backend
    if CONFIG_FILE not in backend.names():
        return {}
    return settings_of(backend.read(CONFIG_FILE))


def settings_of(text: bytes | None) -> Mapping[str, Any]:
    """Return the configuration that a text has; empty if there is none in it."""
    try:
        settings = json.loads(text or b"{}")
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def reads_of(reader: FileReader) -> dict[str, Any]:
    """Return a report's fields about the reads of a reader."""
    names = ("bytes_read", "bytes_verified", "bytes_extra")
    return {**{name: getattr(reader.count, name) for name in names}, "replicas_used": reader.replicas_used}


def plan_reads(matcher: ShardMatcher, plan: FillPlan, mapping: TensorMapping | None) -> ReadPlan:
    """Plan the reads that fill a rank's targets and scratch, in the order of the rows to fill.

    Raises:
        ValidationError: The source lacks some elements.
    """
    target = plan.in_order
    reads = plan_read(matcher, target, maps=None if mapping is None else mapping.maps)
    problems = uncovered_targets(reads.pieces, target, np.arange(len(target)), plan.covered_in_order)
    if problems:
        raise ValidationError(problems)
    return replace(reads, pieces=replace(reads.pieces, target=plan.order[reads.pieces.target]))


def read_pieces(reader: FileReader, pieces: Pieces, memory: Filling, computes: bool) -> None:
    """Read pieces into their rows.

    Args:
        reader: The reader of the files.
        pieces: The pieces, in the order in which rows are filled.
        memory: The memory of the rows.
        computes: Whether anything is computed from rows.

    Raises:
        CorruptCheckpointError: The files are damaged.
    """
    for first, last in memory.portions(pieces.target):
        if computes and first < last:
            memory.advance(int(pieces.target[first]))
        part = pieces.take(slice(first, last))
        on_device = memory.on_device[part.target]
        if on_device.any():
            from paddle_flexckpt.transfer.buffered_reads import read_through_buffers

            read_through_buffers(reader, part.take(on_device), memory)
            part = part.take(~on_device)
        columns = PieceColumns.of(part, reader.catalog, memory.catalog, memory.addresses[part.target])
        columns.read(reader)
        memory.pieces_done(part.target[columns.direct])
        for piece in np.flatnonzero(~columns.direct).tolist():
            row = int(part.target[piece])
            reader.read(int(part.source[piece]), part.copy(piece), memory.host_storage(row))
            memory.piece_done(row)
