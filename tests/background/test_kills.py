"""A process of a save is killed or stopped: a few of the jobs of ``python -m tests.background.kills``."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.background.kills import check, draw

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("seed", range(5))
def test_the_old_checkpoint_or_the_new_one_and_a_next_save(tmp_path, seed):
    check(next(draw(seed)), tmp_path)


@pytest.mark.slow
def test_many_moments(tmp_path):
    found = {check(job, tmp_path / str(number)) for number, job in enumerate(islice(draw(100), 100))}
    expected = {"writer killed, old", "writer killed, new", "trainer killed, old", "writer stopped, new"}
    assert {f"async: {each}" for each in expected} <= found
