"""The anchor of a root: which run has steps in the memory of nodes, and how often its saves there have begun.

Tested in tests/manager/test_memory_tier.py.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from dataclasses import asdict, dataclass

from paddle_flexckpt.media.backend import Backend, write_file
from paddle_flexckpt.tools.memory_runs import is_run

logger = logging.getLogger("paddle_flexckpt")

ANCHOR = "run.json"
# The numbers of saves to memory that one start has, for saves of the same step: as many as seconds in a start's turn.
SAVES_OF_A_START = 1 << 6
# The numbers of saves have 32 bits.
_MOST_STARTS = (1 << 32) // SAVES_OF_A_START


@dataclass(frozen=True)
class Anchor:
    """What a root says of the memory of nodes.

    Attributes:
        run: The run whose steps are there; "" if there is none.
        starts: How often a manager has begun to save there. It also grows with time, so that it does not begin anew
            where the anchor is lost.
    """

    run: str = ""
    starts: int = 0

    def next_start(self) -> int:
        """Return the number of a start that begins now."""
        return max(self.starts + 1, int(time.time()) // SAVES_OF_A_START)


def read_anchor(root: Backend) -> tuple[Anchor, str]:
    """Return the anchor of a root, and why there is none, or ""."""
    try:
        fields = json.loads(root.read(ANCHOR))
        run, starts = fields["run"], fields.get("starts", 0)
        if not is_run(run):
            raise ValueError(f"{run!r} identifies no run")
        if type(starts) is not int or not 0 <= starts < _MOST_STARTS - 1:
            raise ValueError(f"{starts!r} is no count of starts")
    except FileNotFoundError:
        return Anchor(), "is not there"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Anchor(), f"cannot be understood: {error!r:.200}"
    return Anchor(run, starts), ""


def begin_in_memory(root: Backend, run: str) -> Anchor:
    """Write, durably, that a start begins to save the steps of a run to memory; a run without a name gets one."""
    known, problem = read_anchor(root)
    if problem and problem[:2] != "is":
        logger.warning(f"{root.where(ANCHOR)} {problem}; it is written anew")
    anchor = Anchor(run or known.run or secrets.token_hex(8), known.next_start())
    root.make_directory()
    write_file(root, ANCHOR, json.dumps(asdict(anchor)).encode(), "replace")
    root.sync()
    return anchor
