"""What must hold: a ledger of saves, what was said of them and what is on storage, and a check at each event.

The ledger hears of every change of a file from the simulated storage, and of every outcome from the scripts. Files of a
checkpoint that has been committed are read there and then, past the simulated processes, so that the looking changes
nothing. Readers and the end of a run look with the library's own code.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.manager.policies import steps_to_remove
from tests.simulated.scenario import HOUR
from tests.simulated.stored import MANIFEST, STEP, Attempt, Committed, StoredCheckpoints
from tests.simulated.training import policies_of

if TYPE_CHECKING:
    from paddle_flexckpt.native.directory import CheckpointInfo
    from tests.simulated.scenario import Scenario
    from tests.simulated.scheduler import Scheduler
    from tests.simulated.tasks import Process
    from tests.simulated.training import Script

# An outcome that says that it does not know.
_UNKNOWN = re.compile(
    r"it is not known what became of|ranks? [\d, ]+ (?:is|are) lost|takes? no part|(?:is|are) missing|"
    r"though all of them are alive|closed since|may be undone by a loss of power"
)
_NOT_DURABLE = "may be undone by a loss of power"
_TAKEN_OVER = re.compile(
    r"has taken over the right to save|somebody else has changed the files of this save|the part of rank \d+ is not "
    r"visible"
)
_EARLIER = "an earlier save failed"
# What a call was about to do when it failed.
_WHAT = re.compile(
    r"^(?:cannot|the checkpoint of step|all saves in the background) (?:nodes'|[^':]|'[^']*')*: "
    r"(?:some nodes may have published [^:]*: |an earlier save failed: )?"
)
# Ranks that are said to have gone, or not to answer.
_GONE = re.compile(r"\branks? ([\d, -]+) (?:is|are|takes?) ")
# A request that commits takes no longer.
_REQUEST_SECONDS = 60.0
# A segment of shared memory is a huge page at least. A pending save has one.
_SEGMENT_BYTES = 2 << 20


def is_unknown(outcome: str) -> bool:
    """Tell whether an error says no more than that something went wrong, maybe after the commit."""
    return bool(_UNKNOWN.search(outcome))


@dataclass(frozen=True)
class Violation:
    """Describe one thing that must not be: which invariant, when, what, and whose call showed it."""

    invariant: str
    time: float
    process: str
    text: str

    def __str__(self) -> str:
        who = f", seen at a call of {self.process}" if self.process else ""
        return f"{self.invariant}: {self.text} (at {self.time:.3f} s{who})"


class Ledger(StoredCheckpoints):
    """Know what was saved, said and stored, and note what must not be.

    Attributes:
        violations: In the order in which they were seen.
        committed: By directory, what a reader must find there.
        disturbed: Directories in which a person has acted.
        troubled_until: Until when storage may not answer as it should.
        leases_until: Until when a live saver may lose its lease.
        manifests_of: How often a directory's manifest was put in place or removed.
        readers: Processes of no job that read checkpoints.
        read_meanwhile: Directories whose manifest changed last while one of those lived.
        one_writer_dies: Whether nothing happens in this run but the death of one writer, in the middle of it.
        late_commits: Manifests of files that had gone, put in place by a saver that was stopped after its last look at
            its lease.
    """

    def __init__(self, scheduler: Scheduler, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._scheduler = scheduler
        self.violations: list[Violation] = []
        self.committed: dict[str, Committed] = {}
        self.disturbed: set[str] = set()
        self.troubled_until = 0.0
        self.commits = self.restores = self.readings = self.late_commits = 0
        self.manifests_of: Counter[str] = Counter()
        self.readers: list[Process] = []
        self.read_meanwhile: set[str] = set()
        self._owners: dict[str, str] = {}
        self._committed_at: dict[str, float] = {}
        self._errors: dict[tuple[str, int, str], dict[int, tuple[str, str]]] = {}
        self._restored: dict[tuple[str, int], tuple[int, int]] = {}
        self.finished_ranks: set[tuple[str, int, int]] = set()
        # Steps that may be saved again whatever was asked.
        self._doubtful: set[int] = set()
        self.last_person = -1e9
        self.one_writer_dies = "one death" in scenario.habits
        self.leases_until = -1e9
        self._going: dict[tuple[str, int, int], bool] = {}
        # When each start of a job had looked for steps.
        self._looked: dict[tuple[str, int], float] = {}

    def violate(self, invariant: str, text: str) -> None:
        """Note a violation, at the call that is being made."""
        running = self._scheduler.running
        if running is not None and not running.process.alive:
            return  # what the frames of a dead process say while they are left
        process = "" if running is None else running.process.name
        self.violations.append(Violation(invariant, self._scheduler.now, process, text))
        self._scheduler.note(f"VIOLATION of {invariant}: {text}")

    def begin_with(self, directory: str, step: int, version: int) -> None:
        """Note that there is a checkpoint of an older version of the library in the beginning."""
        self.attempts[version] = attempt = Attempt(version, "of an older version", 0, step, 0.0, 2, {0: None})
        attempt.is_committed = True
        found = self.examine(directory)
        if isinstance(found, str):
            self.violate("a committed checkpoint is whole", f"{directory}, of an older version: {found}")
        else:
            self._remember(directory, found)

    # What scripts say.

    def begin(self, script: Script, step: int) -> int:
        """Note that a rank begins to save; return the version of the values."""
        job, tries = script.job, script.tries(step)
        version = ((job.number * 1000 + script.incarnation) * 10000 + step) * 10 + tries
        if version not in self.attempts:
            now = self._scheduler.now
            self.attempts[version] = Attempt(version, job.name, script.incarnation, step, now, script.size)
        return version

    def _began(self, attempt: Attempt, script: Script, error: str) -> float:
        """Return when the save began of which an error speaks: an earlier one, maybe the first that failed."""
        if _EARLIER not in error:
            return attempt.begun
        start = (attempt.job, attempt.incarnation)
        saves = [each for each in self.attempts.values() if (each.job, each.incarnation) == start]
        return min(each.begun for each in saves if each.outcomes.get(script.rank, error) is not None)

    def reported(self, version: int, script: Script, error: str | None) -> None:
        """Note that a rank was told how its save has ended."""
        attempt = self.attempts[version]
        if error is not None and _TAKEN_OVER.search(error) and self._began(attempt, script, error) > self.leases_until:
            self.violate("who lives keeps the right to save", f"rank {script.rank}, with {attempt}, was told: {error}")
        attempt.outcomes[script.rank] = error
        self._check_one_outcome(attempt, attempt.outcomes)
        if error is not None and _NOT_DURABLE in error:
            self._doubtful.add(attempt.step)
        if any(directory.endswith(f"/step_{attempt.step:08d}") for directory in self.disturbed):
            return
        if error is None:
            self._scheduler.note(f"is told that step {attempt.step} is saved")
            if not attempt.is_committed:
                self.violate("what was reported done is there", f"{attempt} was reported done, and is not committed")
        elif not is_unknown(error):
            self._scheduler.note(f"is told that step {attempt.step} is not saved: {error[:300]}")
            if attempt.is_committed:
                self.violate(
                    "what was reported failed is not there",
                    f"{attempt} is committed; rank {script.rank} was told: {error}",
                )

    def _check_one_outcome(self, attempt: Attempt, outcomes: Mapping[int, str | None]) -> None:
        """Check that a save is not done for one rank, and failed for another; or not known, if one death is all."""
        done = [rank for rank, error in outcomes.items() if error is None]
        for rank, error in outcomes.items():
            if done and error is not None and (self.one_writer_dies or not is_unknown(error)):
                self.violate("one outcome", f"{attempt} is done for rank {done[0]}; for rank {rank}: {error}")

    def failed(self, script: Script, error: CheckpointError) -> None:
        """Note that a call has raised on a rank."""
        text = str(error)
        self._scheduler.note(f"{script.stage}: {type(error).__name__}: {text[:400]}")
        key = script.job.name, script.incarnation, script.stage
        self._errors.setdefault(key, {})[script.rank] = type(error).__name__, text

    def restored(
        self, script: Script, step: int, versions: set[int], skipped: dict[int, str], since: float = 0.0
    ) -> None:
        """Note that a rank has restored a step, which began at ``since``, and has values of these versions."""
        self.restores += 1
        self._looked[script.job.name, script.incarnation] = self._scheduler.now
        self._doubtful |= skipped.keys()
        self._scheduler.note(f"has restored step {step}" + (f", skipped {sorted(skipped)}" if skipped else ""))
        if self.disturbed and "verify" not in self._scenario.habits:
            versions &= (
                self.attempts.keys()
            )  # what is read in part is compared with no checksum, unless it is asked for
        if len(versions) > 1 or -1 in versions:
            self.violate(
                "no mixture of two saves", f"a restore of step {step} gave values of versions {sorted(versions)}"
            )
            return
        if not versions:
            return  # a rank that holds nothing
        version = versions.pop()
        attempt = self.attempts.get(version)
        if attempt is None or attempt.step != step:
            self.violate("no mixture of two saves", f"a restore of step {step} gave values of {attempt or version}")
            return
        known = self._restored.setdefault((script.job.name, script.incarnation), (step, version))
        if known != (step, version):
            self.violate(
                "no mixture of two saves", f"ranks have restored steps and versions {known} and {(step, version)}"
            )
        if skipped and since > self.troubled_until and not self.disturbed:
            self.violate("a committed checkpoint is whole", f"a restore has skipped steps: {skipped}")

    def found_nothing(self, script: Script) -> None:
        """Note that a rank was told that there is no step."""
        self._looked[script.job.name, script.incarnation] = self._scheduler.now

    def told_of_memory(self, version: int, script: Script, error: str | None) -> None:
        """Note that a rank was told how its save to memory has ended, where there is one."""

    def finished(self, script: Script) -> None:
        """Note that a rank has done all steps, and all its saves are over."""
        self.finished_ranks.add((script.job.name, script.incarnation, script.rank))

    def stopped(self, script: Script, step: int) -> None:
        """Take note that a rank ends its loop, as a signal has asked it to."""
        if not script.tries(step):
            self.violate("a stop saves first", f"rank {script.rank} stops after step {step} without having saved it")
        self._goes_on(script, step, False)

    def goes_on(self, script: Script, step: int) -> None:
        """Take note that a rank goes on with the next step."""
        self._goes_on(script, step, True)

    def _goes_on(self, script: Script, step: int, what: bool) -> None:
        if self._going.setdefault((script.job.name, script.incarnation, step), what) != what:
            self.violate("ranks stop together", f"after step {step} some ranks stop, and others go on")

    def check_memory(self, script: Script, staging_bytes: int) -> None:
        """Check a rank's memory for copies."""
        segments = self._scenario.max_pending * (3 if "large" in self._scenario.habits else 1)
        if staging_bytes > segments * _SEGMENT_BYTES:
            self.violate("memory is bounded", f"rank {script.rank} has {staging_bytes} bytes of staging memory")

    def looked(self, floor: int | None, found: CheckpointInfo | None, since: float) -> None:
        """Note that a reader asked for the latest checkpoint, of which ``floor`` was there all the time."""
        self.readings += 1
        step = None if found is None else found.step
        if found is not None and not found.complete:
            self.violate("latest() names a complete one", f"latest() says step {step}: {found.problem}")
        if self.troubled_until >= since or self.last_person >= since or self.disturbed:
            return
        if floor is not None and (step is None or step < floor):
            self.violate("latest() goes back only after damage", f"step {floor} is there, and latest() says {step}")

    def listed(self, floor: int | None, steps: list[int], infos: list[CheckpointInfo], since: float) -> None:
        """Note that a job asked which steps there are, and whether whole; ``floor`` was there all the time."""
        if self.troubled_until >= since or self.last_person >= since or self.disturbed:
            return
        if floor is not None and floor not in steps:
            self.violate("what is committed is listed", f"step {floor} is there; a job was told {steps}")
        damaged = [info for info in infos if not info.complete and info.step == floor]
        if damaged:
            self.violate("a committed checkpoint is whole", f"a job was told that {damaged} is not")

    @property
    def highest(self) -> int | None:
        """Return the highest step that is committed and that nobody has disturbed."""
        return max((each.attempt.step for each in self.committed.values()), default=None)

    def trouble_leases(self, seconds: float) -> None:
        """Allow a live saver to lose its lease for some time, and until saves that have begun by then are over."""
        self.leases_until = max(self.leases_until, self._scheduler.now + seconds + HOUR)

    # What happens on storage.

    def appeared(self, path: str, process: Process | None) -> None:
        """Note that a file is there under this name, whole: it was renamed or put, or made empty."""
        directory, _, name = path.rpartition("/")
        if name == MANIFEST and STEP.search(directory):
            self._note_change(directory)
            self._committed(directory, process)
        elif path in self._owners:
            self.changed(path, process, "replaced")

    def _note_change(self, directory: str) -> None:
        """Note that a manifest is put in place or removed, and whether somebody may be reading what it named."""
        self.manifests_of[directory] += 1
        if any(reader.alive for reader in self.readers):
            self.read_meanwhile.add(directory)
        else:
            self.read_meanwhile.discard(directory)

    def _is_late(self, process: Process) -> bool:
        """Tell whether a saver was stopped for so long that its lease has run out, and went on with this request.

        Between its last look at the lease and the request that commits nothing can stop it: docs/reliability.md.
        """
        since, until = process.suspended
        has_lease = self._scenario.storage in ("leased", "object")
        is_last = self._scheduler.now - until < _REQUEST_SECONDS
        return has_lease and is_last and until - since >= self._scenario.lease_seconds / 2

    def _undoes_another(self, directory: str, process: Process) -> bool:
        """Tell whether a late commit replaces what was committed since the stop, which no medium here lets it do."""
        return directory in self.committed and self._committed_at.get(directory, -1e9) > process.suspended[0]

    def changed(self, path: str, process: Process | None, how: str) -> None:
        """Note that a file was written, cut, replaced or removed."""
        directory = self._owners.get(path)
        if directory is None:
            return
        known = self.committed[directory]
        if process is not None and process.name.startswith("person"):
            self.disturb(directory)
        elif path.endswith("/" + MANIFEST) and how == "removed":
            self._note_change(directory)
            self._scheduler.note(f"removes {known.attempt}")
            self._check_removal(directory, known)
            self._forget(directory)
        else:
            self.violate(
                "a committed checkpoint is whole", f"{path} of {known.attempt} was {how}, and its manifest is in place"
            )
            self._forget(directory)

    def disturb(self, directory: str) -> None:
        """Note that a person acts on a directory: what is there now is not the library's business."""
        self.last_person = self._scheduler.now
        self.disturbed.add(directory)
        if directory in self.committed:
            self._forget(directory)

    def _forget(self, directory: str) -> None:
        known = self.committed.pop(directory)
        for path in known.files:
            self._owners.pop(path, None)

    def _check_removal(self, directory: str, known: Committed) -> None:
        if self.disturbed:
            return
        step = known.attempt.step
        if step == self.highest:
            self.violate("a policy removes what it may", f"step {step} is the highest, and was removed")
        records = [each.record for each in self.committed.values() if each.record is not None]
        if self._scenario.jobs == 1 and step not in steps_to_remove(records, policies_of(self._scenario.keep)):
            steps = sorted(record.step for record in records)
            self.violate(
                "a policy removes what it may", f"step {step} of {steps} was removed; kept by {self._scenario.keep}"
            )

    def _committed(self, directory: str, process: Process | None) -> None:
        self.commits += 1
        found = self.examine(directory)
        if isinstance(found, str):
            if process is not None and self._is_late(process) and not self._undoes_another(directory, process):
                self.late_commits += 1
                self.disturb(directory)
            elif directory not in self.disturbed:
                self.violate("a committed checkpoint is whole", f"{directory} was committed: {found}")
            return
        attempt, before = found.attempt, self.committed.get(directory)
        self._scheduler.note(f"commits {attempt}")
        self._check_one_start(attempt)
        for rank, outcome in attempt.outcomes.items():
            if outcome is not None and not is_unknown(outcome):
                self.violate(
                    "what was reported failed is not there",
                    f"{attempt} is committed after rank {rank} was told: {outcome}",
                )
        if before is not None:
            other = before.attempt
            if not (self._scenario.overwrites or self.disturbed or attempt.step in self._doubtful):
                self.violate("a step is replaced only if asked", f"{attempt} replaces {other}")
            if other.is_acknowledged and other.job == attempt.job and other.begun > attempt.begun:
                self.violate(
                    "a commit does not go back", f"{attempt} replaces {other}, which began later and was reported done"
                )
            self._forget(directory)
        attempt.is_committed = True
        self._remember(directory, found)

    def _remember(self, directory: str, found: Committed) -> None:
        self.committed[directory] = found
        self._committed_at[directory] = self._scheduler.now
        for path in found.files:
            self._owners[path] = directory

    def _check_one_start(self, attempt: Attempt) -> None:
        """Check that a save is not of a start beside which another one has saved, since it looked for steps."""
        looked = self._looked.get((attempt.job, attempt.incarnation), attempt.begun)
        for directory, known in self.committed.items():
            other, at = known.attempt, self._committed_at[directory]
            is_another = (other.job, other.incarnation) != (attempt.job, attempt.incarnation)
            if is_another and other.begun > looked and at < attempt.begun:
                self.violate("a root is one start's at a time", f"{attempt} follows {other}, which it has not restored")

    def look_again(self, directories: list[str]) -> None:
        """Check after a loss of power that what was reported done is there, and that what is there is whole."""
        before = self.committed
        self.committed, self._owners = {}, {}
        for directory in directories:
            if directory in self.disturbed or not STEP.search(directory):
                continue
            known = before.get(directory)
            if self.read(f"{directory}/{MANIFEST}") is None:
                if known is not None and known.attempt.is_acknowledged:
                    self.violate("what was reported done is there", f"{known.attempt} is gone after a loss of power")
                continue
            found = self.examine(directory)
            if isinstance(found, str):
                self.violate("a committed checkpoint is whole", f"{directory}, after a loss of power: {found}")
                continue
            if known is not None and known.attempt.is_acknowledged and found.attempt is not known.attempt:
                self.violate(
                    "what was reported done is there", f"{known.attempt} is {found.attempt} after a loss of power"
                )
            found.attempt.is_committed = True
            self._remember(directory, found)

    # At the end of a start of a job, and of the run.

    def compare_errors(
        self, job: str, incarnation: int, culprits: set[int] | None, ended: set[int], is_all: bool
    ) -> None:
        """Check that all ranks that saw a call fail saw the same text.

        It names who has gone, if that is all that happened; beside it perhaps those that ``ended`` by themselves,
        after an exchange that went well for them. ``is_all`` says that nothing but deaths of ranks can have made a
        call fail.
        """
        for (name, number, stage), errors in self._errors.items():
            if (name, number) != (job, incarnation) or culprits is None:
                continue
            # Ranks may notice a loss in different exchanges: what each of them was about to do may differ.
            lost = {_WHAT.sub("", text) for kind, text in errors.values() if kind == LostRankError.__name__}
            # And who is lost may have sent to some ranks, which hear of another failure then, and not to others.
            told = {(kind, text) for kind, text in errors.values() if kind != LostRankError.__name__}
            if len(lost) > 1 or len(told) > 1 or (is_all and lost and told):
                shown = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in sorted(errors.items()))
                self.violate("one error text on all survivors", f"{stage}: {shown}")
            for rank, (kind, text) in errors.items():
                if kind != LostRankError.__name__ or len(culprits) != 1:
                    continue
                ranges = [each.split("-") for group in _GONE.findall(text) for each in group.split(", ")]
                named = {rank for ends in ranges for rank in range(int(ends[0]), int(ends[-1]) + 1)}
                # Rank 0 keeps the store, which knows of the others; it may have ended well.
                if not (culprits <= named or named == {0}) or not named <= culprits | ended:
                    self.violate(
                        "the true culprit", f"rank {min(culprits)} had gone; {stage} said on rank {rank}: {text}"
                    )
