"""Rebuild the manifest of a checkpoint from the headers of its data files.

What a manifest has and headers have not is the checksums: they are computed anew, from the data as it is now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import (
    Catalog,
    CatalogBuilder,
    CorruptCheckpointError,
    Order,
    Problem,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.media.backend import fill
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block
from paddle_flexckpt.native.data_file import TOKEN_WINDOW
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.header import DataFileHeader, read_header
from paddle_flexckpt.native.manifest import FORMAT_VERSIONS, Manifest, SaveInfo, merge_parts


class RebuiltManifest(NamedTuple):
    """Hold a manifest that is not written yet, and the names of the id's data files that belong to other saves."""

    manifest: Manifest
    left_out: list[str]


@dataclass(frozen=True)
class _DataFile:
    """Describe one data file: the rank in its name, its name, bytes and header, and where its first tensor begins."""

    rank: int
    name: str
    size: int
    data_start: int
    header: DataFileHeader

    @property
    def token(self) -> str:
        return self.header.info.get("save_token", "")

    @property
    def save(self) -> SaveInfo:
        """Return the save that it is of; for files that agree about it."""
        info = self.header.info
        step = int(info["step"]) if info["step"] else None
        return SaveInfo(self.token, int(info["unique_id"]), int(info["world_size"]), step)


def rebuild_manifest(
    directory: CheckpointDirectory,
    unique_id: int,
    overwrite: bool = False,
    save_token: str | None = None,
    fewer_files: bool = False,
) -> RebuiltManifest:
    """Rebuild the manifest that a checkpoint's data files had; read all of them once, write nothing.

    There may be a manifest with ``overwrite``, and fewer files than ranks with ``fewer_files``. ``save_token`` names
    the save whose files are meant; without it, there has to be one only.

    Raises:
        ValidationError: A manifest is there, or the files do not make up a whole checkpoint of one save.
        CorruptCheckpointError: A file changed while it was read.
        OSError: The file system failed.
    """
    context = f"cannot rebuild the manifest of id {unique_id} in {directory.path!r}"
    manifest_file = directory.manifest_file(unique_id)
    if unique_id in directory.list_ids() and not overwrite:
        problem = Problem("there is a manifest", file=manifest_file, remedy="overwrite=True replaces it")
        raise ValidationError(problem, context)
    names = [(rank, name) for each, rank, name in directory.data_files() if each == unique_id]
    if not names:
        got = f"ids {sorted({each for each, _, _ in directory.data_files()})}"
        raise ValidationError(Problem("there are no data files of this id", got=got, remedy="correct the id"), context)
    files, problems = _read_headers(directory, names, save_token)
    _raise(problems, context)
    token = _choose_save(files, save_token, context)
    chosen = [file for file in files if file.token == token]
    _raise(_disagreements(directory, chosen, unique_id, fewer_files), context)
    parts, problems = _catalogs(directory, chosen)
    _raise(problems, context)
    catalog = concat(parts)
    _raise(validate_shards(catalog), context)
    _raise(validate_coverage(catalog, group_replicas(catalog)).problems, context)
    manifest = merge_parts([_part(directory, file, part) for file, part in zip(chosen, parts)])
    used = {file.name for file in chosen}
    return RebuiltManifest(manifest, [name for _, name in names if name not in used])


def _raise(problems: list[Problem], context: str) -> None:
    if problems:
        raise ValidationError(problems, context)


def _read_headers(
    directory: CheckpointDirectory, names: Iterable[tuple[int, str]], save_token: str | None
) -> tuple[list[_DataFile], list[Problem]]:
    files, problems = [], []
    for rank, name in names:
        path = directory.backend.where(name)
        try:
            with directory.backend.open(name) as file:
                if save_token is not None and save_token.encode() not in file.read(0, TOKEN_WINDOW):
                    continue  # another save's: whether it is whole does not matter
                data = read_header(file)
                files.append(_DataFile(rank, name, file.size, len(data), DataFileHeader.decode(data)))
        except ValueError as error:
            remedy = "restore the file; if it belongs to another save, choose this one by its save_token"
            problems.append(Problem("the header is damaged", rank=rank, file=path, got=str(error), remedy=remedy))
    return files, problems


def _choose_save(files: list[_DataFile], save_token: str | None, context: str) -> str:
    tokens = sorted({file.token for file in files})
    if save_token is None and len(tokens) == 1:
        return tokens[0]
    if save_token in tokens:
        return save_token  # type: ignore[return-value]  # None is in no list of texts
    listed = []
    for token in tokens:
        theirs = [file for file in files if file.token == token]
        step = theirs[0].header.info.get("step") or "unknown"
        listed.append(f"{token} (step {step}): {', '.join(file.name for file in theirs)}")
    what = "there are files of several saves" if save_token is None else f"there are no files of save {save_token!r}"
    raise ValidationError(
        Problem(what, got="; ".join(listed) or "no others", remedy="choose one by its save_token"), context
    )


