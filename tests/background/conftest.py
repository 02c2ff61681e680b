"""Fixtures of the tests of asynchronous saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.background.helpers import Writers
from tests.ramdisk import memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory: these tests fsync often."""
    with memory_directory(512 << 20) as path:
        yield path


@pytest.fixture
def writers() -> Iterator[Writers]:
    """``writers(**arguments)`` makes a writer that is gone after the test, whatever became of its saves."""
    made = Writers()
    yield made
    made.end()
