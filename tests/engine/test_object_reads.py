"""Requests to an object store are those that a simulated one logs."""

from __future__ import annotations

import pytest

pytest.importorskip("s3fs")

from paddle_flexckpt.engine.rehearsal import rehearse
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.loader import load_state_dict
from tests.engine.rehearsed import save, state_of
from tests.engine.test_rehearsal import layout
from tests.media.test_object_store import open_run
from tests.object_store import running_store

HEAD = 16 << 10


@pytest.fixture(scope="module")
def store():
    with running_store() as running:
        yield running


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp=1", "tp=2"),
        ("tp=4", "tp=2,sharding=v2:2"),
        ("sharding=v2:3", "sharding=v1:2"),
        ("pp=2,tp=2", "dp=1"),
        ("tp=2", "pp=2,tp=4"),
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
