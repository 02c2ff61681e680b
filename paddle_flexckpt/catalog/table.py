"""The catalog itself: one row per shard, one numpy column per property.

Shapes of different rank share the ``[n, ndim]`` columns by being padded *on the left* with axes of extent 1 and offset
0, which changes neither row-major order nor contiguity.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from paddle_flexckpt.algebra.columns import WHOLE, Columns
from paddle_flexckpt.algebra.rows import product_axes
from paddle_flexckpt.catalog.dtypes import dtype_of
from paddle_flexckpt.catalog.errors import Problem, ValidationError
from paddle_flexckpt.catalog.orders import CUT, Order, common_order

NOT_FLATTENED = -1
# Keys with this prefix are a run's extra state (step, schedules, generators): not part of a model.
EXTRA_STATE = "extra_state."
_OURS = re.compile(
    re.escape(EXTRA_STATE) + r"(?:common|manager|ema|(?:rng|dataloader)\.rank\d+|data\.split\d+)(?:\.|\Z)"
)


@dataclass(frozen=True, eq=False)
class Catalog(Columns):
    """Shards as columns.

    Attributes:
        keys: Distinct tensor names; ``key`` indexes it.
        dtypes: Distinct element types by name; ``dtype`` indexes it.
        files: Distinct file names; ``file`` indexes it. Memory's files are ``vfile_{rank}``.
        key: int32 ``[n]``.
        dtype: int16 ``[n]``.
        ndim: int16 ``[n]``, rank of the tensor before padding.
        global_shape: int64 ``[n, d]``, in elements.
        offset: int64 ``[n, d]``, first element of the shard's box.
        shape: int64 ``[n, d]``, extents of the shard's box.
        flat_start: int64 ``[n]``, first element of the flattened range in the box; -1: the shard is the whole box.
        flat_stop: int64 ``[n]``, first element beyond the flattened range; -1 likewise.
        rank: int32 ``[n]``, rank that holds or wrote the shard.
        file: int32 ``[n]``, or -1.
        byte_offset: int64 ``[n]``, first byte of the shard in its file.
        orders: Distinct orders of elements; ``key_order`` indexes it.
        key_order: int16 ``[number of keys]``, the order of each tensor's elements; -1: not known. It has length 0 if no
            order is known.
        state_names: The structured names of optimizer states whose keys have Paddle's own (raw) name of the
            parameter, by key; only the known ones.
    """

    PADDED: ClassVar[Mapping[str, int]] = {"global_shape": 1, "offset": 0, "shape": 1}

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    files: tuple[str, ...]
    key: np.ndarray
    dtype: np.ndarray
    ndim: np.ndarray
    global_shape: np.ndarray
    offset: np.ndarray
    shape: np.ndarray
    flat_start: np.ndarray
    flat_stop: np.ndarray
    rank: np.ndarray
    file: np.ndarray
    byte_offset: np.ndarray
    orders: tuple[Order, ...] = ()
    key_order: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int16), metadata=WHOLE)
    state_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_flattened(self) -> np.ndarray:
        """Return bool ``[n]``."""
        return self.flat_start != NOT_FLATTENED

    @property
    def size(self) -> np.ndarray:
        """Return int64 ``[n]``, elements in each shard."""
        box = product_axes(self.shape)
        return np.where(self.is_flattened, self.flat_stop - self.flat_start, box)

    @property
    def itemsize(self) -> np.ndarray:
        """Return int64 ``[n]``, bytes per element."""
        sizes = _itemsizes(self.dtypes)
        return sizes[self.dtype] if len(sizes) else np.zeros(len(self), dtype=np.int64)

    @property
    def byte_length(self) -> np.ndarray:
        """Return int64 ``[n]``, bytes in each shard."""
        return self.size * self.itemsize

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return all columns and, as JSON in uint8 arrays, all tables of names, for files and messages."""
        arrays: dict[str, np.ndarray] = {
            table: np.frombuffer(json.dumps(getattr(self, table), ensure_ascii=False).encode(), dtype=np.uint8)
            for table in _TABLES
        }
        arrays.update({name: np.ascontiguousarray(getattr(self, name)) for name in Catalog.COLUMNS})
        if len(self.key_order):
            orders = json.dumps([order.encode() for order in self.orders], ensure_ascii=False)
            arrays["orders"] = np.frombuffer(orders.encode(), dtype=np.uint8)
            arrays["key_order"] = np.ascontiguousarray(self.key_order)
        if self.state_names:
            names = {key: self.state_names[key] for key in self.keys if key in self.state_names}
            arrays["state_names"] = np.frombuffer(json.dumps(names, ensure_ascii=False).encode(), dtype=np.uint8)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Catalog:
        """Return the catalog from the arrays of :meth:`to_arrays`; columns may be of narrower types.

        Raises:
            ValueError: A table is not a list of names (of orders), or columns differ in length or point beyond a table.
            KeyError: An array is not there.
        """
        values: dict[str, Any] = {}
        for table in _TABLES:
            names = json.loads(arrays[table].tobytes())
            if not isinstance(names, list) or not set(map(type, names)) <= {str}:
                raise ValueError(f"{table} is not a list of names")
            values[table] = tuple(names)
        for name in Catalog.COLUMNS:
            values[name] = arrays[name].astype(_COLUMN_TYPES.get(name, np.int64), copy=False)
        if len({len(values[name]) for name in Catalog.COLUMNS}) != 1:
            raise ValueError("the columns differ in length")
        if "key_order" in arrays:
            orders = json.loads(arrays["orders"].tobytes())
            if not isinstance(orders, list) or len(orders) > _MOST_ORDERS:
                raise ValueError("the orders are not a list, or too many")
            values["orders"] = tuple(map(Order.decode, orders))
            column = values["key_order"] = arrays["key_order"].astype(np.int16, copy=False)
            if column.shape != (len(values["keys"]),) or column.min(initial=-1) < -1:
                raise ValueError("the orders are not one for each key")
            if column.max(initial=-1) >= len(values["orders"]):
                raise ValueError("column key_order points beyond its table")
        if "state_names" in arrays:
            values["state_names"] = _decode_state_names(json.loads(arrays["state_names"].tobytes()))
        return cls(**values)

    def key_name(self, row: int) -> str:
        """Return the name of a row's tensor."""
        return self.keys[self.key[row]]

    def order(self, key: int) -> Order | None:
        """Return the order of a tensor's elements, by the number of its key; None if it is not known."""
        number = int(self.key_order[key]) if len(self.key_order) else -1
        return self.orders[number] if number >= 0 else None

    def dtype_name(self, row: int) -> str:
        """Return the name of a row's element type."""
        return self.dtypes[self.dtype[row]]

    def file_name(self, row: int) -> str | None:
        """Return the name of a row's file, or None."""
        return self.files[self.file[row]] if self.file[row] >= 0 else None

    def unpadded(self, row: int, column: np.ndarray) -> tuple[int, ...]:
        """Return a row of a ``[n, d]`` column without its padding."""
        return tuple(int(x) for x in column[row, column.shape[1] - self.ndim[row] :])

    def describe(self, row: int) -> str:
        """Return a shard's text: ``float32 [0:4, 2:6] of [8, 8]``, with its flattened range if it has one."""
        offset, shape = self.unpadded(row, self.offset), self.unpadded(row, self.shape)
        box = ", ".join(f"{o}:{o + s}" for o, s in zip(offset, shape))
        text = f"{self.dtype_name(row)} [{box}] of {list(self.unpadded(row, self.global_shape))}"
        if self.flat_start[row] != NOT_FLATTENED:
            text += f", flattened range [{self.flat_start[row]}, {self.flat_stop[row]})"
        return text

    def descriptions(self) -> list[bytes]:
        """Return bytes by row that are equal for shards of the same dtype, shapes, range and order.

        Most shards are alike, so a text about them, say, can be made once for each description.
        """
        order = self.key_order[self.key] if len(self.key_order) else np.full(len(self), -1)
        single = (self.dtype, self.ndim, self.flat_start, self.flat_stop, order)
        columns = [column.astype(np.int64)[:, None] for column in single]
        table = np.concatenate([*columns, self.global_shape, self.offset, self.shape], axis=1)
        data, width = table.tobytes(), table.shape[1] * table.itemsize
        return [data[start : start + width] for start in range(0, len(data), width)]

    def compact(self) -> Catalog:
        """Return the same rows without unused keys and dtypes; the table of files stays."""
        used, key = np.unique(self.key, return_inverse=True)
        kinds, dtype = np.unique(self.dtype, return_inverse=True)
        tables: dict[str, Any] = {
            "keys": tuple(map(self.keys.__getitem__, used.tolist())),
            "dtypes": tuple(map(self.dtypes.__getitem__, kinds.tolist())),
        }
        if len(self.key_order):
            tables["key_order"] = self.key_order[used]
        return replace(self, key=key.astype(np.int32), dtype=dtype.astype(np.int16), **tables)

    def with_orders(self, orders: Mapping[str, Order]) -> Catalog:
        """Return the same catalog with these orders, by key; other tensors' orders are not known."""
        by_key = {number: orders[key] for number, key in enumerate(self.keys) if key in orders}
        nothing = {"orders": (), "key_order": np.zeros(0, dtype=np.int16)}
        return replace(self, **(order_columns(by_key, len(self.keys)) or nothing))


