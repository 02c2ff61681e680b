"""Processes that save to a simulated object store: a scheduler, the store, and the library's modules between them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import remote
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.undo import Undo
from tests.simulated.modules import process_state, simulated
from tests.simulated.object_store import Conduct, Effect, Fate, ObjectStore
from tests.simulated.object_store_clients import install
from tests.simulated.processes import Processes
from tests.simulated.scheduler import Node, Scheduler
from tests.simulated.tasks import Process
from tests.simulated.threads import Threads

ELEMENTS = 1500
FAULTS: dict[Fate, float] = {"lost": 0.03, "refused": 0.03, "reset": 0.03, "cut": 0.02}
# A file of some chunks.
PART_BYTES = 2000
CONDUCTS: list[dict[str, Any]] = [
    {"shares": FAULTS},
    {"shares": FAULTS, "stale_lists": 30.0},
    {"shares": {**FAULTS, "hung": 0.02}},
    {"shares": {**FAULTS, "late": 0.02}},
]


def state(version: int) -> dict[str, ShardedWeight]:
    """Return two tensors whose every value tells the version."""
    values = np.arange(ELEMENTS, dtype=np.float32) + version * ELEMENTS
    shape = (ELEMENTS,)
    return {key: ShardedWeight(key, values.copy(), shape, shape, (0,)) for key in ("a", "b")}


class StoreWorld:
    """Hold one store, and what is known of those who save to it.

    Attributes:
        effects: Every change of the store as it took effect: when, what, and the version that its process was saving.
        done: Versions whose saves have reported success, in that order.
        failed: What saves have raised, by version.
        broken: Moments at which a manifest was in place without the files that it names.
    """

    def __init__(self, seed: int, conduct: Conduct) -> None:
        self.scheduler = Scheduler(seed)
        self.store = ObjectStore(self.scheduler, conduct)
        self.effects: list[tuple[float, Effect, int | None]] = []
        self.store.watchers.append(self._note)
        self._saving: dict[Process, int] = {}
        self.done: list[int] = []
        self.failed: dict[int, Exception] = {}
        self.broken: list[str] = []
        self._named: dict[str, set[str]] = {}

    def _note(self, effect: Effect) -> None:
        self.effects.append((self.scheduler.now, effect, self._saving.get(effect.process)))
        directory, _, name = effect.key.rpartition("/")
        if name.endswith(".manifest"):
            files = [] if effect.data is None else Manifest.decode(effect.data, effect.key).files
            self._named[effect.key] = {f"{directory}/{file}" for file in files}
        for manifest, named in self._named.items():
            if effect.key == manifest or effect.key in named:
                missing = sorted(named - self.store.objects.keys())
                if missing:
                    self.broken.append(f"at {self.scheduler.now:.3f} s {manifest} names {missing}, which are not there")

    def start(self, function: Callable[[], Any], name: str = "job", node: str = "") -> Process:
        """Begin a process; what it does not catch is printed."""
        process = Process(self.scheduler, Node(self.scheduler, node or f"host of {name}"), name)
        process.stderr = print
        process.start(function)
        return process

    def call(self, function: Callable[[], Any], until: float | None = None) -> Any:
        """Run the world until a new process has called a function; return what it returned."""
        process = self.start(function)
        main = process.main
        assert main is not None
        self.scheduler.run(until, steps=500_000)
        if main.error is not None:
            raise main.error
        assert main.ended, "it did not end"
        return main.result

    def save(self, url: str, version: int, unique_id: int | None = 0, **options: Any) -> None:
        """Save a version; in a simulated process."""
        storage = open_storage(url, part_bytes=PART_BYTES, requests_at_once=4, **options)
        self._saving[self.scheduler.process] = version
        try:
            save_state_dict(state(version), storage, SoloCommunicator(), unique_id=unique_id)
        except Exception as error:
            self.failed[version] = error
            raise
        self.done.append(version)

    def try_save(self, url: str, version: int, unique_id: int | None = 0, **options: Any) -> None:
        with contextlib.suppress(Exception):
            self.save(url, version, unique_id, **options)

    def load(self, url: str, unique_id: int | None = None) -> int:
        """Return the version that a checkpoint has, whole; in a simulated process."""
        found = state(-1)
        load_state_dict(found, open_storage(url, requests_at_once=4), SoloCommunicator(), unique_id=unique_id)
        version = int(found["a"].local_tensor[0]) // ELEMENTS
        for key, expected in state(version).items():
            assert (found[key].local_tensor == expected.local_tensor).all(), f"{key} is not of version {version}"
        return version

    def names(self, directory: str) -> list[str]:
        """Return what is really there."""
        return sorted(key[len(directory) + 1 :] for key in self.store.objects if key.startswith(f"{directory}/"))

    def requests(self, fate: str) -> int:
        """Return how many requests had a fate."""
        return sum(count for (_, what), count in self.store.counts.items() if what == fate)


def compete(world: StoreWorld, url: str, pause: float = 20.0, **options: Any) -> None:
    """Let three save one id again and again; of each, its process is killed or stopped at some time.

    Half of those that are stopped are stopped where it matters most: right before they commit or remove something.
    """
    dice, count = world.scheduler.random, iter(range(1, 1000))

    def main() -> None:
        for _ in range(4):
            world.scheduler.sleep(dice.expovariate(1 / pause))
            world.try_save(url, next(count), **options)

    def disturb(place: int) -> None:
        chance = dice.random()
        if chance < 0.5:
            running[place].kill()
            world.scheduler.after(dice.uniform(1, 60), lambda: running.__setitem__(place, begin(place)))
        elif chance < 0.75:
            stop(running[place])
        else:
            waited[running[place]] = dice.choice(("put", "put", "delete"))

    def stop(process: Process) -> None:
        process.stop()
        world.scheduler.after(dice.uniform(1, 60), process.resume)

    def stop_there(operation: str, key: str, process: Process) -> None:
        if waited.get(process) == operation and (operation == "delete" or key.endswith(".manifest")):
            del waited[process]
            stop(process)

    def begin(place: int) -> Process:
        return world.start(main, f"saver {place}", f"host {place}")

    waited: dict[Process, str] = {}
    world.store.listeners.append(stop_there)
    running = [begin(place) for place in range(3)]
    for place in range(3):
        world.scheduler.after(dice.uniform(0, 4 * pause), lambda place=place: disturb(place))
    world.scheduler.run(until=3000, steps=500_000)


@contextlib.contextmanager
def store_world(seed: int = 0, **conduct: Any) -> Iterator[StoreWorld]:
    """Make a world for as long as the context lasts."""
    world = StoreWorld(seed, Conduct(**conduct))
    threads, processes = Threads(world.scheduler), Processes(world.scheduler)
    modules = {"threading": threads.threading, "queue": threads.queue, "time": processes.time}
    modules["random"] = processes.random
    names = {**threads.names, **processes.names}
    undo = Undo()
    with simulated(world.scheduler, modules, names, threads.replacement, process_state(world.scheduler)):
        install(world.store, undo)
        try:
            yield world
        finally:
            undo.put_back()


def seeds_until_broken(seeds: int, seconds: float | None = None) -> tuple[int, str]:
    """Have savers compete; after how many seeds a manifest is in place without its files, and which: or none is."""
    begin, undo = time.monotonic(), Undo()
    undo.set(remote, "LEAST_PART_BYTES", PART_BYTES)
    try:
        for seed in itertools.count():
            if seed == seeds or (seconds is not None and time.monotonic() - begin > seconds):
                return seed, ""
            slow = bool(seed % 2)
            conduct = {**CONDUCTS[seed // 2 % len(CONDUCTS)], "latency": (0.01, 1.0 if slow else 0.08)}
            with store_world(seed, **conduct) as world:
                pause, lease = 20.0 if seed % 3 == 0 else 2.0, 6.0 if slow else (120.0 if seed % 3 else 30.0)
                compete(world, "s3://bucket/run", pause=pause, lease_seconds=lease)
                if world.broken:
                    return seed + 1, world.broken[0]
    finally:
        undo.put_back()
    raise AssertionError("seeds end")
