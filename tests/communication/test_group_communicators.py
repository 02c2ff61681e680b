"""Which way the bytes of a Paddle group take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.communication.group_communicators import PaddleCommunicator
from paddle_flexckpt.ranks.lost_ranks import announce


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
