"""The simulation of very large jobs, at a small size: what it counts, and that it counts what is sent."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import spread_scale
from paddle_flexckpt.planning.strategy import Strategy
from paddle_flexckpt.ranks.host_channel import HostChannel


def test_the_busiest_rank_of_a_small_job():
    found = spread_scale.measure_busiest(64, 200, 8)
    assert (found["ranks"], found["shards"]) == (64, 12_800)
    assert found["planned_rows"] == 64 * found["planned_keys"]
    assert found["planned_keys"] > 200 / 64
    assert found["imbalance"] <= 1.05
    assert found["written_of_unique"] == 1.0
    assert 0 < found["items"] < 200
    assert found["partitions"] == 1
    parts = sum(value for name, value in found.items() if name.startswith("received_") and name != "received_mib")
    assert found["received_mib"] == pytest.approx(parts)
    assert found["memory_mib"] > found["received_mib"]


def test_what_a_rank_receives_grows_with_its_share_and_not_with_the_job():
    small, large = (spread_scale.measure_busiest(ranks, 100, 4) for ranks in (40, 160))
    # Four times the rows; the share of a rank is the same, but for the most keys of one.
    grown = large["received_rows_mib"] / small["received_rows_mib"]
    assert grown < 4 * large["planned_keys"] / small["planned_keys"]


@pytest.mark.parametrize("world", [2, 5, 8, 13])
def test_bytes_that_arrive_are_those_of_the_host_channel(world):
    """Each rank's messages go through the channel's own routing, by hand."""
    sizes = np.random.default_rng(world).integers(0, 3, (world, world)) * 100
    channels = []
    for place in range(world):
        channel = HostChannel.__new__(HostChannel)
        channel.ranks, channel.position, channel._exchanges = tuple(range(world)), place, 0
        channels.append(channel)
    arrived = route(channels, sizes)
    for place in range(world):
        assert spread_scale.arriving(place, world, lambda source, to: sizes[source, to]) == arrived[place]


def route(channels, sizes):
    """Run ``_deliver`` of all ranks in threads, with queues for sockets; return the bytes of letters that arrived."""
    import queue
    import threading

    world = len(channels)
    boxes = {}
    arrived = [0] * world
    for place in range(world):
        for distance in (1 << k for k in range((world - 1).bit_length())):
            boxes[place, distance] = queue.Queue()

    def send_and_receive(place):
        def both(distance, payloads):
            boxes[(place - distance) % world, distance].put(payloads)
            got = boxes[place, distance].get(timeout=60)
            arrived[place] += len(got[0]) - 8
            return [memoryview(each) for each in got]

        return both

    threads = []
    for place, channel in enumerate(channels):
        channel._send_and_receive = send_and_receive(place)
        payloads = {to: bytes(int(sizes[place, to])) for to in range(world) if sizes[place, to]}
        threads.append(threading.Thread(target=channel._deliver, args=(b"", payloads)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return arrived


def test_experts():
    found = spread_scale.measure_experts(2, 8, Strategy(dp=8, pp=2, ep=4))
    assert (found["ranks"], found["keys"]) == (16, 2 * (6 + 24) * 6)
    assert found["most_rows"] < found["shards"] / 4
    assert found["plan_seconds"] > 0


def test_rows_of_the_table_have_bounds_for_the_large_job_alone(capsys):
    arguments = ["--ranks", "16", "--tensors", "20", "--replicas", "4", "--layers", "2", "--experts", "8"]
    assert spread_scale.main(arguments) == 0
    assert "received by the busiest rank: first save, 16 ranks x 20 shards, simulated" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        spread_scale.main(["--ranks", "10", "--replicas", "4"])
    assert "10 ranks cannot hold 4 replicas" in capsys.readouterr().err
