"""Some crash states of real file systems; ``make test-filesystems`` goes through thousands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.filesystems.device import FILE_SYSTEMS, ROOT, why_not

# A process of its own, for its mounts; arrays of numpy are enough.
_CHILD = """
import dataclasses, json, sys
sys.modules["paddle"] = None
from tests.filesystems.device import Unavailable
from tests.filesystems.trial import Trial, carry_out
try:
    print(json.dumps(dataclasses.asdict(carry_out(Trial(**json.loads(sys.argv[1]))))))
except Unavailable as error:
    print(json.dumps(str(error)))
"""


def look(system: str, scenario: str, limit: int, left_out: str = "") -> dict:
    """What is found, or a test that is skipped."""
    reason = why_not(next(each for each in FILE_SYSTEMS if each.name == system))
    if reason is None:
        trial = {"system": system, "scenario": scenario, "seed": 0, "limit": limit, "left_out": left_out}
        command = [sys.executable, "-c", _CHILD, json.dumps(trial)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        if isinstance(found, dict):
            return found
        reason = found
    pytest.skip(f"NO CRASH STATES OF {system.upper()} ARE LOOKED AT: {reason}")


# One of each, so that the disk, the writer process and two ranks are all seen; a save of one rank is the fastest.
@pytest.mark.parametrize(
    ("system", "scenario"),
    [
        ("ext4 data=ordered", "asynchronous: overwrite, 1 ranks"),
        ("xfs", "second id, 1 ranks"),
        ("btrfs", "overwrite, 2 ranks"),
    ],
)
def test_old_or_new_and_a_next_save(system, scenario):
    found = look(system, scenario, 10)
    assert found["violations"] == []
    assert found["states"] >= 8
    assert found["writes"] > 10
    assert found["flushes"] >= 5  # an fsync of the file system comes to the disk
    assert len(found["outcomes"]) == 2  # old and new


def test_a_writer_process_that_leaves_an_fsync_out_is_found_out():
    found = look("ext4 data=ordered", "asynchronous: fresh, 1 ranks", 10, left_out="data")
    assert found["violations"]
    assert "is not whole" in found["violations"][0]
