"""What becomes of a save whose writers are killed, stopped, or refused by the storage: one outcome, whoever asks.

The writers are forks of this process, which act at a moment that a test has chosen; this process stands for all their
training processes.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.background.outcome import Outcome, find_outcome, save_together
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.worker import join_group, write_share
from paddle_flexckpt.catalog import NotDurableError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest, is_complete
from paddle_flexckpt.native.partition_files import split_rows
from paddle_flexckpt.native.save_directory import CleanUpError, SaveDirectory
from paddle_flexckpt.ranks import lost_ranks, writer_group
from paddle_flexckpt.ranks.group_listener import GroupListener
from paddle_flexckpt.ranks.lost_ranks import address_of, open_presence
from paddle_flexckpt.ranks.writer_group import WriterGroup
from tests.background.helpers import PATIENCE_SECONDS
from tests.native.samples import items_of, whole
from tests.saved import short_names

LOST = "its processes have ended before it had done its share of the save. Remedy (FC501): look into its log"
UNKNOWN = (
    "its background writer has ended, or has not decided within {timeout:g} s: it is not known what became of the save."
    " Remedy (FC404): look whether the checkpoint is there; a load or restore() takes it if it is"
)
SIZES = [(2, 0), (4, 2)]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, "injected")


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (act(), real(*args, **options))[1])


def after(owner: Any, name: str, act: Callable[[], None], which: Callable[..., bool] = lambda *_: True) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if which(found, *args):
            act()
        return found

    setattr(owner, name, call)


# Moments of a writer: what is done to the functions of its process so that it acts then.
Hook = Callable[[Callable[[], None], WriterGroup, SaveDirectory], None]
MOMENTS: dict[str, Hook] = {
    "has joined": lambda act, group, directory: act(),
    "is writing": lambda act, group, directory: before(os, "fsync", act),
    "has written": lambda act, group, directory: before(group, "_all_to_all", act),
    "has sent its part": lambda act, group, directory: after(writer_group._Link, "send", act, lambda sent, _: sent),
    "knows that all have written": lambda act, group, directory: before(group, "lead", act),
    "is about to commit": lambda act, group, directory: before(directory, "publish", act),
    "has put the manifest in place": lambda act, group, directory: after(
        os, "rename", act, lambda _, source, target: str(target).endswith(".manifest")
    ),
    "has committed": lambda act, group, directory: after(directory, "publish", act),
    "has cleaned up": lambda act, group, directory: after(directory, "commit", act),
    "is done": lambda act, group, directory: before(group, "close", act),
}
# Before it joins, nothing can be changed yet.
MOMENT_NAMES = ("comes", *MOMENTS)


class Save:
    """One save of id 0, by as many writers as ranks, in place of a checkpoint of one rank.

    ``acts`` has what a writer does and when, by position; ``refusals`` why a share was not handed over.
    """

    moments = MOMENTS

    def __init__(self, path: Path, size: int, coordinator: int = 0, timeout: float = PATIENCE_SECONDS) -> None:
        self.path = str(path)
        save_alone(path, 0)
        self.names = open_to_save(self.path).open_save(0, size)
        addresses = self._open_sockets(size)
        self.jobs = [
            WriteJob(
                self.path, {}, None, self.names, items_of([whole(f"w{rank}", "float32", (9,), rank)],
                self.names.data_file(rank)), rank, tuple(range(size)), coordinator, 7, timeout, addresses,
            )
            for rank in range(size)
        ]  # fmt: skip

    def _open_sockets(self, size: int) -> tuple[str, ...]:
        self.pids: list[int] = []
        self._pipes: list[Any] = []
        self._sockets = [open_presence() for _ in range(size)]
        self._secrets = [os.urandom(16) for _ in range(size)]
        return tuple(map(address_of, self._sockets, self._secrets))

    def start(
        self,
        acts: dict[int, tuple[str, Callable[[], None]]],
        refusals: dict[int, str] | None = None,
        prepare: Callable[[int, SaveDirectory], None] = lambda position, directory: None,
    ) -> Save:
        for position in range(len(self.jobs)):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            pid = os.fork()
            if not pid:
                try:
                    self._write(position, theirs, acts.get(position), (refusals or {}).get(position, ""), prepare)
                finally:
                    os._exit(1)
            self.pids.append(pid)
            theirs.close()
        for each in self._sockets:
            each.close()
        return self

    def _write(self, position: int, pipe: Any, act: Any, refusal: str, prepare: Callable[..., None]) -> None:
        for each in (*self._pipes, *(other for other in self._sockets if other is not self._sockets[position])):
            each.close()
        if act and act[0] == "comes":
            act[1]()
        job, directory = self.jobs[position], open_to_save(self.jobs[position].path)
        listener = GroupListener(self._sockets[position], self._secrets[position])
        group = join_group(job, listener)
        prepare(position, directory)
        if act and act[0] != "comes":
            once = iter([act[1]])
            self.moments[act[0]](lambda: next(once, lambda: None)(), group, directory)
        pipe.send(self.carry_out(job, directory, group, refusal))
        listener.await_readable(pipe)  # until the test is over: a writer lives longer than its save

    def carry_out(self, job: WriteJob, directory: SaveDirectory, group: WriterGroup, refusal: str) -> Outcome:
        data = np.arange(9, dtype=np.float32).view(np.uint8)
        return save_together(job, directory, group, functools.partial(write_share, job, data, None, None), refusal)

    def await_stop(self, position: int) -> None:
        found = os.waitid(os.P_PID, self.pids[position], os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found.si_code == os.CLD_STOPPED

    def go_on(self, position: int) -> None:
        os.kill(self.pids[position], signal.SIGCONT)

    def outcome(self, position: int) -> Outcome:
        """What the rank's training process learns."""
        assert self._pipes[position].poll(PATIENCE_SECONDS)
        try:
            return self._pipes[position].recv()
        except EOFError:
            job = self.jobs[position]
            return Outcome(find_outcome(job, open_to_save(job.path), "the writer was killed"))

    def text(self, positions: Iterable[int] | None = None) -> str | None:
        """The text that all of these have of why the save failed."""
        failures = [self.outcome(each).failure for each in (range(len(self.jobs)) if positions is None else positions)]
        (failure,) = {failure and (failure.kind, *failure.problems) for failure in failures}
        return failure and "; ".join(failure[1:])

    @property
    def is_there(self) -> bool:
        assert is_complete(self.path, 0), "the old checkpoint or the new one"
        return open_to_save(self.path).is_committed(self.names)

    def check_next(self) -> None:
        """What the save has left goes with the next one."""
        ranks = range(len(self.jobs)) if self.is_there else None
        data = ["0_0-1.safetensors"] if ranks is None else [f"{rank}_0-2.safetensors" for rank in ranks]
        save_alone(self.path, 1)
        assert short_names(self.path) == sorted(
            [*data, "0_1-3.safetensors", "0.manifest", "1.manifest", PADDLE_METADATA]
        )

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)


