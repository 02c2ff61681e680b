"""reshard_sharded_state_dict: live shards into another layout, through the same plan as a load, without a file.

Memory is a checkpoint whose files are virtual: ``vfile_{rank}`` is what rank holds. The plan says which pieces a rank
copies from its own memory, sends and receives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.copies import AnyStorage, copy_pieces, pack, unpack
from paddle_flexckpt.engine.names import check_across_ranks
from paddle_flexckpt.engine.options import GROUP, SHARDS, UNUSED, TransferOptions, rule, takes
from paddle_flexckpt.engine.plan import Work, plan_work
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.completion import complete, match
from paddle_flexckpt.live.device_exchange import DeviceExchange, Traffic
from paddle_flexckpt.live.device_memory import devices_of, has_views, wait_for_devices
from paddle_flexckpt.live.live_masters import renew_masters
from paddle_flexckpt.live.loader import check_unexpected, gather_targets, used_keys
from paddle_flexckpt.live.replica_policies import CheckReplicas, ReplicaPolicies
from paddle_flexckpt.live.replicas import Replicas, replica_digests
from paddle_flexckpt.live.shared_memory import refuse_shared_memory
from paddle_flexckpt.live.sources import CheckedSources, check_sources
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.live.target_memory import TargetMemory
from paddle_flexckpt.live.targets import Wanted
from paddle_flexckpt.live.tensors import open_storage
from paddle_flexckpt.live.transport import Transport
from paddle_flexckpt.live.virtual_files import gather_virtual_files, held_tensors
from paddle_flexckpt.planning import ExchangePlan, ShardMatcher, plan_exchange
from paddle_flexckpt.planning.matching import concat_pieces, uncovered_targets
from paddle_flexckpt.report import LoadReport, order_warning

logger = logging.getLogger("paddle_flexckpt")
_CONTEXT = "cannot reshard"


def virtual_file(rank: int) -> str:
    """Name of the virtual file that stands for a rank's memory."""
    return f"vfile_{rank}"


@dataclass(frozen=True)
class ReshardOptions(TransferOptions):
    """Hold the options of a reshard.

    Attributes:
        offload: Let tensor data of devices go through host memory and sockets, not through the backend's collectives;
            it takes no device memory then. Without a device it makes no difference.
        check_replicas: What is asked of the replicas of one source shard, as in :func:`save_state_dict`. Where they may
            differ, every rank is given the values of one rank, even if it holds others itself.
    """

    offload: bool = False
    check_replicas: CheckReplicas = field(
        default=True, metadata=rule(compared=lambda value: ReplicaPolicies(value).agreed)
    )


