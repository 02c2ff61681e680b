"""Replicas have to be equal, or the caller has to say that any of them will do."""

from __future__ import annotations

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld


def replicated(values):
    return {"experts.0.w": fc.ShardedWeight("experts.0.w", values, values.shape, values.shape, (0,) * values.ndim)}


def held_by(comm, odd):
    values = np.arange(600_000, dtype=np.float32)
    if comm.rank == odd:
        values[123_456] += 1
    return values


@pytest.mark.parametrize("save_replicas", [False, True])
def test_one_element_that_differs_on_one_of_four_ranks_stops_the_save(tmp_path, save_replicas):
    def save(comm):
        return fc.save_state_dict(replicated(held_by(comm, odd=2)), tmp_path, comm, save_replicas=save_replicas)

    outcomes = SimulatedWorld(4).run_all(save)
    assert all(isinstance(outcome, fc.ValidationError) for outcome in outcomes)
    (text,) = {str(outcome) for outcome in outcomes}
    for part in ("replicas of one shard differ", "key 'experts.0.w'", "rank 2", "on rank 0", "Remedy"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_without_the_check_some_replicas_values_are_saved(tmp_path):
    def save(comm):
        fc.save_state_dict(replicated(held_by(comm, odd=1)), tmp_path, comm, check_replicas=False)

    SimulatedWorld(2).run(save)
    target = np.zeros(600_000, dtype=np.float32)
    fc.load_state_dict(replicated(target), tmp_path, SimulatedWorld(1).run(lambda comm: comm)[0])
    assert np.flatnonzero(target != np.arange(600_000)).tolist() in ([], [123_456])


def test_a_reshard_from_replicas_that_differ_changes_nothing():
    def move(comm):
        target = np.full(600_000, -1, dtype=np.float32)
        source = replicated(held_by(comm, odd=3))
        with pytest.raises(fc.ValidationError, match="replicas of one shard differ"):
            fc.reshard_sharded_state_dict(source, replicated(target), comm)
        assert (target == -1).all()
        fc.reshard_sharded_state_dict(source, replicated(target), comm, check_replicas=False)
        return np.array_equal(target, held_by(comm, odd=3))

    assert SimulatedWorld(4).run(move) == [True] * 4


def test_the_check_costs_no_collective_of_its_own(tmp_path):
    def count(comm):
        fc.save_state_dict(replicated(held_by(comm, odd=None)), tmp_path, comm)
        saved = comm.collectives
        fc.reshard_sharded_state_dict(
            replicated(held_by(comm, odd=None)), replicated(np.zeros(600_000, np.float32)), comm
        )
        return saved, comm.collectives - saved

    assert SimulatedWorld(3).run(count) == [(3, 4)] * 3


def test_ranks_that_disagree_about_the_check_are_told_so(tmp_path):
    def save(comm):
        fc.save_state_dict(replicated(held_by(comm, odd=None)), tmp_path, comm, check_replicas=comm.rank == 0)

    for outcome in SimulatedWorld(2).run_all(save):
        assert isinstance(outcome, fc.ValidationError)
        assert "ranks disagree" in str(outcome)
