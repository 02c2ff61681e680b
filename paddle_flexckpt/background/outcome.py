"""A save as the group of its writers carries it out, and its outcome if a writer has died.

The writers do what ranks do in a save without ``async_save``: all write, the coordinator's commits, and after each step
all know the result. A writer that loses the coordinator's looks for the manifest, with which the checkpoint exists.

Tested in tests/background/test_outcome.py, tests/background/test_ranks.py and tests/simulation/test_lost_writers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.native.group_save import GroupSave
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.node_commit import SOME_PUBLISHED, NodeCommit, NodeLayout
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.ranks.group_listener import ask_outcome
from paddle_flexckpt.ranks.writer_group import UNKNOWN_OUTCOME, LostCoordinatorError, WriterGroup


@dataclass
class Outcome:
    """The outcome of a save on one rank.

    Attributes:
        failure: Why it failed; None if it is committed.
        seconds: By phase, ``write`` and ``commit``.
        warnings: What went wrong without harm to the checkpoint.
    """

    failure: Failure | None
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def save_together(
    job: WriteJob,
    directory: SaveDirectory,
    group: WriterGroup,
    write: Callable[[GroupSave], Manifest],
    refusal: str = "",
) -> Outcome:
    """Carry out one rank's share of a save as a member of the group of writers; return the outcome of the save.

    Args:
        job: The rank's share.
        directory: The directory of the save.
        group: The group of the writers; it is closed in the end.
        write: Writes the rank's data file, and returns its part of the manifest.
        refusal: The reason for which this rank refuses the save; empty if it does not. The other writers get it.
    """
    begin = time.perf_counter()
    outcome = Outcome(None)
    save = GroupSave(group, directory, job.names, job.coordinator_position)
    parts, is_unknown = None, False
    try:
        if refusal:
            raise group.abort(refusal)
        parts = _write(group, save, write)
        outcome.seconds["write"] = time.perf_counter() - begin
        save.commit(parts, warnings=outcome.warnings)
    except LostCoordinatorError:
        outcome.failure, is_unknown = look_for_manifest(job, directory), True
    except CheckpointError as error:
        outcome.failure = Failure.of(error)
    group.close(b"" if outcome.failure is None else outcome.failure.encode())
    if outcome.failure is not None:
        # If the save failed before its commit, nobody reads this rank's file: it is removed without a look at the
        # manifest.
        is_unread = parts is None and not is_unknown
        directory.discard_late(job.names, [job.rank], is_unread)
    outcome.seconds.setdefault("write", time.perf_counter() - begin)
    outcome.seconds["commit"] = time.perf_counter() - begin - outcome.seconds["write"]
    return outcome


def commit_on_nodes(
    job: WriteJob,
    layout: NodeLayout,
    directory: NodeDirectory,
    group: WriterGroup,
    refusal: str = "",
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Copy and commit a save to nodes, whose data files the ranks have written; return the outcome of the save.

    ``layout`` has the nodes, and ``progress`` gets the progress; the other arguments are those of
    :func:`save_together`.
    """

    def meter(phase: str, nbytes: int) -> Meter:
        items, total = len(job.items), job.data_bytes + nbytes
        return Meter(progress, phase, total, items, total if phase == "commit" else job.data_bytes, items)

    begin = time.perf_counter()
    outcome = Outcome(None)
    save = NodeCommit(group, directory, job.names, layout)
    try:
        if refusal:
            raise group.abort(refusal)
        manifest = save.gather(job.part, job.coordinator_position)
        outcome.seconds["write"] = time.perf_counter() - begin
        save.run(manifest, outcome.warnings, meter)
    except LostRankError as error:
        outcome.failure = _end_after_loss(job, directory, save, error)
        if outcome.failure is None:
            outcome.warnings.append(f"the save is complete, but files that it does not need may be left: {error}")
    except CheckpointError as error:
        outcome.failure = Failure.of(error)
        save.discard()
    group.close(b"" if outcome.failure is None else outcome.failure.encode())
    outcome.seconds.setdefault("write", time.perf_counter() - begin)
    outcome.seconds["commit"] = time.perf_counter() - begin - outcome.seconds["write"]
    return outcome


