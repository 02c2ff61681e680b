"""Asynchronous saves of two processes with Paddle: snapshots of live tensors, one outcome on both ranks.

The jobs: live Paddle tensors, saved while they change.
"""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.background.writer import shared_writer
from paddle_flexckpt.memory.tensors import HostTensor
from tests.background.helpers import too_large
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import counted, zoo_bytes
from tests.saved import short, short_names

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def save_and_go_on(directory, layout):
    """Saves while the writer stands still, spoils the tensors, lets the writer go on, and loads."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = common.zoo_state(layout, rank, size)
    comm, done = counted(None)
    with fc.BackgroundWriter() as writer:
        with writer.open_slot():
            os.kill(writer.pid, signal.SIGSTOP)
        handle = fc.save_state_dict(state, directory, comm, async_save=writer)
        calls = done()
        for weight in state.values():
            HostTensor(weight.local_tensor).array.view("uint8")[:] = 0
        spoiled = common.zoo_wrong(state, layout, rank, size)
        finished_early = handle.done()
        os.kill(writer.pid, signal.SIGCONT)
        report = handle.result(60)
    # The other rank's writer has decided too, in the same way.
    fc.load_state_dict(state, directory)
    return {
        "calls": calls,
        "written": report.bytes_written,
        "total": report.total_bytes,
        "stored": common.stored_bytes(directory),
        "spoiled": common.telling(state, spoiled) == common.telling(state),
        "finished_early": finished_early,
        "wrong": common.zoo_wrong(state, layout, rank, size),
    }


def fail_on(directory, rank):
    """A save that one rank's writer has no room for, seen by nobody; then two more saves."""
    fc.save_state_dict({"w": paddle.ones([4])}, directory, async_save=True).result()
    writer = shared_writer()
    pid, part = writer.pid, paddle.full([1, 1 << 20], dist.get_rank())
    shards = {
        "w": fc.ShardedWeight("w", part, (1, 1 << 20), (2, 1 << 20), (dist.get_rank(), 0)),
        "b": paddle.ones([3]),
    }
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
    handle = fc.save_state_dict(shards, directory, async_save=True)
    handle.wait(300)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    return {
        "unseen": common.outcome(lambda: fc.save_state_dict(shards, directory, async_save=True)),
        "seen": common.outcome(handle.result),
        "after": fc.save_state_dict(shards, directory, async_save=True).result(60).unique_id,
        "same writer": writer.pid == pid,
    }


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["whole", "columns", "flat"])
def test_what_is_saved_are_the_tensors_at_the_time_of_the_call(world2, tmp_path, layout):
    for report in world2.run(save_and_go_on, directory=str(tmp_path), layout=layout):
        # Describe, and agree that all is staged; in the background the ranks' writers talk.
        assert report["calls"] == 2
        assert not report["finished_early"]
        assert report["spoiled"]
        assert report["wrong"] == []
        assert report["total"] == report["stored"] == zoo_bytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_writer_is_raised_on_both_ranks_by_the_next_save(world2, tmp_path, rank):
    first, second = json.loads(short(json.dumps(world2.run(fail_on, directory=str(tmp_path), rank=rank))))
    assert first == second
    here = f"cannot save to {str(tmp_path)!r}: "
    file = str(tmp_path / f"{rank}_1-2.safetensors")
    cause = f"{here}[rank {rank}] OSError: {too_large(file, '4.0 MiB')}"
    assert first["unseen"] == [
        "CheckpointError",
        f"{here}[ranks 0-1] the asynchronous save of id 1 to {str(tmp_path)!r} failed: {cause}",
    ]
    assert first["seen"] == ["CheckpointError", cause]
    assert first["same writer"]
    # Its files are gone, so its id is free.
    assert first["after"] == 1
    saved = {f"{each}.safetensors" for each in ("0_0-1", "0_1-2", "1_1-2")}
    assert {*short_names(tmp_path)} - {"flex-ckpt.auto_generated.metadata"} == saved | {"0.manifest", "1.manifest"}
