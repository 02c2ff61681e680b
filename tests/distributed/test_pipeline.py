"""Pipelines of 1, 2 and 4 stages, and of 4 with two chunks each, into one another and into a plain model.

A world of four ranks: two stages are two replicas, one stage and the plain model four, each trained on the same data.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_pipeline as jobs

HAS_DUALPIPEV = importlib.util.find_spec("paddle.distributed.fleet.meta_parallel.dualpipev") is not None

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

SOURCES = ("pp1", "pp2", "pp4", "pp4xvpp2")
IN_STAGES = ("pp2", "pp4", "pp4xvpp2")
PAIRS = list(itertools.product(SOURCES, (*SOURCES, "stack")))
BLOCKS = (1, 2, 3, 5, 6, 7, 8, 9)  # 4 is a function
IN_A_BLOCK = [f"{layer}.{name}" for layer in ("ln", "fc1", "fc2") for name in ("weight", "bias")]
STATES = ("", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
PARAMETERS = ["0.embedding.weight", *(f"{i}.{name}" for i in BLOCKS for name in IN_A_BLOCK)]
#: Of losses (relative) between a pipeline and one process, which adds the losses of micro batches in double precision,
#: and the tied gradients in another order. Two units of the last place of float32. Measured: 4.2e-8.
SUMMATION = 2.4e-7


def with_states(names):
    return sorted(f"{name}{suffix}" for name in names for suffix in STATES)


@pytest.fixture(scope="module")
def saved(world4, tmp_path_factory):
    root, done = tmp_path_factory.mktemp("pipelines"), {}

    def save(layout, kind="tied"):
        if (layout, kind) not in done:
            path = root / f"{layout}_{kind}"
            path.mkdir()
            done[layout, kind] = str(path), world4.run(jobs.save, directory=str(path), layout=layout, kind=kind)
        return done[layout, kind]

    return save


@pytest.mark.parametrize("layout", SOURCES)
def test_names_are_the_same_for_every_number_of_stages(saved, layout):
    reports = saved(layout)[1]
    assert set().union(*(report["keys"] for report in reports)) == set(with_states(PARAMETERS))
    for report in reports:
        assert report["keys"] == report["oracle"]
        assert report["all"] == with_states(PARAMETERS)
        assert report["powers"] == pytest.approx([0.9**3], rel=1e-6)  # two steps have been taken


@pytest.mark.parametrize("layout", SOURCES)
def test_each_tensor_is_written_once(saved, layout):
    for report in saved(layout)[1]:
        assert report["differing"] == []  # the copies of the tied weight and their states are equal
        assert report["total"] == report["stored"] == report["unique"] < report["held"] * 4
    # The first and the last stage hold the tied weight; with fewer than four stages, in several replicas.
    assert sum("0.embedding.weight" in report["keys"] for report in saved(layout)[1]) == (
        2 if layout in ("pp4", "pp4xvpp2") else 4
    )


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_loads_into_every_layout(world4, saved, source, target):
    path, before = saved(source)
    for result in world4.run(jobs.load, directory=path, layout=target):
        assert result["unequal_before"] == result["tensors"]
        assert result["wrong"] == result["lost"] == []
        assert result["missing"] == result["unexpected"] == []
        assert result["aliases"] == {}
        assert result["read"] == result["needed"] == result["local"]
        if (source in IN_STAGES) == (target in IN_STAGES):
            assert result["after"] == before[0]["after"]
        else:
            assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4xvpp2"), ("pp4xvpp2", "pp1"), ("pp4", "pp2")])
def test_in_memory(world4, saved, source, target):
    for result in world4.run(jobs.reshard, source=source, target=target):
        assert result["wrong"] == []
        assert result["after"] == pytest.approx(saved(source)[1][0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4xvpp2"), ("pp4", "pp1"), ("pp1", "pp4"), ("pp4", "pp2")])
def test_a_parameter_beside_the_tied_one(world4, saved, source, target):
    """The last stage's position embedding is never used or trained, and must not become the first stage's."""
    path, before = saved(source, "positions")
    names = {*with_states(PARAMETERS), *with_states(["0.position.weight"])}
    unused = set(with_states([f"{jobs.LAST}.position.weight"]))
    everything = set().union(*(report["keys"] for report in before))
    assert everything == (names if source == "pp1" else names | unused)
    for rank, result in enumerate(world4.run(jobs.load, directory=path, layout=target, kind="positions")):
        # The oracle has one name for the copies of all stages, and takes the first stage's for the truth.
        assert [name for name in result["wrong"] if rank == 0 or "position" not in name] == []
        assert result["missing"] == []
        assert set(result["unexpected"]) == (unused if target == "pp1" else set())
        assert set(result["aliases"]) <= unused
        assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4"), ("pp4", "pp4xvpp2")])
def test_tied_between_two_classes(world4, saved, source, target):
    path, before = saved(source, "classes")
    everything = set().union(*(report["keys"] for report in before))
    blocks = PARAMETERS[1:]
    assert everything == set(with_states(["0.embedding_weight", f"{jobs.LAST}.bias", *blocks]))
    for result in world4.run(jobs.load, directory=path, layout=target, kind="classes"):
        assert result["wrong"] == result["missing"] == result["unexpected"] == []
        assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


def test_describing_communicates_nothing(world4):
    results = world4.run(jobs.no_communication)
    assert [result is None for result in results] == [True, True, False, True]


def test_tensor_parallel_layers_stay_cut(world4, tmp_path):
    for result in world4.run(jobs.with_tensor_parallelism, directory=str(tmp_path)):
        assert result["wrong"] == []
        cut = {key: box for key, box in result["boxes"].items() if key.endswith("fc1.weight")}
        assert len(cut) == len(BLOCKS) / 2
        half = jobs.INNER // 2
        wanted = [[jobs.HIDDEN, half], [jobs.HIDDEN, jobs.INNER], [0, half * result["place"]]]
        assert list(cut.values()) == [wanted] * len(cut)


def test_a_fresh_job_with_sharding_comm_overlap_resumes(world4, tmp_path):
    for report in world4.run(jobs.overlap, directory=str(tmp_path)):
        assert report["resumed"] == report["losses"]
        assert report["other"] == pytest.approx(report["losses"], rel=1e-6)
        assert "fleet.distributed_model() returned" in report["refused"]


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this Paddle has no DualPipeV (it came with 3.1)")
def test_dual_pipe_v_and_a_pipeline_load_each_other(world4, tmp_path):
    reports = world4.run(jobs.dual, directory=str(tmp_path))
    for report in reports:
        for source in ("dual", "pp2"):
            found = report[source]
            assert found[source] == found["losses"]
            assert found["dual"] == pytest.approx(found["pp2"], rel=1e-6)
    # A stage has one part from the front and one from the back.
    places = [{int(key.split(".")[0]) for key in report["keys"]} for report in reports]
    assert any({0, jobs.LAST} <= stage for stage in places)
    assert set().union(*places) == {*range(jobs.LAST + 1)} - {4}
