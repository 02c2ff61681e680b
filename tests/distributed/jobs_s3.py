"""Jobs of test_s3: saved on S3 under tensor parallelism, loaded without."""

from __future__ import annotations

import os

import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import KINDS, Net
from tests.distributed.jobs_tensor_parallel import adamw, wrong_names


def save(url, options, degree):
    """All kinds of layers, an optimizer that has not stepped, and extra state."""
    fc.install()
    place, _ = common.place_in(common.init_tensor_parallel(degree))
    net = Net(KINDS, True, degree, place=place)
    model = net.sharded_state_dict()
    state = {**model, **adamw(net).sharded_state_dict(model), **collect_extra_state(step=7)}
    report = fc.save_state_dict(state, fc.open_storage(url, **options), step=7)
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
        "verified": report.bytes_verified == report.bytes_read > 0,
    }


def missing_bucket(options):
    """The error of a save that cannot work, as every rank sees it."""
    try:
        fc.save_state_dict({"w": paddle.ones([2])}, fc.open_storage("s3://nowhere/a", **options))
    except fc.CheckpointError as error:
        return str(error)
    return None
