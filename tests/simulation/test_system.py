"""Simulated system calls: the same answers as the real system's, and what only a simulation can do."""

from __future__ import annotations

import ast
import builtins
import errno
import fcntl
import inspect
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.ramdisk import memory_directory
from tests.simulated.calls import LateError, ShortWrite
from tests.simulated.files import FileSystem
from tests.simulated.modules import library_modules
from tests.simulated.network import Network
from tests.simulated.scheduler import Node, Scheduler
from tests.simulated.sockets import Sockets
from tests.simulated.system import System
from tests.simulated.tasks import Killed, Process
from tests.simulated.threads import Namespace
from tests.simulated.trees import tree_of
from tests.simulation.call_programs import Player, program_of


class World:
    """Hold nodes with files."""

    def __init__(self, nodes: int = 1, seed: int = 0, on_call=None) -> None:
        self.scheduler = Scheduler(seed)
        self.system = System(self.scheduler, on_call or (lambda kind, where: 0.0))
        self.network = Network(self.scheduler)
        self.nodes = [self.network.add(Node(self.scheduler, f"node{number}")) for number in range(nodes)]
        self.disks = [self.system.add(node) for node in self.nodes]
        self.shared = FileSystem("shared", seed, is_shared=True)
        for node in self.nodes:
            self.system.mount(node, "/shared", self.shared)
        modules = self.system.modules
        self.os, self.fcntl, self.mmap, self.open = (modules[name] for name in ("os", "fcntl", "mmap", "open"))

    def start(self, function: Callable[[], Any], node: int = 0, name: str = "p") -> Process:
        process = Process(self.scheduler, self.nodes[node], name)
        process.start(function)
        return process

    def run(self, function: Callable[[], Any], node: int = 0) -> Any:
        """Return what a function returns, or raise what it raises, in a process of its own."""
        process = Process(self.scheduler, self.nodes[node], "p")
        task = process.start(function)
        self.scheduler.run()
        if task.error is not None:
            raise task.error
        return task.result


def outcomes(os_: Any, fcntl_: Any, open_: Any, root: str, program: list[tuple]) -> tuple[list, dict]:
    player = Player(os_, fcntl_, open_, root)
    return player.play(program), player.tree()


def compare(seeds: range, length: int) -> None:
    with memory_directory() as disk:
        for seed in seeds:
            program = program_of(Random(seed), length)
            root = os.path.join(os.path.realpath(disk), f"{seed}/root")
            os.makedirs(root)
            real = outcomes(os, fcntl, builtins.open, root, program)
            world = World(seed=seed)

            def play(world=world, root=root, program=program) -> tuple[list, dict]:
                world.os.makedirs(root)
                return outcomes(world.os, world.fcntl, world.open, root, program)

            found = world.run(play)
            for mine, theirs in zip(found[0], real[0]):
                assert mine == theirs, f"seed {seed}"
            assert found[1] == real[1], f"seed {seed}"


def test_random_programs_do_as_on_the_real_system():
    compare(range(150), 60)


@pytest.mark.slow
def test_many_random_programs_do_as_on_the_real_system():
    compare(range(100, 2100), 100)


def test_what_two_processes_map_of_a_memfd_is_one_memory():
    world, seen = World(nodes=1), []
    scheduler, os_, sockets = world.scheduler, world.os, Sockets(world.network).socket
    ours, theirs = [], []

    def sender() -> None:
        one, other = sockets.socketpair()
        theirs.append(scheduler.process.lookup(other.fileno()))
        descriptor = os_.memfd_create("segment", os_.MFD_CLOEXEC)
        os_.ftruncate(descriptor, 1 << 20)
        mapped = world.mmap.mmap(descriptor, 4096)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        memory[:3] = 1, 2, 3
        sockets.send_fds(one, [b"x"], [descriptor])
        os_.close(descriptor)
        one.recv(1)
        seen.append(memory[:4].tolist())
        ours.append(mapped)

    def receiver() -> None:
        scheduler.sleep(1.0)
        number = scheduler.process.install(theirs[0])
        connection = sockets.socket(fileno=number)
        _, descriptors, _, _ = sockets.recv_fds(connection, 1, 1)
        small = np.frombuffer(world.mmap.mmap(descriptors[0], 4096), dtype=np.uint8)
        # Grown after it was mapped: both maps stay maps of the same file.
        os_.ftruncate(descriptors[0], 8 << 20)
        large = np.frombuffer(world.mmap.mmap(descriptors[0], 8 << 20), dtype=np.uint8)
        seen.append(large[:4].tolist())
        large[3] = 4
        assert small[3] == 4
        connection.send(b"y")

    world.start(sender)
    world.start(receiver)
    world.scheduler.run()
    assert seen == [[1, 2, 3, 0], [1, 2, 3, 4]]
    mapped = ours[0]
    assert (len(mapped), mapped[1:3], mapped[0], bool(mapped)) == (4096, b"\2\3", 1, True)


