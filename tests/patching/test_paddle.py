"""The patches for Paddle: each fits the released package, and mends what its scenario shows to be broken.

They are tried on the installed release, in an overlay: nothing of the environment is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.patching import apply_patches, check_patches, locate_package, read_patches, revert_patches
from paddle_flexckpt.patching.index import sha256
from tests.patching.overlay import make_overlay

SCRIPT = Path(__file__).with_name("scenarios.py")
TWO_RANKS = ("cpu-communication", "dist-tensor-offsets")
PATCHES = [patch for patch in read_patches().values() if patch.package == "paddle"]
RELEASED = locate_package("paddle", PATCHES[0].distributions)
MINE = [patch for patch in PATCHES if RELEASED is not None and RELEASED.version in patch.versions]

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(not MINE, reason="Paddle is not installed, or a release without patches"),
]


def scenario(patch):
    """Its name without the package and the version."""
    return patch.name.split("-", 2)[2]


ONE_RANK = [patch for patch in MINE if scenario(patch) not in TWO_RANKS]


def environment(package):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
    path = os.pathsep.join([str(package.root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run(package, names):
    """What is wrong with each, in one process; a crash of it is what is wrong with all."""
    command = [sys.executable, str(SCRIPT), *names]
    done = subprocess.run(command, env=environment(package), capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        return dict.fromkeys(names, f"exit code {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["paddle"]).parent.parent == package.root
    return answer["results"]


def run_two_ranks(package, names, directory):
    """The same, of both ranks."""
    command = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        "2",
        "--log_dir",
        f"{directory}/log",
    ]
    command += [str(SCRIPT), "--shared", str(directory), *names]
    done = subprocess.run(command, env=environment(package), capture_output=True, text=True, timeout=300, cwd=directory)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {name: [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in names}


@pytest.fixture(scope="module")
def broken():
    """What is wrong with the released package."""
    names = [scenario(patch) for patch in ONE_RANK]
    results = run(RELEASED, names) if names else {}
    if any(str(result).startswith("exit code") for result in results.values()):
        results = {name: run(RELEASED, [name])[name] for name in names}
    return results


def overlay(target, patches):
    return make_overlay(RELEASED, {file.path for patch in patches for file in patch.files}, target)


@pytest.mark.parametrize("patch", ONE_RANK, ids=lambda patch: patch.name)
def test_each_patch_mends_what_is_broken_without_it(patch, broken, tmp_path):
    package = overlay(tmp_path / "overlay", [patch])
    assert [finding.status for finding in check_patches(package, [patch])] == ["fits"]
    apply_patches(package, [patch])
    name = scenario(patch)
    assert broken[name] is not None
    assert run(package, [name]) == {name: None}


def test_all_patches_of_a_release_go_together(tmp_path):
    package = overlay(tmp_path / "overlay", MINE)
    before = {file.path: package.read(file.path) for patch in MINE for file in patch.files}
    apply_patches(package, MINE)
    names = [scenario(patch) for patch in ONE_RANK]
    assert run(package, names) == dict.fromkeys(names)
    revert_patches(package, [patch.name for patch in reversed(MINE)])
    assert {path: package.read(path) for path in before} == before
    for patch in MINE:
        assert {file.path: file.before for file in patch.files} == {
            file.path: sha256(before[file.path]) for file in patch.files
        }


@pytest.mark.multiprocess
@pytest.mark.skipif(len(MINE) == len(ONE_RANK), reason="no patch of this release is about several ranks")
def test_what_two_ranks_meet(tmp_path):
    patches = [patch for patch in MINE if patch not in ONE_RANK]
    names = [scenario(patch) for patch in patches]
    for directory in ("broken", "mended"):
        (tmp_path / directory).mkdir()
    broken = run_two_ranks(RELEASED, names, tmp_path / "broken")
    assert all(result is not None for results in broken.values() for result in results[1:])
    package = overlay(tmp_path / "overlay", MINE)
    apply_patches(package, MINE)
    assert run_two_ranks(package, names, tmp_path / "mended") == {name: [None, None] for name in names}
