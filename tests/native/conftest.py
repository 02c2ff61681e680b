"""Fixtures of the tests of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paddle_flexckpt.media.local import LocalBackend, LocalInputFile
from tests.ramdisk import memory_directory


def take_maps_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files read as those of an object store: blocks are fetched whole."""
    monkeypatch.setattr(LocalBackend, "has_path", False)
    monkeypatch.setattr(LocalInputFile, "memory_map", lambda file: None)


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    take_maps_away(monkeypatch)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory: these tests fsync often."""
    with memory_directory() as path:
        yield path
