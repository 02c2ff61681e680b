"""Sources whose rows are spread over the ranks: each rank copies the rows that it holds, and receives the others.

:class:`Peers` exchanges rows. :class:`MemoryPeers` has them in memory;
:class:`~paddle_flexckpt.loading.file_peers.FilePeers` reads them from files.

Memory counts as a checkpoint with virtual files: ``vfile_{rank}`` has the shards that a rank holds. The plan has the
pieces that a rank copies from its own memory, sends and receives.

Tested in tests/loading/test_reshard_files.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from paddle_flexckpt.catalog import Catalog, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.errors import OverflowingCastError
from paddle_flexckpt.catalog.findings import Inspection
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog
from paddle_flexckpt.communication.device_exchange import DeviceExchange, Traffic
from paddle_flexckpt.communication.group_communicators import device_group
from paddle_flexckpt.communication.rounds import HeldRows, Rounds
from paddle_flexckpt.loading.relay import Relay
from paddle_flexckpt.memory.device_memory import devices_of, has_views, wait_for_devices
from paddle_flexckpt.memory.replica_digests import Digests
from paddle_flexckpt.memory.sources import refuse_shared_memory
from paddle_flexckpt.memory.tensors import open_storage
from paddle_flexckpt.planning.exchange_plan import ExchangePlan, plan_exchange
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, concat_pieces, uncovered_targets
from paddle_flexckpt.planning.replica_comparison import Comparison, compare_whole
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import Transport, open_transport
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.saving.replica_policies import CheckReplicas, ReplicaPolicies
from paddle_flexckpt.transfer.copies import AnyStorage, Storage, copy_pieces
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.options import TransferOptions, rule
from paddle_flexckpt.transfer.source import Source, Task


@dataclass(frozen=True)
class ReshardOptions(TransferOptions):
    """The options of a reshard.

    Attributes:
        offload: Send tensor data of devices through host memory and sockets, not through the backend's collectives. The
            reshard then needs no device memory. Without a device the option makes no difference.
        check_replicas: How the replicas of one source shard are compared, as in :func:`save_state_dict`. Where they may
            differ, every rank gets the values of one rank, even if it holds others itself.
    """

    offload: bool = False
    check_replicas: CheckReplicas = field(
        default=True, metadata=rule(compared=lambda value: ReplicaPolicies(value).agreed)
    )


class Peers(Source):
    """A source that fills targets from the shards of all ranks together.

    Attributes:
        catalog: One row per shard, with the rank that holds it.
        rows: The rows that an exchange reads its pieces from; known when it is planned.
        replicas: As of :class:`LoadReport`.
        relay: What forwards pieces among the ranks of a node, if anything does.
    """

    rows: Catalog
    relay: Relay | None = None
    replicas: Mapping[str, str] = {}
    path = "memory"
    between_ranks = True
    _plan: ExchangePlan | None = None

    def __init__(self, comm: Communicator, context: str, offload: bool) -> None:
        """Take the ranks, and whether data of devices goes through host memory. The transport opens on first use."""
        super().__init__()
        self._comm, self._context, self._offload = comm, context, offload

    @functools.cached_property
    def _transport(self) -> Transport:
        transport = open_transport(self._comm)
        self.closing.callback(transport.close)
        return transport

    @functools.cached_property
    def _address(self) -> bytes:
        return self._transport.address()

    @property
    def owned(self) -> Mapping[int, Any]:
        """Return this rank's tensors by row; none where they are in files."""
        return {}

    def storage(self, row: int) -> AnyStorage:
        """Return the storage of a row that this rank holds."""
        return open_storage(self.owned[row])

    def plan_own(self, targets: Catalog, task: Task) -> ExchangePlan | None:
        """Plan this rank's part of the exchange, and check it; None if there is to be no exchange.

        Args:
            targets: The targets of all ranks.
            task: The targets of this rank.
        """
        raise NotImplementedError

    @property
    def round_of_row(self) -> np.ndarray:
        """Return int64 per row, the round in which its rank sends it."""
        return np.zeros(len(self.rows), dtype=np.int64)

    def open_rows(self, rounds: Rounds) -> HeldRows:
        """Return this rank's rows, round by round."""
        return HeldRows(functools.cache(self.storage))

    def describe_replicas(self) -> tuple[bytes, bytes]:
        """Return this rank's message for :meth:`compare_replicas`."""
        return b"", b""

    def compare_replicas(self, digests: Sequence[bytes], policies: Sequence[bytes]) -> None:
        """Compare the replicas of shards, to find out which may be read."""

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Check that no target overwrites a source; return this rank's message to the others."""
        self._wait_for_devices(task)
        refuse_shared_memory(self.catalog, self.owned, task.resolution.targets, _names_in_place(task))
        dtypes = [*self.catalog.dtypes, *task.resolution.targets.catalog.dtypes]
        # Whether this rank can exchange between devices, and whether it has a tensor on one.
        usable = device_group(self._comm) is not None and not self._offload and has_views(dtypes)
        use = bytes([usable, bool(self._devices)])
        return (*self.describe_replicas(), self._address, encode_catalog(task.plan.in_order), use)

    def _wait_for_devices(self, task: Task) -> None:
        self._devices = sorted({*devices_of(self.owned.values()), *task.memory.devices})
        wait_for_devices(self._devices)

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Plan the messages between ranks."""
        digests, policies, addresses, encoded, use = answers
        self.compare_replicas(digests, policies)
        targets = concat([decode_catalog(each) for each in encoded])

        def plan() -> tuple[DeviceExchange | None, bytes]:
            self._plan = self.plan_own(targets, task)
            if self._plan is None or not _on_devices(use):
                return None, b""
            exchange = DeviceExchange(device_group(self._comm), self._plan, self.rows)
            return exchange, exchange.sent

        self._set_addresses(addresses)
        self._on_device, self._sent = self._comm.together(plan, self._context)

    def again(self) -> Peers:
        """Return the same source with connections of its own, through host memory."""
        twin = cast("Peers", super().again())
        twin._offload = twin.between_ranks = True
        for name in ("_transport", "_address"):
            twin.__dict__.pop(name, None)
        return twin

    def renew(self) -> bytes:
        """Prepare to carry out the same plan again; return the address at which the others reach this rank."""
        self.closing.close()
        del self._transport, self._address
        wait_for_devices(self._devices)
        return self._address

    def _set_addresses(self, addresses: Sequence[bytes]) -> None:
        """Record the addresses of the other ranks."""
        self._addresses = list(addresses)

    def set_addresses(self, addresses: list[bytes]) -> bool:
        """Record the addresses of the other ranks; return whether the plan still holds."""
        self._set_addresses(addresses)
        return True

    def move(self, task: Task) -> dict[str, Any]:
        """Copy, send and receive."""
        plan, filling = self._plan, Filling(task.plan, task.memory)
        if plan is None:
            raise RuntimeError("no exchange was planned")
        try:
            copied = self._fill(plan, filling)
        except OverflowingCastError as error:
            raise error.of_key(filling.catalog.key_name(error.row)) from None
        filling.finish()
        # Only the device's stream orders copies within the device, and the next user may be on another stream.
        wait_for_devices(self._devices)
        itemsize = self.rows.itemsize
        received, sent = (
            sum(int((p.size * itemsize[p.source]).sum()) for p in side.values())
            for side in (plan.incoming, plan.outgoing)
        )
        relayed, relays = (
            sum(int((p.size * filling.catalog.itemsize[p.source]).sum()) for p in side.values())
            for side in (plan.relayed, plan.relays)
        )
        return {
            "bytes_needed": copied + received + relayed,
            "bytes_copied": copied,
            "bytes_received": received + relayed,
            "bytes_sent": sent + relays,
            "peak_scratch_bytes": filling.peak_scratch_bytes,
            "replicas": self.replicas,
        }

    def _fill(self, plan: ExchangePlan, filling: Filling) -> int:
        """Fill all rows except those that are computed; return the bytes that were copied within this rank's memory."""
        relay = self.relay if plan.relays or plan.relayed else None
        try:
            if self._on_device is not None:
                storage = functools.cache(self.storage)
                self._on_device.run(Traffic.of(self._sent), self._comm.position, storage, filling.storage)
                # After the exchange: peers would wait for the connections of a rank that failed before it.
                copied = copy_pieces(plan.local, storage, filling.storage)
            else:
                copied = self._exchange(plan, filling.storage)
            copy_pieces(plan.repeated, filling.storage, filling.storage)
        except BaseException:
            if relay is not None:
                relay.refuse(plan)
            raise
        if relay is not None:
            relay.forward(plan, filling)
        return copied + plan.repeated_bytes

    def _exchange(self, plan: ExchangePlan, target: Storage) -> int:
        """Send and receive through host memory; return the bytes that were copied within this rank's memory."""
        rounds = Rounds(plan, self.round_of_row)
        dtypes = [dtype_of(name).numpy for name in self.rows.dtypes]
        with contextlib.closing(self.open_rows(rounds)) as rows:
            sending = rounds.sending(rows)
            receiving = rounds.receiving(rows, target, lambda row: dtypes[self.rows.dtype[row]])
            self._transport.exchange_rounds(self._addresses, rounds.peers, sending, receiving, rows.stop)
        return rounds.bytes_copied


