"""Fixtures of the whole suite: worlds of worker processes, started when first used and kept for the session."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.testing import World
from tests.moving import move, move_between  # noqa: F401  (fixtures)

# For the ranks that tests start by Paddle's launcher, without the CPU world: the one that holds Paddle's store on libuv
# may end by a signal where a peer hangs up late (U18).
os.environ.setdefault("FLAGS_tcp_store_using_libuv", "0")

#: The files that take longest, so that pytest-xdist's workers begin with them and end together.
#: ``pytest -p tests.core_seconds`` measures them.
HEAVY = (
    "tests/distributed/test_matrix.py",
    "tests/distributed/test_sharding.py",
    "tests/distributed/test_lost_rank.py",
    "tests/property/test_whole_system.py",
    "tests/distributed/test_cpu_world.py",
    "tests/semi_auto/test_matrix.py",
    "tests/semi_auto/test_dist_model.py",
    "tests/distributed/test_pipeline.py",
    "tests/crash/test_stops.py",
    "tests/media/test_s3.py",
    "tests/distributed/test_tensor_parallel.py",
    "tests/media/test_remote.py",
    "tests/device/test_matrix.py",
    "tests/device/test_plugin.py",
    "tests/device/test_device_check.py",
    "tests/device/test_bounds.py",
    "tests/device/test_control_traffic.py",
    "tests/device/test_seeded_mistakes.py",
    "tests/device/test_reshard.py",
    "tests/crash/test_power_loss.py",
    "tests/distributed/test_aoa.py",
    "tests/silence/test_silence.py",
    "tests/semi_auto/test_dist_tensors.py",
    "tests/damage/test_damage.py",
    "tests/background/test_ranks.py",
    "tests/crash/test_truth.py",
    "tests/semi_auto/test_states.py",
    "tests/semi_auto/test_example.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put heavy files first where workers share the tests (with ``--no-loadscope-reorder``, which leaves them so)."""
    if hasattr(config, "workerinput"):
        place = {path: number for number, path in enumerate(HEAVY)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(HEAVY)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and tests out of every collection of garbage to come: they would take nearly all of its time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_logger() -> Iterator[None]:
    """What a test does to the package's logger ends with it: the next one may listen."""
    logger = logging.getLogger("paddle_flexckpt")
    before = (logger.level, logger.propagate, logger.disabled)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.disabled = before[1:]


@pytest.fixture(autouse=True)
def _same_classes() -> Iterator[None]:
    """Paddle's classes are after a test what they were before it: a manager with a model installs the mixins."""
    before = _mixins_are_installed()
    yield
    if _mixins_are_installed() and not before:
        fc.uninstall()


def _mixins_are_installed() -> bool:
    """Without an import of Paddle, which most files of tests do not need."""
    installing = sys.modules.get("paddle_flexckpt.parallel.install")
    return installing is not None and installing.is_installed()


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
