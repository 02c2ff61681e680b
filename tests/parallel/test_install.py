"""install() and uninstall()."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.install import _assignments, is_installed
from tests.distributed.jobs_muon import Muon, MuonShardingOptimizer, paddle_with_muon


def classes():
    return [owner for owner, _ in _assignments()]


def all_vars():
    return {owner: dict(vars(owner)) for owner in classes()}


@pytest.fixture
def bare():
    """Paddle as it is without the mixins."""
    fc.uninstall()
    yield all_vars()
    fc.uninstall()


def test_uninstall_restores_exactly(bare):
    fc.install()
    assert all(before != after for before, after in zip(bare.values(), all_vars().values()))
    fc.uninstall()
    assert all_vars() == bare


def test_install_is_idempotent(bare):
    fc.install()
    once = all_vars()
    fc.install()
    assert all_vars() == once
    fc.uninstall()
    assert all_vars() == bare
    fc.uninstall()
    assert all_vars() == bare


def test_is_installed(bare):
    assert not is_installed()
    fc.install()
    assert is_installed()
    fc.uninstall()
    assert not is_installed()


def test_paddles_own_methods_stay_reachable(bare):
    if "sharded_state_dict" not in bare[paddle.nn.Layer]:
        pytest.skip("this Paddle has no sharded_state_dict of its own")
    own = {owner: members.get("sharded_state_dict") for owner, members in bare.items()}
    fc.install()
    for owner, method in own.items():
        if method is not None:
            assert vars(owner)["_paddle_sharded_state_dict"] is method
    layer = paddle.nn.Linear(2, 3)
    theirs, ours = layer._paddle_sharded_state_dict(), layer.sharded_state_dict()
    assert sorted(theirs) == sorted(ours)
    assert type(theirs["weight"]) is not type(ours["weight"])


def test_every_class_of_the_issue_is_served():
    from paddle.distributed.fleet import meta_parallel
    from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence

    served = classes()
    for owner in (
        paddle.nn.Layer,
        meta_parallel.VocabParallelEmbedding,
        meta_parallel.ColumnParallelLinear,
        meta_parallel.RowParallelLinear,
        sequence.ColumnSequenceParallelLinear,
        sequence.RowSequenceParallelLinear,
        paddle.optimizer.AdamW,
    ):
        assert owner in served
        assert owner.sharded_state_dict.__module__.startswith("paddle_flexckpt.")


def test_a_forgotten_install_is_found_by_the_load(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    state = model.sharded_state_dict()
    fc.save_state_dict({**state, **optimizer.sharded_state_dict(state)}, tmp_path)
    fc.uninstall()
    if not hasattr(paddle.optimizer.AdamW, "sharded_state_dict"):
        pytest.skip("this Paddle describes nothing by itself")
    fresh = paddle.optimizer.AdamW(parameters=model.parameters())
    state = model.sharded_state_dict()
    with pytest.raises(fc.ValidationError, match=r"8 optimizer states.*Remedy.*paddle_flexckpt\.install\(\)"):
        fc.load_state_dict({**state, **fresh.sharded_state_dict(state)}, tmp_path)
    report = fc.load_state_dict({**state, **fc.optimizer_sharded_state_dict(fresh, state)}, tmp_path, strict=True)
    assert report.keys == 10


def test_muon_is_known_where_paddle_has_it(bare):
    assert not any("muon" in owner.__module__ for owner in classes())
    own = Muon.sharded_state_dict, MuonShardingOptimizer.sharded_state_dict
    with paddle_with_muon():
        assert Muon in classes() and MuonShardingOptimizer in classes()
        model = nn.Linear(2, 3)
        optimizer = Muon(0.1, model.parameters(), {model.weight.name})
        state = fc.optimizer_sharded_state_dict(optimizer, model.sharded_state_dict())
        moments = ["bias.moment1_0", "bias.moment2_0"]
        assert sorted(state) == ["bias.beta1_pow_acc_0", "bias.beta2_pow_acc_0", *moments, "weight.moment1_0"]
    assert (Muon.sharded_state_dict, MuonShardingOptimizer.sharded_state_dict) == own
    fc.install()  # and where it has it elsewhere, or in a version to come, it is refused
    with pytest.raises(ValueError, match=r"paddle\.optimizer\.muon\.Muon describes itself"):
        fc.optimizer_sharded_state_dict(optimizer, model.sharded_state_dict())
