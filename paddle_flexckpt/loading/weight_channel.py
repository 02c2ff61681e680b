"""WeightChannel: the weights of a live model, pushed to a serving engine as often as they change.

A push has these steps, each agreed by all ranks: confirm the plan; write the segment; switch the engine. The engine
serves the version before until the last one.

Tested in tests/rollout/test_channel.py and tests/distributed/test_weight_channel.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from paddle_flexckpt.catalog import CheckpointError, EngineError, ValidationError
from paddle_flexckpt.catalog.wire import split
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.loading.push_handles import TOKEN_BYTES, VERSION_BYTES, Notice, PushHandle, Sent
from paddle_flexckpt.loading.pushed_weights import PushedWeights
from paddle_flexckpt.observers import notify
from paddle_flexckpt.overlaps import finish_steps
from paddle_flexckpt.rollout.authenticated import find_secret
from paddle_flexckpt.rollout.engine_client import TIMEOUT_SECONDS, EngineClient, refuse
from paddle_flexckpt.rollout.push_reports import ComparedWeightsReport, PushReport
from paddle_flexckpt.rollout.receiver import RemoteSink
from paddle_flexckpt.rollout.segment import DIRECTORY, LocalSink, SegmentDirectory, SegmentNames, Sink, channel_of
from paddle_flexckpt.rollout.switch import SwitchProcess, key_of
from paddle_flexckpt.transfer.agreement import check_calls, check_coordinator
from paddle_flexckpt.transfer.options import GROUP, SHARDS, StatementOptions, rule, same_on_all_ranks, takes


@dataclass(frozen=True)
class ChannelOptions(StatementOptions):
    """The options of a channel.

    Attributes:
        kind: The kind of the engine.
        coordinator_rank: The rank, counted within the group, that talks to the engine.
        prefix: As of ``publish``.
        receiver: ``host:port`` of ``flexckpt receive`` on the engine's machine, for ranks on other machines. The secret
            is the value of FLEXCKPT_RECEIVE_SECRET.
        directory: Of shared memory, on the engine's machine.
        check_replicas: As of ``publish``.
        offload: As of ``publish``.
        timeout: Seconds that a call of the engine may take.
    """

    kind: str = field(default="vllm", metadata=rule(choices=("vllm",)))
    coordinator_rank: int = 0
    prefix: str | None = None
    receiver: str | None = None
    directory: str = DIRECTORY
    check_replicas: bool = field(default=True, metadata=rule(choices=(True, False)))
    offload: bool = False
    timeout: float = TIMEOUT_SECONDS


@dataclass(frozen=True, eq=False)
class Route:
    """The way of one model's weights to the engine, as all ranks have planned it.

    Attributes:
        weights: The weights, and the parts that this rank writes.
        place: The identity of the engine's directory of segments.
        is_here: Whether this rank is on the engine's machine.
        leader: The rank that writes the header.
        leads_files: Whether this rank, or the receiver for it, renames and removes files.
    """

    weights: PushedWeights
    place: str
    is_here: bool
    leader: int
    leads_files: bool


class WeightChannel:
    """A channel by which a live model's weights reach serving engines, version by version.

    Every rank of the group makes the same calls. The engine runs with the extension of this library
    (docs/rollout.md). It has the version that it had, bit for bit, until a push has succeeded, and after one that
    failed.
    """

    @takes(ChannelOptions, url="the coordinator alone uses it", process_group=GROUP)
    def __init__(self, url: str | Sequence[str], kind: str = "vllm", process_group: Any = None, **options: Any) -> None:
        """Reach nothing yet.

        Args:
            url: The engine's server, such as ``http://host:8000``; of several engines on one machine a list. All of
                them get a version, or none.
            process_group: The ranks that take part; all ranks of the job by default.
            **options: Like all other arguments, of :class:`ChannelOptions`.
        """
        self._urls = [each.rstrip("/") for each in ([url] if isinstance(url, str) else url)]
        self._group = process_group
        if not self._urls:
            raise ValidationError([f"url={url!r}: give the URL of an engine. Remedy (FC101): correct the list"])
        if len(set(self._urls)) != len(self._urls):
            raise ValidationError([f"url={url!r}: give each engine's URL once. Remedy (FC101): correct the list"])
        self._url = ", ".join(self._urls)
        self._options = ChannelOptions(kind=kind, **options)
        self._options.check()
        self._channel = channel_of(self._url)
        self._engines = [EngineClient(each, self._options.timeout) for each in self._urls]
        self._directory = SegmentDirectory(self._options.directory)
        self._context = f"cannot push to {self._url}"
        self._route: Route | None = None
        self._pending: PushHandle | None = None
        self._switch: SwitchProcess | None = None
        self._version, self._key, self._pushed = "", "", 0
        # The coordinator's: where the engine is, the segment that it serves, and the one before if it is free.
        self._place = self._current = self._spare = ""

    @same_on_all_ranks(model=SHARDS, version="its digest is compared", wait="a rank may wait later")
    def push(self, model: Any, version: str | int | None = None, wait: bool = True) -> PushReport | PushHandle:
        """Have the engine serve the weights that a model has now.

        The weights are read before this returns. The engine serves while they are written and staged. It is paused
        while it loads them, and requests that are under way stay.

        Args:
            model: A layer with ``sharded_state_dict()``, or names to shards (or plain, replicated tensors).
            version: The version's name; by default pushes are counted.
            wait: Whether to wait for the engine. If not, training may go on; every rank calls ``result()`` of the
                handle, or makes the next push, later.

        Returns:
            The report, or a handle.

        Raises:
            ValidationError: The model does not fit, or ranks disagree (on every rank, with the same text).
            CheckpointError: A rank could not write, or the engine refused: it serves the version it had.
        """
        self._finish_pending()
        begin = time.perf_counter()
        try:
            self._pending = self._send(model, version, begin)
        except Exception as error:
            notify("push", self._url, time.perf_counter() - begin, error)
            raise
        return self._finish_pending() if wait else self._pending

    def _send(self, model: Any, version: str | int | None, begin: float) -> PushHandle:
        """Write the segment, and have the switch begin."""
        self._comm = comm = communicator_for(self._group)
        finish_steps(comm.ranks)
        name = str(self._pushed + 1 if version is None else version)
        state, answers = comm.together(lambda: self._look(_state_of(model), name), self._context)
        notices = self._agreed(answers)
        route = self._route
        planned = route is None or not all(each.is_unchanged for each in notices) or not route.weights.renew()
        if route is None or planned:
            route = self._plan(state)
        notice = notices[self._options.coordinator_rank]
        names = SegmentNames(
            self._channel,
            notice.token,
            "" if planned else notice.recycled,
            (notice.kept,) if notice.kept else (),
            route.weights.file.nbytes,
            route.leads_files,
        )
        self._switch = None
        try:
            written, path, digest = self._write(route, names)
        except BaseException:
            if self._switch is not None:
                self._switch.stop()
            self._drop(route, names)
            raise
        switch = self._switch
        sent = Sent(name, path, names, written, planned, switch, begin, time.perf_counter() - begin)
        if switch is not None:
            switch.begin(name, path, digest)
        return PushHandle(functools.partial(self._finish, route, sent), lambda: switch is not None and switch.is_done())

    def _finish_pending(self) -> Any:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    @property
    def _leads(self) -> bool:
        return self._comm.position == self._options.coordinator_rank

    def _look(self, state: Mapping[str, Any], version: str) -> tuple[Mapping[str, Any], bytes]:
        """Look whether the plan still holds; the coordinator asks the engine, and draws the segment's name."""
        check_coordinator(self._comm, self._options.coordinator_rank)
        unchanged = self._route is not None and self._route.weights.is_unchanged(state)
        digest = hashlib.sha256(version.encode()).digest()[:VERSION_BYTES]
        if not self._leads:
            return state, Notice(unchanged, digest).encode()
        states = [each for engine in self._engines for each in engine.status(self._options.directory)]
        place = str(states[0].get("place"))
        if any(each.get("place") != place for each in states):
            raise EngineError(f"{self._url}: the engine's ranks are on several machines, which is not supported")
        file = SegmentNames(self._channel, self._current, "", (), 0, False).file(self._current)
        if any(file not in each.get("segments", ()) for each in states):
            self._current = self._spare = ""  # the engine was started again, or another trainer has pushed
        unchanged, self._place = unchanged and place == self._place, place
        # It is used once: after a push that fails, nobody knows what is in it.
        recycled, self._spare = self._spare, ""
        return state, Notice(unchanged, digest, secrets.token_hex(TOKEN_BYTES), recycled, self._current).encode()

    def _agreed(self, answers: list[bytes]) -> list[Notice]:
        """Return what ranks have said; raise if they are in different calls, or push different versions."""
        check_calls([split(answer)[0] if answer else b"" for answer in answers], self._context, self._comm.ranks)
        notices = [Notice.decode(answer) for answer in answers]
        if len({each.version for each in notices}) > 1:
            remedy = "Remedy (FC502): push the same version on every rank"
            raise ValidationError([f"ranks push different versions. {remedy}"], self._context)
        return notices

    def _plan(self, state: Mapping[str, Any]) -> Route:
        """Describe the model on all ranks, and plan who writes what."""
        options, comm = self._options, self._comm
        reads = ReshardOptions(
            coordinator_rank=options.coordinator_rank,
            offload=options.offload,
            check_replicas=options.check_replicas,
            optimizer_states="ignore",
        )

        def describe_call() -> tuple[bytes, ...]:
            return options.encode("push"), self._place.encode() if self._leads else b"", self._own_place()

        weights = PushedWeights(comm, state, describe_call, self._context, reads, options.aoa_config)
        places, own = weights.messages
        here = [rank for rank, place in zip(comm.ranks, own) if place == places[options.coordinator_rank]]
        is_here, leader = comm.rank in here, (here or comm.ranks)[0]
        # A receiver has nobody beside it if no rank is there.
        leads_files = comm.rank == leader or not here

        def plan() -> tuple[None, bytes]:
            if not is_here and options.receiver is None:
                raise ValidationError(
                    [
                        f"the engine is on another machine than rank {comm.rank}. Remedy (FC951): run `flexckpt "
                        "receive` on the engine's machine, and give its address as receiver="
                    ]
                )
            weights.plan(options.prefix, here or comm.ranks)
            return None, b""

        comm.together(plan, self._context)
        self._route = Route(weights, places[options.coordinator_rank].decode(), is_here, leader, leads_files)
        return self._route

    def _own_place(self) -> bytes:
        try:
            return self._directory.place.encode()
        except OSError:  # a machine without such a directory is another one than the engine's
            return b""

    def _write(self, route: Route, names: SegmentNames) -> tuple[int, str, str]:
        """Write the segment, with the other ranks; return the bytes that this rank wrote, and path and digest of it."""

        def connect() -> tuple[Sink, bytes]:
            if self._leads:
                self._switch = SwitchProcess(self._urls, self._options.timeout)
            if route.is_here:
                sink: Sink = LocalSink(self._directory, names)
                return sink, self._directory.path(names.file(names.token)).encode()
            remote = self._connect(names)
            if remote.place != route.place:
                remote.close()
                raise ValidationError(
                    [
                        f"the receiver at {self._options.receiver} has another directory of shared memory than the "
                        f"engine at {self._url}. Remedy (FC951): run `flexckpt receive` where the engine runs, with "
                        "the same directory"
                    ]
                )
            return remote, remote.path.encode()

        sink, paths = self._comm.together(connect, self._context)
        leads, position = self._comm.rank == route.leader, self._comm.ranks.index(route.leader)
        with contextlib.closing(sink):
            written = route.weights.write(sink, leads)
            _, digests = self._comm.together(lambda: (None, sink.seal().encode() if leads else b""), self._context)
        return written, paths[position].decode(), digests[position].decode()

    def _connect(self, names: SegmentNames) -> RemoteSink:
        address = str(self._options.receiver)
        return RemoteSink(address, find_secret(address), names)

    def _finish(self, route: Route, sent: Sent) -> PushReport:
        """Wait for the engine, with the other ranks."""
        self._pending = None

        def outcome() -> tuple[None, bytes]:
            return None, b"" if sent.switch is None else json.dumps(sent.switch.result()).encode()

        try:
            _, answers = self._comm.together(outcome, self._context)
        except CheckpointError as error:
            self._drop(route, sent.names)
            notify("push", self._url, time.perf_counter() - sent.begin, error)
            raise
        done = json.loads(answers[self._options.coordinator_rank])
        self._version, self._key, self._pushed = sent.version, key_of(sent.version, sent.path), self._pushed + 1
        self._spare, self._current = self._current if done["released"] else "", sent.names.token
        total = time.perf_counter() - sent.begin
        report = PushReport(
            url=self._url,
            version=sent.version,
            keys=route.weights.keys,
            left_out=route.weights.left_out,
            total_bytes=route.weights.file.data_bytes,
            bytes_written=sent.written,
            planned=sent.planned,
            recycled=bool(sent.names.recycled),
            seconds={"write": sent.seconds, **done["seconds"], "total": total},
        )
        notify("push", self._url, total, report)
        return report

    def _drop(self, route: Route, names: SegmentNames) -> None:
        """Remove segments that the engine does not use."""
        with contextlib.suppress(OSError, CheckpointError):
            self._directory.clear(replace(names, leads=names.leads and route.is_here))
            if not route.is_here and self._comm.rank == route.leader:
                self._connect(replace(names, token="")).close()

    @same_on_all_ranks(model=SHARDS)
    def verify(self, model: Any) -> ComparedWeightsReport:
        """Compare a model, bit for bit, with what the engine's ranks hold.

        Each rank makes digests of the parts that it has pushed. The engine's ranks make theirs of the bytes that they
        have received, and compare their live parameters with these bytes where they can be read.

        Args:
            model: The model of the last push, with the values that it had then.

        Returns:
            The report: the tensors that were compared, and those that differ.

        Raises:
            ValidationError: Nothing was pushed, or the model has other tensors than then.
            EngineError: The engine holds another version, or cannot be reached.
        """
        self._finish_pending()
        comm, route = communicator_for(self._group), self._route

        def look() -> tuple[PushedWeights, bytes]:
            if route is None or not self._key or not route.weights.is_unchanged(_state_of(model)):
                raise ValidationError(["the model is not the one that was pushed last. Remedy (FC101): push it first"])
            return route.weights, b""

        pushed, _ = comm.together(look, self._context)
        regions: list[Any] = []
        for parts in pushed.parts():

            def digest(parts: Any = parts) -> tuple[None, bytes]:
                for part in parts:
                    digits = xxhash.xxh3_128_hexdigest(part.values)
                    regions.append([part.name, part.base, part.extents, part.strides, digits])
                return None, b""

            comm.together(digest, self._context)
        _, answers = comm.together(lambda: (None, json.dumps(regions).encode()), self._context)

        def compare() -> tuple[None, bytes]:
            if not self._leads:
                return None, b""
            wanted = {
                "version": self._key,
                "regions": [each for answer in answers for each in json.loads(answer)],
            }
            results = []
            for engine in self._engines:
                results += engine.workers("flex_digests", json.dumps(wanted))
                refuse(engine.url, "the weights were not compared", results)
            return None, json.dumps(results).encode()

        _, outcomes = comm.together(compare, self._context)
        return _compared(self._url, self._version, pushed.keys, json.loads(outcomes[self._options.coordinator_rank]))

    def close(self) -> None:
        """Wait for a push under way, and release shared memory, but what the engine uses."""
        self._finish_pending()
        if self._route is not None:
            self._drop(self._route, SegmentNames(self._channel, "", "", (self._current,), 0, self._route.leads_files))
        self._route, self._key, self._spare = None, "", ""


def _state_of(model: Any) -> Mapping[str, Any]:
    describe = getattr(model, "sharded_state_dict", None)
    state: Mapping[str, Any] = describe() if callable(describe) else model
    return state


def _compared(url: str, version: str, keys: int, results: list[dict[str, Any]]) -> ComparedWeightsReport:
    def names(field: str) -> list[str]:
        return list(dict.fromkeys(name for each in results for name in each[field]))

    return ComparedWeightsReport(
        url,
        version,
        keys,
        len(results),
        names("different_names"),
        sum(each["live_compared"] for each in results),
        names("live_different_names"),
        {name: why for each in results for name, why in each["live_unreadable_names"].items()},
    )
