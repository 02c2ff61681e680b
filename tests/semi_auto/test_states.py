"""States of optimizers that have taken no step: created on asking, with nothing else changed.

Everything is compared bit for bit with a job that was not asked.
"""

from __future__ import annotations

import pytest

from paddle_flexckpt.parallel.install import install, uninstall
from tests.semi_auto import jobs_states as jobs
from tests.semi_auto.strategies import BY_NAME

pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]

TWO = ("single", "mp2", *(f"dp2-stage{stage}" for stage in range(4)), "dp2-fusion")
FOUR = ("dp2-mp2-stage1", "dp2-mp2-stage3", "dp2-mp2-fusion", "dp4-fusion", "dp4-fully-shard-fused")
FULLY = ("dp2-fully-shard", "dp2-fully-shard-fused")
# Paddle's float32 number nearest to 0.9, AdamW's beta1.
BETA1 = 0.8999999761581421


def run(world, job, strategy, **named):
    """Runs a job on as many ranks as a strategy needs; a dense one runs on each of two."""
    return world(max(BY_NAME[strategy].ranks, 2)).run(job, strategy=strategy, **named)


@pytest.mark.parametrize("strategy", [*TWO, *FULLY, *FOUR])
def test_asking_changes_nothing(world, strategy):
    for report in run(world, jobs.asked, strategy, sizes="uneven"):
        assert report["steps"] == 0
        assert report["changed"] == 0
        assert report["gradients"] == []
        assert report["powers"] == [BETA1]
        assert report["moments"] == [0.0]
        assert report["same"]  # asking again gives the same tensors
        assert report["names"]  # which are named as the first step names them
        assert report["keys"]
        assert report["losses"]
        assert report["wrong"] == []


@pytest.mark.parametrize("strategy", [*TWO[2:], *FULLY, "dp2-mp2-fusion"])
def test_a_fresh_job_that_is_given_another_ones_state_goes_on_as_that(world, strategy):
    for report in run(world, jobs.resumed, strategy, sizes="uneven"):
        assert report == {"keys": True, "losses": True, "wrong": []}


@pytest.mark.parametrize("strategy", ["dp2-fusion", "dp2-mp2-fusion", "dp4-fusion"])
@pytest.mark.parametrize("megabytes", [256, 0])
def test_what_the_first_step_fuses_is_told_before(world, strategy, megabytes):
    """With a limit of 0 every parameter has a buffer of its own."""
    for report in run(world, jobs.predicted, strategy, sizes="uneven", megabytes=megabytes):
        assert report["before"] == report["after"]
        assert report["shapes"] == {name: [stop - start] for name, _, start, stop in report["before"]}
        assert report["buffers"] == (1 if megabytes else 7)


def test_fusing_other_parameters_than_the_states_are_of_is_an_error(world2):
    for rank, (text, unchanged) in enumerate(world2.run(jobs.other_fusion, case="unused")):
        assert unchanged
        assert text.startswith(f"rank {rank}: the first step fuses other parameters")
        assert "without a gradient: ['layer_norm_0.w_0.dist']" in text
        assert "Remedy: set stop_gradient" in text


def test_enabling_fusion_after_states_of_whole_parameters_is_an_error(world2):
    for rank, (text, unchanged) in enumerate(world2.run(jobs.other_fusion, case="enabled late")):
        assert unchanged
        assert text.startswith(f"rank {rank}: the optimizer has states of whole parameters")
        assert "Remedy: enable tensor fusion before" in text


@pytest.mark.parametrize(
    ("case", "states"),
    [
        ("groups", 16),  # with betas of their own
        ("frozen", 12),
        ("amsgrad", 20),
        ("scheduler", 17),
        ("sgd", 0),
        ("master weights", 17),
        ("unused", 16),
    ],
)
def test_optimizers_out_of_the_ordinary(world2, case, states):
    for late, early in world2.run(jobs.odd_parameters, case=case):
        assert len(early[0]) == states
        assert early[1] == late[1]


@pytest.mark.parametrize("strategy", ["dp2-stage0", "dp2-stage1", "dp2-fusion"])
def test_master_weights_are_the_parameters_and_cut_as_their_moments(world2, strategy):
    reports = world2.run(jobs.half_precision, strategy=strategy)
    found = {found for report in reports for found in report}
    assert found == ({True, None} if "fusion" in strategy else {True})
    assert all(any(report[i] for report in reports) for i in range(7))


def test_parameters_of_other_ranks_have_no_states_here(world2):
    for names, unchanged, mine in world2.run(jobs.on_other_ranks):
        assert unchanged
        states = ("beta1_pow_acc_0", "beta2_pow_acc_0", "moment1_0", "moment2_0")
        assert names == sorted(f"{parameter}_{state}" for parameter in mine for state in states)


def test_state_that_was_set_before_the_first_step_is_kept_for_it(world2):
    assert world2.run(jobs.handed_over) == [[True, True]] * 2


def test_paddles_own_method_stays_reachable_and_comes_back():
    from paddle.distributed.auto_parallel.api import _ShardOptimizer

    uninstall()
    native = vars(_ShardOptimizer)["state_dict"], vars(_ShardOptimizer)["_tensor_fusion"]
    install()
    try:
        assert vars(_ShardOptimizer)["_paddle_state_dict"] is native[0]
        assert _ShardOptimizer.state_dict is not native[0]
    finally:
        uninstall()
    assert (vars(_ShardOptimizer)["state_dict"], vars(_ShardOptimizer)["_tensor_fusion"]) == native
    assert not hasattr(_ShardOptimizer, "_paddle_state_dict")
