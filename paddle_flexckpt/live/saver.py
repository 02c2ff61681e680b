"""save_state_dict: live shards into a checkpoint directory."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from paddle_flexckpt.background import (
    BackgroundWriter,
    SaveHandle,
    SaveSlot,
    WriteJob,
    announce_failure,
    await_earlier,
    shared_writer,
)
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError, check_extra_names, concat
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.copies import DEVICE_CHUNK_BYTES
from paddle_flexckpt.engine.options import GROUP, PATH, SHARDS, UNUSED, encode_options, same_on_all_ranks
from paddle_flexckpt.foreign.formats import open_to_save, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.live.fused import indivisible_rows
from paddle_flexckpt.live.lost_ranks import own_presence
from paddle_flexckpt.live.node_saves import NodeSave, Storage, check_storage, check_visible, meet_nodes
from paddle_flexckpt.live.replica_policies import CheckReplicas, ReplicaPolicies
from paddle_flexckpt.live.replicas import Replicas, replica_digests
from paddle_flexckpt.live.sources import check_sources
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.live.tensors import open_storage
from paddle_flexckpt.media.backend import Location, place_of
from paddle_flexckpt.media.locks import SaveLock
from paddle_flexckpt.native.dead_saves import remove_dead_saves
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.planning import WritePlan, plan_write
from paddle_flexckpt.report import SaveReport

logger = logging.getLogger("paddle_flexckpt")


@overload
def save_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = ...,
    coordinator_rank: int = ...,
    unique_id: int | None = ...,
    async_save: Literal[False] = ...,
    safetensors: bool = ...,
    save_replicas: bool = ...,
    *,
    step: int | None = ...,
    check_replicas: CheckReplicas = ...,
    storage: Storage = ...,
    node_copies: int = ...,
) -> SaveReport: ...


@overload
def save_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = ...,
    coordinator_rank: int = ...,
    unique_id: int | None = ...,
    async_save: bool | BackgroundWriter = ...,
    safetensors: bool = ...,
    save_replicas: bool = ...,
    *,
    step: int | None = ...,
    check_replicas: CheckReplicas = ...,
    storage: Storage = ...,
    node_copies: int = ...,
) -> SaveReport | SaveHandle: ...


@same_on_all_ranks(state_dict=SHARDS, path=PATH, process_group=GROUP, safetensors=UNUSED)
def save_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool | BackgroundWriter = False,
    safetensors: bool = True,
    save_replicas: bool = False,
    *,
    step: int | None = None,
    check_replicas: CheckReplicas = True,
    storage: Storage = "shared",
    node_copies: int = 1,
) -> SaveReport | SaveHandle:
    """Save a distributed state to a directory that all ranks share, or to one on each node.

    Every rank of the group calls this with its own shards. Each distinct shard is written once; replicas share the
    work evenly. The checkpoint exists, whole, once this returns on any rank; until then whatever was there before is
    what a reader finds.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested.
        path: The directory: a path, a URL, or what ``open_storage`` gives. It may hold several checkpoints, told apart
            by id.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        coordinator_rank: The rank, counted within the group, that chooses the id and commits.
        unique_id: The checkpoint's id. None takes the next free one. An id that exists is replaced, and stays what it
            was until the new checkpoint is complete.
        async_save: Return as soon as this rank's share is copied to memory that a writer process shares; that process
            does the rest. Tensors may be changed then. True: with one writer for the whole process; or a
            BackgroundWriter. It takes memory for the copy, and Linux.
        safetensors: Accepted for compatibility: data files are safetensors files always.
        save_replicas: Write every replica of every shard.
        step: Training step to record in the manifest.
        check_replicas: What is asked of the replicas of one shard. For all keys, or in a dict by glob or compiled
            regular expression: the first that matches counts, and ``"*"`` is the default (``"equal"`` without it).
            ``"equal"``, or True: the same bytes, else the save is an error. ``"close"``: where they differ, the values
            of one rank are saved, and the report and a warning say how far apart they are. ``"first"``: the values of
            one rank are saved, and the report says whether others differ. False: the same without comparing (with
            ``save_replicas`` they are compared nonetheless). That rank is, for a whole layer and its states, the lowest
            that holds them. Running statistics of normalisation layers are ``"first"`` unless a pattern matches them.
        storage: ``"shared"``: all ranks see the same directory. ``"per_node"``: the ranks of each node see one of their
            own, under the same path or another; each gets the data of its ranks and a manifest of all, and the
            checkpoint exists on all of them or on none. Which ranks share a directory is found out. It is loaded with
            ``storage="per_node"``; not with ``async_save``.
        node_copies: With ``storage="per_node"``: on how many nodes each data file is kept. With 2, a checkpoint
            survives the loss of any one node.

    Returns:
        What was done; of an asynchronous save, a handle. A failure of an asynchronous save is raised by its handle's
        ``result()``, or else by the next save on every rank, or else it is printed when the interpreter exits, and the
        exit status is 1.

    Raises:
        ValidationError: The state is not sound (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (likewise); the directory holds what it held before. Or an earlier
            asynchronous save failed and nobody has seen that; this one was not begun.
    """
    options = locals()
    begin = time.perf_counter()
    comm = communicator_for(process_group)
    per_node = storage == "per_node"
    context = "cannot save to the nodes' directories" if per_node else f"cannot save to {shown(path)}"

    @functools.cache
    def open_directory() -> NodeDirectory:
        return open_to_save(path)

    def encoded_head() -> bytes:
        check_storage(storage, node_copies, async_save is not False)
        said = ReplicaPolicies(check_replicas).said
        return encode_options(save_state_dict, options, async_save=async_save is not False, check_replicas=said)

    def describe() -> tuple[_Own, bytes]:
        head = encoded_head()
        queued = time.perf_counter()
        directory = open_directory()
        writer = _background_writer(async_save, directory)
        slot = None if writer is None else stack.enter_context(writer.open_slot())
        await_earlier(directory.path)
        waited = time.perf_counter() - queued
        check_coordinator(comm, coordinator_rank)
        state = open_state(state_dict, comm.rank)
        check_extra_names(state.catalog.keys)
        wait_for_devices(devices_of(weight.local_tensor for weight in state.weights))
        lock, ticket = None, None
        if nodes is not None:
            ticket = nodes.ticket
            stack.enter_context(opened).callback(nodes.discard)
            nodes.begin(node_copies)
        elif comm.position == coordinator_rank:
            lock = directory.lock()
            stack.enter_context(locked).callback(lock.release)
            ticket = directory.open_save(unique_id, comm.size)
            # If a rank fails that has not even begun, the marker is all there is.
            stack.enter_context(opened).callback(directory.discard, ticket, comm.rank)
        rules = ReplicaPolicies(check_replicas)
        whole = indivisible_rows(state.catalog, (getattr(weight, "fused", None) for weight in state.weights))
        policies = rules.of(state.catalog.keys, state.weights)
        place, address = place_of(directory.backend).encode(), b"" if transport is None else transport.address()
        encoded = (place, address, np.packbits(whole).tobytes(), policies.tobytes(), encode_catalog(state.catalog))
        # Where the other ranks' writers can look whether this rank's processes are alive.
        writer_address = "" if slot is None or comm.size == 1 else slot.address
        presences = [own_presence().address, writer_address] if writer_address else []
        said = (json.dumps(ticket and asdict(ticket)).encode(), json.dumps(presences).encode())
        return _Own(state, lock, slot, waited), join((head, *said, *encoded))

    locked, opened = contextlib.ExitStack(), contextlib.ExitStack()
    with contextlib.ExitStack() as stack:
        nodes, transport = None, None
        if per_node:
            nodes = meet_nodes(comm, open_directory, unique_id, encoded_head, stack, context)
            transport = stack.enter_context(contextlib.closing(comm.open_transport())) if node_copies > 1 else None
        try:
            own, answers = comm.together(describe, context)
            said = check_heads(answers, context, comm.ranks)
            tickets, presences, places, addresses, wholes, policies, catalogs = said
            ticket = SaveNames(**json.loads(tickets[coordinator_rank]))
            directory = open_directory()
            if nodes is None and len(set(places)) > 1:
                comm.together(lambda: check_visible(directory, ticket), "cannot save, and nothing was written")
        except LostRankError:
            opened.pop_all()  # others may know the ticket, and be writing already: the next save needs the marker
            raise
        opened.pop_all()  # from here on every rank removes what it wrote
        # A rank removes what it wrote only if the coordinator cannot commit: all know then that the save has failed.
        # If an exchange fails (a rank is lost) nobody knows how far the others are, and after the last exchange before
        # the commit only the coordinator does. The marker stays, and the next save removes what is left.
        try:
            decoded = [decode_catalog(encoded) for encoded in catalogs]
            catalog = concat(decoded)
            indivisible = np.concatenate([_unpacked(bits, len(rows)) for bits, rows in zip(wholes, decoded)])
            # Ranks' rows follow each other in the common catalog.
            first_row = int(np.argmax(catalog.rank == comm.rank)) if len(own.state.weights) else 0
            held = {first_row + row: weight.local_tensor for row, weight in enumerate(own.state.weights)}
            groups = check_sources(comm, held, catalog, context).groups
            asked, compares = np.frombuffer(b"".join(policies), dtype=np.uint8), check_replicas is not False
            replicas = Replicas(comm, held, catalog, groups, asked, compares, context, save_replicas)
            differing = None
            if replicas.comes_first:
                _, digests = comm.together(lambda: (None, replica_digests(held, groups)), context)
                differing = replicas.compare(digests)
            plan = plan_write(
                catalog,
                ticket.data_file,
                save_replicas=save_replicas,
                groups=replicas.narrowed(differing),
                indivisible=indivisible,
            )
            share = _Share(directory, ticket, comm, comm.ranks[coordinator_rank], plan, held, step, nodes)
            planned = time.perf_counter()

            def write() -> tuple[None, bytes]:
                part = b""
                if own.slot is None:
                    part = share.write()
                else:
                    share.stage(own.slot, own.lock, tuple(tuple(json.loads(each)) for each in presences))
                digests = replica_digests(held, groups) if replicas.compares and differing is None else b""
                return None, join((part, digests))

            _, answers = comm.together(write, context)
            parts, told = zip(*map(split, answers))
            differing = replicas.compare(told) if differing is None else differing
            found = replicas.report(differing, warns=share.is_coordinator)
            written = time.perf_counter()
            report = SaveReport(
                path=directory.path,
                unique_id=ticket.unique_id,
                keys=len(np.unique(plan.catalog.key)),
                items=len(plan.catalog),
                bytes_written=int(share.items.byte_length.sum()),
                total_bytes=plan.total_bytes,
                held_bytes=int(catalog.byte_length.sum()),
                imbalance=plan.imbalance,
                replicas=found,
                seconds={"plan": planned - begin - own.waited},
            )
            if own.slot is not None:
                seconds = {"queue": own.waited, "stage": written - planned, "blocked": time.perf_counter() - begin}
                report = replace(report, seconds={**report.seconds, **seconds})
                locked.pop_all()
                # What goes wrong from here on is the outcome of the save: the ranks do not meet again.
                return own.slot.hand_over(report, begin, own.lock)
            if nodes is not None:
                nodes.commit(parts, transport, list(addresses))
        except LostRankError as error:
            if own.slot is not None:
                # Others may not have noticed, and have handed their shares over.
                announce_failure(directory, ticket, comm.rank, comm.ranks[coordinator_rank], error)
            raise
        except CheckpointError:
            if nodes is not None:
                nodes.discard()
            else:
                directory.discard(ticket, comm.rank)
            raise
        if nodes is None:
            comm.together(share.commit, context)
    end = time.perf_counter()
    seconds = {"write": written - planned, "commit": end - written, "total": end - begin}
    report = replace(report, seconds={**report.seconds, **seconds})
    if share.is_coordinator:
        logger.info(report.summary())
    return report


class _Own(NamedTuple):
    """What one rank brings to a save: its shards, the coordinator's lock, room with a writer, seconds waited for it."""

    state: LocalState
    lock: SaveLock | None
    slot: SaveSlot | None
    waited: float


def _unpacked(bits: bytes, count: int) -> np.ndarray:
    """Bool per row, from one bit per row."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)


def _background_writer(async_save: bool | BackgroundWriter, directory: SaveDirectory) -> BackgroundWriter | None:
    """The writer of an asynchronous save.

    Raises:
        ValidationError: The argument is none, or other processes cannot reach the directory.
    """
    if async_save is False:
        return None
    if async_save is not True and not isinstance(async_save, BackgroundWriter):
        raise ValidationError([f"async_save has to be a bool or a BackgroundWriter; got {async_save!r}"])
    directory.backend.reopen_token()
    return shared_writer() if async_save is True else async_save


class _Share:
    """What one rank writes of a save.

    Attributes:
        items: Its rows of the write plan.
        is_coordinator: Whether it commits.
    """

    def __init__(
        self,
        directory: SaveDirectory,
        ticket: SaveNames,
        comm: Communicator,
        coordinator: int,
        plan: WritePlan,
        held: Mapping[int, Any],
        step: int | None,
        nodes: NodeSave | None,
    ) -> None:
        """Takes this rank's part of the plan; ``held`` has its tensors by row of the planned catalog."""
        self._directory, self._ticket, self._comm, self._step, self._nodes = directory, ticket, comm, step, nodes
        self._coordinator, self._held = coordinator, held
        self.is_coordinator = comm.rank == coordinator
        mine = np.flatnonzero(plan.catalog.rank == comm.rank)
        self.items = plan.catalog.take(mine)
        self._rows, self._starts = plan.source[mine].tolist(), plan.source_start[mine].tolist()

    def _data(self) -> Iterator[np.ndarray]:
        """Yield the items' bytes: uint8 arrays, each to be used before the next is asked for.

        What is written of a device tensor, and no more, crosses to the host in steps of whole blocks; a strided host
        view is copied one at a time.
        """
        for row, start, size in zip(self._rows, self._starts, self.items.size.tolist()):
            storage = open_storage(self._held[row])
            if isinstance(storage, np.ndarray):
                yield storage[start : start + size].view(np.uint8)
                continue
            step = DEVICE_CHUNK_BYTES // storage.dtype.itemsize
            for begin in range(start, start + size, step) if size else (start,):
                yield storage.read_range(begin, min(begin + step, start + size)).view(np.uint8)

    def write(self) -> bytes:
        """Write the data file and the part; the part of a save to nodes is not a file, but returned."""
        if self._nodes is not None:
            self._nodes.clean_up()
            return self._directory.write_data(
                self._ticket, self.items, self._data(), world_size=self._comm.size, step=self._step
            ).encode()
        if self.is_coordinator:
            remove_dead_saves(self._directory, self._ticket)
        self._directory.write_share(
            self._ticket, self._comm.rank, self.items, self._data(), world_size=self._comm.size, step=self._step
        )
        return b""

    def stage(self, slot: SaveSlot, lock: SaveLock | None, presences: tuple[tuple[str, ...], ...]) -> None:
        """Copy the data to where the writer finds it; ``presences`` of all ranks."""
        job = WriteJob(
            path=self._directory.path,
            storage=self._directory.backend.reopen_token(),
            lock=None if lock is None else lock.handover()[0],
            names=self._ticket,
            items=self.items,
            rank=self._comm.rank,
            ranks=self._comm.ranks,
            coordinator=self._coordinator,
            step=self._step,
            timeout=slot.timeout,
            presences=presences,
        )
        space, end = slot.stage(job), 0
        for data in self._data():
            begin, end = end, end + data.nbytes
            space[begin:end] = data

    def commit(self) -> tuple[None, bytes]:
        """Makes the checkpoint exist, on the coordinator; nothing to tell the others."""
        if self.is_coordinator:
            self._directory.commit(self._ticket, self._comm.ranks)
        return None, b""
