"""One recording of a scenario on one file system, and the states that a loss of power leaves of it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from random import Random

from paddle_flexckpt.native.directory import latest, list_checkpoints
from tests.crash.harness import Reader, Violation
from tests.crash.scenarios import find
from tests.filesystems import linux
from tests.filesystems.block_file import Entry
from tests.filesystems.device import FILE_SYSTEMS, ROOT, Device
from tests.filesystems.states import choose
from tests.ramdisk import memory_directory

LEFT_OUT = ("data", "directory", "manifest")
_PATIENCE_SECONDS = 120.0
# How often a second others sync, and how many of a hundred times all of the file system and not a file of their own. A
# save makes some ten fsyncs in a few hundredths of a second. Too much noise hides an fsync that the save left out.
_NOISE = ((0, 0), (50, 0), (400, 0), (50, 50), (400, 50))
# So many violations of one recording say what is wrong.
_ENOUGH = 5


@dataclass(frozen=True)
class Trial:
    """What is recorded, and how much of it is looked at.

    Attributes:
        system: Name of the file system.
        scenario: Name of the scenario.
        seed: Of the noise and of the states.
        limit: States at most.
        left_out: A kind of file whose fsyncs are left out.
    """

    system: str
    scenario: str
    seed: int
    limit: int
    left_out: str = ""

    @property
    def name(self) -> str:
        mistake = f", no fsync of {self.left_out}" if self.left_out else ""
        return f"{self.system}: {self.scenario}, seed {self.seed}{mistake}"


@dataclass
class Found:
    """What was looked at.

    Attributes:
        states: Disks that were mounted and read.
        prefixes: Those of them with nothing that was not flushed.
        writes, flushes: Of the recording.
        outcomes: How often a reader found what.
        violations: What was wrong, one text each.
        seconds: In all.
    """

    states: int = 0
    prefixes: int = 0
    writes: int = 0
    flushes: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


def carry_out(trial: Trial, keep: Path | None = None) -> Found:
    """Records, and looks at the states; the process has mounts of its own from now on.

    Args:
        trial: What is to be done.
        keep: A directory for the disk of the first violation.

    Raises:
        Unavailable: This machine cannot do it.
    """
    begin = time.perf_counter()
    system = next(each for each in FILE_SYSTEMS if each.name == trial.system)
    logging.getLogger("paddle_flexckpt").setLevel(logging.ERROR)
    with memory_directory() as scratch, Device(system, scratch) as device:
        with device.mounted() as folder:
            os.mkdir(os.path.join(folder, "disk"))
            reader = Reader(find(trial.scenario), os.path.join(folder, "disk"))
        log = _record(device, trial)
        found = _look(device, reader, trial, log, keep)
    found.seconds = time.perf_counter() - begin
    return found


def _record(device: Device, trial: Trial) -> list[Entry]:
    device.ask("start_log")
    steps = len(find(trial.scenario).steps)
    environment = dict(os.environ)
    if trial.left_out:
        path = [str(Path(__file__).parent / "left_out"), environment.get("PYTHONPATH", "")]
        environment.update(FLEXCKPT_LEFT_OUT=trial.left_out, PYTHONPATH=os.pathsep.join(filter(None, path)))
    ours, theirs = Pipe()
    module = [sys.executable, "-m", "tests.filesystems.driver"]
    with device.mounted() as folder, ours, contextlib.ExitStack() as stack:
        arguments = [os.path.join(folder, "disk"), trial.scenario, str(theirs.fileno())]
        with theirs:
            driver = subprocess.Popen(
                [*module, *arguments], cwd=ROOT, env=environment, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE
            )
        said: list[str] = []
        with contextlib.suppress(EOFError):
            while ours.poll(_PATIENCE_SECONDS):
                said.append(ours.recv())
                if len(said) == 1:
                    stack.enter_context(_noise(folder, trial.seed))
                else:
                    device.ask("mark", said[-1])
                ours.send("noted")
        _, words = driver.communicate(timeout=_PATIENCE_SECONDS)
        if driver.returncode or len(said) != 1 + steps:
            raise Violation(f"{trial.name}: without a loss of power, after {said}: {words.decode()}")
    return device.ask("stop_log")


@contextlib.contextmanager
def _noise(folder: str, seed: int) -> Iterator[None]:
    """Others use the disk as well: what they sync takes parts of a save to the disk that the save did not ask for."""
    hertz, percent = _NOISE[seed % len(_NOISE)]
    random, over = Random(seed), threading.Event()

    def make() -> None:
        descriptor = os.open(os.path.join(folder, "noise"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            while not over.wait(random.expovariate(hertz)):
                os.pwrite(descriptor, random.randbytes(100), 0)
                if random.randrange(100) < percent:
                    linux.sync_all_of(descriptor)
                else:
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)

    if not hertz:
        yield
        return
    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _look(device: Device, reader: Reader, trial: Trial, log: list[Entry], keep: Path | None) -> Found:
    kinds = Counter(entry.kind for entry in log)
    found = Found(writes=kinds["write"], flushes=kinds["flush"])
    for number, state in enumerate(choose(log, Random(trial.name), trial.limit)):
        device.ask("keep", state.durable)
        device.ask("apply", list(state.kept))
        done = sum(entry.kind == "mark" for entry in log[: state.cut])
        found.states += 1
        found.prefixes += not state.kept
        try:
            with device.mounted():
                outcome = check(reader, done, number)
        except (Violation, OSError) as error:
            outcome = "wrong"
            found.violations.append(f"{trial.name}: {error!r}\n{state.describe(log)}")
            if keep is not None:
                device.ask("rollback")
                device.ask("apply", list(state.kept))
                device.ask("dump", str(keep / f"{re.sub('[^a-z0-9=]+', '-', trial.name)}-{number}.img"))
        found.outcomes[outcome] = found.outcomes.get(outcome, 0) + 1
        device.ask("rollback")
        if len(found.violations) >= _ENOUGH:
            break
    return found


def check(reader: Reader, done: int, turn: int) -> str:
    """Reads all that is there, and saves again; returns what was there.

    Raises:
        Violation: It is neither old nor new, or the next save does not go well.
    """
    found = str(reader.check(done, turn, f"{done} steps reported done"))
    # Of a checkpoint of several directories none has all the files.
    for folder, _, _ in os.walk(reader.root) if reader.scenario.read_all is None else ():
        infos = list_checkpoints(folder)
        wrong = [info for info in infos if not info.complete]
        if wrong or (infos and latest(folder) != infos[-1]):
            raise Violation(f"{folder}: {latest(folder)} is the latest of {infos}")
    return found
