"""Write checkpoints of Paddle's own format, which its ``load_state_dict`` reads; Paddle is not needed.

Tested in tests/tools/test_paddle_target.py, and with Paddle in tests/distributed/test_paddle_format.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ValidationError, group_replicas
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.paddle_files import (
    DISTCP_DTYPES,
    PARAMETER_NAMES,
    StateFile,
    encode_metadata,
    misread_range,
)
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.tools.conversion_content import Content, PlannedFile, WholeFiles, parts_of, rows_of

# Paddle looks for a rank's own file under this id alone.
_ID = 0


class PaddleTarget(WholeFiles):
    """Paddle's format: ``{rank}_0.distcp`` for each rank of a strategy, or of whole tensors, then ``0.metadata``."""

    by_safetensors = False
    states = True
    has_layout = True
    has_replicas = True
    last = f"{_ID}.metadata"

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan each rank's file: shards are never divided; a shard is in one file unless replicas are wanted."""
        super().__init__(sink, content)
        table, self.notes = rows_of(content)
        problems = [*_problems(table), *_order_problems(table)]
        if problems:
            raise ValidationError(problems, "Paddle's format cannot hold this")
        world = content.strategy.ranks if content.strategy is not None else int(table.rank.max(initial=0)) + 1
        self._catalog = _stored(table, content.save_replicas, world)
        self._check_ranges(content.save_replicas)
        self._items = [self._catalog.take(self._catalog.rank == rank) for rank in range(world)]
        self.files = []
        for rank, items in enumerate(self._items):
            nbytes = StateFile(items).nbytes
            self.files.append(PlannedFile(_data_file(rank), parts_of(items), int(items.byte_length.sum()), nbytes))
        empty = [key for key, info in content.infos.items() if not info.nbytes]
        if empty:
            self.notes.append(
                f"Paddle reads {listed(empty, 3)}, without elements, where it moves nothing; else it fails"
            )
        if any(key.startswith(EXTRA_STATE) for key in self._catalog.keys):
            self.notes.append("Paddle's loader leaves extra state aside, which is there as tensors")

    def _check_ranges(self, save_replicas: bool) -> None:
        """Refuse flattened ranges that Paddle would join wrongly, or note that it must not have to join them."""
        table = self._catalog
        rows = group_replicas(table).first
        reason, key = misread_range(table, rows[table.is_flattened[rows] & (table.size[rows] > 0)])
        if reason and not save_replicas:
            remedy = (
                "give save_replicas (--save-replicas), by which a rank's file has all that the rank has; or convert to "
                "whole tensors, or for a strategy without sharding v2 and stage 3"
            )
            raise ValidationError([Problem(f"Paddle reads this wrong: {reason}", key=key, remedy=remedy)])
        if reason:
            self.notes.append(f"Paddle reads this right under the same layout alone, as {reason}")

    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Implement the base class."""
        return StateFile(self._items[number]).pieces(iter(data))

    def last_content(self) -> bytes:
        """Implement the base class."""
        return encode_metadata(self._catalog, flat_mapping=True)


def _data_file(rank: int) -> str:
    return f"{rank}_{_ID}.distcp"


def _stored(table: Catalog, save_replicas: bool, world: int) -> Catalog:
    """Return the stored shards, each with its file; ranks store about the same number of bytes."""
    rows = np.arange(len(table))
    if not save_replicas:
        whole = np.ones(len(table), dtype=bool)
        rows = np.sort(plan_write(table, _data_file, indivisible=whole).source)
    kept = table.take(rows)
    return replace(kept, files=tuple(map(_data_file, range(world))), file=kept.rank.astype(np.int32))


def _problems(table: Catalog) -> Iterator[Problem]:
    """Yield the problems of content that the format cannot hold."""
    remedy = "cast it, or leave it out, with an AOA statement"
    kinds = np.unique(np.stack([table.key.astype(np.int64), table.dtype.astype(np.int64)], axis=1), axis=0)
    for key, dtype in kinds.tolist():
        if table.dtypes[dtype] not in DISTCP_DTYPES:
            yield Problem(
                "Paddle does not read this dtype back", table.keys[key], got=table.dtypes[dtype], remedy=remedy
            )
    if PARAMETER_NAMES in table.keys:
        yield Problem("Paddle has another use for this name", PARAMETER_NAMES, remedy="rename it with an AOA statement")
    _, first, count = np.unique(
        table.rank * np.int64(len(table.keys)) + table.key, return_index=True, return_counts=True
    )
    for row in first[count > 1].tolist():
        what = "a rank has several shards of one tensor, and its file has room for one"
        yield Problem(what, table.key_name(row), rank=int(table.rank[row]), got=table.describe(row))


def _order_problems(table: Catalog) -> Iterator[Problem]:
    """Yield the problems of fused parameters whose order has other parts than the cut."""
    orders = {key: table.order(key) for key in range(len(table.keys))}
    fused = {key: order for key, order in orders.items() if order is not None and order.axis is not None}
    rows = np.flatnonzero(np.isin(table.key, [*fused]))
    rows = rows[np.argsort(table.key[rows], kind="stable")]
    begins = np.searchsorted(table.key[rows], [*fused])
    for (key, order), mine in zip(fused.items(), np.split(rows, begins)[1:]):
        axis = table.width - int(table.ndim[mine[0]]) + (order.axis or 0)
        parts = len(np.unique(table.offset[mine, axis]))
        if parts != order.parts:
            yield Problem(
                "a fused parameter lies in another order than the ranks that load it expect, which Paddle cannot know",
                table.keys[key],
                expected=f"{parts} parts",
                got=order.describe(),
                remedy="convert to whole tensors or for tp=1, or split it with an AOA statement",
            )
