"""load_state_dict: a checkpoint directory into live shards, whatever the two layouts are."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.aoa.sides import split_state
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, ValidationError, concat, validate_shards
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.names import check_across_ranks, split_raw
from paddle_flexckpt.engine.options import GROUP, PATH, SHARDS, UNUSED, LoadOptions, TransferOptions, takes
from paddle_flexckpt.engine.plan import Work, plan_work
from paddle_flexckpt.engine.reading import plan_reads, read_pieces
from paddle_flexckpt.foreign.formats import SourceDirectory, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.completion import complete, match
from paddle_flexckpt.live.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.live.live_masters import renew_masters
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.live.target_memory import TargetMemory
from paddle_flexckpt.live.targets import MASTER, Wanted
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import ReadPlan, ShardMatcher
from paddle_flexckpt.report import LoadReport, order_warning, replica_warning

logger = logging.getLogger("paddle_flexckpt")
_report_level = contextvars.ContextVar("report_level", default=logging.INFO)


@takes(
    LoadOptions,
    state_dict=SHARDS,
    path=PATH,
    process_group=GROUP,
    offload=UNUSED,
    safetensors=UNUSED,
    worker_groups=UNUSED,
    comm_method=UNUSED,
)
def load_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    worker_groups: Any = None,
    comm_method: str = "direct",
    **options: Any,
) -> LoadReport:
    """Fill live shards, in place, from a checkpoint that was saved under this or any other layout.

    Every rank of the group calls this with its own targets. Everything is checked on all ranks before the first
    target is touched. Each rank then reads just the bytes that its targets need, each once.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested. Their memory is written.
        path: The directory: a path, a URL, or what ``open_storage`` gives; of this library, Paddle's own,
            PaddleFormers, PaddleNLP (unified checkpoint) or Hugging Face. Or a safetensors file or index of these.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        offload: Accepted for compatibility: reading goes through host memory always, one tensor at a time.
        safetensors: Accepted for compatibility: data files are safetensors files always.
        worker_groups: Accepted for compatibility: no tensor data is communicated.
        comm_method: Accepted for compatibility, likewise.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.engine.options.LoadOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: Path, keys, shapes or dtypes do not fit (on every rank, with the same text); no target was
            changed.
        CorruptCheckpointError: The checkpoint is damaged (likewise). Damage that only reading can find may leave
            targets partly overwritten; the text says so.
        UnreadableCheckpointError: The storage refused or failed; targets may be partly overwritten.
    """
    asked = LoadOptions(
        coordinator_rank=coordinator_rank,
        unique_id=unique_id,
        mw_name_compatibility=mw_name_compatibility,
        aoa_config=aoa_config,
        **options,
    )
    begin = time.perf_counter()
    comm = communicator_for(process_group)
    per_node = asked.storage == "per_node"
    context = "cannot load from the nodes' directories" if per_node else f"cannot load from {shown(path)}"

    @functools.cache
    def directory() -> SourceDirectory:
        return SourceDirectory(path)

    def head(checkpoint: str) -> bytes:
        check_coordinator(comm, coordinator_rank)
        return asked.encode("load_state_dict", checkpoint=checkpoint, context=context)

    if per_node:
        # It stands on the exchange, which stands on this module.
        from paddle_flexckpt.live.node_loads import find_checkpoint, load_from_nodes

        with contextlib.ExitStack() as held:
            found = find_checkpoint(comm, directory, unique_id, lambda: head(f"id {unique_id}"), held, context)
            unique_id = found.manifest.unique_id
            if not found.everywhere:
                report = load_from_nodes(
                    comm,
                    state_dict,
                    directory(),
                    found,
                    lambda: head(found.manifest.save_token),
                    asked,
                    context,
                )
                _tell(report, comm, coordinator_rank)
                return report

    @functools.cache
    def describe() -> _Described:
        with reading(directory().path):
            manifest = stack.enter_context(LockedManifest(directory(), unique_id))
        state = open_state(state_dict, comm.rank)
        return _Described(manifest, state, head(f"id {manifest.unique_id} ({manifest.save_token})"))

    def prepare() -> tuple[_Prepared, bytes]:
        manifest, state, said = describe()
        mapping, wanted = match(state, manifest.catalog, asked, aoa_config, all_targets)
        if wanted.reordered:
            targets = state.catalog if all_targets is None else all_targets
            statements = wanted.completion(manifest.catalog)
            mapping, wanted = complete(wanted, statements, state, manifest.catalog, asked, aoa_config, targets)
        work = plan_work(wanted.catalog, wanted.rows, mapping)
        plan = plan_reads(ShardMatcher(manifest.catalog), work, mapping)
        reader = stack.enter_context(FileReader(directory().backend, manifest, asked.verify, asked.use_replicas))
        with reading(directory().path):
            reader.check_files(plan.pieces.source)
        used = np.packbits(used_keys(manifest.catalog, wanted, mapping)).tobytes()
        names = json.dumps(wanted.raw_meanings).encode()
        ready = _Prepared(directory().path, manifest, state, wanted, mapping, work, plan, reader)
        return ready, join((said, used, names))

    all_targets = None
    with contextlib.ExitStack() as stack:
        if aoa_config is not None:
            all_targets = gather_targets(comm, lambda: (describe().state, describe().head), context)
        ready, answers = comm.together(prepare, context)
        bits, names = check_heads(answers, context, comm.ranks)
        check_across_ranks([json.loads(each) for each in names], context)
        unexpected = check_unexpected(ready.manifest.catalog, bits, ready.mapping, asked, context)
        planned = time.perf_counter()
        peak_scratch, needed = comm.together(ready.read, context)
    kept = ready.work.kept_keys(ready.state.catalog)
    renew_masters(ready.state, {*ready.wanted.missing, *kept}, comm.rank)
    end = time.perf_counter()
    count = ready.reader.count
    report = LoadReport(
        source=directory().path,
        unique_id=ready.manifest.unique_id,
        keys=len(ready.wanted.rows),
        missing=ready.wanted.missing,
        unexpected=unexpected,
        aliases=ready.wanted.aliases,
        cast=ready.wanted.cast,
        masters=ready.wanted.masters,
        fused=ready.wanted.fused,
        maybe_fused=ready.wanted.maybe_fused,
        kept=kept,
        computed=ready.work.computed_keys(ready.state.catalog),
        bytes_needed=ready.plan.needed_bytes,
        bytes_read=count.bytes_read,
        bytes_verified=count.bytes_verified,
        bytes_extra=count.bytes_extra,
        reads=count.reads,
        peak_scratch_bytes=peak_scratch,
        total_bytes=sum(int(number) for number in needed),
        replicas_used=ready.reader.replicas_used,
        seconds={"plan": planned - begin, "read": end - planned, "total": end - begin},
    )
    _tell(report, comm, coordinator_rank)
    return report


def _tell(report: LoadReport, comm: Communicator, coordinator_rank: int) -> None:
    """Log what was done, and warn of damage and of orders that nobody knows."""
    if report.maybe_fused:
        logger.warning(f"rank {comm.rank}: {order_warning(report.source, report.maybe_fused)}")
    if report.replicas_used:
        logger.warning(f"rank {comm.rank}: {replica_warning(report.source, report.replicas_used)}")
    if comm.position == coordinator_rank:
        logger.log(_report_level.get(), report.summary())


@contextlib.contextmanager
def quiet_loads() -> Iterator[None]:
    """Let loads report at the level DEBUG: where the caller reads for itself, or reports itself."""
    token = _report_level.set(logging.DEBUG)
    try:
        yield
    finally:
        _report_level.reset(token)


class _Described(NamedTuple):
    """One rank's load: what is there, what is wanted, and what ranks have to agree about."""

    manifest: Manifest
    state: LocalState
    head: bytes


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One rank's load, checked and planned."""

    path: str
    manifest: Manifest
    state: LocalState
    wanted: Wanted
    mapping: TensorMapping | None
    work: Work
    plan: ReadPlan
    reader: FileReader

    def read(self) -> tuple[int, bytes]:
        """Reads every piece into its target and computes what is computed; returns the peak of scratch, in bytes."""
        wait_for_devices(devices_of(weight.local_tensor for weight in self.state.weights))
        memory = TargetMemory(self.state, self.wanted, self.work, self.plan.pieces.target)
        with reading(self.path):
            read_pieces(self.reader, self.plan.pieces, memory, computes=bool(self.work.tiles))
        memory.finish()
        return memory.peak_scratch_bytes, str(self.plan.needed_bytes).encode()


