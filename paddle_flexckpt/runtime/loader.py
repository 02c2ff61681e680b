"""load_state_dict: a checkpoint directory into live shards, whatever the two layouts are."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.planning import ReadPlan, ShardMatcher, plan_read
from paddle_flexckpt.planning.matching import uncovered_targets
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.runtime.communicator import check_coordinator, check_same, communicator_for
from paddle_flexckpt.runtime.state import EXTRA_STATE, LocalState, open_state
from paddle_flexckpt.runtime.targets import Policy, Strict, TargetMemory, Wanted, resolve
from paddle_flexckpt.runtime.wire import join, split
from paddle_flexckpt.storage import CheckpointDirectory, FileReader, Manifest

logger = logging.getLogger("paddle_flexckpt")


def load_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: dict[str, Any] | None = None,
    safetensors: bool = True,
    worker_groups: Any = None,
    comm_method: str = "direct",
    *,
    strict: Strict = "missing",
    dtype: Literal["raise", "cast"] = "raise",
    tied_names: bool = True,
    master_weights: Literal["exact", "convert"] = "exact",
    verify: bool = True,
) -> LoadReport:
    """Fills live shards, in place, from a checkpoint that was saved under this or any other layout.

    Every rank of the group calls this with its own targets. Everything is checked on all ranks before the first
    target is touched. Each rank then reads just the bytes that its targets need, each once.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested. Their memory is written.
        path: The directory.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        coordinator_rank: The rank, counted within the group, that writes the log line.
        unique_id: The checkpoint's id; None takes the highest.
        offload: Accepted for compatibility: reading goes through host memory always, one tensor at a time.
        mw_name_compatibility: Accepted for compatibility; semi-automatic parallel's names are not mapped yet.
        aoa_config: Not available yet; anything but None is an error.
        safetensors: Accepted for compatibility: data files are safetensors files always.
        worker_groups: Accepted for compatibility: no tensor data is communicated.
        comm_method: Accepted for compatibility, likewise.
        strict: Which keys without a counterpart are errors: ``"missing"`` (targets that the checkpoint lacks),
            ``"unexpected"`` (keys that no rank asks for), True (both) or False (neither).
        dtype: ``"raise"`` makes a dtype that differs an error; ``"cast"`` converts the values.
        tied_names: Whether a key that the checkpoint lacks may be taken from another name of the same, tied
            parameter; the report lists those.
        master_weights: ``"convert"`` lets a master weight (``.w_0``) that the checkpoint lacks start from its
            parameter, and takes a float32 parameter from its master weight where the checkpoint has one; the report
            lists those. ``"exact"`` does neither.
        verify: Whether to compare the checksum of every block that is read whole.

    Returns:
        What was done.

    Raises:
        ValidationError: Path, keys, shapes or dtypes do not fit (on every rank, with the same text); no target was
            changed.
        CorruptCheckpointError: The checkpoint is damaged (likewise). Damage that only reading can find may leave
            targets partly overwritten; the text says so.
    """
    begin = time.perf_counter()
    comm = communicator_for(process_group)
    directory = CheckpointDirectory(os.fspath(path))
    context = f"cannot load from {directory.path!r}"

    def prepare() -> tuple[_Prepared, bytes]:
        refuse_aoa(aoa_config)
        check_coordinator(comm, coordinator_rank)
        manifest = directory.read_manifest(unique_id)
        state = open_state(state_dict, comm.rank)
        wanted = resolve(state, manifest.catalog, Policy(strict, dtype, tied_names, master_weights))
        plan = _plan(manifest.catalog, wanted)
        reader = stack.enter_context(FileReader(directory.path, manifest, verify))
        reader.check_files(plan.pieces.source)
        head = json.dumps(
            {
                "checkpoint": f"id {manifest.unique_id} ({manifest.save_token})",
                "coordinator_rank": coordinator_rank,
                "strict": strict,
                "dtype": dtype,
            }
        ).encode()
        used = np.packbits(used_keys(manifest.catalog, wanted)).tobytes()
        return _Prepared(manifest, state, wanted, plan, reader), join((head, used))

    with contextlib.ExitStack() as stack:
        ready, answers = comm.together(prepare, context)
        heads, bits = zip(*(split(answer) for answer in answers))
        check_same(heads, context)
        unexpected = unexpected_keys(ready.manifest.catalog, bits)
        check_unexpected(unexpected, strict, context)
        planned = time.perf_counter()
        _, needed = comm.together(ready.read, context)
    end = time.perf_counter()
    count = ready.reader.count
    report = LoadReport(
        source=directory.path,
        unique_id=ready.manifest.unique_id,
        keys=len(ready.wanted.rows),
        missing=ready.wanted.missing,
        unexpected=unexpected,
        aliases=ready.wanted.aliases,
        cast=ready.wanted.cast,
        masters=ready.wanted.masters,
        bytes_needed=ready.plan.needed_bytes,
        bytes_read=count.bytes_read,
        bytes_verified=count.bytes_verified,
        reads=count.reads,
        total_bytes=sum(int(number) for number in needed),
        seconds={"plan": planned - begin, "read": end - planned, "total": end - begin},
    )
    if comm.position == coordinator_rank:
        logger.info(report.summary())
    return report


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One rank's load, checked and planned."""

    manifest: Manifest
    state: LocalState
    wanted: Wanted
    plan: ReadPlan
    reader: FileReader

    def read(self) -> tuple[None, bytes]:
        """Reads every piece into its target."""
        pieces = self.plan.pieces
        memory = TargetMemory(self.state, self.wanted, pieces.target)
        for piece, copy in enumerate(pieces.copies()):
            row = int(pieces.target[piece])
            self.reader.read(int(pieces.source[piece]), copy, memory.storage(row))
            memory.piece_done(row)
        memory.finish()
        return None, str(self.plan.needed_bytes).encode()