def _names_in_place(task: Task) -> list[str]:
    """Return names for the targets such that none looks like a source shard that it does not come from.

    A target may be the same tensor as the source shard of its name, unless statements give the name to another tensor.
    """
    keys, names = list(task.resolution.targets.catalog.keys), task.resolution.catalog.keys
    for row in task.resolution.targets.masters:
        keys[row] = names[row]  # the source has the master under this name, if it is the same tensor
    moved = set() if task.mapping is None else task.mapping.moved_keys(names)
    return [
        f"{key} as AOA makes it" if task.mapping is not None and (key != name or name in moved) else key
        for key, name in zip(keys, names)
    ]


def plan_rank(
    matcher: ShardMatcher, targets: Catalog, task: Task, rank: int, node: np.ndarray | None = None
) -> ExchangePlan:
    """Return one rank's part of an exchange, in rows of its own plan, checked to fill all of these.

    ``node``: as of :func:`plan_exchange`.

    Raises:
        ValidationError: Something is left unfilled.
    """
    plan = plan_exchange(matcher, targets, rank, maps=task.maps, node=node)
    mine = np.flatnonzero(targets.rank == rank)
    covered = np.zeros(len(targets), dtype=np.int64)
    if task.plan.covered_in_order is not None:
        covered[mine] = task.plan.covered_in_order
    arriving = [plan.local, *plan.incoming.values(), plan.repeated, *plan.relayed.values()]
    pieces = concat_pieces(arriving, plan.local.extents.shape[1])
    problems = uncovered_targets(pieces, targets, mine, covered)
    if problems:
        raise ValidationError(problems)
    own = np.zeros(len(targets), dtype=np.int64)
    own[mine] = task.plan.order
    return replace(
        plan,
        local=replace(plan.local, target=own[plan.local.target]),
        incoming={each: replace(pieces, target=own[pieces.target]) for each, pieces in plan.incoming.items()},
        repeated=_renumbered(plan.repeated, own),
        relays={each: replace(pieces, source=own[pieces.source]) for each, pieces in plan.relays.items()},
        relayed={each: _renumbered(pieces, own) for each, pieces in plan.relayed.items()},
    )


