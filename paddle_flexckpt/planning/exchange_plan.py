"""The exchange plan: which pieces one rank copies, sends and receives to turn one layout in memory into another.

Both ends of a message compute the same list of pieces in the same order from the same catalogs, so a message is the
pieces' elements and nothing else. A rank plans its own targets, and those of others only as far as it may send to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher
from paddle_flexckpt.planning.requests import positions


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One rank's part of an exchange.

    Attributes:
        local: Pieces whose source and target are both on this rank.
        outgoing: Pieces to send, by receiving rank.
        incoming: Pieces to receive, by sending rank.
    """

    local: Pieces
    outgoing: dict[int, Pieces]
    incoming: dict[int, Pieces]


def plan_exchange(
    matcher: ShardMatcher,
    target: Catalog,
    rank: int,
    rows: np.ndarray | None = None,
    maps: BoxMaps | None = None,
) -> ExchangePlan:
    """Plans one rank's part of the exchange.

    Bytes received are exactly those that the rank lacks: a piece that any source on the rank holds is local.

    Args:
        matcher: Matcher of the source catalog of all ranks.
        target: The target catalog of all ranks.
        rank: The rank to plan for, numbered as in the catalogs' ``rank`` columns.
        rows: Rows of ``target`` that are wanted; all by default.
        maps: What the keys that it defines are made of, the same on every rank.
    """
    rows = np.arange(len(target)) if rows is None else rows
    mine = matcher.match(target, rows[target.rank[rows] == rank], maps)
    sender = matcher.source.rank[mine.source]
    incoming = {int(r): mine.take(sender == r) for r in np.unique(sender) if r != rank}

    held = np.zeros(len(target.keys), dtype=bool)
    held_names = {matcher.source.keys[k] for k in np.unique(matcher.source.key[matcher.source.rank == rank])}
    held[[i for i, name in enumerate(target.keys) if name in held_names]] = True
    holder = matcher.held_by(rank)
    if maps is not None:
        # Only what takes something from this rank's shards: most of a layout is of no concern to most ranks.
        maps = holder.reaching(maps)
        defined = positions(target.keys, maps.targets)
        held = np.where(defined >= 0, np.isin(defined, maps.target), held)
    others = holder.match(target, rows[(target.rank[rows] != rank) & held[target.key[rows]]], maps)
    others = others.take(matcher.source.rank[others.source] == rank)
    receiver = target.rank[others.target]
    outgoing = {int(r): others.take(receiver == r) for r in np.unique(receiver)}
    return ExchangePlan(mine.take(sender == rank), outgoing, incoming)
