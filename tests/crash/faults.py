"""Calls that fail: one clear error for all ranks, the old checkpoint as it was, nothing left over, and a next save."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from paddle_flexckpt.catalog import CheckpointError, NotDurableError, UnreadableCheckpointError
from tests.crash.explore import Found, chosen
from tests.crash.file_system import Call, Fault, Interrupted
from tests.crash.harness import Bench, Run, Violation
from tests.crash.scenario import Scenario


@dataclass(frozen=True)
class Failing:
    """Describe a way to fail.

    Attributes:
        kind: As of a :class:`Fault`.
        errno: Likewise.
        calls: Names of the calls that can fail so; all if empty.
    """

    kind: str
    errno: int = 0
    calls: tuple[str, ...] = ()


# What a save, or the restore before it, may raise; None is said by a rank that has made the commit durable where
# another could not.
_ERRORS = {CheckpointError, NotDurableError, UnreadableCheckpointError, type(None)}

# EINTR reaches Python code from a signal handler that raises only: the interpreter makes the call again (PEP 475).
FAULTS = {
    "I/O error": Failing("error", errno.EIO),
    "disk full": Failing("full", errno.ENOSPC, ("write",)),
    "quota": Failing("tight", errno.EDQUOT, ("write",)),
    "EINTR": Failing("error", errno.EINTR, ("write", "fsync", "open")),
    "short write": Failing("short", 0, ("write",)),
    "Ctrl-C": Failing("interrupt"),
}


def can_fail(scenario: Scenario, fault: str) -> bool:
    """Tell whether the ranks of a scenario can agree about a fault.

    Ctrl-C on one of several ranks is a dead rank to the others.
    """
    return fault != "Ctrl-C" or scenario.ranks == 1


def faults(bench: Bench, fault: str, count: int | None = None) -> Found:
    """Run the steps, with a fault at each call in turn.

    Args:
        bench: The scenario.
        fault: Which, of :data:`FAULTS`.
        count: Calls at most.
    """
    failing = FAULTS[fault]
    calls = bench.record(1).calls
    points = [at for at, call in enumerate(calls) if not failing.calls or call.name in failing.calls]
    found = Found()
    for at in chosen(points, f"{bench.scenario.name} {fault}", 1.0, count):
        if found.enough:
            break
        call = calls[at]
        run = bench.act(Fault(at, failing.kind, failing.errno), 1)
        where = f"{fault} at call {at} ({call})"
        try:
            _judge(bench, call, run, failing)
        except Violation as error:
            found.violations.append(f"{bench.scenario.name}, {where}: {error}")
        found.look(bench, len(run.returns), at, where)
    return found


def _judge(bench: Bench, call: Call, run: Run, failing: Failing) -> None:
    """Look at what the ranks raised, and at what is left.

    Raises:
        Violation: It is not what it must be.
    """
    failed = [error is not None for error in run.errors]
    if run.struck is None or any(failed) != all(failed):
        raise Violation(f"struck {run.struck}; ranks do not agree: {run.outcomes}")
    if run.open_files:
        raise Violation(f"left open: {run.open_files}")
    if failing.kind == "short":
        if any(failed):
            raise Violation(f"a short write is no error: {run.errors}")
    elif failing.kind == "interrupt":
        if not isinstance(run.outcomes[0], Interrupted):
            raise Violation(f"Ctrl-C became {run.outcomes[0]!r}")
    elif any(failed):
        _judge_errors(bench, run, failing.errno)
        left = {path for path in bench.unused() - bench.orphans if not os.path.isdir(os.path.join(bench.root, path))}
        fails = bench.observe() == bench.scenario.states[len(run.returns)]
        if bench.scenario.cleans_up and fails and left and not _all_wrote(left, bench.scenario.ranks):
            raise Violation(f"left over: {left}")
    elif not call.refused and not run.warnings and not _is_end_of_lock(run, call):
        raise Violation("nobody noticed")


def _all_wrote(left: set[str], ranks: int) -> bool:
    """Tell whether what is left is what ranks leave to the next save: all had written, and the marker is there."""
    endings = [os.path.splitext(path)[1] for path in left]
    return (
        endings.count(".safetensors") == ranks
        and ".saving" in endings
        and {".safetensors", ".partition", ".saving", ".metadata"} >= {*endings}
    )


def _judge_errors(bench: Bench, run: Run, number: int) -> None:
    texts = {str(error) for error in run.errors if error is not None}
    (text, *others) = texts
    if others:
        raise Violation(f"ranks raise different errors: {texts}")
    if bench.scenario.kind == "save" and {type(error) for error in run.errors} - _ERRORS:
        raise Violation(f"errors of the wrong type: {run.errors!r}")
    # Of several calls that failed, the error tells one.
    told = []
    for failed in run.failed:
        told.append([os.strerror(number), os.path.normpath(os.path.join(bench.root, failed.path))])
        if bench.scenario.kind == "save":
            told[-1].append(f"[rank {failed.rank}]")
    if not any(all(each in text for each in wanted) for wanted in told):
        raise Violation(f"the error says none of {told}: {text}")


def _is_end_of_lock(run: Run, call: Call) -> bool:
    """Tell whether the call only ends a lock, or closes a file not written: the kernel does it in any case."""
    written = any(other.name == "write" and other.path == call.path for other in run.calls)
    return call.name == "unlock" or (call.name == "close" and not written)
