"""The patches for PaddleNLP and PaddleFormers, on the installed libraries, in an overlay of each.

Neither is among the packages that the tests are run with: `make test-trainer` and `make test-paddleformers` are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.patching import find_root, read_patches
from tests.patching.overlay import assert_that_each_comes_and_goes, make_overlay, patches_for_installed, topic

SCRIPT = Path(__file__).with_name("trainer_scenarios.py")
REPOSITORY = Path(__file__).resolve().parents[2]
MINE = [patch for patch in patches_for_installed(read_patches().values()) if patch.package != "paddle"]

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.slow,
    pytest.mark.skipif(not MINE, reason="neither PaddleNLP nor PaddleFormers is installed in a release with patches"),
]


def run(library, root, names, directory):
    """What is wrong with each."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
    path = os.pathsep.join([str(root), str(REPOSITORY)])
    environment = {**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(SCRIPT), library, str(directory), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["library"]).parent.parent == root
    return answer["results"]


@pytest.mark.parametrize("library", sorted({patch.package for patch in MINE}))
def test_each_patch_mends_what_is_broken_without_it(library, tmp_path):
    patches = [patch for patch in MINE if patch.package == library]
    names = [topic(patch) for patch in patches]
    root = make_overlay(patches, tmp_path / "overlay")
    assert_that_each_comes_and_goes(patches, root)
    broken = run(library, find_root(library), names, tmp_path / "broken")
    assert [name for name, result in broken.items() if result is None] == []
    assert run(library, root, names, tmp_path / "mended") == dict.fromkeys(names)
