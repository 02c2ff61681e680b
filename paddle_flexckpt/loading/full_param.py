"""full_param: the whole tensors of a live, sharded state, a few at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.live_model import without_tied_head
from paddle_flexckpt.loading.merged import check_axes
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.loading.resharder import GatheredState
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.memory.replica_digests import DIGEST, Digests
from paddle_flexckpt.planning.replica_comparison import Stretches
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.transfer.options import GROUP, SHARDS, UNUSED, StatementOptions, rule, takes
from paddle_flexckpt.transfer.targets import Targets
from paddle_flexckpt.transfer.transfer import quiet_loads

_CONTEXT = "cannot give whole tensors"
_OWN = "each rank asks for its own tensors"


@dataclass(frozen=True)
class FullOptions(StatementOptions):
    """The options of :func:`full_param`.

    Attributes:
        num_splits: The number of parts, of about as many names each, into which the sorted names are divided.
        shard_idx: The part that this rank requests, from 0.
        memory_growth_threshold: Bytes of whole tensors that this rank receives at a time; a larger tensor comes alone.
        check_replicas: Whether replicas of one shard are compared; if not, one of them is used.
    """

    num_splits: int = field(default=1, metadata=rule(may_differ=_OWN, least=1))
    shard_idx: int = field(default=0, metadata=rule(may_differ=_OWN))
    memory_growth_threshold: int = field(default=8 << 30, metadata=rule(may_differ=_OWN, least=1))
    check_replicas: bool = field(default=True, metadata=rule(choices=(True, False)))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        if self.shard_idx >= self.num_splits:
            raise ValidationError([f"shard_idx has to be below num_splits, {self.num_splits}; got {self.shard_idx}"])


@takes(FullOptions, sharded_state_dict=SHARDS, process_group=GROUP, h_group=UNUSED, v_group=UNUSED)
def full_param(
    sharded_state_dict: Mapping[str, Any],
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    process_group: Any = None,
    h_group: Any = None,
    v_group: Any = None,
    **options: Any,
) -> Iterator[tuple[str, Any]]:
    """Give every rank whole tensors of a live state, one after the other, as AOA statements make them.

    Every rank of the group calls this, and exhausts the iterator before it does anything else with other ranks: they
    move the tensors together, as many at a time as ``memory_growth_threshold`` allows. A rank receives the tensors that
    it requests, and of these only the bytes that it lacks.

    Args:
        sharded_state_dict: Names to the shards (or plain, replicated tensors) that this rank holds. The shards of all
            ranks have to make whole tensors.
        process_group: The ranks that take part; all ranks of the job by default.
        h_group: Accepted for compatibility: who sends what follows from who needs what.
        v_group: Accepted for compatibility.
        **options: Like ``aoa_config``, of :class:`FullOptions`.

    Returns:
        An iterator of names and fresh tensors on the current device, sorted by name; fused parameters in natural order.

    Raises:
        ValidationError: The state is not sound, or the statements do not fit (on every rank, with the same text). From
            the iterator: the state has changed since the call, so that tensors would be of two steps.
        CheckpointError: From the iterator: a rank failed while tensors were moved.
    """
    asked = FullOptions(aoa_config=aoa_config, **options)
    comm = communicator_for(process_group)
    state = without_tied_head(sharded_state_dict, aoa_config)
    state = GatheredState(comm, lambda: state, lambda: (asked.encode("full_param"),), _CONTEXT)
    return _WholeTensors(comm, state, asked).move()


class _WholeTensors:
    """The whole tensors that one rank requests of a live state, in batches that all ranks move together."""

    _mapping: TensorMapping | None
    _batches: list[dict[str, TensorInfo]]

    def __init__(self, comm: Communicator, state: GatheredState, options: FullOptions) -> None:
        """Divide the tensors into batches, as many on every rank. One collective."""
        self._comm, self._state, self._options = comm, state, options
        self._owned = dict(zip(np.flatnonzero(state.catalog.rank == comm.rank).tolist(), state.tensors))
        self._digests, counts = comm.together(self._divide, _CONTEXT)
        most = max(map(int, counts))
        self._batches += [{} for _ in range(most - len(self._batches))]

    def _divide(self) -> tuple[np.ndarray, bytes]:
        """Make this rank's batches; return the digests of its shards, and the number of batches."""
        catalog = self._state.catalog
        self._mapping = whole_mapping(self._options.aoa_config, catalog)
        infos = tensor_infos(catalog, self._mapping)
        check_axes({key: len(info.shape) for key, info in infos.items()})
        self._batches = list(_batches_of(infos, self._options))
        return self._digests_of(np.asarray([*self._owned], dtype=np.int64)), str(len(self._batches)).encode()

    def _digests_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the digests of some of this rank's shards, at their places in the catalog."""
        catalog = self._state.catalog
        some = rows[catalog.size[rows] > 0]
        with Digests(self._owned, catalog, Stretches(some, np.zeros_like(some), catalog.size[some])) as digests:
            found = np.zeros(len(catalog), dtype=DIGEST)
            found[some] = np.frombuffer(digests.encode(), DIGEST)
            return found

    def _check_unchanged(self, rows: np.ndarray) -> None:
        if (self._digests_of(rows)[rows] != self._digests[rows]).any():
            text = (
                "the state has changed since the call. Remedy (FC102): take all tensors before the next training step"
            )
            raise ValidationError([text])

    def move(self) -> Iterator[tuple[str, Any]]:
        """Move batch by batch, as many on every rank, and yield the tensors that this rank receives."""
        for step, batch in enumerate(self._batches):
            tensors: dict[str, Any] = {}

            def describe(batch: dict[str, TensorInfo] = batch, tensors: dict[str, Any] = tensors) -> Targets:
                tensors.update({name: _empty(info) for name, info in batch.items()})
                return replace(describe_targets(tensors, self._comm.rank), mapping=self._mapping)

            compares = self._options.check_replicas and step == 0
            options = ReshardOptions(check_replicas=compares, optimizer_states="ignore")
            with quiet_loads():
                self._state.fill(describe, options, "full_param", check=self._check_unchanged)
            while tensors:
                name = next(iter(tensors))
                yield name, tensors.pop(name)


def _batches_of(infos: Mapping[str, TensorInfo], asked: FullOptions) -> Iterator[dict[str, TensorInfo]]:
    """Yield the tensors that one rank receives at a time."""
    names, count = sorted(infos), len(infos)
    first, last = (number * count // asked.num_splits for number in (asked.shard_idx, asked.shard_idx + 1))
    batch: dict[str, TensorInfo] = {}
    left = asked.memory_growth_threshold
    for name in names[first:last]:
        info, nbytes = infos[name], infos[name].nbytes
        if batch and nbytes > left:
            yield batch
            batch, left = {}, asked.memory_growth_threshold
        batch[name] = info
        left -= nbytes
    if batch:
        yield batch


def _empty(info: TensorInfo) -> Any:
    import paddle

    return paddle.empty(list(info.shape), dtype=info.dtype)
