"""A part of the matrix: every strategy, fleet's among them, is saved once and loaded from two others.

All pairs: ``make test-semi-auto``.
"""

from __future__ import annotations

import pytest

from tests.semi_auto import matrix
from tests.semi_auto.strategies import HALF

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

NAMES = [name for name in matrix.ALL if not name.endswith("-half")]
#: How far along the list the sources of a target are; prime to its length, so that every strategy is a source too.
STRIDES = (7, 12)


@pytest.fixture(scope="module")
def saved():
    return {}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("stride", [STRIDES[0], pytest.param(STRIDES[1], marks=pytest.mark.slow)])
def test_loads_are_bit_equal_and_losses_go_on(world, root, saved, stride, target):
    at = NAMES.index(target)
    # Half of them go into a job that has been trained on other data, the others with the other stride. Of what is fused
    # no tensor may be comparable after one load, but one is after both.
    strides = STRIDES if "fusion" in target else (stride,)
    warm = {each: (at + number) % 2 == 1 for number, each in enumerate(STRIDES)}
    chosen = [(NAMES[(at + each) % len(NAMES)], target, warm[each]) for each in strides]
    problems, tensors, _ = matrix.check(world, root, chosen, saved)
    assert problems == []
    assert tensors > 0


def test_half_precision_loads_bit_equal_and_trains_on(world, root, saved):
    names = [strategy.name for strategy in HALF]
    # Each from the one before it; what is odd goes into a job that has been trained on other data.
    chosen = [(names[i - 1], name, i % 2 == 1) for i, name in enumerate(names)]
    problems, tensors, _ = matrix.check(world, root, chosen, saved)
    assert problems == []
    assert tensors > 42 * len(names)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dp2-fusion", "mp2"),
        ("mp2", "dp2-stage3"),
        ("dp2-mp2-stage1", "dp4-stage2"),
        ("dp4-stage3", "dp2-mp2-stage0"),
        ("dp2-mp2-fusion", "dp4-stage1"),
    ],
)
def test_live_states_move(world, source, target):
    ranks = matrix.ALL[source].ranks
    for differs, after, before in world(ranks).run(f"{matrix.JOBS}:move", source=source, target=target):
        assert differs == []
        assert after == pytest.approx(before, abs=matrix.LOSS)
