"""What install() mends of semi-automatic parallelism, on every supported release of Paddle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.parallel.semi_auto import unscales_missing_gradients

pytestmark = [pytest.mark.compat, pytest.mark.paddle]

NAMES = ["optimizer-state", "unscale-uninitialised"]
SCRIPT = (
    "import sys, paddle_flexckpt as fc; fc.install(); from tests.patching.scenarios import main; main(sys.argv[1:])"
)


def test_install_mends_what_the_patches_mend():
    """In a process of its own: that there has been a mesh stays in Paddle's globals."""
    root = str(Path(__file__).parents[2])
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *NAMES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["results"] == dict.fromkeys(NAMES)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.0.0", True), ("3.1.0", True), ("3.1.1", False), ("3.2.0", False), ("3.3.1", False), ("0.0.0", False)],
)
def test_releases_that_unscale_gradients_without_memory(version, expected):
    assert unscales_missing_gradients(version) == expected
