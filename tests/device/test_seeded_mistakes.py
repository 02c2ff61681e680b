"""Mistakes put into the device path one at a time: each has to be found, and for the right reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.testing import World, WorldError, rehearsal_device
from tests.device import jobs_mistakes as jobs

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.paddle,
    pytest.mark.skipif(bool(rehearsal_device.missing_tools()), reason=rehearsal_device.missing_tools()),
]
VALUES = r"of \d+ values are wrong"
#: (mistake, the check that finds it, what it says).
FOUND = [
    ("missing_wait", "stream", f"written by another stream: 1024 {VALUES}"),
    ("a_wait_is_lost", "stream", f"written by another stream: 1024 {VALUES}"),
    ("an_event_is_lost", "lazy reshard", f"target: .* {VALUES}"),
    ("reused_buffer", "save", f"columns: .* {VALUES}"),
    ("wrong_stream", "lazy reshard", f"target: .* {VALUES}"),
    ("copy_after_the_step", "asynchronous", f"saved before the step: 5000011 {VALUES}"),
    ("freed_memory", "save", "freed"),
    ("chunk_off_by_one", "save", f"large: .* {VALUES}, the first at 2097152"),
    ("dropped_last_round", "reshard", f"target: .* {VALUES}"),
    ("host_read", "save", "the host has touched memory of device"),
    ("source_and_target_swapped", "reshard", f"target: .* {VALUES}"),
    ("whole_tensor_for_each_step", "save", "bytes crossed to the host, for"),
    ("load_reads_its_targets", "load", "bytes crossed to the host in a load"),
    ("reshard_through_the_host", "reshard", "bytes crossed the link in a reshard"),
    ("view_from_the_wrong_place", "save", "a view of .* is not where it should be"),
]
#: Those that the device itself counts as misuse, so that the job fails whatever the check says.
MISUSED = {"freed_memory": "freed_uses", "host_read": "host_touches"}


@pytest.mark.parametrize("check", jobs.CHECKS)
def test_without_a_mistake_nothing_is_found(device_world2, tmp_path, check):
    assert device_world2.run(jobs.run, check=check, mistake=None, folder=str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("mistake", "check", "said"), [each for each in FOUND if each[0] not in MISUSED])
def test_a_mistake_is_found(device_world2, tmp_path, mistake, check, said):
    answers = device_world2.run(jobs.run, check=check, mistake=mistake, folder=str(tmp_path))
    assert any(re.search(said, problem) for problems in answers for problem in problems), answers
    # And it has ended with the job.
    assert device_world2.run(jobs.run, check=check, mistake=None, folder=str(tmp_path / "after")) == [[], []]


@pytest.mark.parametrize(("mistake", "check", "said"), [each for each in FOUND if each[0] in MISUSED])
def test_a_misuse_of_device_memory_fails_the_job(tmp_path, mistake, check, said):
    with World(2, device=True, grace=5) as world, pytest.raises(WorldError) as caught:
        world.run(jobs.run, check=check, mistake=mistake, folder=str(tmp_path))
    assert set(caught.value.failures) == {0, 1}
    for failure in caught.value.failures.values():
        assert "DeviceMisuseError" in failure
        assert MISUSED[mistake] in failure


@pytest.mark.parametrize(("mistake", "said"), [("", None), ("wait_for_the_wrong_device", "1024 of 1024 values")])
def test_a_wait_for_the_wrong_device_is_found(tmp_path, mistake, said):
    env = {**os.environ, **rehearsal_device.environment(devices=2), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.device.jobs_mistakes", "other device", mistake, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert len(problems) == (0 if said is None else 1), problems
    assert said is None or said in problems[0]


def test_a_round_of_nothing_is_refused_and_nobody_waits_for_ever(tmp_path):
    """One rank is refused before the collective; the other waits there for as long as the backend does."""
    with World(2, device=True, grace=30, env={"REHEARSAL_PATIENCE_S": "2"}) as world:
        try:
            told = str(world.run(jobs.run, check="one way", mistake="zero_size_round", folder=str(tmp_path)))
        except WorldError as error:
            assert not error.stacks, error
            told = f"{error} {error.results}"
    assert re.search("must be contiguous", told), told


def test_there_are_at_least_twelve():
    assert {mistake for mistake, _, _ in FOUND} | {"zero_size_round", "wait_for_the_wrong_device"} == set(jobs.MISTAKES)
    assert len(jobs.MISTAKES) >= 12
