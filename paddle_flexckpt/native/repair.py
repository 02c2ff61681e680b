"""Rebuild the manifest of a checkpoint from the headers of its data files.

Headers lack only the checksums: they are computed anew, from the data as it is now. A manifest that can be read, if
only in part, is evidence: the files are compared with it, and a save that has lost a file, or part of which is damaged,
is not repaired. If the manifest is lost, the companion lists the files that there were.
"""

from __future__ import annotations

import contextlib
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
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.media.backend import fill
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block
from paddle_flexckpt.native.data_file import TOKEN_WINDOW, DataFileHeader, read_header_bytes
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import FORMAT_VERSIONS, Manifest, SaveInfo, merge_parts
from paddle_flexckpt.native.partition_files import merge_rows, read_partition
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import save_of
from paddle_flexckpt.native.verify import REMEDY


class RebuiltManifest(NamedTuple):
    """A manifest that is not written yet, and the names of the id's data files that belong to other saves."""

    manifest: Manifest
    left_out: list[str]


@dataclass(frozen=True)
class _DataFile:
    """One data file: the rank in its name, its name, bytes and header, and where its first tensor begins."""

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
        """Return the save of a file, or of files that agree about it."""
        info = self.header.info
        step = int(info["step"]) if info["step"] else None
        return SaveInfo(self.token, int(info["unique_id"]), int(info["world_size"]), step)


def rebuild_manifest(
    directory: SaveDirectory,
    unique_id: int,
    overwrite: bool = False,
    save_token: str | None = None,
    fewer_files: bool = False,
) -> RebuiltManifest:
    """Rebuild the manifest that a checkpoint's data files had; read all of them once, write nothing.

    ``overwrite`` allows an existing manifest, and ``fewer_files`` fewer files than ranks. ``save_token`` names the save
    whose files are used; without it, there has to be only one save, or one whose manifest is in place.

    Raises:
        ValidationError: A manifest exists, or the files do not make up a whole checkpoint of one save, or they differ
            from the manifest in place.
        CorruptCheckpointError: A file changed while it was read.
        OSError: The file system failed.
    """
    context = f"cannot rebuild the manifest of id {unique_id} in {directory.path!r}"
    is_there = unique_id in directory.list_ids()
    known = _read_known(directory, unique_id) if is_there else None
    if is_there and not overwrite:
        _raise_if_any([_there_already(directory, unique_id, known)], context)
    names = [(rank, name) for each, rank, name in directory.data_files() if each == unique_id]
    if not names:
        got = f"ids {sorted({each for each, _, _ in directory.data_files()})}"
        raise ValidationError(
            Problem("there are no data files of this id", got=got, code="FC306", remedy="correct the id"), context
        )
    files, problems = _read_headers(directory, names, save_token)
    _raise_if_any(problems, context)
    token = _choose_save(files, save_token, known, context)
    chosen = [file for file in files if file.token == token]
    known = known if known is not None and known.save_token == token else None
    _raise_if_any(_disagreements(directory, chosen, unique_id), context)
    parts, problems = _catalogs(directory, chosen)
    _raise_if_any(problems, context)
    catalog = concat(parts)
    problems, partial_text = _missing_files(directory, chosen, catalog, known)
    _raise_if_any([] if partial_text and fewer_files else problems, context)
    _raise_if_any(validate_shards(catalog), context)
    holes = validate_coverage(catalog, group_replicas(catalog)).problems
    _raise_if_any(
        [
            replace(hole, code="FC306", remedy="restore the files that are missing, or load another checkpoint")
            for hole in holes
        ],
        context,
    )
    block_bytes = BLOCK_BYTES if known is None else known.checksums.block_bytes
    manifest = merge_parts([_part(directory, file, part, block_bytes) for file, part in zip(chosen, parts)])
    _raise_if_any([] if known is None else _differences(directory, known, manifest), context)
    used = {file.name for file in chosen}
    return RebuiltManifest(replace(manifest, partial=partial_text), [name for _, name in names if name not in used])


