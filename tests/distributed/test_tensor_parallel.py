"""Tensor parallelism of degree 1, 2 and 4 into degree 1, 2 and 4: every layer class alone and together, and AdamW.

A world of four ranks: degree 2 is two replicas of two ranks, degree 1 four replicas, so replica removal at save and
the filling of all replicas at load are part of every case.
"""

from __future__ import annotations

import itertools
import os

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_tensor_parallel as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

DEGREES = (1, 2, 4)
PAIRS = list(itertools.product(DEGREES, DEGREES))
CASES = list(jobs.layer_cases())
#: Of outputs (relative to the largest) and losses (relative) where the degrees differ: four units of the last place of
#: float32. Row-parallel layers add their products in as many partial sums as there are ranks, and column-parallel ones
#: call the matrix product with other extents, for which it takes another order. Measured: 1.9e-7 and 1.3e-7.
SUMMATION = 5e-7
#: Of parameters three steps of AdamW (rate 0.01) later: the same noise of the gradients, of which AdamW passes on the
#: part that does not cancel in moment1 / sqrt(moment2). Measured: 6e-8.
DRIFT = 1e-6


def cached(function):
    """One run of a job per arguments: the tests look at its parts."""
    results = {}

    def get(*arguments):
        if arguments not in results:
            results[arguments] = function(*arguments)
        return results[arguments]

    return get


@pytest.fixture(scope="module")
def layers_saved(world4, tmp_path_factory):
    root = tmp_path_factory.mktemp("layers")

    def save(degree):
        path = root / f"tp{degree}"
        return str(path), world4.run(jobs.save_layers, directory=str(path), degree=degree)

    return cached(save)


@pytest.fixture(scope="module")
def layers_loaded(world4, layers_saved):
    return cached(lambda source, target: world4.run(jobs.load_layers, directory=layers_saved(source)[0], degree=target))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degree", DEGREES)
def test_each_byte_is_written_once(layers_saved, degree, case):
    reports = [report[case] for report in layers_saved(degree)[1]]
    unique = reports[0]["unique"]
    assert reports[0]["keys"] == jobs.common.wanted_names(*jobs.layer_cases()[case])
    assert sum(report["written"] for report in reports) == unique
    assert sum(report["local"] for report in reports) == reports[0]["held"]
    for report in reports:
        assert report["total"] == report["stored"] == unique
    if degree < 4:
        # Replicas there were, so something had to be removed.
        assert reports[0]["held"] > unique


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_layers(layers_loaded, source, target, case):
    names = jobs.common.wanted_names(*jobs.layer_cases()[case])
    for result in (report[case] for report in layers_loaded(source, target)):
        assert result["unequal_before"] == names  # or the load would prove nothing
        assert result["wrong"] == []
        assert result["read"] == result["needed"] == result["local"]
        assert result["missing"] == result["unexpected"] == []
        if source == target or case == "emb":  # looking up adds nothing but zeros
            assert result["forward"] == 0
        else:
            assert result["forward"] <= SUMMATION * result["scale"]


@pytest.fixture(scope="module")
def trained(world4, tmp_path_factory):
    root = tmp_path_factory.mktemp("training")

    def save(degree):
        path = root / f"tp{degree}"
        path.mkdir()
        return str(path), world4.run(jobs.save_training, directory=str(path), degree=degree)

    return cached(save)


@pytest.mark.parametrize("degree", DEGREES)
def test_training_is_saved_whole_and_once(trained, degree):
    for report in trained(degree)[1]:
        assert report["names"] == report["expected_names"]
        assert len(report["names"]) == 9 * 5  # parameter, two moments, two powers
        assert report["total"] == report["stored"] == 4 * (3 * sum_of_sizes() + 2 * 9)
        assert report["beta"] == pytest.approx(0.9**3, rel=1e-6)  # two steps have been taken


def sum_of_sizes():
    total = 0
    for shape in jobs.common.SHAPES.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_training_resumes(world4, trained, source, target):
    path, saved = trained(source)
    for rank, result in enumerate(world4.run(jobs.load_training, directory=path, source_degree=source, degree=target)):
        assert result["names"] == saved[0]["names"]
        assert result["wrong"] == []
        assert result["read"] == result["needed"] == result["local"]
        if source == target:
            assert result["losses"] == saved[rank]["losses"]
            assert result["drift"] == 0
        else:
            assert result["losses"] == pytest.approx(saved[0]["losses"], rel=SUMMATION)
            assert result["drift"] <= DRIFT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 1)])
def test_half_precision_with_master_weights(world4, tmp_path, source, target, dtype):
    directory = str(tmp_path)
    for report in world4.run(jobs.save_half, directory=directory, degree=source, dtype=dtype):
        assert report["names"] == report["expected_names"]
        assert sum(name.endswith(".w_0") for name in report["names"]) == 5
    job = world4.run(jobs.load_half, directory=directory, source_degree=source, degree=target, dtype=dtype)
    for result in job:
        assert result["dtypes"] == sorted([dtype, "float32"])
        assert result["unequal_before"] == result["names"]
        assert result["wrong"] == []


def test_a_layer_with_its_own_group_is_cut_over_that_group(world4, tmp_path):
    results = world4.run(jobs.own_group, directory=os.fspath(tmp_path))
    assert any(result["differs_from_fleet"] for result in results)
    for result in results:
        assert result["names"] == sorted(jobs.common.SHAPES)
        assert result["wrong"] == []