def _plan(source: Catalog, wanted: Wanted) -> ReadPlan:
    """The reads that fill this rank's targets, checked to fill all of them."""
    plan = plan_read(ShardMatcher(source), wanted.catalog, wanted.rows)
    problems = uncovered_targets(plan.pieces, wanted.catalog, wanted.rows)
    if problems:
        raise ValidationError(problems)
    return plan


def refuse_aoa(aoa_config: Any) -> None:
    """Raises ValidationError if AOA statements are given: ignoring them would load wrong values."""
    if aoa_config is not None:
        raise ValidationError(
            ["aoa_config is not available in this version. Remedy: rename the keys of the state dict"]
        )


def used_keys(source: Catalog, wanted: Wanted) -> np.ndarray:
    """Bool per key of the source: whether this rank fills something from it."""
    index = {name: i for i, name in enumerate(source.keys)}
    used = np.zeros(len(source.keys), dtype=bool)
    # All targets count, also those that share memory with one that is filled.
    used[[index[name] for name in (*wanted.catalog.keys, *wanted.masters) if name in index]] = True
    return used


def unexpected_keys(source: Catalog, bits: tuple[bytes, ...]) -> list[str]:
    """Keys of the source that no rank uses, from every rank's packed :func:`used_keys`; extra state does not count."""
    used = np.bitwise_or.reduce([np.frombuffer(b, dtype=np.uint8) for b in bits])
    flags = np.unpackbits(used, count=len(source.keys)).astype(bool) if len(source.keys) else np.zeros(0, dtype=bool)
    return [source.keys[i] for i in np.flatnonzero(~flags) if not source.keys[i].startswith(EXTRA_STATE)]


def check_unexpected(unexpected: list[str], strict: Strict, context: str) -> None:
    """Raises ValidationError where unexpected keys are not allowed; the same on every rank."""
    if unexpected and Policy(strict).unexpected_is_an_error:
        raise ValidationError(
            [
                f"no rank asks for key {key!r}, which the source has. Remedy: load it too, or allow it with "
                "strict='missing'"
                for key in unexpected
            ],
            context,
        )
