"""Outcome: how the ranks' writers agree, through the files of a save alone, what becomes of it.

1. A rank that has written its data leaves a part; one that could not leaves a failure.
2. The coordinator's writer looks for both and decides. It commits when all parts are there. It gives the save up when
   there is a failure, when a part does not come in time, or when its rank has died; its own failure file says why.
3. The other writers wait for the manifest or that file. With the manifest they wait until the coordinator has made it
   durable, and has removed the marker, or says that it could not. So the outcome is the same on every rank.
4. Who waits in vain gives the save up, and a coordinator may be late. So whoever commits or gives up first makes a file
   that can be made once: it says what is decided, and all others keep to it.

Tested in tests/background/test_worker.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.catalog import CheckpointError, LostRankError, NotDurableError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.native.names import SaveNames
from paddle_flexckpt.native.save_directory import CleanUpError, SaveDirectory
from paddle_flexckpt.ranks.presence import DeathWatch

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0
# The coordinator gives up at the timeout; the others see that a little later.
_GRACE_SECONDS = 2 * _LONGEST_PAUSE_SECONDS
_COMMIT = b"commit"
# So long the others wait for the coordinator's word on its commit. Then each of them makes it durable itself.
_WORD_SECONDS = 10.0
# After so many looks, and some two seconds, a rank makes sure that the save is still being made.
_LOOKS_UNTIL_SURE = 11
# A look that falls into the writing of the decision sees a part of it.
_READS = 10


@dataclass
class SaveOutcome:
    """Find out what becomes of one save, for one rank.

    Attributes:
        job: This rank's share.
        directory: Where it goes.
        warnings: What went wrong without harm to the checkpoint.
        is_unanswered: Whether this rank could not write as the storage gave no answer: its part may be there.
    """

    job: WriteJob
    directory: SaveDirectory
    warnings: list[str] = field(default_factory=list)
    is_unanswered: bool = False

    def agree(self, own: Failure | None) -> Failure | None:
        """Wait for the outcome, or decide it on the coordinator; return why the save failed, None if it is committed.

        ``own`` is why this rank could not write; None if its part is in place.
        """
        try:
            return self._decide(own) if self.job.is_coordinator else self._await_decision(own)
        except Exception as error:  # a save has an outcome, whatever the storage does
            lost = Failure("CheckpointError", (f"it is not known what became of the save: {error!r}",))
            return self._give_up(combine([(self.job.rank, lost)]))

    def agree_after_death(self, error: CheckpointError) -> Failure | None:
        """Return the outcome, as :meth:`agree`, when this rank's writer has died; called in the training process."""
        if self.directory.is_committed(self.job.names):
            # The writer may have died while it was about to give up what it did not know to be committed.
            self.directory.messages.withdraw_decision(self.job.names, self.job.coordinator)
            # What a coordinator has written is its word to the others.
            return self._finish(None if self.job.is_coordinator else Failure.of(error))
        written, _ = self.directory.messages.progress(self.job.names, [self.job.rank])
        if not written and self._is_replaced():
            return self._leave()
        # A save of one rank has no decision: it may have been committing once its data was there.
        data_file, is_alone = self.job.names.data_file(self.job.rank), len(self.job.ranks) == 1
        if is_alone and self._may_come_late() and data_file in self.directory.backend.names():
            return self._give_up(combine([(self.job.rank, _unanswered())]))
        self.is_unanswered = not written and self._may_come_late()
        # With its part in place, a rank has done all that it owes the others; but nobody commits for the coordinator.
        is_done = bool(written) and not self.job.is_coordinator
        return self.agree(None if is_done else Failure.of(error))

    def _decide(self, own: Failure | None) -> Failure | None:
        """Commit, or give the save up: the coordinator's task."""
        job = self.job
        deadline, watch = time.monotonic() + job.timeout, self._watch()
        for pause in _pauses():
            written, failed = self.directory.messages.progress(job.names, job.ranks)
            failures = {rank: Failure.decode(text) for rank, text in failed.items()}
            if own is not None:
                failures[job.rank] = own
            if failures:
                return self._give_up(self._agreed_failure(combine(sorted(failures.items()))))
            missing = sorted(set(job.ranks) - written)
            if not missing:
                return self._commit()
            gone = watch.look(missing)
            if gone and not self.directory.messages.progress(job.names, gone)[0]:
                return self._give_up(self._agreed_failure(combine([(rank, _gone()) for rank in gone])))
            if time.monotonic() >= deadline:
                return self._give_up(self._agreed_failure(combine([(rank, self._missing(rank)) for rank in missing])))
            time.sleep(pause)
        raise RuntimeError("pauses end")

    def _agreed_failure(self, failure: Failure) -> Failure:
        """Return why the save is given up: for this, or for what another rank has said before the coordinator.

        The coordinator's writer may have decided to commit, and died. It is not known then what becomes of its request.
        """
        try:
            earlier = self._decide_once(failure.encode())
        except (OSError, CheckpointError):
            return failure  # the coordinator does not commit, whatever others think of it
        if earlier is None and self._may_come_late():
            return combine([(self.job.coordinator, _unanswered())])
        return earlier or failure

    def _may_come_late(self) -> bool:
        """Return whether the request of a process that has died may still be carried out."""
        return not self.directory.backend.has_path

    def _decide_once(self, verdict: bytes) -> Failure | None:
        """Decide, unless somebody has; return why the save was given up, None if it is to be committed.

        Raises:
            OSError: It could not be decided.
        """
        if len(self.job.ranks) == 1:
            return None if verdict == _COMMIT else Failure.decode(verdict)
        for _ in range(_READS):
            decided = self.directory.messages.decide(self.job.names, self.job.coordinator, verdict)
            if decided == _COMMIT:
                return None
            with contextlib.suppress(ValueError):  # it is being written
                return Failure.decode(decided)
            time.sleep(_FIRST_PAUSE_SECONDS)
        # Whoever was writing it has died or hangs. The coordinator alone decides to commit.
        if not self.job.is_coordinator:
            return None
        return combine([(self.job.rank, _lost_rank("another rank has given the save up. Remedy: look into its log"))])

    def _commit(self) -> Failure | None:
        directory, names = self.directory, self.job.names
        try:
            given_up = self._decide_once(_COMMIT)
            if given_up is not None:
                return self._give_up(given_up)
            directory.commit(names, self.job.ranks)
        except (OSError, CheckpointError) as error:
            own = combine([(self.job.rank, Failure.of(error))])
            # Another save may have replaced it by now.
            if not isinstance(error, CleanUpError) and not directory.is_committed(names):
                return self._give_up(own)
            if isinstance(error, NotDurableError):
                self._tell(own)
                return own
            self.warnings.append(str(error))
            self._tell(None)
        return None

    def _tell(self, failure: Failure | None) -> None:
        """Tell the others, who see the manifest, whether it is durable, where the marker does not go."""
        if len(self.job.ranks) == 1:
            return
        said = _COMMIT if failure is None else failure.encode()
        try:
            self.directory.messages.write_failure(self.job.names, self.job.rank, said)
        except (OSError, CheckpointError) as error:
            self.warnings.append(f"the other ranks could not be told whether the checkpoint is durable: {error}")

    def _give_up(self, failure: Failure) -> Failure:
        try:
            self.directory.messages.write_failure(self.job.names, self.job.rank, failure.encode())
        except (OSError, CheckpointError) as error:
            failure = _unannounced(failure, error)
        self.directory.discard_late(self.job.names, [self.job.rank])
        return failure

    def _await_decision(self, own: Failure | None) -> Failure | None:
        """Say that this rank failed, if it did, and wait for what the coordinator decides: the other ranks' task."""
        if own is not None:
            try:
                self.directory.messages.write_failure(self.job.names, self.job.rank, own.encode())
            except (OSError, CheckpointError) as error:
                # The others will miss this rank's part; that is no reason to wait for them.
                self.directory.discard_late(self.job.names, [self.job.rank])
                return self._alone(_unannounced(own, error))
        job, patience = self.job, self.job.timeout + _GRACE_SECONDS
        deadline, has_written, watch = time.monotonic() + patience, False, self._watch()
        commits = False
        gone: list[int] = []
        written: set[int] = set()
        for number, pause in enumerate(_pauses(), 1):
            # Before the look: a rank that was stopped for long looks once more.
            is_late = time.monotonic() >= deadline
            try:
                if self.directory.is_committed(job.names):
                    return self._finish(own)
                written, failed = self.directory.messages.progress(job.names, job.ranks)
                if failed.get(job.coordinator) == _COMMIT:  # since the look before
                    return self._finish(own)
                if job.coordinator in failed:
                    return Failure.decode(failed[job.coordinator])
                # Its part stays until the save is over, unless it was written after that.
                is_doubtful = number == _LOOKS_UNTIL_SURE or (own is None and job.rank not in written)
                if is_doubtful and self._is_replaced():
                    return self._leave() if own is None else self._give_up(self._alone(own))
            except OSError as error:
                # The outcome is there or not, whether this rank can see it now or not.
                if is_late:
                    raise
                gone = []
                self.warnings.append(f"rank {job.rank} could not see for a while what became of the save: {error}")
            if not has_written and job.coordinator in written:
                # The coordinator's own patience begins now.
                deadline, has_written, is_late = time.monotonic() + patience, True, False
            if gone:
                if self._is_replaced():
                    return self._leave()
                failure = combine([(job.coordinator, _gone())])
                # It had gone before this look at what it left. But it may have sent the manifest before, or have
                # another writer by now, which this rank does not know.
                given_up = self._decide_once(failure.encode())
                if given_up is None:
                    return self._give_up(combine([(job.coordinator, _unanswered())]))
                return self._end(given_up, own)
            gone = watch.look([job.coordinator])
            if is_late:
                if commits:
                    return combine([(job.coordinator, self._unfinished())])
                if self._is_replaced():
                    return self._leave()
                missing = sorted({*job.ranks} - written | {job.coordinator})
                failure = combine([(rank, self._missing(rank)) for rank in missing])
                # Should the coordinator live and only be late, it finds that the save is given up.
                given_up = self._decide_once(failure.encode())
                if given_up is not None:
                    return self._end(given_up, own)
                # It has begun to commit, so it lives, or did.
                deadline, commits = time.monotonic() + patience, True
            time.sleep(0 if gone else pause)
        raise RuntimeError("pauses end")

    def _alone(self, own: Failure) -> Failure:
        """Return why this rank failed, where the coordinator may have committed with a part that it did not expect."""
        if self.is_unanswered:
            unknown = "it is not known what became of the save: a last request had no answer from the storage"
            own = Failure(own.kind, (unknown, *own.problems))
        return combine([(self.job.rank, own)])

    def _end(self, given_up: Failure, own: Failure | None) -> Failure | None:
        """Return the outcome of a save that is given up, unless the coordinator had decided, and cleaned up, before."""
        is_committed = self.directory.is_committed(self.job.names)
        if not is_committed and not self._is_replaced():
            return self._give_up(given_up)
        self.directory.messages.withdraw_decision(self.job.names, self.job.coordinator)
        return self._finish(own) if is_committed else self._leave()

    def _is_replaced(self) -> bool:
        """Return whether the save is over, and neither its marker nor its manifest is there."""
        return not self.directory.sees(self.job.names) and not self.directory.is_committed(self.job.names)

    def _leave(self) -> Failure:
        """Leave no file of this rank behind, of a save that is over; return that nobody knows how it has ended."""
        self.directory.discard_late(self.job.names, [self.job.rank])
        return combine([(self.job.rank, _replaced())])

    def _finish(self, own: Failure | None = None) -> Failure | None:
        """See to it that the coordinator's commit is durable, and leave no message; return why it is not, if so.

        The request that put this rank's part may have been made again after the coordinator had cleaned up. And the
        coordinator may have seen the part, and not that the rank has said that it failed (``own``).
        """
        if self.job.is_coordinator:
            failure = self._make_durable()
            self._tell(failure)
        else:
            failure = self._await_durable()
        names, rank = self.job.names, self.job.rank
        for name in [names.part_file(rank), *([] if own is None else [names.failure_file(rank)])]:
            try:
                self.directory.backend.remove(name)
            except OSError as error:
                self.warnings.append(f"the checkpoint is complete, but {name} could not be removed: {error}")
        return failure

    def _await_durable(self) -> Failure | None:
        """Wait for the coordinator to make its commit durable; if it says nothing, make it durable here."""
        job, watch = self.job, self._watch()
        deadline = time.monotonic() + min(job.timeout, _WORD_SECONDS)
        for pause in _pauses() if self.directory.backend.has_path else ():
            try:
                if not self.directory.sees(job.names):
                    return None
                said = self.directory.messages.progress(job.names, [job.coordinator])[1].get(job.coordinator)
            except OSError as error:
                self.warnings.append(f"rank {job.rank} could not see whether the checkpoint is durable: {error}")
                break
            if said is not None:
                return None if said == _COMMIT else Failure.decode(said)
            if time.monotonic() >= deadline or watch.look([job.coordinator]):
                break
            time.sleep(pause)
        return self._make_durable()

    def _make_durable(self) -> Failure | None:
        """Make the coordinator's commit durable: it may not have come so far itself."""
        try:
            self.directory.backend.sync()
        except OSError as error:
            return combine([(self.job.rank, Failure.of(self.directory.not_durable(self.job.names, error)))])
        return None

    def _watch(self) -> DeathWatch:
        return DeathWatch(dict(zip(self.job.ranks, self.job.presences)))

    def _missing(self, rank: int) -> Failure:
        job = self.job
        what = "has not decided about the save" if rank == job.coordinator else "has written nothing"
        return _lost_rank(
            f"{what} within {job.timeout:g} s after others had written: its processes have ended, or it is slower than "
            "that. Remedy: look into the log of that rank, or give the BackgroundWriter a longer timeout"
        )

    def _unfinished(self) -> Failure:
        return _lost_rank(
            "it is not known what became of the save: it had decided to commit, and has not done so for "
            f"{self.job.timeout:g} s. Remedy: look whether the checkpoint is there when its host and storage answer"
        )


