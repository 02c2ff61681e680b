"""A seeded part of the matrix of fused parameters; all pairs: ``make test-semi-auto``."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.semi_auto import fused_matrix

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.fixture(scope="module")
def saved():
    return set()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fused")


# The two of the same degree, in which nothing seems to have to move, and a part of the others.
PAIRS = [
    ("files", "qwen", "semi-mp2", "fleet-tp2"),
    ("files", "llama", "fleet-tp2", "semi-mp2"),
    ("live", "llama", "semi-mp2", "fleet-tp2"),
    ("live", "qwen", "fleet-tp4", "semi-mp4"),
    *fused_matrix.sample(6),
]


@pytest.mark.parametrize("pair", dict.fromkeys(PAIRS), ids="-".join)
def test_fused_parameters_between_the_worlds(world, root, saved, pair):
    assert fused_matrix.check(world, root, pair, saved) == []


def test_fused_parameters_merged_and_exported(world, root, saved):
    fused_matrix.check(world, root, ("files", "qwen", "fleet-tp2", "single"), saved)
    (wrong,) = world(1).run(f"{fused_matrix.JOBS}:merged", family="qwen", folder=str(root / "qwen-fleet-tp2"))
    assert wrong == []
