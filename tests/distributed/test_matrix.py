"""A part of the matrix. ``make test-matrix`` runs all of it, ``make test-all`` its diagonal, neighbours and a sample.

In CI each strategy of a model is saved once and loaded once, at the least; with tied weights there are fewer.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed.matrix.strategies import FLOWS_IN_SHORT, MODELS, STRATEGIES, flow_pairs, sample
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


def _cover(model):
    """Pairs of unequal strategies that save and load each strategy once, beside those that the notes name."""
    noted = [pair for found in NOTED.values() for of, *pair in found if of == model]
    names = [each.name for each in STRATEGIES if model in each.models and each.world <= LARGEST_WORLD]
    unsaved = [name for name in names if name not in {saved for saved, _ in noted}]
    unloaded = [name for name in names if name not in {loaded for _, loaded in noted}]
    half = len(unloaded) // 2  # far from each other in the table: what differs most
    longest = range(max(len(unsaved), len(unloaded)))
    return [(unsaved[i % len(unsaved)], unloaded[(i + half) % len(unloaded)]) for i in longest]


def _pairs(model):
    """A model's pairs: those of :func:`_cover` are for CI.

    With tied weights those are for CI in which the tied ones come to lie otherwise: the others show what they show
    without them.
    """
    in_ci = sorted(TIED_IN_CI) if model == "tied" else _cover(model)
    others = [pair for pair in sample(model, count=6, largest_world=LARGEST_WORLD) if pair not in in_ci]
    return [pytest.param(model, *pair) for pair in in_ci] + [
        pytest.param(model, *pair, marks=pytest.mark.slow) for pair in others
    ]


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
