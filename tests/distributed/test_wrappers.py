"""Wrappers of models and optimizers: no prefix reaches a key, and nothing is lost through them."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_wrappers as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

#: Ranks, the class around the model, and the class around the optimizer.
CASES = {
    "DataParallel": (2, "DataParallel", "HybridParallelOptimizer"),
    "TensorParallel": (2, "TensorParallel", "HybridParallelOptimizer"),
    "ShardingParallel": (2, "ShardingParallel", "HybridParallelOptimizer"),
    "SegmentParallel": (2, "SegmentParallel", "HybridParallelOptimizer"),
    "PipelineParallel": (2, "PipelineParallel", "HybridParallelOptimizer"),
    "PipelineParallelWithInterleave": (4, "PipelineParallelWithInterleave", "HybridParallelOptimizer"),
    "PipelineParallelWithInterleaveFthenB": (4, "PipelineParallelWithInterleaveFthenB", "HybridParallelOptimizer"),
    "GroupShardedStage2": (2, "GroupShardedStage2", "GroupShardedOptimizerStage2"),
    "MixPrecision": (2, "ShardingParallel", "HybridParallelOptimizer"),
    "MixPrecisionV2": (2, "ShardingParallel", "HybridParallelOptimizer"),
}


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    root, results = tmp_path_factory.mktemp("wrappers"), {}

    def run(case):
        if case not in results:
            path = str(root / case)
            results[case] = path, world(CASES[case][0]).run(jobs.round_trip, case=case, directory=path)
        return results[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_round_trip(done, case):
    for result in done(case)[1]:
        assert (result["wrapper"], result["optimizer"]) == CASES[case][1:]
        assert result["same"]
        assert result["prefixed"]
        assert result["own_method"]
        assert result["created by a check"] == []
        assert result["prefixes"] == result["missing"] == result["different"] == []
        assert result["loss"][0] == result["loss"][1]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("Pipeline")])
def test_a_plain_model_loads_it(world2, done, case):
    parameters = [f"{i}.linear.{name}" for i in range(2) for name in ("weight", "bias")]
    names = {*parameters, *(f"{i}.calls" for i in range(2)), *(f"{p}.{s}" for p in parameters for s in jobs.STATES)}
    path, results = done(case)
    assert set().union(*(result["names"] for result in results)) == names
    for result in world2.run(jobs.load_plain, directory=path):
        assert result == {"keys": len(names), "aliases": {}}
