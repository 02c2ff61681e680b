"""Checkpoints over a link with latency, errors and a budget, by the log of a simulated object store."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("s3fs")

from paddle_flexckpt.catalog import CheckpointError, UnreadableCheckpointError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import remote, retrying
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.media.read_ahead import LONGEST_REQUEST, ReadAhead
from paddle_flexckpt.media.remote_files import RemoteOutputFile
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.object_store import running_store
from tests.saved import data_file, short, short_names

KIB, MIB = 1 << 10, 1 << 20
SOLO = SoloCommunicator()
RNG = np.random.default_rng(0)
LARGE = {f"w{number}": RNG.standard_normal((512, 1024), dtype=np.float32) for number in range(12)}
SMALL = {f"s{number:03}": RNG.standard_normal(2048, dtype=np.float32) for number in range(256)}


@pytest.fixture(scope="module")
def store():
    with running_store() as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_SECONDS", 0.0)


def open_run(store, name: str, **options):
    """A directory on the store."""
    s3 = {"key": "tests", "secret": "secret-of-tests", "endpoint_url": f"http://127.0.0.1:{store.port}"}
    return open_storage(f"s3://bucket/{name}", client_kwargs={"region_name": "us-east-1"}, **s3, **options)


def save(storage, state) -> None:
    save_state_dict(state, storage, SOLO, unique_id=0)


def load(storage, state, **options):
    """What a checkpoint holds of a state, and the report."""
    target = {key: np.zeros_like(value) for key, value in state.items()}
    return target, load_state_dict(target, storage, SOLO, **options)


def check_equal(found, state) -> None:
    assert all((found[key] == value).all() for key, value in state.items())


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_before():
    """Tests that let ranks die within a call leave threads, which the process of these tests may have run before."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def threads() -> list[str]:
    """The library's threads that this test has started, and that still run."""
    return [each.name for each in threading.enumerate() if each.name.startswith("flexckpt") and each not in BEFORE]


def test_a_large_load_has_many_requests_under_way_within_its_budget(store):
    storage = open_run(store, "large", requests_at_once=6, bytes_at_once=5 * LONGEST_REQUEST)
    store.set()
    save(storage, LARGE)
    store.set(latency=0.05)
    found, report = load(storage, LARGE)
    check_equal(found, LARGE)
    log = store.log
    assert report.bytes_read == report.bytes_verified == 24 * MIB
    assert report.bytes_extra == 0
    # The head of the file, and its parts.
    reads = log.of("GET", "safetensors")
    assert sorted(each.length for each in reads) == [16 * KIB, *[LONGEST_REQUEST] * 6]
    assert len({each.begin for each in reads[1:]}) == 6
    assert 1 < log.most_requests <= 6
    assert log.most_bytes <= 5 * LONGEST_REQUEST
    assert threads() == []


def test_one_request_at_a_time_where_no_more_are_allowed(store):
    storage = open_run(store, "single", requests_at_once=1)
    store.set(latency=0.01)
    save(storage, LARGE)
    check_equal(load(storage, LARGE)[0], LARGE)
    assert store.log.most_requests == 1


def test_small_tensors_share_requests_and_gaps_are_counted(store):
    storage = open_run(store, "small")
    store.set()
    save(storage, SMALL)
    store.set()
    found, report = load(storage, SMALL)
    check_equal(found, SMALL)
    assert report.bytes_extra == 0
    assert len(store.log.of("GET", "safetensors")) == 2
    # Every second one: the others are read over.
    half = {key: value for number, (key, value) in enumerate(SMALL.items()) if number % 2 == 0}
    store.set()
    found, report = load(storage, half)
    check_equal(found, half)
    assert len(store.log.of("GET", "safetensors")) == 2
    assert report.bytes_extra == 127 * 8 * KIB
    assert report.bytes_read == 255 * 8 * KIB
    # Two that are far from each other.
    ends = {key: SMALL[key] for key in ("s000", "s255")}
    store.set()
    found, report = load(storage, ends)
    check_equal(found, ends)
    assert report.bytes_extra == 0
    assert len(store.log.of("GET", "safetensors")) == 3


@pytest.mark.parametrize("verify", ["read", "full"])
def test_columns_come_in_blocks(store, verify):
    storage = open_run(store, f"columns-{verify}")
    store.set()
    save(storage, LARGE)
    target = {
        key: ShardedWeight(key, np.zeros((512, 256), np.float32), (512, 256), (512, 1024), (0, 256)) for key in LARGE
    }
    store.set(latency=0.02)
    report = load_state_dict(target, storage, SOLO, verify=verify)
    assert all((target[key].local_tensor == value[:, 256:512]).all() for key, value in LARGE.items())
    assert report.bytes_read == report.bytes_verified == 24 * MIB
    assert report.bytes_extra == 18 * MIB
    assert len(store.log.of("GET", "safetensors")) == 7
    assert store.log.most_requests > 1


