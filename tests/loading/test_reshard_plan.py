"""``plan_reshard``: planned once, run many times, and planned anew when anything but values has changed."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading import peers, resharder
from paddle_flexckpt.loading.resharder import plan_reshard, reshard_sharded_state_dict
from paddle_flexckpt.memory.state import state_fingerprint
from paddle_flexckpt.ranks.transport import SocketTransport
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.agreement import BRIEF_RUN
from paddle_flexckpt.transfer.plan_cache import encode_short

SHAPE = (4, 6)


def rows_of(value: np.ndarray, rank: int, key: str = "w") -> ShardedWeight:
    """Two of four rows."""
    return ShardedWeight(key, value[2 * rank : 2 * rank + 2].copy(), (2, 6), SHAPE, (2 * rank, 0))


def columns_of(rank: int, key: str = "w") -> ShardedWeight:
    """Room for three of six columns."""
    return ShardedWeight(key, np.zeros((4, 3), np.float32), (4, 3), SHAPE, (0, 3 * rank))


def whole(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


@pytest.fixture
def plans(monkeypatch):
    """Every plan of an exchange, by rank."""
    made = []
    original = peers.plan_rank

    def plan_rank(*args):
        made.append(args[-1])
        return original(*args)

    monkeypatch.setattr(peers, "plan_rank", plan_rank)
    return made


def payloads_of(comm) -> list[int]:
    """The sizes of what a rank gathers from now on."""
    sizes, gather = [], comm._all_gather

    def counted(payload):
        sizes.append(len(payload))
        return gather(payload)

    comm._all_gather = counted
    return sizes


def test_runs_move_new_values_after_one_short_agreement(plans):
    def job(comm):
        source, target = {"w": rows_of(whole(0), comm.rank)}, {"w": columns_of(comm.rank)}
        plan = plan_reshard(source, target, comm)
        assert not target["w"].local_tensor.any()  # nothing is moved yet
        sizes, reports = payloads_of(comm), []
        for seed in (0, 1, 2):
            source["w"].local_tensor[...] = whole(seed)[2 * comm.rank : 2 * comm.rank + 2]
            before = comm.collectives
            reports.append(plan.run())
            np.testing.assert_array_equal(target["w"].local_tensor, whole(seed)[:, 3 * comm.rank : 3 * comm.rank + 3])
            assert comm.collectives - before == 2  # that nothing has changed; that all have moved
        assert max(sizes) <= 64
        assert {(r.bytes_needed, r.bytes_received, r.total_bytes, r.keys) for r in reports} == {(48, 24, 96, 1)}
        return None

    SimulatedWorld(2).run(job)
    assert sorted(plans) == [0, 1]  # once on each rank


def new_memory(source, target):
    source["w"].local_tensor = source["w"].local_tensor.copy()


def new_target_memory(source, target):
    target["w"].local_tensor = np.zeros_like(target["w"].local_tensor)


def other_offset(source, target):
    target["w"].global_offset = (0, 3 - target["w"].global_offset[1])


def other_shape(source, target):
    shard = target["w"]
    target["w"] = ShardedWeight("w", np.zeros((4, 6), np.float32), SHAPE, SHAPE, (0, 0))
    assert shard.local_shape == (4, 3)


def flattened(source, target):
    start = 12 if target["w"].global_offset[1] else 0
    target["w"] = ShardedWeight("w", np.zeros(12, np.float32), SHAPE, SHAPE, (0, 0), True, slice(start, start + 12))


def another_key(source, target):
    source["v"] = rows_of(whole(7), source["w"].global_offset[0] // 2, "v")
    target["v"] = columns_of(target["w"].global_offset[1] // 3, "v")


def fewer_keys(source, target):
    del target["u"]


def another_name(source, target):
    target["renamed"] = target.pop("w")
    target["renamed"].aliases = ("w",)


def another_rule(source, target):
    for state in (source, target):
        state["w"].fused = FusedAxis(0, None, 1)


CHANGES = [new_memory, new_target_memory, other_offset, other_shape, flattened, another_key, fewer_keys, another_name,
           another_rule]  # fmt: skip


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layout_is_noticed_by_all(plans, change, who):
    """On one rank alone, where the other's layout fits that; every rank then plans anew."""
    alone = who == "one"
    if alone and change in (other_offset, another_key, another_rule):
        pytest.skip("the ranks' shards would not fit each other")

    def job(comm):
        def state(make):
            return {"w": make("w"), "u": make("u")}

        source = state(lambda key: rows_of(whole(3), comm.rank, key))
        target = state(lambda key: columns_of(comm.rank, key))
        plan = plan_reshard(source, target, comm, strict="missing")
        plan.run()
        count = plans.count(comm.rank)
        if not alone or comm.rank == 1:
            change(source, target)
        source["w"].local_tensor[...] += 1
        plan.run()
        assert plans.count(comm.rank) == count + 1
        values = {key: shard.local_tensor.copy() for key, shard in target.items()}
        for shard in target.values():
            shard.local_tensor[...] = -1
        reshard_sharded_state_dict(source, target, comm, strict="missing")
        for key, shard in target.items():
            np.testing.assert_array_equal(values[key], shard.local_tensor)
            assert (values[key] >= 0).all()
        plan.run()
        assert plans.count(comm.rank) == count + 2  # the reshard's own plan, and no other
        return None

    SimulatedWorld(2).run(job)


