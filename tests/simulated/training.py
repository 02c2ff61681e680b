"""The script that each rank of a simulated job runs: it restores, trains by waiting, saves, and restores again.

The values of all tensors follow from a version: job, start of the job, step, and how often that step was tried. So two
saves have no value in common, and each value says which save it is of.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, LostRankError
from paddle_flexckpt.manager import CheckpointManager, KeepBest, KeepEvery, KeepInterval, KeepLatest, SaveInterval
from paddle_flexckpt.manager.policies import KeepPolicy, SaveEvery, SavePolicy
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.host_channel import HostChannel
from paddle_flexckpt.ranks.lost_ranks import announce
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.simulated.habits import manager_options, restore_options, save_options

if TYPE_CHECKING:
    from tests.simulated.scheduler import Scheduler
    from tests.simulated.tasks import Process

SHAPES: dict[str, tuple[int, ...]] = {"layer.weight": (8, 6), "layer.bias": (5,), "moment": (7, 3), "table": (3, 2)}
# Some MiB, which are not a whole number of blocks.
LARGE = {"large": (41_003, 16)}
# What an error says of a checkpoint that is there.
_COMPLETE = re.compile(r"the checkpoint of step \d+ is complete, but|the checkpoint in .* \(id 0\) is complete, but")
# What one says of a save to nodes that some of them may have published; of a step that is in memory, or soon.
PUBLISHED, _IN_MEMORY = "some nodes may have published", "memory, but"
# Where the steps in memory are, on each node, and how many nodes have each data file, if there are so many.
MEMORY_PATH, COPIES = "/memory/run", 2
_INDEX_BITS, _KEY_BITS = 10, 4
# What a script says of a save of which it was not told how it ended.
UNKNOWN = "it is not known what became of it"
_POLICIES: dict[str, Callable[[int], KeepPolicy]] = {
    "latest": KeepLatest,
    "every": KeepEvery,
    "best": KeepBest,
    "interval": KeepInterval,
}


def shapes_of(habits: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a job's tensors."""
    return SHAPES | LARGE if "large" in habits else SHAPES


def values(version: int, key: str) -> np.ndarray:
    """Return the whole tensor of a version.

    Each element tells version, tensor and place; of a large one the place is cut.
    """
    all_shapes = SHAPES | LARGE
    shape = all_shapes[key]
    number = (version << _KEY_BITS) + list(all_shapes).index(key)
    place = np.arange(int(np.prod(shape)), dtype=np.int64) % (1 << _INDEX_BITS)
    return (number << _INDEX_BITS) + place.reshape(shape)


def version_of(element: int) -> int:
    """Return the version that an element is of."""
    return int(element) >> (_KEY_BITS + _INDEX_BITS)


def all_versions_of(elements: np.ndarray) -> set[int]:
    """Return the versions that elements are of."""
    return set(np.unique(elements >> (_KEY_BITS + _INDEX_BITS)).tolist())


def policies_of(keep: Sequence[str]) -> tuple[KeepPolicy, ...]:
    """Return the policies that a scenario names."""
    found = []
    for each in keep:
        name, _, number = each.partition(":")
        found.append(_POLICIES[name](int(number)))
    return tuple(found)