def save_alone(path: Any, unique_id: int) -> None:
    """Save as a rank that is alone."""
    directory = open_to_save(str(path))
    os.makedirs(path, exist_ok=True)
    with directory.lock():
        names = directory.open_save(unique_id, 1)
        directory.cleaner.remove_dead_saves(names)
        items = items_of([whole("w0", "float32", (9,), 0)], names.data_file(0))
        directory.commit(names, [directory.write_data(names, items, [np.zeros(36, np.uint8)], world_size=1)])


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Save]]:
    for module in (lost_ranks, writer_group):
        monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(writer_group, "_GRACE_SECONDS", 0.1)
    made: list[Save] = []
    yield lambda *arguments, **options: made.append(Save(tmp_path, *arguments, **options)) or made[-1]
    for each in made:
        each.end()


@pytest.mark.parametrize(("size", "coordinator"), [(1, 0), *SIZES])
def test_all_write_and_one_commits(saves, size, coordinator):
    save = saves(size, coordinator).start({})
    outcomes = [save.outcome(position) for position in range(size)]
    assert [(each.failure, each.warnings, set(each.seconds)) for each in outcomes] == [
        (None, [], {"write", "commit"})
    ] * size
    assert save.is_there
    save.check_next()


@pytest.mark.parametrize(("size", "coordinator"), SIZES)
@pytest.mark.parametrize("moment", MOMENT_NAMES[:6])
def test_a_member_is_killed(saves, size, coordinator, moment):
    """Its part counts when it is sent."""
    save = saves(size, coordinator).start({1: (moment, kill)})
    text, is_sent = save.text(), MOMENT_NAMES.index(moment) > MOMENT_NAMES.index("has written")
    assert (text is None) == save.is_there == is_sent
    if text is not None:
        assert text.startswith(f"[rank 1] {LOST}")
    save.check_next()


