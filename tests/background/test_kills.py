"""A process of a save is killed or stopped: a few of the jobs of ``python -m tests.background.kills``."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.background.kill_jobs import MODES, draw
from tests.background.kills import check

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_the_old_checkpoint_or_the_new_one_and_a_next_save(tmp_path, mode, is_killed):
    jobs = (job for job in draw(MODES.index(mode)) if (job.mode, job.is_killed) == (mode, is_killed))
    assert "not struck" not in check(next(jobs), tmp_path)


@pytest.mark.slow
def test_many_moments(tmp_path):
    found = {check(job, tmp_path / str(number)) for number, job in enumerate(islice(draw(100), 100))}
    assert {each.partition(",")[0] for each in found} == set(MODES)
    harmed = {tuple(each.replace(":", ",").split(", ")) for each in found if "not struck" not in each}
    assert {(kind, how) for _, kind, _, how, _, _ in harmed} >= {
        (kind, how) for kind in ("trainer", "writer") for how in ("killed", "stopped")
    }
    assert {end for *_, end in harmed} == {"old", "new"}
