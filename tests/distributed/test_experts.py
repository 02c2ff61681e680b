"""Mixtures of experts: every expert is saved, whichever rank has it, and loaded wherever its number is wanted."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.testing import World, cpu_world
from tests.distributed import jobs_experts as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

#: (ranks, expert parallelism, tensor parallelism)
LAYOUTS = {
    "single": (1, 1, 1),
    "dp2": (2, 1, 1),
    "ep2": (2, 2, 1),
    "ep4": (4, 4, 1),
    "tp2": (2, 1, 2),
    "ep2 x tp2": (4, 2, 2),
}
PAIRS = [
    *itertools.product(("single", "ep2"), ("single", "ep2")),
    ("ep2", "ep4"),
    ("ep4", "ep2"),
    ("ep2", "ep2 x tp2"),
    ("ep2 x tp2", "single"),
    ("ep2 x tp2", "ep4"),
    ("ep2 x tp2", "ep2 x tp2"),
    ("tp2", "ep2"),
    ("single", "tp2"),
    ("ep2", "dp2"),
    ("dp2", "ep4"),
]
#: Relative difference of losses between layouts: they sum the same products in another order. Measured: 2e-7.
SUMMATION = 1e-6


@pytest.fixture(scope="module")
def run(world):
    """Runs a job on so many ranks; a world of one is this process."""

    def on(ranks, job, **arguments):
        if ranks > 1:
            return world(ranks).run(job, **arguments)
        cpu_world.install()  # for the kernels of the gate, which the CPU build lacks
        try:
            with paddle.utils.unique_name.guard():
                return [job(**arguments)]
        finally:
            fc.uninstall()
            cpu_world.uninstall()

    return on


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    results = {}

    def save(name):
        if name not in results:
            ranks, experts, tensor = LAYOUTS[name]
            path = root / name.replace(" ", "")
            path.mkdir()
            job = run(ranks, jobs.save, directory=str(path), experts=experts, tensor=tensor)
            results[name] = str(path), job
        return results[name]

    return save


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_are_those_of_the_whole_layer(saved, name):
    _, results = saved(name)
    for result in results:
        assert result["names"] == result["expected"]
        assert result["keys"] == (4 + 4 * jobs.EXPERTS) * 5  # parameter, two moments, two powers
    numbers = {n.split(".")[2] for result in results for n in result["names"] if ".experts." in n}
    assert numbers == {str(i) for i in range(jobs.EXPERTS)}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_training_resumes(run, saved, source, target):
    path, before = saved(source)
    ranks, experts, tensor = LAYOUTS[target]
    job = run(ranks, jobs.load, directory=path, source=LAYOUTS[source], experts=experts, tensor=tensor)
    for result in job:
        assert result["wrong"] == result["missing"] == []
        if source == target:
            assert result["losses"] == before[0]["losses"]
        else:
            assert result["losses"] == pytest.approx(before[0]["losses"], rel=SUMMATION)


def test_experts_of_different_ranks_are_not_replicas(world2, tmp_path):
    """U8: Paddle gives different experts the same key, and its save keeps those of one rank."""
    results = world2.run(jobs.different_experts, directory=str(tmp_path))
    assert [result["wanted"] for result in results] == [[0.0, 1.0], [2.0, 3.0]]
    for result in results:
        assert result["got"] == [[number] for number in result["wanted"]]


def test_a_layer_of_ones_own(world2, tmp_path):
    tensors = (*jobs.SHAPES,)
    names = [f"moe.experts.{i}.{name}" for i in range(jobs.EXPERTS) for name in tensors]
    names += [f"moe.shared_experts.{name}" for name in tensors]
    names += ["moe.gate.weight", "moe.gate.bias", "moe.moe_statics.e_score_correction_bias"]
    for result in world2.run(jobs.own_layers, directory=str(tmp_path)):
        for case in result.values():
            assert case["keys"] == sorted(names)
            assert case["local"] == len(tensors) * jobs.EXPERTS // 2
            assert case["wrong"] == []
            assert case["marks_kept"]
            assert case["own_keys"]


def test_a_mark_that_may_mean_a_cut_is_refused(world4):
    for result in world4.run(jobs.ambiguous_marks):
        assert "is marked is_distributed, but no rule" in result["refused"]
        assert "experts.0.up.weight" in result["refused"]
        assert "mp_moe" in result["refused"]
        assert result["declared"] is None


def test_lists_of_different_lengths_are_an_error_on_every_rank(world2, tmp_path):
    errors = world2.run(jobs.uneven, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "gate.gate.weight" in errors[0]


def test_experts_without_the_mixin_are_not_lost_silently(world2, tmp_path):
    errors = world2.run(jobs.without_the_mixin, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "experts.0.up.weight" in errors[0]


def test_experts_among_sharding_ranks_are_refused_by_key(world2, tmp_path):
    for errors, keys, sliced in world2.run(jobs.experts_among_sharding_ranks, directory=str(tmp_path)):
        assert list(errors) == ["V1", "V2", "os_g", "p_g_os"]
        for error in errors.values():
            assert "8 parameters of experts, such as " in error
            assert "'moe.experts.0.up.weight'" in error or "'moe.experts.2.up.weight'" in error
            assert "Remedy: sharding V2" in error and "save the model without its optimizer" in error
        assert keys == 4 + 4 * jobs.EXPERTS
        # Of an expert that is cut among ranks with other experts, no rank has the rest.
        assert "moe.experts.0.up.weight" in sliced


@pytest.mark.slow
def test_experts_in_virtual_pipeline_stages(tmp_path):
    with World(6) as world:  # Paddle refuses chunks where there are two stages
        reports = world.run(jobs.experts_in_virtual_stages, directory=str(tmp_path))
    for report in reports:
        assert report["wrong"] == report["wrong in 2"] == report["wrong in 1"] == []
        assert len(report["truth"]) == 2 * 2 * 4  # layers, experts, parameters
        assert report["chunks 2"] == report["losses"]
        assert report["chunks 1"] == pytest.approx(report["losses"], rel=SUMMATION)
    names = {name for report in reports for name in report["truth"]}
    assert len(names) == 6 * jobs.EXPERTS * 4
    assert {f"{name}.moment1_0" for name in names} | names <= set(reports[0]["saved"])
