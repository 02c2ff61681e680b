"""Which way the bytes of a Paddle group take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.communication.group_communicators import PaddleCommunicator
from paddle_flexckpt.ranks.lost_ranks import announce
from tests.remedies.following import provoked


class Store:
    """As little of a key-value store as a rank that meets nobody needs."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def add(self, key: str, value: int) -> int:
        self.values[key] = str(int(self.values.get(key, 0)) + value)
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.fixture
def job(monkeypatch):
    """``job(own, world, store)``: the communicator of a group of ranks 0 and 1 in a job of given backends.

    Its ``sent`` is what Paddle's own collective was given.
    """
    dist = pytest.importorskip("paddle.distributed")
    communicator._host_channel.cache_clear()

    def make(own: str, world: str, store: Store | None, ranks=(0, 1), number: int = 7) -> PaddleCommunicator:
        group = SimpleNamespace(id=number, ranks=list(ranks), rank=0, backend=own)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(communicator, "default_store", lambda: store)
        monkeypatch.setattr(communicator, "_global_group", lambda: SimpleNamespace(backend=world))
        made = PaddleCommunicator(group)
        made.sent = []

        def all_gather_object(into, payload, group):
            made.sent.append(payload)
            into.extend([payload, b"of the other"])

        monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
        return made

    yield make
    communicator._host_channel.cache_clear()


DEVICES = ["NCCL", "BKCL", "XCCL", "FLAGCX"]
JOBS = [("GLOO", "GLOO"), *zip(DEVICES, DEVICES), ("GLOO", "NCCL"), ("NCCL", "GLOO")]


@pytest.mark.paddle
@pytest.mark.parametrize(("own", "world"), JOBS)
def test_sockets_of_the_hosts_carry_agreements_and_no_group_of_the_training(job, monkeypatch, own, world):
    store = Store()
    comm = job(own, world, store)
    announce(store, 1)
    monkeypatch.setattr(comm._channel, "_patience", 0.0)
    monkeypatch.setattr("paddle_flexckpt.ranks.lost_ranks.SPREAD_SECONDS", 0.0)
    monkeypatch.setattr("paddle_flexckpt.ranks.lost_ranks.FAREWELL_SECONDS", 0.0)
    with pytest.raises(LostRankError, match="rank 1 takes no part in .* rank 1 has not come for 0 s"):
        comm.all_gather(b"x")
    assert comm.sent == []


@pytest.mark.paddle
@pytest.mark.parametrize(("own", "world"), JOBS)
def test_without_a_store_a_job_is_refused(job, own, world):
    with pytest.raises(ValidationError, match="cannot agree on anything: .* Remedy .FC503.: .*init_parallel_env"):
        job(own, world, None)


@pytest.mark.paddle
def test_a_rank_alone_needs_no_store(job):
    assert job("NCCL", "NCCL", None, ranks=(0,)).all_gather(b"x") == [b"x"]


@pytest.mark.paddle
@pytest.mark.parametrize("backend", ["GLOO", "NCCL"])
def test_a_store_that_has_gone_before_the_first_call_means_that_rank_0_has(job, monkeypatch, backend):
    store = Store()
    monkeypatch.delattr(Store, "set")
    with pytest.raises(LostRankError, match="rank 0 is lost: the job's key-value store"):
        job(backend, backend, store)


@pytest.mark.paddle
def test_a_groups_ranks_meet_once(job):
    store = Store()
    first, again, other = (job("NCCL", "NCCL", store, number=number) for number in (7, 7, 8))
    assert first._channel is again._channel
    assert first._channel is not other._channel


CALLS = {
    "save": lambda state, path, **group: fc.save(path, state=state, **group),
    "load": lambda state, path, **group: fc.load(path, state=state, rng=False, **group),
    "check": lambda state, path, **group: fc.check(state=state, **group),
    "save_state_dict": lambda state, path, **group: fc.save_state_dict(state, path, **group),
    "load_state_dict": lambda state, path, **group: fc.load_state_dict(state, path, **group),
    "merge_sharded_state_dict": lambda state, path, **group: fc.merge_sharded_state_dict(
        path, f"{path}-m{len(group)}", **group
    ),
    "reshard_sharded_state_dict": lambda state, path, **group: fc.reshard_sharded_state_dict(state, state, **group),
    "publish": lambda state, path, **group: fc.publish(state, f"{path}-p{len(group)}", **group),
    "full_param": lambda state, path, **group: dict(fc.full_param(state, **group)),
    "digest": lambda state, path, **group: fc.digest(state, **group),
    "CheckpointManager": lambda state, path, **group: fc.CheckpointManager(f"{path}-run{len(group)}", keep=[], **group),
}


@pytest.mark.paddle
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_of_a_launched_job_that_is_not_initialised_does_not_work_as_if_alone(monkeypatch, tmp_path, call):
    paddle = pytest.importorskip("paddle")
    state, path = {"w": paddle.ones([4])}, tmp_path / "saved"
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    if "load" in call or "merge" in call:
        fc.save_state_dict(state, path, "self")
    before = sorted(tmp_path.rglob("*"))
    with provoked("communication/group_communicators.py", "call fleet.init() or", ValidationError) as caught:
        CALLS[call](state, str(path))
    assert "rank 1 of 2 " in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    CALLS[call](state, str(path), process_group="self")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "1")
    CALLS[call](state, str(path))
