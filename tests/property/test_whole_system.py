"""The public functions in simulated worlds of 1 to 64 ranks: files, messages and memory are real.

A random state is saved under one random layout, loaded under another, and resharded in memory from the one to the
other. Every result is compared, bit by bit, with a numpy oracle, and so is every count of bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import Catalog, ValidationError, dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.native import read_planner
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.planning import readers
from paddle_flexckpt.planning.readers import cut_sections
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.property import examples
from tests.property.layouts import Pick, Shard, elements
from tests.ramdisk import memory_directory
from tests.saved import short

SAVE_COLLECTIVES, LOAD_COLLECTIVES, RESHARD_COLLECTIVES = 3, 2, 4
Layout = dict[int, dict[str, Shard]]  # by rank, by key


def random_state(pick: Pick, count: int, max_extent: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes; now and then a tensor without elements."""
    tensors = {}
    for i in range(count):
        shape = tuple(pick.integer(1, max_extent) for _ in range(pick.integer(0, 5)))
        if shape and pick.integer(0, 19) == 0:
            shape = (*shape[:-1], 0)
        tensors[pick.choice(("w{}", "层.{}", "a/b {}")).format(i)] = (pick.choice(tuple(DTYPES)), shape)
    return tensors


def bits(dtype: str, count: int, seed: int) -> np.ndarray:
    """Random bits of a dtype."""
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype_of(dtype).itemsize, dtype=np.uint8)
    return (raw % 2 if dtype == "bool" else raw).view(dtype_of(dtype).numpy)


def inverted(values: np.ndarray) -> np.ndarray:
    """Values that differ from the given ones in every element."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return (raw ^ (1 if values.dtype == bool else 255)).view(values.dtype).reshape(values.shape)


def parts_of(
    pick: Pick, shape: tuple[int, ...], most: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple | None]]:
    """At most ``most`` (offset, shape, flattened range) that tile a tensor: an uneven grid, cells cut flat or not."""
    cells = [((), ())]
    for extent in shape:
        count = pick.integer(1, max(1, min(extent, most // len(cells), 4)))
        edges = [0, *(pick.some(1, extent - 1, count - 1) if count > 1 else []), extent]
        cells = [((*o, low), (*s, high - low)) for o, s in cells for low, high in zip(edges[:-1], edges[1:])]
    kind = pick.choice(("boxes", "flattened", "mixed"))
    parts: list = []
    for number, (offset, box) in enumerate(cells):
        if kind == "boxes" or (kind == "mixed" and pick.integer(0, 1)):
            parts.append((offset, box, None))
            continue
        size, room = math.prod(box), most - len(parts) - (len(cells) - number - 1)
        edges = [0, *sorted(pick.integer(0, size) for _ in range(pick.integer(0, min(room - 1, 3)))), size]
        parts += [(offset, box, edge) for edge in zip(edges[:-1], edges[1:])]
    return parts


def random_layout(pick: Pick, tensors: dict, world: int, overlap: bool = False) -> Layout:
    """Every tensor on some of the ranks, each with one part of it at the most, all parts held."""
    layout: Layout = {rank: {} for rank in range(world)}
    for key, (dtype, shape) in tensors.items():
        ranks = pick.some(0, world - 1, pick.integer(1, world))
        if pick.integer(0, 3) == 0:
            ranks = list(range(world))
        parts = parts_of(pick, shape, len(ranks))
        # A turn of the ranks: who holds which part does not follow the ranks' order.
        turn = pick.integer(0, len(ranks) - 1)
        for i, rank in enumerate([*ranks[turn:], *ranks[:turn]]):
            if i >= len(parts) and pick.integer(0, 3) == 0:
                continue
            offset, box, flat = parts[i] if i < len(parts) else pick.choice(parts)
            if overlap and i >= len(parts) and 0 not in shape:
                offset = tuple(pick.integer(0, extent - 1) for extent in shape)
                box = tuple(pick.integer(1, extent - low) for low, extent in zip(offset, shape))
                flat = None
            layout[rank][key] = Shard(key, dtype, shape, offset, box, flat, rank)
    return layout


@dataclass(frozen=True)
class Held:
    """A live shard inside a larger memory.

    Attributes:
        weight: What the library gets.
        base: The memory around the shard.
        inside: Bool mask over ``base``: the shard's own elements.
    """

    weight: ShardedWeight
    base: np.ndarray
    inside: np.ndarray

    @classmethod
    def make(cls, shard: Shard, content: np.ndarray, strided: bool) -> Held:
        """A shard with the given elements (flat); strided where asked for and possible."""
        local = (shard.size,) if shard.flat is not None else shard.shape
        if strided and shard.flat is None and local:
            outer, window = tuple(extent + 2 for extent in local), (slice(1, -1),) * len(local)
        else:
            outer, window = (shard.size + 8,), (slice(4, 4 + shard.size),)
        base = bits(shard.dtype, math.prod(outer), 99).reshape(outer)
        inside = np.zeros(outer, dtype=bool)
        inside[window] = True
        tensor = base[window].reshape(local)
        tensor[...] = content.reshape(local)
        flat = None if shard.flat is None else slice(*shard.flat)
        weight = ShardedWeight(shard.key, tensor, shard.shape, shard.global_shape, shard.offset, flat is not None, flat)
        return cls(weight, base, inside)

    def around(self) -> bytes:
        return self.base[~self.inside].tobytes()

    def bytes(self) -> bytes:
        return self.weight.local_tensor.tobytes()


class Oracle:
    """The whole tensors, and what any shard of them has to hold."""

    def __init__(self, tensors: dict) -> None:
        self.values = {key: bits(d, math.prod(shape), i) for i, (key, (d, shape)) in enumerate(tensors.items())}

    def of(self, shard: Shard) -> np.ndarray:
        return self.values[shard.key][elements(shard)]

    def hold(self, pick: Pick, shards: dict[str, Shard], blank: bool = False) -> dict[str, Held]:
        """One rank's live state; blank: every element is something else than it should be."""
        held = {}
        for key, shard in shards.items():
            content = self.of(shard)
            held[key] = Held.make(shard, inverted(content) if blank else content, strided=pick.integer(0, 2) == 0)
        return held


