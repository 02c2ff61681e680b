"""The anchor of a root: which run has steps in the memory of nodes, its starts, and what these have saved to the root.

Tested in tests/manager/test_memory_tier.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from paddle_flexckpt.media.backend import Backend, write_file
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import is_remote
from paddle_flexckpt.native.directory import number_of
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.tools.memory_runs import is_run, read_root

logger = logging.getLogger("paddle_flexckpt")

ANCHOR = "run.json"
# The numbers of saves to memory that one start has, for saves of the same step: as many as seconds in a start's turn.
SAVES_OF_A_START = 1 << 6
# The numbers of saves have 32 bits.
_MOST_STARTS = (1 << 32) // SAVES_OF_A_START
# Of so many starts it is known what they have saved to the root: of older ones the root has higher steps.
_MOST_KNOWN = 100


@dataclass(frozen=True)
class Anchor:
    """The record in a root of the steps that a run has in the memory of nodes.

    Attributes:
        run: The run whose steps are there; "" if there is none.
        starts: The number of the last start: a manager that begins to save there, or to the root, or that has restored
            a step before it saves. It also grows with time, so that it does not begin anew where the anchor is lost.
        saves: In rising order, starts, each with the first step that it has begun to save to the root.
        left: Starts of ``saves`` that went back, each with the save token of a higher step that was in the root.
    """

    run: str = ""
    starts: int = 0
    saves: tuple[tuple[int, int], ...] = ()
    left: tuple[tuple[int, str], ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> Anchor:
        """Return the anchor of a file's bytes; ValueError, KeyError, TypeError or AttributeError if it is none."""
        fields = json.loads(data)
        run, starts = fields["run"], fields.get("starts", 0)
        if not is_run(run):
            raise ValueError(f"{run!r} identifies no run")
        saves = tuple((start, step) for start, step in fields.get("saves", ()))
        if {type(each) for each in (starts, *sum(saves, ()))} != {int} or not 0 <= starts < _MOST_STARTS - 1:
            raise ValueError(f"{starts!r} is no number of a start, or {saves!r} are not those of starts")
        return cls(run, starts, saves, tuple((start, str(token)) for start, token in fields.get("left", ())))


class AnchorFile:
    """The anchor in its root, as the coordinator reads and writes it."""

    def __init__(self, root: Backend) -> None:
        """Take the root directory."""
        self._root = root
        # The number of this start, once it is noted; and whether it is noted what it saves to the root.
        self._start: int | None = None
        self._has_saved = False
        self._left: tuple[str, ...] = ()

    def read(self) -> tuple[Anchor, str]:
        """Return the anchor, and why there is none, or ""."""
        try:
            return Anchor.decode(self._root.read(ANCHOR)), ""
        except FileNotFoundError:
            return Anchor(), "is not there"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return Anchor(), f"cannot be understood: {error!r:.200}"

    def other_root(self, run: str, directory: Backend) -> str:
        """Return the root to which a run's steps in ``directory`` belong, if it is another one that is there; else "".

        One of the two is a copy of the other then. A root that was moved is not there any more.
        """
        root = read_root(directory)
        if root is None or root == self._root.path:
            return ""
        if is_remote(root) or not self._root.has_path:
            return root  # stores do not move directories
        with contextlib.suppress(OSError):
            if AnchorFile(LocalBackend(root)).read()[0].run == run and not os.path.samefile(root, self._root.path):
                return root
        return ""

    def explain_other(self, run: str, root: str) -> str:
        """Return the text about a run's steps in memory that belong to another root."""
        return (
            f"the steps of run {run} in memory belong to {root}, and one of it and {self._root.path} is a copy of the "
            "other. Remedy (FC507): give this run a MemoryTier in another directory; to go on from these steps, start "
            f"the run in {root}"
        )

    def explain_others(self, others: Iterable[str], run: str) -> str:
        """Return the text about other runs of this root that have steps in memory, beside ``run``."""
        return (
            f"the memory of the nodes has steps of other runs in {self._root.path}, {', '.join(sorted(others))}, which "
            f"are passed over: run.json there names {run or 'no run'}. Remedy (FC507): to go on with one, write its "
            'name to run.json before the first save, as {"run": "NAME"}; `flexckpt clean` lists them, and frees their '
            "memory"
        )

    def begin(self, left: Iterable[str] = ()) -> None:
        """Begin another start: what is saved from now on follows a restore, or nothing.

        ``left`` are the save tokens of the steps in the root that it goes back from.
        """
        self._start, self._has_saved, self._left = None, False, tuple(left)

    def note_save(self, step: int) -> None:
        """Note, if a run has steps in memory, the step that this start saves to the root first."""
        if self._has_saved:
            return
        self._has_saved = True
        known, problem = self.read()
        if not problem:
            start = self._number(known)
            # If the root has no higher steps, it has nothing of starts from this step on.
            before = [pair for pair in known.saves if self._left or pair[1] < step]
            saves = (*before, (start, step))[-_MOST_KNOWN:]
            left = [*known.left, *((start, token) for token in self._left)]
            self._write(replace(known, saves=saves, left=tuple(each for each in left if each[0] >= saves[0][0])))

    def note_memory(self, run: str) -> tuple[str, int]:
        """Note that this start saves the steps of a run to memory; return its name, and the number of the start.

        A run without a name (``""``) gets one.
        """
        known = self.read()[0]
        if known.run and run not in ("", known.run):
            logger.warning(
                f"{self._root.where(ANCHOR)} named run {known.run}, whose steps in memory are not looked for any more: "
                f"run {run} begins to save there. Remedy (FC507): end this run, write "
                f'{{"run": "{known.run}"}} to that file, and call restore() before the first save; or give this run '
                "another directory"
            )
        name = run or known.run or secrets.token_hex(8)
        self._root.make_directory()
        self._write(replace(known, run=name))
        return name, self._number(known)

    def _number(self, known: Anchor) -> int:
        if self._start is None:
            self._start = max(known.starts + 1, int(time.time()) // SAVES_OF_A_START)
        return self._start

    def _write(self, known: Anchor) -> None:
        # Another manager of this root may have a later start.
        anchor = replace(known, starts=max(known.starts, self._number(known)))
        write_file(self._root, ANCHOR, json.dumps(asdict(anchor)).encode(), "replace")
        self._root.sync()


def start_of(manifest: Manifest) -> int:
    """Return the start that has saved a step to memory."""
    return number_of(manifest) // SAVES_OF_A_START


def find_void(starts: Mapping[int, int], later: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the steps in memory of before the run went back; and the step, not above it, that a later start has saved.

    ``starts`` are of the steps in memory, 0 if not known; ``later`` has the lowest step in the root of each since.
    """
    saves = [*later, *((start, step) for step, start in starts.items())]
    found = {}
    for step, start in starts.items():
        since = [each for known, each in saves if known > start > 0 and each <= step]
        if since:
            found[step] = min(since)
    return found
