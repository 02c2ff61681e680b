"""Fixtures of the whole suite: worlds of worker processes, started when first used and kept for the session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from paddle_flexckpt.testing import World


@pytest.fixture(autouse=True)
def _same_logger() -> Iterator[None]:
    """What a test does to the package's logger ends with it: the next one may listen."""
    logger = logging.getLogger("paddle_flexckpt")
    before = (logger.level, logger.propagate, logger.disabled)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.disabled = before[1:]


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """``world(n)`` is the session's world of n ranks. Its processes start with its first job."""
    worlds: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in worlds:
            worlds[size] = World(size)
        return worlds[size]

    yield of_size
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="session")
def world2(world: Callable[[int], World]) -> World:
    """The session's world of two ranks."""
    return world(2)


@pytest.fixture(scope="session")
def world4(world: Callable[[int], World]) -> World:
    """The session's world of four ranks."""
    return world(4)