def _read_known(directory: CheckpointDirectory, unique_id: int) -> Manifest | None:
    """Return the manifest in place, with the rows of those partitions that can be read; None if it cannot be read."""
    try:
        manifest = directory.read_committed(unique_id, ())
    except (FileNotFoundError, CorruptCheckpointError):
        return None
    read = []
    for number in range(len(manifest.partitions)):
        with contextlib.suppress(CorruptCheckpointError):
            read.append(read_partition(directory.backend, manifest, number))
    return merge_rows(manifest, read)


def _there_already(directory: CheckpointDirectory, unique_id: int, known: Manifest | None) -> Problem:
    """Return the problem of a manifest in place; the remedy depends on whether it can be read."""
    what, file = "there is a manifest", directory.manifest_file(unique_id)
    if known is None or not known.has_rows or known.partial:
        return Problem(what, file=file, code="FC306", remedy="overwrite=True replaces it")
    what += f" of save {known.save_token}, and it can be read: a repair would find nothing that it does not say"
    return Problem(what, file=file, code="FC306", remedy="verify_checkpoint() lists what is damaged")


def _raise_if_any(problems: list[Problem], context: str) -> None:
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
                    continue  # the manifest is of another save: whether it is whole does not matter
                data = read_header_bytes(file)
                files.append(_DataFile(rank, name, file.size, len(data), DataFileHeader.decode(data)))
        except ValueError as error:
            remedy = "restore the file; if it belongs to another save, choose this one by its save_token"
            problems.append(
                Problem("the header is damaged", rank=rank, file=path, got=str(error), code="FC306", remedy=remedy)
            )
    return files, problems


def _choose_save(files: list[_DataFile], save_token: str | None, known: Manifest | None, context: str) -> str:
    tokens = sorted({file.token for file in files})
    if save_token is None and len(tokens) == 1:
        return tokens[0]
    if save_token is None and known is not None and known.save_token in tokens:
        return known.save_token
    if save_token in tokens:
        return save_token  # type: ignore[return-value]  # None is in no list of texts
    listed = []
    for token in tokens:
        theirs = [file for file in files if file.token == token]
        step = theirs[0].header.info.get("step") or "unknown"
        listed.append(f"{token} (step {step}): {', '.join(file.name for file in theirs)}")
    what = "there are files of several saves" if save_token is None else f"there are no files of save {save_token!r}"
    raise ValidationError(
        Problem(what, got="; ".join(listed) or "no others", code="FC306", remedy="choose one by its save_token"),
        context,
    )


def _disagreements(directory: CheckpointDirectory, files: list[_DataFile], unique_id: int) -> list[Problem]:
    """Find the contradictions between files of one save."""
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
            problems.append(problem("a rank has several files of one save", code="FC306", remedy=remedy))
    if problems:
        return problems
    if not re.fullmatch("[1-9][0-9]*", first["world_size"]) or not re.fullmatch("(-?[0-9]+)?", first["step"]):
        got = f"{first['world_size']!r} and {first['step']!r}"
        return [Problem("world_size and step are not numbers", rank=files[0].rank, file=files[0].name, got=got)]
    return []


def _missing_files(
    directory: SaveDirectory, files: list[_DataFile], catalog: Catalog, known: Manifest | None
) -> tuple[list[Problem], str]:
    """Distinguish lost files from those of ranks that had nothing to write."""
    here, save = [file.name for file in files], files[0].save
    if known is not None and not known.partial:
        lost = [name for name in known.catalog.files if name not in here]
        what = "a file that the manifest names is missing"
        return [
            Problem(what, None, int(name.partition("_")[0]), directory.backend.where(name), code="FC305", remedy=REMEDY)
            for name in lost
        ], ""
    if save.world_size == len(files):
        return [], ""
    keys_of = directory.companion.read()
    own = {name for name in keys_of if save_of(name) == save_of(here[0])}
    if own and own <= {*here} and save.world_size > len(files):
        return [], ""
    # Nobody knows which save a missing file belonged to.
    keys = {key for name, keys in keys_of.items() if name in own or save_of(name) is None for key in keys}
    lost = [*sorted(own.difference(here)), *(repr(key) for key in sorted(keys.difference(catalog.keys)))]
    without = f"; {directory.companion.name} has besides {listed(lost)}" if lost else ""
    text = f"rebuilt from the data files of {len(files)} of {save.world_size} ranks{without}"
    problem = Problem(
        "there are not as many data files as ranks that took part",
        expected=save.world_size,
        got=f"{len(files)}: {listed(here)}{without}",
        code="FC306",
        remedy="restore the files that are missing; fewer_files=True does without them, and marks the checkpoint as "
        "partial",
    )
    return [problem], text if save.world_size > len(files) else ""


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
    """Return the items of one file."""
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


