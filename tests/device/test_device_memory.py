"""Device storages against arrays: random copies, with views of device memory and without; digests; two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.testing import rehearsal_device
from tests.device import jobs_memory as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("views", [True, False])
def test_random_copies_are_those_of_arrays(device_world2, views):
    assert device_world2.run(jobs.random_copies, seed=17, count=180, views=views) == [[], []]


def test_digests_of_device_and_host_are_the_same_and_tell_what_cancels_in_a_plain_sum(device_world2):
    assert device_world2.run(jobs.digests) == [[True, []]] * 2


@pytest.mark.skipif(bool(rehearsal_device.missing_tools()), reason=rehearsal_device.missing_tools())
def test_a_device_that_is_not_the_current_one():
    """A rank of a world has one device only, so this is a process of its own."""
    code = "import json; from tests.device import jobs_memory as jobs; print(json.dumps(jobs.on_the_second_device()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **rehearsal_device.environment(2)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["Place(rehearsal:1)", True, 0, True, True]
