"""A plugin of pytest for runs of mutants: the tests that took least time in the run without mutants come first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    times = Path("mutmut-stats.json")
    if times.is_file():
        seconds = json.loads(times.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