def gather_targets(comm: Communicator, describe: Callable[[], tuple[LocalState, bytes]], context: str) -> Catalog:
    """The targets of all ranks, so that statements mean the same on all of them.

    Args:
        comm: The ranks.
        describe: Gives this rank's targets, and what has to be the same on every rank, as JSON.
        context: What is being done, for the error.

    Raises:
        ValidationError: A target is malformed, or ranks disagree about what is to be done; the same on every rank.
    """

    def checked() -> tuple[None, bytes]:
        state, head = describe()
        problems = validate_shards(state.catalog)
        if problems:
            raise ValidationError(problems)
        return None, join((head, encode_catalog(state.catalog)))

    _, answers = comm.together(checked, context)
    return concat([decode_catalog(catalog) for catalog in check_heads(answers, context, comm.ranks)[0]])


def used_keys(source: Catalog, wanted: Wanted, mapping: TensorMapping | None = None) -> np.ndarray:
    """Bool per key of the source: whether this rank fills something from it."""
    index = {name: i for i, name in enumerate(source.keys)}
    used = np.zeros(len(source.keys), dtype=bool)
    # All targets count, also those that share memory with one that is filled.
    names = {*wanted.catalog.keys, *wanted.masters}
    if mapping is not None:
        names = mapping.source_names(wanted.catalog.keys)
        # A parameter and its master weight say the same: where one of them serves, the other is not left over.
        names |= {*wanted.masters, *(name[: -len(MASTER)] for name in wanted.masters.values() if name.endswith(MASTER))}
    used[[index[name] for name in names if name in index]] = True
    return used