def weights(held: dict[str, Held]) -> dict[str, ShardedWeight]:
    return {key: each.weight for key, each in held.items()}


def byte_count(shard: Shard) -> int:
    return shard.size * dtype_of(shard.dtype).itemsize


def has_overlaps(layout: Layout) -> bool:
    """Whether two shards that are not replicas of each other share elements."""
    counts: dict[str, np.ndarray] = {}
    for shard in {s.identity: s for shards in layout.values() for s in shards.values()}.values():
        count = counts.setdefault(shard.key, np.zeros(math.prod(shard.global_shape), dtype=np.int64))
        count[elements(shard)] += 1
    return any((count > 1).any() for count in counts.values())


def distinct_bytes(layout: Layout) -> int:
    return sum(map(byte_count, {s.identity: s for shards in layout.values() for s in shards.values()}.values()))


def without_some(pick: Pick, layout: Layout) -> Layout:
    """The layout of a load that wants only some of the shards."""
    if pick.integer(0, 1):
        return layout
    return {rank: {k: s for k, s in shards.items() if pick.integer(0, 3)} for rank, shards in layout.items()}


def lacking(shard: Shard, own: Shard | None) -> int:
    """Bytes of a shard that a rank which holds ``own`` of the same tensor does not have."""
    wanted = elements(shard)
    had = np.zeros(0, dtype=np.int64) if own is None else elements(own)
    return int((~np.isin(wanted, had)).sum()) * dtype_of(shard.dtype).itemsize


def check_targets(oracle: Oracle, layout: Layout, targets: dict[int, dict[str, Held]], before: dict) -> None:
    for rank, held in targets.items():
        for key, each in held.items():
            assert each.bytes() == oracle.of(layout[rank][key]).tobytes(), (rank, layout[rank][key])
            assert each.around() == before[rank, key], (rank, key)


def surroundings(targets: dict[int, dict[str, Held]]) -> dict[tuple[int, str], bytes]:
    return {(rank, key): each.around() for rank, held in targets.items() for key, each in held.items()}


