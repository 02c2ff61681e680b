"""Plans that fill one rank's targets: the pieces to read from files, or to copy, send and receive in memory.

Both ends of a message compute the same list of pieces in the same order from the same catalogs, so a message has the
pieces' elements alone. A rank plans its own targets, and those of others only as far as it may send to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.algebra.rows import lexsort_packed
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, concat_pieces
from paddle_flexckpt.planning.requests import positions


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One rank's part of an exchange.

    Attributes:
        local: Pieces whose source and target are both on this rank.
        outgoing: Pieces to send, by receiving rank.
        incoming: Pieces to receive, by sending rank.
        repeated: Copies between targets, to be made when all pieces have arrived. Elements that two targets want are
            sent for one target, and copied from it to the other. ``source`` is a row of the target catalog.
        repeated_bytes: Bytes of these pieces as messages.
    """

    local: Pieces
    outgoing: dict[int, Pieces]
    incoming: dict[int, Pieces]
    repeated: Pieces
    repeated_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""
        parts = [self.local, self.repeated, *self.outgoing.values(), *self.incoming.values()]
        return sum([part.nbytes for part in parts])


def plan_exchange(
    matcher: ShardMatcher, target: Catalog, rank: int, rows: np.ndarray | None = None, maps: BoxMaps | None = None
) -> ExchangePlan:
    """Plan one rank's part of the exchange.

    A rank receives exactly the bytes that it lacks: a piece that any source on the rank holds is local, and elements
    that several of its targets want (the two uses of a tied weight) are sent once.

    Args:
        matcher: Matcher of the source catalog of all ranks.
        target: The target catalog of all ranks.
        rank: The rank to plan for, numbered as in the catalogs' ``rank`` columns.
        rows: Rows of ``target`` to fill; all by default.
        maps: What the keys that it defines are made of, the same on every rank.
    """
    rows = np.arange(len(target)) if rows is None else rows
    mine = matcher.match(target, rows[target.rank[rows] == rank], maps)
    sender = matcher.source.rank[mine.source]
    incoming, repeated, saved = {}, [], 0
    itemsize = matcher.source.itemsize
    for r in np.unique(sender[sender != rank]).tolist():
        pieces = mine.take(sender == r)
        incoming[r], again = _sent_once(pieces, matcher.source, target)
        repeated.append(again)
        sent = incoming[r]
        saved += int((pieces.size * itemsize[pieces.source]).sum() - (sent.size * itemsize[sent.source]).sum())

    held = np.zeros(len(target.keys), dtype=bool)
    held_names = {matcher.source.keys[k] for k in np.unique(matcher.source.key[matcher.source.rank == rank])}
    held[[i for i, name in enumerate(target.keys) if name in held_names]] = True
    holder = matcher.held_by(rank)
    if maps is not None:
        # Only requests that need this rank's shards: most of a layout does not concern most ranks.
        maps = holder.reaching(maps)
        defined = positions(target.keys, maps.targets)
        held = np.where(defined >= 0, np.isin(defined, maps.target), held)
    others = holder.match(target, rows[(target.rank[rows] != rank) & held[target.key[rows]]], maps)
    others = others.take(matcher.source.rank[others.source] == rank)
    receiver = target.rank[others.target]
    outgoing = {
        r: _sent_once(others.take(receiver == r), matcher.source, target)[0] for r in np.unique(receiver).tolist()
    }
    width = mine.extents.shape[1]
    return ExchangePlan(mine.take(sender == rank), outgoing, incoming, concat_pieces(repeated, width), saved)


def _sent_once(pieces: Pieces, source: Catalog, target: Catalog) -> tuple[Pieces, Pieces]:
    """Split a message's pieces into those to send, and copies with the same elements.

    A copy is made only from a target that has the dtype of the source or of the copy. So it is rounded as if it had
    been sent.
    """
    nothing = pieces.take(np.zeros(0, dtype=np.int64))
    order = np.lexsort((pieces.source_base, pieces.source))
    start = np.stack([pieces.source, pieces.source_base])[:, order]
    if not (start[:, 1:] == start[:, :-1]).all(axis=0).any():
        return pieces, nothing
    shown = np.column_stack([pieces.source, pieces.source_base, pieces.extents, pieces.source_strides])
    region = np.unique(shown, axis=0, return_inverse=True)[1].reshape(-1)
    number = np.asarray([target.dtypes.index(d) if d in target.dtypes else -1 for d in source.dtypes], dtype=np.int64)
    dtype = target.dtype[pieces.target].astype(np.int64)
    exact = number[source.dtype[pieces.source]] == dtype
    has_exact = np.bincount(region, weights=exact) > 0
    kind = np.where(has_exact[region], -1, dtype)
    group = np.unique(np.column_stack([region, kind]), axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((np.arange(len(pieces)), ~exact, group))
    first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    primary = np.empty(len(pieces), dtype=np.int64)
    primary[order] = order[first][np.cumsum(first) - 1]
    is_primary = primary == np.arange(len(pieces))
    again = pieces.take(~is_primary)
    held = pieces.take(primary[~is_primary])
    again = replace(again, source=held.target, source_base=held.target_base, source_strides=held.target_strides)
    return pieces.take(is_primary), again


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The reads of one rank.

    Attributes:
        pieces: Sorted by target, then by file and position in it: a staged target is stored as soon as it is full, and
            each file is read forwards as far as the targets' order is that of the save.
        needed_bytes: Bytes of all pieces; no element is read twice.
    """

    pieces: Pieces
    needed_bytes: int

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""
        return self.pieces.nbytes


def plan_read(
    matcher: ShardMatcher, target: Catalog, rows: np.ndarray | None = None, maps: BoxMaps | None = None
) -> ReadPlan:
    """Plan the reads that fill target shards from stored ones.

    Args:
        matcher: Matcher of the stored shards' catalog.
        target: This rank's targets.
        rows: The rows of ``target`` to fill; all by default.
        maps: What the keys that it defines are made of.
    """
    pieces = matcher.match(target, rows, maps)
    source = matcher.source
    itemsize = source.itemsize[pieces.source]
    position = source.byte_offset[pieces.source] + pieces.source_base * itemsize
    order = lexsort_packed([pieces.target, source.file[pieces.source], position], len(pieces))
    return ReadPlan(pieces.take(order), int((pieces.size * itemsize).sum()))
