"""save_state_dict: live shards into a checkpoint directory."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, ValidationError, concat
from paddle_flexckpt.planning import WritePlan, plan_write
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.runtime.communicator import Communicator, check_coordinator, check_same, communicator_for
from paddle_flexckpt.runtime.replicas import differing_replicas, replica_digests
from paddle_flexckpt.runtime.sources import check_sources
from paddle_flexckpt.runtime.state import LocalState, open_state
from paddle_flexckpt.runtime.tensors import HostTensor
from paddle_flexckpt.runtime.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.storage import CheckpointDirectory, DataFileWriter, SaveTicket

logger = logging.getLogger("paddle_flexckpt")


def save_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = True,
    save_replicas: bool = False,
    *,
    step: int | None = None,
    check_replicas: bool = True,
) -> SaveReport:
    """Saves a distributed state to a directory that all ranks share.

    Every rank of the group calls this with its own shards. Each distinct shard is written once; replicas share the
    work evenly. The checkpoint exists, whole, once this returns on any rank; until then whatever was there before is
    what a reader finds.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested.
        path: The directory. It may hold several checkpoints, told apart by id.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        coordinator_rank: The rank, counted within the group, that chooses the id and commits.
        unique_id: The checkpoint's id. None takes the next free one. An id that exists is replaced, and stays what it
            was until the new checkpoint is complete.
        async_save: Not available yet; True is an error.
        safetensors: Accepted for compatibility: data files are safetensors files always.
        save_replicas: Write every replica of every shard.
        step: Training step to record in the manifest.
        check_replicas: Whether replicas of one shard have to be equal, byte for byte. Without the check, whichever rank
            the plan chooses is the one whose values are saved.

    Returns:
        What was done.

    Raises:
        ValidationError: The state is not sound (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (likewise); the directory holds what it held before.
    """
    begin = time.perf_counter()
    comm = communicator_for(process_group)
    directory = CheckpointDirectory(os.fspath(path))
    context = f"cannot save to {directory.path!r}"

    def describe() -> tuple[LocalState, bytes]:
        if async_save:
            raise ValidationError(["async_save=True is not available in this version. Remedy: save synchronously"])
        check_coordinator(comm, coordinator_rank)
        state = open_state(state_dict, comm.rank)
        ticket = directory.open_save(unique_id) if comm.position == coordinator_rank else None
        head = {
            "unique_id": unique_id,
            "coordinator_rank": coordinator_rank,
            "save_replicas": save_replicas,
            "check_replicas": check_replicas,
            "step": step,
        }
        parts = (
            json.dumps(head).encode(),
            json.dumps(ticket and asdict(ticket)).encode(),
            encode_catalog(state.catalog),
        )
        return state, join(parts)

    state, answers = comm.together(describe, context)
    heads, tickets, catalogs = zip(*(split(answer) for answer in answers))
    check_same(heads, context)
    ticket = SaveTicket(**json.loads(tickets[coordinator_rank]))
    catalog = concat([decode_catalog(encoded) for encoded in catalogs])
    # Ranks' rows follow each other in the common catalog.
    first_row = int(np.argmax(catalog.rank == comm.rank)) if len(state.weights) else 0
    held = {first_row + row: weight.local_tensor for row, weight in enumerate(state.weights)}
    groups = check_sources(comm, held, catalog, context).groups
    plan = plan_write(catalog, ticket.data_file, save_replicas=save_replicas, groups=groups)
    planned = time.perf_counter()
    try:

        def write() -> tuple[None, bytes]:
            _write(directory, ticket, comm, plan, state, first_row, step)
            return None, replica_digests(held, groups) if check_replicas else b""

        _, digests = comm.together(write, context)
        problems = differing_replicas(digests, catalog, groups)
        if problems:
            raise ValidationError(problems, context)
        written = time.perf_counter()
        comm.together(
            lambda: (directory.commit(ticket, comm.ranks) if comm.position == coordinator_rank else None, b""), context
        )
    except CheckpointError:
        directory.discard(ticket, comm.rank)
        raise
    end = time.perf_counter()
    report = SaveReport(
        path=directory.path,
        unique_id=ticket.unique_id,
        keys=len(np.unique(plan.catalog.key)),
        items=len(plan.catalog),
        bytes_written=int(plan.catalog.byte_length[plan.catalog.rank == comm.rank].sum()),
        total_bytes=plan.total_bytes,
        held_bytes=int(catalog.byte_length.sum()),
        imbalance=plan.imbalance,
        seconds={"plan": planned - begin, "write": written - planned, "commit": end - written, "total": end - begin},
    )
    if comm.position == coordinator_rank:
        logger.info(report.summary())
    return report


def _write(
    directory: CheckpointDirectory,
    ticket: SaveTicket,
    comm: Communicator,
    plan: WritePlan,
    state: LocalState,
    first_row: int,
    step: int | None,
) -> None:
    """Writes this rank's data file and its part; its shards begin at ``first_row`` of the planned catalog."""
    mine = np.flatnonzero(plan.catalog.rank == comm.rank)
    writer = DataFileWriter(
        directory.path,
        plan.catalog.take(mine),
        save_token=ticket.token,
        unique_id=ticket.unique_id,
        world_size=comm.size,
        step=step,
    )
    rows, starts = plan.source[mine] - first_row, plan.source_start[mine]
    sizes = plan.catalog.size[mine]

    def data() -> Iterator[np.ndarray]:
        for row, start, size in zip(rows.tolist(), starts.tolist(), sizes.tolist()):
            # One tensor at a time: a staged copy is released before the next is made.
            yield HostTensor(state.tensor(row)).array[start : start + size].view(np.uint8)

    directory.write_part(ticket, comm.rank, writer.write(data()))
