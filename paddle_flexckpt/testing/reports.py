"""The report of a failed job: tracebacks, stacks, ends of logs.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LOG_TAIL = 4000
#: Frames that mark, in a dump of stacks, a thread of this package that only waits for messages.
_IDLE = re.compile(
    r'(cpu_world.mesh|testing.rank_worker)\.py", line \d+ in (_accept|_recv_loop|_send_loop|_read)$', re.M
)


class WorldError(RuntimeError):
    """An error of a job that failed, hung, or lost a worker.

    Attributes:
        failures: per failed rank its traceback, or why there is none.
        stacks: per rank the stacks of all its threads, when it had to be killed.
        results: the results of the ranks that returned.
    """

    def __init__(
        self,
        message: str,
        failures: dict[int, str] | None = None,
        stacks: dict[int, str] | None = None,
        results: dict[int, Any] | None = None,
        logs: dict[int, str] | None = None,
    ) -> None:
        self.failures, self.stacks, self.results = failures or {}, stacks or {}, results or {}
        parts = [message]
        for title, texts in (("failed", self.failures), ("stacks", self.stacks), ("end of log", logs or {})):
            parts += [f"--- rank {rank}: {title}\n{text.rstrip()}" for rank, text in texts.items() if text.strip()]
        super().__init__("\n".join(parts))


def size_of(path: Path) -> int:
    """Return the size of a file; 0 when there is no such file."""
    return path.stat().st_size if path.exists() else 0


def tail_of(path: Path, start: int = 0, limit: int | None = _LOG_TAIL) -> str:
    """Return a file's text from an offset on, at most its last ``limit`` bytes; empty when there is no such file."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(start if limit is None else max(start, size_of(path) - limit))
        return file.read().decode(errors="replace")


def relevant_stacks(stacks: str) -> str:
    """Return a dump with the main thread first, without the idle threads of the mesh and of the worker."""
    threads = stacks.strip().split("\n\n")
    kept = [text for text in threads if not _IDLE.search(text)]
    return "\n".join(sorted(kept, key=lambda text: not text.startswith("Current")))