@pytest.mark.parametrize(("size", "coordinator"), SIZES)
@pytest.mark.parametrize("moment", [name for name in MOMENT_NAMES if name != "has sent its part"])
def test_the_coordinator_is_killed(saves, size, coordinator, moment):
    """The manifest decides."""
    save = saves(size, coordinator).start({coordinator: (moment, kill)})
    text = save.text()
    is_in_place = MOMENT_NAMES.index(moment) >= MOMENT_NAMES.index("has put the manifest in place")
    assert save.is_there == is_in_place
    assert text == (None if is_in_place else f"[rank {coordinator}] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}")
    save.check_next()


@pytest.mark.parametrize("moment", ["is about to commit", "has put the manifest in place"])
def test_a_rank_alone_whose_writer_is_killed_knows_what_became_of_its_save(saves, moment):
    save = saves(1).start({0: (moment, kill)})
    is_there = moment.startswith("has")
    assert save.text() == (None if is_there else "[rank 0] the writer was killed")
    assert save.is_there == is_there
    save.check_next()


@pytest.mark.parametrize("refused", ["is_committed", "sync"])
def test_a_commit_that_survivors_cannot_see_or_make_durable_is_not_known(saves, refused):
    """The coordinator is killed before it has done so."""

    def prepare(position, directory):
        if position != 0:
            setattr(directory.backend if refused == "sync" else directory, refused, refuse)

    save = saves(3, 0).start({0: ("has put the manifest in place", kill)}, prepare=prepare)
    assert save.text([1, 2]) == f"[rank 0] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"


@pytest.mark.parametrize("moment", ["has written", "knows that all have written"])
def test_all_are_killed(saves, moment):
    save = saves(3, 1).start(dict.fromkeys(range(3), (moment, kill)))
    assert save.text() == f"[rank 1] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
    assert not save.is_there
    save.check_next()


@pytest.mark.parametrize(("size", "coordinator"), SIZES)
@pytest.mark.parametrize("moment", MOMENT_NAMES[:6])
def test_a_member_is_stopped(saves, size, coordinator, moment):
    """When it comes at last, it learns what the others have decided."""
    save = saves(size, coordinator, timeout=0.5).start({1: (moment, stop)})
    save.await_stop(1)
    others = save.text({*range(size)} - {1})
    is_sent = MOMENT_NAMES.index(moment) > MOMENT_NAMES.index("has written")
    assert (others is None) == save.is_there == is_sent
    if others is not None:
        assert others.startswith("[rank 1] has written nothing within 0.5 s after others had written")
    save.go_on(1)
    assert save.text([1]) == others
    save.check_next()


@pytest.mark.parametrize(("size", "coordinator"), SIZES)
@pytest.mark.parametrize("moment", ["comes", "has written", "is about to commit", "has put the manifest in place"])
def test_the_coordinator_is_stopped(saves, size, coordinator, moment):
    """Others do not wait for ever. A coordinator on which they have given up does not commit when it goes on."""
    save = saves(size, coordinator, timeout=0.5).start({coordinator: (moment, stop)})
    save.await_stop(coordinator)
    others = save.text({*range(size)} - {coordinator})
    assert save.is_there == (moment == "has put the manifest in place")
    if save.is_there:
        assert others is None
    else:
        assert others is not None and "it is not known what became of the save" in others
        assert others.startswith(f"[rank {coordinator}] ")
    save.go_on(coordinator)
    assert save.text([coordinator]) == others
    assert save.is_there == (others is None)
    save.check_next()


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_writer_is_that_of_all_and_leaves_nothing(saves, failing):
    save = saves(3, 1).start({failing: ("is writing", refuse)})
    assert save.text().startswith(f"[rank {failing}] OSError: [Errno 5] injected: ")
    assert not save.is_there
    assert short_names(save.path) == ["0.manifest", "0_0-1.safetensors", PADDLE_METADATA]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_share_that_is_not_handed_over_ends_the_save_on_all(saves, refusing):
    save = saves(3, 1).start({}, refusals={refusing: "the connection to rank 9 is gone"})
    assert save.text() == f"[rank {refusing}] the connection to rank 9 is gone"
    assert not save.is_there
    save.check_next()


