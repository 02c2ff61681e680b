"""Messages between devices: how pieces are laid out in them, and how they are cut into rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CatalogBuilder
from paddle_flexckpt.communication.device_exchange import ALIGNMENT, Message, Traffic
from paddle_flexckpt.planning.matching import Pieces
from tests.property import examples

DTYPES = ("uint8", "bfloat16", "float32", "complex128")


def message(sizes, dtypes):
    """A message of pieces of so many elements of such dtypes, each of a source of its own."""
    builder = CatalogBuilder(0)
    for i, (size, dtype) in enumerate(zip(sizes, dtypes)):
        builder.add(f"k{i}", dtype, (size,), (0,), (size,))
    count = np.asarray(sizes, dtype=np.int64)
    rows, table = np.arange(len(sizes)), count.reshape(-1, 1)
    zeros, ones = np.zeros_like(count), np.ones_like(table)
    pieces = Pieces(rows, rows, table, zeros, ones, zeros, ones)
    return Message.of(pieces, builder.build())


@examples(200)
@given(st.data())
def test_rounds_have_every_element_once_at_places_of_its_width(data):
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in sizes]
    quota = ALIGNMENT * data.draw(st.integers(1, 12))
    made = message(sizes, dtypes)
    assert made.nbytes % ALIGNMENT == 0
    seen = [[] for _ in sizes]
    for begin in range(0, made.nbytes, quota):
        end = min(begin + quota, made.nbytes)
        taken = np.zeros(end - begin, dtype=bool)
        for piece, start, stop, at in made.parts(begin, end):
            width = int(made.itemsize[piece])
            assert at % width == 0
            room = taken[at : at + (stop - start) * width]
            assert len(room) == (stop - start) * width
            assert not room.any()
            room[:] = True
            seen[piece] += range(start, stop)
    assert seen == [list(range(size)) for size in sizes]


@examples(200)
@given(st.data())
def test_no_rank_sends_or_receives_more_than_a_round(data):
    size = data.draw(st.integers(1, 6))
    nbytes = st.integers(1, 1000).map(lambda n: n * ALIGNMENT)
    sent = [
        data.draw(
            st.dictionaries(st.sampled_from([r for r in range(size) if r != s] or [0]), nbytes, max_size=size - 1)
        )
        for s in range(size)
    ]
    traffic = Traffic.of([np.asarray(list(row.items()), dtype=np.int64).tobytes() for row in sent])
    assert list(zip(traffic.sender, traffic.receiver, traffic.nbytes)) == [
        (s, r, n) for s, row in enumerate(sent) for r, n in row.items()
    ]
    round_bytes = data.draw(st.integers(1, 200)) * ALIGNMENT
    quotas = traffic.quotas(round_bytes)
    assert (quotas % ALIGNMENT == 0).all()
    for position in range(size):
        for side in (traffic.sender, traffic.receiver):
            mine = quotas[side == position]
            assert mine.sum() <= max(round_bytes, ALIGNMENT * len(mine))


def test_a_pair_of_a_large_world_has_the_whole_round():
    """Room is shared by the peers that there are, not by all ranks."""
    sent = [b""] * 1024
    sent[7] = np.asarray([[900, 1 << 30]], dtype=np.int64).tobytes()
    assert Traffic.of(sent).quotas(16 << 20).tolist() == [16 << 20]


def test_nothing_to_send_is_no_round():
    traffic = Traffic.of([b"", b""])
    assert len(traffic.quotas(1 << 20)) == 0


@pytest.mark.parametrize("begin", [0, 16, 32])
def test_a_stretch_without_a_piece_in_it(begin):
    made = message([3], ["uint8"])
    assert made.parts(begin, begin + 16) == ([(0, 0, 3, 0)] if begin == 0 else [])
