"""Print how many core-seconds each test file takes, workers included: ``pytest -p tests.core_seconds tests``.

Unlike durations, core-seconds change little when the machine is busy, and a test that waits costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
#: How many files and tests are printed.
_LISTED = int(os.environ.get("CORE_SECONDS_LISTED", "40"))


def _spent(pid: int) -> float:
    """Return the core-seconds of a process, of its ended children and of all that live below it."""
    process = Path(f"/proc/{pid}")
    total = 0.0
    with contextlib.suppress(OSError):  # it has just ended
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / _TICK
        for thread in (process / "task").iterdir():
            with contextlib.suppress(OSError):
                total += sum(_spent(int(child)) for child in (thread / "children").read_text().split())
    return total


class CoreSeconds:
    """Count the core-seconds of each file; xdist's workers send theirs to the controller."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _spent(os.getpid())
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            spent = max(0.0, _spent(os.getpid()) - before)
            self.files[item.nodeid.partition("::")[0]] += spent
            self.tests[item.nodeid] += spent

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["core_seconds"] = (dict(self.files), dict(self.tests))

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_testnodedown(self, node: Any) -> None:
        files, tests = getattr(node, "workeroutput", {}).get("core_seconds", ({}, {}))
        self.files.update(files)
        self.tests.update(tests)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"core-seconds: {sum(self.files.values()):.0f} in {len(self.files)} files")
        for what in (self.files, self.tests):
            for name, spent in what.most_common(_LISTED):
                terminalreporter.write_line(f"{spent:8.1f} {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CoreSeconds(), "core-seconds")
