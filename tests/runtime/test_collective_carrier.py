"""The device backend's carrier, with a stand-in for the backend: bounded rounds, and failures in any of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.runtime.carrier import CollectiveCarrier
from paddle_flexckpt.testing.simulated import SimulatedWorld

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle


class Backend:
    """``alltoall_single`` among threads, by way of the simulated world's collective."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        self.largest = 0
        monkeypatch.setattr(paddle.distributed, "alltoall_single", self.alltoall_single)

    def alltoall_single(self, received, send, in_split_sizes, out_split_sizes, group):
        data = send.numpy().tobytes()
        assert len(data) == sum(in_split_sizes)
        self.largest = max(self.largest, len(data))
        ends = np.cumsum(in_split_sizes)
        # Every rank sees all, and takes what is its own.
        parts = [data[end - size : end] for size, end in zip(in_split_sizes, ends)]
        head = np.asarray(in_split_sizes, dtype=np.int64).tobytes()
        mine = []
        for answer in self.here.comm.all_gather(head + b"".join(parts)):
            sizes = np.frombuffer(answer[: len(head)], dtype=np.int64)
            begin = len(head) + int(sizes[: group.rank].sum())
            mine.append(answer[begin : begin + int(sizes[group.rank])])
        assert [len(part) for part in mine] == list(out_split_sizes)
        if mine:
            received.set_value(paddle.to_tensor(np.frombuffer(b"".join(mine), dtype=np.uint8)))


def data_of(source: int, target: int) -> np.ndarray:
    size = (source * 7 + target * 3) % 4 * 100
    return np.random.default_rng([source, target]).integers(0, 256, size, dtype=np.uint8)


def exchange(backend: Backend, ranks: tuple[int, ...], round_bytes: int, spoil=lambda rank, out, into: None):
    """All-to-all of :func:`data_of`; ``spoil`` may replace a rank's streams. Returns outcomes, what arrived, rounds."""
    arrived = {}

    def job(comm):
        backend.here.comm = comm
        group = SimpleNamespace(ranks=list(ranks), rank=comm.position)
        carrier = CollectiveCarrier(group, comm.all_gather, round_bytes)
        assert carrier.address() == b""
        others = [rank for rank in ranks if rank != comm.rank]
        outgoing = {other: iter(np.array_split(data_of(comm.rank, other), 3)) for other in others}
        incoming = {}
        for other in others:
            arrived[other, comm.rank] = buffer = np.zeros(len(data_of(other, comm.rank)), dtype=np.uint8)
            incoming[other] = iter(np.array_split(buffer, 2))
        spoil(comm.rank, outgoing, incoming)
        carrier.exchange([b""] * len(ranks), outgoing, incoming)
        carrier.close()
        return comm.collectives

    return SimulatedWorld(len(ranks)).run_all(job, ranks), arrived


@pytest.mark.parametrize("ranks", [(0, 1), (5, 2, 9, 4)])
@pytest.mark.parametrize("round_bytes", [1, 64, 1 << 20])
def test_everybody_gets_what_was_sent_in_rounds(monkeypatch, ranks, round_bytes):
    backend = Backend(monkeypatch)
    outcomes, arrived = exchange(backend, ranks, round_bytes)
    for pair, data in arrived.items():
        assert (data == data_of(*pair)).all()
    quota = max(1, round_bytes // len(ranks))
    rounds = max(-(-len(data) // quota) for data in arrived.values())
    assert outcomes == [2 * rounds + 1] * len(ranks)  # sizes and data a round; the last round finds nothing
    assert backend.largest <= quota * len(ranks)


def failing(chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield next(chunks)
    raise OSError(5, "gone")


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
def test_a_rank_that_fails_takes_part_until_all_know(monkeypatch, side):
    def spoil(rank, outgoing, incoming):
        if rank == 1:
            streams = outgoing if side == "outgoing" else incoming
            for other in streams:
                streams[other] = failing(streams[other])

    outcomes, _ = exchange(Backend(monkeypatch), (0, 1, 2), 30, spoil)
    assert isinstance(outcomes[1], OSError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], CheckpointError)
        assert "ranks [1] failed" in str(outcomes[rank])


@pytest.mark.parametrize(("change", "words"), [(1, "fewer"), (-1, "more")])
def test_streams_of_another_length_than_planned_are_errors(monkeypatch, change, words):
    def spoil(rank, outgoing, incoming):
        if rank == 0:
            incoming[1] = iter([np.zeros(len(data_of(1, 0)) + change, dtype=np.uint8)])

    outcomes, _ = exchange(Backend(monkeypatch), (0, 1), 1 << 20, spoil)
    assert isinstance(outcomes[0], CheckpointError)
    assert words in str(outcomes[0])
