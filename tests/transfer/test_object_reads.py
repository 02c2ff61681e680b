"""Requests to an object store are those that a simulated one logs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("s3fs")

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.remote import PART_BYTES, count_sends
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.rehearsal import rehearse
from paddle_flexckpt.tools.save_rehearsal import rehearse_save
from paddle_flexckpt.transfer import read_counts
from tests.media.test_object_store import open_run
from tests.object_store import running_store
from tests.saved import data_file
from tests.tools.rehearsed import save, state_of
from tests.tools.test_rehearsal import layout

HEAD = 16 << 10


@pytest.fixture(scope="module")
def store():
    with running_store() as running:
        yield running


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("dp=1", "tp=2", marks=pytest.mark.slow),
        ("tp=4", "tp=2,sharding=v2:2"),
        pytest.param("sharding=v2:3", "sharding=v1:2", marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", "dp=1", marks=pytest.mark.slow),
        pytest.param("tp=2", "pp=2,tp=4", marks=pytest.mark.slow),
        ("sharding=stage3:2", "tp=2"),
    ],
)
def test_requests_are_those_of_a_load(store, saved, loaded):
    storage = open_run(store, f"{saved}-{loaded}".replace("=", "").replace(",", "").replace(":", ""))
    store.set()
    save(storage, layout(saved))
    target = layout(loaded)
    report = rehearse(storage, target, bytes_per_second=1e6, request_seconds=0.5)
    assert report.error == ""
    for each in report.ranks:
        rank = each.ranks[0]
        state = state_of(target.catalog(rank))
        store.set()
        load_state_dict(state, storage, SoloCommunicator(rank), optimizer_states="ignore")
        log = store.log.of("GET", "safetensors")
        heads = [entry for entry in log if entry.begin == 0 and entry.length == HEAD]
        assert each.object_requests == len(log)
        assert each.object_bytes == sum(entry.length for entry in log) - HEAD * len(heads)
    worst = max(each.object_bytes / 1e6 + each.object_requests * 0.5 for each in report.ranks)
    assert report.seconds["direct"] == worst


def test_a_checkpoint_on_a_disk_can_be_rehearsed_for_a_store(tmp_path, store):
    save(tmp_path, layout("tp=2"))
    storage = open_run(store, "the-same")
    store.set()
    save(storage, layout("tp=2"))
    said = [rehearse(place, layout("tp=4"), object_store=True).ranks for place in (str(tmp_path), storage)]
    requests = [[(each.object_requests, each.object_bytes) for each in ranks] for ranks in said]
    assert requests[0] == requests[1]
    assert min(requests[0])[0] > 0
    assert rehearse(str(tmp_path), layout("tp=4")).ranks[0].object_requests == 0


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp=1", "tp=2,dp=2"),
        ("tp=4", "tp=2,sharding=v2:2"),
        ("sharding=v2:3", "dp=3"),
        ("tp=2", "pp=2,tp=2"),
    ],
)
def test_requests_of_ranks_that_read_for_each_other_are_those_of_a_load(store, saved, loaded):
    storage = open_run(store, f"together-{saved}-{loaded}".replace("=", "").replace(",", "").replace(":", ""))
    store.set()
    save(storage, layout(saved, states=()))
    target = layout(loaded, states=())
    report = rehearse(storage, target, cooperative=True, bytes_per_second=1e6, request_seconds=0.5)
    assert report.error == ""

    def job(comm):
        state = state_of(target.catalog(comm.position))
        return load_state_dict(state, storage, comm, comm_method="cooperative")

    store.set()
    told = SimulatedWorld(target.strategy.ranks).run(job)
    log = store.log.of("GET", "safetensors")
    heads = [entry for entry in log if entry.begin == 0 and entry.length == HEAD]
    found = report.cooperative
    assert [each.bytes_read for each in told] == found["object_bytes"]
    assert sum(found["object_requests"]) == len(log)
    assert sum(found["object_bytes"]) == sum(entry.length for entry in log) - HEAD * len(heads)
    assert f", {len(log)} requests to an object store" in report.summary()
    assert report.seconds["cooperative"] > max(found["object_bytes"]) / 1e6


@pytest.mark.parametrize("text", ["dp=1", "tp=4", "tp=2,sharding=v2:2", "pp=2", "sharding=stage3:2"])
def test_requests_of_a_save_are_those_that_send_its_data_files(store, text):
    storage = open_run(store, f"save-{text}".replace("=", "").replace(",", "").replace(":", ""))
    target = layout(text, states=())
    ranks = target.strategy.ranks
    store.set()
    SimulatedWorld(ranks).run(lambda comm: save_state_dict(state_of(target.catalog(comm.position)), storage, comm))
    log = store.log
    sent = [
        sum(len(log.of(method, f"/{data_file(storage, rank)}")) for method in ("HEAD", "POST", "PUT"))
        for rank in range(ranks)
    ]
    report = rehearse_save(target, object_store=True)
    assert report.ranks["object_requests"] == sent
    assert max(sent) > 3
    assert "object_requests" not in rehearse_save(target).ranks


def test_all_ranks_are_planned_at_once(tmp_path, monkeypatch):
    save(tmp_path, layout("tp=2", states=()))
    calls = []
    plan = read_counts.plan_for_readers
    monkeypatch.setattr(read_counts, "plan_for_readers", lambda *given: calls.append(given) or plan(*given))
    report = rehearse(str(tmp_path), layout("tp=4,sharding=v2:8", states=()), object_store=True, cooperative=True)
    assert report.world_size == 32
    assert len(calls) == 2  # of direct reads, and of those together


def test_a_file_is_sent_in_parts_where_it_is_longer_than_one():
    sizes = np.asarray([0, 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 10_001 * PART_BYTES])
    assert count_sends(sizes).tolist() == [0, 1, 1, 5, 5, 10_003]
    assert count_sends(sizes[:4], PART_BYTES // 2).tolist() == [0, 1, 5, 6]
