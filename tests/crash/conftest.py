"""Fixtures of the crash tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Bench
from tests.crash.scenario import Scenario
from tests.ramdisk import memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a directory in memory: thousands of directories are made and removed here."""
    with memory_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Silence the log: thousands of saves would be logged."""
    caplog.set_level(logging.WARNING, "paddle_flexckpt")


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[Scenario], Bench]:
    """Return ``bench(scenario)``: the scenario on a disk of its own."""
    return lambda scenario: Bench(scenario, str(tmp_path / "disk"))