def test_maps_of_files_are_read_only_and_keep_to_its_length():
    world = World()

    def work() -> None:
        with world.open("/f", "wb") as stream:
            stream.write(b"0123456789")
        descriptor = world.os.open("/f", os.O_RDONLY)
        mapped = world.mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        assert bytes(mapped[2:4]) == b"23" and np.frombuffer(mapped, np.uint8, 3, 1).tobytes() == b"123"
        assert not np.frombuffer(mapped, np.uint8).flags.writeable
        mapped.madvise(mmap.MADV_DONTNEED)
        writer = world.os.open("/f", os.O_WRONLY)
        world.os.pwrite(writer, b"AB", 1)
        assert mapped[0:4] == b"0AB3" and world.os.pread(descriptor, 3, 0) == b"0AB"
        for length, prot, error in ((11, mmap.PROT_READ, ValueError), (5, mmap.PROT_WRITE, PermissionError)):
            with pytest.raises(error):
                world.mmap.mmap(descriptor, length, prot=prot)
        world.os.truncate("/f", 0)
        with pytest.raises(ValueError, match="empty"):
            world.mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    world.run(work)


def test_a_lock_belongs_to_the_open_file_and_goes_with_its_last_descriptor():
    world, told = World(), []
    scheduler, os_, lock = world.scheduler, world.os, world.fcntl.flock

    def holder() -> None:
        descriptor = os_.open("/tmp", os.O_RDONLY)
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it has that already
        second = os_.open("/tmp", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            lock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
        heir.install(scheduler.process.lookup(descriptor))
        scheduler.sleep(5)
        scheduler.process.kill()
        scheduler.sleep(0)

    def wait(seconds: float) -> None:
        scheduler.sleep(seconds)
        descriptor = os_.open("/tmp", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        lock(descriptor, fcntl.LOCK_SH)
        told.append(scheduler.now)
        scheduler.sleep(100)

    heir = Process(scheduler, world.nodes[0], "heir")
    heir.start(lambda: scheduler.sleep(10))
    world.start(holder)
    world.start(lambda: wait(1))
    world.start(lambda: wait(2))
    scheduler.run()
    assert len(told) == 2, "both share it"
    assert all(10 <= at < 11 for at in told), "when the last process that has the description has ended"


def test_file_systems_without_locks_and_with_those_of_nfs():
    world = World()

    def work() -> None:
        directory, file = world.os.open("/shared", os.O_RDONLY), world.os.open("/shared/f", os.O_RDWR | os.O_CREAT)
        world.shared.locks = "none"
        with pytest.raises(OSError) as caught:
            world.fcntl.flock(file, fcntl.LOCK_SH)
        assert caught.value.errno == errno.ENOLCK
        world.shared.locks = "nfs"
        world.fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError) as caught:
            world.fcntl.flock(directory, fcntl.LOCK_EX)
        assert caught.value.errno == errno.EBADF

    world.run(work)


def test_nodes_share_what_is_mounted_on_them_and_nothing_else():
    world = World(nodes=2)

    def write() -> int:
        for path in ("/shared/f", "/f"):
            with world.open(path, "w") as stream:
                stream.write("0")
        with pytest.raises(OSError) as caught:
            world.os.rename("/f", "/shared/g")
        assert caught.value.errno == errno.EXDEV
        with pytest.raises(OSError) as caught:
            world.os.rmdir("/shared")
        assert caught.value.errno == errno.EBUSY
        assert sorted(world.os.listdir("/")) == ["f", "proc", "shared", "tmp"]
        assert world.os.path.realpath("/shared/../shared/./f") == "/shared/f"
        return world.os.stat("/shared").st_dev

    def read() -> int:
        assert world.os.listdir("/shared") == ["f"] and not world.os.path.exists("/f")
        return world.os.stat("/shared").st_dev

    assert world.run(write, 0) == world.run(read, 1)
    boots = [world.run(lambda: world.open("/proc/sys/kernel/random/boot_id").read(), node) for node in range(2)]
    assert boots[0] != boots[1]
    world.system.set_memory(world.nodes[0], 4096 << 10)
    assert "MemAvailable:   4096 kB" in world.run(lambda: world.open("/proc/meminfo").read())


def test_an_open_file_that_another_node_removes():
    world = World(nodes=2)
    world.shared.keeps_open = False
    os_ = world.os

    def use() -> None:
        opened = [os_.open(f"/shared/{name}", os.O_RDWR | os.O_CREAT) for name in "ab"]
        own = os_.open("/shared/own", os.O_RDWR | os.O_CREAT)
        os_.unlink("/shared/own")
        os_.write(own, b"own")
        world.scheduler.sleep(10)
        for descriptor in opened:
            for call in (os_.fstat, os_.fsync, lambda fd: os_.pread(fd, 1, 0), lambda fd: os_.write(fd, b"1")):
                with pytest.raises(OSError, match="Stale"):
                    call(descriptor)
            os_.close(descriptor)
        assert os_.pread(own, 9, 0) == b"own"

    def remove() -> None:
        world.scheduler.sleep(5)
        os_.unlink("/shared/a")
        with world.open("/shared/c", "w"):
            os_.rename("/shared/c", "/shared/b")

    world.start(remove, 1)
    world.run(use)


def test_numbers_of_inodes_come_again_but_no_two_have_the_same():
    world = World()
    files, random = world.disks[0], Random(4)
    files.reuses_numbers = True

    def work() -> int:
        for name in "abcd":
            world.os.mkdir(f"/{name}")
        descriptor = world.os.open("/", os.O_RDONLY)
        world.os.fsync(descriptor)
        first = world.os.stat("/a").st_ino
        world.os.rmdir("/a")
        world.os.mkdir("/e")
        return first - world.os.stat("/e").st_ino

    assert world.run(work) == 0
    found = set()
    for _ in range(20):
        files.lose_power(random)
        names = [each for each in tree_of(files) if len(each) == 1]
        found.add("".join(names))
        assert len({files.root.entries[name].number for name in names}) == len(names)
        if not {"a", "e"} & set(names):
            break
    assert found <= {"abcde", "abcd", "bcde", "bcd"}


def test_what_strikes_at_a_call():
    strikes: dict[str, BaseException | float] = {}

    def on_call(kind: str, where: str) -> float:
        found = strikes.pop(kind, 0.0)
        if isinstance(found, BaseException):
            raise found
        return found

    world = World(on_call=on_call)
    os_ = world.os

    def work() -> None:
        descriptor = os_.open("/shared/f", os.O_RDWR | os.O_CREAT)
        strikes["write"] = OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(OSError, match="Input/output") as caught:
            os_.write(descriptor, b"12345")
        assert caught.value.filename is None and world.os.fstat(descriptor).st_size == 0
        strikes["write"] = ShortWrite(2)
        assert os_.write(descriptor, b"12345") == 2
        strikes["fsync"] = OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            os_.fsync(descriptor)
        os_.fsync(descriptor)
        assert tree_of(world.shared, durable=True)["f"] == b"", "the error is told once, and the bytes are lost"
        strikes["rename"] = LateError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(OSError, match="Input/output") as caught:
            os_.rename("/shared/f", "/shared/g")
        assert (caught.value.filename, caught.value.filename2) == ("/shared/f", "/shared/g")
        assert os_.listdir("/shared") == ["g"], "it took place all the same"
        before, strikes["stat"] = world.scheduler.now, 7.0
        os_.stat("/shared/g")
        assert 7.0 < world.scheduler.now - before < 7.1
        strikes["close"] = OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            os_.close(descriptor)
        with pytest.raises(OSError, match="Bad file"):
            os_.close(descriptor)

    world.run(work)


def test_a_process_that_is_killed_may_have_written_a_part():
    sizes = set()
    for seed in range(60):
        world = World(seed=seed)

        def work(world=world) -> None:
            world.scheduler.sleep(1e-3)
            descriptor = world.os.open("/f", os.O_WRONLY | os.O_CREAT)
            world.os.write(descriptor, b"x" * 100_000)
            world.os.close(descriptor)

        process = world.start(work)
        at = 1e-3 + Random(seed).uniform(1e-5, 1e-4)
        world.scheduler.after(at, process.kill)
        world.scheduler.run()
        tree = tree_of(world.disks[0])
        if "f" in tree:
            sizes.add(len(tree["f"]))
    assert {0, 100_000} < sizes and len(sizes) > 2, "nothing, all, or any part"


def test_a_disk_that_gets_full_takes_what_it_has_room_for():
    counts = set()
    for seed in range(20):
        world = World(seed=seed)
        world.disks[0].capacity = 50_000

        def work(world=world) -> None:
            descriptor = world.os.open("/f", os.O_WRONLY | os.O_CREAT)
            first = world.os.write(descriptor, b"x" * 100_000)
            counts.add(first)
            while first < 50_000:
                first += world.os.write(descriptor, b"x" * 100_000)
            with pytest.raises(OSError, match="No space left"):
                world.os.write(descriptor, b"x")

        world.run(work)
        assert world.disks[0].used == 50_000
    assert counts == {50_000}


def test_a_dead_process_makes_no_call():
    world, seen = World(), []

    def work() -> None:
        descriptor = world.os.open("/f", os.O_WRONLY | os.O_CREAT)
        try:
            world.scheduler.process.kill()
            world.os.write(descriptor, b"late")
        finally:
            for call in (lambda: world.os.unlink("/f"), lambda: world.os.close(descriptor), lambda: world.os.stat("/")):
                with pytest.raises((Killed, OSError)) as caught:
                    call()
                seen.append(caught.type)

    world.start(work)
    world.scheduler.run()
    assert tree_of(world.disks[0])["f"] == b"" and Killed in seen and len(seen) == 3


def test_process_values():
    world = World()

    def work() -> None:
        os_ = world.os
        os_.environ["A"] = "1"
        assert {**os_.environ} == {"A": "1"} and os_.environ.get("B") is None
        assert os_.getpid() == world.scheduler.process.pid and os_.getppid() == 1
        assert len(os_.urandom(16)) == 16 and os_.urandom(0) == b""
        assert os_.nice(5) == 5 == os_.getpriority(os.PRIO_PROCESS, 0)
        assert os_.O_CLOEXEC == os.O_CLOEXEC and world.mmap.PAGESIZE == mmap.PAGESIZE
        os_.kill(os_.getpid(), 0)
        with pytest.raises(ProcessLookupError):
            os_.kill(99, 0)
        path = world.system.names[Path]("/tmp/x")
        path.write_text("text")
        assert path.read_text(encoding="utf-8") == "text" and path.name == "x" and path.exists()
        os_._exit(7)

    process = world.start(work)
    world.scheduler.run()
    assert process.status == 7
    assert world.start(lambda: None).environ == {}


# Functions that open files by themselves, past what is replaced.
PAST = frozenset(
    "memmap fromfile tofile loadtxt savetxt genfromtxt savez savez_compressed load_file save_file safe_open FileIO "
    "TemporaryDirectory NamedTemporaryFile".split()
)


def unknown_names(tree: ast.AST, provided: dict[str, Any]) -> list[str]:
    """Return names of replaced modules that the simulation has not got, and functions that would go past it."""
    found = []
    imported = {"open": "open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module in provided:
            found += [f"line {node.lineno}: from {node.module} import {alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "pathlib":
            found += [f"line {node.lineno}: pathlib.{each.name}" for each in node.names if each.name != "Path"]
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        where, (module, *names) = f"line {node.lineno}: {node.attr}", chain(node)
        if imported.get(module) in provided and not has(provided[imported[module]], names):
            found.append(f"{where} of {module}")
        if node.attr in PAST and (node.attr != "memmap" or id(node) in called):  # which is a type too
            found.append(f"{where} opens files by itself")
        made = node.value
        if isinstance(made, ast.Call) and chain(made.func) == ["Path"] and not hasattr(provided["Path"], node.attr):
            found.append(f"{where} of Path")
    return found


def chain(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; of what is no such thing one that nothing has."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def has(value: Any, names: list[str]) -> bool:
    """Tell whether a stand-in has a name, and that the next; of what is no stand-in any name is fine."""
    for name in names:
        if not isinstance(value, Namespace):
            return True
        if name not in vars(value):
            return False
        value = vars(value)[name]
    return True


def test_the_simulation_has_every_name_that_the_library_uses():
    system = World().system
    provided = {**system.modules, "Path": system.names[Path]}
    assert unknown_names(ast.parse("import os\nos.O_RDONLY, os.path.join, os.environ.get"), provided) == []
    sample = "import os\nimport numpy as np\nos.sendfile, os.path.ismount, np.fromfile, Path(x).glob('*')"
    assert len(unknown_names(ast.parse(sample), provided)) == 4
    missing = {
        module.__name__: found
        for module in library_modules()
        if (found := unknown_names(ast.parse(inspect.getsource(module)), provided))
    }
    assert missing == {}


# Rooms whose modules use files and do not run in the simulation.
NOT_SIMULATED = {
    "aoa": "reads the user's file of statements, if the call names one",
    "forks": "closes what a fork has of its parent; simulated processes have none",
    "cli": "commands, by which a person looks at checkpoints; they call functions of the rooms that are simulated",
    "pages": "writes pictures of reports, for people",
    "patching": "changes installed packages",
    "rollout": "works with engines, whose processes are others'; tests/rollout has faults at each of their calls",
    "testing": "the worlds of tests themselves",
    "trainer": "other programs' trainers, which bring Paddle and processes of their own",
}


def test_what_uses_files_is_simulated_or_has_a_reason():
    package = Path(inspect.getfile(library_modules()[0])).parent
    simulated = {Path(inspect.getfile(module)) for module in library_modules()}
    uses = re.compile(r"^import (os|fcntl|mmap|shutil|io)$|^from (os|pathlib|tempfile|shutil)\b|\bopen\(", re.MULTILINE)
    rooms = {
        path.relative_to(package).parts[0].removesuffix(".py")
        for path in package.rglob("*.py")
        if path not in simulated and uses.search(path.read_text(encoding="utf-8"))
    }
    assert rooms - NOT_SIMULATED.keys() == set()
