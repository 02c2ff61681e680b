"""Reshards over the device backend whose ranks have different amounts to send: one-way, nothing, 1 to 1,000.

The jobs: reshards of given traffic between ranks, against the global values; and one in which a rank is killed.
"""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing import World, WorldError
from tests.device import plugin

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

#: What may carry tensor data between devices. At the first of these a victim dies.
TRANSPORTS = (
    *("alltoall_single", "alltoall", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather", "broadcast", "scatter"),
)


def values(extent, salt):
    """A tensor's global value: no two neighbours alike, none zero."""
    return (np.arange(extent, dtype="int64") * 2654435761 % (2**31 - 1) + salt + 1).astype("int32")


def shards(extents, ranges, fill):
    """One-dimensional shards: of tensor ``t{i}``, the elements ``ranges[i]``, unless that is None."""
    state = {}
    for number, (extent, taken) in enumerate(zip(extents, ranges)):
        if taken is not None:
            start, stop = taken
            array = values(extent, number)[start:stop] if fill else np.full(stop - start, -1, "int32")
            state[f"t{number}"] = fc.ShardedWeight(
                f"t{number}", paddle.to_tensor(array), (stop - start,), (extent,), (start,)
            )
    return state


def reshard(extents, sources, targets, times=1):
    """Moves between one-dimensional layouts, several times; ``sources`` and ``targets`` hold ranges by rank."""
    rank = dist.get_rank()
    received = []
    for _ in range(times):
        source = shards(extents, sources[rank], fill=True)
        target = shards(extents, targets[rank], fill=False)
        report = fc.reshard_sharded_state_dict(source, target)
        received.append(report.bytes_received)
    wrong = [
        [key, int((weight.local_tensor.numpy() != wanted).sum())]
        for key, weight in target.items()
        for wanted in [_part(extents, key, targets[rank])]
        if not np.array_equal(weight.local_tensor.numpy(), wanted)
    ]
    touched = [
        key
        for key, weight in source.items()
        if not np.array_equal(weight.local_tensor.numpy(), _part(extents, key, sources[rank]))
    ]
    places = sorted({str(weight.local_tensor.place) for weight in (*source.values(), *target.values())})
    # The backend still does what it should: a collective that was left out on one rank would meet this one.
    total = paddle.to_tensor([1.0])
    dist.all_reduce(total)
    return {"wrong": wrong, "touched": touched, "received": received, "places": places, "ranks": float(total[0])}


def _part(extents, key, ranges):
    number = int(key[1:])
    start, stop = ranges[number]
    return values(extents[number], number)[start:stop]


def killed(extent, victim, folder):
    """Reshards parts into the whole; the victim is killed when its first tensor data would go.

    The others leave their error in the folder: after it, their device fails whatever it is asked.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # The launcher ends the ranks that are left.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == victim:
        for module in (dist, dist.stream, dist.communication.stream):
            for name in TRANSPORTS:
                if hasattr(module, name):
                    setattr(module, name, _die)
    source = shards([extent], [[extent * rank // size, extent * (rank + 1) // size]], fill=True)
    target = shards([extent], [[0, extent]], fill=False)
    try:
        fc.reshard_sharded_state_dict(source, target)
    except fc.CheckpointError as error:
        with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
            json.dump([type(error).__name__, str(error)], file)


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


# -- what is asserted -------------------------------------------------------------------------------------------------

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
    answers = device_world2.run(reshard, extents=extents, sources=sources, targets=targets, times=times)
    for rank, answer in enumerate(answers):
        assert answer["wrong"] == []
        assert answer["touched"] == []
        assert answer["received"] == [_moved(sources[rank], targets[rank])] * times
        assert answer["places"] in ([f"Place(rehearsal:{rank})"], [])
        assert answer["ranks"] == 2.0


def test_four_devices_of_which_one_sends_all_and_one_nothing(device_world4):
    everything, parts = [[0, SMALL]], [[[0, 1]], [[1, 500]], [[500, 999]], [[999, SMALL]]]
    answers = device_world4.run(
        reshard, extents=[SMALL], sources=[NOTHING, everything, NOTHING, NOTHING], targets=parts
    )
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert [answer["received"] for answer in answers] == [[4], [0], [499 * 4], [14 * 4]]
    assert [answer["ranks"] for answer in answers] == [4.0] * 4


@pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools())
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 2)])
def test_a_rank_killed_in_a_reshard_is_named_by_all_others(size, victim, tmp_path):
    with World(size, device="tests.device.ranks", grace=60) as world, pytest.raises(WorldError) as caught:
        world.run(killed, extent=1_000_000 * size, victim=victim, folder=str(tmp_path))
    assert "process ended" in caught.value.failures[victim]
    told = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(told) == set(range(size)) - {victim}, str(caught.value)
    for kind, text in told.values():
        assert kind == "LostRankError"
        assert f"rank {victim} is lost" in text
    assert not caught.value.stacks, "a rank had to be killed while it waited"
