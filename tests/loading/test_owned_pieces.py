"""Pieces that ranks write from their own memory: each byte once and in its place, and what is not written so."""

from __future__ import annotations

import errno
import fcntl

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.loading import live_model
from paddle_flexckpt.loading.live_model import number_machines, write_piece
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.media.local import OutputParts
from paddle_flexckpt.planning.matching import Pieces
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

    before, live_model.CHUNK_BYTES = live_model.CHUNK_BYTES, chunk
    try:
        write_piece(copy.simplified(), source, write, counted.append)
    finally:
        live_model.CHUNK_BYTES = before
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
        assert pieces.is_straight.tolist() == [copy.simplified().is_contiguous() == (True, True)]


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


def rows(values, rank, size):
    state = {}
    for key, value in values.items():
        own = value[rank * len(value) // size : (rank + 1) * len(value) // size].copy()
        state[key] = ShardedWeight(key, own, own.shape, value.shape, (rank * len(value) // size, 0))
    return state


@pytest.fixture
def requests(monkeypatch):
    """By rank, whose directory is named for it: names of files and lengths of what is written to them, in order."""
    made, open_parts, write_at = {}, OutputParts.__init__, OutputParts.write_at

    def noted(self, path):
        self.rank, self.name = int(path.split("/rank")[1][0]), path.rpartition("/")[2][:11]
        open_parts(self, path)

    def counted(self, data, offset):
        made.setdefault(self.rank, []).append((self.name, len(data)))
        write_at(self, data, offset)

    monkeypatch.setattr(OutputParts, "__init__", noted)
    monkeypatch.setattr(OutputParts, "write_at", counted)
    return made


def publish_rows(values, size, tmp_path):
    for rank in range(size):
        (tmp_path / f"rank{rank}").symlink_to(tmp_path)
    world = SimulatedWorld(size)
    return world.run(lambda comm: publish(rows(values, comm.rank, size), tmp_path / f"rank{comm.rank}" / "out", comm))


def test_ranks_begin_with_their_own_files_and_make_one_request_a_tensor(tmp_path, requests):
    publish_rows({f"w{i}": np.full((8, 64), i, np.float32) for i in range(8)}, 4, tmp_path)
    files = [f"model-0000{number}" for number in (1, 2, 3, 4)]
    for rank, made in requests.items():
        assert made[0][0] == files[rank]  # the header
        assert sorted(made[1:]) == sorted([(name, 512) for name in files] * 2)
    assert len(requests) == 4


def test_a_file_that_another_rank_writes_to_is_passed_over_and_waited_for_last(tmp_path, monkeypatch, requests):
    """Rank 0's own file is another's turn, until it has written to the other file and waits."""
    values = {f"w{i}": np.full((8, 64), i, np.float32) for i in range(2)}
    take_turn, held = OutputParts.take_turn, []

    def held_at_first(self, wait):
        if not held:
            (path,) = (tmp_path / "out").glob(f"{self.name}*.tmp")
            held.append(OutputParts(f"{tmp_path}/rank0/out/{path.name}"))
            assert take_turn(held[0], False)
        if wait:
            held[0].close()  # ends its turn
        return take_turn(self, wait)

    monkeypatch.setattr(OutputParts, "take_turn", held_at_first)
    (tmp_path / "rank0").symlink_to(tmp_path)
    SimulatedWorld(1).run(
        lambda comm: publish(dict(values), tmp_path / "rank0" / "out", comm, max_file_bytes=values["w0"].nbytes)
    )
    assert [name for name, _ in requests[0][2:]] == ["model-00002", "model-00001"]


def test_turns_are_no_condition(tmp_path, monkeypatch):
    """Some file systems have no locks."""
    parts = OutputParts(str(tmp_path / "file"))
    for error, expected in ((errno.ENOLCK, True), (errno.EWOULDBLOCK, False)):

        def refuse(*_, error=error):
            raise OSError(error, "no")

        monkeypatch.setattr(fcntl, "flock", refuse)
        assert parts.take_turn(wait=False) is expected
        parts.end_turn()
    parts.close()
