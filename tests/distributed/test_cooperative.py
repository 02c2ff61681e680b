"""Loads in which storage is read once for the job, between real processes.

The jobs: the zoo from layout to layout, directly and together; a model with its optimizer under another degree.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.communication.group_communicators import communicator_for
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import KINDS, LAYOUTS, Net
from tests.distributed.test_tensor_parallel import adamw, wrong_names

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def save_zoo(directory, layout):
    rank, size = common.here()
    fc.save_state_dict(common.zoo_state(layout, rank, size), directory)


def load_zoo(directory, layout):
    """By each method: the keys that are wrong, and what the report counts."""
    rank, size = common.here()
    outcome = {}
    for method in ("direct", "cooperative"):
        state = common.zoo_state(layout, rank, size, salt="other")
        comm = communicator_for(None)
        before = comm.collectives
        report = fc.load_state_dict(state, directory, comm, comm_method=method, verify="full")
        outcome[method] = {
            "wrong": common.zoo_wrong(state, layout, rank, size),
            "collectives": comm.collectives - before,
            "report": report.as_dict(),
        }
    return outcome


def save_model(directory, degree):
    fc.install()
    place, _ = common.place_in(common.init_tensor_parallel(degree))
    net = Net(KINDS, True, degree, place=place)
    model = net.sharded_state_dict()
    fc.save_state_dict({**model, **adamw(net).sharded_state_dict(model)}, directory)


def load_model(directory, degree):
    fc.install()
    place, _ = common.place_in(common.init_tensor_parallel(degree))
    net = Net(KINDS, True, degree, salt="other", place=place)
    model = net.sharded_state_dict()
    state = {**model, **adamw(net).sharded_state_dict(model)}
    report = fc.load_state_dict(state, directory, comm_method="broadcast", strict=True)
    return {"wrong": wrong_names(net, place, degree), "method": report.comm_method, "keys": len(state)}


def disagree(directory):
    rank, size = common.here()
    state = common.zoo_state("rows", rank, size, salt="other")
    before = common.snapshot(state)
    method = "cooperative" if communicator_for(None).position else "auto"
    error = common.outcome(lambda: fc.load_state_dict(state, directory, comm_method=method))
    return {"error": error, "untouched": before == common.snapshot(state)}


# -- what is asserted -------------------------------------------------------------------------------------------------


# In CI what is cut otherwise, what is cut within rows, and whole tensors; in simulated worlds there are all kinds.
IN_CI = {("rows", "columns"), ("flat", "flat rows"), ("flat", "whole")}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=() if (source, target) in IN_CI else pytest.mark.slow)
        for source in ("rows", "flat")
        for target in LAYOUTS
    ],
)
def test_the_zoo_is_as_a_direct_load_has_it(world2, world4, tmp_path, source, target):
    world2.run(save_zoo, directory=str(tmp_path), layout=source)
    for world in (world2, world4):
        reports = world.run(load_zoo, directory=str(tmp_path), layout=target)
        direct = [report["direct"]["report"] for report in reports]
        together = [report["cooperative"]["report"] for report in reports]
        assert [report[method]["wrong"] for report in reports for method in report] == [[]] * 2 * len(reports)
        assert {report["cooperative"]["collectives"] for report in reports} == {3}
        assert [report["bytes_needed"] for report in together] == [report["bytes_needed"] for report in direct]
        assert {report["comm_method"] for report in together} == {"cooperative"}
        # All is smaller than a block, so that a rank that needs a part of it directly reads all of it.
        once, each = (sum(report["bytes_read"] for report in these) for these in (together, direct))
        assert once <= each
        assert once == sum(report["bytes_verified"] for report in together)
        assert sum(report["bytes_sent"] for report in together) == sum(report["bytes_received"] for report in together)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 4), (4, 2)])
def test_a_model_with_its_optimizer_under_another_degree(world4, tmp_path, saved, loaded):
    world4.run(save_model, directory=str(tmp_path), degree=saved)
    for report in world4.run(load_model, directory=str(tmp_path), degree=loaded):
        assert report["wrong"] == []
        assert report["method"] == "cooperative"
        assert report["keys"] > 20


def test_ranks_that_ask_for_different_methods_have_one_error(world2, tmp_path):
    world2.run(save_zoo, directory=str(tmp_path), layout="rows")
    reports = world2.run(disagree, directory=str(tmp_path))
    assert reports[0] == reports[1]
    assert reports[0]["untouched"]
    kind, text = reports[0]["error"]
    assert kind == "ValidationError"
    assert '"comm_method": "auto"' in text and '"comm_method": "cooperative"' in text
