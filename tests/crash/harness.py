"""Takes a scenario to a point, looks at what is there, and saves again."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.ranks.communicator import Communicator
from tests.crash.file_system import Call, Fault, FileSystem
from tests.crash.job import Interrupted, Job, Stopped
from tests.crash.scenario import Scenario, State, paddle_reads, read_version, run

# Contents of a file, or None for a directory, by path below the root.
Tree = dict[str, "bytes | None"]
AGAIN = 1000


class Violation(AssertionError):
    """Signal that a reader found what it must not, or that a later save did not go well."""


class Broken(Exception):
    """Signal that library or test cannot do what they mean to: no violation, as it says nothing about crashes."""


# What a mistake in a program raises; the library passes it on to other ranks as text.
_MISTAKES = re.compile(r"\b(AssertionError|AttributeError|ImportError|NameError|NotImplementedError|TypeError): ")


def check_meant(error: BaseException | None) -> None:
    """Make sure that an error is one that saves and loads are meant to raise.

    Raises:
        Broken: It is not.
    """
    meant = (CheckpointError, OSError, Stopped, Interrupted)
    if error is not None and (not isinstance(error, meant) or _MISTAKES.search(str(error))):
        raise Broken(f"not an error of a save or a load: {error!r}") from error


def read_tree(root: str) -> Tree:
    """Return all that is beneath a directory."""
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        for name in folders:
            tree[os.path.normpath(os.path.join(below, name))] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as stream:
                tree[os.path.normpath(os.path.join(below, name))] = stream.read()
    return tree


def write_tree(root: str, tree: Tree) -> None:
    """Make a directory hold just that."""
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for path, content in sorted(tree.items()):
        if content is None:
            os.makedirs(os.path.join(root, path), exist_ok=True)
        else:
            with open(os.path.join(root, path), "wb") as stream:
                stream.write(content)


@dataclass(frozen=True)
class Run:
    """Hold what became of a scenario's steps.

    Attributes:
        outcomes: What each rank returned or raised.
        calls: All calls that were made.
        returns: For each acknowledged step, the number of calls until then.
        struck: The call that met the fault.
        failed: Calls that failed by the fault.
        open_files: What living ranks left open.
        warnings: What the library logged as warnings.
    """

    outcomes: list[Any]
    calls: list[Call]
    returns: list[int]
    struck: Call | None
    failed: list[Call]
    open_files: list[str]
    warnings: list[str]

    @property
    def errors(self) -> list[BaseException | None]:
        """Return what each rank raised."""
        return [outcome if isinstance(outcome, BaseException) else None for outcome in self.outcomes]


class Reader:
    """Look at a scenario's disk, and save again.

    Attributes:
        scenario: What is done.
        root: The disk.
        paddle_before: What Paddle's own loader reads of the disk before.
        orphans: Files that no marker and no manifest speaks of: a repair may need them, so saves leave them alone.
    """

    def __init__(self, scenario: Scenario, root: str) -> None:
        """Args: scenario: what is done. root: an empty directory, which becomes the disk before."""
        self.scenario = scenario
        self.root = os.path.realpath(root)
        scenario.prepare(self.root)
        self.paddle_before = self.paddle_reads()
        has_marker = any(name.endswith(".saving") for name in read_tree(self.root))
        self.orphans = set() if has_marker else self.unused()

    def observe(self) -> dict[str, int]:
        """Return every checkpoint that a reader finds.

        Raises:
            Violation: One is not whole.
        """
        found = {}
        if self.scenario.read_all is not None:
            try:
                return self.scenario.read_all(self.root)
            except (AssertionError, Exception) as error:
                raise Violation(f"a checkpoint is not whole: {error!r}: {sorted(read_tree(self.root))}") from error
        for folder, _, _ in os.walk(self.root):
            directory = CheckpointDirectory(folder)
            for unique_id in directory.list_ids():
                name = os.path.normpath(f"{os.path.relpath(folder, self.root)}/{unique_id}")
                found[name] = self._read(folder, unique_id)
            if directory.list_ids() and directory.read_manifest().unique_id != directory.list_ids()[-1]:
                raise Violation(f"the id that is read without being given is not the highest of {found}")
        return found

    def _read(self, folder: str, unique_id: int) -> int:
        try:
            return read_version(folder, unique_id, self.scenario.large)
        except (AssertionError, Exception) as error:
            if not isinstance(error, AssertionError):
                check_meant(error)
            raise Violation(f"{folder} id {unique_id} is not whole: {error!r}: {sorted(read_tree(folder))}") from error

    def paddle_reads(self) -> dict[str, int]:
        """Return what Paddle's own loader reads, by directory, where it does not fail.

        Raises:
            Violation: It reads what nobody has saved.
        """
        found = {}
        for folder, _, _ in os.walk(self.root):
            try:
                version = paddle_reads(folder, self.scenario.large)
            except AssertionError as error:
                raise Violation(str(error)) from error
            if version is not None:
                found[os.path.relpath(folder, self.root)] = version
        return found

    def check(self, done: int, turn: int, where: str) -> dict[str, int]:
        """Look at the disk as it is, then save again.

        Args:
            done: Steps that have been acknowledged.
            turn: Which kind of save follows.
            where: For errors.

        Returns:
            What was there.

        Raises:
            Violation: Something is not as it must be.
        """
        try:
            found = self.observe()
            allowed = self.scenario.allowed(done)
            if found not in allowed:
                raise Violation(f"a reader finds {found}; allowed are {allowed}")
            # Other ranks may learn of the commit before Paddle's loader does, and its file is brought up to date later.
            earlier = [*allowed, *self.scenario.allowed(max(done - 1, 0))]
            either = {(os.path.dirname(name), version) for state in earlier for name, version in state.items()}
            wrong = self.paddle_reads().items() - either - self.paddle_before.items()
            if wrong:
                raise Violation(f"Paddle's own loader reads {sorted(wrong)}; allowed are {allowed}")
            self._save_again(found, turn)
        except Violation as error:
            raise Violation(f"{self.scenario.name}, {where}: {error}") from error
        return found

    def _save_again(self, found: State, turn: int) -> None:
        again = self.scenario.again[turn % len(self.scenario.again)]
        before = sorted(read_tree(self.root))

        def save(comm: Communicator) -> str:
            return again(self.root, comm, AGAIN)

        try:
            names = run(self.scenario.ranks, save)
        except Exception as error:
            check_meant(error)
            raise Violation(f"the next save: {error!r}, among {before}") from error
        expected = {**found, names[0]: AGAIN}
        now = self.observe()
        if now != expected:
            raise Violation(f"after the next save there is {now}; expected {expected}")
        folder = os.path.dirname(names[0])
        shared = self.scenario.read_all is None
        alone = shared and not self.scenario.large and [os.path.dirname(name) for name in now].count(folder) == 1
        if self.paddle_reads().get(folder) != (AGAIN if alone else None):
            raise Violation(f"after the next save Paddle's own loader reads {self.paddle_reads()}, of {now}")
        self._check_tidy(before)

    def _check_tidy(self, before: list[str]) -> None:
        """Check that what no manifest names has gone with the next save."""
        left = self.unused() - self.orphans
        if left:
            raise Violation(f"the next save left {sorted(left)} there, of {before}")

    def unused(self) -> set[str]:
        """Return the paths of files that no manifest names, besides the manifests, and of empty directories."""
        found = set()
        for folder, folders, names in os.walk(self.root):
            directory = CheckpointDirectory(folder)
            used = set()
            for unique_id in directory.list_ids():
                used |= {f"{unique_id}.manifest", *directory.read_manifest(unique_id).files}
            if used:
                used.add(PADDLE_METADATA)
            below = os.path.relpath(folder, self.root)
            left = set(names) - used if names or folders else {"."}
            found |= {os.path.normpath(os.path.join(below, name)) for name in left}
        return found


class Bench(Reader):
    """Hold one scenario on one disk, taken to many points.

    Attributes:
        before: What is on the disk before.
    """

    def __init__(self, scenario: Scenario, root: str) -> None:
        """Args: scenario: what is done. root: a directory for it, which is emptied."""
        write_tree(os.path.realpath(root), {})
        super().__init__(scenario, root)
        self.before = read_tree(self.root)

    def act(self, fault: Fault | None = None, seed: int | None = None, salt: int = 0) -> Run:
        """Do the scenario's steps, from its disk before."""
        write_tree(self.root, self.before)
        job = Job(self.scenario.ranks, seed)
        with FileSystem(self.root, job, fault, salt) as files, _warnings() as warnings:
            outcomes = job.run(lambda comm: self.scenario.act(files.acknowledge, self.root, comm))
        for outcome in outcomes:
            check_meant(outcome if isinstance(outcome, BaseException) else None)
        return Run(outcomes, files.calls, files.returns, files.struck, files.failed, files.open_files(), warnings)

    def record(self, seed: int | None = None) -> Run:
        """Do the steps without a fault.

        Raises:
            Violation: They do not do what the scenario says.
        """
        done = self.act(seed=seed)
        if any(done.errors):
            raise Violation(f"{self.scenario.name}: without a fault: {done.errors}")
        self.check(len(self.scenario.steps), 0, "without a fault")
        return done


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield the texts of the library's warnings, which are not shown."""
    texts: list[str] = []
    logger = logging.getLogger("paddle_flexckpt")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield texts
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def after_dead(base: Scenario, at: int, root: str) -> Scenario:
    """Return a scenario of one step, after an earlier attempt at it died before call ``at``.

    Raises:
        Violation: The second attempt does not go well.
    """
    bench = Bench(base, root)
    died = bench.act(Fault(at, "job"), salt=1)
    tree, found = read_tree(bench.root), bench.observe()
    name = f"{base.name}, after one that died at call {at} ({died.struck})"
    second = Bench(replace(base, name=name, prepare=lambda root: write_tree(root, tree)), root)
    errors = second.act().errors
    after = second.observe()
    # An id that the dead save took is not taken again where the id is chosen.
    (version,) = set(base.states[1].values()) - set(base.states[0].values())
    expected = [base.states[1], *({**found, name: version} for name in after.keys() - found.keys())]
    if any(errors) or after not in expected:
        raise Violation(f"{name}: {errors}; before {found}, after {after}")
    return replace(second.scenario, states=(found, after))
