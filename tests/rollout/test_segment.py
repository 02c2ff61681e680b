"""Segments: files of shared memory that processes write together, once, and whose memory is used again."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.rollout import segment
from paddle_flexckpt.rollout.segment import (
    LocalSink,
    Region,
    SegmentDirectory,
    SegmentNames,
    bytes_region,
    digest_of,
    find_segments,
)

FIRST = SegmentNames("c", "aa", "", (), 4096, True)


def test_a_region_is_written_in_its_place(tmp_path):
    sink = LocalSink(SegmentDirectory(str(tmp_path)), FIRST)
    values = np.arange(6, dtype=np.uint16).reshape(2, 3)
    # Two rows of three elements, from byte 10, as columns of rows of five.
    sink.write(Region(10, (2, 3), (10, 2), 2), values)
    whole = np.fromfile(tmp_path / "flexckpt-c-aa.safetensors", np.uint8)
    assert len(whole) == 4096
    assert whole[10:26].view(np.uint16).tolist() == [0, 1, 2, 0, 0, 3, 4, 5]
    assert not whole[26:].any()


def test_a_region_that_leaves_the_segment_is_refused(tmp_path):
    memory = SegmentDirectory(str(tmp_path)).open(FIRST)
    for region in (bytes_region(4090, 7), Region(0, (2, 2), (4095, 1), 2)):
        with pytest.raises((ValueError, TypeError)):
            region.of(memory)


def test_the_memory_of_a_released_segment_is_used_again_under_another_name(tmp_path):
    leader, other = SegmentDirectory(str(tmp_path)), SegmentDirectory(str(tmp_path))
    for each, leads in ((leader, True), (other, False)):
        each.open(replace(FIRST, leads=leads))[:] = 7
    inode = os.stat(tmp_path / "flexckpt-c-aa.safetensors").st_ino
    second = replace(FIRST, token="bb", kept=("aa",))
    for each, leads in ((other, False), (leader, True)):
        each.open(replace(second, leads=leads))
    assert sorted(os.listdir(tmp_path)) == ["flexckpt-c-aa.safetensors", "flexckpt-c-bb.safetensors"]
    third = replace(FIRST, token="cc", recycled="aa", kept=("bb",))
    # In either order: the one that does not lead needs no name.
    other.open(replace(third, leads=False))[1] = 9
    assert leader.open(third)[:3].tolist() == [7, 9, 7]
    assert sorted(os.listdir(tmp_path)) == ["flexckpt-c-bb.safetensors", "flexckpt-c-cc.safetensors"]
    assert os.stat(tmp_path / "flexckpt-c-cc.safetensors").st_ino == inode


def test_a_sealed_segment_is_not_opened_again(tmp_path):
    """By any process; its memory may be used again under another name."""
    directory = SegmentDirectory(str(tmp_path))
    directory.open(FIRST)[:] = 7
    assert directory.seal(FIRST) == digest_of(np.full(4096, 7, np.uint8))
    path = tmp_path / "flexckpt-c-aa.safetensors"
    assert path.stat().st_mode & 0o777 == 0o400
    for each in (directory, SegmentDirectory(str(tmp_path))):
        with pytest.raises(ValueError, match="segment aa is finished"):
            each.open(FIRST)
        each.drop(FIRST)
    assert path.exists()
    second = replace(FIRST, token="bb", recycled="aa")
    directory.open(second)[:] = 8
    directory.seal(second)
    assert os.listdir(tmp_path) == ["flexckpt-c-bb.safetensors"]


def test_digests_depend_on_every_block(monkeypatch):
    monkeypatch.setattr(segment, "BLOCK_BYTES", 64)
    memory = np.zeros(1000, np.uint8)
    found = {digest_of(memory)}
    for at in range(0, 1000, 50):
        memory[at] = 1
        found.add(digest_of(memory))
    assert len(found) == 21


def test_a_process_without_the_released_segment_refuses(tmp_path):
    """It would make a file that the leader's renamed one replaces, and its bytes would be lost."""
    with pytest.raises(CheckpointError, match=r"started again since the last push.*Remedy \(FC951\)"):
        SegmentDirectory(str(tmp_path)).open(replace(FIRST, token="cc", recycled="aa", leads=False))
    assert os.listdir(tmp_path) == []


def test_files_of_dead_pushes_are_removed_and_others_stay(tmp_path):
    for name in ("flexckpt-c-dead.safetensors", "flexckpt-other-dead.safetensors", "x"):
        (tmp_path / name).write_bytes(b"1")
    SegmentDirectory(str(tmp_path)).open(FIRST)
    assert sorted(os.listdir(tmp_path)) == ["flexckpt-c-aa.safetensors", "flexckpt-other-dead.safetensors", "x"]


def test_a_full_memory_is_an_error_with_figures_and_leaves_nothing(tmp_path):
    size = 1 << 50
    with pytest.raises(CheckpointError, match=rf"{size} bytes of shared memory are needed, and \d+ are free.*FC402"):
        SegmentDirectory(str(tmp_path)).open(replace(FIRST, nbytes=size))
    assert os.listdir(tmp_path) == []


def test_a_segment_that_is_cleaned_before_it_is_held_is_made_again(tmp_path, monkeypatch):
    """Its writer would otherwise fill a file without a name, and the next one another file."""
    hold, cleaned = segment.hold, []

    def late(descriptor):
        if not cleaned:
            cleaned.extend(find_segments(str(tmp_path), remove=True))
        hold(descriptor)

    monkeypatch.setattr(segment, "hold", late)
    SegmentDirectory(str(tmp_path)).open(FIRST)[0] = 7
    assert [each.held for each in cleaned] == [False]
    assert SegmentDirectory(str(tmp_path)).open(replace(FIRST, leads=False))[0] == 7


def test_a_process_that_is_forked_during_a_search_keeps_no_lock(tmp_path, monkeypatch):
    path, flock, copies = tmp_path / "flexckpt-c-aa.safetensors", fcntl.flock, []
    path.write_bytes(b"1")

    def fork(descriptor, operation):
        flock(descriptor, operation)
        if operation & fcntl.LOCK_EX:
            copies.append(os.dup(descriptor))

    monkeypatch.setattr(fcntl, "flock", fork)
    find_segments(str(tmp_path))
    monkeypatch.undo()
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for each in copies:
        os.close(each)
