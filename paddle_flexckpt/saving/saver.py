"""save_state_dict: live shards into a checkpoint directory.

Tested in tests/saving/test_saver.py, tests/distributed/test_save_load.py and tests/loading/test_policies.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from paddle_flexckpt.background.earlier_saves import await_earlier
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ReplicaGroups, check_extra_names
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.communication.group_communicators import communicator_for, plans_of
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import place_of, shown
from paddle_flexckpt.memory.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.memory.replica_digests import DIGEST, Digests
from paddle_flexckpt.memory.state import LocalState, open_state
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.planners import Planners, RankMessages, RankSummary, compare_written, exchange_written
from paddle_flexckpt.saving.rank_inputs import RankInputs, decode_short
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.saving.replica_policies import CLOSE
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.save_plan import SavePlan, Share, report_fields
from paddle_flexckpt.saving.shared_saves import SharedSave
from paddle_flexckpt.transfer.agreement import check_coordinator, check_heads
from paddle_flexckpt.transfer.options import GROUP, PATH, SHARDS, UNUSED, takes
from paddle_flexckpt.transfer.plan_cache import find_common_plan, fingerprint

if TYPE_CHECKING:
    from paddle_flexckpt.background.pending import SaveHandle
    from paddle_flexckpt.background.staging import WrittenFile
    from paddle_flexckpt.background.writer import BackgroundWriter
    from paddle_flexckpt.saving.background_nodes import BackgroundNodeSave
    from paddle_flexckpt.saving.background_saves import BackgroundSave
    from paddle_flexckpt.saving.node_saves import NodeSave
    from paddle_flexckpt.saving.sliced_saves import SlicedSave

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

    ::

        fc.install()
        shards = model.sharded_state_dict()
        state = {**shards, **optimizer.sharded_state_dict(shards)}
        fc.save_state_dict(state, "run/shards")
        handle = fc.save_state_dict(state, "run/shards", async_save=True)  # the next id, in the background
        handle.result()

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
        **options: Like all other arguments, of :class:`~paddle_flexckpt.saving.save_options.SaveOptions`.

    Returns:
        A report of the save; of an asynchronous save, a handle. A failure of an asynchronous save is raised by its
        handle's ``result()``, or else by the next save on every rank; without these it is printed when the interpreter
        exits, and the exit status is 1.

    Raises:
        ValidationError: The state is not sound (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (on every rank, with the same text); the directory holds what it held
            before. Or an earlier asynchronous save failed and its error was not raised yet; this one was not begun.
    """
    asked = SaveOptions(
        coordinator_rank=coordinator_rank,
        unique_id=unique_id,
        async_save=async_save,
        save_replicas=save_replicas,
        **options,
    )
    return Save(state_dict, path, communicator_for(process_group), asked).run()


@observed("save", "path")
def save_from_file(
    state_dict: Mapping[str, Any],
    path: Location,
    comm: Communicator,
    options: SaveOptions,
    written: WrittenFile | None = None,
    number: int = 0,
) -> SaveReport | SaveHandle:
    """Save like :func:`save_state_dict`; in the background, from a file that has this rank's data, if there is one.

    The number of a save to nodes becomes higher than ``number`` of any rank that commits.
    """
    return Save(state_dict, path, comm, options, written, number).run()


