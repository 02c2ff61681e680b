"""What stock Paddle saved, this library loads bit for bit, under the same and other layouts and numbers of ranks."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddle.distributed.flex_checkpoint")
from tests.attacks.opcodes import call, named, program
from tests.distributed import jobs_paddle_checkpoint as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("safetensors", [False, True], ids=["distcp", "safetensors"])
def test_loads_what_paddle_saved(world2, tmp_path, safetensors):
    world2.run(jobs.save_with_paddle, directory=str(tmp_path), safetensors=safetensors)
    ending = "safetensors" if safetensors else "distcp"
    names = sorted(os.listdir(tmp_path))
    assert names == ["0.metadata", f"0_0.{ending}", f"1_0.{ending}"]
    for cut in (0, 1):
        for report in world2.run(jobs.load_with_us, directory=str(tmp_path), cut=cut):
            assert report["wrong"] == []
            assert report["keys"] == len(jobs.DTYPES) + 2
            assert (report["verified"], report["needed"] > 0) == (0, True)
    # This process alone.
    report = jobs.load_with_us(str(tmp_path), 0)
    assert report["wrong"] == []
    # Nothing was written there.
    assert sorted(os.listdir(tmp_path)) == names


def test_paddle_loads_what_we_saved(world2, tmp_path):
    world2.run(jobs.save_with_us, directory=str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert world2.run(jobs.load_with_paddle, directory=str(tmp_path)) == [[], []]
    assert sorted(os.listdir(tmp_path)) == names


def test_whole_tensors_and_replicas(world2, tmp_path):
    pieces, replicas = tmp_path / "pieces", tmp_path / "replicas"
    world2.run(jobs.save_with_paddle, directory=str(pieces), safetensors=False)
    equal = jobs.merge_with_us(str(pieces))
    assert all(equal.values())
    assert len(equal) == len(jobs.DTYPES) + 2
    world2.run(jobs.save_replicas_with_paddle, directory=str(replicas))
    assert {"0_0.distcp", "1_0.distcp"} <= set(os.listdir(replicas))
    assert jobs.merge_with_us(str(replicas)) == {"w": True}


def test_code_in_a_data_file_is_refused_on_all_ranks(world2, tmp_path):
    checkpoint, canary = tmp_path / "checkpoint", tmp_path / "canary"
    world2.run(jobs.save_replicas_with_paddle, directory=str(checkpoint))
    file = checkpoint / "1_0.distcp"
    file.write_bytes(program(call(named("os", "system"), f"touch {canary}")))
    for kind, text, untouched in world2.run(jobs.refused, directory=str(checkpoint)):
        assert (kind, untouched) == ("UnsafePickleError", True)
        assert f"{file}: refused before byte" in text
        assert "the name 'os.system' is not among those of plain data" in text
    assert not canary.exists()
