"""The log of a disk, and the states that are made of it; nothing is mounted here."""

from __future__ import annotations

from random import Random

from tests.filesystems.block_file import Entry, Image
from tests.filesystems.states import BLOCK, State, choose


def write(offset: int, blocks: int = 1, digest: int = 0) -> Entry:
    return Entry("write", offset * BLOCK, blocks * BLOCK, digest or offset)


FLUSH, MARK = Entry("flush"), Entry("mark", text="step 0 is reported done")
LOG = [write(1), write(2), FLUSH, write(3), MARK, write(4, 3), write(7), FLUSH, MARK]


def test_whatever_was_flushed_is_there_and_of_the_rest_any_part():
    states = choose(LOG, Random(0), 1000)
    for state in states:
        last = max((number for number in range(state.cut) if LOG[number] is FLUSH), default=-1)
        assert state.durable == last + 1
        assert all(state.durable <= number < state.cut for number, _, _ in state.kept)
        assert all(0 <= begin < end <= LOG[number].length for number, begin, end in state.kept)
    whole = {
        tuple(number for number, begin, end in state.kept if end - begin == LOG[number].length)
        for state in states
        if state.durable == 3
    }
    assert {(), (3,), (5,), (6,), (3, 5), (3, 6), (5, 6), (3, 5, 6)} <= whole


def test_what_was_reported_before_a_flush_must_be_there_without_what_follows():
    bare = [(state.durable, state.cut) for state in choose(LOG, Random(0), 1000) if not state.kept]
    assert bare == [(0, 2), (3, 3), (3, 7), (8, 9)]


def test_a_write_is_torn_between_blocks_only():
    parts = {part for state in choose(LOG, Random(0), 1000) for part in state.kept if part[0] == 5}
    assert parts == {
        (5, 0, 3 * BLOCK),
        *((5, 0, n * BLOCK) for n in (1, 2)),
        *((5, n * BLOCK, 3 * BLOCK) for n in (1, 2)),
    }
    shifted = [Entry("write", 512, BLOCK, 1)]
    torn = {part for state in choose(shifted, Random(0), 100) for part in state.kept}
    assert torn == {(0, 0, BLOCK), (0, 0, BLOCK - 512), (0, BLOCK - 512, BLOCK)}


def test_each_disk_is_there_once():
    same = [write(1, digest=5), write(1, digest=5), FLUSH]
    states = choose(same, Random(0), 100)
    assert len([state for state in states if state.durable == 0]) == 2  # with the block, and without


def test_a_limit_leaves_room_for_both_kinds():
    log = [entry for number in range(100) for entry in (write(number, 2), FLUSH)]
    states = choose(log, Random(0), 20)
    assert len(states) == 20
    assert 10 <= sum(not state.kept for state in states) < 20


def test_a_state_says_what_is_lost():
    text = State(7, 3, ((3, 0, BLOCK), (5, 0, BLOCK))).describe(LOG)
    assert "write 0x3000+0x1000 kept" in text
    assert "write 0x4000+0x3000 kept bytes 0 to 4096" in text
    assert "write 0x7000+0x1000 LOST" in text


def test_an_image_takes_back_what_was_not_kept():
    image = Image(4 * BLOCK)
    image.write(0, b"before")
    image.start_log()
    for offset, data in ((0, b"first!"), (3, b"second")):
        image.write(offset, data)
        image.flush()
    log = image.stop_log()
    assert [entry.kind for entry in log] == ["write", "flush"] * 2
    assert image.read(0, 9) == b"before\0\0\0"
    image.keep(2)
    image.apply([(2, 1, 6)])
    image.write(0, b"mount")
    assert image.read(0, 9) == b"mountcond"
    image.rollback()
    assert image.read(0, 9) == b"first!\0\0\0"
    image.keep(4)
    assert image.read(0, 9) == b"firsecond"
