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

from paddle_flexckpt.patching import apply_patches, check_patches, locate_package, read_patches, revert_patches
from tests.patching.overlay import make_overlay

SCRIPT = Path(__file__).with_name("trainer_scenarios.py")
REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = [patch for patch in read_patches().values() if patch.package in ("paddlenlp", "paddleformers")]


def installed(patch):
    package = locate_package(patch.package, patch.distributions)
    return package if package is not None and package.version in patch.versions else None


MINE = [patch for patch in PATCHES if installed(patch) is not None]

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.slow,
    pytest.mark.skipif(not MINE, reason="neither PaddleNLP nor PaddleFormers is installed in a release with patches"),
]


def scenario(patch):
    """Its name without the package and the version."""
    return patch.name.split("-", 2)[2]


def run(package, names, directory):
    """What is wrong with each."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
    path = os.pathsep.join([str(package.root), str(REPOSITORY)])
    environment = {**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(SCRIPT), package.name, str(directory), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["library"]).parent.parent == package.root
    return answer["results"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What is wrong with the released libraries."""
    results = {}
    for library in {patch.package for patch in MINE}:
        patches = [patch for patch in MINE if patch.package == library]
        found = run(installed(patches[0]), [scenario(patch) for patch in patches], tmp_path_factory.mktemp(library))
        results.update({patch.name: found[scenario(patch)] for patch in patches})
    return results


@pytest.mark.parametrize("patch", MINE, ids=lambda patch: patch.name)
def test_each_patch_mends_what_is_broken_without_it(patch, broken, tmp_path):
    package = make_overlay(installed(patch), [file.path for file in patch.files], tmp_path / "overlay")
    before = {file.path: package.read(file.path) for file in patch.files}
    assert [finding.status for finding in check_patches(package, [patch])] == ["fits"]
    apply_patches(package, [patch])
    assert broken[patch.name] is not None
    assert run(package, [scenario(patch)], tmp_path / "run") == {scenario(patch): None}
    revert_patches(package, [patch.name])
    assert {path: package.read(path) for path in before} == before


@pytest.mark.parametrize("library", sorted({patch.package for patch in MINE}))
def test_all_patches_of_a_library_fit_together(library, tmp_path):
    patches = [patch for patch in MINE if patch.package == library]
    package = make_overlay(
        installed(patches[0]), [f.path for patch in patches for f in patch.files], tmp_path / "overlay"
    )
    apply_patches(package, patches)
    assert all(finding.status == "applied" for finding in check_patches(package, patches))
    for patch in patches:
        for file in patch.files:
            compile(package.read(file.path), file.path, "exec")
