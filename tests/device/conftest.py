"""Fixtures: worlds on simulated accelerators, started when first used and kept for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paddle_flexckpt.testing import World
from tests.device import plugin

_GUARDED = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _GUARDED in config.stash:
        terminalreporter.write_line(
            f"device worlds: {config.stash[_GUARDED]} guarded calls, none of which misused device memory"
        )


@pytest.fixture(scope="session")
def device_world(pytestconfig: pytest.Config) -> Iterator[Callable[[int], World]]:
    """``device_world(n)`` is the session's world of n ranks with a device each. It starts with its first job."""
    reason = plugin.missing_tools()
    if reason:
        pytest.skip(reason)
    worlds: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in worlds:
            worlds[size] = World(size, device="tests.device.ranks")
        return worlds[size]

    yield of_size
    pytestconfig.stash[_GUARDED] = sum(each.guarded_calls for each in worlds.values())
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="session")
def device_world2(device_world: Callable[[int], World]) -> World:
    """The session's world of two devices."""
    return device_world(2)


@pytest.fixture(scope="session")
def device_world4(device_world: Callable[[int], World]) -> World:
    """The session's world of four devices."""
    return device_world(4)
