"""Live state from layout to layout, in memory, between real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_checkpoint as jobs
from tests.distributed import jobs_notes
from tests.distributed.jobs_common import LAYOUTS

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


def check(reports, collectives=4):
    assert sum(report["sent"] for report in reports) == sum(report["received"] for report in reports)
    for report in reports:
        assert report["unequal_before"]
        assert report["wrong"] == []
        assert report["source_untouched"]
        assert report["received"] == report["lacked"]
        assert report["needed"] == report["local"] == report["received"] + report["copied"]
        if collectives is not None:
            assert report["collectives"] == report["calls"] == collectives


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_exactly_what_a_rank_lacks_is_moved(world2, source, target):
    reports = world2.run(jobs.reshard_zoo, source=source, target=target)
    check(reports)
    if source == target:
        assert [report["received"] for report in reports] == [0, 0]


def test_without_devices_offload_changes_nothing(world2):
    """What it does with devices: tests/device/test_bounds.py."""
    plain, offloaded = (world2.run(jobs.reshard_zoo, source="rows", target="flat", offload=o) for o in (False, True))
    check(offloaded)
    assert plain == offloaded


@pytest.mark.parametrize(("source", "target"), [("rows", "columns"), ("flat", "reversed"), ("flat rows", "flat")])
def test_four_ranks(world4, source, target):
    reports = world4.run(jobs.reshard_zoo, source=source, target=target)
    check(reports)
    assert sum(report["received"] for report in reports) > 0


@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 1), (4, 2), (1, 4), (2, 2)])
def test_a_live_model_and_its_optimizer(world4, source, target):
    """Degree 2 is dp2 x mp2. In (2, 2) nothing moves."""
    reports = world4.run(jobs.reshard_model, source_degree=source, target_degree=target)
    for report in reports:
        assert report["keys"] == 45
        assert report["wrong"] == []
        assert report["received"] == report["lacked"]
        assert report["needed"] == report["local"]
    moved = sum(report["received"] for report in reports)
    # From degree 1 every rank has all; from 2 to 4, ranks 1 and 2 need a quarter that is in the other half.
    assert (moved == 0) == ((source, target) in ((1, 4), (2, 2)))


@pytest.mark.parametrize("where", ["pack", "unpack", "copy_pieces"])
def test_a_peer_that_fails_fails_everybody_and_the_next_reshard_works(world4, where):
    reports = world4.run(jobs.failing_exchange, where=where, rank=1, time_limit=30)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert "[rank 1] MemoryError: no room" in report["error"][1]
        assert report["seconds"] < 10
        assert report["again"] == []


def test_older_names_and_an_older_call_word_for_word(world2):
    """Metadata without global shapes, and shards by the names that came before Paddle's ``..._weight``."""
    for rank, report in enumerate(world2.run(jobs_notes.older_code)):
        assert report["described"] == [[[8, 6], [4 * rank, 0]], [[6], [0]]]
        assert report["right"]
