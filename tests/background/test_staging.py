"""Staging: shared memory that is taken once and used again."""

from __future__ import annotations

import os

import numpy as np
import pytest

from paddle_flexckpt.background.staging import Segment, StagingPool
from paddle_flexckpt.catalog import CheckpointError


def test_both_ends_see_the_same_bytes():
    ours = Segment.create(3)
    ours.grow(5000)
    theirs = Segment(3, os.dup(ours.descriptor))
    theirs.attach(4000)
    ours.view(0, 4000)[:] = np.arange(4000) % 251
    assert (theirs.view(0, 4000) == np.arange(4000) % 251).all()
    ours.grow(ours.nbytes + 1)
    theirs.attach(ours.nbytes)
    ours.view(ours.nbytes - 1, ours.nbytes)[:] = 77
    assert theirs.view(ours.nbytes - 1, ours.nbytes)[0] == 77
    for segment in (ours, theirs):
        segment.close()


def test_a_view_beyond_the_end_is_an_error():
    segment = Segment.create(0)
    segment.grow(10)
    with pytest.raises(ValueError, match="segment 0"):
        segment.view(0, segment.nbytes + 1)
    segment.close()


def test_segments_are_used_again_and_grow_only_if_none_fits():
    pool = StagingPool()
    small, large = pool.take(1 << 20), pool.take(9 << 20)
    assert (small.number, large.number) == (0, 1)
    for segment in (large, small):
        pool.give_back(segment)
    taken = pool.nbytes
    assert pool.take(1 << 20) is small, "the smallest that fits"
    pool.give_back(small)
    assert pool.take(5 << 20) is large
    assert pool.nbytes == taken
    pool.give_back(large)
    assert pool.take(20 << 20) is large, "the largest grows"
    assert large.nbytes >= 20 << 20
    assert len({small.number, pool.take(30 << 20).number}) == 1
    pool.close()
    assert pool.nbytes == 0


def test_memory_goes_back_to_the_system():
    def shared() -> int:
        with open("/proc/self/status", encoding="ascii") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("RssShmem:")) >> 10

    pool = StagingPool()
    before = shared()
    segment = pool.take(64 << 20)
    assert shared() - before < 8, "pages are taken when they are written"
    segment.touch()
    assert 60 <= shared() - before <= 70
    pool.give_back(segment)
    pool.close()
    assert shared() - before < 8


def test_more_memory_than_there_is_is_an_error_and_not_the_end_of_the_process():
    pool = StagingPool()
    with pytest.raises(
        CheckpointError, match=r"needs 1024.0 TiB more of memory .* Remedy .FC505.: pass staging_bytes=, to"
    ):
        pool.take(1 << 50)
    # What is free stays free.
    pool.give_back(pool.take(1000))
    assert pool.take(10).number == 0
    pool.close()
