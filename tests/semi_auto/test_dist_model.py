"""Static graphs (``dist.to_static``) and ``dist.parallelize``: states in and out of checkpoints, and training goes on.

With tensor fusion a static graph's state can be described, saved and loaded here, but no CPU runs it.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto import jobs_dist_model as jobs
from tests.semi_auto.strategies import SIZES
from tests.semi_auto.test_training import LOSS, shapes_of  # measured here too: 2.4e-7, and 0 with parallelize

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


def difference(losses, others):
    return float(np.abs(np.array(losses) - np.array(others)).max())


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("mp2", "uneven"), ("dp2-stage0", "uneven"), ("dp2-stage1", "even"), ("dp2-stage3", "even")]
)
def test_one_process_to_a_static_graph_and_back(world2, strategy, sizes, tmp_path):
    for told in world2.run(jobs.in_and_out, directory=str(tmp_path), strategy=strategy, sizes=sizes):
        assert difference(told.pop("losses"), told.pop("alone")) <= LOSS
        assert told == {"keys": [], "loaded": [], "differs": [], "ranges": []}


@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_one_process_to_a_static_graph_with_tensor_fusion_and_back(world2, sizes, tmp_path):
    reports = world2.run(jobs.in_and_out, directory=str(tmp_path), strategy="dp2-stage1", sizes=sizes, fused=True)
    for told in reports:
        assert told["keys"] == told["differs"] == []
    ranges = [set(told["ranges"]) for told in reports]
    assert ranges[0] | ranges[1] == {f"{key}.moment{i}_0" for key in shapes_of(SIZES[sizes]) for i in (1, 2)}
    assert len(ranges[0] & ranges[1]) == 2  # one parameter straddles the two halves of the buffer


@pytest.mark.parametrize(
    ("strategy", "others"),
    [
        ("mp2", ["dp2-stage3", "dp2-fully-shard-fused"]),
        ("dp2-stage1", ["mp2", "dp2-stage1"]),
        ("dp2-stage3", ["dp2-fusion", "single"]),
    ],
)
def test_static_graphs_and_dynamic_training_go_on_from_each_other(world2, strategy, others, tmp_path):
    for told in world2.run(jobs.between, directory=str(tmp_path), strategy=strategy, others=others):
        first, second = told.pop("alone")
        assert sorted(told) == sorted(others)
        for report in told.values():
            assert report["differs"] == []
            assert difference(report["losses"], first) <= LOSS
            assert difference(report["back"], second) <= LOSS


def test_a_plain_state_dict_out_and_in(world2, tmp_path):
    for told in world2.run(jobs.plain, directory=str(tmp_path / "c"), strategy="dp2-stage1", other="dp2-stage3"):
        assert told["differs"] == told["structured"] == []
        assert told["again"] == told["losses"]
        [rate], text = told["missing"]
        assert f"the source has no such key (key {rate!r}" in text
        assert "2 problems" in text


def test_a_plain_state_dict_with_fused_slices_is_refused(world2, tmp_path):
    first, second = world2.run(jobs.fused_plain, directory=str(tmp_path), strategy="dp2-stage1")
    for name in ("save", "load", "reshard"):
        assert first[name] == second[name]
        assert "a plain tensor whose name has slice@ is one rank's range of a fused buffer" in first[name]
        assert "Remedy: save and load dist_model.sharded_state_dict()" in first[name]
        assert f"{len(first['slices']) + len(second['slices'])} problems" in first[name]


def test_parameters_that_a_pass_has_fused_are_refused_before_the_training(world2):
    for fused, alive, (described, checked) in world2.run(jobs.fused_by_a_pass):
        assert fused
        assert not alive  # what Paddle gives are copies: when it gives live memory, they can be described
        assert "the DistModel fuses parameters (fused_ffn_qkv)" in described
        assert "Remedy: unset FLAGS_enable_fused_ffn_qkv_pass" in described
        assert described in checked


def test_every_level_of_parallelize(world4, tmp_path):
    for told in world4.run(jobs.parallelized, directory=str(tmp_path)):
        assert told["differs"] == []
        alone = told["losses"].pop("alone")
        assert len(told["losses"]) == 12
        for losses in told["losses"].values():
            assert difference(losses, alone) <= LOSS
