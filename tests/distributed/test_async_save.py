"""Asynchronous saves of two processes with Paddle: snapshots of live tensors, one outcome on both ranks."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_async_save as jobs
from tests.distributed.jobs_common import zoo_bytes

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("layout", ["whole", "columns", "flat"])
def test_what_is_saved_are_the_tensors_at_the_time_of_the_call(world2, tmp_path, layout):
    for report in world2.run(jobs.save_and_go_on, directory=str(tmp_path), layout=layout):
        # Describe, and agree that all is staged; nothing is communicated in the background.
        assert report["calls"] == 2
        assert not report["finished_early"]
        assert report["spoiled"]
        assert report["wrong"] == []
        assert report["total"] == report["stored"] == zoo_bytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_writer_is_raised_on_both_ranks_by_the_next_save(world2, tmp_path, rank):
    first, second = world2.run(jobs.fail_on, directory=str(tmp_path), rank=rank)
    assert first == second
    here = f"cannot save to {str(tmp_path)!r}: "
    file = str(tmp_path / f"{rank}_1.safetensors")
    cause = f"{here}[rank {rank}] OSError: [Errno 27] File too large: {file!r}"
    assert first["unseen"] == [
        "CheckpointError",
        f"{here}[rank 0, 1] the asynchronous save of id 1 to {str(tmp_path)!r} failed: {cause}",
    ]
    assert first["seen"] == ["CheckpointError", cause]
    assert first["same writer"]
    # Its id stays unused, its files are gone.
    assert first["after"] == 2
    assert sorted({name.partition(".")[0].rpartition("_")[2] for name in os.listdir(tmp_path)} - {"flex-ckpt"}) == [
        "0",
        "2",
    ]