def test_a_change_that_does_not_fit_is_one_error_and_the_plan_goes_on_when_it_is_undone(plans):
    def job(comm):
        source, target = {"w": rows_of(whole(0), comm.rank)}, {"w": columns_of(comm.rank)}
        plan = plan_reshard(source, target, comm)
        plan.run()
        shard = target["w"]
        target["nowhere"] = columns_of(comm.rank, "nowhere")
        shard.local_tensor[...] = 5
        with pytest.raises(ValidationError, match="'nowhere'") as caught:
            plan.run()
        assert (shard.local_tensor == 5).all()
        del target["nowhere"]
        plan.run()
        np.testing.assert_array_equal(shard.local_tensor, whole(0)[:, 3 * comm.rank : 3 * comm.rank + 3])
        return str(caught.value)

    first, second = SimulatedWorld(2).run(job)
    assert first == second


@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_no_state_on_one_rank_is_one_error_on_all(side):
    def job(comm):
        states = {"source": {"w": rows_of(whole(0), comm.rank)}, "target": {"w": columns_of(comm.rank)}}
        if comm.rank == 1:
            states[side] = "a path"
        with pytest.raises(ValidationError) as caught:
            plan_reshard(states["source"], states["target"], comm)
        return str(caught.value)

    first, second = SimulatedWorld(2).run(job)
    assert first == second
    assert "cannot reshard: [rank 1] the state has to be a dict" in first


@pytest.mark.parametrize("policy", [True, "first", False])
def test_replicas_are_compared_in_every_run(plans, policy):
    def job(comm):
        source, target = {"b": np.arange(4.0)}, {"b": np.zeros(4)}
        plan = plan_reshard(source, target, comm, check_replicas=policy)
        before = comm.collectives
        plan.run()
        assert comm.collectives - before == (2 if policy is False else 3)
        source["b"][...] += 1 + comm.rank  # rank 1 drifts
        target["b"][...] = -1
        if policy is True:
            with pytest.raises(ValidationError, match="replicas of one shard differ"):
                plan.run()
            assert (target["b"] == -1).all()
        else:
            plan.run()
            np.testing.assert_array_equal(target["b"], np.arange(4.0) + 1)  # the values of rank 0
        return None

    SimulatedWorld(2).run(job)


def test_a_run_that_failed_half_way_leaves_nothing_behind(monkeypatch):
    def job(comm):
        source, target = {"w": rows_of(whole(0), comm.rank)}, {"w": columns_of(comm.rank)}
        plan = plan_reshard(source, target, comm)
        plan.run()

        def move(task):
            if comm.rank == 1:
                raise OSError("the network went away")
            return {"bytes_needed": 0}

        monkeypatch.setattr(plan._peers, "move", move)
        with pytest.raises(CheckpointError, match="the network went away"):
            plan.run()
        plan.run()
        np.testing.assert_array_equal(target["w"].local_tensor, whole(0)[:, 3 * comm.rank : 3 * comm.rank + 3])
        return None

    SimulatedWorld(2).run(job)


def test_it_needs_no_call_for_each_tensor():
    """What a run does before data moves, on a state of many tensors: counted, not timed."""
    import sys

    def calls(count: int) -> int:
        state = {f"layer.{i}": rows_of(whole(i), 0, f"layer.{i}") for i in range(count)}
        seen = 0

        def profile(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        sys.setprofile(profile)
        try:
            state_fingerprint(state)
        finally:
            sys.setprofile(None)
        return seen

    assert (calls(300) - calls(100)) / 200 <= 0.05


def test_paddle_tensors(tmp_path):
    paddle = pytest.importorskip("paddle")
    source, target = {"w": paddle.arange(6, dtype="float32")}, {"w": paddle.zeros([6])}
    plan = fc.plan_reshard(source, target)
    plan.run()
    source["w"].set_value(paddle.full([6], 3.0))
    plan.run()
    assert target["w"].tolist() == [3.0] * 6
    source["w"] = paddle.full([6], 4.0)
    plan.run()
    assert target["w"].tolist() == [4.0] * 6


def test_ranks_that_run_different_plans_or_make_another_call_are_told(tmp_path):
    """Both plans are of one layout: nothing but the plan itself tells which of them a rank runs."""

    def job(comm):
        plans = [
            plan_reshard({"w": rows_of(whole(seed), comm.rank)}, {"w": columns_of(comm.rank)}, comm) for seed in (0, 1)
        ]
        texts = []
        with pytest.raises(ValidationError) as caught:
            plans[comm.rank].run()
        texts.append(str(caught.value))
        with pytest.raises(ValidationError) as caught:
            if comm.rank:
                plans[0].run()
            else:
                fc.save_state_dict({"w": rows_of(whole(0), 0)}, tmp_path, comm)
        texts.append(str(caught.value))
        assert plans[1].run().keys == 1  # all is as it was
        return texts

    first, second = SimulatedWorld(2).run(job)
    assert first[0] == second[0]
    assert "ranks run different plans" in first[0]
    for texts in (first, second):
        assert "do not make the same call: rank 0: save_state_dict; rank 1: ReshardPlan.run" in texts[1]


def test_an_address_leaves_room_for_an_agreement_of_64_bytes():
    with contextlib.closing(SocketTransport((0,), 0)) as transport:
        address = transport.address()
        assert len(encode_short(BRIEF_RUN, bytes(resharder.PLAN_BYTES), bytes([True]) + address)) <= 64
