"""Reshards over the device backend whose ranks have different amounts to send: one-way, nothing, 1 to 1,000."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.testing import World, WorldError, rehearsal_device
from tests.device import jobs_traffic as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# Elements of four bytes. More than one round of any bounded exchange (at most 64 MiB), and no multiple of anything.
LARGE = 17_000_003
SMALL = 1013
# Moves of n elements of tensor i between two ranks: (extents, ranges by rank of sources, and of targets).
NOTHING = [None]
CASES = {
    "one way": ([SMALL], [[[0, SMALL]], NOTHING], [NOTHING, [[0, SMALL]]]),
    "the other way": ([SMALL], [NOTHING, [[0, SMALL]]], [[[0, SMALL]], NOTHING]),
    "one way, many rounds": ([LARGE], [[[0, LARGE]], NOTHING], [NOTHING, [[0, LARGE]]]),
    "empty: everything stays": ([SMALL], [[[0, 13]], [[13, SMALL]]], [[[0, 13]], [[13, SMALL]]]),
    "empty: nobody wants anything": ([SMALL], [[[0, 13]], [[13, SMALL]]], [NOTHING, NOTHING]),
    "empty: a tensor without elements": ([0], [[[0, 0]], [[0, 0]]], [[[0, 0]], [[0, 0]]]),
    "unequal by 1,000": (
        [LARGE, LARGE // 1000],
        [[[0, LARGE], None], [None, [0, LARGE // 1000]]],
        [[None, [0, LARGE // 1000]], [[0, LARGE], None]],
    ),
    "one element against 1,000": ([1000, 1], [[[0, 1000], None], [None, [0, 1]]], [[None, [0, 1]], [[0, 1000], None]]),
    "both ways": ([SMALL, 7], [[[0, 500], [0, 7]], [[500, SMALL], None]], [[[500, SMALL], None], [[0, SMALL], [0, 7]]]),
}


def _moved(ranges_have, ranges_want):
    """Bytes that a rank wants and does not have."""
    total = 0
    for have, want in zip(ranges_have, ranges_want):
        if want is not None:
            held = set() if have is None else set(range(*have))
            total += 4 * (len(range(*want)) if not held else sum(each not in held for each in range(*want)))
    return total


@pytest.mark.parametrize("case", CASES)
def test_any_traffic_between_two_devices_is_right(device_world2, case):
    extents, sources, targets = CASES[case]
    times = 1 if LARGE in extents else 3
    answers = device_world2.run(
        jobs.reshard, extents=extents, sources=sources, targets=targets, times=times, time_limit=60
    )
    for rank, answer in enumerate(answers):
        assert answer["wrong"] == []
        assert answer["touched"] == []
        assert answer["received"] == [_moved(sources[rank], targets[rank])] * times
        assert answer["places"] in ([f"Place(rehearsal:{rank})"], [])
        assert answer["ranks"] == 2.0


def test_four_devices_of_which_one_sends_all_and_one_nothing(device_world4):
    everything, parts = [[0, SMALL]], [[[0, 1]], [[1, 500]], [[500, 999]], [[999, SMALL]]]
    answers = device_world4.run(
        jobs.reshard, extents=[SMALL], sources=[NOTHING, everything, NOTHING, NOTHING], targets=parts, time_limit=60
    )
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert [answer["received"] for answer in answers] == [[4], [0], [499 * 4], [14 * 4]]
    assert [answer["ranks"] for answer in answers] == [4.0] * 4


@pytest.mark.skipif(bool(rehearsal_device.missing_tools()), reason=rehearsal_device.missing_tools())
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 2)])
def test_a_rank_killed_in_a_reshard_is_named_by_all_others(size, victim, tmp_path):
    with World(size, device=True, grace=60) as world, pytest.raises(WorldError) as caught:
        world.run(jobs.killed, extent=1_000_000 * size, victim=victim, folder=str(tmp_path))
    assert "process ended" in caught.value.failures[victim]
    told = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(told) == set(range(size)) - {victim}, str(caught.value)
    for kind, text in told.values():
        assert kind == "LostRankError"
        assert f"rank {victim} is lost" in text
    assert not caught.value.stacks, "a rank had to be killed while it waited"