def check_save(oracle: Oracle, pick: Pick, layout: Layout, path: Path) -> dict[int, dict[str, Held]]:
    held = {rank: oracle.hold(pick, shards) for rank, shards in layout.items()}

    def job(comm):
        return save_state_dict(weights(held[comm.position]), path, comm), comm.collectives

    reports, collectives = zip(*SimulatedWorld(len(layout)).run(job))
    assert set(collectives) == {SAVE_COLLECTIVES + has_overlaps(layout)}
    total = distinct_bytes(layout)
    assert {report.total_bytes for report in reports} == {total}
    assert sum(report.bytes_written for report in reports) == total
    assert {report.held_bytes for report in reports} == {
        sum(byte_count(s) for shards in layout.values() for s in shards.values())
    }
    for rank, state in held.items():
        for key, each in state.items():
            assert each.bytes() == oracle.of(layout[rank][key]).tobytes()
    return held


def check_load(oracle: Oracle, pick: Pick, layout: Layout, path: Path) -> dict[int, dict[str, Held]]:
    targets = {rank: oracle.hold(pick, shards, blank=True) for rank, shards in layout.items()}
    before = surroundings(targets)

    def job(comm):
        return load_state_dict(weights(targets[comm.position]), path, comm), comm.collectives

    reports, collectives = zip(*SimulatedWorld(len(layout)).run(job))
    check_targets(oracle, layout, targets, before)
    left = any(report.unexpected for report in reports)
    # Of a manifest in partitions ranks tell each other what they use, and name what nobody does.
    more = 2 + left if CheckpointDirectory(path).read_manifest(keys=()).partitions else 0
    assert set(collectives) == {LOAD_COLLECTIVES + more}
    for rank, report in enumerate(reports):
        needed = sum(map(byte_count, layout[rank].values()))
        assert report.bytes_read == report.bytes_needed == needed, rank
        assert report.bytes_verified >= needed
        assert (report.keys, report.missing) == (len(layout[rank]), [])
    everything = sum(report.bytes_read for report in reports)
    assert {report.total_bytes for report in reports} == {everything}
    asked = {key for shards in layout.values() for key in shards}
    assert {tuple(sorted(report.unexpected)) for report in reports} == {tuple(sorted(set(oracle.values) - asked))}
    return targets


def wanted_once(layout: Layout) -> int:
    """Bytes of all elements that some shard has."""
    wanted: dict[str, np.ndarray] = {}
    itemsize = {}
    for shard in (shard for shards in layout.values() for shard in shards.values()):
        wanted.setdefault(shard.key, np.zeros(math.prod(shard.global_shape), dtype=bool))[elements(shard)] = True
        itemsize[shard.key] = dtype_of(shard.dtype).itemsize
    return sum(int(mask.sum()) * itemsize[key] for key, mask in wanted.items())


def check_cooperative_load(oracle: Oracle, pick: Pick, source: Layout, layout: Layout, path: Path) -> None:
    """In sections of a few bytes, and rounds of few of them."""
    targets = {rank: oracle.hold(pick, shards, blank=True) for rank, shards in layout.items()}
    before, few = surroundings(targets), 16 * pick.integer(1, 9)

    def job(comm):
        report = load_state_dict(weights(targets[comm.position]), path, comm, comm_method="cooperative")
        return report, comm.collectives

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "MOST_SECTION_BYTES", few)
        patch.setattr(readers, "ROUND_BYTES", few * pick.integer(1, 4))
        patch.setattr(readers, "cut_sections", lambda *args: cut_sections(*args[:3], 16))
        reports, collectives = zip(*SimulatedWorld(len(layout)).run(job))
    check_targets(oracle, layout, targets, before)
    assert {report.comm_method for report in reports} == {"cooperative" if len(layout) > 1 else "direct"}
    assert set(collectives) == {LOAD_COLLECTIVES + (len(layout) > 1)}
    read, needed = (sum(getattr(report, name) for report in reports) for name in ("bytes_read", "bytes_needed"))
    # Less than all that ranks need; exactly what they need together, unless their shards overlap only in part.
    assert wanted_once(layout) <= read <= needed
    if read > wanted_once(layout):
        assert has_overlaps(layout) or has_overlaps(source)
    for rank, report in enumerate(reports):
        assert report.bytes_needed == sum(map(byte_count, layout[rank].values()))
        assert report.bytes_copied + report.bytes_received == report.bytes_needed or len(layout) == 1
    assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports)


