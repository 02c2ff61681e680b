"""Export a checkpoint, or what AOA statements make of it, as safetensors files in the style of Hugging Face."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import AoaConfig, TensorInfo
from paddle_flexckpt.aoa.sides import split_state
from paddle_flexckpt.catalog import EXTRA_STATE, Problem, ValidationError, dtype_of
from paddle_flexckpt.engine.files import reads_of
from paddle_flexckpt.engine.mapping import maybe_fused, whole_mapping
from paddle_flexckpt.engine.whole_tensors import WholeTensors
from paddle_flexckpt.foreign.formats import SourceDirectory, open_destination
from paddle_flexckpt.media.backend import Backend, Location, exists, publish
from paddle_flexckpt.native.checksums import VerifyMode, verify_mode
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.report import ExportReport, order_warning, replica_warning

logger = logging.getLogger("paddle_flexckpt")

INDEX_FILE = "model.safetensors.index.json"


def export_safetensors(
    path: Location,
    output: Location,
    aoa_config: AoaConfig | None = None,
    *,
    prefix: str | None = None,
    max_file_bytes: int = 5 << 30,
    unique_id: int | None = None,
    verify: bool | VerifyMode = "read",
    states: bool = False,
    use_replicas: bool = True,
) -> ExportReport:
    """Write a checkpoint as ``model.safetensors``, or as numbered files and ``model.safetensors.index.json``.

    One process does it; Paddle is not needed. At most one tensor, and the operands of one tile of a computed one, are
    in memory.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        output: Where the files go, likewise: a directory that is empty or is not there yet.
        aoa_config: AOA statements, as in :func:`load_state_dict`. What they make and do not touch is written; fused
            parameters that they do not touch in natural order.
        prefix: Only keys that start with this and a dot, which are taken off; after the statements.
        max_file_bytes: Bytes of tensors in one file; a larger tensor has a file for itself.
        unique_id: The checkpoint's id; None takes the highest.
        verify: As in :class:`~paddle_flexckpt.engine.options.LoadOptions`.
        states: Whether optimizer states and a run's extra state are written too.
        use_replicas: As in :class:`~paddle_flexckpt.engine.options.LoadOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: There is no such checkpoint, the output is in use, the statements do not fit, or safetensors
            cannot hold a tensor; nothing was written.
        CorruptCheckpointError: The checkpoint is damaged; nothing is left behind.
        OSError: The file system refused; likewise.
    """
    begin = time.perf_counter()
    sink = open_destination(output)
    if not isinstance(max_file_bytes, int) or isinstance(max_file_bytes, bool) or max_file_bytes < 1:
        raise ValidationError([f"max_file_bytes has to be a positive integer; got {max_file_bytes!r}"])
    verify_mode(verify)
    directory = SourceDirectory(path)
    with contextlib.ExitStack() as stack:
        manifest = stack.enter_context(LockedManifest(directory, unique_id))
        _check_output(sink)
        mapping = whole_mapping(aoa_config, manifest.catalog)
        tensors = WholeTensors(manifest, mapping)
        keys, left_out = _choose(tensors.infos, prefix, states)
        files = _plan_files({name: tensors.infos[key] for name, key in keys.items()}, max_file_bytes)
        unordered = maybe_fused(manifest.catalog, set(keys.values()), mapping)
        order = [name for file in files for name in file.names]
        reader = stack.enter_context(FileReader(directory.backend, manifest, verify, use_replicas))
        tensors.check([keys[name] for name in order], reader)
        planned = time.perf_counter()
        arrays = tensors.iterate([keys[name] for name in order], reader)
        _write_files(sink, files, (array for _, array in arrays))
    end = time.perf_counter()
    if unordered:
        logger.warning(order_warning(directory.path, unordered))
    if reader.replicas_used:
        logger.warning(replica_warning(directory.path, reader.replicas_used))
    return ExportReport(
        source=directory.path,
        unique_id=manifest.unique_id,
        output=sink.path,
        files=[file.name for file in files],
        keys=len(order),
        left_out=left_out,
        unfed=sorted(mapping.unfed) if mapping is not None and states else [],
        total_bytes=sum(file.data_bytes for file in files),
        peak_scratch_bytes=tensors.peak_scratch_bytes,
        maybe_fused=unordered,
        **reads_of(reader),
        seconds={"plan": planned - begin, "write": end - planned, "total": end - begin},
    )


def _check_output(sink: Backend) -> None:
    if sink.names() or sink.names("directories"):
        raise ValidationError([f"{sink.path} is not empty. Remedy: give another output, or empty it"])


def _choose(infos: Mapping[str, TensorInfo], prefix: str | None, states: bool) -> tuple[dict[str, str], int]:
    """Return the keys to write by the names that they get, and how many states are left out."""
    start = f"{prefix}." if prefix else ""
    inside = [key for key in sorted(infos) if key.startswith(start)]
    everything = set(infos)
    chosen = [k for k in inside if states or not (k.startswith(EXTRA_STATE) or split_state(k, everything)[1])]
    problems = [
        Problem(
            "safetensors has no such dtype",
            key=key,
            got=infos[key].dtype,
            remedy="cast it, or leave it out, with an AOA statement",
        )
        for key in chosen
        if dtype_of(infos[key].dtype).trailing > 1
    ]
    names = {key[len(start) :]: key for key in chosen}
    if "__metadata__" in names:
        problems.append(Problem("safetensors has another use for this name", key=names["__metadata__"]))
    if not chosen:
        among = "no key" if not start else f"no key that starts with {start!r}"
        what = "optimizer states and extra state alone" if inside else f"{among} among {len(infos)}"
        remedy = "give states=True" if inside else "correct prefix"
        problems.append(Problem("there is nothing to export", got=what, remedy=remedy))
    if problems:
        raise ValidationError(problems)
    return names, len(inside) - len(chosen)


@dataclass(frozen=True)
class _File:
    """Describe one file of the export, complete but for its data.

    Attributes:
        name: Its name in the output directory.
        names: Names of its tensors, in the order of their data.
        header: The first bytes of it.
        data_bytes: Bytes of its tensors.
    """

    name: str
    names: tuple[str, ...]
    header: bytes
    data_bytes: int


def _plan_files(infos: Mapping[str, TensorInfo], max_file_bytes: int) -> list[_File]:
    """Divide tensors among files: in the order of their names, as many as fit."""
    length = {name: int(np.prod(i.shape, dtype=np.int64)) * dtype_of(i.dtype).itemsize for name, i in infos.items()}
    parts: list[list[str]] = [[]]
    size = 0
    for name in sorted(infos):
        if parts[-1] and size + length[name] > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += length[name]
    files = []
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # Wide elements first, so that all are aligned.
        part.sort(key=lambda name: (-dtype_of(infos[name].dtype).itemsize, name))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in part:
            begin, end = end, end + length[name]
            code = dtype_of(infos[name].dtype).safetensors
            entries[name] = {"dtype": code, "shape": list(infos[name].shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ValidationError(
                f"the header of {file} would have {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}. "
                "Remedy: a smaller max_file_bytes"
            )
        files.append(_File(file, tuple(part), len(text).to_bytes(8, "little") + text, end))
    return files


def _write_files(sink: Backend, files: list[_File], arrays: Iterator[np.ndarray]) -> None:
    """Write all files, none of which shows before it is whole; the index comes last.

    Args:
        sink: The directory.
        files: What to write.
        arrays: The tensors of all files, in order.
    """
    made = not exists(sink)
    sink.make_directory()
    written: list[str] = []
    try:
        for file in files:
            with sink.create(file.name, "replace", size=len(file.header) + file.data_bytes) as stream:
                written.append(file.name)
                stream.write(file.header)
                for _ in file.names:
                    # No name for the array: it is gone before the next one is read.
                    stream.write(memoryview(next(arrays).reshape(-1).view(np.uint8)))
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(file.data_bytes for file in files)},
                "weight_map": dict(sorted((name, file.name) for file in files for name in file.names)),
            }
            publish(sink, INDEX_FILE, (json.dumps(index, ensure_ascii=False, indent=2) + "\n").encode())
        sink.sync()
    except BaseException:
        with contextlib.suppress(OSError):
            for name in written:
                sink.remove(name)
            if made:
                sink.remove_directory()
        raise
