"""A simulated world for one scenario: its scheduler, nodes, network and storage, and the library's modules in it.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.undo import Undo
from tests.simulated import modules
from tests.simulated.files import FileSystem
from tests.simulated.habits import sizes_for, storage_options
from tests.simulated.inodes import Directory, File, Inode
from tests.simulated.memory import MOUNT as MEMORY
from tests.simulated.memory import mount_of
from tests.simulated.network import Network
from tests.simulated.object_store import Effect, ObjectStore, Stored
from tests.simulated.object_store_clients import install
from tests.simulated.processes import Processes
from tests.simulated.scenario import Fault, Scenario
from tests.simulated.scheduler import EPOCH, Node, Scheduler
from tests.simulated.sockets import Sockets
from tests.simulated.system import System
from tests.simulated.threads import Threads
from tests.simulated.trees import fill

# Where all jobs save: a directory of the shared file system, or of a bucket.
ROOT = "/shared/run"
_MOUNT = "/shared"
# A root's lease, in seconds: steps take hours, and each renewal some calls.
_LEASE_OF_A_RUN = 900.0
# What changes of a file system do to a file that was there.
_HOW = {
    "rename": "replaced",
    "leave": "renamed",
    "unlink": "removed",
    "write": "written",
    "truncate": "cut",
    "lose": "damaged by an fsync that failed",
}
OnCall = Callable[[str, str], float]
Appeared = Callable[[str, Any], None]
Changed = Callable[[str, Any, str], None]


class World:
    """Hold everything that processes of a scenario have around them.

    Attributes:
        disks: The shared file system, if the jobs save to one. On a single node it is that node's own disk.
        store: The object store, if they save to that.
    """

    def __init__(self, scenario: Scenario, on_call: OnCall) -> None:
        self.scenario = scenario
        self.scheduler = scheduler = Scheduler(scenario.seed)
        self.network, self.system = Network(scheduler), System(scheduler, on_call)
        self.nodes = [self.network.add(Node(scheduler, f"node{number}")) for number in range(scenario.nodes)]
        self.disks: list[FileSystem] = []
        self.store: ObjectStore | None = None
        # By the first part of a path, which says the node where each has a disk of its own.
        self._mounts: dict[str, FileSystem] = {}
        self._threads, self._sockets, self._processes = Threads(scheduler), Sockets(self.network), Processes(scheduler)
        for node in self.nodes:
            self.system.add(node)
        if scenario.storage == "object":
            self.store = self._make_store(on_call)
        elif scenario.storage == "per_node":
            for node in self.nodes:
                self._make_disk(node.name, [node], "flock")
        else:
            self._make_disk(_MOUNT[1:], self.nodes, "none" if scenario.storage == "leased" else "flock")
        for node in self.nodes if "memory" in scenario.habits else ():
            self._make_memory(node)
        self._hear_network(on_call)

    def _make_disk(self, name: str, nodes: list[Node], locks: str) -> None:
        disk = FileSystem(name, self.scheduler.random.getrandbits(32), is_shared=len(nodes) > 1, locks=locks)
        disk.clock = lambda: int((EPOCH + self.scheduler.now) * 1e9)
        for node in nodes:
            self.system.mount(node, _MOUNT, disk)
        self.disks.append(disk)
        self._mounts[name] = disk

    def _make_memory(self, node: Node) -> None:
        memory = FileSystem(f"{node.name}'s memory", self.scheduler.random.getrandbits(32), is_tracked=False)
        self.system.mount(node, MEMORY, memory)
        self._mounts[mount_of(node.name)] = memory

    @property
    def node_directories(self) -> tuple[str, ...]:
        """Return the root on each node, where each has a disk of its own: as it is called past all processes."""
        return tuple(f"/{name}{ROOT[len(_MOUNT) :]}" for name in self._mounts if f"/{name}" != _MOUNT)

    def _make_store(self, on_call: OnCall) -> ObjectStore:
        store, scheduler = ObjectStore(self.scheduler), self.scheduler
        self._conduct, request = store.conduct, store.request

        def called(operation: str, key: str, *args: Any, **keywords: Any) -> Any:
            more = on_call(operation, f"/{key}")
            scheduler.sleep(more)
            return request(operation, key, *args, **keywords)

        store.request = called  # type: ignore[method-assign]
        return store

    def _hear_network(self, on_call: OnCall) -> None:
        network, scheduler = self.network, self.scheduler
        deliver = network.deliver

        def called(source: Any, target: Any, arrive: Callable[[], None]) -> None:
            if scheduler.running is not None and scheduler.running.process.alive:
                on_call("send", target.node.name)
            deliver(source, target, arrive)

        network.deliver = called  # type: ignore[method-assign]

    def replace_disk(self, node: Node) -> str:
        """Give a node without power an empty disk in place of its own; return its root there."""
        self._mounts[node.name].lose_all()
        return f"/{node.name}{ROOT[len(_MOUNT) :]}"

    def location(self) -> Any:
        """Return what a job gives as its root; called by its processes."""
        habits = self.scenario.habits
        scheme = "" if self.store is None else "gs:/" if "gs" in habits else "s3:/"
        options = storage_options(habits) if scheme else {}
        return open_storage(f"{scheme}{ROOT}", lease_seconds=self.scenario.lease_seconds, **options)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the library's modules in this world."""
        processes, threads, sockets = self._processes, self._threads, self._sockets
        replaced = {
            **self.system.modules,
            "time": processes.time,
            "threading": threads.threading,
            "queue": threads.queue,
            "socket": sockets.socket,
            "selectors": sockets.selectors,
            "signal": processes.signal,
            "subprocess": processes.subprocess,
            "atexit": processes.atexit,
            "secrets": processes.secrets,
            "random": processes.random,
        }
        names = {**threads.names, **processes.names, **self.system.names}
        undo = Undo()
        try:
            if self.store is not None:
                install(self.store, undo)
            state = {**modules.process_state(self.scheduler), **sizes_for(self.scenario.habits)}
            if self.scenario.storage in ("leased", "object"):
                state["media.lease", "TIMES_OF_A_RUN"] = _LEASE_OF_A_RUN / self.scenario.lease_seconds
            with modules.simulated(self.scheduler, replaced, names, threads.replacement, state):
                yield
        finally:
            undo.put_back()

    def end(self) -> None:
        """End all processes, so that no frame of theirs is left."""
        for process in self.scheduler.processes:
            process.kill()
        self.scheduler.run(until=self.scheduler.now)

    def trouble_store(self, fault: Fault) -> None:
        """Have the object store misbehave for a while."""
        store = self.store
        if store is None:
            return
        share = fault.amount
        changes: dict[str, Any] = {
            "store_errors": {"shares": {"refused": 0.7 * share, "reset": 0.2 * share, "cut": 0.1 * share}},
            "store_lost_answers": {"shares": {"lost": share / 2, "late": share / 4, "hung": share / 4}},
            "store_stale": {"stale_lists": 20.0},
            "store_slow": {"latency": (share / 2, share)},
        }
        store.behave(**changes[fault.kind])
        self.scheduler.after(fault.seconds, self.calm_store)

    def calm_store(self) -> None:
        """Have the object store behave."""
        if self.store is not None:
            self.store.conduct = self._conduct

    def lose_node(self, node: Node) -> None:
        """Take power from a node: what it has not made durable goes, and what it has sent."""
        self.network.forget(node)
        for disk in self.disks:
            if disk.is_shared:
                disk.lose_client(node, self.scheduler.random)
            elif disk is self._mounts.get(node.name, disk):
                disk.lose_power(self.scheduler.random)
        if mount_of(node.name) in self._mounts:
            self._mounts[mount_of(node.name)].lose_all()

    # Storage, past all processes.

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a file; None if there is none."""
        if self.store is not None and not self._is_mounted(path):
            stored = self.store.objects.get(path.lstrip("/"))
            return None if stored is None else stored.data
        found = self._find(path)
        return found.content.read(0, found.size) if isinstance(found, File) else None

    def names(self, directory: str) -> list[str]:
        """Return the names of the files in a directory, without those below."""
        if self.store is not None and not self._is_mounted(directory):
            return [name for name in self._below(directory) if "/" not in name]
        found = self._find(directory)
        if not isinstance(found, Directory):
            return []
        return sorted(name for name, inode in found.entries.items() if not isinstance(inode, Directory))

    def directories(self) -> list[str]:
        """Return the directories in the root that have something."""
        if self.store is not None:
            return sorted({f"{ROOT}/{name.partition('/')[0]}" for name in self._below(ROOT) if "/" in name})
        return [f"{ROOT}/{name}" for name in self.below(ROOT)]

    def below(self, directory: str) -> list[str]:
        """Return the names of the directories in a directory of a file system."""
        found = self._find(directory)
        if not isinstance(found, Directory):
            return []
        return sorted(name for name, inode in found.entries.items() if isinstance(inode, Directory))

    def tree(self, directory: str) -> dict[str, bytes]:
        """Return the files of a directory, by name."""
        return {name: self.read(f"{directory}/{name}") or b"" for name in self.names(directory)}

    def put_tree(self, directory: str, tree: dict[str, bytes]) -> None:
        """Make a directory with files, durably."""
        if self.store is not None:
            for name, data in tree.items():
                self.store.objects[f"{directory}/{name}".lstrip("/")] = Stored.of(data)
        else:
            below = directory[len(_MOUNT) :]
            fill(self.disks[0], {below: None, **{f"{below}/{name}": data for name, data in tree.items()}})

    def remove_tree(self, directory: str) -> None:
        """Remove a directory and its files."""
        names = self.names(directory)
        if self.store is not None:
            for name in names:
                self.store.objects.pop(f"{directory}/{name}".lstrip("/"), None)
            return
        disk, found = self.disks[0], self._find(directory)
        above = self._find(directory.rpartition("/")[0])
        if found is None or above is None:
            return
        for name in names:
            disk.unlink(found, name)
        if isinstance(found, Directory) and not found.entries:
            disk.remove_directory(above, directory.rpartition("/")[2])

    def remove_file(self, directory: str, name: str) -> None:
        """Remove one file."""
        if self.store is not None:
            self.store.objects.pop(f"{directory}/{name}".lstrip("/"), None)
            return
        found = self._find(directory)
        if isinstance(found, Directory) and name in found.entries:
            self._mounts[directory.split("/")[1]].unlink(found, name)

    def _is_mounted(self, path: str) -> bool:
        return path.strip("/").partition("/")[0] in self._mounts

    def _below(self, directory: str) -> list[str]:
        prefix = directory.strip("/") + "/"
        return [
            key[len(prefix) :] for key in sorted(self.store.objects if self.store else ()) if key.startswith(prefix)
        ]

    def _find(self, path: str) -> Inode | None:
        first, *below = path.strip("/").split("/")
        found: Inode | None = self._mounts[first].root if first in self._mounts else None
        for name in below:
            if not isinstance(found, Directory):
                return None
            found = found.entries.get(name)
        return found

    def on_change(self, appeared: Appeared, changed: Changed) -> None:
        """Have functions called when a file appears, whole, and when one changes."""
        if self.store is not None:
            self.store.watchers.append(lambda effect: self._object_changed(effect, appeared, changed))

        def watch(name: str, what: str, path: str, inode: Inode) -> None:
            if what in _HOW:
                running = self.scheduler.running
                process, path = None if running is None else running.process, f"/{name}{path}"
                if what != "rename" or not path.endswith(".manifest"):
                    changed(path, process, _HOW[what])
                if what == "rename":
                    appeared(path, process)

        for name, disk in self._mounts.items():
            disk.on_change(partial(watch, name))

    @staticmethod
    def _object_changed(effect: Effect, appeared: Appeared, changed: Changed) -> None:
        path = f"/{effect.key}"
        if effect.kind == "delete":
            changed(path, effect.process, "removed")
        else:
            if not path.endswith(".manifest"):
                changed(path, effect.process, "replaced")
            appeared(path, effect.process)