@takes(ReshardOptions, src_sharded_state_dict=SHARDS, dst_sharded_state_dict=SHARDS, process_group=GROUP)
def reshard_sharded_state_dict(
    src_sharded_state_dict: Mapping[str, Any],
    dst_sharded_state_dict: Mapping[str, Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> LoadReport:
    """Moves live state from one layout to another, in memory.

    Every rank of the group calls this with the shards that it holds and the shards that it wants. What a rank has
    itself it copies; it receives exactly the bytes that it lacks.

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
        CheckpointError: A rank failed during the exchange (likewise); targets are partly overwritten.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, aoa_config=aoa_config, **options)
    comm = communicator_for(process_group)
    mine = virtual_file(comm.rank)

    def describe() -> tuple[LocalState, bytes]:
        check_coordinator(comm, coordinator_rank)
        state = open_state(src_sharded_state_dict, comm.rank, mine)
        return state, join((asked.encode("reshard_sharded_state_dict"), encode_catalog(state.catalog)))

    state, answers = comm.together(describe, _CONTEXT)
    source = concat([decode_catalog(catalog) for catalog in check_heads(answers, _CONTEXT)[0]])
    tensors = {state.catalog.key_name(row): weight for row, weight in enumerate(state.weights)}
    return _fill_from_memory(comm, dst_sharded_state_dict, {mine: tensors}, [source], asked)


@takes(
    ReshardOptions,
    target_state_dict=SHARDS,
    source_state_dict=SHARDS,
    metadata_list="the catalog of all sources is made from it, and every later step depends on that",
    process_group=GROUP,
    worker_groups=UNUSED,
    comm_method=UNUSED,
)
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
    """Fills targets from (virtual) files whose tensors are in the ranks' memory.

    Args:
        target_state_dict: Names to the shards to fill.
        source_state_dict: For every file that this rank holds, its tensors (or ShardedWeights) by name.
        metadata_list: What all files of all ranks hold, the same on every rank: catalogs, or ``Metadata`` objects (of
            this library or of Paddle). Global shapes that they leave out are those of the targets.
        process_group: The ranks that take part.
        worker_groups: Accepted for compatibility.
        comm_method: Accepted for compatibility: tensors go straight from holder to receiver.
        **options: Like all other arguments, of :class:`ReshardOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: The two sides do not fit; no target was changed.
        CheckpointError: A rank failed during the exchange.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, **options)
    return _fill_from_memory(
        communicator_for(process_group), target_state_dict, source_state_dict, metadata_list, asked
    )


def _fill_from_memory(
    comm: Communicator,
    target_state_dict: Mapping[str, Any],
    source_state_dict: Mapping[str, Mapping[str, Any]],
    metadata_list: Iterable[Any],
    asked: ReshardOptions,
) -> LoadReport:
    source = gather_virtual_files(
        comm, source_state_dict, metadata_list, lambda: open_state(target_state_dict, comm.rank).catalog, _CONTEXT
    )
    described = held_tensors(source, source_state_dict, comm.rank, _CONTEXT)
    held = {row: getattr(value, "local_tensor", value) for row, value in described.items()}
    checked = check_sources(comm, held, source, _CONTEXT)

    report = fill_targets(
        comm,
        target_state_dict,
        _MemorySource(source, checked, described, asked.check_replicas),
        lambda: asked.encode("_load_state_dict"),
        asked,
        _CONTEXT,
        offload=asked.offload,
    )
    if report.maybe_fused:
        logger.warning(f"rank {comm.rank}: {order_warning(report.source, report.maybe_fused)}")
    if comm.position == asked.coordinator_rank:
        logger.info(report.summary())
    return report


@dataclass(frozen=True, eq=False)
class Source:
    """What all ranks hold together, in memory or in files that not every rank sees.

    Attributes:
        catalog: One row per shard, with the rank that holds it.
        checked: What is known about it.
    """

    catalog: Catalog
    checked: CheckedSources

    @property
    def held(self) -> Mapping[int, Any]:
        """This rank's tensors by row; none where they are in files."""
        return {}

    def storage(self, row: int) -> AnyStorage:
        """Return the storage of a row that this rank holds."""
        raise NotImplementedError

    def check_plan(self, plan: ExchangePlan) -> None:
        """Raise where this rank's part of the exchange cannot be carried out."""

    def replicas(self) -> tuple[bytes, bytes]:
        """Return what the others need for :meth:`compare`."""
        return b"", b""

    def compare(
        self,
        comm: Communicator,
        digests: Sequence[bytes],
        policies: Sequence[bytes],
        coordinator_rank: int,
        context: str,
    ) -> tuple[CheckedSources, dict[str, str]]:
        """Compare the replicas of shards; return which may be read, and what became of those that differ."""
        return self.checked, {}


@dataclass(frozen=True, eq=False)
class _MemorySource(Source):
    """Read shards in the ranks' memory.

    Attributes:
        described: This rank's tensors or shards by row.
        check_replicas: What is asked of replicas.
    """

    described: Mapping[int, Any]
    check_replicas: CheckReplicas

    @functools.cached_property
    def held(self) -> Mapping[int, Any]:
        return {row: getattr(value, "local_tensor", value) for row, value in self.described.items()}

    @functools.cached_property
    def _rules(self) -> ReplicaPolicies:
        return ReplicaPolicies(self.check_replicas)

    def storage(self, row: int) -> AnyStorage:
        return open_storage(self.held[row])

    def replicas(self) -> tuple[bytes, bytes]:
        return self._replicas

    @functools.cached_property
    def _replicas(self) -> tuple[bytes, bytes]:
        keys = [self.catalog.key_name(row) for row in self.held]
        digests = replica_digests(self.held, self.checked.groups) if self._rules.compares else b""
        return digests, self._rules.of(keys, list(self.described.values())).tobytes()

    def compare(
        self,
        comm: Communicator,
        digests: Sequence[bytes],
        policies: Sequence[bytes],
        coordinator_rank: int,
        context: str,
    ) -> tuple[CheckedSources, dict[str, str]]:
        asked = np.zeros(len(self.catalog), dtype=np.uint8)
        for rank, told in zip(comm.ranks, policies):
            asked[self.catalog.rank == rank] = np.frombuffer(told, dtype=np.uint8)
        replicas = Replicas(comm, self.held, self.catalog, self.checked.groups, asked, self._rules.compares, context)
        differing = replicas.compare(digests)
        groups = replicas.narrowed(differing if replicas.compares else None)
        return replace(self.checked, groups=groups), replicas.report(differing, comm.position == coordinator_rank)


def fill_targets(
    comm: Communicator,
    target_state_dict: Mapping[str, Any],
    source: Source,
    head: Callable[[], bytes],
    policy: TransferOptions,
    context: str,
    *,
    offload: bool,
) -> LoadReport:
    """Fill targets from what all ranks hold together: each rank copies what it holds and receives what it lacks.

    Args:
        comm: The ranks that take part.
        target_state_dict: Names to the shards to fill.
        source: What they are filled from.
        head: Gives what ranks have to agree about, or raises.
        policy: Says what is allowed.
        context: What is being done, for errors.
        offload: As in :class:`ReshardOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: The two sides do not fit; no target was changed.
        CheckpointError: A rank failed during the exchange.
    """
    begin = time.perf_counter()
    aoa_config = policy.aoa_config
    catalog, held = source.catalog, source.held

    @functools.cache
    def describe() -> tuple[LocalState, bytes]:
        return open_state(target_state_dict, comm.rank), head()

    all_targets = None if aoa_config is None else gather_targets(comm, describe, context)
    statements: list[str] = []
    with contextlib.closing(comm.open_transport()) as transport:

        def prepare() -> tuple[_Prepared, bytes]:
            state, head = describe()
            devices = devices_of((*held.values(), *(weight.local_tensor for weight in state.weights)))
            wait_for_devices(devices)
            mapping, wanted = match(state, catalog, policy, aoa_config, None if aoa_config is None else all_targets)
            needs = wanted.completion(catalog)
            if statements and all_targets is not None:
                mapping, wanted = complete(wanted, statements, state, catalog, policy, aoa_config, all_targets)
            refuse_shared_memory(catalog, held, _in_place(state, wanted, mapping))
            work = plan_work(wanted.catalog, wanted.rows, mapping)
            parts = (
                head,
                json.dumps(needs).encode(),
                *source.replicas(),
                transport.address(),
                np.packbits(used_keys(catalog, wanted, mapping)).tobytes(),
                encode_catalog(work.catalog),
                json.dumps(wanted.raw_meanings).encode(),
                _device_use(comm, offload, catalog, state, devices),
            )
            return _Prepared(state, wanted, mapping, work, devices), join(parts)

        ready, answers = comm.together(prepare, context)
        needed, digests, policies, addresses, bits, encoded, names, use = check_heads(answers, context)
        statements = sorted({statement for texts in needed for statement in json.loads(texts)})
        if statements:
            # Whoever sends has to know them too.
            if all_targets is None:
                all_targets = gather_targets(comm, describe, context)
            ready, answers = comm.together(prepare, context)
            _, digests, policies, addresses, bits, encoded, names, use = check_heads(answers, context)
        check_across_ranks([json.loads(each) for each in names], context)
        checked, replicas = source.compare(comm, digests, policies, policy.coordinator_rank, context)
        unexpected = check_unexpected(catalog, bits, ready.mapping, policy, context)
        target = concat([decode_catalog(each) for each in encoded])
        # Ranks' rows follow each other in the common catalog.
        first = int(np.argmax(target.rank == comm.rank)) if len(target) else 0

        def planned() -> tuple[_Exchange, bytes]:
            plan = _plan(catalog, checked, target, ready, comm.rank)
            source.check_plan(plan)
            exchange = _Exchange(comm, plan, source, (ready, first), _on_devices(use))
            return exchange, exchange.sent

        exchange, sent = comm.together(planned, context)
        planned_at = time.perf_counter()
        counts, answers = comm.together(lambda: exchange.run(transport, list(addresses), sent), context)
    kept = ready.work.kept_keys(ready.state.catalog)
    renew_masters(ready.state, {*ready.wanted.missing, *kept}, comm.rank)
    end = time.perf_counter()
    return LoadReport(
        source="memory",
        unique_id=None,
        keys=len(ready.wanted.rows),
        missing=ready.wanted.missing,
        unexpected=unexpected,
        aliases=ready.wanted.aliases,
        cast=ready.wanted.cast,
        masters=ready.wanted.masters,
        fused=ready.wanted.fused,
        maybe_fused=ready.wanted.maybe_fused,
        replicas=replicas,
        kept=kept,
        computed=ready.work.computed_keys(ready.state.catalog),
        bytes_needed=counts["copied"] + counts["received"],
        bytes_copied=counts["copied"],
        bytes_received=counts["received"],
        bytes_sent=counts["sent"],
        peak_scratch_bytes=counts["peak_scratch"],
        total_bytes=sum(int(answer) for answer in answers),
        seconds={"plan": planned_at - begin, "exchange": end - planned_at, "total": end - begin},
    )


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One rank's targets, checked."""

    state: LocalState
    wanted: Wanted
    mapping: TensorMapping | None
    work: Work
    devices: list[str]


def _in_place(state: LocalState, wanted: Wanted, mapping: TensorMapping | None) -> LocalState:
    """The targets, with such names that none of them looks like the source that it does not come from.

    A target may be the very source shard of its name, but not if statements make something else of that name.
    """
    if mapping is None:
        return state
    moved = mapping.moved_keys(wanted.catalog.keys)
    names = (
        f"{key} as AOA makes it" if key != name or name in moved else key
        for key, name in zip(state.catalog.keys, wanted.catalog.keys)
    )
    return LocalState(state.weights, replace(state.catalog, keys=tuple(names)))


def _plan(source: Catalog, checked: CheckedSources, target: Catalog, ready: _Prepared, rank: int) -> ExchangePlan:
    """This rank's part of the exchange, checked to fill all of its targets and scratch."""
    matcher, maps = ShardMatcher(source, checked.groups, checked.coverage), None
    if ready.mapping is not None:
        maps = ready.mapping.maps
    plan = plan_exchange(matcher, target, rank, maps=maps)
    mine = np.flatnonzero(target.rank == rank)
    covered = np.zeros(len(target), dtype=np.int64)
    if ready.work.covered is not None:
        covered[mine] = ready.work.covered
    pieces = concat_pieces([plan.local, *plan.incoming.values(), plan.repeated], plan.local.extents.shape[1])
    problems = uncovered_targets(pieces, target, mine, covered)
    if problems:
        raise ValidationError(problems)
    return plan


def _device_use(comm: Communicator, offload: bool, source: Catalog, state: LocalState, devices: Sequence[str]) -> bytes:
    """Return two flags for the other ranks: whether this rank can exchange between devices, and has a tensor on one."""
    usable = comm.device_group is not None and not offload and has_views([*source.dtypes, *state.catalog.dtypes])
    return bytes([usable, bool(devices)])


def _on_devices(flags: Iterable[bytes]) -> bool:
    """Return whether data goes between devices, the same on every rank; where one cannot, host memory carries all."""
    usable, used = zip(*flags)
    return all(usable) and any(used)


class _Exchange:
    """Carry out one rank's part of a planned exchange.

    Attributes:
        sent: What the other ranks have to know before it begins.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: ExchangePlan,
        source: Source,
        targets: tuple[_Prepared, int],
        on_devices: bool,
    ) -> None:
        """Take what memory it needs.

        Args:
            comm: The ranks.
            plan: This rank's part.
            source: What the targets are filled from.
            targets: This rank's targets, and their first row in the target catalog of all ranks.
            on_devices: Whether data goes between devices, and not through host memory.
        """
        self._position, self._plan = comm.position, plan
        self._source, self._open = source.catalog, source.storage
        self._ready, self._first = targets
        self._on_device = DeviceExchange(comm.device_group, plan, self._source) if on_devices else None
        self.sent = b"" if self._on_device is None else self._on_device.sent

    def run(self, transport: Transport, addresses: list[bytes], sent: list[bytes]) -> tuple[dict[str, int], bytes]:
        """Carry it out; return the bytes copied, received and sent, and the peak of scratch.

        Args:
            transport: Carries data through host memory.
            addresses: Its addresses on every rank.
            sent: Every rank's :attr:`sent`.
        """
        memory = TargetMemory(self._ready.state, self._ready.wanted, self._ready.work)
        opened: dict[int, AnyStorage] = {}

        def source_storage(row: int) -> AnyStorage:
            if row not in opened:
                opened[row] = self._open(row)
            return opened[row]

        def target_storage(row: int) -> AnyStorage:
            return memory.storage(row - self._first)

        def source_dtype(row: int) -> np.dtype:
            return dtype_of(self._source.dtype_name(row)).numpy

        plan = self._plan
        if self._on_device is not None:
            self._on_device.run(Traffic.of(sent), self._position, source_storage, target_storage)
        else:
            transport.exchange(
                addresses,
                {rank: pack(pieces, source_storage) for rank, pieces in plan.outgoing.items()},
                {rank: unpack(pieces, target_storage, source_dtype) for rank, pieces in plan.incoming.items()},
            )
        # After the exchange: a rank that failed before it would leave its peers waiting for its connections.
        copied = copy_pieces(plan.local, source_storage, target_storage)
        copy_pieces(plan.repeated, target_storage, target_storage)
        copied += plan.repeated_bytes
        memory.finish()
        # Copies within a device are only ordered by its stream; whoever looks next may be on another.
        wait_for_devices(self._ready.devices)
        itemsize = self._source.itemsize
        received, outgoing = (
            sum(int((p.size * itemsize[p.source]).sum()) for p in side.values())
            for side in (plan.incoming, plan.outgoing)
        )
        counts = {"copied": copied, "received": received, "sent": outgoing, "peak_scratch": memory.peak_scratch_bytes}
        return counts, str(copied + received).encode()
