"""Targets of a live state: the table that a transfer works on, the tensors behind it, and the masters of optimizers.

Masters are float32 copies of parameters. They would undo, at the next step, a load of the parameters without them.

Tested in tests/memory/test_shared_memory.py and tests/loading/test_masters_and_fused.py.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.memory.device_memory import DeviceMemory, devices_of, wait_for_devices
from paddle_flexckpt.memory.state import LocalState, open_state
from paddle_flexckpt.memory.state_names import tensor_name
from paddle_flexckpt.memory.tensor_memory import address_range, device_of, dtype_name, is_contiguous, odd_strides
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.sharded_weight import MODEL_REMEDY, MasterSlice
from paddle_flexckpt.transfer.copies import DeviceStorage
from paddle_flexckpt.transfer.names import COUNTED, MASTER_STATE, raw_parameter
from paddle_flexckpt.transfer.targets import Memory, Targets

logger = logging.getLogger(__name__)

_HALF = frozenset({"float16", "bfloat16"})


def renew_masters(state: LocalState, untouched: Collection[str], rank: int) -> int:
    """Set each master that a load did not fill to its loaded parameter, as the first step of a fresh job would.

    Optimizers are found among the objects of the process, as they are no argument of a load. Warns of masters that are
    not laid out as their parameters. Returns the number of masters that were renewed. ``untouched`` are the keys of the
    state that were not loaded.
    """
    half = np.asarray([name in _HALF for name in state.catalog.dtypes], dtype=bool)
    if not half.any():
        return 0
    rows = [row for row, key in enumerate(state.catalog.keys) if key not in untouched]
    tensors = [state.tensors[row] for row in rows]
    loaded: dict[str, list[Any]] = {}
    for row, tensor, is_half in zip(rows, tensors, half[state.catalog.dtype[rows]].tolist()):
        name = tensor_name(state.weights[row] or tensor) if is_half else None
        if name is not None and hasattr(tensor, "_copy_to"):
            dist = getattr(state.weights[row], "dist_tensor", None)
            loaded.setdefault(raw_parameter(name), []).append(tensor if dist is None else dist)
    if not loaded:
        return 0
    filled = sorted(span[0] for span in map(address_range, tensors) if span is not None)
    renewed, stale = _renew_all(loaded, filled)
    if stale:
        gc.collect()  # an optimizer that is not used any more may still exist
        stale = _renew_all(loaded, filled)[1]
    if stale:
        logger.warning(
            f"rank {rank}: parameters were loaded without their float32 masters, of which an optimizer has "
            f"{len(stale)} that are laid out otherwise, such as {stale[0]!r}: unless they are loaded too, its next "
            "step overwrites the parameters. Remedy (FC204): load weights before the first step, or give the "
            "optimizer's states too, with master_weights='convert' where the checkpoint has no masters"
        )
    return renewed


def _renew_all(loaded: Mapping[str, Sequence[Any]], filled: Sequence[int]) -> tuple[int, list[str]]:
    """Renew the masters of all live optimizers; return their number, and the names of those laid out otherwise."""
    renewed, stale = 0, []
    for optimizer in _optimizers():
        own = {raw_parameter(parameter.name): parameter for parameter in _parameters(optimizer)}
        for name, master in optimizer._master_weights.items():
            named, stepped = loaded.get(raw_parameter(name), ()), own.get(raw_parameter(name))
            if not named or _is_filled(_local(master), filled):
                continue
            # Parameters of several networks may have one name: the one that the optimizer itself has is meant.
            parameter = next((each for each in named if each is stepped), None)
            if parameter is not None and _alike(parameter, master):
                renewed += _renew(_local(master), _local(parameter))
            # Stale, if the loaded parameter is laid out otherwise, if it is not known whether it was loaded (the
            # optimizer has no such parameter), or if what was loaded may overlap the optimizer's parameter.
            elif parameter is not None or stepped is None or not all(_is_elsewhere(stepped, each) for each in named):
                stale.append(name)
    return renewed, stale


def betas_by_address() -> Iterator[tuple[tuple[int, int], float]]:
    """Yield ``((address, number), beta)`` for each beta power of the live optimizers; the number is 1 or 2."""
    for optimizer in _optimizers("_accumulators"):
        for number in (1, 2):
            beta: Any = getattr(optimizer, f"_beta{number}", None)
            powers = optimizer._accumulators.get(f"beta{number}_pow_acc", {}) if beta is not None else {}
            spans = (address_range(_local(power)) for power in powers.values())
            yield from (((span[0], number), float(beta)) for span in spans if span is not None)


def _optimizers(having: str = "_master_weights") -> Iterator[Any]:
    """Yield every live optimizer of Paddle that has masters, or other tensors."""
    from paddle.optimizer import Optimizer

    gc.unfreeze()  # objects set aside by gc.freeze() are not among the tracked ones
    for each in gc.get_objects():
        # Of the type itself: isinstance() asks proxies, which may do anything.
        if issubclass(type(each), Optimizer) and getattr(each, having, None):
            yield each


def _parameters(optimizer: Any) -> Iterator[Any]:
    for entry in optimizer._parameter_list or ():
        yield from entry["params"] if isinstance(entry, dict) else (entry,)


def _local(tensor: Any) -> Any:
    return tensor._local_value() if tensor.is_dist() else tensor


def _is_filled(master: Any, begins: Sequence[int]) -> bool:
    """Return whether a load wrote into a master, or into ranges of it; ``begins``: sorted addresses."""
    span = address_range(master)
    return span is None or bisect_left(begins, span[0]) < bisect_left(begins, span[1])


def _renew(master: Any, parameter: Any) -> bool:
    """Copy a parameter into its master, unless the master rounds to it: then it was loaded too, and is more exact."""
    value = parameter.astype("float32")
    stale = bool((master.astype(parameter.dtype).astype("float32") != value).any())
    if stale:
        master.copy_(value, True)
    return stale


def _is_elsewhere(stepped: Any, parameter: Any) -> bool:
    """Return whether an optimizer's parameter is another model's, of the same name, or padding behind a parameter.

    Where a buffer is sliced, a slice lies in the parameter, or else behind it in the same buffer.
    """
    if list(stepped.shape) == list(parameter.shape):
        return True
    if stepped.is_dist() or parameter.is_dist() or not stepped._is_initialized() or not parameter._is_initialized():
        return False
    part, whole = address_range(stepped), address_range(parameter)
    if part is None or whole is None or not stepped._is_shared_buffer_with(parameter):
        return False
    return part[1] <= whole[0] or whole[1] <= part[0]


def _alike(parameter: Any, master: Any) -> bool:
    """Return whether two tensors have the same shape, and the same part of it on this rank."""
    if list(parameter.shape) != list(master.shape) or parameter.is_dist() != master.is_dist():
        return False
    return not parameter.is_dist() or list(parameter.placements) == list(master.placements)


# The most steps in which numpy finds out whether two strided tensors have an element in common.
_MAX_WORK = 100_000


def describe_targets(state_dict: Mapping[str, Any], rank: int) -> Targets:
    """Return the table of a rank's targets, none read-only; arguments and errors as of :func:`.open_state`."""
    state = open_state(state_dict, rank, is_source=False)
    spans, addresses, devices, strides = _locate(state)
    problems = [
        Problem(
            "a target cannot be written to",
            key=state.catalog.keys[row],
            rank=rank,
            got=f"a read-only array of numpy, {state.catalog.describe(row)}",
            code="FC107",
            remedy="load into a copy of it, or open a memory map with mode 'r+' or 'c'",
        )
        for row in np.flatnonzero(addresses < 0).tolist()
        if _is_read_only(state.tensors[row])
    ]
    problems += [
        Problem(
            f"the target is a copy of parameter {tensor.name!r}, as the hooks of amp.decorate(save_dtype=) make it",
            key=state.catalog.keys[row],
            rank=rank,
            code="FC804",
            remedy=MODEL_REMEDY,
        )
        for row, (weight, tensor) in enumerate(zip(state.weights, state.tensors))
        if not getattr(tensor, "persistable", True) and _is_copy(tensor, weight)
    ]
    if problems:
        raise ValidationError(problems)
    return Targets(
        state.catalog,
        tuple([tuple(getattr(weight, "aliases", ())) for weight in state.weights]),
        tuple([tuple(getattr(weight, "raw_names", ())) for weight in state.weights]),
        spans,
        TargetTensors(state, rank, addresses, devices),
        strides=strides,
        masters=frozenset(row for row, weight in enumerate(state.weights) if type(weight) is MasterSlice),
    )


