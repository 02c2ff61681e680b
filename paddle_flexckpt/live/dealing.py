"""What planners of a save tell each rank: which parts of its own shards it writes, and which it compares.

Tested in tests/live/test_planners.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import Catalog, Order
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.planning.comparison import Lines
from paddle_flexckpt.planning.write_plan import Items

_HEAD = struct.Struct("<II")
_ITEM = np.dtype([("row", "<u4"), ("order", "<i2"), ("start", "<i8"), ("stop", "<i8")])
NO_ITEMS = Items(*np.zeros((3, 0), dtype=np.int64))
_LINE = np.dtype([("row", "<u4"), ("start", "<i8"), ("stop", "<i8")])


@dataclass(frozen=True, eq=False)
class Dealt:
    """Hold what one rank writes and compares, by rows of its own catalog.

    Attributes:
        items: What it writes.
        orders: The order of the elements of tensors of which it writes something, as far as any rank knows it.
        lines: By the position of a planner, what it compares for that one.
    """

    items: Items
    orders: dict[str, Order]
    lines: dict[int, Lines]


def deal(rows: KeyRows, items: Items, lines: Lines) -> dict[int, bytes]:
    """Return, by position of a rank, what it has to know of a planner's plan; lines of a rank keep their order."""
    catalog = rows.catalog
    written = np.zeros(len(items.row), dtype=_ITEM)
    written["row"], written["start"], written["stop"] = rows.row[items.row], items.start, items.stop
    written["order"] = catalog.key_order[catalog.key[items.row]] if len(catalog.key_order) else -1
    compared = np.zeros(len(lines.row), dtype=_LINE)
    compared["row"], compared["start"], compared["stop"] = rows.row[lines.row], lines.start, lines.stop
    orders = json.dumps([order.encode() for order in catalog.orders]).encode() if len(catalog.key_order) else b"[]"
    places = np.unique(np.concatenate([rows.place[items.row], rows.place[lines.row]]))
    parts = []
    for table, place in ((written, rows.place[items.row]), (compared, rows.place[lines.row])):
        order = np.argsort(place, kind="stable")
        low, high = (np.searchsorted(place[order], places, side=side) for side in ("left", "right"))
        parts.append((table[order].tobytes(), low.tolist(), high.tolist(), table.itemsize))
    (first, low, high, width), (second, begin, end, size) = parts
    return {
        place: b"".join(
            [
                _HEAD.pack(high[i] - low[i], end[i] - begin[i]),
                first[low[i] * width : high[i] * width],
                second[begin[i] * size : end[i] * size],
                orders,
            ]
        )
        for i, place in enumerate(places.tolist())
    }


def take(messages: Mapping[int, bytes], own: Catalog) -> Dealt:
    """Return what planners have dealt to this rank.

    Args:
        messages: By position of the planner.
        own: This rank's own catalog.
    """
    written, lines, orders = [np.zeros(0, dtype=_ITEM)], {}, {}
    for planner, message in messages.items():
        count, compared = _HEAD.unpack_from(message)
        items = np.frombuffer(message, _ITEM, count, _HEAD.size)
        begin = _HEAD.size + items.nbytes
        stretches = np.frombuffer(message, _LINE, compared, begin)
        written.append(items)
        if compared:
            lines[planner] = Lines(*(stretches[name].astype(np.int64) for name in ("row", "start", "stop")))
        tail = message[begin + stretches.nbytes :]
        known = [] if tail == b"[]" else [*map(Order.decode, json.loads(tail))]
        for key, order in zip(own.key[items["row"]].tolist(), items["order"].tolist()) if known else ():
            if order >= 0:
                orders[own.keys[key]] = known[order]
    table = np.concatenate(written)
    return Dealt(Items(*(table[name].astype(np.int64) for name in ("row", "start", "stop"))), orders, lines)