def _renumbered(pieces: Pieces, own: np.ndarray) -> Pieces:
    """Return copies between targets, by rows of this rank's plan."""
    return replace(pieces, source=own[pieces.source], target=own[pieces.target])


def _on_devices(flags: Iterable[bytes]) -> bool:
    """Return whether data goes between devices, the same on every rank: if one cannot, all goes through host memory."""
    usable, used = zip(*flags)
    return all(usable) and any(used)


class MemoryPeers(Peers):
    """The shards in the ranks' memory.

    Attributes:
        readable: The shards any replica of which may be read; known when replicas are compared.
        check: A check of the rows that this rank is about to read, which raises if they are wrong.
    """

    readable: Inspection | None
    check: Callable[[np.ndarray], None] | None = None

    def __init__(
        self,
        comm: Communicator,
        catalog: Catalog,
        checked: Inspection,
        described: Mapping[int, Any],
        options: ReshardOptions,
        context: str,
        readable: Inspection | None = None,
    ) -> None:
        """Take what the ranks hold; ``described`` has this rank's tensors or shards by row.

        ``readable``: the result of an earlier comparison of replicas; they are not compared again.
        """
        super().__init__(comm, context, options.offload)
        self.readable = readable
        self.catalog, self._checked = catalog, checked
        self._described, self._options = described, options

    @functools.cached_property
    def owned(self) -> Mapping[int, Any]:
        """Return this rank's tensors by row."""
        return {row: getattr(value, "local_tensor", value) for row, value in self._described.items()}

    @functools.cached_property
    def _rules(self) -> ReplicaPolicies:
        return ReplicaPolicies(self._options.check_replicas)

    def describe_replicas(self) -> tuple[bytes, bytes]:
        """Return this rank's message for :meth:`compare_replicas`."""
        return self._replicas if self.readable is None else (b"", b"")

    @functools.cached_property
    def _replicas(self) -> tuple[bytes, bytes]:
        keys = [self.catalog.key_name(row) for row in self.owned]
        return self._digests(), self._rules.of(keys, list(self._described.values())).tobytes()

    @functools.cached_property
    def _comparison(self) -> Comparison:
        groups = self._checked.groups
        return compare_whole(self.catalog, groups, np.full(len(groups), self._rules.compares))

    def _digests(self) -> bytes:
        mine = self._comparison.of_rank(self.catalog, self._comm.rank)
        with Digests(self.owned, self.catalog, mine) as digests:
            return digests.encode()

    def compare_replicas(self, digests: Sequence[bytes], policies: Sequence[bytes]) -> None:
        """Compare the replicas of shards, to find out which may be read."""
        if self.readable is not None:
            return
        comm, asked = self._comm, np.zeros(len(self.catalog), dtype=np.uint8)
        for rank, numbers in zip(comm.ranks, policies):
            asked[self.catalog.rank == rank] = np.frombuffer(numbers, dtype=np.uint8)
        compares, groups = self._rules.compares, self._checked.groups
        replicas = Replicas(comm, self.owned, self.catalog, groups, asked, compares, self._context)
        differing = replicas.compare(self._comparison, digests)
        self._compares_again = replicas if compares and (groups.count > 1).any() else None
        self._differed = bool(differing.any())
        self.replicas = replicas.report(differing, comm.position == self._options.coordinator_rank)
        self.readable = self._checked._replace(groups=replicas.narrowed(differing if replicas.compares else None))

    def plan_own(self, targets: Catalog, task: Task) -> ExchangePlan | None:
        """Plan this rank's part of the exchange, from the shards that it holds."""
        self.rows = self.catalog
        plan = plan_rank(self.matcher(), targets, task, self._comm.rank)
        if self.check is not None:
            given = [plan.local.source, *(pieces.source for pieces in plan.outgoing.values())]
            self.check(np.unique(np.concatenate(given)))
        return plan

    def matcher(self) -> ShardMatcher:
        """Return the matcher of the shards to read; replicas have been compared."""
        if self.readable is None:
            raise RuntimeError("replicas were not compared")
        return ShardMatcher(self.catalog, self.readable.groups, self.readable.coverage)

    def set_addresses(self, addresses: list[bytes]) -> bool:
        """Record the addresses of the other ranks; return whether the plan still holds: no replicas differ.

        One collective where there are replicas to be compared. Raises as :meth:`Replicas.compare`.
        """
        super().set_addresses(addresses)
        again = self._compares_again
        if again is None:
            return True
        _, digests = self._comm.together(lambda: (None, self._digests()), self._context)
        return not again.compare(self._comparison, digests).any() and not self._differed