def _is_read_only(tensor: Any) -> bool:
    return isinstance(tensor, np.ndarray) and tensor.size > 0 and not tensor.flags.writeable


def _is_copy(tensor: Any, weight: Any) -> bool:
    """Return whether a tensor has a parameter's name, but an operation has made it, as hooks of ``state_dict()`` do."""
    if not COUNTED.fullmatch(tensor.name):
        return False
    if weight is not None and weight.key.endswith(f".{MASTER_STATE}"):  # stage 2 casts its masters so
        return False
    node = getattr(tensor, "grad_fn", tensor)
    # Views that have a parameter's name are in shards. The tensors of paddle.load() have a node.
    return weight is None if node is None else node is not tensor and node.name() == "CastGradNode"


def _locate(state: LocalState) -> tuple[np.ndarray, np.ndarray, list[str], dict[int, tuple[int, ...]]]:
    """Return where a state's tensors are.

    Returns:
        The spans, int64 ``[n, 2]``; the addresses of those that can be filled in place, -1 for others; the devices of
        those that are on one; and by row, the strides of those that are not contiguous.
    """
    tensors, sizes = state.tensors, state.catalog.byte_length
    places: list[tuple[int, bool]] = []
    elsewhere = []
    for tensor, size in zip(tensors, sizes.tolist()):
        if not size:
            places.append((0, False))
        elif isinstance(tensor, np.ndarray):
            flags = tensor.flags
            places.append((tensor.__array_interface__["data"][0], flags.c_contiguous and flags.writeable))
        elif tensor.place.is_cpu_place():
            places.append((tensor.data_ptr(), tensor.is_contiguous()))
        else:
            elsewhere.append(tensor)
            places.append((0, False))
    begins, direct = np.asarray(places, dtype=np.int64).reshape(-1, 2).T
    direct = direct != 0
    spans = np.stack([begins, begins + sizes], axis=1)
    strides = {}
    for row in np.flatnonzero(~direct & (sizes > 0)).tolist():
        spans[row] = address_range(tensors[row])
        if odd := odd_strides(tensors[row]):
            strides[row] = odd
    return spans, np.where(direct, begins, -1), devices_of(elsewhere), strides