def _unanswered() -> Failure:
    return _lost_rank(
        "it is not known what became of the save: its writer has died when it was committing, and the storage may "
        "still carry the request out. Remedy: look whether the checkpoint is there"
    )


def _replaced() -> Failure:
    return _lost_rank(
        "it is not known what became of the save: its files are not there any more. Another save to this directory has "
        "replaced them, or somebody has removed them. Remedy: look which checkpoint is there; give each job its own "
        "directory"
    )


def _gone() -> Failure:
    return _lost_rank(
        "its processes have ended before it had done its share of the save. Remedy: look into its log (killed? out of "
        "memory?), and save again"
    )


def _lost_rank(problem: str) -> Failure:
    return Failure(LostRankError.__name__, (problem,))


def announce_failure(
    directory: SaveDirectory, names: SaveNames, rank: int, coordinator: int, error: CheckpointError
) -> None:
    """Tell the other ranks' writers that a rank has not handed its share over; failing that, they will miss it."""
    failure = Failure.of(error)
    if rank == coordinator:
        failure = combine([(rank, failure)])
    with contextlib.suppress(OSError):
        directory.messages.write_failure(names, rank, failure.encode())


def _unannounced(failure: Failure, error: Exception) -> Failure:
    return Failure(failure.kind, (*failure.problems, f"the other ranks could not be told: {error}"))


def _pauses() -> Iterator[float]:
    """Yield the seconds between looks: few while a save may be about to end, more later. Endless."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
