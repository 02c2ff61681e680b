"""One side of a program: the keys of a catalog, which of them are states of which parameter, and how they are cut.

Tested in tests/aoa/test_language.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from paddle_flexckpt.aoa.mapping import TensorInfo
from paddle_flexckpt.catalog import Catalog

PARAMETER = ""
MASTER = "w_0"
# Names that Paddle's optimizers give to what they accumulate (paddle/optimizer/*.py, `_add_accumulator`).
STATES = frozenset(
    {
        MASTER,
        "moment_0",
        "moment1_0",
        "moment2_0",
        "moment2_max_0",
        "beta1_pow_acc_0",
        "beta2_pow_acc_0",
        "velocity_0",
        "inf_norm_0",
        "mean_square_0",
        "mean_grad_0",
        "momentum_0",
        "momentum_decay_pow_0",
        "mu_product_0",
        "rho_0",
        "prevs_0",
        "learning_rates_0",
        "_avg_squared_grad_0",
        "_avg_squared_update_0",
    }
)
_NUMBERED = re.compile(r".*_\d+")


def split_state(key: str, keys: Mapping[str, object] | set[str]) -> tuple[str, str]:
    """Split a key into (parameter, state); the state of a parameter itself is :data:`PARAMETER`.

    ``block.w_0`` may be the master weight of ``block`` or a parameter of that name. Without a ``block`` it is a
    parameter if it has a state of its own, or if ``block`` ends with a number, as in the names that Paddle gives to
    parameters (``linear_0.w_0``), and has no other state; else it is a state. Names that no optimizer of Paddle uses
    are states only of parameters that are there.
    """
    if not key[-1:].isdigit():
        return key, PARAMETER
    base, dot, state = key.rpartition(".")
    if not dot or not base or not _NUMBERED.fullmatch(state):
        return key, PARAMETER
    if base in keys:
        return base, state
    if state not in STATES or any(f"{key}.{other}" in keys for other in STATES):
        return key, PARAMETER
    generated = state == MASTER and _NUMBERED.fullmatch(base.rpartition(".")[2])
    if generated and not any(f"{base}.{other}" in keys for other in STATES if other != MASTER):
        return key, PARAMETER
    return base, state


class Side:
    """The tensors of a source or a destination."""

    def __init__(self, catalog: Catalog, other_keys: Iterable[str] = ()) -> None:
        """Read a catalog.

        Args:
            catalog: All shards of the side.
            other_keys: Keys of the other side: they help to tell states from parameters.
        """
        self._catalog = catalog
        numbers, rows = np.unique(catalog.key, return_index=True)
        infos = _infos(catalog, rows)
        self.infos: dict[str, TensorInfo] = {catalog.keys[n]: info for n, info in zip(numbers.tolist(), infos)}
        # State names by parameter; PARAMETER among them if the parameter itself is there. Parameters without states of
        # equal shape and dtype, which are most, share one dict: it is never changed.
        self.states: dict[str, dict[str, TensorInfo]] = {}
        alone = {id(info): {PARAMETER: info} for info in infos}
        everything: set[str] = set()
        for key, info in self.infos.items():
            if key[-1:].isdigit():
                everything = everything or {*self.infos, *other_keys}
                base, state = split_state(key, everything)
                if state:
                    self.states[base] = {**self.states.get(base, {}), state: info}
                    continue
            self.states[key] = {PARAMETER: info, **self.states[key]} if key in self.states else alone[id(info)]
        self._cuts: dict[int, dict[str, tuple[int, bool]]] = {}
        self._numbers: dict[str, int] | None = None

    def split(self, key: str) -> tuple[str, str]:
        """Return a key of this side as (parameter, state)."""
        base, _, state = key.rpartition(".")
        return (base, state) if state in self.states.get(base, ()) else (key, PARAMETER)

    def base_info(self, base: str) -> TensorInfo:
        """Return shape and dtype of a parameter; without it, of its first state that is no scalar."""
        states = self.states[base]
        info = states.get(PARAMETER)
        if info is not None:
            return info
        size = {state: int(np.prod(info.shape)) for state, info in states.items()}
        return states[min(states, key=lambda state: (-size[state], state != MASTER, state))]

    def parts(self, base: str, axis: int) -> tuple[int, bool]:
        """Return in how many parts a parameter is along an axis, and whether these are equal.

        That is what the catalog says of the order of its elements; where it says nothing, in how many it is cut.
        Flattened shards count with the box that they are a range of: sharding a state further is no cut.

        Args:
            base: A parameter of this side, or the key of a state.
            axis: Not negative.
        """
        ndim = len((self.base_info(base) if base in self.states else self.infos[base]).shape)
        padded = self._catalog.width - ndim + axis
        if padded not in self._cuts:
            self._cuts[padded] = self._count_cuts(padded)
        cuts = self._cuts[padded]
        if base not in self.states:
            return self._ordered(base, axis) or cuts.get(base, (1, True))
        for state in (PARAMETER, *sorted(self.states[base])):
            info = self.states[base].get(state)
            if info is not None and len(info.shape) == ndim and int(np.prod(info.shape)) > 1:
                key = state_key(base, state)
                return self._ordered(key, axis) or cuts.get(key, (1, True))
        return 1, True

    def _ordered(self, key: str, axis: int) -> tuple[int, bool] | None:
        """Return the parts of which a key's order speaks, if it does."""
        if self._numbers is None:
            self._numbers = {name: number for number, name in enumerate(self._catalog.keys)}
        order = self._catalog.order(self._numbers[key])
        known = order is not None and order.parts is not None and order.axis in (None, axis)
        return (order.parts, True) if known else None  # type: ignore[union-attr,return-value]

    def _count_cuts(self, axis: int) -> dict[str, tuple[int, bool]]:
        catalog = self._catalog
        filled = np.flatnonzero((catalog.shape > 0).all(axis=1))  # a shard without elements is no part
        order = filled[np.argsort(catalog.key[filled], kind="stable")]
        if not len(order):
            return {}
        keys, start = np.unique(catalog.key[order], return_index=True)
        offset, extent = catalog.offset[order, axis], catalog.shape[order, axis]
        total = catalog.global_shape[order[start], axis]
        smallest, largest = np.minimum.reduceat(extent, start), np.maximum.reduceat(extent, start)
        # The extents tell the number of parts, so that one rank's shards do as well as those of all.
        aligned = np.logical_and.reduceat(offset % np.maximum(extent, 1) == 0, start)
        equal = (smallest == largest) & (total % largest == 0) & aligned
        # Uneven parts are counted for the message alone.
        count = -(-total // largest)
        return {
            catalog.keys[key]: (number, even)
            for key, number, even in zip(keys.tolist(), count.tolist(), equal.tolist())
        }


def _infos(catalog: Catalog, rows: np.ndarray) -> list[TensorInfo]:
    """Return shape and dtype of some rows; one object for all that are equal."""
    if not len(rows):
        return []
    columns = np.column_stack([catalog.dtype[rows], catalog.ndim[rows], catalog.global_shape[rows]]).astype(np.int64)
    shared: dict[bytes, TensorInfo] = {}
    infos = []
    # Equal rows are equal bytes, which are compared faster than anything that Python makes of them.
    for row, code in zip(rows.tolist(), np.ascontiguousarray(columns).view(f"V{8 * columns.shape[1]}")[:, 0].tolist()):
        info = shared.get(code)
        if info is None:
            shape = catalog.unpadded(row, catalog.global_shape)
            info = shared[code] = TensorInfo(shape, catalog.dtype_name(row))
        infos.append(info)
    return infos


def state_key(base: str, state: str) -> str:
    """Return the key of a state of a parameter."""
    return f"{base}.{state}" if state else base
