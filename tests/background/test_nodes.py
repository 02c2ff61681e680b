"""Saves to nodes in the background: ranks write their data files, and their writers copy and commit."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import Save, save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import PATIENCE_SECONDS, SOLO, kill, load_shards, shards, stopped
from tests.background.test_ranks import outcomes
from tests.saved import short_names
from tests.saving.test_nodes import ROWS, load, one_error


@pytest.fixture
def ranks(writers):
    """``ranks(size)``: a writer for each rank."""
    return lambda size, **arguments: [writers(**arguments) for _ in range(size)]


def save(paths, version, writers, **options):
    """Every rank's handle, or its exception; ``paths`` has the directory that each rank sees."""
    size = len(paths)

    def job(comm):
        state = shards(comm.position, size, version, ROWS // size)
        options_here = {"storage": "per_node", "async_save": writers[comm.position], **options}
        handle = save_state_dict(state, paths[comm.position], comm, **options_here)
        for shard in state.values():  # from now on the caller may change them
            shard.local_tensor[...] = -1
        return handle

    return SimulatedWorld(size).run_all(job)


@pytest.fixture
def nodes(tmp_path):
    """The directories of two nodes."""
    return str(tmp_path / "a"), str(tmp_path / "b")


@pytest.mark.parametrize("copies", [1, 2])
def test_writers_commit_on_all_nodes(nodes, ranks, copies):
    a, b = nodes
    writers, paths = ranks(4), [a, a, b, b]
    for version in (1, 2):
        reports = outcomes(save(paths, version, writers, unique_id=0, node_copies=copies, coordinator_rank=1))
        assert [report.unique_id for report in reports] == [0] * 4
        assert sum(report.bytes_written for report in reports) == reports[0].total_bytes
        others = {a: [2, 3], b: [0, 1]} if copies == 2 else {a: [], b: []}
        for path, own in ((a, [0, 1]), (b, [2, 3])):
            files = [f"{rank}_0-{version}.safetensors" for rank in sorted(own + others[path])]
            assert short_names(path) == ["0.manifest", *files, PADDLE_METADATA]
    assert load(paths)[1] == 2
    if copies == 2:  # one node is lost
        shutil.rmtree(b)
        assert load([a, b])[1] == 2


@pytest.mark.parametrize(("parity", "lost"), [(2, 0), (2, 1), (4, 2)])
def test_writers_store_parity_from_which_a_lost_node_is_rebuilt(tmp_path, ranks, parity, lost):
    writers, nodes = ranks(4), [str(tmp_path / name) for name in "abcd"[:parity]]
    paths = sorted(nodes * (4 // parity))
    for version in (1, 2):
        outcomes(save(paths, version, writers, unique_id=0, parity=parity))
    names = [name for path in nodes for name in short_names(path)]
    assert sorted(name for name in names if name.endswith("parity")) == [f"{rank}_0-2.parity" for rank in range(4)]
    assert not any("-1." in name for name in names)
    shutil.rmtree(nodes[lost])
    assert load(paths)[1] == 2


@pytest.mark.parametrize("options", [{"node_copies": 1}, {"node_copies": 2}, {"parity": 2}])
def test_the_handle_says_how_far_the_copies_are(nodes, ranks, monkeypatch, options):
    seen = {}
    owner = property(lambda self: seen[self][-1], lambda self, now: seen.setdefault(self, []).append(now))
    monkeypatch.setattr(SaveHandle, "progress", owner, raising=False)
    handles = save(nodes, 1, ranks(2), **options)
    outcomes(handles)
    for handle in handles:
        each = seen[handle]
        phases = [phase for phase, _ in itertools.groupby(progress.phase for progress in each)]
        has_more = options != {"node_copies": 1}
        assert phases == ["stage", "queue", *(["write"] if has_more else []), "commit"]
        done = [progress.bytes_done for progress in each]
        assert done == sorted(done) and done[-1] == each[-1].bytes_total
        own = each[phases.index("queue")].bytes_total
        # What the writer writes is the other node's file, here as copy and as parity.
        assert own < done[-1] if has_more else own == done[-1]


def test_the_call_takes_as_many_collectives_as_finding_the_nodes_and_two(nodes, ranks):
    writers = ranks(2)

    def job(comm):
        counts = []
        for version in (1, 2):
            before = comm.collectives
            state = shards(comm.position, 2, version, 8)
            handle = save_state_dict(
                state, nodes[comm.position], comm, storage="per_node", node_copies=2, async_save=writers[comm.position]
            )
            counts.append(comm.collectives - before)
            handle.result(PATIENCE_SECONDS)
        return counts

    assert SimulatedWorld(2).run(job) == [[4, 4], [4, 4]]


def test_a_save_waits_for_the_one_before(nodes, ranks):
    a, b = nodes
    writers = ranks(2)
    with stopped(writers[0]):
        first = save([a, b], 1, writers)
        assert [handle.done() for handle in first] == [False, False]
        assert not os.path.exists(os.path.join(a, "0.manifest"))
    second = save([a, b], 2, writers)
    assert [report.unique_id for report in outcomes(first) + outcomes(second)] == [0, 0, 1, 1]
    assert load([a, b], [0, 0])[1] == 1 and load([a, b], [1, 1])[1] == 2


def test_a_writer_that_dies_fails_the_save_and_the_next_one_cleans_up(nodes, ranks):
    a, b = nodes
    writers = ranks(2)
    assert outcomes(save([a, b], 1, writers, unique_id=0))[0].unique_id == 0
    with stopped(writers[0]):  # the coordinator's waits for nobody
        handles = save([a, b], 2, writers, unique_id=0)
        kill(writers[1].pid)
    text = one_error(outcomes(handles), LostRankError)
    assert "[rank 1]" in text and "its processes have ended" in text
    assert load([a, b])[1] == 1
    assert outcomes(save([a, b], 3, writers, unique_id=0))[0].unique_id == 0
    assert load([a, b])[1] == 3
    assert short_names(a) == ["0.manifest", "0_0-3.safetensors", PADDLE_METADATA]


def test_a_copy_that_cannot_be_written_fails_the_save_on_all_ranks(nodes, ranks):
    a, b = nodes
    writers = ranks(2)
    assert outcomes(save([a, b], 1, writers, unique_id=0, node_copies=2))[0].unique_id == 0
    with stopped(writers[0]):
        handles = save([a, b], 2, writers, unique_id=0, node_copies=2)
        (own,) = [name for name in os.listdir(b) if name.startswith("1_0-") and "00000002" in name]
        os.truncate(os.path.join(b, own), 100)  # somebody else's mistake
    text = one_error(outcomes(handles))
    assert "became shorter" in text or "stopped sending" in text
    assert load([a, b])[1] == 1
    assert short_names(a) == short_names(b) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors", PADDLE_METADATA]


def test_the_call_refuses_bytes_of_staging(nodes, ranks):
    a, b = nodes
    for option in ({"slice_bytes": 1 << 20}, {"staging_bytes": 64 << 20}):
        (text,) = {str(error) for error in save([a, b], 1, ranks(2), **option)}
        assert "do not go with storage='per_node'" in text


def test_loads_of_one_rank_see_nothing_before_the_commit(nodes, ranks):
    a, b = nodes
    writers = ranks(2)
    with stopped(writers[0]):
        handles = save([a, b], 1, writers)
        with pytest.raises(CheckpointError, match="unfinished save"):
            load_state_dict({}, a, storage="per_node")
    assert outcomes(handles)[0].unique_id == 0


def test_a_save_to_storage_reads_what_the_save_to_nodes_has_written(nodes, ranks, tmp_path):
    storage = str(tmp_path / "storage")
    to_nodes, to_storage = ranks(2), ranks(2)

    def job(comm):
        here = comm.position
        state = shards(here, 2, 5, 8)
        first = save_state_dict(state, nodes[here], comm, storage="per_node", async_save=to_nodes[here])
        before = to_storage[here].staging_bytes
        options = SaveOptions(async_save=to_storage[here])
        with stopped(to_storage[here]):
            second = Save(state, storage, comm, options, first.written).run()
            assert first.result(PATIENCE_SECONDS).unique_id == 0
            shutil.rmtree(nodes[here])  # the file stays readable
        return second.result(PATIENCE_SECONDS).total_bytes, to_storage[here].staging_bytes - before

    (nbytes, _), _ = found = SimulatedWorld(2).run(job)
    # The memory holds the descriptions of the jobs alone: one page.
    assert nbytes and {staged for _, staged in found} <= {0, 2 << 20}
    assert load_shards(storage, 2, 0, 8) == 5


def test_a_file_with_other_items_is_not_read(nodes, ranks, tmp_path):
    storage = str(tmp_path / "storage")
    to_nodes, to_storage = ranks(1), ranks(1)
    first = save_state_dict(shards(0, 1, 5), nodes[0], SOLO, storage="per_node", async_save=to_nodes[0])
    Save(shards(0, 1, 6, 8), storage, SOLO, SaveOptions(async_save=to_storage[0]), first.written).run().result()
    assert load_shards(storage, 1, 0, 8) == 6


def mapped_by(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        return [line for line in file if ".safetensors" in line]


def test_a_writer_keeps_no_file_mapped_after_its_save(nodes, ranks, tmp_path):
    """The pages of a removed file in memory would stay until the writer's next save."""
    to_nodes, to_storage = ranks(1), ranks(1)
    first = save_state_dict(shards(0, 1, 5), nodes[0], SOLO, storage="per_node", async_save=to_nodes[0])
    options = SaveOptions(async_save=to_storage[0])
    Save(shards(0, 1, 5), str(tmp_path / "storage"), SOLO, options, first.written).run().result()
    assert not mapped_by(to_storage[0].pid) and not mapped_by(os.getpid())


def test_a_save_to_storage_does_not_depend_on_the_save_to_nodes(nodes, ranks, tmp_path, caplog):
    """That has failed meanwhile, and has removed its files: the tensors are still there."""
    to_nodes, to_storage = ranks(1), ranks(1)
    first = save_state_dict(shards(0, 1, 5), nodes[0], SOLO, storage="per_node", async_save=to_nodes[0])
    first.result()
    shutil.rmtree(nodes[0])
    options = SaveOptions(async_save=to_storage[0])
    Save(shards(0, 1, 5), str(tmp_path / "storage"), SOLO, options, first.written).run().result()
    assert load_shards(str(tmp_path / "storage"), 1, 0) == 5
    assert "the state is copied once more for the save to " in caplog.text
