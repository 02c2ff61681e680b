"""Jobs of test_replica_reads: what every rank has is saved by every rank, and one copy of it is damaged."""

from __future__ import annotations

import logging

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc

# Three blocks.
SHAPE = (600, 1024)


def whole():
    return np.random.RandomState(7).randn(*SHAPE).astype("float32")


def own(rank):
    return np.arange(5, dtype="float32") + 10 * rank


def source():
    """``w`` and ``b`` on every rank, and of ``v`` a part that nobody else has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "w": paddle.to_tensor(whole()),
        "b": paddle.to_tensor(whole()[0]).astype("bfloat16"),
        "v": fc.ShardedWeight("v", paddle.to_tensor(own(rank)), (5,), (5 * world,), (5 * rank,)),
    }


def save(directory):
    report = fc.save_state_dict(source(), directory, save_replicas=True)
    return {"written": report.bytes_written, "total": report.total_bytes, "held": report.held_bytes}


def _equal(a, b):
    return a.dtype == b.dtype and bool((a.astype("float32") == b.astype("float32")).all())


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def load(directory, keys=("w", "b", "v"), **options):
    """What a load reports, or its error; which targets are not what was saved; and the warnings of this rank."""
    expected = source()
    state = {}
    for key in keys:
        if key == "v":
            part = paddle.full([5], -1.0)
            state[key] = fc.ShardedWeight("v", part, (5,), expected[key].global_shape, expected[key].global_offset)
        else:
            state[key] = paddle.full(expected[key].shape, -1.0).astype(expected[key].dtype)
    heard = _Warnings()
    logger = logging.getLogger("paddle_flexckpt")
    logger.addHandler(heard)
    try:
        report, error = fc.load_state_dict(state, directory, **options), None
    except fc.CheckpointError as raised:
        report, error = None, (type(raised).__name__, str(raised))
    finally:
        logger.removeHandler(heard)
    local = {key: getattr(value, "local_tensor", value) for key, value in state.items()}
    wanted = {key: getattr(expected[key], "local_tensor", expected[key]) for key in keys}
    return {
        "error": error,
        "wrong": [key for key in keys if not _equal(local[key], wanted[key])],
        "touched": [key for key in keys if not _equal(local[key], paddle.full_like(local[key], -1.0))],
        "warnings": heard.texts,
        "report": report and report.as_dict(),
        "summary": report and report.summary(),
    }
