"""Digests of live states: those of their checkpoints, in every layout, with every byte read once."""

from __future__ import annotations

import re

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.loading import state_digests as digests
from paddle_flexckpt.loading.state_digests import digest_state_dict
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.digests import digest_checkpoint
from tests.tools.rehearsed import shard_of, state_of
from tests.tools.rehearsed import values_of as layout_values
from tests.tools.test_models import decoder
from tests.transfer.samples import SHAPES, cut, values_of

KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES)}


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


@pytest.mark.parametrize(("cuts", "replicas"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_a_state_has_the_digests_of_its_checkpoint(values, tmp_path, cuts, replicas):
    def both(comm):
        state = cut(values, comm.rank % cuts, cuts)
        fc.save_state_dict(state, tmp_path, comm)
        return digest_state_dict(state, comm)

    found = SimulatedWorld(cuts * replicas).run(both)
    assert all(each == found[0] for each in found)
    assert found[0] == digest_checkpoint(tmp_path)
    assert list(found[0]) == sorted(values)


def filled(layout: Layout, rank: int, values) -> dict:
    """What a rank of a job holds of some tensors."""
    catalog = layout.catalog(rank)
    state = state_of(catalog)
    for row in range(len(catalog)):
        part = shard_of(catalog, row, values[catalog.key_name(row)])
        state[catalog.key_name(row)].local_tensor.reshape(-1)[...] = part
    return state


def test_tp2_and_tp8_with_pp2_of_one_state_are_equal(tmp_path):
    """Live, stored, and by diff: two and sixteen ranks with the optimizer's states of a decoder."""
    two, sixteen = (Layout(decoder(), parse_strategy(text)) for text in ("tp=2", "tp=8,pp=2"))
    values = layout_values(two)

    def both(layout, path):
        def job(comm):
            state = filled(layout, comm.rank, values)
            fc.save_state_dict(state, path, comm)
            return digest_state_dict(state, comm)

        found = SimulatedWorld(layout.strategy.ranks).run(job)
        assert all(each == found[0] for each in found)
        return found[0]

    found = both(two, tmp_path / "two")
    assert both(sixteen, tmp_path / "sixteen") == found
    assert digest_checkpoint(tmp_path / "two") == digest_checkpoint(tmp_path / "sixteen") == found
    assert set(found) == set(values)
    report = fc.diff(tmp_path / "two", tmp_path / "sixteen")
    assert report.equal and report.keys == len(values)
    values["model.layers.3.mlp.down_proj.weight"][15, 7] += 1
    changed = both(sixteen, tmp_path / "changed")
    assert {key for key in found if found[key] != changed[key]} == {"model.layers.3.mlp.down_proj.weight"}


def test_the_public_function_takes_a_checkpoint_or_live_state(values, tmp_path):
    def both(comm):
        state = cut(values, 0, 1)
        fc.save_state_dict(state, tmp_path, comm)
        return fc.digest(state, comm)

    (found,) = SimulatedWorld(1).run(both)
    assert found == fc.digest(tmp_path) == fc.digest(str(tmp_path), unique_id=0)
    renamed = fc.digest(tmp_path, aoa_config={"aoa_statements": ["m.float32 -> x"]})
    assert renamed["x"] == found["m.float32"]
    with pytest.raises(ValidationError, match="digest takes no unique_id and no aoa_config of live state"):
        fc.digest({}, unique_id=0, aoa_config={"aoa_statements": []})
    with pytest.raises(ValidationError, match="digest takes no process_group of a checkpoint"):
        fc.digest(tmp_path, SimulatedWorld(1))


def test_every_element_is_read_on_one_rank(values, monkeypatch):
    """Four ranks, two of them with replicas of what the others have."""
    counts = []
    whole = digests.box_sums
    monkeypatch.setattr(digests, "box_sums", lambda part, *box: counts.append(part.nbytes) or whole(part, *box))
    SimulatedWorld(4).run(lambda comm: digest_state_dict(cut(values, comm.rank % 2, 2), comm))
    assert sum(counts) == sum(value.nbytes for value in values.values())


def test_a_value_that_differs_shows_in_its_key_alone(values):
    world = SimulatedWorld(2)
    before = world.run(lambda comm: digest_state_dict(cut(values, comm.rank, 2), comm))[0]
    changed = {**values, "m.int32": values["m.int32"] ^ 1}
    after = world.run(lambda comm: digest_state_dict(cut(changed, comm.rank, 2), comm))[0]
    assert {key for key in before if before[key] != after[key]} == {"m.int32"}


def part(offset, size):
    return {"w": fc.ShardedWeight("w", np.zeros(size, np.float32), (size,), (10,), (offset,))}


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([part(0, 5), part(6, 4)], "'w'"),
        ([part(0, 6), part(5, 5)], "shards overlap without being replicas.*rank 1"),
    ],
)
def test_what_is_no_whole_tensor_is_refused_on_every_rank(states, words):
    outcomes = SimulatedWorld(2).run_all(lambda comm: digest_state_dict(states[comm.rank], comm))
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes)
    (text,) = {str(outcome) for outcome in outcomes}
    assert re.search(words, text, re.DOTALL)


def test_a_fused_parameter_that_is_not_in_natural_order_is_refused():
    def digest(comm):
        weight = fc.ShardedWeight("w", np.zeros((2, 4), np.float32), (2, 4), (2, 8), (0, 4 * comm.rank))
        weight.fused = fc.FusedAxis(1, "fused_ffn")
        return digest_state_dict({"w": weight}, comm)

    outcomes = SimulatedWorld(2).run_all(digest)
    assert all("a fused parameter is not in natural order" in str(outcome) for outcome in outcomes)
