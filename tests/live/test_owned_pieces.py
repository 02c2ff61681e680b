"""Pieces that ranks write from their own memory: each byte once and in its place, and what is not written so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.live import owned_pieces
from paddle_flexckpt.live.owned_pieces import number_machines, write_piece
from paddle_flexckpt.live.publishing import publish
from paddle_flexckpt.media.local import OutputParts
from paddle_flexckpt.planning import Pieces
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld


@st.composite
def cuts(draw):
    """A box of a row-major array goes to a box of another, under a permutation of axes."""
    ndim = draw(st.integers(0, 4))
    extents = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    sides = []
    for order in (range(ndim), draw(st.permutations(range(ndim)))):
        low, high = (draw(st.lists(st.integers(0, 2), min_size=ndim, max_size=ndim)) for _ in range(2))
        shape = [extents[axis] + low[axis] + high[axis] for axis in order]
        steps = [int(np.prod(shape[place + 1 :])) for place in range(ndim)]
        strides = [0] * ndim
        for place, axis in enumerate(order):
            strides[axis] = steps[place]
        base = sum(low[axis] * strides[axis] for axis in range(ndim))
        sides.append((base, tuple(strides), int(np.prod(shape))))
    return StridedCopy(tuple(extents), *sides[0][:2], *sides[1][:2]), sides[0][2], sides[1][2]


@given(cuts(), st.sampled_from([3, 16, 1 << 20]))
def test_each_element_is_written_once_in_its_place(cut, chunk):
    copy, source_size, target_size = cut
    source = np.arange(source_size, dtype=np.uint16)
    expected = np.full(target_size, 999, dtype=np.uint16)
    copy.scatter_into(expected)[...] = copy.gather_from(source)
    found, requests, counted = np.full(target_size, 999, dtype=np.uint16), [], []

    def write(data, offset):
        requests.append((offset, len(data)))
        found.view(np.uint8)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    before, owned_pieces.CHUNK_BYTES = owned_pieces.CHUNK_BYTES, chunk
    try:
        write_piece(copy.simplified(), source, write, counted.append)
    finally:
        owned_pieces.CHUNK_BYTES = before
    assert np.array_equal(found, expected)
    assert sum(counted) == sum(length for _, length in requests) == 2 * copy.size
    assert requests == sorted(requests)
    if chunk > 2 * copy.size:
        table = [[np.asarray([each]) for each in (0, 0)]]
        (source_row, target_row), extents = table[0], np.asarray([copy.extents], dtype=np.int64).reshape(1, -1)
        strides = [
            np.asarray([each], dtype=np.int64).reshape(1, -1) for each in (copy.source_strides, copy.target_strides)
        ]
        bases = [np.asarray([each]) for each in (copy.source_base, copy.target_base)]
        pieces = Pieces(source_row, target_row, extents, bases[0], strides[0], bases[1], strides[1])
        # A run is no longer than the source lets it be written by one request.
        assert pieces.target_runs.tolist() == [len(requests)]


def test_a_place_that_is_none_is_of_one_rank_alone():
    assert number_machines((1, 3, 4, 6, 7), (b"a", b"", b"b", b"a", b"")).tolist() == [-1, 0, -1, -1, 2, -1, 0, -1]


def columns(name, value, rank, size):
    width = value.shape[1] // size
    own = value[:, rank * width : (rank + 1) * width].copy()
    return ShardedWeight(name, own, own.shape, value.shape, (0, rank * width))


@pytest.mark.parametrize(("width", "received"), [(1 << 15, 0), (1 << 14, (1 << 14) * 300 // 2)])
def test_tensors_of_many_short_runs_are_sent(tmp_path, width, received):
    """300 rows, half of each on one rank: 600 runs of 16 KiB, or of 8."""
    value = np.random.default_rng(0).integers(0, 255, (300, width), dtype=np.uint8)
    reports = SimulatedWorld(2).run(
        lambda comm: publish({"w": columns("w", value, comm.rank, 2)}, tmp_path / "out", comm)
    )
    assert sum(report.bytes_received for report in reports) == received
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert data[-value.nbytes :] == value.tobytes()


def test_ranks_begin_with_their_own_files_and_write_each_byte_once(tmp_path, monkeypatch):
    """Of four files, four ranks write to another one each, as long as they are equally fast."""
    values = {f"w{i}": np.full((8, 64), i, np.float32) for i in range(8)}
    opened, requests = {}, {}
    open_parts, write_at = OutputParts.__init__, OutputParts.write_at

    def noted(self, path):
        self.rank = int(path.split("/rank")[1][0])
        opened.setdefault(self.rank, []).append(path.rpartition("/")[2][:11])
        open_parts(self, path)

    def counted(self, data, offset):
        requests.setdefault(self.rank, []).append(len(data))
        write_at(self, data, offset)

    monkeypatch.setattr(OutputParts, "__init__", noted)
    monkeypatch.setattr(OutputParts, "write_at", counted)

    def job(comm):
        (tmp_path / f"rank{comm.rank}").symlink_to(tmp_path)
        state = {}
        for key, value in values.items():
            own = value[2 * comm.rank : 2 * comm.rank + 2].copy()
            state[key] = ShardedWeight(key, own, own.shape, value.shape, (2 * comm.rank, 0))
        return publish(state, tmp_path / f"rank{comm.rank}" / "out", comm)

    SimulatedWorld(4).run(job)
    files = [f"model-0000{number}" for number in (1, 2, 3, 4)]
    assert opened == {rank: files[rank:] + files[:rank] for rank in range(4)}
    # A header, and one run of each tensor.
    assert {rank: lengths[1:] for rank, lengths in requests.items()} == {rank: [512] * 8 for rank in range(4)}
