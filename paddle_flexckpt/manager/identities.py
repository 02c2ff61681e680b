"""Identities of runs: which run saves to a root, and which of the steps there are another's.

Tested in tests/manager/test_runs.py.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from paddle_flexckpt.catalog import Problem, ValidationError

logger = logging.getLogger("paddle_flexckpt")

# The steps of another run that an error names.
_MOST_NAMED = 100

# By step, the identity of the run that saved it; None if no manager saved it. Damaged steps are left out.
Identities = Mapping[int, "str | None"]


def identify_run(
    path: str,
    steps: Collection[int],
    known: Identities,
    step: int,
    restored: int | Literal["latest", "best"] | None,
    run: str,
) -> str:
    """Return the identity of the run that saves ``step`` first.

    It is ``run``, or that of the step ``restored``, or of the highest step that has one if that is ``"latest"``,
    damaged or gone; else a new one.
    Steps of others below ``step`` do no harm to a run that has restored, and may be what it began from.

    Args:
        path: The root.
        steps: All steps in the root, in rising order, damaged ones too.
        known: Their runs.
        step: The step that is saved, now or later.
        restored: The step that the run continues; None: it has restored none, so none of the steps is its own.
        run: Its identity if that step was in memory, else "".

    Raises:
        ValidationError: The root has steps of another run.
    """
    if restored is None:
        others, run = [*steps], secrets.token_hex(8)
    else:
        named = [its for each, its in known.items() if its is not None]
        its = known[restored] if isinstance(restored, int) and restored in known else [None, *named][-1]
        run = run or (secrets.token_hex(8) if its is None else its)
        others = [each for each, its in known.items() if its != run and each != restored and each >= step]
    if others:
        listed = ", ".join(map(str, others[:_MOST_NAMED]))
        if len(others) > _MOST_NAMED:
            names = ", ".join(sorted({known.get(each) or "-" for each in others}))
            listed += f", ... {others[-1]} (all that flexckpt ls shows as of run {names})"
        raise ValidationError(
            Problem(
                f"{path} has steps of another run, which this run has not restored: {listed}. A root is for one run",
                code="FC903",
                remedy="to keep this state, give this run another directory, or move all of those steps to another "
                "directory; to go on from one of those steps instead of this state, call restore() before the training",
            )
        )
    return run


def of_one_run(path: str, order: Sequence[int], known: Identities) -> list[int]:
    """Return the steps of a fall-back's order that are of the run of the first one.

    If that does not tell its run, it is the run of all others that have one; where these are of several, none of them
    is taken.
    """
    runs = {*known.values()} - {None} or {*known.values()}
    run = known[order[0]] if order and order[0] in known else next(iter(runs)) if len(runs) == 1 else ""
    taken = [step for step in order if known.get(step, run) == run or step == order[0]]
    if len(taken) < len(order):
        passed = ", ".join(str(step) for step in order if step not in taken)
        logger.warning(f"a fall-back from step {order[0]} in {path} passes over steps of other runs: {passed}")
    return taken
