"""Export a checkpoint, after AOA statements if given, as safetensors files in the style of Hugging Face."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.aoa import AoaConfig
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_destination
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.observers import observed
from paddle_flexckpt.report import ExportReport
from paddle_flexckpt.tools.companion_files import find_companions, quantization_notes
from paddle_flexckpt.tools.tensor_files import (
    INDEX_FILE,
    OutputDirectory,
    TensorFile,
    choose_tensors,
    divide,
    make_index,
)
from paddle_flexckpt.tools.whole_tensors import PartReader, WholeTensors, compare_head, whole_parts
from paddle_flexckpt.transfer.codes import Codes
from paddle_flexckpt.transfer.files import CONFIG_FILE, read_settings
from paddle_flexckpt.transfer.options import ALONE, ExportOptions, takes
from paddle_flexckpt.transfer.targets import Targets

# With the operands of a tile, and what the files' own reader and writer hold, an export stays below 256 MiB.
BAND_BYTES = 128 << 20


@takes(ExportOptions, path=ALONE, output=ALONE)
@observed("export", "path")
def export_safetensors(
    path: Location, output: Location, aoa_config: AoaConfig | None = None, **options: Any
) -> ExportReport:
    """Write a checkpoint as ``model.safetensors``, or as numbered files and ``model.safetensors.index.json``.

    ::

        fc.export_safetensors("run/shards", "exported")  # the parameters, whole
        fc.export_safetensors("run/shards", "with_states", states=True)

    Files that a model is used with are copied too: ``config.json``, and those that a conversion copies. One process
    exports, without Paddle. It holds at most one tensor, or a band of 128 MiB of a larger one, and the
    operands of one tile of a computed one. With AOA statements, the tensors that they make and those that they do not
    touch are written; untouched fused parameters get natural order.

    Where rows of a tensor larger than 128 MiB are columns of what is stored, as after ``^T``, all of that is read for
    each band.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        output: The destination, likewise: a directory that is empty or is not there yet.
        **options: Like ``aoa_config``, of :class:`~paddle_flexckpt.transfer.options.ExportOptions`.

    Returns:
        The report.

    Raises:
        ValidationError: There is no such checkpoint, the output is in use, the statements do not fit, or safetensors
            cannot hold a tensor; nothing was written.
        CorruptCheckpointError: The checkpoint is damaged; nothing is left behind.
        OSError: The file system refused; nothing is left behind.
    """
    begin = time.perf_counter()
    asked = ExportOptions(aoa_config=aoa_config, **options)
    asked.check()
    out, directory = OutputDirectory(open_destination(output)), SourceDirectory(path)
    with LockedManifest(directory, asked.unique_id) as manifest:
        out.check_unused()
        beside = find_companions(directory.backend, manifest.catalog.files, not directory.is_file, (CONFIG_FILE,))
        chosen = choose_tensors(
            manifest.catalog,
            compare_head(asked.aoa_config, directory.backend, manifest),
            asked.start,
            asked.states,
            settings=lambda: read_settings(directory),
        )
        files = divide(chosen.infos, asked.max_file_bytes)
        parts = [whole_parts({chosen.keys[n]: chosen.infos[n] for n in file.names}, BAND_BYTES) for file in files]
        infos = {chosen.keys[name]: info for name, info in chosen.infos.items()}

        def describe(memory: WholeTensors) -> Targets:
            return memory.targets(infos, chosen.mapping, list(itertools.chain(*parts)))

        with PartReader(directory.backend, manifest, asked, describe) as reader, out:
            planned = time.perf_counter()
            out.make()
            for name in beside.copied:
                out.publish(name, directory.backend.read(name))
            _write_files(out, files, [len(each) for each in parts], reader)
            out.backend.sync()
        done = reader.report()
        reader.warn()
    end = time.perf_counter()
    settings = read_settings(directory) if CONFIG_FILE in beside.copied else {}
    dequantizes = Codes(manifest.catalog, chosen.mapping).are_dequantized
    return ExportReport(
        source=directory.path,
        unique_id=manifest.unique_id,
        output=out.backend.path,
        files=[file.name for file in files],
        keys=len(chosen.keys),
        left_out=chosen.left_out,
        unfed=sorted(chosen.mapping.unfed) if chosen.mapping is not None and asked.states else [],
        total_bytes=sum(file.data_bytes for file in files),
        copied=[*beside.copied],
        notes=[*quantization_notes(settings, dequantizes), *beside.notes()],
        seconds={"plan": planned - begin, "write": end - planned, "total": end - begin},
        **done,
    )


def _write_files(out: OutputDirectory, files: Sequence[TensorFile], lengths: Sequence[int], reader: PartReader) -> None:
    """Write files, each with the next arrays of the reader in the given number, and the index of several files."""
    meter = reader.meter("write")
    arrays = reader.arrays()
    for file, length in zip(files, lengths):
        out.write(file, itertools.islice(arrays, length))
    next(arrays, None)  # the end of what fills them
    meter.finish()
    if len(files) > 1:
        out.publish(INDEX_FILE, make_index(files))
