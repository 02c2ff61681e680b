"""Mappings carried out between random layouts, from files and in memory, against whole arrays in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt import aoa
from paddle_flexckpt.aoa.statements import read_config
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.native import read_planner
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import plan
from tests.property import examples
from tests.property.layouts import Pick, Shard, tensor_layout
from tests.property.mappings import random_program, random_values
from tests.ramdisk import memory_directory

CONFIG = {"aoa_statements": ["some statements"]}
LOAD_COLLECTIVES, RESHARD_COLLECTIVES = 3, 5  # one more than without statements
KEPT = -77.0


class World:
    """A program, its sources and targets on the ranks of a world."""

    def __init__(self, pick: Pick, world: int, computed: bool = True) -> None:
        self.size = world
        self.program = random_program(pick, pick.integer(1, 3), computed=computed, keep=True)
        self.program.sources["plain"] = ("float32", pick.shape(3, 4))
        self.values = {
            key: random_values(dtype, shape, seed)
            for seed, (key, (dtype, shape)) in enumerate(self.program.sources.items())
        }
        wanted = {f"t{i}": None for i in range(3) if f"t{i}" in self.program.tensors}
        self.targets = {name: (self.program.tensors[name].dtype, self.program.tensors[name].shape) for name in wanted}
        self.targets["plain"] = self.program.sources["plain"]
        self.source = self.layout(pick, self.program.sources)
        self.target = self.layout(pick, self.targets)

    def layout(self, pick: Pick, tensors: dict) -> list[dict[str, Shard]]:
        """At most one shard of a key on a rank, all parts held."""
        ranks: list[dict[str, Shard]] = [{} for _ in range(self.size)]
        for key, (dtype, shape) in tensors.items():
            shards = tensor_layout(pick, key, dtype, shape, self.size)
            # A rank cannot hold two shards of one name: then rank 0 has it whole, and some others too.
            if len({s.rank for s in shards}) < len(shards):
                holders = {0, pick.integer(0, self.size - 1)}
                shards = [Shard(key, dtype, shape, (0,) * len(shape), shape, None, rank) for rank in holders]
                if pick.integer(0, 1) and shape and shape[0] >= self.size:
                    edges = [shape[0] * rank // self.size for rank in range(self.size + 1)]
                    shards = [
                        Shard(key, dtype, shape, (a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:]), None, rank)
                        for rank, (a, b) in enumerate(zip(edges[:-1], edges[1:]))
                    ]
                elif pick.integer(0, 1) and shards[0].size >= self.size:
                    edges = [shards[0].size * rank // self.size for rank in range(self.size + 1)]
                    shards = [
                        Shard(key, dtype, shape, (0,) * len(shape), shape, edge, rank)
                        for rank, edge in enumerate(zip(edges[:-1], edges[1:]))
                    ]
            for shard in shards:
                ranks[shard.rank][key] = shard
        return ranks

    def sources(self, rank: int) -> dict[str, ShardedWeight]:
        return {key: weight(shard, shard.of(self.values[key])) for key, shard in self.source[rank].items()}

    def blank(self, rank: int) -> dict[str, ShardedWeight]:
        return {
            key: weight(shard, np.full(shard.size, KEPT).astype(random_values(shard.dtype, (), 0).dtype))
            for key, shard in self.target[rank].items()
        }

    def whole(self, key: str) -> np.ndarray:
        if key == "plain":
            return self.values[key]
        dtype = random_values(self.targets[key][0], (), 0).dtype
        return self.program.value(key, self.values, np.full(self.targets[key][1], KEPT).astype(dtype))

    def costs(self, rank: int, lacking: bool) -> int:
        """Bytes that a rank's targets need, or need and lack."""
        held = None
        if lacking:
            held = {key: np.zeros(value.shape, dtype=bool) for key, value in self.values.items()}
            for key, shard in self.source[rank].items():
                ids = shard.of(np.arange(held[key].size).reshape(held[key].shape))
                held[key].reshape(-1)[ids] = True
        total = 0
        for key, shard in self.target[rank].items():
            if key == "plain":
                costs = 4 * (np.ones(shard.global_shape, dtype=int) if held is None else ~held[key])
            else:
                costs = self.program.costs(key, held)
            total += int(shard.of(costs).sum())
        return total

    def check_targets(self, rank: int, targets: dict[str, ShardedWeight]) -> None:
        for key, shard in self.target[rank].items():
            got, expected = targets[key].local_tensor, shard.of(self.whole(key))
            assert got.dtype == expected.dtype
            assert got.tobytes() == expected.tobytes(), (rank, shard)

    def check(self) -> None:
        mapping = self.program.mapping()
        calls = []

        def compile_program(config, source, target, *, master_weights, completion):
            calls.append((config, set(source.keys), None if target is None else set(target.keys), len(target)))
            return mapping

        with pytest.MonkeyPatch.context() as patch, memory_directory() as path:
            patch.setattr(aoa, "compile_program", compile_program, raising=False)
            SimulatedWorld(self.size).run(lambda comm: save_state_dict(self.sources(comm.position), path, comm))
            self.check_load(path)
            self.check_reshard()
        shards = sum(len(held) for held in self.target)
        # On every rank, with the targets of all of them.
        assert calls == [(read_config(CONFIG), set(self.values), set(self.targets), shards)] * (2 * self.size)

    def check_load(self, path) -> None:
        def job(comm):
            targets = self.blank(comm.position)
            report = load_state_dict(targets, path, comm, aoa_config=CONFIG)
            self.check_targets(comm.position, targets)
            return report, comm.collectives

        reports, collectives = zip(*SimulatedWorld(self.size).run(job))
        assert set(collectives) == {LOAD_COLLECTIVES}
        for rank, report in enumerate(reports):
            assert report.bytes_read == report.bytes_needed == self.costs(rank, lacking=False)
            self.check_report(rank, report)

    def check_reshard(self) -> None:
        def job(comm):
            targets = self.blank(comm.position)
            report = reshard_sharded_state_dict(self.sources(comm.position), targets, comm, aoa_config=CONFIG)
            self.check_targets(comm.position, targets)
            return report, comm.collectives

        reports, collectives = zip(*SimulatedWorld(self.size).run(job))
        assert set(collectives) == {RESHARD_COLLECTIVES}
        for rank, report in enumerate(reports):
            needed, lacked = self.costs(rank, lacking=False), self.costs(rank, lacking=True)
            # What two targets want is received once: it can be less than every target by itself lacks.
            assert report.bytes_needed == needed
            assert report.bytes_received <= lacked
            assert report.bytes_copied == needed - report.bytes_received
            self.check_report(rank, report)
        assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports)

    def check_report(self, rank: int, report) -> None:
        kept, computed = [], []
        for key, shard in self.target[rank].items():
            for region in self.program.regions.get(key, ()):
                mask = np.zeros(shard.global_shape, dtype=bool)
                mask[tuple(slice(o, o + s) for o, s in zip(region.offset, region.shape))] = True
                if shard.of(mask).any():
                    (kept if region.node is None else computed).append(key)
        assert report.kept == sorted(set(kept))
        assert report.computed == sorted(set(computed))
        assert (report.missing, report.cast) == ([], {})


def weight(shard: Shard, content: np.ndarray) -> ShardedWeight:
    tensor = content.copy() if shard.flat is not None else content.copy().reshape(shard.shape)
    return ShardedWeight(
        shard.key,
        tensor,
        shard.shape,
        shard.global_shape,
        shard.offset,
        shard.flat is not None,
        None if shard.flat is None else slice(*shard.flat),
    )


@examples(60)
@given(st.data())
def test_small_worlds(data):
    pick = Pick.from_draw(data.draw)
    World(pick, pick.integer(1, 3)).check()


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_random_worlds(seed, size):
    World(Pick.from_seed(seed), size).check()


@pytest.mark.parametrize("limit", [1, 3, 8])
@examples(15)
@given(st.integers(0, 2**32))
def test_tiles_of_any_size_give_the_same_bits(limit, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "TILE_ELEMENTS", limit)
        World(Pick.from_seed(seed), 3).check()


@pytest.mark.parametrize("min_pread", [1, 1 << 30], ids=["preads", "maps"])
@examples(20)
@given(st.integers(0, 2**32))
def test_both_ways_of_reading(min_pread, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
        World(Pick.from_seed(seed), 4).check()
