"""reshard_sharded_state_dict: live shards into another layout, through the same steps as a load, without a file.

Tested in tests/loading/test_reshard_files.py and tests/loading/test_reshard_plan.py.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, ValidationError, concat
from paddle_flexckpt.catalog.findings import Inspection
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.peers import MemoryPeers, ReshardOptions
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.memory.sources import check_sources, gather_virtual_files, owned_tensors
from paddle_flexckpt.memory.state import LocalState, open_state, state_fingerprint
from paddle_flexckpt.observers import observed
from paddle_flexckpt.overlaps import finish_steps
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.transfer.agreement import BRIEF_RUN, check_calls, check_coordinator, check_heads
from paddle_flexckpt.transfer.options import GROUP, SHARDS, UNUSED, takes
from paddle_flexckpt.transfer.plan_cache import encode_short
from paddle_flexckpt.transfer.targets import Targets
from paddle_flexckpt.transfer.transfer import Transfer

# The size of a plan's number, which one rank draws.
PLAN_BYTES = 6
_CONTEXT = "cannot reshard"


def virtual_file(rank: int) -> str:
    """Return the name of the virtual file that stands for a rank's memory."""
    return f"vfile_{rank}"


@takes(ReshardOptions, src_sharded_state_dict=SHARDS, dst_sharded_state_dict=SHARDS, process_group=GROUP)
@observed("reshard")
def reshard_sharded_state_dict(
    src_sharded_state_dict: Mapping[str, Any],
    dst_sharded_state_dict: Mapping[str, Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> LoadReport:
    """Move live state from one layout to another, in memory.

    ::

        source, target = model.sharded_state_dict(), other.sharded_state_dict()
        fc.reshard_sharded_state_dict(source, target)  # `other` has the values of `model`

    Every rank of the group calls this with the shards that it holds and the shards that it wants. A rank copies the
    bytes that it has itself, and receives exactly those that it lacks.

    Args:
        src_sharded_state_dict: Names to the shards (or plain, replicated tensors) that this rank holds. All ranks'
            together have to be whole tensors.
        dst_sharded_state_dict: Names to the shards to fill, in place. They may not share memory with a source, unless
            source and target are the very same shard.
        process_group: The ranks that take part; all ranks of the job by default.
        **options: Like all other arguments, of :class:`ReshardOptions`.

    Returns:
        What was done; ``bytes_received`` are the bytes that this rank lacked.

    Raises:
        ValidationError: The two sides do not fit (on every rank, with the same text); no target was changed.
        CheckpointError: A rank failed during the exchange (on every rank, with the same text); targets are partly
            overwritten.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, aoa_config=aoa_config, **options)
    comm = communicator_for(process_group)
    source, own, _ = _gather_sources(comm, src_sharded_state_dict, asked, "reshard_sharded_state_dict")
    return _load_state_dict(
        target_state_dict=dst_sharded_state_dict,
        source_state_dict=own,
        metadata_list=[source],
        process_group=comm,
        coordinator_rank=coordinator_rank,
        offload=offload,
        aoa_config=aoa_config,
        **options,
    )


@takes(ReshardOptions, src_sharded_state_dict=SHARDS, dst_sharded_state_dict=SHARDS, process_group=GROUP)
def plan_reshard(
    src_sharded_state_dict: Mapping[str, Any],
    dst_sharded_state_dict: Mapping[str, Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> ReshardPlan:
    """Plan a reshard to be run many times, such as from training to rollout layout in reinforcement learning.

    Every rank of the group calls this. The errors of a layout that does not fit are those of
    :func:`reshard_sharded_state_dict`; no target is touched yet.

    Args:
        src_sharded_state_dict: As in :func:`reshard_sharded_state_dict`; so are the target and the group.
        **options: Like all other arguments, of :class:`ReshardOptions`.

    Returns:
        The plan. It holds both state dicts until it is deleted.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, aoa_config=aoa_config, **options)
    return ReshardPlan(src_sharded_state_dict, dst_sharded_state_dict, communicator_for(process_group), asked)


class ReshardPlan:
    """A plan to move live state between two layouts as often as one likes; made by :func:`plan_reshard`.

    While nothing but values has changed, a run plans, gathers and checks nothing: ranks confirm this to each other in
    64 bytes and move the data. Replicas are compared in every run, by one more collective.
    """

    def __init__(
        self, source: Mapping[str, Any], target: Mapping[str, Any], comm: Communicator, options: ReshardOptions
    ) -> None:
        """Plan; arguments as of :func:`plan_reshard`."""
        self._source, self._target, self._comm, self._options = source, target, comm, options
        self._plan()
        self._peers.closing.close()

    @observed("reshard")
    def run(self) -> LoadReport:
        """Fill the targets with what the sources hold now. Every rank calls this.

        Where a tensor, a shard's place, a key or a rule has changed on any rank, all ranks plan anew first.

        Returns:
            What was done.

        Raises:
            ValidationError: What has changed does not fit, or replicas differ; no target was changed.
            CheckpointError: A rank failed during the exchange; targets are partly overwritten.
        """
        begin, peers = time.perf_counter(), self._peers
        finish_steps(self._comm.ranks)

        def look() -> tuple[None, bytes]:
            unchanged = self._planned and self._layout == self._layout_now()
            address = peers.renew() if self._planned else b""
            return None, encode_short(BRIEF_RUN, self._number, bytes([unchanged]) + address)

        with peers.closing:
            _, answers = self._comm.together(look, _CONTEXT)
            states = self._check_runs(answers)
            if all(each[0] for each in states) and peers.set_addresses([each[1:] for each in states]):
                return self._move(begin)
        self._plan()
        with self._peers.closing:
            return self._move(begin)

    def _check_runs(self, answers: list[bytes]) -> list[bytes]:
        """Return each rank's message about its plan: whether it still holds, and the rank's address."""
        comm, heads = self._comm, [split(answer)[0] if answer else b"" for answer in answers]
        check_calls(heads, _CONTEXT, comm.ranks)
        start = len(BRIEF_RUN) + PLAN_BYTES
        if len({head[:start] for head in heads}) > 1:
            remedy = "Remedy (FC502): run the plans in the same order on every rank"
            raise ValidationError([f"ranks run different plans of plan_reshard. {remedy}"], _CONTEXT)
        return [head[start:] for head in heads]

    def _plan(self) -> None:
        self._planned = False
        source, own, self._number = _gather_sources(self._comm, self._source, self._options, "plan_reshard")
        self._transfer, self._peers = _transfer_between_ranks(self._comm, self._target, source, own, self._options)
        try:
            self._transfer.prepare()
        except BaseException:
            self._peers.closing.close()
            raise
        # Only when all ranks have agreed that these are states: an error before would be this rank's alone.
        self._layout = self._layout_now()
        self._planned = True

    def _layout_now(self) -> Any:
        return state_fingerprint(self._source), state_fingerprint(self._target)

    def _move(self, begin: float) -> LoadReport:
        # If anything fails while data moves, the next run uses nothing that this one has left behind.
        self._planned = False
        report = self._transfer.carry_out(begin)
        self._planned = True
        return report


def _gather_sources(
    comm: Communicator, state_dict: Mapping[str, Any], options: ReshardOptions, call: str
) -> tuple[Catalog, dict[str, dict[str, Any]], bytes]:
    """Describe the sources of all ranks as virtual files; return the catalog, this rank's tensors by file
    and name, and a number that is unique to the call.
    """

    def describe_call() -> tuple[bytes, ...]:
        check_coordinator(comm, options.coordinator_rank)
        return options.encode(call), secrets.token_bytes(PLAN_BYTES)

    source, own, (numbers,) = gather_memory(comm, lambda: state_dict, describe_call, _CONTEXT)
    return source, own, numbers[0]


def gather_memory(
    comm: Communicator,
    describe: Callable[[], Mapping[str, Any]],
    describe_call: Callable[[], tuple[bytes, ...]],
    context: str,
) -> tuple[Catalog, dict[str, dict[str, Any]], list[tuple[bytes, ...]]]:
    """Describe what all ranks hold, each as a virtual file. One collective.

    Args:
        comm: The ranks.
        describe: Gives this rank's shards, or raises.
        describe_call: Checks the other arguments. It returns the message that has to be equal on all ranks, then any
            others.
        context: What is being done, for errors.

    Returns:
        The catalog of all; this rank's tensors and shards by virtual file and name; from every rank, the message of
        ``describe_call`` that need not be equal.

    Raises:
        ValidationError: A rank's shards or options are not sound, or ranks differ; the same on every rank.
    """
    mine = virtual_file(comm.rank)

    def look() -> tuple[LocalState, bytes]:
        head, *more = describe_call()
        state = open_state(describe(), comm.rank, mine)
        return state, join((head, encode_catalog(state.catalog), *more))

    state, answers = comm.together(look, context)
    catalogs, *others = check_heads(answers, context, comm.ranks)
    tensors = {
        key: tensor if weight is None else weight
        for key, weight, tensor in zip(state.catalog.keys, state.weights, state.tensors)
    }
    return concat([decode_catalog(catalog) for catalog in catalogs]), {mine: tensors}, others


class GatheredState:
    """All ranks' state in memory, described once, to fill targets from as often as wanted.

    Attributes:
        catalog: The shards of all ranks, each rank's in a virtual file.
        tensors: This rank's tensors.
        checked: The results of the checks of the shards.
        messages: The other messages that ranks gathered, as of :func:`gather_memory`.
    """

    def __init__(
        self,
        comm: Communicator,
        describe: Callable[[], Mapping[str, Any]],
        describe_call: Callable[[], tuple[bytes, ...]],
        context: str,
    ) -> None:
        """Describe the state of all ranks. One collective; arguments and errors as of :func:`gather_memory`."""
        self._comm, self._context = comm, context
        self.catalog, own, self.messages = gather_memory(comm, describe, describe_call, context)
        self._described = owned_tensors(self.catalog, own, comm.rank, context)
        owned = {row: getattr(value, "local_tensor", value) for row, value in self._described.items()}
        self.tensors = list(owned.values())
        self.checked = check_sources(comm, owned, self.catalog, context)

    def peers(self, options: ReshardOptions, readable: Inspection | None = None) -> MemoryPeers:
        """Return the source of these tensors; arguments as of :class:`MemoryPeers`."""
        return MemoryPeers(self._comm, self.catalog, self.checked, self._described, options, self._context, readable)

    def fill(
        self,
        describe: Callable[[], Targets],
        options: ReshardOptions,
        call: str,
        readable: Inspection | None = None,
        check: Callable[[np.ndarray], None] | None = None,
    ) -> LoadReport:
        """Fill targets of all ranks; ``describe`` gives this rank's, or raises. Every rank calls this.

        ``check`` checks the rows of the catalog that this rank provides, or raises.

        Raises:
            ValidationError: The two sides do not fit; no target was changed.
            CheckpointError: A rank failed during the exchange.
        """
        peers = self.peers(options, readable)
        peers.check = check
        return Transfer(self._comm, peers, describe, options, call, self._context).run()


@takes(
    ReshardOptions,
    target_state_dict=SHARDS,
    source_state_dict=SHARDS,
    metadata_list="the catalog of all sources is made from it, and every later step depends on that",
    process_group=GROUP,
    worker_groups=UNUSED,
    comm_method=UNUSED,
)
@observed("reshard")
def _load_state_dict(
    target_state_dict: Mapping[str, Any],
    source_state_dict: Mapping[str, Mapping[str, Any]],
    metadata_list: Iterable[Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    worker_groups: Any = None,
    comm_method: str = "direct",
    **options: Any,
) -> LoadReport:
    """Fill targets from (virtual) files whose tensors are in the ranks' memory."""
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, **options)
    comm = communicator_for(process_group)

    def targets() -> Catalog:
        return open_state(target_state_dict, comm.rank, is_source=False).catalog

    source = gather_virtual_files(comm, source_state_dict, metadata_list, targets, _CONTEXT)
    return _transfer_between_ranks(comm, target_state_dict, source, source_state_dict, asked)[0].run()


def _transfer_between_ranks(
    comm: Communicator,
    targets: Mapping[str, Any],
    source: Catalog,
    source_state_dict: Mapping[str, Mapping[str, Any]],
    options: ReshardOptions,
) -> tuple[Transfer, MemoryPeers]:
    """Return the transfer that fills targets from all ranks' shards, and its source.

    Arguments are those of :func:`_load_state_dict`.
    """
    described = owned_tensors(source, source_state_dict, comm.rank, _CONTEXT)
    owned = {row: getattr(value, "local_tensor", value) for row, value in described.items()}
    peers = MemoryPeers(comm, source, check_sources(comm, owned, source, _CONTEXT), described, options, _CONTEXT)
    describe = functools.partial(describe_targets, targets, comm.rank)
    return Transfer(comm, peers, describe, options, "_load_state_dict", _CONTEXT), peers