def check_reshard(oracle: Oracle, pick: Pick, source: Layout, target: Layout) -> None:
    ranks = range(max(len(source), len(target)))
    source = {rank: source.get(rank, {}) for rank in ranks}
    target = {rank: target.get(rank, {}) for rank in ranks}
    held = {rank: oracle.hold(pick, shards) for rank, shards in source.items()}
    targets = {rank: oracle.hold(pick, shards, blank=True) for rank, shards in target.items()}
    before = surroundings(targets)

    def job(comm):
        rank = comm.position
        report = reshard_sharded_state_dict(weights(held[rank]), weights(targets[rank]), comm)
        return report, comm.collectives

    reports, collectives = zip(*SimulatedWorld(len(ranks)).run(job))
    check_targets(oracle, target, targets, before)
    assert set(collectives) == {RESHARD_COLLECTIVES + has_overlaps(source)}
    for rank, report in enumerate(reports):
        needed = sum(map(byte_count, target[rank].values()))
        lacked = sum(lacking(shard, source[rank].get(key)) for key, shard in target[rank].items())
        assert report.bytes_needed == needed, rank
        assert report.bytes_received == lacked, rank
        assert report.bytes_copied == needed - lacked, rank
        for key, shard in source[rank].items():
            assert held[rank][key].bytes() == oracle.of(shard).tobytes()
    assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports)
    assert {report.total_bytes for report in reports} == {sum(report.bytes_needed for report in reports)}


def check_whole_system(pick: Pick, count: int, worlds: tuple[int, int], max_extent: int, overlap: bool = False) -> None:
    tensors = random_state(pick, count, max_extent)
    oracle = Oracle(tensors)
    source = random_layout(pick, tensors, worlds[0], overlap)
    target = without_some(pick, random_layout(pick, tensors, worlds[1]))
    with memory_directory() as path:
        check_save(oracle, pick, source, path)
        check_load(oracle, pick, target, path)
        check_cooperative_load(oracle, pick, source, target, path)
    check_reshard(oracle, pick, source, target)


@examples(120)
@given(st.data())
def test_small_worlds(data):
    pick = Pick.from_draw(data.draw)
    check_whole_system(pick, pick.integer(1, 3), (pick.integer(1, 4), pick.integer(1, 4)), 5)


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 8))
def test_larger_states_in_worlds_of_up_to_eight(seed, world, other):
    check_whole_system(Pick.from_seed(seed), 8, (world, other), 9)


@examples(40)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 6))
def test_sources_that_overlap_and_agree(seed, world, other):
    check_whole_system(Pick.from_seed(seed), 4, (world, other), 6, overlap=True)


@pytest.mark.parametrize("min_pread", [1, 1 << 30], ids=["preads", "maps"])
@examples(15)
@given(st.integers(0, 2**32))
def test_both_ways_of_reading(min_pread, seed):
    pick = Pick.from_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
        check_whole_system(pick, 4, (pick.integer(1, 6), pick.integer(1, 6)), 7)


@examples(2)
@given(st.integers(0, 2**32), st.integers(33, 64), st.integers(1, 64))
def test_worlds_of_up_to_sixty_four_ranks(seed, world, other):
    check_whole_system(Pick.from_seed(seed), 6, (world, other), 12)


@pytest.mark.parametrize("worlds", [(64, 1), pytest.param((1, 64), marks=pytest.mark.slow)])
def test_a_world_of_sixty_four_becomes_one_rank_and_comes_back(worlds):
    check_whole_system(Pick.from_seed(65), 6, worlds, 12)


def data_files(path: Path) -> dict[str, bytes]:
    """The data files, with the random token of the save taken out."""
    return {
        short(file.name): re.sub(rb'"save_token":"[0-9a-f]{32}"', b"", file.read_bytes())
        for file in sorted(path.glob("*.safetensors"))
    }


@examples(40)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_saving_what_was_loaded_writes_the_same_bytes(seed, world):
    pick = Pick.from_seed(seed)
    tensors = random_state(pick, 6, 8)
    oracle, layout = Oracle(tensors), random_layout(pick, tensors, world)
    with memory_directory() as path:
        check_save(oracle, pick, layout, path / "a")
        targets = check_load(oracle, pick, layout, path / "a")
        SimulatedWorld(world).run(lambda comm: save_state_dict(weights(targets[comm.position]), path / "b", comm))
        assert data_files(path / "a") == data_files(path / "b")
        first, second = (CheckpointDirectory(path / name).read_manifest() for name in "ab")
    for column in Catalog.COLUMNS:
        assert (getattr(first.catalog, column) == getattr(second.catalog, column)).all()
    assert first.catalog.keys == second.catalog.keys
    assert (first.checksums.values == second.checksums.values).all()


