"""Cached plans: a layout that comes again is not planned again, and every change of it is noticed on all ranks."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import re
import shutil
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.errors import CheckpointError
from paddle_flexckpt.communication.group_communicators import communicator_for, plans_of
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving import planners, saver
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import plan_cache
from paddle_flexckpt.transfer.plan_cache import PlanCache
from tests.ramdisk import memory_directory

ROWS = 8  # of each rank


def build(rank: int, size: int, seed: int = 0) -> dict[str, ShardedWeight | np.ndarray]:
    """One rank's shards: boxes, flattened ranges, replicas, a fused parameter and a state of it, running statistics."""
    values = np.random.default_rng((seed, rank)).random((ROWS, 6), dtype=np.float32)
    same = np.random.default_rng(seed).random((6, 4), dtype=np.float32)
    whole, offset = (ROWS * size, 6), (ROWS * rank, 0)
    wide = np.random.default_rng((seed, rank, 1)).random((4, 6), dtype=np.float32)

    def fused(key: str) -> ShardedWeight:
        return ShardedWeight(key, wide + len(key), (4, 6), (4, 6 * size), (0, 6 * rank), fused=FusedAxis(1, None))

    start, stop = (ROWS * 6 * each // size for each in (rank, rank + 1))
    flat = np.arange(start, stop, dtype=np.float64) + seed
    return {
        "w": ShardedWeight("w", values, (ROWS, 6), whole, offset),
        "v": ShardedWeight("v", values + 1, (ROWS, 6), whole, offset),
        "f": ShardedWeight("f", flat, (ROWS, 6), (ROWS, 6), (0, 0), True, slice(start, stop)),
        "q": fused("q"),
        "q.moment1_0": fused("q.moment1_0"),
        "p": ShardedWeight("p", wide, (4, 6), (4 * size, 6), (4 * rank, 0), fused=FusedAxis(0, None)),
        "p.moment1_0": ShardedWeight(
            "p.moment1_0", wide.copy(), (4, 6), (4 * size, 6), (4 * rank, 0), fused=FusedAxis(0, None)
        ),
        "r": ShardedWeight("r", same.copy(), (6, 4), (6, 4), (0, 0)),
        "mean": ShardedWeight("mean", same[0] * 2, (4,), (4,), (0,), replicas="first"),
        "t": ShardedWeight("t", same.reshape(2, 3, 4).copy(), (2, 3, 4), (2, 3, 4), (0, 0, 0)),
        "plain": same + 5,
    }


def added(state, rank, size):
    state["u"] = np.arange(3.0)


def removed(state, rank, size):
    del state["w"]


def renamed(state, rank, size):
    state["x"] = state.pop("w")


def renamed_in_place(state, rank, size):
    entries = [("x" if key == "w" else key, value) for key, value in state.items()]
    state.clear()
    state.update(entries)


def nested(state, rank, size):
    state["deep"] = {"er": state.pop("r")}


def reordered(state, rank, size):
    state["w"] = state.pop("w")


def other_dtype(state, rank, size):
    state["w"].local_tensor = state["w"].local_tensor.view(np.int32)


def dtype_of_another(state, rank, size):
    """One that other tensors have."""
    state["v"].local_tensor = state["v"].local_tensor.astype(np.float64)


def dtype_of_none(state, rank, size):
    """In place of one that only this tensor has."""
    state["f"].local_tensor = state["f"].local_tensor.astype(np.int64)


def other_width(state, rank, size):
    state["r"].local_tensor = state["r"].local_tensor.astype(np.float16)


def other_global_shape(state, rank, size):
    state["v"].global_shape = (ROWS * size + 1, 6)


def other_offset(state, rank, size):
    state["w"].global_offset = (ROWS * (size - 1 - rank), 0)


def hole(state, rank, size):
    state["w"].global_offset = (ROWS * rank + 1, 0)


def other_box(state, rank, size):
    shard = state["w"]
    shard.local_shape, shard.global_shape = (6, ROWS), (6, ROWS * size)
    shard.global_offset = (0, ROWS * rank)
    shard.local_tensor = shard.local_tensor.reshape(6, ROWS)


def more_axes(state, rank, size):
    shard = state["w"]
    shard.local_shape, shard.global_shape, shard.global_offset = (1, ROWS, 6), (1, ROWS * size, 6), (0, ROWS * rank, 0)
    shard.local_tensor = shard.local_tensor.reshape(1, ROWS, 6)


def other_local_shape(state, rank, size):
    state["v"].local_tensor = state["v"].local_tensor[:-1].copy()


def other_rows(state, rank, size):
    """Ranks divide the rows anew: the first has one more, and the last one fewer."""
    if size == 1:
        return
    begin, end = ROWS * rank + (rank > 0), ROWS * (rank + 1) + (rank < size - 1)
    values = np.arange((end - begin) * 6, dtype=np.float32).reshape(-1, 6)
    state["w"] = ShardedWeight("w", values, values.shape, (ROWS * size, 6), (begin, 0))


def other_flattened_range(state, rank, size):
    """The same for the flattened shard."""
    if size == 1:
        return
    start, stop = (ROWS * 6 * each // size for each in (rank, rank + 1))
    start, stop = start + (rank > 0), stop + (rank < size - 1)
    flat = np.arange(start, stop, dtype=np.float64)
    state["f"] = ShardedWeight("f", flat, (ROWS, 6), (ROWS, 6), (0, 0), True, slice(start, stop))


def not_flattened(state, rank, size):
    shard = state["f"]
    shard.is_flattened, shard.flattened_range = False, None
    shard.local_tensor = np.arange(ROWS * 6, dtype=np.float64).reshape(ROWS, 6)


def gap_in_flattened(state, rank, size):
    shard = state["f"]
    shard.flattened_range = slice(shard.flattened_range.start, shard.flattened_range.stop - 1)
    shard.local_tensor = shard.local_tensor[:-1].copy()


def gap_before_flattened(state, rank, size):
    shard = state["f"]
    shard.flattened_range = slice(shard.flattened_range.start + 1, shard.flattened_range.stop)
    shard.local_tensor = shard.local_tensor[1:].copy()


def shorter(state, rank, size):
    shard = state["v"]
    shard.local_shape, shard.local_tensor = (ROWS - 1, 6), shard.local_tensor[:-1].copy()


def replica_policy(state, rank, size):
    state["r"].replicas = "first"
    state["r"].local_tensor = state["r"].local_tensor + rank


def no_replica_policy(state, rank, size):
    state["mean"].replicas = None


def close_replicas(state, rank, size):
    state["r"].replicas = "close"
    state["r"].local_tensor = state["r"].local_tensor + rank


def replicas_differ(state, rank, size):
    state["plain"] = state["plain"] + rank


def other_rule(state, rank, size):
    state["q"].fused = FusedAxis(1, "fused_ffn")


def other_axis(state, rank, size):
    state["q"].fused = FusedAxis(0, None)


def no_rule(state, rank, size):
    state["q"].fused = None


def no_rule_of_a_state(state, rank, size):
    """Its elements are in its parameter's order all the same, but it may be split."""
    state["p.moment1_0"].fused = None


def other_parts(state, rank, size):
    state["q"].fused = FusedAxis(1, None, 1)


def indivisible(state, rank, size):
    """A shard that has to be written whole by one rank."""
    state["r"].fused = FusedAxis(0, None, 1)


def no_tensor(state, rank, size):
    state["plain"] = "five"


def ours(state, rank, size):
    state["extra_state.mine"] = np.zeros(1)


# What changes nothing but values and memory: cached plans serve.
def swapped(state, rank, size):
    state["w"], state["v"] = state["v"], state["w"]


def other_memory(state, rank, size):
    state["w"].local_tensor = state["w"].local_tensor.copy() + 3


def other_strides(state, rank, size):
    for key in ("w", "plain"):
        value = state[key]
        tensor = value if key == "plain" else value.local_tensor
        apart = np.zeros((*tensor.shape, 2), tensor.dtype)
        apart[..., 0] = tensor
        state[key] = apart[..., 0]
        if key == "w":
            value.local_tensor, state[key] = state[key], value


def other_fortran(state, rank, size):
    state["w"].local_tensor = np.asfortranarray(state["w"].local_tensor)


LAYOUTS = [added, removed, renamed, renamed_in_place, nested, reordered, other_dtype, dtype_of_another,
           dtype_of_none, other_width, other_global_shape, other_offset, hole, other_box, more_axes,
           other_local_shape, other_rows, other_flattened_range, not_flattened, gap_in_flattened,
           gap_before_flattened, shorter, replica_policy, no_replica_policy, close_replicas,
           replicas_differ, other_rule, other_axis, no_rule, no_rule_of_a_state, other_parts,
           indivisible, no_tensor, ours]  # fmt: skip
VALUES = [swapped, other_memory, other_strides, other_fortran]
MOVED = [other_offset, other_rows, other_flattened_range, other_parts, replicas_differ, {"coordinator_rank": -1}]
OPTIONS = [
    {"save_replicas": True},
    {"check_replicas": False},
    {"check_replicas": "first"},
    {"check_replicas": "close"},
    {"check_replicas": {"r": "first", "*": "equal"}},
    {"check_replicas": {"r*": "nonsense"}},
    {"coordinator_rank": -1},
    {"coordinator_rank": 17},
    {"unique_id": 7},
    {"unique_id": 1 << 70},
    {"unique_id": -1},
    {"step": 5},
    {"storage": "per_node"},
    {"storage": "per_node", "node_copies": 2},
]


@pytest.fixture
def one_token(monkeypatch):
    """The first saves of all directories have one token, so that the same save gives the same files."""
    monkeypatch.setattr(os, "urandom", lambda count: b"\x5a" * count)


@pytest.fixture
def planned(monkeypatch) -> list[int]:
    """The ranks that plan a save, each as often as it does."""
    ranks, plan = [], saver.Save.plan

    def counted(self, *arguments):
        ranks.append(self._comm.rank)
        return plan(self, *arguments)

    monkeypatch.setattr(saver.Save, "plan", counted)
    return ranks


def sent_by(comm) -> list[int]:
    """The sizes of what a rank tells all others from now on."""
    sizes, gather, trade = [], comm.all_gather, comm.all_to_all

    def all_gather(payload):
        sizes.append(len(payload))
        return gather(payload)

    def all_to_all(note, payloads):
        sizes.append(len(note))
        return trade(note, payloads)

    comm.all_gather, comm.all_to_all = all_gather, all_to_all
    return sizes


def files_of(directory: Path) -> dict[str, object]:
    """All files of a directory; a manifest's metadata stand in no order."""

    def content(path: Path) -> object:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        return (json.loads(data[8 : 8 + length]), data[8 + length :]) if path.suffix == ".manifest" else data

    return {path.name: content(path) for path in sorted(directory.iterdir())}


def outcome_of(state, path, comm, **options) -> object:
    """What a save returns or raises, without times and the path."""
    try:
        report = asdict(save_state_dict(state, path, comm, **options))
    except CheckpointError as error:
        return type(error), str(error).replace(str(path), "")
    assert report.pop("path") == str(path)
    del report["seconds"], report["rank_seconds"]
    return report


def barrier(comm) -> None:
    comm.all_gather(b"")


def nothing(state, rank, size):
    pass


# Each size, and whose change it is, once in CI.
IN_CI = {(1, "all", 0), (2, "all", 0), (4, "one", 0)}
CASES = [(size, who, seed) for size in (1, 2, 4) for who in ("all", "one") for seed in (0, 1, 2)]


@pytest.mark.parametrize(
    ("size", "who", "seed"), [pytest.param(*each, marks=() if each in IN_CI else pytest.mark.slow) for each in CASES]
)
def test_every_change_is_noticed_and_the_outcome_is_that_of_a_first_save(one_token, planned, size, who, seed):
    """One field after the other is changed, on all ranks or on the last; and then all is as it was before."""
    # Two coordinators lock the directory in no order; and one rank alone has all rows, whatever is moved.
    inapplicable = {"one": [{"coordinator_rank": -1}], "all": []}[who] if size > 1 else MOVED
    changes = [change for change in (*LAYOUTS, *VALUES, *OPTIONS) if change not in inapplicable]
    random.Random(f"{seed} {size} {who}").shuffle(changes)

    def job(comm, path):
        sizes, kept, reused = sent_by(comm), plans_of(comm), []
        changes_here = who == "all" or comm.position == size - 1

        def saved(number, change, plans) -> tuple[object, object, list[int]]:
            """What comes of a save with the plans there are, its files, its messages' sizes and how often it plans."""
            comm.plans, state, options = plans, build(comm.position, size, number), {}
            if changes_here and callable(change):
                change(state, comm.position, size)
            elif changes_here:
                options = change if change.get("coordinator_rank") != -1 else {"coordinator_rank": size - 1}
            sizes.clear()
            count = planned.count(comm.rank)
            outcome = outcome_of(state, path, comm, **options)
            sent = [*sizes, planned.count(comm.rank) - count]
            barrier(comm)
            files = files_of(path) if path.exists() else None
            barrier(comm)
            if comm.position == 0:
                shutil.rmtree(path, ignore_errors=True)
            barrier(comm)
            return outcome, files, sent

        for number, change in enumerate(changes):
            saved(number, nothing, kept)
            before = saved(number, nothing, kept)
            assert before[2][0] <= 64
            assert before[2][-1] == 0
            with_plans, twice = saved(number, change, kept), saved(number, change, kept)
            first = saved(number, change, PlanCache())
            if change is replicas_differ and size > 2:  # which two ranks find it is another pair in each turn
                with_plans, twice, first = ((each[0][0], *each[1:]) for each in (with_plans, twice, first))
            assert with_plans[:2] == first[:2] == twice[:2], change
            # How many digests a rank sends is another number in each turn.
            if with_plans[2][0] == before[2][0] and len(with_plans[2]) == len(before[2]) and not with_plans[2][-1]:
                reused.append(change)
        return reused

    with memory_directory() as directory:
        reused = SimulatedWorld(size).run(lambda comm: job(comm, directory / "saved"))[0]
    # Ranks disagree about an option that one of them alone has.
    expected = [*VALUES, *([{"step": 5}, {"unique_id": 7}] if who == "all" or size == 1 else [])]
    assert sorted(map(repr, reused)) == sorted(map(repr, expected))


def test_one_short_message_takes_the_place_of_gathering_and_planning(planned):
    def job(comm, path):
        sizes, counts = sent_by(comm), []
        for seed in range(3):
            sizes.clear()
            save_state_dict(build(comm.position, comm.size, seed), path, comm, step=seed)
            counts.append([*sizes])
        return counts

    for size in (1, 2, 4):
        planned.clear()
        with memory_directory() as directory:
            of_rank = SimulatedWorld(size).run(lambda comm: job(comm, directory))
        for first, *later in of_rank:
            assert first[0] > 64
            for sizes in later:
                assert sizes[0] == 60
                assert len(sizes) == 3
                assert sizes[2] == first[2]  # "committed"
        # "All wrote", with digests of replicas, by other ranks in each turn.
        assert len({sum(sizes[number][1] for sizes in of_rank) for number in range(3)}) == 1
        assert sorted(planned) == list(range(size))


@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_takes_one_collective_more(planned, changed):
    def job(comm, path):
        sizes = sent_by(comm)
        state = build(comm.position, 2)
        save_state_dict(state, path, comm)
        if comm.rank == changed:
            state["v"].replicas = "first"
        sizes.clear()
        save_state_dict(state, path, comm)
        return sizes

    with memory_directory() as directory:
        of_rank = SimulatedWorld(2).run(lambda comm: job(comm, directory))
    other = of_rank[1 - changed]
    assert [len(sizes) for sizes in of_rank] == [4, 4]
    assert other[0] == 60
    assert other[1] > 500  # what it would have said first
    assert of_rank[changed][0] > 500
    assert of_rank[changed][1] == 1
    assert sorted(planned) == [0, 0, 1, 1]


def test_ranks_that_were_told_of_different_layouts_do_not_mix_their_plans(one_token, planned):
    """A rank has a plan for its layout, but of a time when the other's was another."""

    def job(comm, path):
        for version, name in enumerate("abaab"):
            state = build(comm.position, 2, version)
            if comm.rank == 1 and name == "b":
                state["w"].replicas = "first"
            save_state_dict(state, path / "kept", comm, unique_id=version)
            comm.plans, kept = PlanCache(), plans_of(comm)
            save_state_dict(state, path / "first", comm, unique_id=version)
            comm.plans = kept
            barrier(comm)
        return files_of(path / "kept") == files_of(path / "first")

    with memory_directory() as directory:
        assert SimulatedWorld(2).run(lambda comm: job(comm, directory)) == [True, True]
    # Rank 0 keeps the plan of the last time, rank 1 one for each of its layouts: the fourth save alone reuses one.
    assert planned.count(0) == 4 + 5


def test_other_ranks_and_groups_have_plans_of_their_own(planned):
    """The plans of one group, in the hands of another: of other ranks, of more, and of fewer."""
    plans = [PlanCache() for _ in range(4)]

    def job(comm, path):
        comm.plans = plans[comm.position]
        return [key for key in save_state_dict(build(0, 1), path, comm).replicas]

    with memory_directory() as directory:
        for number, ranks in enumerate([(0, 1), (0, 1), (2, 5), (1, 0), (0,), (0, 1, 2), (2, 5)]):
            planned.clear()
            SimulatedWorld(len(ranks)).run(lambda comm, at=directory / f"{number}": job(comm, at), ranks)
            assert sorted(planned) == ([] if number in (1, 6) else sorted(ranks))


def test_a_call_of_another_kind_is_told_as_ever(tmp_path):
    def job(comm, warm):
        state = build(comm.position, 2)
        for _ in range(warm):
            save_state_dict(state, tmp_path / f"{warm}", comm)
        with pytest.raises(ValidationError) as caught:
            if comm.rank == 1:
                load_state_dict(state, tmp_path / "0", comm)
            else:
                save_state_dict(state, tmp_path / "other", comm)
        return str(caught.value)

    world = SimulatedWorld(2)
    world.run(lambda comm: save_state_dict(build(comm.position, 2), tmp_path / "0", comm))
    first, kept = (world.run(lambda comm, warm=warm: job(comm, warm)) for warm in (0, 2))
    assert first == kept
    assert "ranks do not make the same call: rank 0: save_state_dict; rank 1: load_state_dict" in first[0]


def test_an_error_of_one_rank_is_that_of_a_first_save(tmp_path):
    def job(comm, warm):
        state = build(comm.position, 2)
        for _ in range(warm):
            save_state_dict(state, tmp_path / f"{warm}", comm)
        if comm.rank == 1:
            state["w"].local_tensor = None
        with pytest.raises(ValidationError) as caught:
            save_state_dict(state, tmp_path / "other", comm)
        barrier(comm)
        assert not files_of(tmp_path / "other")
        return str(caught.value)

    first, kept = (SimulatedWorld(2).run(lambda comm, warm=warm: job(comm, warm)) for warm in (0, 2))
    assert first == kept
    assert "rank 1" in first[0]


def test_directories_that_ranks_do_not_share_are_refused_as_ever(tmp_path):
    def job(comm, warm):
        state = build(comm.position, 2)
        for _ in range(warm):
            save_state_dict(state, tmp_path / f"{warm}", comm)
        with pytest.raises(ValidationError, match="ranks do not share one directory") as caught:
            save_state_dict(state, tmp_path / f"of {comm.rank}", comm)
        return re.sub("-[0-9a-f]{32}", "", str(caught.value))  # the token of the save

    first, kept = (SimulatedWorld(2).run(lambda comm, warm=warm: job(comm, warm)) for warm in (0, 2))
    assert first == kept


def test_tensors_are_not_kept_alive(tmp_path):
    comm, state = SoloCommunicator(), build(0, 1)
    seen = [weakref.ref(getattr(value, "local_tensor", value)) for value in state.values()]
    save_state_dict(state, tmp_path, comm)
    del state
    gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)


def test_calls_of_one_process_share_their_plans(tmp_path, planned):
    kinds = (None, "self", None)
    plans = {id(plans_of(communicator_for(kind))) for kind in kinds}
    assert len(plans) == 1
    for kind in kinds:
        save_state_dict({"alone": np.arange(5.0), "here": np.zeros(2)}, tmp_path, kind)
    assert planned == [0]


def test_the_plans_that_are_kept_are_few_and_small():
    def plan(nbytes):
        return SimpleNamespace(fingerprint=b"", nbytes=nbytes)

    plans = PlanCache()
    for number in range(10):
        plans.put(bytes([number]), plan(10))
    found = [number for number in range(10) if plans.find(bytes([number]))]
    assert found == [6, 7, 8, 9]
    plans.find(bytes([6]))
    plans.put(b"new", plan(10))
    assert plans.find(bytes([6])) is not None
    assert plans.find(bytes([7])) is None
    plans.put(b"large", plan(plan_cache.MOST_BYTES - 15))
    assert [plans.find(name) is not None for name in (bytes([6]), b"new", b"large")] == [True, False, True]
    plans.put(b"large", plan(plan_cache.MOST_BYTES + 1))
    assert plans.find(b"large") is None


def test_the_bytes_of_a_kept_plan_are_those_of_its_columns(monkeypatch):
    comm, kept = SoloCommunicator(), []
    monkeypatch.setattr(plans_of(comm), "put", lambda *arguments: kept.append(arguments))
    state = {f"layer.{number}": np.zeros(2) for number in range(1000)}
    with memory_directory() as directory:
        save_state_dict(state, directory, comm)
    ((_, plan),) = kept
    assert len(pickle.dumps(plan)) * 0.7 < plan.nbytes < 600 * len(state)


def test_a_tensor_more_costs_a_few_calls(tmp_path):
    """Of a save by a cached plan, until data moves."""

    def calls(count: int) -> int:
        comm, seen = SoloCommunicator(), 0
        state = {f"layer.{number}": np.full(3, number) for number in range(count)}
        save_state_dict(state, tmp_path / f"{count}", comm)
        save = saver.Save(state, tmp_path / f"{count}", comm, SaveOptions(unique_id=0))

        def profile(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        sys.setprofile(profile)
        try:
            plan, answers = plan_cache.find_common_plan(comm, plans_of(comm), save, "")
            save.agree(plan, answers)
            save.share(plan)
        finally:
            sys.setprofile(None)
            save.destination.discard()
            save._stack.close()
        return seen

    assert (calls(600) - calls(200)) / 400 <= 0.1


@pytest.mark.parametrize("is_spread", [False, True])
def test_pairs_of_replicas_turn_with_each_save_by_a_kept_plan(planned, monkeypatch, is_spread):
    """One element deviates on one rank: in twice as many saves as there are ranks it is compared."""
    if is_spread:
        monkeypatch.setattr(planners, "SPREAD_ROWS", -1)
    size, count = 4, 1024

    def job(comm, path):
        state = {"w": np.zeros(count * size, np.float32), "other": np.zeros(count * size, np.float32)}
        save_state_dict(state, path, comm, unique_id=0)
        sizes, taken = sent_by(comm), []
        for odd in range(size):
            for part in range(size):
                element = count * part + count // 2 + 100 + odd
                state["w"][element] = comm.position == odd
                found = None
                for number in range(2 * size):
                    sizes.clear()
                    try:
                        save_state_dict(state, path, comm, unique_id=0)
                    except ValidationError as error:
                        assert "replicas of one shard differ" in str(error)
                        found = number
                        break
                state["w"][element] = 0
                assert sizes == [] or sizes[0] == 60
                taken.append(found)
        return taken

    with memory_directory() as directory:
        of_rank = SimulatedWorld(size).run(lambda comm: job(comm, directory))
    assert planned.count(0) == 1
    assert all(of_rank[0] == taken for taken in of_rank)
    assert None not in of_rank[0]
    assert len({*of_rank[0]}) > 1


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("other", ["save_state_dict", "reshard_sharded_state_dict"])
def test_a_load_meets_another_call(tmp_path, other, warm):
    def job(comm):
        state, target = build(comm.position, 2), build(comm.position, 2, 3)
        for _ in range(warm):
            save_state_dict(state, tmp_path / "warm", comm)
        with pytest.raises(ValidationError) as caught:
            if comm.rank == 0:
                load_state_dict(target, tmp_path / "0", comm)
            elif other == "save_state_dict":
                save_state_dict(state, tmp_path / ("warm" if warm else "other"), comm)
            else:
                reshard_sharded_state_dict(state, target, comm)
        return str(caught.value)

    SimulatedWorld(2).run(lambda comm: save_state_dict(build(comm.position, 2), tmp_path / "0", comm))
    said = "ranks do not make the same call: rank 0: load_state_dict; rank 1: " + other
    assert all(said in text for text in SimulatedWorld(2).run(job))