def _disagreements(
    directory: CheckpointDirectory, files: list[_DataFile], unique_id: int, fewer_files: bool
) -> list[Problem]:
    """Find what files of one save say that does not fit together."""
    first = files[0].header.info
    wanted = {
        "format": "flexckpt",
        "unique_id": str(unique_id),
        "world_size": first.get("world_size"),
        "step": first.get("step"),
    }
    problems = []
    for file in files:
        info = file.header.info
        problem = partial(Problem, rank=file.rank, file=directory.backend.where(file.name))
        for name, value in wanted.items():
            if value is None or info.get(name) != value:
                problems.append(problem(f"a file has another {name}", expected=value, got=info.get(name)))
        version, known = info.get("format_version"), " or ".join(FORMAT_VERSIONS)
        if version not in FORMAT_VERSIONS:
            problems.append(problem("a file has another format_version", expected=known, got=version))
        if sum(other.rank == file.rank for other in files) > 1:
            remedy = "remove the copy"
            problems.append(problem("a rank has several files of one save", remedy=remedy))
    if problems:
        return problems
    if not re.fullmatch("[1-9][0-9]*", first["world_size"]) or not re.fullmatch("(-?[0-9]+)?", first["step"]):
        got = f"{first['world_size']!r} and {first['step']!r}"
        return [Problem("world_size and step are not numbers", rank=files[0].rank, file=files[0].name, got=got)]
    missing = int(first["world_size"]) - len(files)
    if missing < 0 or (missing and not fewer_files):
        problems.append(
            Problem(
                "there are not as many data files as ranks that took part",
                expected=first["world_size"],
                got=f"{len(files)}: {', '.join(file.name for file in files)}",
                remedy="restore the others; if their ranks had nothing to write, pass fewer_files=True",
            )
        )
    return problems


def _catalogs(directory: CheckpointDirectory, files: list[_DataFile]) -> tuple[list[Catalog], list[Problem]]:
    """Return the items of each file, with byte offsets from the start of the file."""
    parts, problems = [], []
    for file in files:
        problem = partial(Problem, rank=file.rank, file=directory.backend.where(file.name))
        try:
            items = _items(file)
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            problems.append(problem("the header is damaged", got=repr(error)))
            continue
        ends = items.byte_offset + items.byte_length
        begins = np.append(file.data_start, ends[:-1]) if len(ends) else ends
        for row in np.flatnonzero(begins != items.byte_offset).tolist():
            key, got = items.key_name(row), int(items.byte_offset[row])
            what = "a shard does not begin where the one before it ends"
            problems.append(problem(what, key, expected=f"byte {begins[row]}", got=f"byte {got}", offset=got))
        end = int(ends[-1]) if len(ends) else file.data_start
        if end != file.size:
            what = "a file has another size than its header says"
            problems.append(problem(what, expected=f"{end} bytes", got=f"{file.size} bytes"))
        parts.append(items)
    return parts, problems


def _items(file: _DataFile) -> Catalog:
    """Return the items of one file.

    Raises:
        ValueError: The header contradicts itself (KeyError, TypeError, OverflowError, IndexError: or lacks something).
    """
    header = file.header
    builder = CatalogBuilder(file.rank, file.name)
    for name in sorted(header.shards, key=lambda name: int(header.entries[name]["data_offsets"][0])):
        shard = header.shards[name]
        flat = shard["flattened_range"]
        builder.add(
            shard["key"],
            shard["dtype"],
            shard["global_shape"],
            shard["global_offset"],
            shard["local_shape"],
            None if flat is None else (int(flat[0]), int(flat[1])),
            int(header.entries[name]["data_offsets"][0]),
            Order.decode(shard["order"]) if "order" in shard else None,
        )
    items = builder.build()
    again = DataFileHeader.of_items(items, file.save)
    if again != header:
        names = sorted(header.entries.keys() | header.shards.keys() | again.entries.keys())
        differing = [
            name
            for name in names
            if (header.entries.get(name), header.shards.get(name)) != (again.entries.get(name), again.shards.get(name))
        ]
        raise ValueError(f"it contradicts itself about {differing or sorted(header.info)}")
    return replace(items, byte_offset=items.byte_offset + file.data_start)


def _part(directory: CheckpointDirectory, file: _DataFile, items: Catalog) -> Manifest:
    """Read the file and return its part of the manifest."""
    path = directory.backend.where(file.name)
    sums: list[int] = []
    buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
    with directory.backend.open(file.name) as stream:
        for begin, length in zip(items.byte_offset.tolist(), items.byte_length.tolist()):
            for first in range(0, length, BLOCK_BYTES):
                view = memoryview(buffer)[: min(BLOCK_BYTES, length - first)]
                if fill(stream, view, begin + first) < len(view):
                    raise CorruptCheckpointError(f"{path} became shorter while it was read")
                sums.append(hash_block(view))
    return Manifest.of_save(file.save, items, sums, {file.name: file.size})
