"""Real ranks that publish and are killed: a reader finds the whole model or none, and the next call is as documented.

A seeded handful; ``python -m tests.crash.publishing`` goes through as many as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def outcomes(seed: int, count: int) -> dict[str, int]:
    """Count the outcomes in a process of its own, as it forks: this one may have threads."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.publishing", "--seed", str(seed)]
    ended = subprocess.run(
        [*command, "--count", str(count)], cwd=ROOT, capture_output=True, text=True, timeout=60 + 20 * count
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(("seed", "count"), [(7, 12), pytest.param(8, 400, marks=pytest.mark.slow)])
def test_ranks_are_killed_at_any_call(seed, count):
    found = outcomes(seed, count)
    assert sum(found.values()) == count
    assert found["killed, something"] > count / 4
    assert {"killed, nothing", "killed, the model"} & set(found)