def _part(directory: CheckpointDirectory, file: _DataFile, items: Catalog, block_bytes: int) -> Manifest:
    """Read the file and return its part of the manifest."""
    path = directory.backend.where(file.name)
    sums: list[int] = []
    buffer = np.empty(block_bytes, dtype=np.uint8)
    with directory.backend.open(file.name) as stream:
        for begin, length in zip(items.byte_offset.tolist(), items.byte_length.tolist()):
            for first in range(0, length, block_bytes):
                view = memoryview(buffer)[: min(block_bytes, length - first)]
                if fill(stream, view, begin + first) < len(view):
                    raise CorruptCheckpointError(f"{path} became shorter while it was read")
                sums.append(hash_block(view))
    return Manifest.of_save(file.save, items, sums, {file.name: file.size}, block_bytes)


def _differences(directory: CheckpointDirectory, known: Manifest, rebuilt: Manifest) -> list[Problem]:
    """Return the differences between rows of the manifest in place and the data files."""
    was, now = (each.take(np.flatnonzero(each.catalog.byte_length)) for each in (known, rebuilt))
    both, count = concat([was.catalog, now.catalog]), len(was.catalog)
    _, place = np.unique(np.stack([both.file, both.byte_offset], axis=1), axis=0, return_inverse=True)
    place = place.reshape(-1)
    row_at = np.full(len(both), -1)
    row_at[place[count:]] = np.arange(count, len(both))
    same = row_at[place[:count]]
    columns = (getattr(both, name).reshape(len(both), -1) for name in Catalog.COLUMNS)
    is_alike = (same >= 0) & np.logical_and.reduce([(each[:count] == each[same]).all(axis=1) for each in columns])

    def problem(what: str, row: int, expected: str, got: str, begin: int = 0) -> Problem:
        where = directory.backend.where(both.file_name(row) or "")
        offset = int(both.byte_offset[row]) + begin
        return Problem(
            what, both.key_name(row), int(both.rank[row]), where, expected, got, REMEDY, offset, code="FC306"
        )

    problems, what = [], "the header has not the shard that the manifest has"
    if known.info != rebuilt.info:
        expected, got = map(str, (known.info, rebuilt.info))
        problems.append(
            Problem("the headers are not as the manifest", expected=expected, got=got, code="FC306", remedy=REMEDY)
        )
    for row in np.flatnonzero(~is_alike).tolist():
        got = both.describe(int(same[row])) if same[row] >= 0 else "nothing that begins there"
        problems.append(problem(what, row, both.describe(row), got))
    alike = np.flatnonzero(is_alike)
    before, after = was.checksums.take(alike), now.checksums.take(same[alike] - count)
    damaged = np.flatnonzero(before.values != after.values)
    owner = np.searchsorted(before.first, damaged, side="right") - 1
    for block, row, first in zip(damaged.tolist(), alike[owner].tolist(), before.first[owner].tolist()):
        begin = (block - first) * before.block_bytes
        end = min(begin + before.block_bytes, int(both.byte_length[row]))
        what = f"bytes {begin} to {end} of the shard are damaged"
        expected, got = f"xxh3 {before.values[block]:016x}", f"xxh3 {after.values[block]:016x}"
        problems.append(problem(what, row, expected, got, begin))
    return problems
