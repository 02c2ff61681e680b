"""A part of the matrix of strategies: the diagonal, the neighbours and a seeded sample. ``make test-matrix`` runs all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.matrix.assembly import assemble, differing
from tests.distributed.matrix.strategies import BY_NAME, sample
from tests.distributed.matrix.table import JOBS, LOSS_BOUND, Matrix

# Eight ranks take too long to start for what CI would learn from them.
LARGEST_WORLD = 4


@pytest.fixture(scope="module")
def matrix(world, tmp_path_factory):
    return Matrix(world, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [(model, *pair) for model in ("tied", "untied") for pair in sample(model, count=10, largest_world=LARGEST_WORLD)],
)
def test_what_one_strategy_saved_another_loads(matrix, model, saved, loaded):
    result = matrix.pair(model, saved, loaded)
    assert result.ok, result.problem


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "v1x2", "v2x2", "stage3x2", "pp2", "tp2xv2x2"])
def test_every_distinct_byte_is_saved_once(matrix, strategy):
    tensors, _, total = matrix.saved("untied", strategy)
    assert total == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tp2", "v2x2"),
        ("v2x2", "stage3x2"),
        ("stage3x2", "pp2"),
        ("v1x2", "tp2+sp"),
        ("tp4", "v2x2xpp2"),
        # Not a pipeline and then tensor parallelism: with a pipeline in the process, Paddle trains a tensor-parallel
        # model of the CPU world differently from its second step on, whoever gave it its state.
        ("pp4xvpp2", "v2x4"),
    ],
)
def test_live_state_moves_between_strategies_and_trains_on(matrix, world, tmp_path, source, target):
    _, losses, _ = matrix.saved("untied", source)
    ranks = BY_NAME[source].world
    results = world(ranks).run(f"{JOBS}:reshard", source=source, target=target, tied=False, folder=str(tmp_path))
    live = assemble(tmp_path / f"live-{source}", ranks)
    moved = assemble(tmp_path / f"moved-{source}-{target}", ranks)
    assert differing(live, moved) == []
    after = results[0]["losses"]
    assert np.abs(np.subtract(after, losses[-len(after) :])).max() <= LOSS_BOUND
