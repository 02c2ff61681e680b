"""A process of a save is killed or stopped: a few of the jobs of ``python -m tests.background.kills``."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.background.kill_jobs import MODES, draw
from tests.background.kills import check

pytestmark = pytest.mark.multiprocess


# In each mode one is killed; in the two in which most processes take part one is stopped besides.
@pytest.mark.parametrize(
    ("is_killed", "mode"),
    [
        *(pytest.param(True, mode, id=f"killed-{mode}") for mode in MODES),
        *(
            pytest.param(
                False, mode, id=f"stopped-{mode}", marks=() if mode in ("waves", "slices") else pytest.mark.slow
            )
            for mode in MODES
        ),
    ],
)
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
