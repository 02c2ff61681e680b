"""Fixtures of the tests of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ramdisk import memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory: these tests fsync often."""
    with memory_directory() as path:
        yield path
