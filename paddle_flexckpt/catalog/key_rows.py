"""All ranks' shards of some keys: as messages of the ranks that own them, and as a table for the rank that plans them.

Messages are small, and messages of thousands of ranks become one table without a step for each row.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import Problem
from paddle_flexckpt.catalog.orders import Order, common_order
from paddle_flexckpt.catalog.table import Catalog, merged_state_names, order_columns

# Rows, bytes behind them, axes, bytes of a number; then the rows, and as JSON the names of the keys and their orders.
_HEAD = struct.Struct("<IIBB")
# Columns of a message before the boxes: key, dtype, ndim, row, flags, flat_start, flat_stop.
_SINGLE = 7
# Columns of the receiver's table, which has two more in front: the sender's place, and the first key of its message.
_PLACE, _ROW = 0, 5
_NAMES = tuple(DTYPES)


@dataclass(frozen=True, eq=False)
class KeyRows:
    """All shards of some keys: those of the first rank, in the order of its state, then those of the next.

    Attributes:
        catalog: The shards, keys in the order in which they occur.
        place: int64 ``[n]``, the position in the group of the rank that owns each.
        row: int64 ``[n]``, which row of that rank's own catalog each is.
        number: int64 ``[n]``, the row that each would have in the catalog of all ranks and keys.
        flags: int64 ``[n]``, its owner's flags.
        contradictions: Contradictions between ranks (about the order of a tensor's elements, or whose state it is),
            each with the number of a row of the rank that contradicts an earlier one.
    """

    catalog: Catalog
    place: np.ndarray
    row: np.ndarray
    number: np.ndarray
    flags: np.ndarray
    contradictions: tuple[tuple[int, Problem], ...]


def rows_of(catalog: Catalog, flags: np.ndarray) -> KeyRows:
    """Return the table of a rank that owns all shards itself; arguments as of :func:`encode_rows`."""
    rows = np.arange(len(catalog))
    return KeyRows(catalog, np.zeros(len(catalog), dtype=np.int64), rows, rows, flags, ())


def encode_rows(catalog: Catalog, flags: np.ndarray, part: np.ndarray) -> dict[int, bytes]:
    """Encode one rank's shards for the ranks that plan them.

    Args:
        catalog: Its shards.
        flags: int64 ``[n]``, as in :class:`KeyRows`.
        part: int64 ``[number of keys]``, the receiver of each key.

    Returns:
        A message for each of them, in rising order.
    """
    count = len(catalog)
    if not count:
        return {}
    of_row = part[catalog.key]
    order = np.lexsort((catalog.key, of_row))
    rows, of_row = catalog.take(order), of_row[order]
    is_first = np.append(True, of_row[1:] != of_row[:-1])
    is_new = is_first | np.append(True, rows.key[1:] != rows.key[:-1])
    key, begin = np.cumsum(is_new) - 1, np.flatnonzero(is_first)
    end = np.append(begin[1:], count)
    codes = np.asarray([_NAMES.index(name) for name in catalog.dtypes], dtype=np.int64)
    single = (key - np.repeat(key[begin], end - begin), codes[rows.dtype], rows.ndim, order, flags[order])
    boxes = (*rows.global_shape.T, *rows.offset.T, *rows.shape.T)
    table = np.stack([*single, rows.flat_start, rows.flat_stop, *boxes], axis=1).astype(np.int64)
    word = 4 if np.abs(table).max() < 1 << 31 else 8
    data, width = table.astype(f"<i{word}").tobytes(), table.shape[1] * word
    keys = rows.key[is_new]
    names, known = [catalog.keys[each] for each in keys.tolist()], len(catalog.key_order) > 0
    orders = [order.encode() for order in catalog.orders]
    order_of = catalog.key_order[keys] if known else keys
    messages = {}
    for first, stop, low, high in zip(begin.tolist(), end.tolist(), key[begin].tolist(), (key[end - 1] + 1).tolist()):
        tables: list[Any] = [names[low:high]]
        if known and order_of[low:high].max() >= 0:
            tables += [order_of[low:high].tolist(), orders]
        if catalog.state_names:
            own = {name: catalog.state_names[name] for name in names[low:high] if name in catalog.state_names}
            tables = [*tables, *([[], []] if len(tables) == 1 else []), own]
        tail = json.dumps(tables, ensure_ascii=False, separators=(",", ":")).encode()
        head = _HEAD.pack(stop - first, len(tail), catalog.width, word)
        messages[int(of_row[first])] = b"".join([head, data[first * width : stop * width], tail])
    return messages


def decode_rows(messages: Mapping[int, bytes], ranks: Sequence[int], before: np.ndarray) -> KeyRows:
    """Return the table of all ranks' messages to this one.

    Args:
        messages: By position of the rank in the group, rising.
        ranks: The ranks' numbers, by position.
        before: int64 ``[number of ranks]``, how many rows all ranks before each own.
    """
    keys: dict[str, int] = {}
    numbers: list[int] = []
    orders_by_rank: list[tuple[int, int, int]] = []
    table_of_orders: dict[tuple[Any, ...], int] = {}
    state_names: list[dict[str, tuple[str, ...]]] = []
    bodies: dict[tuple[int, int], list[tuple[int, int, int, bytes]]] = {}
    for place, message in messages.items():
        count, tail, axes, word = _HEAD.unpack_from(message)
        bodies.setdefault((axes, word), []).append(
            (place, count, len(numbers), message[_HEAD.size : len(message) - tail])
        )
        names, *orders = json.loads(message[len(message) - tail :])
        state_names += [{key: tuple(each) for key, each in table.items()} for table in orders[2:]]
        own = [keys.setdefault(name, len(keys)) for name in names]
        numbers += own
        if orders:
            number_of = [table_of_orders.setdefault(tuple(each), len(table_of_orders)) for each in orders[1]]
            orders_by_rank += [(place, key, number_of[each]) for key, each in zip(own, orders[0]) if each >= 0]
    most = max((axes for axes, _ in bodies), default=1)
    tables = [_table(axes, word, most, some) for (axes, word), some in bodies.items()]
    table = np.concatenate(tables) if tables else np.zeros((0, 2 + _SINGLE + 3 * most), dtype=np.int64)
    table = table[np.argsort(before[table[:, _PLACE]] + table[:, _ROW], kind="stable")]
    owner, first_key, key, dtype, ndim, row, flags, flat_start, flat_stop = table[:, : 2 + _SINGLE].T
    key = np.asarray(numbers, dtype=np.int64)[first_key + key] if len(table) else key
    renumbered, known = _in_order(key, [*keys])
    boxes = table[:, 2 + _SINGLE :].reshape(len(table), 3, most)
    orders, contradictions = _merged(
        orders_by_rank, [Order.decode([*each]) for each in table_of_orders], renumbered, known, before
    )
    names_of_states, problems = merged_state_names(state_names)
    contradictions += tuple((0, problem) for problem in problems.values())
    catalog = Catalog(
        keys=known,
        dtypes=_NAMES,
        files=(),
        key=renumbered[key].astype(np.int32),
        dtype=dtype.astype(np.int16),
        ndim=ndim.astype(np.int16),
        global_shape=boxes[:, 0].copy(),
        offset=boxes[:, 1].copy(),
        shape=boxes[:, 2].copy(),
        flat_start=flat_start.copy(),
        flat_stop=flat_stop.copy(),
        rank=np.asarray(ranks, dtype=np.int32)[owner],
        file=np.full(len(table), -1, dtype=np.int32),
        byte_offset=np.zeros(len(table), dtype=np.int64),
        **order_columns(orders, len(known)),
        state_names=names_of_states,
    )
    return KeyRows(catalog, owner.copy(), row.copy(), before[owner] + row, flags.copy(), contradictions)


def _table(axes: int, word: int, most: int, bodies: Sequence[tuple[int, int, int, bytes]]) -> np.ndarray:
    """Return rows of equal form: place, first key of their message, the columns of a message, with ``most`` axes."""
    places, counts, firsts, parts = zip(*bodies)
    data = np.frombuffer(b"".join(parts), dtype=f"<i{word}").reshape(-1, _SINGLE + 3 * axes).astype(np.int64)
    boxes = np.zeros((len(data), 3, most), dtype=np.int64)
    for number, fill in enumerate(Catalog.PADDED.values()):
        boxes[:, number, : most - axes] = fill
    boxes[:, :, most - axes :] = data[:, _SINGLE:].reshape(-1, 3, axes)
    where = [np.repeat(np.asarray(column, dtype=np.int64), counts)[:, None] for column in (places, firsts)]
    return np.concatenate([*where, data[:, :_SINGLE], boxes.reshape(len(data), -1)], axis=1)


def _in_order(key: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the new number of each name, and the names that rows have, in the order in which they occur."""
    _, first = np.unique(key, return_index=True)
    occurs = key[np.sort(first)]
    renumbered = np.zeros(len(names), dtype=np.int64)
    renumbered[occurs] = np.arange(len(occurs))
    return renumbered, tuple(names[each] for each in occurs.tolist())


def _merged(
    orders_by_rank: Sequence[tuple[int, int, int]],
    table: Sequence[Order],
    renumbered: np.ndarray,
    keys: Sequence[str],
    before: np.ndarray,
) -> tuple[dict[int, Order], tuple[tuple[int, Problem], ...]]:
    """Return the order of each key from the ranks' (place, key, order), and their contradictions."""
    columns = np.asarray(orders_by_rank, dtype=np.int64).reshape(-1, 3)
    _, first = np.unique(columns[:, 1] * len(table) + columns[:, 2], return_index=True)
    merged: dict[int, Order] = {}
    problems: list[tuple[int, Problem]] = []
    for place, key, number in columns[np.sort(first)].tolist():
        row, order = int(renumbered[key]), table[number]
        if merged.setdefault(row, order) is order:
            continue
        both = common_order(keys[row], merged[row], order)
        if isinstance(both, Problem):
            problems.append((int(before[place]), both))
        else:
            merged[row] = both
    return merged, tuple(problems)
