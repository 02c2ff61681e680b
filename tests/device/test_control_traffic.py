"""What ranks tell each other stays off their devices, whichever is current; and a lost rank is named all the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.device import plugin

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("control_traffic_script.py")
SIZE = 2
CALLS = ["save_and_load", "manage", "sub_group", "host_group", "fail_on_one"]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of a rank's process, but for those of its place in the job."""
    reason = plugin.missing_tools()
    if reason:
        pytest.skip(reason)
    foreign = ("PADDLE_", "FLAGS_selected_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, **plugin.environment(SIZE), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=["device", "host"])
def answers(request, environment, tmp_path_factory) -> list[dict[str, dict[str, object]]]:
    """What every rank said of every call, in a job in which the device is current, and in one in which the CPU is."""
    work = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "paddle.distributed.launch", "--devices", ",".join(map(str, range(SIZE)))]
    command += ["--host", "127.0.0.1", "--log_dir", str(work / "logs"), str(SCRIPT), str(work), request.param]
    with (work / "launch.log").open("wb") as log:
        launched = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=900)
    logs = "\n".join(path.read_text()[-6000:] for path in sorted((work / "logs").glob("workerlog.*")))
    assert launched.returncode == 0, (work / "launch.log").read_text() + logs
    return [json.loads((work / f"{request.param}.{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.mark.parametrize("call", CALLS)
def test_agreements_use_neither_the_devices_collectives_nor_its_memory(answers, call):
    nothing = {"ccl": 0, "h2d": 0, "d2h": 0, "d2d": 0, "allocations": 0}
    assert [answer[call] for answer in answers] == [{"right": True, **nothing}] * SIZE


def test_without_a_store_to_meet_through_nothing_falls_back_to_the_device(answers):
    for answer in answers:
        error = answer["no_store"]["error"]
        assert error.startswith("ValidationError: ranks [0, 1] cannot agree on anything")
        assert "the job has no key-value store through which their hosts could" in error
        assert (
            "Remedy (FC503): start it with paddle.distributed.launch, and call paddle.distributed.init_parallel_env()"
            in error
        )


@pytest.mark.parametrize(
    ("victim", "reason"),
    [(1, "it has gone, or does not answer"), (0, "the job's key-value store, which it keeps, does not answer")],
    ids=["a rank", "the rank with the store"],
)
def test_a_killed_rank_is_named(environment, tmp_path, victim, reason):
    # Without the launcher, which would end the others too.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoints = [f"127.0.0.1:{port + 1 + rank}" for rank in range(SIZE)]
    started = []
    for rank in range(SIZE):
        own = {
            "PADDLE_MASTER": f"127.0.0.1:{port}",
            "PADDLE_TRAINERS_NUM": str(SIZE),
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_DISTRI_BACKEND": "xccl",
            "PADDLE_XCCL_BACKEND": plugin.DEVICE_TYPE,
            f"FLAGS_selected_{plugin.DEVICE_TYPE}s": str(rank),
        }
        with (tmp_path / f"stderr.{rank}").open("w") as log:
            command = [sys.executable, str(SCRIPT), str(tmp_path), "killed", str(victim)]
            environ = {**environment, **own}
            started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True))
    try:
        # Paddle's own groups, and the channel, would wait for half an hour for a rank that hangs.
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [path.read_text()[-6000:] for path in sorted(tmp_path.glob("stderr.*"))]
    ended = [process.returncode for process in started]
    assert (ended[victim], ended[1 - victim]) == (-signal.SIGKILL, 3), "\n".join([*outputs, *logs])
    assert (
        outputs[1 - victim]
        .splitlines()[-1]
        .startswith(f"LostRankError cannot save to {str(tmp_path / 'checkpoint')!r}: rank {victim} is lost: {reason}")
    )