# In usual names of q, k and v, or gate and up, as one parameter.
_FUSED = re.compile(r"(?i)qkv|query_key_value|(?:^|[._])c_attn|gate_up|up_gate")
_MOST_ORDERS = 2**15 - 1  # int16 numbers them
_TABLES = ("keys", "dtypes", "files")
_COLUMN_TYPES = {"key": np.int32, "dtype": np.int16, "ndim": np.int16, "rank": np.int32, "file": np.int32}


@functools.lru_cache(maxsize=256)
def _itemsizes(dtypes: tuple[str, ...]) -> np.ndarray:
    sizes = np.asarray([dtype_of(name).itemsize for name in dtypes], dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


def order_columns(by_key: Mapping[int, Order], count: int) -> dict[str, Any]:
    """Return the columns of orders from the orders by the number of their key; none where no order is known."""
    if not by_key:
        return {}
    alike = {id(order): order for order in by_key.values()}  # few: a hash for each key would take longer
    orders = {order: number for number, order in enumerate(dict.fromkeys(alike.values()))}
    numbers = {each: orders[order] for each, order in alike.items()}
    column = np.full(count, -1, dtype=np.int16)
    column[list(by_key)] = [numbers[id(order)] for order in by_key.values()]
    return {"orders": tuple(orders), "key_order": column}


def concat(catalogs: Sequence[Catalog]) -> Catalog:
    """Return one catalog with the rows of all, in order; names are merged.

    Raises:
        ValidationError: They contradict each other about the order of a tensor's elements, or about whose state it is.
    """
    if not catalogs:
        shapes = {name: (0, 1) if name in Catalog.PADDED else (0,) for name in Catalog.COLUMNS}
        nothing: dict[str, Any] = {
            name: np.zeros(shape, _COLUMN_TYPES.get(name, np.int64)) for name, shape in shapes.items()
        }
        return Catalog((), (), (), **nothing)
    if len(catalogs) == 1:
        return catalogs[0]
    width = max(catalog.width for catalog in catalogs)
    catalogs = [catalog.widened(width) for catalog in catalogs]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(catalog, name) for catalog in catalogs]) for name in Catalog.COLUMNS
    }
    tables: dict[str, Any] = {}
    of_keys: list[np.ndarray] = []
    for table, column in (("keys", "key"), ("dtypes", "dtype"), ("files", "file")):
        first = getattr(catalogs[0], table)
        if all(getattr(catalog, table) is first for catalog in catalogs):
            tables[table] = first  # so 100,000 files are not numbered again for each of 1,000 partitions
            if table == "keys":
                of_keys += [np.arange(len(first))] * len(catalogs)
            continue
        merged: dict[str, int] = {}
        parts = []
        for catalog in catalogs:
            # The extra last entry maps -1 ("no file") to itself.
            index = [merged.setdefault(name, len(merged)) for name in getattr(catalog, table)]
            numbers = np.asarray([*index, -1], dtype=columns[column].dtype)
            parts.append(numbers[getattr(catalog, column)])
            if table == "keys":
                of_keys.append(numbers[:-1])
        columns[column] = np.concatenate(parts)
        tables[table] = tuple(merged)
    state_names, problems = merged_state_names(catalog.state_names for catalog in catalogs)
    if problems:
        raise ValidationError([*problems.values()])
    orders = _merged_orders(catalogs, of_keys, tables["keys"])
    return Catalog(**tables, **columns, **orders, state_names=state_names)


