"""Checkpoints on a local S3 server: real requests, counted, lost and refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
pytest.importorskip("flask_cors")

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import lease, remote, retrying
from paddle_flexckpt.media.backend import exists, map_files, publish, write_file
from paddle_flexckpt.media.opening import open_storage, reopen
from paddle_flexckpt.native.directory import latest, list_checkpoints
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.background.helpers import SOLO
from tests.documents import code_block
from tests.media.test_remote import Clock
from tests.native.two_ranks import RANKS, load, save
from tests.s3_server import BUCKET, LEAST_PART_BYTES, SECRET, Refusal, Requests, running_server
from tests.saved import data_file, short, short_names

MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Neither between tries, nor after the only one of s3fs."""
    real = asyncio.sleep
    monkeypatch.setattr(retrying, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", LEAST_PART_BYTES)


def succeeded(outcomes):
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def wide(version: int, elements: int = 800) -> np.ndarray:
    return np.arange(elements, dtype=np.float32) + version


def save_wide(storage, version: int, unique_id: int | None = 0) -> list:
    """Every rank's outcome; each of two ranks writes 4.8 kB, so five parts."""

    def job(comm):
        own = {f"w{comm.rank}": ShardedWeight(f"w{comm.rank}", wide(version), (800,), (800,), (0,))}
        own["b"] = ShardedWeight("b", wide(version), (800,), (800,), (0,))
        return save_state_dict(own, storage, comm, unique_id=unique_id)

    return SimulatedWorld(RANKS).run_all(job)


def load_wide(storage) -> int:
    def job(comm):
        found = {f"w{comm.rank}": ShardedWeight(f"w{comm.rank}", wide(-1), (800,), (800,), (0,))}
        found["b"] = ShardedWeight("b", wide(-1), (800,), (800,), (0,))
        load_state_dict(found, storage, comm)
        version = int(found["b"].local_tensor[0])
        assert all((shard.local_tensor == wide(version)).all() for shard in found.values())
        return version

    (version,) = set(SimulatedWorld(RANKS).run(job))
    return version


def test_a_whole_cycle(server, monkeypatch):
    storage = server.storage(server.new_url())
    succeeded(save(storage, 1, None))
    assert load(storage) == 1
    succeeded(save(storage, 2, 0))
    assert load(storage) == 2
    succeeded(save(storage, 3, None))
    assert (load(storage, 0), load(storage, 1), load(storage)) == (2, 3, 3)
    files = [f"{rank}_{save_id}.safetensors" for rank in (0, 1) for save_id in ("0-2", "1-3")]
    assert short_names(storage) == sorted(["0.manifest", "1.manifest", *files])
    assert [key.rsplit("/")[-1] for key in server.objects(storage.path)] == sorted(storage.names())
    assert server.uploads() == []
    report = verify_checkpoint(storage, 1)
    assert report.ok
    assert report.bytes_verified == report.total_bytes
    # In a process of its own, as a background writer has it.
    assert reopen(storage.reopen_token()).names() == storage.names()


def test_what_is_listed(server):
    root = server.storage(server.new_url())
    assert not exists(root)
    assert list_checkpoints(root) == []
    for name in ("a b%20c", "plain"):
        succeeded(save(root.child(name), 1, None))
    # A console's marker of a directory.
    marker = f"{root.path}/plain/"[len(f"s3://{BUCKET}/") :]
    server.client().call_s3("put_object", Bucket=BUCKET, Key=marker, Body=b"")
    assert exists(root)
    assert sorted(root.names("directories")) == ["a b%20c", "plain"]
    assert root.names() == []
    found = list_checkpoints(root)
    assert [(info.path, info.complete) for info in found] == [
        (f"{root.path}/a b%20c", True), (f"{root.path}/plain", True)
    ]  # fmt: skip
    assert latest(root.child("plain")).unique_id == 0
    assert short_names(root.child("plain")) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors"]
    lost = data_file(root.child("plain"))
    server.client().rm_file(f"{root.path}/plain/{lost}")
    (info,) = list_checkpoints(root.child("plain"))
    assert not info.complete
    assert f"{lost} is missing" in info.problem


def test_listings_of_more_than_a_page(server):
    storage = server.storage(server.new_url())
    map_files(storage, lambda number: write_file(storage, f"{number}.x", b""), range(7))
    medium = storage._medium
    real = medium.file_system.call_s3

    def in_pages(operation, **parameters):
        return real(operation, **parameters, **({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    medium.file_system.call_s3 = in_pages
    try:
        assert sorted(storage.names()) == [f"{number}.x" for number in range(7)]
    finally:
        del medium.file_system.call_s3


def test_requests_of_a_load(server, monkeypatch):
    """One request opens a file; what follows is read in windows that grow, without reading past the end."""
    storage = server.storage(server.new_url())
    whole = np.random.default_rng(0).integers(0, 255, 24 * MIB, dtype=np.uint8)
    shard = ShardedWeight("w", whole, whole.shape, whole.shape, (0,))
    succeeded(SimulatedWorld(1).run_all(lambda comm: save_state_dict({"w": shard}, storage, comm)))
    target = ShardedWeight("w", np.zeros_like(whole), whole.shape, whole.shape, (0,))
    requests = Requests(monkeypatch)
    report = SimulatedWorld(1).run(lambda comm: load_state_dict({"w": target}, storage, comm))[0]
    assert (target.local_tensor == whole).all()
    assert report.bytes_verified == report.bytes_read == 24 * MIB
    # 16 KiB with the opening, then about 1, 2, 4, 8, 8 and the rest.
    assert len(requests.of("GET", "safetensors")) <= 8
    assert requests.of("HEAD") == []


def test_columns_are_read_in_blocks_and_not_run_by_run(server, monkeypatch):
    """64 runs of 64 KiB: locally each is worth a read, here they are not."""
    storage = server.storage(server.new_url())
    whole = np.arange(64 * 32768, dtype=np.float32).reshape(64, 32768)
    shard = ShardedWeight("w", whole, whole.shape, whole.shape, (0, 0))
    succeeded(SimulatedWorld(1).run_all(lambda comm: save_state_dict({"w": shard}, storage, comm)))
    target = ShardedWeight("w", np.zeros((64, 16384), np.float32), (64, 16384), whole.shape, (0, 16384))
    requests = Requests(monkeypatch)
    SimulatedWorld(1).run(lambda comm: load_state_dict({"w": target}, storage, comm))
    assert (target.local_tensor == whole[:, 16384:]).all()
    assert len(requests.of("GET", "safetensors")) <= 6


def test_an_upload_in_parts_of_the_least_size(server, monkeypatch):
    """Parts, each of at least 5 MiB, in bounded memory."""
    storage = server.storage(server.new_url(), part_bytes=5 * MIB, bytes_at_once=5 * MIB)
    requests = Requests(monkeypatch)
    block = memoryview(os.urandom(MIB))
    tracemalloc.start()
    with storage.create("x") as file:
        for _ in range(51):
            file.write(block)
        file.write(b"end")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(requests.of("PUT", "partNumber")) == 11
    assert len(requests.of("POST", "uploads")) == 1
    assert len(requests.of("POST", "uploadId")) == 1
    with storage.open("x") as opened:
        assert opened.size == 51 * MIB + 3
        assert opened.read(50 * MIB + 7, MIB) == bytes(block[7:]) + b"end"
    assert server.uploads() == []
    # One part being filled, and one under way, of which the layers of HTTP have copies.
    assert peak < 30 * MIB


def test_a_save_in_parts(server, small_parts, monkeypatch):
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    requests = Requests(monkeypatch)
    succeeded(save_wide(storage, 1))
    assert len(requests.of("PUT", "partNumber")) >= 2 * 5
    assert load_wide(storage) == 1
    assert verify_checkpoint(storage).ok
    assert server.uploads() == []


@pytest.mark.parametrize("fails", ["a part", "a part, and giving it up", "the end of the upload", "a part, sent again"])
def test_an_upload_that_fails_leaves_nothing(server, small_parts, monkeypatch, fails):
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    succeeded(save_wide(storage, 1))
    before = server.objects(storage.path)

    given_up = []

    def answer(number, method, name):
        if method == "DELETE" and "uploadId" in name and fails.endswith("giving it up"):
            given_up.append(name)
            return 403 if given_up.count(name) == 1 else None
        if fails.startswith("a part"):
            status = 503 if fails.endswith("again") else 403
            return status if "partNumber=3" in name and "1_0-" in name else None
        return 403 if method == "POST" and "uploadId" in name else None

    with monkeypatch.context() as patch:
        requests = Requests(patch, answer)
        outcomes = save_wide(storage, 2)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    if fails == "a part, sent again":
        assert "(6 attempts in" in str(outcomes[0])
        assert len(requests.of("PUT", "partNumber=3")) == 7
    assert f"{storage.path}/1_0-2.safetensors" in short(str(outcomes[0]))
    assert server.uploads() == []
    assert server.objects(storage.path) == before


def test_parts_grow_with_files_whose_size_is_known(server, small_parts, monkeypatch):
    """And for the others too many parts are an error with a remedy."""
    from paddle_flexckpt.media import s3

    for module in (s3, remote):
        monkeypatch.setattr(module, "MOST_PARTS", 3)
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    requests = Requests(monkeypatch)
    with storage.create("x", size=5 * LEAST_PART_BYTES) as file:
        for _ in range(5):
            file.write(bytes(LEAST_PART_BYTES))
    assert len(requests.of("PUT", "partNumber")) == 3
    # What is there in one piece is sent as one.
    write_file(storage, "z", bytes(5 * LEAST_PART_BYTES))
    assert len(requests.of("PUT", "partNumber")) == 3
    storage.remove("z")
    with pytest.raises(OSError, match=r"S3 takes 3 parts.*part_bytes=") as caught, storage.create("y") as file:
        file.write(bytes(5 * LEAST_PART_BYTES))
    assert caught.value.filename == f"{storage.path}/y"
    assert storage.names() == ["x"]
    assert server.uploads() == []


@pytest.mark.parametrize("fate", ["lost", 503])
def test_every_request_may_fail_once(server, small_parts, monkeypatch, fate):
    """Also where the request was carried out and only its answer is lost."""
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    tried: set[tuple[str, str]] = set()

    def answer(number, method, name):
        known = (method, name) in tried
        tried.add((method, name))
        return None if known else fate

    with monkeypatch.context() as patch:
        requests = Requests(patch, answer)
        succeeded(save_wide(storage, 1))
        succeeded(save_wide(storage, 2))
        assert load_wide(storage) == 2
    assert len(requests.seen) > len(tried) >= 40
    assert server.uploads() == []
    assert short_names(storage) == ["0.manifest", "0_0-2.safetensors", "1_0-2.safetensors"]


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
def test_a_file_that_is_in_its_own_way(server, small_parts, monkeypatch, parts):
    """The request that created it was carried out, its answer was lost, and it cannot be created again."""
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    data = os.urandom(3 * LEAST_PART_BYTES if parts else 100)
    method = "POST" if parts else "PUT"
    fates = ["lost", 404] if parts else ["lost"]

    def answer(number, kind, name):
        return fates.pop(0) if fates and kind == method and (not parts or "uploadId" in name) else None

    with monkeypatch.context() as patch:
        Requests(patch, answer)
        with storage.create("x") as file:
            file.write(data)
    assert fates == []
    assert storage.read("x") == data
    assert server.uploads() == []
    # Somebody else's is not taken for one's own.
    fates += ["lost", 404] if parts else ["refused"]
    write_file(storage, "y", data[::-1])
    with monkeypatch.context() as patch:
        Requests(patch, answer)
        with pytest.raises(OSError), storage.create("y") as file:
            file.write(data)
    assert storage.read("y") == data[::-1]


def test_a_refusal_is_not_asked_again(server, monkeypatch):
    storage = server.storage(server.new_url())
    with monkeypatch.context() as patch:
        requests = Requests(patch, lambda number, method, name: 403 if method == "PUT" and "safe" in name else None)
        outcomes = save(storage, 1, None)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "injected 403" in str(outcomes[0])
    assert "attempts" not in str(outcomes[0])
    assert short_names(requests.of("PUT", "safetensors")) == ["0_0-1.safetensors", "1_0-1.safetensors"]
    assert storage.names() == []
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there(server, monkeypatch):
    outcomes = save(server.storage("s3://no-such-bucket/a"), 1, None)
    assert all("no-such-bucket" in str(outcome) and "bucket does not exist" in str(outcome) for outcome in outcomes)
    nobody = open_storage(f"s3://{BUCKET}/a", **{**server.options, "endpoint_url": "http://127.0.0.1:1"}, retries=1)
    outcomes = save(nobody, 1, None)
    assert all("(2 attempts in" in str(outcome) for outcome in outcomes)
    assert SECRET not in str(outcomes)


def test_a_directory_is_not_made_where_an_object_is(server):
    storage = server.storage(server.new_url())
    write_file(storage, "x", b"1")
    with pytest.raises(ValidationError, match="is not a directory"):
        storage.child("x").make_directory()


def test_a_file_is_created_once(server, monkeypatch):
    storage = server.storage(server.new_url())
    with storage.create("x") as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), storage.create("x") as file:
        file.write(b"second")
    assert storage.read("x") == b"first"
    # Two that create it at a time.
    one, two = storage.create("y"), storage.create("y")
    one.write(b"one")
    two.write(b"two")
    two.finish()
    with pytest.raises(FileExistsError):
        one.finish()
    one.abort()
    assert storage.read("y") == b"two"


@pytest.mark.parametrize("there", [None, b"first"])
@pytest.mark.parametrize("other", [None, b"other's", b"first"])
@pytest.mark.parametrize("may", [True, False])
def test_a_commit_replaces_what_was_seen_or_asks_again(server, monkeypatch, there, other, may):
    """A saver that is stopped between its last look at the lease and its commit must not undo that of another."""
    storage = server.storage(server.new_url())
    elsewhere = reopen(storage.reopen_token())
    if there is not None:
        write_file(storage, "m", there)
    asked: list[bool] = []

    def ask() -> None:
        asked.append(True)
        if len(asked) > 1 and not may:
            raise CheckpointError("somebody has taken over")

    monkeypatch.setattr(storage.locks, "ensure_held", ask)
    late = contextlib.nullcontext()
    if other != there and not may:
        late = pytest.raises(CheckpointError, match="^somebody has taken over$")
    with late, storage.create("m", "publish", 3) as file:
        file.write(b"own")
        file.note_replaced()
        if other is None:
            elsewhere.remove("m")
        else:
            write_file(elsewhere, "m", other)
    # What is the same to the byte is the same.
    expected = b"own" if may or other == there else other
    assert (elsewhere.read("m") if expected is not None else elsewhere.names()) == (expected or [])
    assert len(asked) == (1 if other == there else 2)


def test_a_commit_whose_answer_is_lost_is_known_by_its_bytes(server, monkeypatch):
    storage = server.storage(server.new_url())
    for content in (b"one", b"two"):
        fates = ["lost"]
        with monkeypatch.context() as patch:
            requests = Requests(patch, lambda number, method, name: fates.pop() if fates and method == "PUT" else None)  # noqa: B023
            publish(storage, "m", content)
        assert storage.read("m") == content
        assert len(requests.of("PUT")) == 2


def test_a_commit_to_an_object_that_changes_all_the_time_is_an_error(server, monkeypatch):
    storage = server.storage(server.new_url())
    elsewhere, count = reopen(storage.reopen_token()), iter(range(100))
    monkeypatch.setattr(storage.locks, "ensure_held", lambda: write_file(elsewhere, "m", b"%d" % next(count)))
    with pytest.raises(FileExistsError), storage.create("m", "publish", 3) as file:
        file.write(b"own")
    assert elsewhere.read("m") == b"4"


@pytest.mark.parametrize("status", [400, 412, 501])
def test_a_store_that_refuses_whatever_has_a_condition_on_the_tag_is_committed_to(server, monkeypatch, status):
    storage = server.storage(server.new_url())
    _WithoutConditions(monkeypatch, says_so=status, conditions={"If-Match"})
    for content in (b"one", b"two"):
        publish(storage, "m", content)
        assert storage.read("m") == content


@pytest.mark.parametrize("known", [(), ("IfNoneMatch",)])
def test_a_client_that_does_not_know_a_condition_commits_without_it(server, monkeypatch, known):
    """Botocore before 1.35.69 knows no IfMatch."""
    storage = server.storage(server.new_url())
    monkeypatch.setattr(storage._medium, "_takes", known.__contains__)
    for content in (b"one", b"two"):
        publish(storage, "m", content)
        assert storage.read("m") == content


def test_a_store_without_conditional_writes(server, monkeypatch):
    """It says so, and savers are kept apart by the lease alone."""
    storage = server.storage(server.new_url(), lease_seconds=3.0)
    store = _WithoutConditions(monkeypatch, says_so=501)
    with storage.create("x") as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), storage.create("x") as file:
        file.write(b"second")
    assert store.asked == 1
    succeeded(save(storage, 1, None))
    assert load(storage) == 1


def test_a_store_that_ignores_conditions_is_found_out(server, monkeypatch):
    """The lease waits before it counts, as another one may have been written over."""
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    storage = server.storage(server.new_url())
    storage.locks.take().release()
    assert clock.pauses == []
    _WithoutConditions(monkeypatch)
    storage = server.storage(server.new_url())
    storage.locks.take().release()
    assert clock.pauses == [3.0]
    # What has been found out once counts for all directories of the store.
    storage.child("below").locks.take().release()
    assert clock.pauses == [3.0, 3.0]


class _WithoutConditions:
    """Takes conditions off every request, or refuses those that have one, with the status ``says_so``."""

    def __init__(self, monkeypatch, says_so=0, conditions=frozenset({"If-None-Match", "If-Match"})) -> None:
        import aiobotocore.httpsession

        self.asked = 0
        real = aiobotocore.httpsession.AIOHTTPSession.send

        async def send(session, request):
            for condition in conditions & {*request.headers}:
                self.asked += 1
                if says_so:
                    return Refusal(request.url, says_so)
                del request.headers[condition]
            return await real(session, request)

        monkeypatch.setattr(aiobotocore.httpsession.AIOHTTPSession, "send", send)


@pytest.mark.slow
def test_old_or_new_wherever_the_network_ends(server, small_parts, monkeypatch):
    """From each request of a save in turn, nothing gets through any more: as if all ranks had died."""
    monkeypatch.setattr(lease, "time", Clock())  # nobody waits for real for a dead save's lease
    url = server.new_url()
    storage = server.storage(url, part_bytes=LEAST_PART_BYTES)
    doomed = server.storage(url, part_bytes=LEAST_PART_BYTES, retries=0)
    succeeded(save_wide(storage, 1))
    with monkeypatch.context() as patch:
        requests = Requests(patch)
        succeeded(save_wide(storage, 2))
    count = len(requests.seen)
    assert count >= 24
    old, seen = 2, set()
    # Each point costs a save, a load and another save: some of them here, and all of them on a simulated store.
    for at in range(1, count, 7):
        with monkeypatch.context() as patch:
            requests = Requests(patch, lambda number, method, name, at=at: "refused" if number >= at else None)
            outcomes = save_wide(doomed, old + 1)
        where = f"from request {at} on: {requests.seen[at:]}"
        failed = {isinstance(outcome, CheckpointError) for outcome in outcomes}
        # Of a lease that cannot be given back the next save takes care.
        assert failed == {True} or {name for _, name in requests.seen[at:]} == {".lease"}, where
        found = load_wide(storage)
        assert found in (old, old + 1), where
        seen.add(found - old)
        succeeded(save_wide(storage, old + 2))
        assert server.uploads() == [], where
        old += 2
    assert seen == {0, 1}
    assert load_wide(storage) == old
    assert len(storage.names()) == 3


def test_a_dead_save_leaves_no_upload_behind(server, small_parts, monkeypatch):
    """What a process that was killed had begun to send is not in any listing of files."""
    storage = server.storage(server.new_url(), part_bytes=LEAST_PART_BYTES)
    directory = open_to_save(storage)
    ticket = directory.open_save(None, 2)
    upload = storage.create(ticket.data_file(1))
    upload.write(bytes(3 * LEAST_PART_BYTES))
    other = storage.create("5_77.safetensors")
    other.write(bytes(3 * LEAST_PART_BYTES))
    assert len(server.uploads()) == 2
    succeeded(save_wide(storage, 1, None))
    assert [key.rsplit("/")[-1] for key in server.uploads()] == ["5_77.safetensors"]
    other.abort()
    upload.abort()
    assert server.uploads() == []
    assert ticket.marker_file not in storage.names()


def test_a_store_that_does_not_list_uploads_is_saved_to(server, monkeypatch, caplog):
    storage = server.storage(server.new_url())
    open_to_save(storage).open_save(None, 2)
    Requests(monkeypatch, lambda number, method, name: 403 if "uploads" in name else None)
    succeeded(save(storage, 1, None))
    assert "could not be looked for" in caplog.text


def test_two_savers(server):
    storage = server.storage(server.new_url(), lease_seconds=3.0)
    lock = open_to_save(storage).lock()
    outcomes = save(storage, 1, None)
    assert all(f"another save is writing to {storage.path}" in str(outcome) for outcome in outcomes)
    lock.release()
    succeeded(save(storage, 1, None))
    assert ".lease" not in [key.rsplit("/")[-1] for key in server.objects(storage.path)]


def test_a_save_in_the_background(server):
    """The process that writes gets credentials and lease, and no file has the ones in it."""
    storage = server.storage(server.new_url())
    with BackgroundWriter() as writer:
        handles = [save_state_dict({"w": wide(version)}, storage, SOLO, async_save=writer) for version in (1, 2)]
        assert [handle.result().unique_id for handle in handles] == [0, 1]
    target = {"w": np.zeros(800, np.float32)}
    load_state_dict(target, storage, SOLO)
    assert (target["w"] == wide(2)).all()
    objects = server.objects(storage.path)
    assert short_names(key.rsplit("/")[-1] for key in objects) == [
        "0.manifest", "0_0-1.safetensors", "0_1-2.safetensors", "1.manifest"
    ]  # fmt: skip
    assert not [key for key, data in objects.items() if SECRET.encode() in data]


def test_a_lost_manifest_is_rebuilt(server):
    storage = server.storage(server.new_url())
    succeeded(save(storage, 1, None))
    storage.remove("0.manifest")
    with pytest.raises(ValidationError, match="its manifest has been lost"):
        verify_checkpoint(storage)
    repair_manifest(storage, 0)
    assert load(storage) == 1


def test_damage_is_found(server):
    storage = server.storage(server.new_url())
    succeeded(save(storage, 1, None))
    name = data_file(storage, 1)
    data = bytearray(storage.read(name))
    data[-1] ^= 1
    write_file(storage, name, bytes(data))
    assert [problem.file for problem in verify_checkpoint(storage).problems] == [f"{storage.path}/{name}"]
    with pytest.raises(CorruptCheckpointError, match="are damaged"):
        load(storage)


def test_the_example_of_the_guide(server, monkeypatch):
    """Its URL and its credentials are those of the server."""
    pytest.importorskip("paddle")
    import paddle_flexckpt as fc

    url, state = server.new_url(), {"w": wide(1)}
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    code = code_block("docs/guide.md", "import open_storage").replace("s3://bucket/run", url)
    given = ", ".join(f"{name}={value!r}" for name, value in server.options.items())
    code = code.replace("key=..., secret=..., endpoint_url=...", given)
    assert given in code
    names = {"fc": fc, "state": state}
    exec(code, names)
    assert names["storage"].path == url
    assert (state["w"] == wide(1)).all()


def test_the_command_line_takes_urls(server, monkeypatch, capsys):
    """Credentials and endpoint come from the environment."""
    url = server.new_url()
    storage = server.storage(url)
    succeeded(save(storage, 1, None))

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments, code=0):
        assert main(arguments) == code
        return "".join(capsys.readouterr())

    done = subprocess.run([sys.executable, "-m", "paddle_flexckpt", "inspect", url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{url}, id 0: saved by 2 ranks" in done.stdout
    assert done.stdout == run("inspect", url)
    assert "nothing is wrong" in run("verify", url)
    assert "0_0-1.safetensors" in short(run("inspect", url, "--key", "w"))
    assert "w" in run("explain", url, url, "--aoa", '{"aoa_statements": ["w -> w"]}')
    run("export", url, f"{url}-out")
    assert [key.rsplit("/")[-1] for key in server.objects(f"{url}-out")] == ["model.safetensors"]
    assert f"{url}-out has a checkpoint, so it is not empty" in run("export", url, f"{url}-out", code=1)
    assert f"{url}-nowhere does not exist" in run("inspect", f"{url}-nowhere", code=1)
    storage.remove("0.manifest")
    run("repair", url, "--id", "0")
    assert load(storage) == 1


def test_an_answer_that_ends_too_early_is_asked_for_again(server, monkeypatch):
    storage = server.storage(server.new_url())
    data = os.urandom(100_000)
    write_file(storage, "x", data)
    file_system = storage._medium.file_system
    real, calls = file_system.call_s3, []

    class Short:
        def __init__(self, body) -> None:
            self._body = body

        async def read(self) -> bytes:
            return (await self._body.read())[:-1]

        def close(self) -> None:
            self._body.close()

    def cut(operation, **parameters):
        answer = real(operation, **parameters)
        calls.append(operation)
        return {**answer, "Body": Short(answer["Body"])} if len(calls) <= 2 else answer

    monkeypatch.setattr(file_system, "call_s3", cut, raising=False)
    assert storage.read("x") == data
    assert calls == ["get_object"] * 3
