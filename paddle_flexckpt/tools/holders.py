"""Find the ranks that have each part of each tensor, in a checkpoint and in a job that would load it.

Tested in tests/tools/test_holders.py.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, group_replicas, without_extra_state
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.report import Report
from paddle_flexckpt.transfer.read_counts import sums_of


@dataclass(frozen=True)
class Part:
    """One part of a tensor, and the ranks that have it.

    Attributes:
        global_offset: The first element of its box, in the tensor.
        local_shape: The extents of the box.
        flattened_range: First element and the one after the last, of the box in row-major order; None: all of it.
        bytes: Bytes of the part.
        ranks: The ranks that saved it, or would need it.
        files: The files where it is stored, one for each rank.
    """

    global_offset: list[int]
    local_shape: list[int]
    flattened_range: list[int] | None
    bytes: int
    ranks: list[int]
    files: list[str] = field(default_factory=list)

    def where(self) -> str:
        """Return the part as text: ``[0:4, 2:6]``, with its flattened range if it has one."""
        box = ", ".join(f"{o}:{o + n}" for o, n in zip(self.global_offset, self.local_shape))
        return f"[{box}]" + ("" if self.flattened_range is None else " flattened {}:{}".format(*self.flattened_range))


@dataclass(frozen=True)
class TensorHolders:
    """The holders of the parts of one tensor.

    Attributes:
        dtype: Name of its element type.
        shape: Its global shape.
        stored: The parts in the checkpoint; none if statements make the tensor.
        needed: The parts that ranks of the job need; none without a job, or if no rank needs the tensor.
    """

    dtype: str
    shape: list[int]
    stored: list[Part]
    needed: list[Part]


@dataclass(frozen=True)
class HoldersReport(Report):
    """The holders of all tensors.

    Attributes:
        source: The checkpoint's directory.
        unique_id: Its id.
        step: Training step, if known.
        world_size: Ranks that saved it, if known.
        strategy: The strategy of the job that would load it; "" without one.
        tensors: The holders, by key.
        stored_bytes: Bytes of these tensors that each rank saved, by rank.
        needed_bytes: Bytes of these tensors that each rank of the job needs, by rank.
        notes: Assumptions about the layout of the job.
    """

    source: str
    unique_id: int | None
    step: int | None
    world_size: int | None
    strategy: str
    tensors: dict[str, TensorHolders]
    stored_bytes: list[int]
    needed_bytes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return one line for people."""
        count = "1 tensor" if len(self.tensors) == 1 else f"{len(self.tensors)} tensors"
        text = f"{self.source} (id {self.unique_id}): {count}, {_sum_and_most(self.stored_bytes, 'saved')}"
        if self.strategy:
            text += f"; under {self.strategy} {_sum_and_most(self.needed_bytes, 'needed')}"
        return text


def _sum_and_most(sizes: Sequence[int], what: str) -> str:
    most = max(sizes, default=0)
    ranks = "1 rank" if len(sizes) == 1 else f"{len(sizes)} ranks"
    where = f", at most {format_bytes(most)}, by rank {sizes.index(most)}" if len(sizes) > 1 else ""
    return f"{format_bytes(sum(sizes))} {what} by {ranks}{where}"


def find_holders(
    path: Location,
    keys: Sequence[str] = (),
    *,
    unique_id: int | None = None,
    layout: JobLayout | None = None,
    notes: Sequence[str] = (),
    largest: int | None = None,
) -> HoldersReport:
    """Find the ranks that have each part of each tensor of a checkpoint, and the ranks of a job that would need it.

    Only the manifest is read.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a file of tensors.
        keys: The tensors, as keys or patterns with ``*``; by default all.
        unique_id: Which checkpoint of the directory; None takes the highest id.
        layout: The layout of the job, as :func:`~paddle_flexckpt.tools.models.layout_of` makes it.
        notes: Assumptions about the layout, for the report.
        largest: The number of parameters, those that are the largest in the checkpoint with their optimizer states,
            whose parts are in the report; None: all. Bytes by rank are those of all tensors.

    Raises:
        ValidationError: There is no such checkpoint, or no such key.
        CorruptCheckpointError: The manifest is damaged.
    """
    directory = SourceDirectory(path)
    manifest = directory.read_manifest(unique_id)
    stored = without_extra_state(manifest.catalog)
    there = {stored.keys[number] for number in np.unique(stored.key).tolist()}
    chosen = choose_keys(keys, there | set(layout.keys if layout else ()))
    stored = _only(stored, chosen)
    ranks = max([manifest.world_size or 0, *(stored.rank + 1).tolist()])
    sizes = sums_of(stored.rank, stored.byte_length, ranks)
    shown = chosen if largest is None else _largest(stored, largest)
    stored = _only(stored, shown)
    tensors: dict[str, TensorHolders] = {}
    for key, row, part in _parts(stored, [[rank] for rank in range(ranks)]):
        _tensor(tensors, stored, key, row).stored.append(part)
    needed: list[int] = []
    if layout is not None:
        job, alike = _job(layout, chosen)
        needed = [0] * layout.strategy.ranks
        for same, nbytes in zip(alike, sums_of(job.rank, job.byte_length, len(alike)).tolist()):
            for rank in same:
                needed[rank] = nbytes
        job = _only(job, shown)
        for key, row, part in _parts(job, alike):
            _tensor(tensors, job, key, row).needed.append(part)
    return HoldersReport(
        source=directory.path,
        unique_id=manifest.unique_id,
        step=manifest.step,
        world_size=manifest.world_size,
        strategy=str(layout.strategy) if layout else "",
        tensors=dict(sorted(tensors.items())),
        stored_bytes=sizes.tolist(),
        needed_bytes=needed,
        notes=list(notes),
    )