class TargetTensors(Memory):
    """The tensors of a rank's targets, as memory."""

    def __init__(self, state: LocalState, rank: int, addresses: np.ndarray, devices: list[str]) -> None:
        """Take the targets of a rank, the addresses of those that are filled in place, and their devices."""
        self._state, self._rank, self._addresses, self._devices = state, rank, addresses, devices

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices on which targets are."""
        return self._devices

    def open(self, row: int, fresh: bool) -> HostTensor:
        """Open a target as host memory; ``fresh``: all of it will be written."""
        return HostTensor(self._state.tensors[row], fresh=fresh)

    def addresses(self) -> np.ndarray:
        """Return int64 per target: the address of a contiguous one on the host, else -1."""
        return self._addresses

    def on_device(self, row: int) -> DeviceStorage | None:
        """Return the storage of a target on a device; None for host memory."""
        tensor = self._state.tensors[row]
        return None if device_of(tensor) is None else DeviceMemory(tensor)

    @contextlib.contextmanager
    def host_buffers(self, count: int, nbytes: int) -> Iterator[list[np.ndarray]]:
        """Lend buffers, page-locked if the backend can lock memory."""
        from paddle_flexckpt.memory.device_bytes import lock_pages

        memory = np.empty((count, nbytes), dtype=np.uint8)
        unlock = lock_pages(memory, self._devices[0])
        try:
            yield list(memory)
        finally:
            if unlock is not None:
                unlock()

    def overlap(self, one: int, other: int) -> bool:
        """Return whether two targets whose addresses overlap have an element in common, or may have one."""
        tensors = self._state.tensors[one], self._state.tensors[other]
        if all(map(is_contiguous, tensors)):
            return True
        shares_memory: Any = np.shares_memory  # whose stub knows no number for max_work
        try:
            return bool(shares_memory(*map(_as_array, tensors), max_work=_MAX_WORK))
        except np.exceptions.TooHardError:
            return True

    def beta(self, row: int, number: int) -> float | None:
        """Return the beta of the live optimizer that a power of it belongs to."""
        span = address_range(self._state.tensors[row])
        return None if span is None else self._betas.get((span[0], number))

    @cached_property
    def _betas(self) -> dict[tuple[int, int], float]:
        return dict(betas_by_address())

    def wait(self) -> None:
        """Wait until devices have finished the work that was begun on them."""
        wait_for_devices(self.devices)

    def finish(self, untouched: Collection[str]) -> None:
        """Renew the masters of live optimizers whose parameters were filled."""
        renew_masters(self._state, untouched, self._rank)


class _Addresses:
    """The addresses of a tensor as an array for numpy, which does not read them."""

    def __init__(self, tensor: Any) -> None:
        size = dtype_of(dtype_name(tensor)).itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{size}",
            "strides": tuple(int(stride) * size for stride in tensor.strides),
            "data": (int(tensor.data_ptr()), False),
        }


def _as_array(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(_Addresses(tensor))