@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_asked_for_that_was_not_announced(store, verify, dtype):
    """Runs of 64 KiB that are 1.5 MiB apart, rows, a whole tensor and small ones: read in columns, or with a cast."""
    storage = open_run(store, f"announced-{verify}-{dtype}")
    wide = RNG.standard_normal((12, 393216), dtype=np.float32)
    state = {"wide": wide, **{key: LARGE[key] for key in ("w0", "w1")}, **{key: SMALL[key] for key in ("s000", "s001")}}
    store.set()
    save(storage, state)
    parts = {
        "wide": (wide[:, 16384:32768], (0, 16384)), "w0": (LARGE["w0"], (0, 0)), "w1": (LARGE["w1"][300:400], (300, 0)),
        "s000": (SMALL["s000"], (0,)), "s001": (SMALL["s001"][100:200], (100,)),
    }  # fmt: skip
    target = {
        key: ShardedWeight(key, np.zeros(part.shape, dtype), part.shape, state[key].shape, offset)
        for key, (part, offset) in parts.items()
    }
    store.set()
    report = load_state_dict(target, storage, SOLO, verify=verify, dtype="cast")
    assert all((target[key].local_tensor == part).all() for key, (part, _) in parts.items())
    reads = [each for each in store.log.of("GET", "safetensors") if each.begin]
    assert sum(each.length for each in reads) == report.bytes_read
    assert len({each.begin for each in reads}) == len(reads)


@pytest.mark.parametrize(
    ("ranks", "unique_id", "most"),
    [
        # Lease, listing, marker, begin of the upload, data, its end, checks, manifest, marker, lease.
        (1, None, 10),
        # The replaced file goes before the marker.
        (1, 0, 11),
        (2, None, 10),
        (2, 0, 11),
    ],
)
def test_so_many_requests_of_a_save_wait_for_each_other(store, ranks, unique_id, most):
    storage = open_run(store, f"rounds-{ranks}-{unique_id}")
    half = {key: value[:256] for key, value in LARGE.items()}

    def work(comm) -> None:
        own = {f"{key}.{comm.rank}": value for key, value in (LARGE if ranks == 1 else half).items()}
        shards = {
            key: ShardedWeight(key, value, value.shape, value.shape, (0,) * value.ndim) for key, value in own.items()
        }
        save_state_dict(shards, storage, comm, unique_id=unique_id)

    store.set()
    SimulatedWorld(ranks).run(work)
    chains = []
    # The fewest: on a machine that is busy elsewhere, requests that are made together may not meet.
    while len(chains) < 5 and (not chains or len(chains[-1]) > most):
        store.set(latency=0.1)
        SimulatedWorld(ranks).run(work)
        chains.append([f"{each.method} {each.key}" for each in store.log.rounds()])
    assert len(min(chains, key=len)) == most, chains
    assert storage._medium.unfinished() == []
    assert not [name for name in storage.names("any") if not name.endswith((".manifest", ".safetensors"))]


def test_a_rank_alone_writes_no_part_and_lists_twice(store):
    storage = open_run(store, "alone")
    for count in range(2):
        store.set()
        save_state_dict(SMALL, storage, SOLO)
        log = store.log
        assert [each for each in log.entries if each.key.endswith(".part")] == []
        # Under the lock, and beside the last checks.
        assert len([each for each in log.entries if "list-type" in each.query]) == 2
        # The first save creates the lease twice, to see that the store refuses the second.
        assert [each.status for each in log.of("PUT", ".lease")] == ([200] if count else [200, 412])
    store.set()
    save_state_dict(SMALL, storage.child("below"), SOLO)
    assert [each.status for each in store.log.of("PUT", ".lease")] == [200]


def test_what_a_dead_save_left_is_removed_by_the_listing_of_the_next(store):
    storage = open_run(store, "dead")
    store.set()
    dead = open_to_save(storage).open_save(None, 2)
    with storage.create(dead.data_file(1)) as file:
        file.write(b"half")
    save_state_dict(SMALL, storage, SOLO)
    assert short_names(storage) == ["0_1-2.safetensors", "1.manifest"]


def test_a_file_that_is_there_ends_an_upload_that_has_begun(store, monkeypatch):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", MIB)
    storage = open_run(store, "there", part_bytes=MIB)
    store.set()
    storage._medium.put("x", b"first")
    with pytest.raises(FileExistsError), storage.create("x") as file:
        file.write(bytes(3 * MIB))
    assert storage.read("x") == b"first"
    assert storage._medium.unfinished() == []
    assert store.log.of("PUT", "there/x", "partNumber") == []
    assert threads() == []


def test_verification_and_export_have_many_requests_under_way_too(store):
    storage = open_run(store, "export")
    store.set()
    save(storage, LARGE)
    for call in (lambda: verify_checkpoint(storage), lambda: export_safetensors(storage, open_run(store, "exported"))):
        store.set(latency=0.03)
        call()
        assert store.log.most_requests > 1
        assert len(store.log.of("GET", f"export/{data_file(storage)}")) <= 13
        assert threads() == []