WAYS = ("direct", "cooperative", "memory")
FAULTS = ("dtype", "global shape", "missing key", "not a tensor", "outside")


def faulty(weight: ShardedWeight, fault: str) -> dict[str, object]:
    """A rank's target that no source can fill, in place of a good one."""
    tensor, key = weight.local_tensor, weight.key
    box = (weight.local_shape, weight.global_shape, weight.global_offset, weight.is_flattened, weight.flattened_range)
    if fault == "dtype":
        other = "float32" if tensor.dtype != np.float32 else "int32"
        return {key: ShardedWeight(key, np.zeros(tensor.shape, dtype=other), *box)}
    if fault == "global shape":
        return {key: ShardedWeight(key, tensor, box[0], (*box[1][:-1], box[1][-1] + 1), *box[2:])}
    if fault == "missing key":
        return {key: weight, "nowhere": weight}
    if fault == "not a tensor":
        return {key: weight, "lr": 0.1}
    return {key: ShardedWeight(key, tensor, box[0], box[1], tuple(n + 1 for n in box[1]), *box[3:])}


@examples(40)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from(FAULTS), st.sampled_from(WAYS))
def test_one_ranks_fault_is_every_ranks_error_and_no_target_changes(seed, world, fault, way):
    pick = Pick.from_seed(seed)
    tensors = {"first": ("float32", (7, 5)), "second": ("bfloat16", (6, 4)), "third": ("int64", (9,))}
    oracle = Oracle(tensors)
    source, target = random_layout(pick, tensors, world), random_layout(pick, tensors, world)
    culprit = pick.choice([rank for rank, shards in target.items() if shards])
    held = {rank: oracle.hold(pick, shards) for rank, shards in source.items()}
    targets = {rank: oracle.hold(pick, shards, blank=True) for rank, shards in target.items()}
    states = {rank: weights(state) for rank, state in targets.items()}
    key = pick.choice(sorted(states[culprit]))
    states[culprit] = {**states[culprit], **faulty(states[culprit][key], fault)}

    with memory_directory() as path:
        SimulatedWorld(world).run(lambda comm: save_state_dict(weights(held[comm.position]), path, comm))

        def job(comm):
            if way != "memory":
                return load_state_dict(states[comm.position], path, comm, comm_method=way)
            return reshard_sharded_state_dict(weights(held[comm.position]), states[comm.position], comm)

        outcomes = SimulatedWorld(world).run_all(job)
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert len({id(outcome) for outcome in outcomes}) == world, "a rank was left waiting"
    assert f"[rank {culprit}]" in str(outcomes[0])
    names = {"missing key": "nowhere", "not a tensor": "lr"}
    assert names.get(fault, key) in str(outcomes[0])
    for rank, state in targets.items():
        for name, each in state.items():
            assert each.bytes() == inverted(oracle.of(target[rank][name])).tobytes()


@examples(40)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_part_that_nobody_holds_is_an_error_and_nothing_is_written(seed, world):
    pick = Pick.from_seed(seed)
    tensors = {"first": ("float32", (7, 5)), "second": ("bfloat16", (6, 4))}
    oracle, layout = Oracle(tensors), random_layout(pick, tensors, world)
    victim = pick.choice([s for shards in layout.values() for s in shards.values() if s.size])
    holed = {
        rank: {key: s for key, s in shards.items() if s.identity != victim.identity} for rank, shards in layout.items()
    }
    if not any(victim.key in shards for shards in holed.values()):
        half = replace(victim, flat=(0, victim.size // 2))  # the key would only be absent, which is no error
        holed[victim.rank][victim.key] = (
            half if victim.flat is None else replace(victim, flat=(victim.flat[0], victim.flat[1] - 1))
        )
    held = {rank: oracle.hold(pick, shards) for rank, shards in holed.items()}
    with memory_directory() as path:
        outcomes = SimulatedWorld(world).run_all(lambda comm: save_state_dict(weights(held[comm.position]), path, comm))
        assert list(path.iterdir()) == []
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "no rank holds" in str(outcomes[0])
    assert repr(victim.key) in str(outcomes[0])