def choose_keys(wanted: Sequence[str], there: set[str]) -> set[str]:
    """Return the keys of names and patterns; all without any.

    Raises:
        ValidationError: One has no keys.
    """
    if not wanted:
        return there
    found: set[str] = set()
    problems: list[Problem | str] = []
    for name in wanted:
        keys = {name} if name in there else {key for key in there if fnmatch.fnmatchcase(key, name)}
        if not keys:
            part = name.strip("*.")
            alike = [key for key in sorted(there) if part and part in key][:3]
            alike = alike or difflib.get_close_matches(name, there) or sorted(there)[:3]
            problems.append(Problem("there is no such key", key=name, got=f"{len(there)} keys such as {alike}"))
        found |= keys
    if problems:
        raise ValidationError(problems)
    return found


def _largest(catalog: Catalog, most: int) -> set[str]:
    """Return the keys of the largest parameters and their states."""
    numbers, first = np.unique(catalog.key, return_index=True)
    size = catalog.global_shape[first].prod(axis=1) * catalog.itemsize[first]
    keys = {catalog.keys[number]: nbytes for number, nbytes in zip(numbers.tolist(), size.tolist())}
    parameter = {key: split_state(key, keys)[0] for key in keys}
    together: Counter[str] = Counter()
    for key, nbytes in keys.items():
        together[parameter[key]] += nbytes
    chosen = {name for name, _ in together.most_common(most)}
    return {key for key in keys if parameter[key] in chosen}


def _only(catalog: Catalog, keys: set[str]) -> Catalog:
    return catalog.take(np.asarray([key in keys for key in catalog.keys], dtype=bool)[catalog.key])


def _job(layout: JobLayout, keys: set[str]) -> tuple[Catalog, list[list[int]]]:
    """Return the shards of each kind of rank, with the number of the kind as ``rank``, and the ranks of each kind."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.strategy.ranks):
        alike.setdefault(layout.kind(rank), []).append(rank)
    kind = np.zeros(layout.strategy.ranks, dtype=np.int32)
    kind[[ranks[0] for ranks in alike.values()]] = np.arange(len(alike))
    job = _only(layout.catalogs([ranks[0] for ranks in alike.values()]), keys)
    return replace(job, rank=kind[job.rank]), list(alike.values())


def _parts(catalog: Catalog, alike: Sequence[list[int]]) -> Iterator[tuple[str, int, Part]]:
    """Yield the key, a row and the part of each group of equal shards; ``alike`` has the ranks of each kind."""
    groups, length, is_flattened = group_replicas(catalog), catalog.byte_length, catalog.is_flattened
    for begin, end in zip(groups.start[:-1].tolist(), groups.start[1:].tolist()):
        rows = groups.order[begin:end].tolist()
        row = rows[0]
        files = [catalog.file_name(each) for each in rows]
        flat = [int(catalog.flat_start[row]), int(catalog.flat_stop[row])] if is_flattened[row] else None
        part = Part(
            global_offset=list(catalog.unpadded(row, catalog.offset)),
            local_shape=list(catalog.unpadded(row, catalog.shape)),
            flattened_range=flat,
            bytes=int(length[row]),
            ranks=_sorted(alike[int(catalog.rank[each])] for each in rows),
            files=[name for name in files if name is not None],
        )
        yield catalog.key_name(row), row, part


def _sorted(ranks: Iterable[list[int]]) -> list[int]:
    several = list(ranks)
    return several[0] if len(several) == 1 else sorted(rank for some in several for rank in some)


def _tensor(tensors: dict[str, TensorHolders], catalog: Catalog, key: str, row: int) -> TensorHolders:
    if key not in tensors:
        shape: list[Any] = list(catalog.unpadded(row, catalog.global_shape))
        tensors[key] = TensorHolders(catalog.dtype_name(row), shape, [], [])
    return tensors[key]
