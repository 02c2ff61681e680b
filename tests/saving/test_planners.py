"""Saves whose keys are planned by one rank each: saved, told and counted as if every rank planned all of them."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CatalogBuilder, CheckpointError, ValidationError
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import local
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.planning.replica_comparison import Stretches
from paddle_flexckpt.planning.write_plan import Items
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.host_channel import HostChannel
from paddle_flexckpt.saving import planners, save_plan
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.property import examples
from tests.property.layouts import Pick
from tests.property.test_whole_system import Oracle, check_load, random_layout, random_state, weights
from tests.ramdisk import memory_directory
from tests.ranks.test_host_channel import Ranks, Store

# Agree; rows to planners, lines to their owners, and back; items; write; what was compared; commit.
COLLECTIVES = 8


@pytest.fixture(autouse=True)
def spread() -> Iterator[None]:
    before, planners.SPREAD_ROWS = planners.SPREAD_ROWS, -1
    yield
    planners.SPREAD_ROWS = before


def save_all(states, path, **options):
    """Save on as many ranks as there are states; return what each got, and its number of collectives."""

    def job(comm):
        try:
            return save_state_dict(states[comm.position], path, comm, **options), comm.collectives
        except ValidationError as error:
            return error, comm.collectives

    return SimulatedWorld(len(states)).run(job)


def both_ways(states, path, **options):
    """What a save gives where every rank plans all keys, and where each key is planned by one rank."""
    rows, planners.SPREAD_ROWS = planners.SPREAD_ROWS, 1 << 17
    try:
        alone = save_all(states, path / "alone", **options)
    finally:
        planners.SPREAD_ROWS = rows
    return alone, save_all(states, path / "spread", **options)


@examples(40)
@given(st.integers(0, 2**32), st.integers(2, 24), st.booleans())
def test_random_states_are_saved_once_and_load_bit_for_bit(seed, world, save_replicas):
    pick = Pick.from_seed(seed)
    tensors = random_state(pick, pick.integer(1, 8), 6)
    layout = random_layout(pick, tensors, world)
    oracle = Oracle(tensors)
    states = [weights(oracle.hold(pick, layout[rank])) for rank in range(world)]
    with memory_directory() as path:
        alone, several = both_ways(states, path, save_replicas=save_replicas)
        assert {collectives for _, collectives in several} == {COLLECTIVES}
        for (one, _), (other, _) in zip(alone, several):
            for name in ("keys", "items", "total_bytes", "held_bytes", "replicas"):
                if name != "items" or save_replicas:
                    assert getattr(other, name) == getattr(one, name), name
        assert len({report.imbalance for report, _ in several}) == 1
        assert sum(report.bytes_written for report, _ in several) == several[0][0].total_bytes
        check_load(oracle, pick, random_layout(pick, tensors, pick.integer(1, 5)), path / "spread")


def cut_state(rank, world, replicas, tensors=60, rows=64):
    """Each of the first ranks has a cut of all tensors, and so have those ``world // replicas`` places further on."""
    cuts = world // replicas
    state = {}
    for i in range(tensors):
        values = np.full((rows, 3 + i % 5), i + rank % cuts, dtype=np.float32)
        state[f"layers.{i}.weight"] = ShardedWeight(
            f"layers.{i}.weight", values, values.shape, (rows * cuts, 3 + i % 5), (rank % cuts * rows, 0)
        )
    state[f"own.{rank}"] = np.arange(10 + rank, dtype=np.float32)
    state["norm"] = np.ones(7000, dtype=np.float32)
    return state


