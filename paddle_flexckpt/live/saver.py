"""save_state_dict: live shards into a checkpoint directory.

Tested in tests/live/test_saver.py, tests/distributed/test_save_load.py and tests/live/test_policies.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, cast, overload

import numpy as np

from paddle_flexckpt.background import BackgroundWriter, SaveHandle, await_earlier, shared_writer
from paddle_flexckpt.catalog import (
    Catalog,
    CheckpointError,
    LostRankError,
    ReplicaGroups,
    ValidationError,
    check_extra_names,
)
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.wire import encode_catalog, join, split
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.kept_plans import BriefMessage, KeptPlan, fingerprint, in_full
from paddle_flexckpt.engine.options import GROUP, PATH, SHARDS, UNUSED, takes
from paddle_flexckpt.foreign.formats import open_to_save, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.live.node_saves import NodeSave, meet_nodes
from paddle_flexckpt.live.orders import indivisible_rows
from paddle_flexckpt.live.planners import Planners, Said, describe_shards, tell_planners
from paddle_flexckpt.live.replica_digests import DIGEST, Digests
from paddle_flexckpt.live.replicas import Replicas
from paddle_flexckpt.live.save_options import CLOSE, ReplicaPolicies, SaveOptions
from paddle_flexckpt.live.save_plan import (
    SavePlan,
    Share,
    compare_replicas,
    encode_seconds,
    rank_seconds,
    report_counts,
)
from paddle_flexckpt.live.shared_saves import BackgroundSave, SharedSave
from paddle_flexckpt.live.sliced_saves import SlicedSave
from paddle_flexckpt.live.sources import check_overlaps
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.media.backend import Location, place_of
from paddle_flexckpt.native.names import SaveNames
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.observers import observed
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
    work evenly. The checkpoint exists, whole, once this returns on any rank; until then whatever was there before is
    what a reader finds.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested.
        path: The directory: a path, a URL, or what ``open_storage`` gives. It may hold several checkpoints, told apart
            by id.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        safetensors: Accepted for compatibility: data files are safetensors files always.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.live.save_options.SaveOptions`.

    Returns:
        What was done; of an asynchronous save, a handle. A failure of an asynchronous save is raised by its handle's
        ``result()``, or else by the next save on every rank, or else it is printed when the interpreter exits, and the
        exit status is 1.

    Raises:
        ValidationError: The state is not sound (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (likewise); the directory holds what it held before. Or an earlier
            asynchronous save failed and nobody has seen that; this one was not begun.
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
    """Save the shards of all ranks. Every rank makes the same calls, in this order; :meth:`run` makes them.

    1. Meet the other nodes, with ``storage="per_node"``: find out who shares a directory. Two collectives.
    2. :meth:`describe` this rank's shards as a catalog, and begin the save: the coordinator locks the directory.
    3. :meth:`agree` on options, on the save's names and on the directory. One collective for 2 and 3.
    4. :meth:`plan` who writes what. A collective only where shards overlap or replicas may differ.
    5. :meth:`write` this rank's share, to the directory or to its background writer. One collective.
    6. :meth:`commit`. One collective; an asynchronous save is handed over instead.

    Attributes:
        destination: Where the save goes; from :meth:`describe` on.
    """

    destination: SharedSave | NodeSave

    def __init__(self, state_dict: Mapping[str, Any], path: Location, comm: Communicator, options: SaveOptions) -> None:
        """Take this rank's shards, the directory, the ranks, and what was asked for."""
        self._state_dict, self._comm, self._options = state_dict, comm, options
        self._begin = time.perf_counter()
        self._waited = 0.0
        self._told: Mapping[int, bytes] = {}
        # Of a save in slices: its handle, the digests of the call, and the seconds that the caller spent elsewhere.
        self._handle: SaveHandle | None = None
        self._found: bytes | None = None
        self._is_given_up = False
        self._elsewhere = 0.0
        self._per_node = options.storage == "per_node"
        self._context = "cannot save to the nodes' directories" if self._per_node else f"cannot save to {shown(path)}"
        # Opened in a step that all ranks take together: an error is everybody's.
        self._directory = functools.cache(lambda: open_to_save(path))
        self._stack, self._undo = contextlib.ExitStack(), contextlib.ExitStack()

    def run(self) -> SaveReport | SaveHandle:
        """Make the calls. Return a report; of an asynchronous save, a handle."""
        comm, context = self._comm, self._context
        with self._stack, self._undo:
            if self._per_node:
                self.destination = meet_nodes(comm, self._directory, self._options, self._stack, context)
            try:
                state, answers = comm.together(self.describe, context)
                found = self.agree_briefly(answers) or self.agree(in_full(comm, answers, self._described, context))
            except LostRankError:
                self._undo.pop_all()  # others may be writing already: the next save needs the marker
                raise
            self._undo.pop_all()
            # From here on what was written is removed if all ranks were told of a failure: nobody can commit then. If a
            # rank is lost nobody knows how far the others are; the marker stays, and the next save removes the rest.
            with self._tidying():
                self.prepare(state, found if isinstance(found, SavePlan) else self.plan(state, found))
                return self.commit(*self.write()) if self._options.slice_bytes is None else self.slice()

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        try:
            yield
        except LostRankError as error:
            self.destination.lose_rank(error)
            raise
        except CheckpointError:
            self.destination.discard()
            raise

    def slice(self) -> SlicedSave:
        """Look at this rank's share as it is now, and return a handle that stages it in slices. One collective."""
        staging = cast("BackgroundSave", self.destination)

        def begin() -> tuple[None, bytes]:
            with self._digests() as digests:
                self._found = digests.encode(staging.begin_slices(self._share))
            return None, b""

        self._comm.together(begin, self._context)
        self._kept = self._stack.pop_all()
        handle = SlicedSave(staging.directory.path, staging.names.unique_id, self)
        staging.keep(handle)
        return handle

    def stage_slice(self) -> bool:
        """Implement :class:`~paddle_flexckpt.live.sliced_saves.OpenSave`."""
        return cast("BackgroundSave", self.destination).stage_slice(self._options.slice_bytes or 0)

    def hand_over(self, handle: SaveHandle, elsewhere: float) -> None:
        """Implement :class:`~paddle_flexckpt.live.sliced_saves.OpenSave`."""
        self._handle, self._elsewhere = handle, elsewhere
        with self._kept, self._tidying():
            self.commit(*self.write())

    def give_up(self) -> None:
        """Implement :class:`~paddle_flexckpt.live.sliced_saves.OpenSave`."""
        self._is_given_up = True
        try:
            with self._kept, self._tidying():
                self.write()
        except LostRankError:
            raise
        except CheckpointError:  # so it is on all ranks, whichever of them stage the rest
            pass

    def describe(self) -> tuple[LocalState, bytes]:
        """Describe this rank's shards, and begin the save, when there is room for it and earlier ones are over."""
        comm, options = self._comm, self._options
        head = options.encode("save_state_dict")
        queued = time.perf_counter()
        self._open_destination()
        self._waited = time.perf_counter() - queued
        check_coordinator(comm, options.coordinator_rank)
        state = open_state(self._state_dict, comm.rank)
        check_extra_names(state.catalog.keys)
        self._devices = devices_of(state.tensors)
        wait_for_devices(self._devices)
        self._undo.callback(self.destination.discard)
        self._stack.callback(self.destination.release)
        names, message = self.destination.begin()
        whole = indivisible_rows(state.catalog, [getattr(weight, "fused", None) for weight in state.weights])
        policies = ReplicaPolicies(options.check_replicas).of(state.catalog.keys, state.weights)
        place = place_of(self.destination.directory.backend).encode()
        self._flags = whole | policies.astype(np.int64) << 1
        # None of these has a part in a plan.
        lasting = replace(options, step=None, unique_id=None, overwrite=True).encode("save_state_dict")
        layout = message, self._flags.tobytes(), bytes([bool(self._devices)]), encode_catalog(state.catalog)
        own = self._own = fingerprint((lasting, repr(comm.ranks).encode(), *layout))
        called = json.dumps(names and asdict(names)).encode()

        def described() -> bytes:
            said = describe_shards(comm, state.catalog, self._flags, policies, bool(self._devices))
            return join((head, own, called, place, message, said.encode()))

        self._described, self._kept_plan, brief = described, comm.kept.find(own), None
        if self._kept_plan is not None:
            turn = str(self._kept_plan.plan.turn).encode()
            brief = BriefMessage.of_save(fingerprint((self._kept_plan.origin, turn, head)), place, names)
        return state, brief.encode() if brief else described()

    def _open_destination(self) -> None:
        directory, options = self._directory(), self._options
        writer = _background_writer(options.async_save, directory)
        slot = None if writer is None else self._stack.enter_context(writer.open_slot())
        await_earlier(directory.path)
        if not self._per_node:
            common = (self._comm, directory, options, self._context)
            self.destination = SharedSave(*common) if slot is None else BackgroundSave(slot, *common)

    def agree_briefly(self, answers: list[bytes]) -> SavePlan | None:
        """Return the kept plan if every rank has found the same one, and asks for the same; else None.

        Raises:
            ValidationError: Ranks do not share the directory.
        """
        said = [each for each in map(BriefMessage.decode, answers) if each]
        if self._kept_plan is None or len(said) < len(answers) or len({(each.call, each.agreed) for each in said}) > 1:
            return None
        names = said[self._options.coordinator_rank].names
        self.destination.agree(names, [each.place for each in said], self._kept_plan.messages)
        return self._kept_plan.plan

    def agree(self, answers: list[bytes]) -> _Described:
        """Return what all ranks described, field by field, if they agree; let the destination know what it needs.

        Raises:
            ValidationError: Ranks differ in an option, or do not share the directory.
        """
        agreed = _Described(*check_heads(answers, self._context, self._comm.ranks))
        names = SaveNames(**json.loads(agreed.names[self._options.coordinator_rank]))
        self.destination.agree(names, agreed.place, agreed.message)
        return agreed

    @without_collector()
    def plan(self, state: LocalState, agreed: _Described) -> SavePlan:
        """Check that the shards of all ranks are whole tensors, and plan who writes what: the same on every rank.

        Raises:
            ValidationError: The state is not sound.
        """
        comm, context = self._comm, self._context
        said = [Said.decode(each) for each in agreed.said]
        tolerant = any(each.policies >> CLOSE for each in said if each.rows)
        reason = "check_replicas lets replicas differ, so what is written is chosen by layers" if tolerant else ""
        planners = Planners(comm, state.catalog, self._flags, said, context, reason)
        planners.inspect()
        rows, groups, first_row = planners.rows, planners.groups, int(planners.before[comm.position])
        held = dict(enumerate(state.tensors, first_row)) if not planners.is_spread else {}
        if planners.overlaps:
            check_overlaps(comm, held, rows.catalog, planners.overlaps, context)
        policies = (rows.flags >> 1).astype(np.uint8)
        replicas = self._replicas_of(held, rows.catalog, groups, policies)
        differing: np.ndarray | None = None
        if replicas.comes_first:
            first = replicas.first()
            _, digests = comm.together(lambda: (None, replicas.take(first)), context)
            differing = replicas.compare(first, digests)
        turn = int(self.destination.names.token[-8:], 16)
        compared = lambda items: replicas.beside(items, turn)  # noqa: E731
        dealt = planners.plan(replicas.narrowed(differing), self._options.save_replicas, compared)
        plan = SavePlan.of(planners, dealt, state.catalog, policies, differing, turn)
        # Not where it depends on values, or on a check of values; nor where messages are never the same again.
        self._kept_plan = None
        if differing is None and not planners.overlaps and self._options.node_copies == 1:
            self._kept_plan = KeptPlan(fingerprint(agreed.own), plan, agreed.message)
            self._keep(plan)
        return plan

    def _keep(self, plan: SavePlan) -> None:
        """Keep a plan in place of the one that was found or made; of all ranks, in the same turn."""
        if self._kept_plan is not None:
            self._kept_plan = replace(self._kept_plan, plan=plan)
            nbytes = plan.nbytes + sum(map(len, self._kept_plan.messages))
            self._comm.kept.keep(self._own, self._kept_plan, nbytes)

    def _replicas_of(self, held: Mapping[int, Any], catalog: Catalog, groups: ReplicaGroups, policies: Any) -> Replicas:
        compares, save_replicas = self._options.check_replicas is not False, self._options.save_replicas
        return Replicas(self._comm, held, catalog, groups, policies, compares, self._context, save_replicas)

    def prepare(self, state: LocalState, plan: SavePlan) -> None:
        """Take what planning gave, now or in an earlier save of the same layout."""
        self._plan, self._state = plan, state
        file = self.destination.names.data_file(self._comm.rank)
        options = self._options
        self._share = Share(plan, file, state.tensors, options.step, self._devices, options.progress)
        self._planned = time.perf_counter()

    def _digests(self) -> Digests:
        plan, state = self._plan, self._state
        held, by_device = dict(enumerate(state.tensors)), plan.by_device or None
        return Digests(held, state.catalog, plan.all_lines, by_device, plan.written)

    def write(self) -> tuple[SaveReport, list[bytes]]:
        """Write this rank's share, and compare replicas; return the report so far, and what the commit needs.

        Raises:
            ValidationError: Replicas differ that have to be equal.
            CheckpointError: A rank could not write.
        """
        plan, state, context = self._plan, self._state, self._context

        planned = self._planned - self._begin - self._waited

        def work() -> tuple[bytes, dict[int, bytes], Mapping[int, bytes]]:
            begin = time.perf_counter()
            if self._is_given_up:
                raise CheckpointError(
                    "give_up() was called in place of finish_staging(). Remedy: call the same of the two on every rank"
                )
            if self._found is None:
                with self._digests() as digests:
                    part, checksums, rows = self.destination.write(self._share, digests.written)
                    found = memoryview(digests.encode(checksums))
            else:
                found = memoryview(self._found)
                part, checksums, rows = self.destination.write(self._share, np.zeros(len(plan.items), dtype=bool))
            ends = np.cumsum([len(lines) * DIGEST.itemsize for lines in plan.lines.values()]).tolist()
            spans = zip(plan.lines, [0, *ends], ends)
            own = {planner: bytes(found[low:high]) for planner, low, high in spans}
            seconds = encode_seconds(planned, time.perf_counter() - begin)
            return join((plan.counted(), seconds, part)), own, rows

        said, digests, rows = tell_planners(self._comm, plan.is_spread, work, context)
        counts, seconds, parts = map(list, zip(*map(split, said)))
        held = dict(enumerate(state.tensors, plan.first_row)) if not plan.is_spread else {}
        replicas = self._replicas_of(held, plan.catalog, plan.groups, plan.policies)
        is_kept = self._kept_plan is not None
        beside = functools.partial(self.destination.write_partitions, parts, rows)
        differing, turned, self._told = compare_replicas(
            self._comm, replicas, plan, digests, state.catalog, context, is_kept, beside
        )
        if turned is not plan:
            self._keep(turned)
        differing = differing if plan.differing is None else differing | plan.differing
        report = SaveReport(
            path=self.destination.directory.path,
            unique_id=self.destination.names.unique_id,
            replicas=replicas.report(differing, warns=self._is_coordinator),
            seconds={"plan": planned},
            rank_seconds=rank_seconds(seconds, "stage" if self._options.async_save else "write"),
            **report_counts(counts, plan),
        )
        return report, parts

    def commit(self, report: SaveReport, parts: list[bytes]) -> SaveReport | SaveHandle:
        """Make the checkpoint exist, or hand the save over to the background writer.

        Raises:
            CheckpointError: The checkpoint could not be committed.
        """
        written = time.perf_counter()
        spent = written - self._planned - self._elsewhere
        if isinstance(self.destination, BackgroundSave):
            seconds = {"queue": self._waited, "stage": spent, "blocked": written - self._begin - self._elsewhere}
            report = replace(report, seconds={**report.seconds, **seconds})
            return self.destination.hand_over(report, self._begin, self._handle)
        self.destination.commit(parts, self._told)
        end = time.perf_counter()
        seconds = {"write": spent, "commit": end - written, "total": end - self._begin}
        report = replace(report, seconds={**report.seconds, **seconds})
        if self._is_coordinator:
            logger.info(report.summary())
        return report

    @property
    def _is_coordinator(self) -> bool:
        return self._comm.position == self._options.coordinator_rank


class _Described(NamedTuple):
    """Hold what ranks tell each other: bytes of one rank, or a sequence of these of all ranks."""

    own: Any
    names: Any
    place: Any
    message: Any
    said: Any


def _background_writer(async_save: bool | BackgroundWriter, directory: SaveDirectory) -> BackgroundWriter | None:
    """Return the writer of an asynchronous save.

    Raises:
        ValidationError: The argument is none, or other processes cannot reach the directory.
    """
    if async_save is False:
        return None
    if async_save is not True and not isinstance(async_save, BackgroundWriter):
        raise ValidationError([f"async_save has to be a bool or a BackgroundWriter; got {async_save!r}"])
    directory.backend.reopen_token()
    return shared_writer() if async_save is True else async_save