def _decode_state_names(value: Any) -> dict[str, tuple[str, ...]]:
    """Return names by key from a value of JSON; ValueError if it is something else."""
    names = {key: tuple(each) for key, each in value.items()} if isinstance(value, dict) else None
    if names is None or not all(each and set(map(type, each)) == {str} for each in names.values()):
        raise ValueError("the names of states are not lists of names by key")
    return names


def merged_state_names(
    tables: Iterable[Mapping[str, tuple[str, ...]]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, Problem]]:
    """Return the names of states from several catalogs together, and by key the problem of a contradiction."""
    merged: dict[str, tuple[str, ...]] = {}
    problems: dict[str, Problem] = {}
    for names in tables:
        for key, own in names.items():
            before = merged.setdefault(key, own)
            if before == own:
                continue
            if set(before).isdisjoint(own):
                problems[key] = Problem(
                    "a state is named after Paddle's count of layers, and on another rank it is another parameter's",
                    key,
                    expected=before[0],
                    got=own[0],
                    code="FC104",
                    remedy="use optimizer.sharded_state_dict(model_state) instead of optimizer.state_dict()",
                )
            merged[key] = tuple(sorted({*before, *own}))
    return merged, problems


def _merged_orders(catalogs: Sequence[Catalog], of_keys: Sequence[np.ndarray], keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of several catalogs' orders together; ``of_keys`` numbers their keys in ``keys``."""
    table: dict[Order, int] = {}
    merged = np.full(len(keys), -1, dtype=np.int16)
    problems = []
    for catalog, numbers in zip(catalogs, of_keys):
        if not len(catalog.key_order):
            continue
        own = np.asarray([table.setdefault(order, len(table)) for order in catalog.orders] + [-1])[catalog.key_order]
        before = merged[numbers]
        merged[numbers] = np.where(before < 0, own, before)
        for i in np.flatnonzero((before >= 0) & (own >= 0) & (before != own)).tolist():
            orders = list(table)
            both = common_order(keys[numbers[i]], orders[before[i]], orders[own[i]])
            if isinstance(both, Problem):
                problems.append(both)
            else:
                merged[numbers[i]] = table.setdefault(both, len(table))
    if problems:
        raise ValidationError(problems)
    return {"orders": tuple(table), "key_order": merged} if table else {}


def sound_fused(catalog: Catalog) -> np.ndarray:
    """Return bool per key: whether it has a usual name of a parameter that fuses several, or of a state of it."""
    if not _FUSED.search("\n".join(catalog.keys)):
        return np.zeros(len(catalog.keys), dtype=bool)
    return np.asarray([_FUSED.search(key) is not None for key in catalog.keys])


def may_be_fused(catalog: Catalog) -> np.ndarray:
    """Return bool per key: whether the tensor may be fused without a record of it in the catalog.

    Such a tensor is cut along its last axis, the outputs of a linear layer, and its order is not known: the catalog was
    written before there were orders, or by another program; or its name says that it is fused, and no rule does.
    """
    count = len(catalog.keys)
    found = np.zeros(count, dtype=bool)
    filled = (catalog.size > 0) & (catalog.ndim > 0)
    if len(catalog.key_order):
        unruled = np.asarray([order == CUT for order in catalog.orders] + [True])[catalog.key_order]
        filled &= ((catalog.key_order < 0) | (unruled & sound_fused(catalog)))[catalog.key]
    rows = np.flatnonzero(filled)
    if len(rows):
        found[catalog.key[rows]] = True
        whole = catalog.shape[rows, -1] == catalog.global_shape[rows, -1]
        # A part of fewer than two elements fuses nothing.
        found[catalog.key[rows[whole | (catalog.shape[rows, -1] < 2)]]] = False
    return found


def check_extra_names(keys: Iterable[str]) -> None:
    """Refuse a model's keys that look like a run's extra state: a load of the model would leave them out.

    Raises:
        ValidationError: There are such keys.
    """
    problems: list[Problem | str] = [
        Problem(
            f"names that begin with {EXTRA_STATE!r} are those of a run's extra state, which no model gets back",
            key=key,
            code="FC108",
            remedy="rename the layer or entry; values of the run go through collect_extra_state(name=value)",
        )
        for key in keys
        if key.startswith(EXTRA_STATE) and not _OURS.match(key)
    ]
    if problems:
        raise ValidationError(problems)


def extra_state_differs(**where: Any) -> Problem:
    """Return the problem of extra state that has to be the same on all ranks, and is not; ``where`` has its fields."""
    return Problem(
        "ranks differ in the run's extra state",
        **where,
        code="FC108",
        remedy="give the same step, schedule, scaler and values of your own (extra=) on every rank; a position of each "
        "rank's own goes into dataloader=",
    )


def without_extra_state(catalog: Catalog) -> Catalog:
    """Return the shards of a catalog that are not a run's extra state."""
    extra = np.asarray([key.startswith(EXTRA_STATE) for key in catalog.keys], dtype=bool)
    return catalog.take(~extra[catalog.key]) if extra.any() else catalog