@pytest.mark.parametrize(("world", "replicas"), [(16, 4), pytest.param(64, 8, marks=pytest.mark.slow)])
def test_every_rank_writes_its_share(world, replicas, tmp_path, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.planning.write_plan.MIN_SPLIT_BYTES", 1)
    monkeypatch.setattr("paddle_flexckpt.planning.write_plan.Lines.cut.__defaults__", (1, None), raising=False)
    states = [cut_state(rank, world, replicas) for rank in range(world)]
    reports = [report for report, _ in save_all(states, tmp_path)]
    report = reports[0]
    unique = sum(
        each.local_tensor.nbytes for state in states[: world // replicas] for each in list(state.values())[:60]
    )
    unique += sum(state[f"own.{rank}"].nbytes for rank, state in enumerate(states)) + 28000
    assert (report.total_bytes, report.keys) == (unique, 61 + world)
    assert report.imbalance <= 1.02
    again = [report for report, _ in save_all(states, tmp_path)]
    assert [each.bytes_written for each in again] == [each.bytes_written for each in reports]
    first, second = (CheckpointDirectory(tmp_path).read_manifest(number).catalog for number in (0, 1))
    assert first.key.tolist() == second.key.tolist()
    assert first.offset.tolist() == second.offset.tolist()
    assert first.rank.tolist() == second.rank.tolist()


def bad_states():
    def states(change):
        built = [cut_state(rank, 8, 2, tensors=30, rows=4) for rank in range(8)]
        change(built)
        return built

    def lack(built):
        for rank in (1, 5):
            for i in range(30):
                del built[rank][f"layers.{i}.weight"]

    def other_dtype(built):
        for i in (3, 4):
            weight = built[6][f"layers.{i}.weight"]
            weight.local_tensor = weight.local_tensor.astype(np.float64)

    def other_shape(built):
        for rank in (2, 3):
            built[rank]["norm"] = np.ones(10, dtype=np.float32)

    def outside(built):
        for rank in range(8):
            for i in range(rank, 30):
                built[rank][f"layers.{i}.weight"].global_offset = (99, 0)

    def unequal(built):
        for rank in (3, 7):
            for i in range(20):
                built[rank][f"layers.{i}.weight"].local_tensor[...] += rank

    def orders(built):
        for rank in range(8):
            for i in range(3):
                statement = "fused_ffn" if rank < 3 else "fused_qkv, num_heads=2"
                built[rank][f"layers.{i}.weight"].fused = FusedAxis(0, parts=2, statement=statement)

    kinds = {"hole": lack, "dtype": other_dtype, "shape": other_shape, "outside": outside, "unequal": unequal}
    kinds["orders"] = orders
    return [pytest.param(states(change), id=name) for name, change in kinds.items()]


@pytest.mark.parametrize("states", bad_states())
def test_what_is_wrong_is_told_in_the_same_words(states, tmp_path):
    # Else each save compares some replicas with others than the one before.
    alone, several = both_ways(states, tmp_path, check_replicas="all")
    texts = [
        {str(error).replace(name, "") for error, _ in found} for name, found in (("alone", alone), ("spread", several))
    ]
    assert len(texts[0]) == 1
    # Of many keys with one cause, those of each planner have a line of their own.
    if any("and the like for" in text for text in texts[0]):
        words = [{(*sorted({*re.findall(r"'(layers[.]\d+[.]weight)'", text)}),) for text in each} for each in texts]
        assert words[1] == words[0] and all("replicas of one shard differ (key" in text for text in texts[1])
    else:
        assert texts[1] == texts[0]
    assert all(isinstance(error, ValidationError) for error, _ in several)
    assert {collectives for _, collectives in several} <= {3, 7}
    for name in ("alone", "spread"):
        left = [
            each.name for each in (tmp_path / name).iterdir() if re.search(r"safetensors|manifest|saving", each.name)
        ]
        assert left == []


def test_overlapping_shards_are_planned_by_every_rank(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    states = [{"w": ShardedWeight("w", np.ones((6, 2), np.float32), (6, 2), (8, 2), (2 * r, 0))} for r in range(2)]
    reports = save_all(states, tmp_path)
    assert {collectives for _, collectives in reports} == {3 + 2 + 1 + 1}
    assert "every rank plans all shards of this save: shards overlap" in caplog.text
    target = {"w": np.zeros((8, 2), np.float32)}
    SimulatedWorld(1).run(lambda comm: load_state_dict(target, tmp_path, comm))
    assert (target["w"] == 1).all()
    states[1]["w"].local_tensor[...] = 2
    assert {"overlapping shards disagree" in str(error) for error, _ in save_all(states, tmp_path)} == {True}


@pytest.mark.parametrize("policy", ["first", "close", False])
def test_replicas_that_may_differ_are_planned_by_every_rank(policy, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    states = [{key: np.full(50, 1 + rank / 1000, np.float32) for key in ("a.w", "b.w")} for rank in range(3)]
    save_all(states, tmp_path, check_replicas=policy)
    assert "check_replicas lets replicas differ" in caplog.text
    target = {"a.w": np.zeros(50, np.float32), "b.w": np.zeros(50, np.float32)}
    SimulatedWorld(1).run(lambda comm: load_state_dict(target, tmp_path, comm))
    assert (target["a.w"].tolist(), target["b.w"].tolist()) == ([1] * 50, [1] * 50)


def test_a_fused_shard_is_written_whole_and_its_order_is_known(tmp_path):
    def state(rank):
        weight = ShardedWeight("w", np.full((4, 8), rank % 2, np.float32), (4, 8), (8, 8), (rank % 2 * 4, 0))
        weight.fused = FusedAxis(0, parts=2, statement="fused_ffn")
        return {"w": weight, "x": np.arange(900, dtype=np.float32)}

    alone, several = both_ways([state(rank) for rank in range(6)], tmp_path)
    found = []
    for name in ("alone", "spread"):
        catalog = CheckpointDirectory(tmp_path / name).read_manifest().catalog
        rows = np.flatnonzero([catalog.key_name(row) == "w" for row in range(len(catalog))])
        found.append((catalog.order(catalog.keys.index("w")), sorted(catalog.shape[rows].tolist())))
    assert found[0] == found[1]
    assert found[1][0] is not None and found[1][0].parts == 2
    assert found[1][1] == [[4, 8], [4, 8]]
    assert [report.keys for report, _ in alone + several] == [2] * 12


def test_a_plan_that_is_kept_serves_spread_saves(tmp_path):
    states = [cut_state(rank, 4, 2, tensors=5) for rank in range(4)]

    def job(comm):
        counts = []
        for step in range(3):
            states[comm.rank]["norm"][...] = step
            before = comm.collectives
            report = save_state_dict(states[comm.rank], tmp_path, comm, unique_id=step)
            counts.append((comm.collectives - before, report.bytes_written, report.keys))
        states[comm.rank]["norm"][...] = comm.rank
        with pytest.raises(ValidationError, match="replicas of one shard differ"):
            save_state_dict(states[comm.rank], tmp_path, comm)
        return counts

    for counts in SimulatedWorld(4).run(job):
        assert [each[0] for each in counts] == [COLLECTIVES, COLLECTIVES - 4, COLLECTIVES - 4]
        assert len({each[1:] for each in counts}) == 1
    target = {"norm": np.zeros(7000, np.float32)}
    SimulatedWorld(1).run(lambda comm: load_state_dict(target, tmp_path, comm, unique_id=2))
    assert (target["norm"] == 2).all()


class Channelled(Communicator):
    """A rank whose messages go over sockets, as those of a job on devices do."""

    def __init__(self, channel: HostChannel) -> None:
        super().__init__(channel.ranks, channel.position)
        self.channel = channel

    def _all_gather(self, payload):
        return self.channel.all_gather(payload)

    def _all_to_all(self, note, payloads):
        return self.channel.all_to_all(note, payloads)


def test_saves_over_sockets(tmp_path):
    store = Store(tmp_path / "store")
    group = Ranks(store, tuple(range(6)))
    states = [cut_state(rank, 6, 2, tensors=20, rows=4) for rank in range(6)]
    comms = [Channelled(channel) for channel in group.channels]

    def save(channel):
        return save_state_dict(states[channel.position], tmp_path / "saved", comms[channel.position])

    try:
        reports = group.run(save)
        assert {rank: report.keys for rank, report in reports.items()} == dict.fromkeys(range(6), 21 + 6)
        assert [comm.collectives for comm in comms] == [COLLECTIVES] * 6
        states[4]["layers.7.weight"].local_tensor[...] += 1
        errors = group.run(save)
        assert {type(error) for error in errors.values()} == {ValidationError}
        assert len({str(error) for error in errors.values()}) == 1
        assert "'layers.7.weight'" in str(errors[0])
    finally:
        group.close()
    target = {f"layers.{i}.weight": np.zeros((12, 3 + i % 5), np.float32) for i in range(20)}
    SimulatedWorld(1).run(lambda comm: load_state_dict(target, tmp_path / "saved", comm))
    for i, tensor in enumerate(target.values()):
        assert (tensor == np.repeat(np.arange(3) + i, 4)[:, None]).all()


def test_a_small_job_is_planned_by_every_rank(tmp_path):
    planners.SPREAD_ROWS = 8
    states = [{f"t{i}": np.zeros(3, np.float32) for i in range(2 + (rank == 1))} for rank in range(4)]
    assert {collectives for _, collectives in save_all([*states[:1], *states[2:]], tmp_path)} == {3}
    assert {collectives for _, collectives in save_all(states, tmp_path)} == {COLLECTIVES}


def test_ranks_without_shards_take_part(tmp_path):
    states = [{}, {"w": np.arange(6, dtype=np.float32)}, {}]
    (report, collectives), *_ = save_all(states, tmp_path)
    assert (report.keys, report.total_bytes, report.imbalance, collectives) == (1, 24, 1.0, COLLECTIVES)
    assert {collectives for _, collectives in save_all([{}, {}], tmp_path)} == {3}


def test_planners_are_told_by_the_name():
    keys = [f"layers.{i}.weight" for i in range(1000)]
    found = planners.planner_of(keys, 16)
    assert found.tolist() == planners.planner_of(keys, 16).tolist()
    assert np.bincount(found, minlength=16).min() > 30


def test_what_ranks_are_dealt_is_cut_out_of_one_table():
    """A copy of all for each of 10,000 ranks would take gigabytes."""
    builder = CatalogBuilder(0)
    for number in range(8):
        builder.add("w", "float32", (8,), (number,), (1,))
    catalog, places = builder.build(), np.arange(8) // 2
    rows = KeyRows(catalog, places, np.arange(8) % 2, np.arange(8), np.zeros(8, dtype=np.int64), ())
    items = Items(np.arange(8)[::-1], np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64))
    deals = save_plan.assign(rows, items, Stretches(items.row[:4], items.start[:4], items.stop[:4]))
    assert {place: each.written["row"].tolist() for place, each in deals.items()} == {
        place: [1, 0] for place in range(4)
    }
    assert [len(each.compared) for each in deals.values()] == [0, 0, 2, 2]
    for column in ("written", "compared"):
        assert len({id(getattr(each, column).base) for each in deals.values()}) == 1


@pytest.mark.parametrize("rows", [-1, 1 << 17], ids=["spread", "not spread"])
@pytest.mark.parametrize("failing", [{1}, {0, 1}], ids=["one rank", "both ranks"])
def test_a_full_disk_is_told_with_the_bytes_of_all_ranks_and_one_remedy(tmp_path, monkeypatch, rows, failing):
    monkeypatch.setattr(planners, "SPREAD_ROWS", rows)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 20))
    write_all = local.write_all

    def full(descriptor, *arguments):
        if any(f"/{rank}_0-" in os.readlink(f"/proc/self/fd/{descriptor}") for rank in failing):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_all(descriptor, *arguments)

    monkeypatch.setattr(local, "write_all", full)
    # Each key is on both ranks: a rank writes the half of each.
    state = {key: np.arange(1 << 20, dtype=np.float32) for key in "abc"}

    def job(comm):
        with pytest.raises(CheckpointError) as caught:
            save_state_dict(state, tmp_path, comm)
        return str(caught.value)

    first, second = SimulatedWorld(2).run(job)
    assert first == second
    for rank in failing:
        assert re.search(rf"\[rank {rank}\] OSError: .*/{rank}_0-\w+\.safetensors has 6\.0 MiB, and 3\.0 MiB", first)
    assert first.count("Remedy (") == 1
    assert first.endswith("call again; all ranks together write 12.0 MiB")