def _end_after_loss(job: WriteJob, directory: NodeDirectory, save: NodeCommit, error: LostRankError) -> Failure | None:
    """Return the outcome of a save to nodes that has lost a member.

    If all nodes had prepared it, some may have published it. Unless all are known to have done so, it has failed on all
    ranks then, wherever they look. Only members know the coordinator's last answer, and which of them it reached. So
    the first of them that lives, in the order of all, decides by its knowledge, and the others ask it.
    """
    if isinstance(error, LostCoordinatorError):
        # One that was silent until now is not waited for again.
        members = _in_turn(job)[error.__cause__ is None :]
        answer = _ask(job, members[: members.index(job.position)])
        if answer is not None:
            return Failure.decode(answer) if answer else None
        return None if save.is_published else look_for_manifest(job, directory)
    if save.is_published:
        return None
    if save.is_prepared:
        return Failure(LostRankError.__name__, (f"{SOME_PUBLISHED}: {error}",))
    save.lose_rank()
    return Failure.of(error)


def _write(group: WriterGroup, save: GroupSave, write: Callable[[GroupSave], Manifest]) -> dict[int, bytes]:
    """Have all members write; return the messages of others to this one, by position.

    If a rank is lost, all files stay, as others may still write. The next save finds the marker and removes them.
    """
    try:
        _, _, parts = group.trade(lambda: (None, b"", save.send(write(save))))
    except LostRankError:
        raise
    except CheckpointError:
        save.discard()
        raise
    return parts


def find_outcome(job: WriteJob, directory: SaveDirectory, end_of_writer: str) -> Failure | None:
    """Return the outcome of a save whose writer has died on this rank, in its training process, and how."""
    answer = _ask(job, _in_turn(job))
    if answer is None:
        return look_for_manifest(job, directory, end_of_writer)
    return Failure.decode(answer) if answer else None


def _in_turn(job: WriteJob) -> list[int]:
    """Return the positions of the members that may know the outcome of a save, the same list on all ranks.

    The coordinator comes first. Of a save to nodes, the others follow, and those that commit before those that do not.
    """
    nodes = () if job.layout is None else job.layout.nodes
    places = sorted((place, position) for members in nodes for place, position in enumerate(members))
    return [*dict.fromkeys((job.coordinator_position, *(position for _, position in places)))]


def _ask(job: WriteJob, members: Iterable[int]) -> bytes | None:
    """Return the outcome of a save as the first of other members knows it that answers; None if none does.

    Each of them may lose the coordinator a timeout later than this one, and ask others itself before it knows.
    """
    token, seconds = bytes.fromhex(job.names.token), 2 * job.timeout
    others = (job.addresses[position] for position in members if position != job.position)
    answers = (ask_outcome(address, token, seconds) for address in others)
    return next((answer for answer in answers if answer is not None), None)


def look_for_manifest(job: WriteJob, directory: SaveDirectory, end_of_writer: str = "") -> Failure | None:
    """Return the outcome of a save whose coordinator's writer has died, or does not answer.

    If the manifest is there, it is made durable, and the save is committed; on one of several nodes only if its marker
    has gone too, which stays until all nodes have published. ``end_of_writer`` is the way the writer has ended, if that
    is known.
    """
    has_others = job.layout is not None and len(job.layout.nodes) > 1
    try:
        if directory.is_committed(job.names) and not (has_others and directory.sees(job.names)):
            directory.backend.sync()  # the coordinator may not have come to the commit yet
            return None
    except OSError as error:
        end_of_writer = f"{end_of_writer}: {error}" if end_of_writer else str(error)
    if len(job.ranks) == 1 and directory.backend.has_path:
        # With one rank, and on a file system, no other process can still commit.
        return combine([(job.rank, Failure.of(CheckpointError(end_of_writer)))])
    text = UNKNOWN_OUTCOME.format(timeout=job.timeout)
    return combine([(job.coordinator, Failure(LostRankError.__name__, (text,)))])
