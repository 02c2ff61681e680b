"""Two processes save on S3 and load from there."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
pytest.importorskip("flask_cors")
import paddle_flexckpt as fc
from tests.distributed import jobs_common as common
from tests.distributed import jobs_s3 as jobs
from tests.s3_server import SECRET, running_server

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


def test_saved_under_two_and_loaded_by_one(world2):
    with running_server() as server:
        url = server.new_url()
        reports = world2.run(jobs.save, url=url, options=server.options, degree=2)
        assert {report["path"] for report in reports} == {url}
        assert sum(report["written"] for report in reports) == reports[0]["total"] > 0
        assert min(report["written"] for report in reports) > 0
        files = sorted(key.rsplit("/")[-1] for key in server.objects(url))
        assert files == ["0.manifest", "0_0.safetensors", "1_0.safetensors"]
        for report in world2.run(jobs.load, url=url, environment=server.environment, degree=1):
            assert report["before"] > 0
            assert report["wrong"] == []
            assert report["step"] == 7
            assert report["verified"]
        # This process alone.
        merged = fc.load_merged_state_dict(server.storage(url))
        names = common.wanted_names(common.KINDS, True)
        assert all(common.same_bytes(merged[name], common.whole(name)) for name in names)
        assert fc.latest(server.storage(url)).step == 7
        first, second = world2.run(jobs.missing_bucket, options=server.options)
        assert first == second
        assert "nowhere" in first
        assert SECRET not in first
