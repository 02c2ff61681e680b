"""save_state_dict: live shards into a checkpoint directory.

Tested in tests/save/test_saver.py, tests/distributed/test_save_load.py and tests/load/test_policies.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, cast, overload

import numpy as np
import xxhash

from paddle_flexckpt.background import BackgroundWriter, SaveHandle, await_earlier, shared_writer
from paddle_flexckpt.catalog import (
    CheckpointError,
    LostRankError,
    Problem,
    ReplicaGroups,
    ValidationError,
    check_extra_names,
)
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.catalog.wire import encode_catalog, join, join_by_position, split, split_by_position
from paddle_flexckpt.communication.group_communicators import communicator_for, plans_of
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import Location, place_of
from paddle_flexckpt.media.opening import shown
from paddle_flexckpt.memory.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.memory.replica_digests import DIGEST, Digests
from paddle_flexckpt.memory.sources import check_overlaps
from paddle_flexckpt.memory.state import LocalState, open_state
from paddle_flexckpt.memory.state_names import indivisible_rows
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.save.node_saves import NodeSave, meet_nodes
from paddle_flexckpt.save.planners import (
    Planners,
    RankSummary,
    Told,
    encode_shards,
    raise_told,
    tell_planners,
)
from paddle_flexckpt.save.replica_checks import Replicas
from paddle_flexckpt.save.replica_policies import CLOSE, ReplicaPolicies
from paddle_flexckpt.save.save_options import SaveOptions
from paddle_flexckpt.save.save_plan import Deal, SavePlan, Share, encode_deals, gather_deals, lines_of, report_of
from paddle_flexckpt.save.shared_saves import BackgroundSave, SharedSave
from paddle_flexckpt.save.sliced_saves import OpenSave, SlicedSave
from paddle_flexckpt.transfer.agreement import BRIEF_SAVE, check_coordinator, check_heads
from paddle_flexckpt.transfer.options import GROUP, PATH, SHARDS, UNUSED, takes
from paddle_flexckpt.transfer.plan_cache import encode_short, find_common_plan, fingerprint

logger = logging.getLogger("paddle_flexckpt")
# A rank's message beside a cached plan: a digest of its place, and the names of the save, if it knows them.
_BRIEF = struct.Struct("<8sQ16s")
_NO_NAMES = SaveNames(0, bytes(16).hex())


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
    **options: Any,
) -> SaveReport: ...


@overload
def save_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = ...,
    coordinator_rank: int = ...,
    unique_id: int | None = ...,
    *,
    async_save: Literal[True] | BackgroundWriter,
    safetensors: bool = ...,
    save_replicas: bool = ...,
    **options: Any,
) -> SaveHandle: ...


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
    **options: Any,
) -> SaveReport | SaveHandle: ...


@takes(SaveOptions, state_dict=SHARDS, path=PATH, process_group=GROUP, safetensors=UNUSED)
@observed("save", "path")
def save_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool | BackgroundWriter = False,
    safetensors: bool = True,
    save_replicas: bool = False,
    **options: Any,
) -> SaveReport | SaveHandle:
    """Save a distributed state to a directory that all ranks share, or to one on each node.

    Every rank of the group calls this with its own shards. Each distinct shard is written once; replicas share the
    work evenly. The whole checkpoint exists once this returns on any rank; until then a reader finds the old one.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested.
        path: The directory: a path, a URL, or what ``open_storage`` gives. It may hold several checkpoints, told apart
            by id.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        safetensors: Accepted for compatibility: data files are always safetensors files.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.save.save_options.SaveOptions`.

    Returns:
        A report of the save; of an asynchronous save, a handle. A failure of an asynchronous save is raised by its
        handle's ``result()``, or else by the next save on every rank; without these it is printed when the interpreter
        exits, and the exit status is 1.

    Raises:
        ValidationError: The state is not sound (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (likewise); the directory holds what it held before. Or an earlier
            asynchronous save failed and its error has not been raised yet; this one was not begun.
    """
    asked = SaveOptions(
        coordinator_rank=coordinator_rank,
        unique_id=unique_id,
        async_save=async_save,
        save_replicas=save_replicas,
        **options,
    )
    return Save(state_dict, path, communicator_for(process_group), asked).run()


class Save:
    """A save of the shards of all ranks. Every rank makes one and calls :meth:`run`.

    Attributes:
        destination: The destination; known when this rank's shards are described.
        state: This rank's shards; likewise.
    """

    destination: SharedSave | NodeSave
    state: LocalState

    def __init__(self, state_dict: Mapping[str, Any], path: Location, comm: Communicator, options: SaveOptions) -> None:
        """Take this rank's shards, the directory, the ranks, and the options."""
        self._state_dict, self._comm, self._options = state_dict, comm, options
        self._begin = time.perf_counter()
        self._waited = 0.0
        self._per_node = options.storage == "per_node"
        self._context = "cannot save to the nodes' directories" if self._per_node else f"cannot save to {shown(path)}"
        # Opened in a step that all ranks take together, so that an error is raised on all of them.
        self._directory = functools.cache(lambda: open_to_save(path))
        self._stack, self._undo = contextlib.ExitStack(), contextlib.ExitStack()

    def run(self) -> SaveReport | SaveHandle:
        """Save. Return a report; of an asynchronous save, a handle."""
        comm, context = self._comm, self._context
        with self._stack, self._undo:
            if self._per_node:
                # Find out which ranks share a directory: two collectives.
                self.destination = meet_nodes(comm, self._directory, self._options, self._stack, context)
            try:
                # All ranks send their options and their state, in brief if they have a cached plan: one collective, and
                # one more where directories are not known to be the same.
                plan, answers = find_common_plan(comm, plans_of(comm), self, context)
                said = self.agree(plan, answers)
            except LostRankError:
                self._undo.pop_all()  # others may be writing already, so the marker has to stay for the next save
                raise
            self._undo.pop_all()
            with self._tidying():
                # Plan which rank writes what: a collective if shards overlap, replicas may differ, or planning is
                # spread.
                plan = self.plan(said) if plan is None else plan
                share = self.share(plan)
                if self._options.slice_bytes is not None:
                    return self._slice(plan, share)
                return self._finish(plan, share)

    def _finish(
        self,
        plan: SavePlan,
        share: Share,
        found: bytes | None = None,
        handle: SaveHandle | None = None,
        elsewhere: float = 0.0,
    ) -> SaveReport | SaveHandle:
        """Write, compare and commit what is planned.

        A save in slices has digests of its share at the time of the call, a handle, and the seconds that its caller
        spent ``elsewhere``, between the slices.
        """
        comm, context, options, destination = self._comm, self._context, self._options, self.destination
        # All have written, or staged: one collective.
        begun = self._planned - self._begin - self._waited
        work = functools.partial(self._write, plan, share, found, begun)
        said, digests, rows = tell_planners(comm, plan.is_spread, work, context)
        counts, parts = map(list, zip(*map(split, said)))
        # Replicas are equal: a collective only where planning is spread.
        replicas = self._replicas(plan.shards, plan.groups, plan.first_row)
        differing, plan, told = self._compare(plan, replicas, digests, parts, rows)
        if plan.origin:
            plans_of(comm).put(self._own, plan)
        report = functools.partial(
            SaveReport,
            path=destination.directory.path,
            unique_id=destination.names.unique_id,
            replicas=replicas.report(differing, warns=self._is_coordinator),
            **report_of(counts, plan, "stage" if options.async_save else "write"),
        )
        written = time.perf_counter()
        spent, blocked = written - self._planned - elsewhere, written - self._begin - elsewhere
        if isinstance(destination, BackgroundSave):
            seconds = {"plan": begun, "queue": self._waited, "stage": spent, "blocked": blocked}
            return destination.hand_over(report(seconds=seconds), self._begin, handle)
        # The checkpoint exists: one collective; more where it goes to nodes.
        destination.commit(parts, rows, told)
        end = time.perf_counter()
        seconds = {"plan": begun, "write": spent, "commit": end - written, "total": end - self._begin}
        done = report(seconds=seconds)
        if self._is_coordinator:
            logger.info(done.summary())
        return done

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        """Remove what was written if all ranks learned of a failure: no rank can commit then.

        If a rank is lost, the progress of the others is not known: the marker stays, for the next save.
        """
        try:
            yield
        except LostRankError as error:
            self.destination.lose_rank(error)
            raise
        except CheckpointError:
            self.destination.discard()
            raise

    def describe(self) -> bytes:
        """Describe this rank's shards, and begin the save, when there is room for it and earlier ones are over.

        Return a fingerprint of this rank's inputs to a plan.
        """
        comm, options = self._comm, self._options
        self._head = options.encode("save_state_dict")
        queued = time.perf_counter()
        self._open_destination()
        self._waited = time.perf_counter() - queued
        check_coordinator(comm, options.coordinator_rank)
        self.state = open_state(self._state_dict, comm.rank)
        weights, catalog = self.state.weights, self.state.catalog
        check_extra_names(catalog.keys)
        self._devices = devices_of(self.state.tensors)
        wait_for_devices(self._devices)
        self._undo.callback(self.destination.discard)
        self._stack.callback(self.destination.release)
        self._names, message = self.destination.begin()
        whole = indivisible_rows(catalog, [getattr(weight, "fused", None) for weight in weights])
        policies = ReplicaPolicies(options.check_replicas).of(catalog.keys, weights)
        self._flags = whole | policies.astype(np.int64) << 1
        # These options do not affect a plan.
        lasting = replace(options, step=None, unique_id=None, overwrite=True).encode("save_state_dict")
        layout = message, self._flags.tobytes(), bytes([bool(self._devices)]), encode_catalog(catalog)
        self._own = fingerprint((lasting, repr(comm.ranks).encode(), *layout))
        self._summary = RankSummary(
            own=self._own,
            names=json.dumps(self._names and asdict(self._names)).encode(),
            place=place_of(self.destination.directory.backend).encode(),
            message=message,
            rows=len(catalog),
            policies=int(np.bitwise_or.reduce(1 << policies.astype(np.int64))),
            any_device=bool(self._devices),
        )
        return self._own

    def short_message(self, plan: SavePlan) -> bytes:
        """Return this rank's message if it has a cached plan; nothing if the names do not fit into it."""
        names = self._names or _NO_NAMES
        if names.unique_id >= 1 << 64 or len(names.token) != len(_NO_NAMES.token):
            return b""
        place = xxhash.xxh3_64_digest(self._summary.place)
        told = _BRIEF.pack(place, names.unique_id, bytes.fromhex(names.token))
        return encode_short(BRIEF_SAVE, fingerprint((plan.origin, self._head)), told)

    def full_message(self) -> bytes:
        """Return this rank's first message where not all ranks have a cached plan."""
        shards = encode_shards(self.state.catalog, self._flags, self._comm.size)
        return self._summary._replace(shards=shards).encode(self._head)

    def _open_destination(self) -> None:
        directory, options = self._directory(), self._options
        writer = _background_writer(options.async_save, directory)
        slot = None if writer is None else self._stack.enter_context(writer.open_slot())
        await_earlier(directory.path)
        if not self._per_node:
            common = (self._comm, directory, options, self._context)
            self.destination = SharedSave(*common) if slot is None else BackgroundSave(slot, *common)

    def agree(self, plan: SavePlan | None, answers: list[bytes]) -> list[RankSummary]:
        """Pass the messages of all ranks to the destination; return them, where no plan was cached.

        Raises:
            ValidationError: Ranks differ in an option, or do not share the directory.
        """
        coordinator = self._options.coordinator_rank
        if plan is None:
            fields = zip(*check_heads(answers, self._context, self._comm.ranks))
            said = [RankSummary.decode(*each) for each in fields]
            names = SaveNames(**json.loads(said[coordinator].names))
            self.destination.agree(names, [each.place for each in said], [each.message for each in said])
            return said
        known = [_BRIEF.unpack(answer) for answer in answers]
        _, unique_id, token = known[coordinator]
        names = SaveNames(unique_id, token.hex())
        self.destination.agree(names, [place for place, *_ in known], plan.messages)
        return []

    @without_collector()
    def plan(self, said: Sequence[RankSummary]) -> SavePlan:
        """Check that all ranks' shards make whole tensors, and plan which rank writes what: the same on every rank.

        Raises:
            ValidationError: The state is not sound.
        """
        comm, context, options, state = self._comm, self._context, self._options, self.state
        tolerant = any(each.policies >> CLOSE for each in said if each.rows)
        reason = "check_replicas lets replicas differ, so what is written is chosen by layers" if tolerant else ""
        planners = Planners(comm, state.catalog, self._flags, said, context, reason)
        planners.inspect()
        rows = planners.rows
        replicas = self._replicas(rows, planners.groups, planners.first_row)
        if planners.overlaps:
            check_overlaps(comm, replicas.held, rows.catalog, planners.overlaps, context)
        differing: np.ndarray | None = None
        if replicas.comes_first:
            first = replicas.first()
            _, digests = comm.together(lambda: (None, replicas.take(first)), context)
            differing = replicas.compare(first, digests)
        plan = planners.plan(replicas, differing, options.save_replicas, int(self.destination.names.token[-8:], 16))
        # A plan is not cached if it depends on values or on a check of them, or if its messages never recur.
        if differing is not None or planners.overlaps or options.node_copies > 1:
            return plan
        return replace(plan, origin=fingerprint([each.own for each in said]), messages=[each.message for each in said])

    def _replicas(self, rows: KeyRows, groups: ReplicaGroups, first: int | None) -> Replicas:
        """Return the replicas among rows of all ranks, of which this is the first of this rank; None: it plans some."""
        held = {} if first is None else dict(enumerate(self.state.tensors, first))
        compares, save_replicas = self._options.check_replicas is not False, self._options.save_replicas
        policies = (rows.flags >> 1).astype(np.uint8)
        return Replicas(self._comm, held, rows.catalog, groups, policies, compares, self._context, save_replicas)

    def share(self, plan: SavePlan) -> Share:
        """Return this rank's share of a plan."""
        options = self._options
        file = self.destination.names.data_file(self._comm.rank)
        share = Share(plan, file, self.state.tensors, options.step, self._devices, options.progress)
        self._planned = time.perf_counter()
        return share

    def _digests(self, plan: SavePlan) -> Digests:
        held, catalog = dict(enumerate(self.state.tensors)), self.state.catalog
        return Digests(held, catalog, plan.all_lines, plan.by_device or None, plan.written)

    def _write(self, plan: SavePlan, share: Share, found: bytes | None, planned: float) -> Told:
        """Write this rank's share, and take digests of it unless some were ``found``; return its messages to others.

        ``planned``: the seconds that planning took.
        """
        begin = time.perf_counter()
        if found is None:
            with self._digests(plan) as taken:
                part, checksums, rows = self.destination.write(share, taken.written)
                found = taken.encode(checksums)
        else:
            part, _, rows = self.destination.write(share, np.zeros(len(share.items), dtype=bool))
        ends = np.cumsum([len(lines) * DIGEST.itemsize for lines in plan.lines.values()]).tolist()
        digests = {planner: found[low:high] for planner, low, high in zip(plan.lines, [0, *ends], ends)}
        return join((plan.told(planned, time.perf_counter() - begin), part)), digests, rows

    def _compare(
        self,
        plan: SavePlan,
        replicas: Replicas,
        digests: Sequence[bytes],
        parts: Sequence[bytes],
        rows: Mapping[int, bytes],
    ) -> tuple[np.ndarray, SavePlan, Mapping[int, bytes]]:
        """Return which groups of replicas differ, the plan in its next turn, and the ranks' messages about partitions.

        Raises:
            ValidationError: Replicas differ that have to be equal; the same on every rank.
        """
        comm, dealt, told = self._comm, dict[int, bytes](), dict[int, bytes]()
        if plan.is_spread:
            work = functools.partial(self._compare_and_tell, plan, replicas, digests, parts, rows)
            (differing, turned, deals), notes, received = comm.trade(work, self._context)
            raise_told(notes, self._context)
            dealt, told = split_by_position(received, 2)
        else:
            differing = replicas.compare(plan.compared, digests)
            differing = differing if plan.differing is None else differing | plan.differing
            turned, deals = plan.next_turn(replicas)
        if turned is not plan:
            turned = replace(turned, lines=lines_of(gather_deals(dealt, deals, comm.position)))
        return differing, turned, told

    def _compare_and_tell(
        self,
        plan: SavePlan,
        replicas: Replicas,
        digests: Sequence[bytes],
        parts: Sequence[bytes],
        rows: Mapping[int, bytes],
    ) -> tuple[tuple[np.ndarray, SavePlan, dict[int, Deal]], bytes, dict[int, bytes]]:
        """Compare replicas as a planner, and write partitions; return this rank's messages about both."""
        try:
            differing = replicas.compare(plan.compared, digests)
            turned, deals = plan.next_turn(replicas)
            told = self.destination.write_partitions(parts, rows)
        except ValidationError as error:
            problems = [each for each in error.problems if isinstance(each, Problem)]
            if not problems:
                raise
            findings = [(0, 0, plan.number_of(each), str(each)) for each in problems]
            return (np.zeros(0, dtype=bool), plan, {}), json.dumps(findings).encode(), {}
        return (differing, turned, deals), b"", join_by_position(encode_deals(deals, self._comm.position), told)

    @property
    def _is_coordinator(self) -> bool:
        return self._comm.position == self._options.coordinator_rank

    def _slice(self, plan: SavePlan, share: Share) -> SlicedSave:
        """Digest this rank's share as it is now, and return a handle that stages it in slices. One collective."""
        staging = cast("BackgroundSave", self.destination)
        found, _ = self._comm.together(functools.partial(self._begin_slices, plan, share, staging), self._context)
        last = functools.partial(self._resume, self._stack.pop_all())
        open_save = OpenSave(
            stage_slice=functools.partial(staging.stage_slice, self._options.slice_bytes or 0),
            hand_over=functools.partial(last, self._finish, plan, share, found),
            give_up=functools.partial(last, tell_planners, self._comm, plan.is_spread, _refuse, self._context),
        )
        handle = SlicedSave(staging.directory.path, staging.names.unique_id, open_save)
        staging.keep(handle)
        return handle

    def _begin_slices(self, plan: SavePlan, share: Share, staging: BackgroundSave) -> tuple[bytes, bytes]:
        with self._digests(plan) as digests:
            return digests.encode(staging.begin_slices(share)), b""

    def _resume(self, stack: contextlib.ExitStack, step: Callable[..., object], *given: Any) -> None:
        """Take the last step of a save in slices."""
        with stack, self._tidying():
            step(*given)


def _refuse() -> Told:
    raise CheckpointError(
        "give_up() was called in place of finish_staging(). Remedy: call the same of the two on every rank"
    )


def _background_writer(async_save: bool | BackgroundWriter, directory: SaveDirectory) -> BackgroundWriter | None:
    """Return the writer of an asynchronous save.

    Raises:
        ValidationError: The argument is invalid, or other processes cannot reach the directory.
    """
    if async_save is False:
        return None
    if async_save is not True and not isinstance(async_save, BackgroundWriter):
        raise ValidationError([f"async_save has to be a bool or a BackgroundWriter; got {async_save!r}"])
    directory.backend.reopen_token()
    return shared_writer() if async_save is True else async_save
