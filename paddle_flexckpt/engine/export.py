"""Export a checkpoint, after AOA statements if given, as safetensors files in the style of Hugging Face."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from types import TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import AoaConfig
from paddle_flexckpt.engine.agreement import Solo
from paddle_flexckpt.engine.files import Files
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import ALONE, ExportOptions, takes
from paddle_flexckpt.engine.targets import Targets
from paddle_flexckpt.engine.tensor_files import INDEX_FILE, OutputDirectory, choose_tensors, divide, make_index
from paddle_flexckpt.engine.transfer import Transfer, quiet_loads
from paddle_flexckpt.engine.whole_tensors import CHOSEN, WholeTensors
from paddle_flexckpt.foreign.formats import open_destination
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.observers import observed
from paddle_flexckpt.report import ExportReport, LoadReport

# With the operands of a tile, and what the files' own reader and writer hold, an export stays below 256 MiB.
BAND_BYTES = 128 << 20
# The fields of the load's report in this report.
_OF_LOAD = (
    *("source", "unique_id", "keys", "bytes_read", "bytes_verified", "bytes_extra"),
    *("peak_scratch_bytes", "maybe_fused", "replicas_used"),
)


@takes(ExportOptions, path=ALONE, output=ALONE)
@observed("export", "path")
def export_safetensors(
    path: Location, output: Location, aoa_config: AoaConfig | None = None, **options: Any
) -> ExportReport:
    """Write a checkpoint as ``model.safetensors``, or as numbered files and ``model.safetensors.index.json``.

    One process exports, without Paddle. It holds at most one tensor, or a band of 128 MiB of a larger one, and the
    operands of one tile of a computed one. With AOA statements, the tensors that they make and those that they do not
    touch are written; untouched fused parameters get natural order.

    If any tensor is larger than 128 MiB, ``verify="read"`` is ``"full"``: bands end in the middle of blocks. Where rows
    of such a tensor are columns of what is stored, as after ``^T``, all of that is read for each band.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        output: The destination, likewise: a directory that is empty or is not there yet.
        **options: Like ``aoa_config``, of :class:`~paddle_flexckpt.engine.options.ExportOptions`.

    Returns:
        The report.

    Raises:
        ValidationError: There is no such checkpoint, the output is in use, the statements do not fit, or safetensors
            cannot hold a tensor; nothing was written.
        CorruptCheckpointError: The checkpoint is damaged; nothing is left behind.
        OSError: The file system refused; likewise.
    """
    begin = time.perf_counter()
    asked = ExportOptions(aoa_config=aoa_config, **options)
    source = Files(path, asked, plain_errors=True)
    source.phase = "write"
    with quiet_loads(), _Export(open_destination(output), source, asked) as export:
        return export.report(Transfer(Solo(), source, export.describe, CHOSEN, begin=begin).run())


class _Export(WholeTensors):
    """The writer of an export: each file appears when it is complete; the index comes last.

    If the context is left by an error, all files are removed.
    """

    _left = 0

    def __init__(self, sink: Backend, source: Files, options: ExportOptions) -> None:
        super().__init__(BAND_BYTES)
        self._output, self._source, self._options = OutputDirectory(sink), source, options

    def __enter__(self) -> _Export:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._output.undo()

    def describe(self) -> Targets:
        """Check the output, choose tensors, and divide them among files; return them as targets."""
        self._output.check_unused()
        self._mapping = whole_mapping(self._options.aoa_config, self._source.catalog)
        infos = tensor_infos(self._source.catalog, self._mapping, extra_state=True)
        keys, self._left_out = choose_tensors(infos, self._options.start, self._options.states)
        self._files = divide({name: infos[key] for name, key in keys.items()}, self._options.max_file_bytes)
        self._next = iter(self._files)
        order = [keys[name] for file in self._files for name in file.names]
        targets = self.targets({key: infos[key] for key in order}, self._mapping)
        count = Counter(self.keys)
        self._bands = {name: count[key] for name, key in keys.items()}
        return targets

    def filled(self, row: int) -> None:
        """Write a tensor, or a band of one, after the one before."""
        if not self._left:
            self._begin()
        # No name for the array: it is freed before the next one is read.
        self._output.open(self._file).write(memoryview(self.take(row)[1].ravel().view(np.uint8)))
        self._left -= 1
        if not self._left:
            self._output.finish()

    def _begin(self) -> None:
        """Begin the next file."""
        self._file = next(self._next)
        if self._file is self._files[0]:
            self._output.make()
        self._left = sum(map(self._bands.__getitem__, self._file.names))

    def finish(self, untouched: Collection[str]) -> None:
        """Write the index."""
        if len(self._files) > 1:
            self._output.publish(INDEX_FILE, make_index(self._files))
        self._output.backend.sync()

    def report(self, done: LoadReport) -> ExportReport:
        """Return the report."""
        return ExportReport(
            **{name: getattr(done, name) for name in _OF_LOAD},
            output=self._output.backend.path,
            files=[file.name for file in self._files],
            left_out=self._left_out,
            unfed=sorted(self._mapping.unfed) if self._mapping is not None and self._options.states else [],
            total_bytes=sum(file.data_bytes for file in self._files),
            seconds={"write" if name == "read" else name: value for name, value in done.seconds.items()},
        )