def shards(
    rank: int, size: int, layout: int, version: int | None, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, ShardedWeight]:
    """Return what a rank holds; zeros without a version. Layouts cut along other axes."""
    found = {}
    for key, shape in shapes.items():
        whole = np.zeros(shape, dtype=np.int64) if version is None else values(version, key)
        if key in ("layer.weight", "large"):
            axis = layout % 2
            low, high = (shape[axis] * (rank + more) // size for more in (0, 1))
            part = np.ascontiguousarray(whole.take(range(low, high), axis))
            found[key] = ShardedWeight(key, part, part.shape, shape, (low, 0) if axis == 0 else (0, low))
        elif key == "moment":
            low, high = (whole.size * (rank + more) // size for more in (0, 1))
            flat = whole.reshape(-1)[low:high].copy()
            found[key] = ShardedWeight(key, flat, shape, shape, (0, 0), True, slice(low, high))
        elif key != "table" or rank == size - 1:
            found[key] = ShardedWeight(key, whole, shape, shape, (0,) * len(shape))
    return found


def versions_in(state: Mapping[str, ShardedWeight], rank: int, size: int, layout: int) -> set[int]:
    """Return the versions that a rank's shards are of; -1 stands for values that no version has."""
    versions: set[int] = set()
    for key, shard in state.items():
        for element in np.asarray(shard.local_tensor).reshape(-1)[:1]:
            version = version_of(element)
            expected = shards(rank, size, layout, version, {key: (SHAPES | LARGE)[key]})[key].local_tensor
            versions.add(version if np.array_equal(expected, shard.local_tensor) else -1)
    return versions


class Store:
    """Stand for the job's key-value store, which rank 0's process keeps. Its clients wait as long as TCP does."""

    _PATIENCE_SECONDS = 900.0

    def __init__(self, scheduler: Scheduler, network: Any, server: Process) -> None:
        self._scheduler, self._network, self._server = scheduler, network, server
        self._counts: dict[str, int] = {}
        self._values: dict[str, bytes] = {}

    def _ask(self) -> None:
        scheduler, server, client = self._scheduler, self._server, self._scheduler.process
        deadline = scheduler.now + self._PATIENCE_SECONDS
        scheduler.sleep(2 * self._network.latency(client.node, server.node))
        while server.stopped or not self._network.is_reachable(client.node, server.node):
            if scheduler.now > deadline:
                raise RuntimeError("TCPStore: timed out (simulated)")
            scheduler.sleep(1.0)
        if not server.alive:
            raise RuntimeError("TCPStore: connection reset by peer (simulated)")

    def add(self, key: str, value: int) -> int:
        self._ask()
        self._counts[key] = self._counts.get(key, 0) + value
        return self._counts[key]

    def set(self, key: str, value: str) -> None:
        self._ask()
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._ask()
        while key not in self._values:
            self._scheduler.sleep(0.1)
            self._ask()
        return self._values[key]


class ChannelCommunicator(Communicator):
    """Connect the ranks of a job, as on a device backend: over the host channel, with the job's store."""

    def __init__(self, store: Store, name: str, size: int, rank: int) -> None:
        super().__init__(tuple(range(size)), rank)
        announce(store, rank)
        self._channel = HostChannel(store, name, self.ranks, rank)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._channel.all_gather(payload)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self._channel.all_to_all(note, payloads)


class Script:
    """Do one rank's run from its start to its end.

    Attributes:
        stage: What it is doing, for the errors of all ranks to be compared.
    """

    def __init__(self, job: Any, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.incarnation, self.layout = job.incarnation, job.incarnation % 2
        self.scenario, self.ledger = job.cluster.scenario, job.cluster.ledger
        self.shapes = shapes_of(self.scenario.habits)
        self.stage = "start"
        self._handles: list[tuple[int, Any]] = []
        self._tries: dict[int, int] = {}
        self._tier = self._make_tier()

    def _make_tier(self) -> Any:
        """Return the options of a manager that keeps steps in memory."""
        if "memory" not in self.scenario.habits:
            return {}
        from paddle_flexckpt.manager import MemoryTier

        nodes, keep = len(self.job.on_nodes), 1 + self.scenario.seed % 2
        options: dict[str, Any] = {"copies": min(COPIES, nodes)}
        if "parity" in self.scenario.habits and nodes > 1 and self.size % nodes == 0:
            options = {"parity": nodes}
        return {"memory": MemoryTier(MEMORY_PATH, save_when=SaveEvery(1), keep=keep, **options)}

    def tries(self, step: int) -> int:
        """Return how often this step has been saved since the start."""
        return self._tries.get(step, 0)

    def run(self) -> None:
        """Be the main thread."""
        try:
            self._run()
        except CheckpointError as error:
            self.ledger.failed(self, error)
            raise SystemExit(1) from None

    def _run(self) -> None:
        scenario, job = self.scenario, self.job
        comm = self._meet()
        with contextlib.ExitStack() as stack:
            background: bool | BackgroundWriter = False
            if scenario.is_async:
                writer = BackgroundWriter(scenario.max_pending, timeout=scenario.timeout)
                background = stack.enter_context(writer)
            self.stage = "manager"
            manager = stack.enter_context(
                CheckpointManager(
                    job.location(),
                    save_when=self._save_when(),
                    keep=policies_of(scenario.keep),
                    process_group=comm,
                    async_save=background,
                    preemption_signals=(signal.SIGTERM,) if scenario.preemption else (),
                    **manager_options(scenario.habits),
                    **self._tier,
                )
            )
            begin = self._restore(manager) + 1
            for step in range(begin, job.steps + 1):
                job.cluster.scheduler.sleep(scenario.time_of(step))
                self._collect_handles()
                self.stage = f"should_save {step}"
                if manager.should_save(step):
                    self._save(manager, step)
                    self._ask(manager)
                if manager.should_stop:
                    self.ledger.stopped(self, step)
                    break
                self.ledger.goes_on(self, step)
            else:
                self.stage = "finish"
                self._finish(manager)
                self.ledger.finished(self)
            if isinstance(background, BackgroundWriter):
                self.ledger.check_memory(self, background.staging_bytes)
            self.stage = "close"
        self._collect_handles()

    def _meet(self) -> ChannelCommunicator:
        try:
            return ChannelCommunicator(self.job.store, f"world {self.incarnation}", self.size, self.rank)
        except RuntimeError as error:  # of the job's own store, before the library has a part in it
            self.job.cluster.scheduler.note(str(error))
            raise SystemExit(1) from None

    def _save_when(self) -> list[SavePolicy]:
        scenario = self.scenario
        policies: list[SavePolicy] = [SaveEvery(scenario.save_every)]
        return [*policies, SaveInterval(1.5 * scenario.step_seconds)] if "clock" in scenario.habits else policies

    def _finish(self, manager: CheckpointManager) -> None:
        try:
            manager.wait()
        except LostRankError:
            raise
        except CheckpointError as error:
            self._tolerate(error)
        self._collect_handles()

    def _restore(self, manager: CheckpointManager) -> int:
        # Another rank may come to the restore, and to an error of storage, before this one.
        self.stage, since = "latest_step", self.job.cluster.scheduler.now
        if manager.latest_step() is None:
            self.ledger.found_nothing(self)
            return 0
        self.stage = "restore"
        state = shards(self.rank, self.size, self.layout, None, self.shapes)
        options = restore_options(self.scenario.habits, self.scenario.keep)
        try:
            report = manager.restore(state=state, rng=False, fallback=True, **options)
        except CorruptCheckpointError as error:
            if self.ledger.committed or not self.ledger.disturbed:
                raise
            self.ledger.failed(self, error)
            return 0  # somebody has damaged all there was: the run begins anew
        versions = versions_in(state, self.rank, self.size, self.layout)
        self.ledger.restored(self, report.step, versions, report.skipped, since)
        self._ask(manager)
        return report.step

    def _ask(self, manager: CheckpointManager) -> None:
        """Ask what there is, as somebody does who chooses among checkpoints."""
        if "asks" not in self.scenario.habits:
            return
        self.stage, ledger = f"asks {self.stage}", self.ledger
        since, floor = self.job.cluster.scheduler.now, ledger.highest
        try:
            steps, infos = manager.all_steps(), manager.checkpoints()
            manager.best_step("loss")
            if self.rank == 0:  # who has looked
                ledger.listed(floor, steps, infos, since)
        except LostRankError:
            raise
        except CheckpointError as error:
            self.ledger.failed(self, error)  # the best of them cannot be told while one is damaged

    def _save(self, manager: CheckpointManager, step: int) -> None:
        scenario, ledger = self.scenario, self.ledger
        self.stage = f"save {step}"
        is_blocking = not scenario.is_async or ("blocking" in scenario.habits and step % 2 == 0)
        self._tries[step] = self._tries.get(step, 0) + 1
        version = ledger.begin(self, step)
        state = shards(self.rank, self.size, self.layout, version, self.shapes)
        metrics = {"loss": float((version * 7919) % 101)}
        try:
            saved = manager.save(
                step,
                state=state,
                rng=False,
                metrics=metrics,
                overwrite=scenario.overwrites,
                **save_options(scenario.habits, is_blocking),
            )
        except LostRankError:
            ledger.reported(version, self, UNKNOWN)
            raise
        except CheckpointError as error:
            text = str(error)
            if self._tier and step % scenario.save_every:
                ledger.told_of_memory(version, self, UNKNOWN if manager.should_stop or _IN_MEMORY in text else text)
            elif text.startswith(f"the checkpoint of step {step} is on its way"):
                ledger.reported(version, self, UNKNOWN)  # and with it its handle
            else:
                ledger.reported(version, self, None if _COMPLETE.search(text) else text)
            self._tolerate(error)
            return
        if not is_blocking or (self._tier and hasattr(saved, "wait")):
            self._keep_handle(version, saved)
        else:
            ledger.reported(version, self, None)

    def _tolerate(self, error: CheckpointError) -> None:
        """End with an error, or note it and go on."""
        self.ledger.failed(self, error)
        if self.scenario.on_error == "exit":
            raise SystemExit(1)

    def _keep_handle(self, version: int, handle: Any) -> None:
        self._handles.append((version, handle))
        scheduler, step = self.job.cluster.scheduler, self.ledger.attempts[version].step
        scheduler.spawn(scheduler.process, lambda: self._follow(version, handle), f"follows step {step}")

    def _follow(self, version: int, handle: Any) -> None:
        """Hear of an outcome at once: the ledger has to know what was reported done before the power fails."""
        handle.wait()
        self._report(version, handle)

    def _collect_handles(self) -> None:
        for version, handle in list(self._handles):
            if handle.done():
                self._report(version, handle)

    def _report(self, version: int, handle: Any) -> None:
        if (version, handle) in self._handles:
            self._handles.remove((version, handle))
            error = None if handle.error is None else str(handle.error)
            if handle.path.startswith(MEMORY_PATH):
                is_unknown = error is not None and PUBLISHED in error
                self.ledger.told_of_memory(version, self, UNKNOWN if is_unknown else error)
            else:
                self._tell(version, error)

    def _tell(self, version: int, error: str | None) -> None:
        """Tell the ledger how a save has ended."""
        self.ledger.reported(version, self, error)
