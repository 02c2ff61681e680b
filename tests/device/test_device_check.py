"""The check that a user runs once on an accelerator: here on the simulated device, right and with a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.testing import device_check
from paddle_flexckpt.testing.device_check_record import Record, require
from tests.device import plugin

pytest.importorskip("paddle")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.paddle,
    pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools()),
]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CHECK = (sys.executable, "-m", "paddle_flexckpt.testing.device_check")
# Random delays before the work of a stream, so that a wait that is missing shows.
SETTINGS = {"memory_gib": 0.0625, "delay_us": 200, "seed": 1}

SINGLE = {
    *("save and load, all dtypes", "float8", "views and strided tensors", "a tensor written on another stream"),
    *(
        "tensors change after an asynchronous save",
        "a tensor on the second device",
        "model, optimizer and random state",
    ),
    *("merged load, all dtypes", "reshard, all dtypes", "asynchronous save, all dtypes"),
    *("asynchronous save in slices, all dtypes", "no device memory left, save", "no device memory left, load"),
    *("no device memory left, reshard", "host memory is page-locked", "copies to the host beside bare ones"),
    *("copy, hash and write at the same time", "slices on a stream of their own"),
    *("a training step while a save is written", "what crosses the link", "speed"),
}
#: With part of the reason.
SKIPPED = {
    "cudaHostRegister": "no libcudart is loaded",
    "asynchronous save through less memory": "--mib makes it larger",
}
RANKS = {
    *("ranks have a device each", "save in rows, load in columns", "replicated state is written once"),
    *("asynchronous save of all ranks", "reshard from rows to columns", "reshard one way"),
    *("reshard of unequal amounts", "no device memory left, reshard of ranks", "what crosses the link of a rank"),
    "reshard, speed",
}
# Runs in every process of the check, before all else: the last byte that is read off a device is another one.
MISTAKE = """
from paddle_flexckpt.memory.device_memory import DeviceMemory

right = DeviceMemory.read_into


def read_into(self, start, target, wait=True):
    right(self, start, target, True)
    target[-1:] ^= 1


DeviceMemory.read_into = read_into
"""


def without_device() -> dict[str, str]:
    mine = ("PADDLE_", "REHEARSAL_", "CUSTOM_DEVICE_ROOT", "FLEXCKPT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)}


def run(tmp_path, mistake: str = "") -> tuple[int, str, dict]:
    (tmp_path / "sitecustomize.py").write_text(mistake, encoding="utf-8")
    env = without_device()
    env.update(plugin.environment(2, **SETTINGS), OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    command = [*CHECK, "--mib", "6", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout, json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


def test_everything_is_right_on_the_simulated_device_which_is_said_loudly(tmp_path):
    status, said, report = run(tmp_path)
    assert status == 0, said
    assert said.count("SIMULATED DEVICE") >= 2
    assert report["simulated"] is True
    assert report["device"] == "simulated device"
    assert report["environment"]["FLEXCKPT_DEVICE_COUNTERS"] == "tests.device.plugin"
    checks = {(check["check"], check["rank"]): check for check in report["checks"]}
    for name, reason in SKIPPED.items():
        skipped = checks.pop((name, None))
        assert skipped["result"] == "skipped"
        assert reason in skipped["detail"]
    wanted = {(name, None) for name in SINGLE} | {(name, rank) for name in RANKS for rank in (0, 1)}
    assert set(checks) == wanted | {("a killed rank", 0)}
    assert {check["result"] for check in checks.values()} == {"ok"}
    for name in ("speed", "reshard, speed"):
        figures = [check["figures"] for (each, _), check in checks.items() if each == name]
        assert all(figure > 0 for each in figures for key, figure in each.items() if key.endswith("gib_per_s")), figures
    # Figures of the clock are told with their bounds, which a simulated device need not keep.
    bounded = {name: sorted(check["bounds"]) for (name, _), check in checks.items() if check["bounds"]}
    assert bounded == {
        "copies to the host beside bare ones": ["page_locked_of_pageable", "ring_of_bare_copy"],
        "a training step while a save is written": ["step_beside_of_alone"],
    }
    assert checks["copy, hash and write at the same time", None]["figures"]["copy_seconds"] > 0
    assert checks["what crosses the link", None]["figures"]["load: to_device"] == 6 * MIB
    assert checks["what crosses the link of a rank", 1]["figures"]["reshard: to_ranks"] == 3 * MIB
    assert checks["reshard of unequal amounts", 0]["nbytes"] == 4 * 1000
    assert checks["reshard of unequal amounts", 1]["nbytes"] == 4 * 1_000_003
    assert report["paddle"]
    assert list(report["devices"]) == ["rehearsal:0", "rehearsal:1"]


def test_a_machine_without_an_accelerator_is_told_so():
    env = {**without_device(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(CHECK, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "device_check: Paddle sees no accelerator. Remedy (FC808): install the build of Paddle for"
    )


@pytest.mark.slow  # test_seeded_mistakes has a dozen more
def test_a_mistake_of_one_bit_is_found(tmp_path):
    status, said, report = run(tmp_path, MISTAKE)
    assert status == 1, said
    assert "SOMETHING IS WRONG" in said
    wrong = {check["check"] for check in report["checks"] if check["result"] == "WRONG"}
    assert {"save and load, all dtypes", "save in rows, load in columns"} <= wrong
    # What does not read a device's memory on the host is as right as before.
    right = {check["check"] for check in report["checks"] if check["result"] == "ok"}
    assert {"ranks have a device each", "reshard from rows to columns"} <= right


def test_a_check_that_never_ends_is_told(tmp_path):
    """A process that dies within a check leaves the line that it had begun it."""
    from paddle_flexckpt.testing.device_check_record import read_record

    record = Record(tmp_path / "r", rank=1)
    record.check("fine", lambda: {"nbytes": 3})
    record.check("wrong", lambda: require(False, "two are not three"))
    record._write({"check": "deadly", "rank": 1})
    outcomes = {outcome.check: outcome for outcome in read_record(tmp_path / "r")[0]}
    assert [outcomes[name].result for name in ("fine", "wrong", "deadly")] == ["ok", "WRONG", "begun"]
    assert outcomes["fine"].nbytes == 3
    assert "two are not three" in outcomes["wrong"].detail


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_check_that_is_interrupted_tells_what_was_found_until_then(tmp_path, monkeypatch, capsys, unfinished):
    real = subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:  # the standard library asks for the processor
            return real(command, **options)
        record = Record(Path(command[3]))
        record.note(accelerators=["rehearsal:0", "rehearsal:1"])
        if command[4] == "0":  # only looks which devices there are
            return subprocess.CompletedProcess(command, 0, b"")
        record.check("done", lambda: None)
        if unfinished:
            record._write({"check": "cut off"})
        raise KeyboardInterrupt

    monkeypatch.setattr(device_check.subprocess, "run", run)
    assert device_check.main(["--json", str(tmp_path / "out.json")]) == 1
    checks = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["checks"]
    assert [(check["check"], check["result"]) for check in checks] == [
        ("done", "ok"),
        ("cut off" if unfinished else "one process", "WRONG"),
    ]
    assert "interrupted" in checks[1]["detail"]
    assert "SOMETHING IS WRONG" in capsys.readouterr().out


def test_nothing_is_found_where_the_look_for_devices_is_interrupted(monkeypatch):
    def run(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(device_check.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        device_check.main([])