class Save:
    """A save of the shards of all ranks. Every rank makes one and calls :meth:`run`.

    Attributes:
        destination: Takes the data: to a shared directory, a writer, or nodes. Set by :meth:`describe`.
        state: This rank's shards. Set by :meth:`describe`.
    """

    destination: SharedSave | NodeSave
    state: LocalState

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        path: Location,
        comm: Communicator,
        options: SaveOptions,
        written: WrittenFile | None = None,
        number: int = 0,
    ) -> None:
        """Take this rank's shards, the directory, the ranks, and the options.

        A file may have the shards' data. The number of a save to nodes becomes higher than ``number`` of any rank.
        """
        self._written, self._number = written, number
        self._state_dict, self._comm, self._options = state_dict, comm, options
        self._begin, self._waited = time.perf_counter(), 0.0
        self._per_node = options.storage == "per_node"
        self._context = "cannot save to the nodes' directories" if self._per_node else f"cannot save to {shown(path)}"
        # Opened in a step that all ranks take together, so that an error is raised on all of them.
        self._directory = functools.cache(lambda: open_to_save(path))
        self._stack = contextlib.ExitStack()
        self._is_begun = self._is_agreed = False

    def run(self) -> SaveReport | SaveHandle:
        """Save. Return a report; of an asynchronous save, a handle."""
        comm, options, context = self._comm, self._options, self._context
        with self._stack, self._tidying():
            if self._per_node:
                from paddle_flexckpt.saving.node_saves import find_nodes

                # Find out which ranks share a directory: two collectives.
                self.destination = find_nodes(comm, self._directory, options, self._stack, context, self._number)
            # All ranks send their options and their state, in brief if they have a cached plan: one collective, and one
            # more where directories are not known to be the same.
            plan, answers = find_common_plan(comm, plans_of(comm), self, context)
            summaries = self.agree(plan, answers)
            self._is_agreed = True
            if plan is None:
                # A collective if shards overlap, replicas may differ, or planning is spread.
                plan = self.plan(summaries)
            share = self.share(plan)
            if options.slice_bytes is not None:
                return self._stage_in_slices(plan, share)
            return self._finish(plan, share)

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        """Remove what was written if all ranks learned of a failure: no rank can commit then.

        If a rank is lost, the progress of the others is not known: the marker stays, for the next save.
        """
        try:
            yield
        except LostRankError as error:
            if self._is_agreed:
                self.destination.lose_rank(error)
            raise
        except CheckpointError:
            if self._is_begun:
                self.destination.discard()
            raise

    def describe(self) -> bytes:
        """Open the destination, wait for earlier saves, begin this one, and describe this rank's shards.

        Return a fingerprint of this rank's inputs to a plan.
        """
        comm, options = self._comm, self._options
        head = options.encode("save_state_dict")
        queued = time.perf_counter()
        self._open_destination()
        self._waited = time.perf_counter() - queued
        check_coordinator(comm, options.coordinator_rank)
        self.state = open_state(self._state_dict, comm.rank)
        check_extra_names(self.state.catalog.keys)
        self._devices = devices_of(self.state.tensors)
        wait_for_devices(self._devices)
        self._is_begun = True
        self._stack.callback(self.destination.release)
        names, message = self.destination.begin()
        place = place_of(self.destination.directory.backend)
        self._inputs = RankInputs(self.state, self._devices, comm, options, head, names, place, message)
        return self._inputs.fingerprint

    def short_message(self, plan: SavePlan) -> bytes:
        """Return this rank's message if it has a cached plan; nothing if that cannot be used."""
        return self._inputs.short_message(plan.fingerprint)

    def full_message(self) -> bytes:
        """Return this rank's first message where not all ranks have a cached plan."""
        return self._inputs.full_message()

    def _open_destination(self) -> None:
        """Wait for earlier saves to the directory, and for room with the background writer."""
        directory, options = self._directory(), self._options
        common = (self._comm, directory, options, self._context)
        if options.async_save is not False:
            from paddle_flexckpt.background.writer import writer_for

            slot = self._stack.enter_context(writer_for(options.async_save, directory.backend).open_slot())
            if self._per_node:
                from paddle_flexckpt.saving.background_nodes import BackgroundNodeSave

                nodes = cast("NodeSave", self.destination)
                self.destination = BackgroundNodeSave(slot, self._comm, nodes, options.coordinator_rank)
            else:
                from paddle_flexckpt.saving.background_saves import BackgroundSave

                self.destination = BackgroundSave(slot, self._written, *common)
        elif not self._per_node:
            self.destination = SharedSave(*common)
        await_earlier(directory.path)

    def agree(self, plan: SavePlan | None, answers: list[bytes]) -> list[RankSummary]:
        """Pass the messages of all ranks to the destination; return their summaries, where no plan was cached.

        Raises:
            ValidationError: Ranks differ in an option, or do not share the directory.
        """
        coordinator = self._options.coordinator_rank
        if plan is not None:
            places, known = zip(*map(decode_short, answers))
            self.destination.agree(known[coordinator], places, plan.messages)
            return []
        fields = zip(*check_heads(answers, self._context, self._comm.ranks))
        summaries = [RankSummary.decode(*each) for each in fields]
        names = SaveNames(**json.loads(summaries[coordinator].names))
        self.destination.agree(names, [each.place for each in summaries], [each.message for each in summaries])
        return summaries

    @without_collector()
    def plan(self, summaries: Sequence[RankSummary]) -> SavePlan:
        """Check that all ranks' shards make whole tensors, and plan which rank writes what: the same on every rank.

        Raises:
            ValidationError: The state is not sound.
        """
        comm, context, options, state = self._comm, self._context, self._options, self.state
        tolerant = any(each.policies >> CLOSE for each in summaries if each.rows)
        reason = "check_replicas lets replicas differ, so what is written is chosen by layers" if tolerant else ""
        planners = Planners(comm, state.catalog, self._inputs.flags, summaries, context, reason)
        planners.inspect()
        rows = planners.rows
        replicas = self._replicas(rows, planners.groups, planners.first_row)
        if planners.overlaps:
            from paddle_flexckpt.memory.sources import check_overlaps

            check_overlaps(comm, replicas.held, rows.catalog, planners.overlaps, context)
        differing: np.ndarray | None = None
        if replicas.comes_first:
            first = replicas.first()
            _, digests = comm.together(lambda: (None, replicas.take(first)), context)
            differing = replicas.compare(first, digests)
        plan = planners.plan(replicas, differing, options.save_replicas, int(self.destination.names.token[-8:], 16))
        # A plan is not cached if it depends on values or on a check of them.
        if differing is not None or planners.overlaps:
            return plan
        messages = [each.message for each in summaries]
        return replace(plan, fingerprint=fingerprint([each.own for each in summaries]), messages=messages)

    def _replicas(self, rows: KeyRows, groups: ReplicaGroups, first: int | None) -> Replicas:
        """Return the replicas among rows; ``first`` is this rank's first row, or None where planning is spread."""
        held = {} if first is None else dict(enumerate(self.state.tensors, first))
        compares, save_replicas = self._options.check_replicas is not False, self._options.save_replicas
        policies = (rows.flags >> 1).astype(np.uint8)
        return Replicas(self._comm, held, rows.catalog, groups, policies, compares, self._context, save_replicas)

    def share(self, plan: SavePlan) -> Share:
        """Return this rank's share of a plan."""
        options = self._options
        file = self.destination.names.data_file(self._comm.rank)
        self._planned_at = time.perf_counter()
        return Share(plan, file, self.state.tensors, options.step, self._devices, options.progress)

    def _finish(
        self,
        plan: SavePlan,
        share: Share,
        early_digests: bytes | None = None,
        handle: SaveHandle | None = None,
        elsewhere: float = 0.0,
    ) -> SaveReport | SaveHandle:
        """Write, compare and commit what is planned.

        The last three arguments are those of a save in slices: the digests of its share at the time of the call, its
        handle, and the seconds that its caller spent ``elsewhere``, between the slices.
        """
        comm, context, options, destination = self._comm, self._context, self._options, self.destination
        # All have written, or staged: one collective.
        plan_seconds = self._planned_at - self._begin - self._waited
        write = functools.partial(self._write, plan, share, early_digests, plan_seconds)
        to_one_place = 0 if self._per_node else plan.total_bytes
        payloads, digests, rows = exchange_written(comm, plan.is_spread, write, context, to_one_place)
        reports, parts = map(list, zip(*map(split, payloads)))
        # Replicas are equal: a collective only where planning is spread.
        replicas = self._replicas(plan.shards, plan.groups, plan.first_row)
        write_partitions = functools.partial(destination.write_partitions, parts, rows)
        differing, plan, described = compare_written(comm, plan, replicas, digests, write_partitions, context)
        if plan.fingerprint:
            plans_of(comm).put(self._inputs.fingerprint, plan)
        is_coordinator = comm.position == options.coordinator_rank
        # Replicas that have to be close are: two collectives if some differ.
        replica_texts = replicas.report(differing, warns=is_coordinator)
        report = functools.partial(
            SaveReport,
            path=destination.directory.path,
            unique_id=destination.names.unique_id,
            replaced=destination.names.replaces,
            replicas=replica_texts,
            **report_fields(reports, plan, "stage" if options.async_save else "write"),
        )
        written = time.perf_counter()
        spent, blocked = written - self._planned_at - elsewhere, written - self._begin - elsewhere
        if options.async_save is not False:
            seconds = {"plan": plan_seconds, "queue": self._waited, "stage": spent, "blocked": blocked}
            background = cast("BackgroundSave | BackgroundNodeSave", destination)
            return background.hand_over(report(seconds=seconds), self._begin, handle)
        destination.commit(parts, rows, described)  # one collective; more where it goes to nodes
        end = time.perf_counter()
        seconds = {"plan": plan_seconds, "write": spent, "commit": end - written, "total": end - self._begin}
        done = report(seconds=seconds)
        if is_coordinator:
            logger.info(done.summary())
        return done

    def _write(self, plan: SavePlan, share: Share, early: bytes | None, plan_seconds: float) -> RankMessages:
        """Write this rank's share, and take its digests or use the ``early`` ones; return its messages to others."""
        begin = time.perf_counter()
        if early is None:
            with self._digests(plan) as taken:
                messages = self.destination.write(share, taken.written)
                digests = taken.encode(messages.checksums)
        else:
            digests = early
            messages = self.destination.write(share, np.zeros(len(share.items), dtype=bool))
        ends = np.cumsum([len(lines) * DIGEST.itemsize for lines in plan.lines.values()]).tolist()
        of_planner = {planner: digests[low:high] for planner, low, high in zip(plan.lines, [0, *ends], ends)}
        report = plan.encode_report(plan_seconds, time.perf_counter() - begin)
        return RankMessages(join((report, messages.payload)), of_planner, messages.payloads)

    def _digests(self, plan: SavePlan) -> Digests:
        held, catalog = dict(enumerate(self.state.tensors)), self.state.catalog
        return Digests(held, catalog, plan.all_lines, plan.by_device or None, plan.written_lines)

    def _stage_in_slices(self, plan: SavePlan, share: Share) -> SlicedSave:
        """Digest this rank's share as it is now, and return a handle that stages it in slices. One collective."""
        from paddle_flexckpt.saving.sliced_saves import OpenSave, SlicedSave, refuse

        staging = cast("BackgroundSave", self.destination)

        def begin() -> tuple[bytes, bytes]:
            with self._digests(plan) as digests:
                return digests.encode(staging.begin_slices(share)), b""

        def last_step(step: Callable[..., object], *arguments: Any) -> None:
            with stack, self._tidying():
                step(*arguments)

        early_digests, _ = self._comm.together(begin, self._context)
        stack = self._stack.pop_all()
        open_save = OpenSave(
            stage_slice=functools.partial(staging.stage_slice, self._options.slice_bytes or 0),
            hand_over=functools.partial(last_step, self._finish, plan, share, early_digests),
            give_up=functools.partial(last_step, exchange_written, self._comm, plan.is_spread, refuse, self._context),
        )
        return staging.register(SlicedSave(staging.directory.path, staging.names.unique_id, open_save))
