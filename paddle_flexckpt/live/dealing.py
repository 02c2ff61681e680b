"""Messages from the planners of a save to each rank: the parts of its own shards that it writes, and those it compares.

Tested in tests/live/test_planners.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import Catalog, Order
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.planning.comparison import Lines
from paddle_flexckpt.planning.write_plan import Items

_HEAD = struct.Struct("<II")
_ITEM = np.dtype([("row", "<u4"), ("order", "<i2"), ("start", "<i8"), ("stop", "<i8")])
NO_ITEMS = Items(*np.zeros((3, 0), dtype=np.int64))
_LINE = np.dtype([("row", "<u4"), ("start", "<i8"), ("stop", "<i8")])


class Deal(NamedTuple):
    """The rows that a planner deals to one rank, counted in that rank's own catalog.

    Attributes:
        written: The rows that it writes, each with the number of its tensor's order, or -1.
        compared: The rows that it compares, in the order of the planner's lines.
        orders: The orders.
    """

    written: np.ndarray
    compared: np.ndarray
    orders: tuple[Order, ...]


def deal(rows: KeyRows, items: Items, lines: Lines) -> dict[int, Deal]:
    """Return, by position of a rank, what a planner deals to it; only for ranks that write or compare something."""
    catalog = rows.catalog
    written = np.zeros(len(items.row), dtype=_ITEM)
    written["row"], written["start"], written["stop"] = rows.row[items.row], items.start, items.stop
    written["order"] = catalog.key_order[catalog.key[items.row]] if len(catalog.key_order) else -1
    compared = np.zeros(len(lines.row), dtype=_LINE)
    compared["row"], compared["start"], compared["stop"] = rows.row[lines.row], lines.start, lines.stop
    places = np.unique(np.concatenate([rows.place[items.row], rows.place[lines.row]]))
    parts = []
    for table, place in ((written, rows.place[items.row]), (compared, rows.place[lines.row])):
        order = np.argsort(place, kind="stable")
        in_order, place = table[order], place[order]
        low, high = (np.searchsorted(place, places, side=side).tolist() for side in ("left", "right"))
        parts.append([in_order[begin:end] for begin, end in zip(low, high)])
    orders = catalog.orders if len(catalog.key_order) else ()
    return {place: Deal(first, second, orders) for place, first, second in zip(places.tolist(), *parts)}


def encode_deals(deals: Mapping[int, Deal], own: int) -> dict[int, bytes]:
    """Return messages for the ranks to which this planner, at position ``own``, deals something, except itself."""
    tails = {each.orders: json.dumps([order.encode() for order in each.orders]).encode() for each in deals.values()}
    return {
        place: b"".join(
            [
                _HEAD.pack(len(each.written), len(each.compared)),
                each.written.tobytes(),
                each.compared.tobytes(),
                tails[each.orders],
            ]
        )
        for place, each in deals.items()
        if place != own
    }


def gather_deals(messages: Mapping[int, bytes], deals: Mapping[int, Deal], own: int) -> dict[int, Deal]:
    """Return what planners deal to this rank, by position of the planner.

    Args:
        messages: What others have encoded for it, by position.
        deals: The deals that it makes itself as a planner, by position of a rank.
        own: Its position.
    """
    found = {planner: _decode_deal(message) for planner, message in messages.items()}
    if own in deals:
        found[own] = deals[own]
    return dict(sorted(found.items()))


def _decode_deal(message: bytes) -> Deal:
    count, compared = _HEAD.unpack_from(message)
    items = np.frombuffer(message, _ITEM, count, _HEAD.size)
    begin = _HEAD.size + items.nbytes
    lines = np.frombuffer(message, _LINE, compared, begin)
    tail = message[begin + lines.nbytes :]
    return Deal(items, lines, () if tail == b"[]" else tuple(map(Order.decode, json.loads(tail))))


def written_by(deals: Mapping[int, Deal], own: Catalog) -> tuple[Items, dict[str, Order]]:
    """Return the items that planners have dealt to this rank to write, and their orders, as far as any rank knows them.

    Args:
        deals: By position of the planner.
        own: This rank's own catalog.
    """
    orders = {
        own.keys[key]: each.orders[order]
        for each in deals.values()
        if each.orders
        for key, order in zip(own.key[each.written["row"]].tolist(), each.written["order"].tolist())
        if order >= 0
    }
    table = np.concatenate([np.zeros(0, dtype=_ITEM), *(each.written for each in deals.values())])
    return Items(*(table[name].astype(np.int64) for name in ("row", "start", "stop"))), orders


def lines_of(deals: Mapping[int, Deal]) -> dict[int, Lines]:
    """Return the rows that this rank compares for each planner, by the planner's position."""
    return {
        planner: Lines(*(each.compared[name].astype(np.int64) for name in ("row", "start", "stop")))
        for planner, each in deals.items()
        if len(each.compared)
    }
