"""Plans that fill one rank's targets: the pieces to read from files, or to copy, send and receive in memory.

Both ends of a message compute the same list of pieces in the same order from the same catalogs, so a message has the
pieces' elements alone. A rank plans its own targets, and those of others only as far as it may send to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.algebra.rows import group_rows, lexsort_packed
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
        relays: The pieces that this rank forwards to ranks of its node when all have arrived, by receiver; ``source``
            is a row of the target catalog.
        relayed: The pieces that other ranks of its node forward to it, by sender; ``source`` is the row itself.
    """

    local: Pieces
    outgoing: dict[int, Pieces]
    incoming: dict[int, Pieces]
    repeated: Pieces
    repeated_bytes: int = 0
    relays: dict[int, Pieces] = field(default_factory=dict)
    relayed: dict[int, Pieces] = field(default_factory=dict)


def plan_exchange(
    matcher: ShardMatcher,
    target: Catalog,
    rank: int,
    rows: np.ndarray | None = None,
    maps: BoxMaps | None = None,
    node: np.ndarray | None = None,
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
        node: int64 by rank, the number of its node. If several ranks of a node want the same elements from other nodes,
            one of them receives and forwards these. None: no rank forwards.
    """
    rows = np.arange(len(target)) if rows is None else rows
    relays: dict[int, Pieces] = {}
    relayed: dict[int, Pieces] = {}
    if node is None:
        mine = matcher.match(target, rows[target.rank[rows] == rank], maps)
    else:
        near = matcher.match(target, rows[node[target.rank[rows]] == node[rank]], maps)
        leader = _leaders(near, matcher, target, node)
        mine = near.take((target.rank[near.target] == rank) & (leader < 0))
        relays, relayed = _forwarded(near, leader, target, rank)
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
    if node is not None:
        others = others.take(_leaders(others, matcher, target, node) < 0)
    others = others.take(matcher.source.rank[others.source] == rank)
    receiver = target.rank[others.target]
    outgoing = {
        r: _sent_once(others.take(receiver == r), matcher.source, target)[0] for r in np.unique(receiver).tolist()
    }
    width = mine.extents.shape[1]
    repeats = concat_pieces(repeated, width)
    return ExchangePlan(mine.take(sender == rank), outgoing, incoming, repeats, saved, relays, relayed)


def _leaders(pieces: Pieces, matcher: ShardMatcher, target: Catalog, node: np.ndarray) -> np.ndarray:
    """Return int64 per piece, the piece of another rank of its node that is forwarded in its place; else -1.

    Pieces are alike if they have the same elements, from another node, for targets of one dtype.
    """
    groups = matcher.groups
    group = np.empty(len(matcher.source), dtype=np.int64)
    group[groups.order] = np.repeat(np.arange(len(groups)), groups.count)
    to = target.rank[pieces.target].astype(np.int64)
    crosses = node[matcher.source.rank[pieces.source]] != node[to]
    # A piece that does not cross is like no other.
    single = np.where(crosses, -1, np.arange(len(pieces)))
    columns = [node[to], target.dtype[pieces.target], group[pieces.source], pieces.source_base, single]
    order, start = group_rows([*columns, *pieces.extents.T, *pieces.source_strides.T], len(pieces), within=to)
    count = np.diff(start)
    # Ranks of a node take turns.
    chosen = order[start[:-1] + group[pieces.source[order[start[:-1]]]] % np.maximum(count, 1)]
    leader = np.empty(len(pieces), dtype=np.int64)
    leader[order] = np.repeat(chosen, count)
    return np.where(to[leader] == to, -1, leader)


def _forwarded(
    near: Pieces, leader: np.ndarray, target: Catalog, rank: int
) -> tuple[dict[int, Pieces], dict[int, Pieces]]:
    """Return the pieces that a rank forwards, by receiver, and those that are forwarded to it, by sender."""
    again = np.flatnonzero(leader >= 0)
    pieces, held = near.take(again), near.take(leader[again])
    giver, taker = target.rank[held.target], target.rank[pieces.target]
    given = replace(pieces, source=held.target, source_base=held.target_base, source_strides=held.target_strides)
    taken = replace(pieces, source=pieces.target)
    return (
        {r: given.take((giver == rank) & (taker == r)) for r in np.unique(taker[giver == rank]).tolist()},
        {r: taken.take((giver == r) & (taker == rank)) for r in np.unique(giver[taker == rank]).tolist()},
    )


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