def check_unexpected(
    source: Catalog, bits: tuple[bytes, ...], mapping: TensorMapping | None, policy: TransferOptions, context: str
) -> list[str]:
    """Return the keys of the source that no rank uses. Extra state does not count, nor what AOA statements remove.

    Args:
        source: All source shards.
        bits: Every rank's packed :func:`used_keys`.
        mapping: What AOA statements say.
        policy: Whether such keys are errors.
        context: What is being done, for the error.

    Raises:
        ValidationError: They are not allowed; the same on every rank.
    """
    removed = frozenset() if mapping is None else mapping.removed
    used = np.bitwise_or.reduce([np.frombuffer(b, dtype=np.uint8) for b in bits])
    flags = np.unpackbits(used, count=len(source.keys)).astype(bool) if len(source.keys) else np.zeros(0, dtype=bool)
    unused = [source.keys[i] for i in np.flatnonzero(~flags)]
    unexpected = [key for key in unused if not key.startswith(EXTRA_STATE) and key not in removed]
    loaded = {source.keys[i] for i in np.flatnonzero(flags) if not source.keys[i].startswith(EXTRA_STATE)}
    states = _states_of_loaded(unexpected, source.keys, loaded)
    if states and policy.optimizer_states == "raise":
        masters = states if all(key.endswith(MASTER) for key in states) else []
        raise ValidationError(
            [
                f"no rank asks for {len(states)} optimizer states that the source has of parameters that are loaded, "
                f"such as {', '.join(map(repr, states[:3]))}. Remedy: give the optimizer's too: before its first "
                "step it has states only after paddle_flexckpt.install(), or by optimizer_sharded_state_dict(); "
                + ("to take float32 parameters from their masters, give master_weights='convert'; " if masters else "")
                + "to load weights alone, give optimizer_states='ignore'"
            ],
            context,
        )
    if policy.unexpected_is_an_error:
        ignored = frozenset(states)
        problems = [
            f"no rank asks for key {key!r}, which the source has. Remedy: load it too, or allow it with "
            "strict='missing'"
            for key in unexpected
            if key not in ignored
        ]
        if problems:
            raise ValidationError(problems, context)
    return unexpected


def _states_of_loaded(unused: list[str], keys: tuple[str, ...], used: set[str]) -> list[str]:
    """Return those of some keys that are optimizer states of used ones.

    Raw names (of a plain ``optimizer.state_dict()``) do not say whose states they are: they are taken for those of what
    is loaded, if a parameter is.
    """
    candidates = [key for key in unused if key[-1:].isdigit()]
    if not candidates or not used:
        return []
    everything = set(keys)
    # An optimizer that is loaded by itself leaves no states behind, whatever else is in the source.
    parameters = any(not split_state(key, everything)[1] and split_raw(key) is None for key in used)

    def is_one(key: str) -> bool:
        return split_state(key, everything)[0] in used or (parameters and split_raw(key) is not None)

    return [key for key in candidates if is_one(key)]
