"""Each defect of Paddle's own FlexCheckpoint in semi-automatic parallel, named: what this library does there."""

from __future__ import annotations

import os

import pytest

from tests.semi_auto import jobs_upstream_defects as jobs

pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]


def test_s1_offsets_of_sharded_parameters(world2, tmp_path):
    """Upstream: offset 0 on every rank; all shards but one are lost."""
    first, second = world2.run(jobs.sharded_parameters, directory=str(tmp_path / "c"))
    assert first == [[[0, 0], [3, 3]], []]
    assert second == [[[3, 0], [2, 3]], []]


def test_s2_offsets_of_moments_whose_parameter_is_whole(world2, tmp_path):
    """Upstream: the parameter's offset, 0, for every rank's part of a moment."""
    first, second = world2.run(jobs.moments_of_stage_1, directory=str(tmp_path / "c"))
    assert first == [[[0, 0], [3, 3]], False]
    assert second == [[[3, 0], [2, 3]], False]


def test_s3_asking_for_state_takes_no_step(world2, tmp_path):
    """Upstream: weight decay is applied, the beta powers are one step ahead, gradients are defined without memory."""
    for report in world2.run(jobs.asked_and_saved, directory=str(tmp_path / "c")):
        assert report == {"same": True, "powers": [0.8999999761581421], "gradients": [], "goes on": [True, []]}


def test_s4_states_of_tensor_fusion_are_ranges(world2, tmp_path):
    """Upstream: every rank's part of a moment is saved as the whole of it."""
    others = ["dp2-fusion", "dp2-stage1", "dp2-stage0", "single"]
    expected = world2.run(jobs.losses_after, strategy="dp2-fusion", steps=3)
    reports = world2.run(jobs.fused_states, directory=str(tmp_path / "c"), strategy="dp2-fusion", others=others)
    for report, loss in zip(reports, expected):
        assert report == {**{other: [] for other in others[1:]}, "dp2-fusion": ["loss", loss]}


def test_s5_states_of_fused_fully_shard_are_of_their_rank(world2, tmp_path):
    """Upstream: ranks' different parts have one key, and are taken for copies."""
    others = ["dp2-fully-shard-fused", "dp2-fully-shard", "dp2-stage3", "single"]
    arguments = {"directory": str(tmp_path / "c"), "strategy": others[0], "others": others}
    for report in world2.run(jobs.fused_states, **arguments):
        assert report == {other: [] for other in others}


@pytest.mark.parametrize("fused", [False, True])
def test_s5_optimizers_that_were_made_before_fully_shard(world2, fused):
    """As Paddle's documentation makes them: with parameters that are no longer the model's."""
    for before, after, moved in world2.run(jobs.made_before, fused=fused):
        assert before == after
        assert moved == [key for key in after if "moment" in key]
        assert len(moved) >= 2


def test_s6_two_mesh_axes_cut_one_tensor_axis(world4, tmp_path):
    """Upstream: ``AttributeError: get_dim`` at save and load."""
    assert world4.run(jobs.two_axes_cut_one, directory=str(tmp_path / "c")) == [[True, []]] * 4


def test_s7_nested_state_is_loaded_as_it_was_saved(world2, tmp_path):
    """Upstream: saved, and refused by load."""
    assert world2.run(jobs.nested, directory=str(tmp_path / "c")) == [[True, True]] * 2


def test_s8_a_failed_load_leaves_targets_as_they_were(world2, tmp_path):
    """Upstream: no way from rank to rank without CUDA, which is found out when targets are half overwritten."""
    for text, unchanged, right in world2.run(jobs.failed_load, directory=str(tmp_path / "c")):
        assert "no such key (key 'v'" in text
        assert "rank 1" in text
        assert unchanged
        assert right


def test_s9_meshes_of_two_axes_under_numpy_2_4(world4, tmp_path):
    """Upstream: ``only 0-dimensional arrays can be converted to Python scalars``."""
    assert world4.run(jobs.without_rank_by_dim, directory=str(tmp_path / "c")) == [[]] * 4


def test_s10_a_fused_fully_shard_model_is_saved(world2, tmp_path):
    """Upstream: an empty checkpoint, and no error."""
    for count, wrong, text, plain in world2.run(jobs.fully_sharded_model, directory=str(tmp_path)):
        assert count == 7
        assert wrong == []
        assert (text is None and plain == []) or ("Remedy" in text and not os.path.exists(tmp_path / "plain"))
