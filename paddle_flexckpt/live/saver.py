"""save_state_dict: live shards into a checkpoint directory.

Tested in tests/live/test_saver.py, tests/distributed/test_save_load.py and tests/live/test_policies.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from paddle_flexckpt.background import BackgroundWriter, SaveHandle, await_earlier, shared_writer
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError, check_extra_names, concat
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.options import GROUP, PATH, SHARDS, UNUSED, takes
from paddle_flexckpt.foreign.formats import open_to_save, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.live.node_saves import NodeSave, meet_nodes
from paddle_flexckpt.live.orders import indivisible_rows
from paddle_flexckpt.live.replicas import Replicas, replica_digests
from paddle_flexckpt.live.save_options import ReplicaPolicies, SaveOptions
from paddle_flexckpt.live.shared_saves import BackgroundSave, Share, SharedSave
from paddle_flexckpt.live.sources import check_sources
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.media.backend import Location, place_of
from paddle_flexckpt.native.directory import SaveNames
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.planning import plan_write
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
    async_save: bool | BackgroundWriter = ...,
    safetensors: bool = ...,
    save_replicas: bool = ...,
    **options: Any,
) -> SaveReport | SaveHandle: ...


@takes(SaveOptions, state_dict=SHARDS, path=PATH, process_group=GROUP, safetensors=UNUSED)
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
    asked = SaveOptions(coordinator_rank, unique_id, async_save, save_replicas, **options)
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
                agreed = self.agree(answers)
            except LostRankError:
                self._undo.pop_all()  # others may be writing already: the next save needs the marker
                raise
            self._undo.pop_all()
            # From here on every rank removes what it wrote, if it knows that the coordinator cannot commit: that is so
            # when all ranks have been told of a failure. If an exchange fails (a rank is lost) nobody knows how far the
            # others are. Then the marker stays, and the next save removes what is left.
            try:
                self.plan(state, agreed)
                return self.commit(*self.write())
            except LostRankError as error:
                self.destination.lose_rank(error)
                raise
            except CheckpointError:
                self.destination.discard()
                raise

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
        described = _Described(
            json.dumps(names and asdict(names)).encode(),
            place_of(self.destination.directory.backend).encode(),
            message,
            np.packbits(whole).tobytes(),
            policies.tobytes(),
            encode_catalog(state.catalog),
        )
        return state, join((head, *described))

    def _open_destination(self) -> None:
        directory, options = self._directory(), self._options
        writer = _background_writer(options.async_save, directory)
        slot = None if writer is None else self._stack.enter_context(writer.open_slot())
        await_earlier(directory.path)
        if not self._per_node:
            common = (self._comm, directory, options.coordinator_rank, options.unique_id, self._context)
            self.destination = SharedSave(*common) if slot is None else BackgroundSave(slot, *common)

    def agree(self, answers: list[bytes]) -> _Described:
        """Return what all ranks described, field by field, if they agree; let the destination know what it needs.

        Raises:
            ValidationError: Ranks differ in an option, or do not share the directory.
        """
        agreed = _Described(*check_heads(answers, self._context, self._comm.ranks))
        names = SaveNames(**json.loads(agreed.names[self._options.coordinator_rank]))
        self.destination.agree(names, agreed.place, agreed.message)
        return agreed

    def plan(self, state: LocalState, agreed: _Described) -> None:
        """Check that the shards of all ranks are whole tensors, and plan who writes what: the same on every rank.

        Raises:
            ValidationError: The state is not sound.
        """
        comm, options, context = self._comm, self._options, self._context
        decoded = [decode_catalog(encoded) for encoded in agreed.catalog]
        self._catalog = catalog = concat(decoded)
        # Ranks' rows follow each other in the common catalog.
        first_row = int(np.argmax(catalog.rank == comm.rank)) if len(state.tensors) else 0
        held = dict(enumerate(state.tensors, first_row))
        groups = check_sources(comm, held, catalog, context).groups
        policies, compares = np.frombuffer(b"".join(agreed.policies), np.uint8), options.check_replicas is not False
        self._digests = lambda: replica_digests(held, catalog, groups)
        self._replicas = Replicas(comm, held, catalog, groups, policies, compares, context, options.save_replicas)
        self._differing: np.ndarray | None = None
        if self._replicas.comes_first:
            _, digests = comm.together(lambda: (None, self._digests()), context)
            self._differing = self._replicas.compare(digests)
        self._plan = plan_write(
            catalog,
            self.destination.names.data_file,
            save_replicas=options.save_replicas,
            groups=self._replicas.narrowed(self._differing),
            indivisible=np.concatenate([_unpack(bits, len(rows)) for bits, rows in zip(agreed.indivisible, decoded)]),
        )
        self._share = Share(self._plan, comm.rank, held, options.step, bool(self._devices))
        self._planned = time.perf_counter()

    def write(self) -> tuple[SaveReport, list[bytes]]:
        """Write this rank's share, and compare replicas; return the report so far, and what the commit needs.

        Raises:
            ValidationError: Replicas differ that have to be equal.
            CheckpointError: A rank could not write.
        """
        replicas, differing = self._replicas, self._differing

        def work() -> tuple[None, bytes]:
            part = self.destination.write(self._share)
            return None, join((part, self._digests() if replicas.compares and differing is None else b""))

        _, answers = self._comm.together(work, self._context)
        parts, digests = zip(*map(split, answers))
        differing = replicas.compare(digests) if differing is None else differing
        report = SaveReport(
            path=self.destination.directory.path,
            unique_id=self.destination.names.unique_id,
            keys=len(np.unique(self._plan.catalog.key)),
            items=len(self._plan.catalog),
            bytes_written=int(self._share.items.byte_length.sum()),
            total_bytes=self._plan.total_bytes,
            held_bytes=int(self._catalog.byte_length.sum()),
            imbalance=self._plan.imbalance,
            replicas=replicas.report(differing, warns=self._is_coordinator),
            seconds={"plan": self._planned - self._begin - self._waited},
        )
        return report, list(parts)

    def commit(self, report: SaveReport, parts: list[bytes]) -> SaveReport | SaveHandle:
        """Make the checkpoint exist, or hand the save over to the background writer.

        Raises:
            CheckpointError: The checkpoint could not be committed.
        """
        written = time.perf_counter()
        spent = written - self._planned
        if isinstance(self.destination, BackgroundSave):
            seconds = {"queue": self._waited, "stage": spent, "blocked": written - self._begin}
            return self.destination.hand_over(replace(report, seconds={**report.seconds, **seconds}), self._begin)
        self.destination.commit(parts)
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

    names: Any
    place: Any
    message: Any
    indivisible: Any
    policies: Any
    catalog: Any


def _unpack(bits: bytes, count: int) -> np.ndarray:
    """Return a bool for each row, from one bit for each."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)


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
