"""A seeded part of the matrix of strategies on devices; ``make test-device`` runs all of it."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.device.matrix import MODEL, UNTRAINED, moves, pairs, sample
from tests.distributed.matrix.table import Matrix

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.fixture(scope="module")
def matrix(device_world, tmp_path_factory):
    return Matrix(device_world, tmp_path_factory.mktemp("matrix"), UNTRAINED)


# Four ranks take long to start for what they add here.
@pytest.mark.parametrize(("saved", "loaded"), sample(pairs(), 8, largest=2))
def test_what_one_strategy_saved_another_loads(matrix, saved, loaded):
    result = matrix.pair(MODEL, saved, loaded)
    assert result.ok, result.problem


@pytest.mark.parametrize(("source", "target"), sample(moves(), 4, largest=2))
def test_live_state_moves_and_trains_on(matrix, source, target):
    result = matrix.move(MODEL, source, target)
    assert result.ok, result.problem


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "stage3x2"])
def test_losses_after_a_resume_are_those_of_the_run_that_was_not_stopped(matrix, name):
    result = matrix.pair(MODEL, name, name)
    assert result.ok, result.problem
    assert result.loss_difference == 0.0
