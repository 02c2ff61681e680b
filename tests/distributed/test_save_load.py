"""Save and load between two processes: every dtype, every layout, counted to the byte.

The jobs: every layout saved and loaded, ids that are saved again, coordinators, replicas and policies.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.saving import planners
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import LAYOUTS, ZOO, zoo_bytes
from tests.saved import short_names

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def save_zoo(directory, layout):
    rank, size = common.here()
    state = common.zoo_state(layout, rank, size)
    comm, done = common.counted(None)
    before = common.snapshot(state)
    report = fc.save_state_dict(state, directory, comm)
    return {
        "calls": done(),
        "collectives": comm.collectives,
        "written": report.bytes_written,
        "total": report.total_bytes,
        "rank_bytes": report.rank_bytes,
        "rank_seconds": report.rank_seconds,
        "stored": common.stored_bytes(directory),
        "source_untouched": before == common.snapshot(state),
        "keys": report.keys,
    }


def save_zoo_spread(directory, layout):
    """As save_zoo, by the ways of a job so large that each key is planned by one rank; and to nodes, and in turns."""
    common.here()
    before, planners.SPREAD_ROWS = planners.SPREAD_ROWS, -1
    communicator._group_plans.cache_clear()
    try:
        report = save_zoo(directory, layout)
        state = common.zoo_state(layout, *common.here())
        handle = fc.save_state_dict(state, directory + ".async", async_save=True)
        node = fc.save_state_dict(state, directory + ".node", storage="per_node")
        return {**report, "async": handle.result().total_bytes, "node": node.total_bytes}
    finally:
        planners.SPREAD_ROWS = before
        communicator._group_plans.cache_clear()


def load_zoo(directory, layout):
    rank, size = common.here()
    state = common.zoo_state(layout, rank, size, salt="other")
    comm, done = common.counted(None)
    unequal = common.zoo_wrong(state, layout, rank, size)
    report = fc.load_state_dict(state, directory, comm)
    return {
        "calls": done(),
        "collectives": comm.collectives,
        "unequal_before": common.telling(state, unequal) == common.telling(state),
        "wrong": common.zoo_wrong(state, layout, rank, size),
        "read": report.bytes_read,
        "needed": report.bytes_needed,
        "local": common.local_bytes(state),
        "total": report.total_bytes,
        "missing": report.missing,
        "unexpected": report.unexpected,
    }


def merged_zoo(directory):
    """load_merged_state_dict on every rank by itself."""
    merged = fc.load_merged_state_dict(directory)
    return {
        "names": sorted(merged),
        "wrong": [name for name in merged if common.raw(merged[name]) != common.zoo_value(name).tobytes()],
    }


def unique_ids(directory):
    """Saves without an id, with one, and over one; what each load then finds."""
    found = {}

    def load(unique_id=None):
        target = common.full([4])
        report = fc.load_state_dict(target, directory, unique_id=unique_id)
        return [report.unique_id, *target["w"].numpy().tolist()]

    found["first"] = fc.save_state_dict(common.pair([0, 1, 2, 3]), directory).unique_id
    found["second"] = fc.save_state_dict(common.pair([10, 11, 12, 13]), directory).unique_id
    found["explicit"] = fc.save_state_dict(common.pair([70, 71, 72, 73]), directory, unique_id=7).unique_id
    found["after explicit"] = fc.save_state_dict(common.pair([80, 81, 82, 83]), directory).unique_id
    found["loads"] = [load(), load(0), load(1), load(7), load(8)]
    report = fc.save_state_dict(common.pair([90, 91, 92, 93]), directory, unique_id=1)
    found["replaced"] = [report.unique_id, load(1), load(0), load()]
    dist.barrier()
    found["files"] = sorted(os.listdir(directory))
    return found


def coordinator(directory):
    """Who commits and who writes the log line with coordinator_rank=1."""
    commits, lines = [], []
    native = os.rename
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("paddle_flexckpt")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    os.rename = lambda old, new: (commits.append(new) if new.endswith(".manifest") else None, native(old, new))
    try:
        fc.save_state_dict(common.pair([1, 2]), directory, coordinator_rank=1)
        fc.load_state_dict(common.full([2]), directory, coordinator_rank=1)
        fc.reshard_sharded_state_dict(common.pair([1, 2]), common.full([2]), coordinator_rank=1)
    finally:
        os.rename = native
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {"commits": len(commits), "lines": [line.split()[0] for line in lines]}


def replicas(directory, save_replicas):
    """A tensor of 3 MiB on every rank and a small one: who writes how much of it."""
    big = np.arange(3 << 18, dtype="float32").reshape(3 << 8, 1 << 10)
    state = {"big": paddle.to_tensor(big), "small": paddle.full([3], 5.0)}
    report = fc.save_state_dict(state, directory, save_replicas=save_replicas)
    target = {"big": paddle.zeros(big.shape), "small": paddle.zeros([3])}
    loaded = fc.load_state_dict(target, directory)
    return {
        "written": report.bytes_written,
        "total": report.total_bytes,
        "held": report.held_bytes,
        "stored": common.stored_bytes(directory),
        "right": bool((target["big"].numpy() == big).all()) and target["small"].numpy().tolist() == [5.0] * 3,
        "read": loaded.bytes_read,
        "verified": loaded.bytes_verified,
    }


def policies(directory):
    """strict and dtype, and what the report says about it."""
    source = {**common.pair([1, 2, 3, 4]), "extra": paddle.full([2], 9.0)}
    fc.save_state_dict(source, directory)
    out = {}
    target = {"w": paddle.zeros([4]), "lost": paddle.full([2], -1.0)}
    report = fc.load_state_dict(target, directory, strict=False)
    out["lenient"] = [target["w"].numpy().tolist(), target["lost"].numpy().tolist(), report.missing, report.unexpected]
    target = {"w": paddle.zeros([4], dtype="bfloat16")}
    report = fc.load_state_dict(target, directory, dtype="cast")
    out["cast"] = [target["w"].astype("float32").numpy().tolist(), str(target["w"].dtype), report.cast]
    target = {"w": paddle.zeros([4], dtype="float64")}
    report = fc.reshard_sharded_state_dict(source, target, dtype="cast")
    out["cast in memory"] = [target["w"].numpy().tolist(), str(target["w"].dtype), report.cast]
    target = {"w": paddle.zeros([4])}
    report = fc.reshard_sharded_state_dict(source, target)
    out["unexpected in memory"] = [target["w"].numpy().tolist(), report.unexpected]
    return out


def paddle_shards(directory, layout, target):
    """The in-tree class on both sides."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, size = common.here()
    fc.save_state_dict(common.zoo_state(layout, rank, size, make=ShardedWeight), directory)
    state = common.zoo_state(target, rank, size, salt="other", make=ShardedWeight)
    fc.load_state_dict(state, directory)
    wrong = common.zoo_wrong(state, target, rank, size)
    state = common.zoo_state(target, rank, size, salt="other", make=ShardedWeight)
    fc.reshard_sharded_state_dict(common.zoo_state(layout, rank, size, make=ShardedWeight), state)
    return wrong + common.zoo_wrong(state, target, rank, size)


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    done = {}

    def save(layout):
        if layout not in done:
            directory = str(root / layout.replace(" ", "_"))
            done[layout] = directory, world2.run(save_zoo, directory=directory, layout=layout)
        return done[layout]

    return save


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_writes_each_byte_once_with_three_collectives(saved, layout):
    reports = saved(layout)[1]
    assert sum(report["written"] for report in reports) == zoo_bytes()
    for report in reports:
        assert report["total"] == report["stored"] == zoo_bytes()
        assert report["rank_bytes"] == [each["written"] for each in reports]
        assert report["rank_seconds"] == reports[0]["rank_seconds"]
        assert {name: len(values) for name, values in report["rank_seconds"].items()} == {"plan": 2, "write": 2}
        assert all(value > 0 for values in report["rank_seconds"].values() for value in values)
        assert report["collectives"] == report["calls"] == 3
        assert report["source_untouched"]
        assert report["keys"] == len(ZOO)


