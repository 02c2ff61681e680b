"""Programs through the library's public functions: save, load and reshard in a simulated world."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.aoa.layouts import Layout
from tests.property.layouts import Shard
from tests.ramdisk import memory_directory

State = dict[str, "fc.ShardedWeight"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines of thousands of saves and loads."""
    logger = logging.getLogger("paddle_flexckpt")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def weight_of(shard: Shard, content: np.ndarray) -> fc.ShardedWeight:
    """A live shard with a copy of the content."""
    tensor = content.copy().reshape(-1 if shard.flat is not None else shard.shape)
    flat = None if shard.flat is None else slice(*shard.flat)
    return fc.ShardedWeight(shard.key, tensor, shard.shape, shard.global_shape, shard.offset, flat is not None, flat)


def states_of(layout: Layout, contents: Sequence[np.ndarray], world: int) -> list[State]:
    """The state of every rank."""
    states: list[State] = [{} for _ in range(world)]
    for shard, content in zip(layout, contents):
        states[shard.rank][shard.key] = weight_of(shard, content)
    return states


def check_system(
    texts: Sequence[str],
    source: tuple[Layout, dict[str, np.ndarray]],
    target: tuple[Layout, list[np.ndarray]],
    expected: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[Shard, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Loads from files, then reshards in memory.

    Args:
        texts: The statements.
        source: Layout, and whole arrays by key.
        target: Layout, and what every shard has at the beginning.
        expected: What every target shard has to have, and where it keeps what it has.

    Yields:
        For both ways and every target shard: the shard, what it has, what it had, and what it should have.

    Raises:
        AssertionError: A source has changed.
    """
    layout, values = source
    contents = [shard.of(values[shard.key]) for shard in layout]
    worlds = [1 + max(shard.rank for shard in each) for each in (layout, target[0])]
    config = {"aoa_statements": list(texts)}
    with memory_directory() as path:
        saved = states_of(layout, contents, worlds[0])
        SimulatedWorld(worlds[0]).run(lambda comm: fc.save_state_dict(saved[comm.position], path, comm))
        loaded = states_of(*target, worlds[1])
        SimulatedWorld(worlds[1]).run(
            lambda comm: fc.load_state_dict(
                loaded[comm.position], path, comm, aoa_config=config, optimizer_states="ignore"
            )
        )
    held, filled = states_of(layout, contents, max(worlds)), states_of(*target, max(worlds))
    SimulatedWorld(max(worlds)).run(
        lambda comm: fc.reshard_sharded_state_dict(
            held[comm.position], filled[comm.position], comm, aoa_config=config, optimizer_states="ignore"
        )
    )
    for shard, content in zip(layout, contents):
        if held[shard.rank][shard.key].local_tensor.tobytes() != content.tobytes():
            raise AssertionError(f"the source {shard} has changed")
    for states in (loaded, filled):
        for shard, before, wanted in zip(*target, expected):
            yield shard, states[shard.rank][shard.key].local_tensor.reshape(-1), before, wanted
