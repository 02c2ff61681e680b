"""Sources in the memory of all ranks: their catalog, and the checks of them before anything is written or sent.

A virtual file is one rank's memory; it stands for a file of a checkpoint.

Tested in tests/saving/test_replica_checks.py, tests/loading/test_reshard_files.py
and tests/memory/test_shared_memory.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.algebra import StridedCopy, intersect_boxes, row_major_strides
from paddle_flexckpt.catalog import (
    Catalog,
    Order,
    Problem,
    ValidationError,
    concat,
)
from paddle_flexckpt.catalog.findings import Inspection, inspect, raise_findings
from paddle_flexckpt.catalog.metadata import catalog_from_metadata, lacks_global_shapes
from paddle_flexckpt.catalog.validate import row_boxes
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.memory.state_names import order_of, state_names
from paddle_flexckpt.memory.tensor_memory import address_range, dtype_name, element_count, odd_strides
from paddle_flexckpt.memory.tensors import open_storage
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.sharded_weight import is_sharded_weight
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.copies import pack_copy
from paddle_flexckpt.transfer.targets import Targets


def check_layout(catalog: Catalog, context: str) -> Inspection:
    """Check that all ranks' shards make whole tensors, as far as their descriptions show.

    Raises:
        ValidationError: Shards are malformed, disagree or leave holes.
    """
    layout = inspect(catalog, np.arange(len(catalog)))
    raise_findings(layout.findings, context)
    return layout


def check_state(
    describe: Callable[[], Mapping[str, Any]], comm: Communicator, context: str, head: bytes = b""
) -> Catalog:
    """Check that all ranks' shards, which ``describe`` gives, can be saved. One collective; no value is read.

    Return their catalog.

    ``head`` is compared with that of the other ranks.

    Raises:
        ValidationError: They cannot; the same on every rank, with the text of a save.
        CheckpointError: ``describe`` has failed on a rank; the same on every rank.
    """

    def own() -> tuple[None, bytes]:
        return None, join((head, encode_catalog(open_state(describe(), comm.rank).catalog)))

    _, answers = comm.together(own, context)
    catalog = concat([decode_catalog(each) for each in check_heads(answers, context, comm.ranks)[0]])
    check_layout(catalog, context)
    return catalog


def check_sources(comm: Communicator, owned: Mapping[int, Any], catalog: Catalog, context: str) -> Inspection:
    """Check that all ranks' shards make whole tensors.

    Every rank computes the same from the same catalog. One collective is needed only where shards overlap without being
    replicas of each other: their common elements have to be equal.

    Raises:
        ValidationError: As of :func:`check_layout`, or overlapping shards differ; the same on every rank.
    """
    checked = check_layout(catalog, context)
    if checked.coverage.overlaps:
        check_overlaps(comm, owned, catalog, checked.coverage.overlaps, context)
    return checked


def check_overlaps(
    comm: Communicator,
    owned: Mapping[int, Any],
    catalog: Catalog,
    overlaps: Sequence[tuple[int, int]],
    context: str,
) -> None:
    """Check that shards which overlap, as pairs of rows, have equal elements in common. One collective.

    Raises:
        ValidationError: They differ; the same on every rank.
    """

    def digests() -> tuple[None, bytes]:
        mine = {}
        for number, pair in enumerate(overlaps):
            for side in (0, 1):
                if pair[side] in owned:
                    mine[f"{number}.{side}"] = _common_digest(catalog, pair, side, owned[pair[side]])
        return None, json.dumps(mine).encode()

    _, answers = comm.together(digests, context)
    known: dict[str, str] = {}
    for answer in answers:
        known.update(json.loads(answer))
    problems = []
    for number, (a, b) in enumerate(overlaps):
        if known[f"{number}.0"] != known[f"{number}.1"]:
            problems.append(
                Problem(
                    "overlapping shards disagree about the elements they share",
                    key=catalog.key_name(a),
                    rank=int(catalog.rank[b]),
                    expected=f"the same values in {catalog.describe(b)} as in {catalog.describe(a)} of rank "
                    f"{catalog.rank[a]}",
                    got="different values",
                    code="FC106",
                    remedy="correct the offsets of the shard that is described wrongly, or bring the ranks in step",
                )
            )
    if problems:
        raise ValidationError(problems, context)


def _common_digest(catalog: Catalog, pair: tuple[int, int], side: int, tensor: Any) -> str:
    """Return the digest of the elements that two shards share, read from one of them."""
    _, offset_a, shape_a = row_boxes(catalog, np.asarray([pair[0]]))
    _, offset_b, shape_b = row_boxes(catalog, np.asarray([pair[1]]))
    offset, shape, hit = intersect_boxes(offset_a[:, None], shape_a[:, None], offset_b[None], shape_b[None])
    row = pair[side]
    strides = row_major_strides(catalog.shape[[row]])[0]
    base = (offset[hit] - catalog.offset[row]) @ strides - max(int(catalog.flat_start[row]), 0)
    storage = open_storage(tensor)
    hasher = xxhash.xxh3_128()
    for start, extents in zip(base.tolist(), shape[hit].tolist()):
        zeros = (0,) * len(extents)
        copy = StridedCopy(tuple(extents), start, tuple(strides.tolist()), 0, zeros)
        for values in pack_copy(copy, storage):
            hasher.update(values)
    return hasher.hexdigest()


@dataclass(frozen=True)
class _Span:
    """The memory of one shard: addresses ``[begin, end)``, its layout there, and its target (None: a source)."""

    begin: int
    end: int
    place: tuple[str, tuple[int, ...]]
    target: int | None


def refuse_shared_memory(source: Catalog, held: Mapping[int, Any], targets: Targets, names: Sequence[str]) -> None:
    """Check that no target shares memory with a source, unless both are the very same shard.

    ``names`` has the targets' names, so that only a target that may be a source shard passes for it.

    Raises:
        ValidationError: A target would overwrite a source that is still being read.
    """
    spans = [
        _Span(*addresses, (f"{source.key_name(row)} {source.describe(row)}", odd_strides(tensor)), None)
        for row, tensor in held.items()
        if (addresses := address_range(tensor)) is not None
    ]
    spans += [
        _Span(*place[0], (f"{names[row]} {place[2]}", place[3]), row)
        for row in range(len(targets.catalog))
        if (place := targets.place(row)) is not None
    ]
    spans.sort(key=lambda span: (span.begin, span.end))
    problems = []
    reaching: list[_Span] = []
    for span in spans:
        reaching = [other for other in reaching if other.end > span.begin]
        for other in reaching:
            if (span.target is None) == (other.target is None):
                continue
            if span.begin == other.begin and span.end == other.end and span.place == other.place:
                continue
            target, origin = (span, other) if span.target is not None else (other, span)
            row = target.target or 0
            problems.append(
                Problem(
                    "a target shares memory with a source that it would overwrite",
                    key=names[row],
                    rank=int(targets.catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of source {origin.place[0]}",
                    code="FC107",
                    remedy="clone one of the two",
                )
            )
        reaching.append(span)
    if problems:
        raise ValidationError(problems)


def gather_virtual_files(
    comm: Communicator,
    source_state_dict: Mapping[str, Mapping[str, Any]],
    metadata_list: Iterable[Any],
    targets: Callable[[], Catalog],
    context: str,
) -> Catalog:
    """Return the catalog of all ranks' files, each row with the rank that holds its file.

    ``source_state_dict`` has this rank's files, each with its tensors by name; ``targets`` returns this rank's targets,
    which have the global shapes that the metadata leaves out.

    Raises:
        ValidationError: The metadata does not describe what the ranks hold; the same on every rank.
    """
    metadata = list(metadata_list)
    if all(isinstance(entry, Catalog) for entry in metadata):
        return concat(metadata)

    def own() -> tuple[None, bytes]:
        shapes = {}
        if lacks_global_shapes(metadata):
            catalog = targets()
            shapes = {catalog.key_name(i): catalog.unpadded(i, catalog.global_shape) for i in range(len(catalog))}
        orders = _orders(source_state_dict, comm.rank)
        state = {key: value for tensors in source_state_dict.values() for key, value in tensors.items()}
        named = state_names(state, comm.rank, are_placed=True)
        if named.problems:
            raise ValidationError([*named.problems])
        return None, json.dumps([sorted(source_state_dict), shapes, orders, named.names]).encode()

    _, answers = comm.together(own, context)
    descriptions = [json.loads(answer) for answer in answers]
    holders = {file: rank for rank, (files, *_) in zip(comm.ranks, descriptions) for file in files}
    global_shapes = {key: shape for _, shapes, *_ in descriptions for key, shape in shapes.items()}

    def build() -> tuple[Catalog, bytes]:
        files = {file for entry in metadata for file in entry.storage_metadata.values()}
        lost = sorted(files - set(holders))
        if lost:
            raise ValidationError([Problem("no rank holds a file that the metadata names", file=file) for file in lost])
        source = catalog_from_metadata(metadata, holders.__getitem__, global_shapes)
        # Orders and names of states are not in the metadata: they come from the ranks' shards.
        of_shards = [({key: Order.decode(order) for key, order in each}, names) for *_, each, names in descriptions]
        nothing = np.zeros(0, dtype=np.int64)
        known = (replace(source.with_orders(orders), state_names=_tuples(names)) for orders, names in of_shards)
        source = concat([source, *(each.take(nothing) for each in known)])
        owned_tensors(source, source_state_dict, comm.rank, context)  # an error here has to be every rank's error
        return source, b""

    return comm.together(build, context)[0]


def _tuples(names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(each) for key, each in names.items()}


def _orders(source_state_dict: Mapping[str, Mapping[str, Any]], rank: int) -> list[tuple[str, Any]]:
    """Return keys and orders of the elements, as defined by ShardedWeights."""
    owned = ((key, value) for tensors in source_state_dict.values() for key, value in tensors.items())
    orders = [(key, order_of(key, value, rank)) for key, value in owned if is_sharded_weight(value)]
    problems = [order for _, order in orders if isinstance(order, Problem)]
    if problems:
        raise ValidationError(problems)
    return [(key, order.encode()) for key, order in orders if isinstance(order, Order)]


def owned_tensors(
    source: Catalog, source_state_dict: Mapping[str, Mapping[str, Any]], rank: int, context: str
) -> dict[int, Any]:
    """Return this rank's source tensors or ShardedWeights by row of the source catalog."""
    owned = {}
    size = source.size
    for row in np.flatnonzero(source.rank == rank).tolist():
        file, key = source.file_name(row), source.key_name(row)
        value: Any = source_state_dict.get(file or "", {}).get(key)
        tensor = value.local_tensor if is_sharded_weight(value) else value
        problem = None
        if tensor is None:
            problem = Problem("the metadata names a tensor that is not there", key=key, rank=rank, file=file)
        elif element_count(tensor) != size[row] or dtype_name(tensor) != source.dtype_name(row):
            problem = Problem(
                "a tensor is not what the metadata says",
                key=key,
                rank=rank,
                file=file,
                expected=source.describe(row),
                got=f"{dtype_name(tensor)} {list(tensor.shape)}",
            )
        if problem is not None:
            raise ValidationError([problem], context)
        owned[row] = value
    return owned