# Every pair, in simulated worlds of 1 to 64 ranks: tests/property. Here each layout is saved and loaded once.
@pytest.mark.parametrize(("source", "target"), list(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]))))
def test_each_layout_loads_into_another(world2, saved, source, target):
    reports = world2.run(load_zoo, directory=saved(source)[0], layout=target)
    for report in reports:
        assert report["unequal_before"]
        assert report["wrong"] == []
        assert report["read"] == report["needed"] == report["local"]
        assert report["total"] == sum(other["local"] for other in reports)
        assert report["missing"] == report["unexpected"] == []
        assert report["collectives"] == report["calls"] == 2


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout in ("columns", "flat rows") else pytest.mark.slow) for layout in LAYOUTS],
)
def test_each_key_is_planned_by_one_rank(world2, tmp_path, layout):
    """What a large job does: agree, four exchanges to plan, write, compare and commit."""
    directory = str(tmp_path / "saved")
    reports = world2.run(save_zoo_spread, directory=directory, layout=layout)
    assert sum(report["written"] for report in reports) == zoo_bytes()
    for report in reports:
        assert report["total"] == report["stored"] == report["async"] == report["node"] == zoo_bytes()
        assert report["collectives"] == report["calls"] == 8
        assert report["source_untouched"]
        assert report["keys"] == len(ZOO)
    for suffix in ("", ".async", ".node"):
        for report in world2.run(load_zoo, directory=directory + suffix, layout=layout):
            assert report["unequal_before"]
            assert report["wrong"] == []


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout in ("columns", "flat rows") else pytest.mark.slow) for layout in LAYOUTS],
)
def test_merged(world2, saved, layout):
    for report in world2.run(merged_zoo, directory=saved(layout)[0]):
        assert report == {"names": sorted(ZOO), "wrong": []}


