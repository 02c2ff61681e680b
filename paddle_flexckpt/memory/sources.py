"""Checks of a source state that all ranks hold together, before anything is written or sent.

Tested in tests/save/test_replica_checks.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.algebra import StridedCopy, intersect_boxes, row_major_strides
from paddle_flexckpt.catalog import (
    Catalog,
    Problem,
    ValidationError,
    concat,
)
from paddle_flexckpt.catalog.findings import Layout, inspect, raise_findings
from paddle_flexckpt.catalog.validate import row_boxes
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.memory.tensors import open_storage
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.copies import pack_copy


def check_layout(catalog: Catalog, context: str) -> Layout:
    """Check that all ranks' shards make whole tensors, as far as their descriptions show.

    Raises:
        ValidationError: Shards are malformed, disagree or leave holes.
    """
    layout = inspect(catalog, np.arange(len(catalog)))
    raise_findings(layout.findings, context)
    return layout


def check_state(describe: Callable[[], Mapping[str, Any]], comm: Communicator, context: str, head: bytes = b"") -> None:
    """Check that all ranks' shards, which ``describe`` gives, can be saved. One collective; no value is read.

    Raises:
        ValidationError: They cannot; the same on every rank, with the text of a save.
        CheckpointError: ``describe`` has failed somewhere; likewise.
    """

    def own() -> tuple[None, bytes]:
        return None, join((head, encode_catalog(open_state(describe(), comm.rank).catalog)))

    _, answers = comm.together(own, context)
    check_layout(concat([decode_catalog(catalog) for catalog in check_heads(answers, context)[0]]), context)


def check_sources(comm: Communicator, owned: Mapping[int, Any], catalog: Catalog, context: str) -> Layout:
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
