"""Save and load between two processes: every dtype, every layout, counted to the byte."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from tests.distributed import jobs_checkpoint as jobs
from tests.distributed.jobs_common import LAYOUTS, ZOO, zoo_bytes

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    done = {}

    def save(layout):
        if layout not in done:
            directory = str(root / layout.replace(" ", "_"))
            done[layout] = directory, world2.run(jobs.save_zoo, directory=directory, layout=layout)
        return done[layout]

    return save


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_writes_each_byte_once_with_three_collectives(saved, layout):
    reports = saved(layout)[1]
    assert sum(report["written"] for report in reports) == zoo_bytes()
    for report in reports:
        assert report["total"] == report["stored"] == zoo_bytes()
        assert report["collectives"] == report["calls"] == 3
        assert report["source_untouched"]
        assert report["keys"] == len(ZOO)


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_every_layout(world2, saved, source, target):
    reports = world2.run(jobs.load_zoo, directory=saved(source)[0], layout=target)
    for report in reports:
        assert report["unequal_before"]
        assert report["wrong"] == []
        assert report["read"] == report["needed"] == report["local"]
        assert report["total"] == sum(other["local"] for other in reports)
        assert report["missing"] == report["unexpected"] == []
        assert report["collectives"] == report["calls"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged(world2, saved, layout):
    for report in world2.run(jobs.merged_zoo, directory=saved(layout)[0]):
        assert report == {"names": sorted(ZOO), "wrong": []}


def test_ids_count_up_and_an_explicit_one_replaces(world2, tmp_path):
    first, second = world2.run(jobs.unique_ids, directory=str(tmp_path))
    assert first == second
    assert [first[name] for name in ("first", "second", "explicit", "after explicit")] == [0, 1, 7, 8]
    values = [[8, 80, 81, 82, 83], [0, 0, 1, 2, 3], [1, 10, 11, 12, 13], [7, 70, 71, 72, 73], [8, 80, 81, 82, 83]]
    assert first["loads"] == values
    assert first["replaced"] == [1, [1, 90, 91, 92, 93], values[1], values[0]]
    # Only what the manifests name: the replaced files are gone.
    data = [f"{rank}_{name}.safetensors" for name in ("0", "1.1", "7", "8") for rank in (0, 1)]
    assert first["files"] == sorted(data + [f"{name}.manifest" for name in (0, 1, 7, 8)] + [PADDLE_METADATA])


def test_the_coordinator_commits_and_logs(world2, tmp_path):
    first, second = world2.run(jobs.coordinator, directory=str(tmp_path))
    assert first == {"commits": 0, "lines": []}
    assert second == {"commits": 1, "lines": ["saved", "loaded", "resharded"]}


def test_replicas_share_the_writing(world2, tmp_path):
    reports = world2.run(jobs.replicas, directory=str(tmp_path), save_replicas=False)
    unique = (3 << 20) + 12
    for report in reports:
        assert report["right"]
        assert report["total"] == report["stored"] == unique
        assert report["held"] == 2 * unique
        # The big one is split by rows of 4 KiB.
        assert abs(report["written"] - unique / 2) <= 4096
        assert report["read"] == report["verified"] == unique


def test_all_replicas_are_written_on_request(world2, tmp_path):
    for report in world2.run(jobs.replicas, directory=str(tmp_path), save_replicas=True):
        assert report["right"]
        assert report["total"] == report["stored"] == report["held"] == 2 * report["written"]
        assert report["read"] == report["written"]


def test_policies(world2, tmp_path):
    for report in world2.run(jobs.policies, directory=str(tmp_path)):
        assert report["lenient"] == [[1, 2, 3, 4], [-1, -1], ["lost"], ["extra"]]
        assert report["cast"] == [[1, 2, 3, 4], "paddle.bfloat16", {"w": "float32 -> bfloat16"}]
        assert report["cast in memory"] == [[1, 2, 3, 4], "paddle.float64", {"w": "float32 -> float64"}]
        assert report["unexpected in memory"] == [[1, 2, 3, 4], ["extra"]]


def test_paddles_own_shards_are_accepted(world2, tmp_path):
    pytest.importorskip("paddle.distributed.flex_checkpoint", reason="this Paddle has no FlexCheckpoint of its own")
    assert world2.run(jobs.paddle_shards, directory=str(tmp_path), layout="flat", target="columns") == [[], []]
