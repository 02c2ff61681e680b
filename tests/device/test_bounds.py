"""What saves, loads and reshards of device tensors take, by the counters: bytes over the link, collectives, memory."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.ranks.shared_stream import SLOT_BYTES, SLOTS
from tests.device import jobs_findings as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
MIB = 1 << 20
#: Of state on each rank: more than the memory that a call may take.
STATE = 128
LIMIT = 64 * MIB


@pytest.fixture(scope="module")
def costs(device_world2, tmp_path_factory):
    """By rank, the counters of each call on a sharded state."""
    return device_world2.run(jobs.costs, directory=str(tmp_path_factory.mktemp("costs")), mib=STATE)


@pytest.mark.parametrize("call", ["save", "async"])
def test_a_save_moves_what_the_rank_writes_once(costs, call):
    for made in costs:
        assert made[call]["d2h"] == STATE * MIB
        assert made[call]["h2d"] == made[call]["collectives"] == made[call]["device"] == 0
    if call == "save":  # an asynchronous save holds the rank's share on the host: that is what it is for
        assert max(made[call]["host"] for made in costs) <= LIMIT


@pytest.mark.parametrize("call", ["load", "load of columns"])
def test_a_load_moves_what_was_asked_for_once_and_nothing_back(costs, call):
    for made in costs:
        assert made[call]["h2d"] == STATE * MIB
        assert made[call]["d2h"] == made[call]["collectives"] == made[call]["device"] == 0
        assert made[call]["host"] <= LIMIT
        assert made[call]["right"]


def test_a_load_of_rows_from_columns_is_scattered_on_the_device(costs):
    for made in costs:
        assert made["load of rows from columns"]["right"]
        assert made["load of rows from columns"]["h2d"] == STATE * MIB
        assert made["load of rows from columns"]["d2h"] == 0
        assert made["load of rows from columns"]["device"] <= LIMIT
        assert made["load of rows from columns"]["host"] <= LIMIT


def test_a_reshard_stays_on_the_devices_in_bounded_memory(costs):
    for made in costs:
        assert made["reshard"]["right"]
        assert made["reshard"]["d2h"] == made["reshard"]["h2d"] == 0
        assert 0 < made["reshard"]["device"] <= LIMIT
        assert made["reshard"]["host"] <= LIMIT
        # Half of the state goes to the other rank; each round has 16 bytes to itself, which cross nothing.
        assert made["reshard"]["ccl"] == STATE * MIB // 2
        assert made["reshard"]["collectives"] == STATE // 2 // 16


def test_a_reshard_through_the_host_takes_no_collective_and_little_memory(costs):
    for made in costs:
        cost = made["reshard through the host"]
        assert cost["right"]
        assert cost["d2h"] == cost["h2d"] == STATE * MIB // 2
        assert cost["collectives"] == 0
        assert cost["device"] <= 8 * MIB  # columns are gathered on the device before they cross
        # What a rank lacks waits on the host once; pages are counted whole, and so is the memory that a rank shares
        # with the one that it sends to, and with the one that it receives from.
        assert cost["host"] <= STATE * MIB // 2 + MIB + 2 * SLOTS * SLOT_BYTES


def test_nothing_is_touched_that_the_host_cannot_or_must_not_reach(costs):
    for made in costs:
        for cost in made.values():
            assert cost["touches"] == cost["freed_uses"] == 0


def test_replicas_are_compared_without_a_second_crossing(device_world2, tmp_path):
    answers = device_world2.run(jobs.replicated_costs, directory=str(tmp_path), mib=STATE)
    small = 4000
    # One sum of 8 bytes for each 256 KiB, and one for the small tensor.
    sums = 8 * (STATE * 4 + 1)
    assert sum(answer["save"]["d2h"] - sums for answer in answers) == STATE * MIB + small
    # One rank's values, of all of a layer.
    assert [answer["unchecked"]["d2h"] for answer in answers] == [STATE * MIB + small, 0]
    # What differs crosses once more on each rank, to be measured; the large tensor stays where it is.
    assert sum(answer["drifted"]["d2h"] - sums - small for answer in answers) == STATE * MIB + small
    for answer in answers:
        assert answer["drifted"]["replicas"] == {"small": "differ by at most 0.5; rank 0's values count"}
        assert answer["save"]["d2h"] - sums <= STATE * MIB // 2 + small
        assert answer["drifted"]["d2h"] - sums - small <= STATE * MIB // 2 + small
        # The factors of the sums.
        assert answer["save"]["h2d"] == MIB // 2
        assert answer["save"]["collectives"] == 0
        assert answer["save"]["device"] <= 4 * MIB
        assert answer["save"]["host"] <= LIMIT
        assert answer["load"]["right"]
        assert answer["load"]["h2d"] == STATE * MIB + small
        assert answer["load"]["d2h"] == 0


def test_a_merged_load_leaves_the_device_alone(device_world2, tmp_path):
    cost = device_world2.run(jobs.merged_costs, directory=str(tmp_path), mib=8)[0]
    assert cost["right"]
    assert cost["place"] == "Place(cpu)"
    assert cost["h2d"] == cost["d2h"] == cost["d2d"] == cost["allocations"] == cost["device"] == 0
