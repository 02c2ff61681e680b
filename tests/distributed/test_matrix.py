"""A part of the matrix: its diagonal, the neighbours and a seeded sample. ``make test-matrix`` runs all of it.

In CI each strategy of a model is saved once and loaded once, at the least; with tied weights there are fewer.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed.matrix.strategies import FLOWS_IN_SHORT, MODELS, flow_pairs, sample
from tests.distributed.matrix.table import Matrix

# Eight ranks take too long to start for what CI would learn from them.
LARGEST_WORLD = 4
# Beside those that the notes name.
TIED_IN_CI = {
    ("single", "tp2"),
    ("tp2", "tp4"),
    ("pp2", "pp4"),
    ("pp4", "pp4xvpp2"),
    ("tp2xv1x2", "pp4"),
    ("dp2xpp2", "tp2+sp"),
}


@pytest.fixture(scope="module")
def matrix(world, tmp_path_factory):
    return Matrix(world, tmp_path_factory.mktemp("matrix"))


def _pairs(model):
    """A model's pairs: those that save or load a strategy for the first time are for CI, the diagonal last.

    With tied weights those are for CI in which the tied ones come to lie otherwise: the others show what they show
    without them.
    """
    saved, loaded, found = set(), set(), []
    for pair in sorted(sample(model, count=6, largest_world=LARGEST_WORLD), key=lambda pair: pair[0] == pair[1]):
        in_ci = pair in TIED_IN_CI if model == "tied" else pair[0] not in saved or pair[1] not in loaded
        saved.add(pair[0])
        loaded.add(pair[1])
        found.append(pytest.param(model, *pair, marks=() if in_ci else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("model", "saved", "loaded"), [pair for model in MODELS for pair in _pairs(model)])
def test_what_one_strategy_saved_another_loads(matrix, model, saved, loaded):
    result = matrix.pair(model, saved, loaded)
    assert result.ok, result.problem


def _flow(model, saved, loaded):
    """One pair of each flow in short: it is loaded by one process."""
    short = model != "tied" and saved in FLOWS_IN_SHORT and loaded.endswith("single")
    return pytest.param(model, saved, loaded, marks=() if short else pytest.mark.slow)


@pytest.mark.parametrize(("model", "saved", "loaded"), [_flow(*each) for each in flow_pairs()])
def test_what_users_switch_on_besides(matrix, model, saved, loaded):
    result = matrix.pair(model, saved, loaded)
    assert result.ok, result.problem


# Pairs of the working notes (tests/notes_coverage.md), which a sample need not have. With tied weights a parameter of
# V2 reaches over two ranks, unless tensor parallelism cuts it too; without, a wrong range would show nothing.
NOTED = {
    "3.2": [("tied", "v2x4", "dp2"), ("untied", "v1x2", "dp2")],
    "2.3": [("tied", "tp2xv2x2", "tp4"), ("tied", "tp4", "tp2xv2x2")],
    "3.15": [("mixture", "moe-ep2", "moe-ep2topo-v2x2"), ("mixture", "moe-ep2topo-v2x2", "moe-ep2")],
    "3.16": [
        ("untied", "dp2", "tp2xpp2"),
        ("untied", "v1x2", "tp2xpp2"),
        ("tied", "v2x2", "tp2xpp2"),
        ("mixture", "moe-ep2topo-v2x2", "moe-tp2ep2+spxpp2"),
    ],
    "8": [("untied", "tp2", "pp4"), ("tied", "dp2", "v2x4")],
}


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [pytest.param(*each, id=f"{note}: {each[1]} to {each[2]}") for note, found in NOTED.items() for each in found],
)
def test_pairs_that_the_notes_name(matrix, model, saved, loaded):
    result = matrix.pair(model, saved, loaded)
    assert result.ok, result.problem


@pytest.mark.parametrize(
    ("saved", "loaded", "nodes", "lost"),
    [
        ("tp2xv2x2", "v2x2xpp2", [1, 0, 1, 0], None),
        ("v2x2xpp2", "tp2xv2x2", [0, 0, 1, 1], 1),
        ("tp4", "tp2", [0, 1], 0),
    ],
)
def test_nodes_that_share_no_storage(matrix, saved, loaded, nodes, lost):
    result = matrix.over_nodes("untied", saved, loaded, nodes, lost)
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
        ("pp2", "tp2+sp"),
        ("tp4", "v2x2xpp2"),
        ("pp4xvpp2", "tp2xv2x2"),
    ],
)
def test_live_state_moves_between_strategies_and_trains_on(matrix, source, target):
    result = matrix.move("untied", source, target)
    assert result.ok, result.problem
