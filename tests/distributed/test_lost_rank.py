"""A rank that is killed while it saves or loads: the others say which, and the checkpoint is there still."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("lost_rank_script.py")


def run(tmp_path, transport: str, size: int, victim: int, point: str = "fsync") -> list[tuple[int, str]]:
    """Exit code and last line of every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports = [port + 1 + rank for rank in range(size)]
    base = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    base.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PADDLE_MASTER=f"127.0.0.1:{port}")
    base.update(PADDLE_TRAINERS_NUM=str(size), PADDLE_DISTRI_BACKEND="gloo", MASTER_ADDR="127.0.0.1")
    base.update(MASTER_PORT=str(port), PADDLE_TRAINER_ENDPOINTS=",".join(f"127.0.0.1:{p}" for p in ports))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "c"), transport, str(victim), point]
    started = [
        subprocess.Popen(
            command,
            env={**base, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[rank]}"},
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"stderr.{rank}").open("w"),
            text=True,
        )
        for rank in range(size)
    ]
    try:
        # A process that has gone is known at once, a lost store after 30 s; Paddle itself would wait for half an hour.
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, (output.splitlines() or [""])[-1]) for process, output in zip(started, outputs)]


def values(path, size: int) -> paddle.Tensor:
    whole = fc.load_merged_state_dict(path)["w"].numpy()
    return [int(whole[4 * rank, 0]) for rank in range(size)]


def test_a_rank_that_is_killed_while_it_reads_for_others_is_named_by_them(tmp_path):
    ended = run(tmp_path, "mesh", 4, 2, "while it reads for others")
    assert ended[2][0] == -signal.SIGKILL
    survivors = [each for rank, each in enumerate(ended) if rank != 2]
    assert {code for code, _ in survivors} == {3}, (ended, [path.read_text() for path in tmp_path.glob("stderr.*")])
    (text,) = {line for _, line in survivors}
    assert text.startswith(f"LostRankError cannot load from {str(tmp_path / 'c')!r}: rank 2")
    assert "is lost" in text


def both_ways(*case, name):
    """A case, and the same with the job that saves after it: that costs as many processes again."""
    yield pytest.param(*case, False, id=name)
    yield pytest.param(*case, True, id=f"{name}, and a save after it", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("transport", "size", "victim", "point", "saves_again"),
    [
        pytest.param("gloo", 2, 1, "fsync", True, id="gloo"),
        *both_ways("mesh", 3, 1, "in the middle of a collective", name="noticed in different collectives"),
        *both_ways("gloo", 2, 0, "fsync", name="the rank with the store"),
    ],
)
def test_a_killed_rank_is_named_by_all_others(tmp_path, transport, size, victim, point, saves_again):
    ended = run(tmp_path, transport, size, victim, point)
    assert ended[victim][0] == -signal.SIGKILL
    survivors = [each for rank, each in enumerate(ended) if rank != victim]
    assert {code for code, _ in survivors} == {3}, (ended, [path.read_text() for path in tmp_path.glob("stderr.*")])
    texts = {line for _, line in survivors}
    assert len(texts) == 1, texts
    (text,) = texts
    assert text.startswith(f"LostRankError cannot save to {str(tmp_path / 'c')!r}: rank {victim}")
    assert "is lost" in text
    assert "Remedy" in text
    assert values(tmp_path / "c", size) == [100 + 1000 * rank for rank in range(size)]
    if not saves_again:
        return
    # The next job saves, and what the dead save left is gone.
    assert [code for code, _ in run(tmp_path, transport, size, victim=-1)] == [0] * size
    assert values(tmp_path / "c", size) == [200 + 1000 * rank for rank in range(size)]
    without_tokens = [re.sub("-[0-9a-f]{32}", "", name) for name in os.listdir(tmp_path / "c")]
    assert sorted(name.partition(".")[0] for name in without_tokens) == sorted(
        ["0", *(f"{rank}_0" for rank in range(size)), PADDLE_METADATA.partition(".")[0]]
    )


def test_a_coordinator_killed_right_after_its_commit_has_committed(tmp_path):
    ended = run(tmp_path, "gloo", 2, 0, point="unlink")
    assert ended[0][0] == -signal.SIGKILL
    assert ended[1][1].startswith("LostRankError")
    assert values(tmp_path / "c", 2) == [200, 1200]
    assert [code for code, _ in run(tmp_path, "gloo", 2, victim=-1)] == [0, 0]


def test_a_rank_that_dies_before_its_first_call_is_not_said_to_be_alive(tmp_path):
    ended = run(tmp_path, "gloo", 2, 1, point="before the first call")
    assert ended[1][0] == -signal.SIGKILL
    assert ended[0][0] == 3, (tmp_path / "stderr.0").read_text()
    assert (
        f"cannot save to {str(tmp_path / 'c')!r}: rank 1 is missing: it has gone before its first call" in ended[0][1]
    )


def test_a_rank_that_dies_before_its_first_call_is_lost_once_it_has_installed(tmp_path):
    """Without the short patience of the test above: the others notice at once."""
    ended = run(tmp_path, "gloo", 2, 1, point="after install()")
    assert ended[1][0] == -signal.SIGKILL
    assert ended[0][0] == 3, (tmp_path / "stderr.0").read_text()
    assert f"cannot save to {str(tmp_path / 'c')!r}: rank 1 is lost" in ended[0][1]