def test_parts_are_sent_at_the_same_time_within_the_budget(store, monkeypatch):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", MIB)
    storage = open_run(store, "parts", part_bytes=2 * MIB, requests_at_once=8, bytes_at_once=6 * MIB)
    store.set(latency=0.05)
    save(storage, LARGE)
    log = store.log
    parts = log.of("PUT", "safetensors", "partNumber")
    assert [int(each.query["partNumber"]) for each in parts] != []
    assert sorted(each.length for each in parts)[1:] == [2 * MIB] * 12
    assert 1 < max(sum(other.came <= each.came < other.ended for other in parts) for each in parts) <= 3
    assert log.most_requests <= 8
    assert log.most_bytes <= 6 * MIB
    check_equal(load(storage, LARGE)[0], LARGE)
    assert threads() == []


@pytest.mark.parametrize("errors", [0.01, 0.2])
def test_the_same_bytes_arrive_where_requests_fail(store, monkeypatch, errors):
    """500, 503, connections that are cut off before, after and amidst an answer."""
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", MIB)
    monkeypatch.setattr("paddle_flexckpt.media.read_ahead.LONGEST_REQUEST", 256 * KIB)
    storage = open_run(store, f"errors-{errors}", part_bytes=MIB, retries=8)
    failed = set()
    for seed in range(4):
        store.set(errors=errors, seed=seed)
        save(storage, LARGE)
        found, report = load(storage, LARGE)
        check_equal(found, LARGE)
        assert report.bytes_extra == 0
        log = store.log
        tries: dict[tuple, int] = {}
        for each in log.entries:
            if each.fault:
                failed.add(each.fault)
            if each.method == "GET" and "safetensors" in each.key:
                asked = (each.begin, each.length)
                tries[asked] = tries.get(asked, 0) + 1
        assert max(tries.values()) <= 9
        # What was not refused came once; some failed on each of both ways.
        good = [each for each in log.of("GET", "safetensors") if each.fault is None and each.begin]
        assert len(good) == len({each.begin for each in good})
    assert failed >= ({"500", "503", "drop", "lost", "cut"} if errors > 0.1 else {"500"} & failed)
    assert failed
    store.set()
    assert verify_checkpoint(storage).ok
    medium = storage._medium
    assert medium.unfinished() == []
    assert threads() == []


@pytest.mark.parametrize("fault", ["500", "503", "drop", "cut"])
def test_a_range_that_never_comes_is_an_error_with_file_and_reason(store, fault):
    storage = open_run(store, f"never-{fault}", retries=2)
    store.set()
    save(storage, LARGE)
    store.set(always={f"safetensors [] {8 * MIB}": fault})
    # The offset of a part that every load asks for.
    load(storage, LARGE)
    begin = sorted(each.begin for each in store.log.of("GET", "safetensors"))[3]
    store.set(always={f"{data_file(storage)} [] {begin}": fault})
    with pytest.raises(UnreadableCheckpointError, match=r"\(3 attempts in") as caught:
        load(storage, LARGE)
    text = str(caught.value)
    assert f"{storage.path}/0_0-1.safetensors" in short(text)
    reasons = {"500": "simulated 500", "503": "simulated 503", "drop": "onnection", "cut": "payload is not completed"}
    assert reasons[fault] in text
    failed = [each for each in store.log.of("GET", "safetensors") if each.begin == begin]
    assert len(failed) % 3 == 0
    assert threads() == []
    assert store.log.open_requests == 0


@pytest.mark.parametrize("fault", ["500", "drop"])
def test_a_part_that_cannot_be_sent_is_an_error_and_leaves_nothing(store, monkeypatch, fault):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", MIB)
    storage = open_run(store, f"unsent-{fault}", part_bytes=MIB, retries=2)
    store.set(always={"('partNumber', '5')": fault})
    with pytest.raises(CheckpointError, match=r"\(3 attempts in") as caught:
        save(storage, LARGE)
    assert f"{storage.path}/0_0-1.safetensors" in short(str(caught.value))
    tries = [each for each in store.log.of("PUT") if each.query.get("partNumber") == "5"]
    # aiohttp sends once more by itself where a connection that it had kept turns out to be closed.
    assert 3 <= len(tries) <= (3 if fault == "500" else 6)
    assert threads() == []
    assert storage._medium.unfinished() == []
    assert storage.names() == []
    assert store.log.open_requests == 0


def interrupted_at(real, number: int):
    """A method that an interrupt ends at a certain call."""
    calls = []

    def call(self, *arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(self, *arguments)

    return call


def test_an_interrupt_leaves_nothing_running(store, monkeypatch):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", MIB)
    storage = open_run(store, "interrupt", part_bytes=MIB)
    store.set()
    save(storage, LARGE)
    store.set(latency=0.05)
    for kind, method, call in (
        (ReadAhead, "read_into", lambda: load(storage, LARGE)),
        (RemoteOutputFile, "write", lambda: save(storage, LARGE)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, interrupted_at(getattr(kind, method), 5))
            with pytest.raises(KeyboardInterrupt):
                call()
        assert threads() == []
        assert storage._medium.unfinished() == []
        assert store.log.open_requests == 0
    assert len(store.log.of("GET", "safetensors")) < 8
