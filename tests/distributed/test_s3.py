"""Two processes save on S3 and load from there.

The jobs: saved on S3 under tensor parallelism, loaded without.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddle")
pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
pytest.importorskip("flask_cors")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import KINDS, Net
from tests.distributed.test_tensor_parallel import adamw, wrong_names
from tests.s3_server import SECRET, running_server
from tests.saved import short_names

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def save(url, options, degree):
    """All kinds of layers, an optimizer that has not stepped, and extra state."""
    fc.install()
    place, _ = common.place_in(common.init_tensor_parallel(degree))
    net = Net(KINDS, True, degree, place=place)
    model = net.sharded_state_dict()
    state = {**model, **adamw(net).sharded_state_dict(model), **collect_extra_state(step=7)}
    report = fc.save_state_dict(state, open_storage(url, **options), step=7)
    return {"path": report.path, "written": report.bytes_written, "total": report.total_bytes}


def load(url, environment, degree):
    """By the URL alone; how to get there is in the environment."""
    os.environ.update(environment)
    fc.install()
    place, _ = common.place_in(common.init_tensor_parallel(degree))
    net = Net(KINDS, True, degree, salt="other", place=place)
    before = wrong_names(net, place, degree)
    model = net.sharded_state_dict()
    report = fc.load_state_dict({**model, **adamw(net).sharded_state_dict(model)}, url, strict=True)
    extra = restore_extra_state(load_extra_state(url))
    return {
        "before": len(before),
        "wrong": wrong_names(net, place, degree),
        "step": extra.step,
        "verified": report.bytes_verified == report.bytes_read - report.bytes_extra > 0,
    }


def missing_bucket(options):
    """The error of a save that cannot work, as every rank sees it."""
    try:
        fc.save_state_dict({"w": paddle.ones([2])}, open_storage("s3://nowhere/a", **options))
    except fc.CheckpointError as error:
        return str(error)
    return None


# -- what is asserted -------------------------------------------------------------------------------------------------


def test_saved_under_two_and_loaded_by_one(world2):
    with running_server() as server:
        url = server.new_url()
        reports = world2.run(save, url=url, options=server.options, degree=2)
        assert {report["path"] for report in reports} == {url}
        assert sum(report["written"] for report in reports) == reports[0]["total"] > 0
        assert min(report["written"] for report in reports) > 0
        files = short_names(key.rsplit("/")[-1] for key in server.objects(url))
        assert files == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors"]
        for report in world2.run(load, url=url, environment=server.environment, degree=1):
            assert report["before"] > 0
            assert report["wrong"] == []
            assert report["step"] == 7
            assert report["verified"]
        # This process alone.
        merged = fc.load_merged_state_dict(server.storage(url))
        names = common.wanted_names(common.KINDS, True)
        assert all(common.same_bytes(merged[name], common.whole(name)) for name in names)
        assert fc.latest(server.storage(url)).step == 7
        first, second = world2.run(missing_bucket, options=server.options)
        assert first == second
        assert "nowhere" in first
        assert SECRET not in first
