"""The patches for Paddle: each fits the released package, and mends what its scenario shows to be broken.

They are tried on the installed release, in an overlay: nothing of the environment is changed. A process that imports
Paddle costs seconds, so all patches of the release are tried together: each scenario has to fail in the released
package, and to pass in the one with all patches. That each comes and goes alone is shown by its files.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.patching import find_root, read_patches
from tests.patching.overlay import assert_that_each_comes_and_goes, make_overlay, patches_for_installed, topic

SCRIPT = Path(__file__).with_name("scenarios.py")
MINE = [patch for patch in patches_for_installed(read_patches().values()) if patch.package == "paddle"]
TWO_RANKS = [topic(patch) for patch in MINE if topic(patch) in ("cpu-communication", "dist-tensor-offsets")]
ONE_RANK = [topic(patch) for patch in MINE if topic(patch) not in TWO_RANKS]

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.compat,
    pytest.mark.skipif(not MINE, reason="Paddle is not installed, or a release without patches"),
]


def start(root, *arguments, **environment):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**inherited, **environment, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(root, names):
    """What is wrong with each, in one process; if that crashes, in a process for each."""
    process = start(root, *names)
    output, errors = process.communicate(timeout=300)
    if process.returncode == 0:
        answer = json.loads(output.splitlines()[-1])
        assert Path(answer["paddle"]).parent.parent == root
        return answer["results"]
    if len(names) == 1:
        return {names[0]: f"exit code {process.returncode}: {errors[-2000:]}"}
    return {name: run(root, [name])[name] for name in names}


def run_two_ranks(root, names, directory):
    """What is wrong with each, of both ranks."""
    directory.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        endpoints = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    world = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints), "PADDLE_MASTER": endpoints[0]}
    world["FLAGS_tcp_store_using_libuv"] = "0"  # U18
    ranks = [
        start(
            root,
            *("--shared", str(directory), *names),
            **world,
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
            PADDLE_DISTRI_BACKEND="gloo",
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
    return {name: [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in names}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The package with all patches."""
    root = make_overlay(MINE, tmp_path_factory.mktemp("overlay") / "site")
    assert_that_each_comes_and_goes(MINE, root)
    return root


def test_each_patch_mends_what_is_broken_without_it(patched):
    broken = run(find_root("paddle"), ONE_RANK)
    assert [name for name, result in broken.items() if result is None] == []
    assert run(patched, ONE_RANK) == dict.fromkeys(ONE_RANK)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not TWO_RANKS, reason="no patch of this release is about several ranks")
def test_what_two_ranks_meet(patched, tmp_path):
    broken = run_two_ranks(find_root("paddle"), TWO_RANKS, tmp_path / "broken")
    assert all(result is not None for results in broken.values() for result in results[1:])
    assert run_two_ranks(patched, TWO_RANKS, tmp_path / "mended") == {name: [None, None] for name in TWO_RANKS}