def test_ids_count_up_and_an_explicit_one_replaces(world2, tmp_path):
    first, second = world2.run(unique_ids, directory=str(tmp_path))
    assert first == second
    assert [first[name] for name in ("first", "second", "explicit", "after explicit")] == [0, 1, 7, 8]
    values = [[8, 80, 81, 82, 83], [0, 0, 1, 2, 3], [1, 10, 11, 12, 13], [7, 70, 71, 72, 73], [8, 80, 81, 82, 83]]
    assert first["loads"] == values
    assert first["replaced"] == [1, [1, 90, 91, 92, 93], values[1], values[0]]
    # Only what the manifests name: the replaced files are gone.
    data = [f"{rank}_{name}.safetensors" for name in ("0-1", "1-5", "7-3", "8-4") for rank in (0, 1)]
    assert short_names(first["files"]) == sorted(
        data + [f"{name}.manifest" for name in (0, 1, 7, 8)] + [PADDLE_METADATA]
    )


def test_the_coordinator_commits_and_logs(world2, tmp_path):
    first, second = world2.run(coordinator, directory=str(tmp_path))
    assert first == {"commits": 0, "lines": []}
    assert second == {"commits": 1, "lines": ["saved", "loaded", "resharded"]}


def test_replicas_share_the_writing(world2, tmp_path):
    reports = world2.run(replicas, directory=str(tmp_path), save_replicas=False)
    unique = (3 << 20) + 12
    for report in reports:
        assert report["right"]
        assert report["total"] == report["stored"] == unique
        assert report["held"] == 2 * unique
        # The big one is split by rows of 4 KiB.
        assert abs(report["written"] - unique / 2) <= 4096
        assert report["read"] == report["verified"] == unique


def test_all_replicas_are_written_on_request(world2, tmp_path):
    for report in world2.run(replicas, directory=str(tmp_path), save_replicas=True):
        assert report["right"]
        assert report["total"] == report["stored"] == report["held"] == 2 * report["written"]
        assert report["read"] == report["written"]


def test_policies(world2, tmp_path):
    for report in world2.run(policies, directory=str(tmp_path)):
        assert report["lenient"] == [[1, 2, 3, 4], [-1, -1], ["lost"], ["extra"]]
        assert report["cast"] == [[1, 2, 3, 4], "paddle.bfloat16", {"w": "float32 -> bfloat16"}]
        assert report["cast in memory"] == [[1, 2, 3, 4], "paddle.float64", {"w": "float32 -> float64"}]
        assert report["unexpected in memory"] == [[1, 2, 3, 4], ["extra"]]


def test_paddles_own_shards_are_accepted(world2, tmp_path):
    pytest.importorskip("paddle.distributed.flex_checkpoint", reason="this Paddle has no FlexCheckpoint of its own")
    assert world2.run(paddle_shards, directory=str(tmp_path), layout="flat", target="columns") == [[], []]