@pytest.mark.parametrize(
    ("moment", "error", "said", "warning"),
    [
        ("is about to commit", OSError(errno.EIO, "injected"), "OSError: [Errno 5] injected", None),
        ("has committed", NotDurableError("in place"), "in place", None),
        ("has committed", CleanUpError("left over"), None, "left over"),
        ("has cleaned up", OSError(errno.EIO, "injected"), None, "[Errno 5] injected"),
    ],
)
def test_what_goes_wrong_with_the_commit_is_told_to_all(saves, moment, error, said, warning):
    def fail():
        raise error

    save = saves(3, 1).start({1: (moment, fail)})
    outcomes = [save.outcome(position) for position in range(3)]
    assert {each.failure and each.failure.problems for each in outcomes} == {said and (f"[rank 1] {said}",)}
    assert {each.failure and each.failure.kind for each in outcomes} <= {None, "CheckpointError", "NotDurableError"}
    assert [each.warnings for each in outcomes] == [[], [warning] if warning else [], []]
    assert save.is_there == (moment != "is about to commit")
    save.check_next()


# -- ranks that come when everything is over ---------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["is writing", "has written"])
def test_a_rank_that_goes_on_after_the_next_save_leaves_nothing(saves, moment):
    """Its job was killed meanwhile, and its next start has cleaned up."""
    save = saves(2, 0).start({0: ("has written", stop), 1: (moment, stop)})
    for position in (0, 1):
        save.await_stop(position)
    os.kill(save.pids[0], signal.SIGKILL)
    save_alone(save.path, 1)
    save.go_on(1)
    assert save.text([1]) == f"[rank 0] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
    assert not [name for name in os.listdir(save.path) if save.names.owns(name)]


def test_what_a_late_rank_leaves_is_kept_for_those_who_read_it(saves):
    """Its save was committed and replaced while it was stopped, and somebody reads it still."""
    save = saves(2, 0).start({0: ("has cleaned up", kill), 1: ("knows that all have written", stop)})
    save.await_stop(1)
    assert save.text([0]) is None
    reading = CheckpointDirectory(save.path)
    with LockedManifest(reading, 0) as manifest:
        save_alone(save.path, 0)
        save.go_on(1)
        assert save.text([1]) == f"[rank 0] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
        save_alone(save.path, 1)
        reading.check_complete(manifest)
    save_alone(save.path, 0)
    assert not [name for name in os.listdir(save.path) if save.names.owns(name)]


@pytest.mark.parametrize("moment", ["has joined", "has written"])
def test_a_late_rank_that_was_given_up_leaves_nothing_beside_the_next_save_of_its_id(saves, moment):
    """It knows that its save was never committed: nobody can read its file."""
    save = saves(2, 0, timeout=0.5).start({1: (moment, stop)})
    save.await_stop(1)
    given_up = save.text([0])
    assert "has written nothing" in given_up
    save_alone(save.path, 0)
    save.go_on(1)
    assert save.text([1]) == given_up
    assert not [name for name in os.listdir(save.path) if save.names.owns(name)]


@pytest.mark.parametrize(("rank", "numbers"), [(1, (1, 3)), (4, (0,))])
def test_partitions_of_a_late_rank_go_with_its_other_files(tmp_path, rank, numbers):
    """Ranks write several, with numbers of their own, and their group may begin with any rank."""
    late = open_to_save(str(tmp_path))
    names = late.open_save(0, 2)
    with late.lock():
        open_to_save(str(tmp_path)).cleaner.remove_dead_saves()
    shards = [whole(f"w{number}", "float32", (2,), rank) for number in range(40)]
    part = late.write_data(
        names, items_of(shards, names.data_file(rank)), [np.zeros(8, np.uint8)] * len(shards), world_size=2
    )
    for number, rows in split_rows(part, 4):
        if number in numbers:
            late.write_partition(names, number, 4, rows)
    late.discard_late(names, [rank])
    assert not [name for name in os.listdir(tmp_path) if names.owns(name)]
