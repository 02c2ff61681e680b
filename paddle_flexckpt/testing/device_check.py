"""Prove the library on this machine's accelerators: ``python -m paddle_flexckpt.testing.device_check``.

It saves, loads and reshards, alone and with several ranks over the real backend, compares everything bit for bit with
values known on the host, and prints a table. ``--json`` writes a file to attach to a report of a problem. If the device
is simulated (the variable ``FLEXCKPT_SIMULATED_DEVICE`` is set), the table says so. Ctrl-C ends the checks and prints
the results so far.

This process does not import Paddle: a check that crashes is a line of the table.
Tested in tests/device/test_device_check.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_flexckpt import __version__
from paddle_flexckpt.testing.device_check_record import Outcome, is_simulated, read_record

_SINGLE = "paddle_flexckpt.testing.device_check_single"
_RANKS = Path(__file__).with_name("device_check_ranks.py")
#: The time limit of one process or one job, in seconds; NCCL needs some to start.
_PATIENCE = 600.0
_SIMULATED = "simulated device"
#: Defaults for the processes: a GPU's allocator waits ten seconds before it reports that there is no memory; the rank
#: that holds Paddle's store on libuv may end by a signal where a peer hangs up late (U18).
ENVIRONMENT = {"FLAGS_gpu_allocator_retry_time": "0", "FLAGS_tcp_store_using_libuv": "0"}


class NoAcceleratorError(RuntimeError):
    """An error of a machine on which Paddle sees no accelerator."""


class DeviceCheck:
    """All checks of one machine.

    Attributes:
        simulated: Whether the checks run on the simulated device.
        outcomes: The results of the checks.
        facts: Facts about the machine: versions, devices and so on.
    """

    def __init__(self, ranks: int, measured_bytes: int) -> None:
        """List the devices.

        Args:
            ranks: Number of ranks, each of which gets a device.
            measured_bytes: Size of the states that are timed.

        Raises:
            NoAcceleratorError: There is no device, or Paddle does not start; the text has Paddle's output.
        """
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] = {}
        self.simulated = is_simulated()
        self._measured = measured_bytes
        self._interrupted = False
        self._env = {**ENVIRONMENT, **os.environ}
        self._folder = tempfile.TemporaryDirectory(prefix="flexckpt-device-check-")
        self._path = Path(self._folder.name)
        self._single(0, 0)
        if self._interrupted:
            self.close()
            raise KeyboardInterrupt
        self._devices: list[str] = self.facts.pop("accelerators", [])
        if not self._devices:
            self.close()
            what = self.outcomes[0].detail if self.outcomes else "Paddle sees no accelerator"
            raise NoAcceleratorError(
                f"{what}. Remedy (FC808): install the build of Paddle for this machine's devices; "
                "`paddle.device.get_available_device()` has to name one"
            )
        self._ranks = min(ranks, len(self._devices))
        self._wanted = ranks

    def run(self) -> None:
        """Make all checks."""
        self._single(max(2, self._ranks) if len(self._devices) > 1 else 1, self._measured)
        if self._interrupted:
            return
        if self._ranks < 2:
            reason = f"{self._wanted} ranks were wanted, and there are {len(self._devices)} devices"
            self.outcomes.append(Outcome("several ranks", "skipped", detail=reason))
            return
        self._job(self._measured)

    def _single(self, count: int, measured: int) -> None:
        """Run the checks of one process; with a count of 0, only list the devices."""
        record = self._path / f"single.{count}"
        command = [sys.executable, "-m", _SINGLE, str(record), str(count), str(measured)]
        code, output = self._process(command)
        outcomes, facts = read_record(record)
        self.facts.update(facts)
        self._collect(outcomes, code, output, "one process")

    def _job(self, measured: int) -> None:
        """Run the checks of several ranks; in their last one, the last rank is killed."""
        devices = ",".join(name.partition(":")[2] for name in self._devices[: self._ranks])
        logs = self._path / "logs"
        command = [sys.executable, "-m", "paddle.distributed.launch", "--devices", devices, "--host", "127.0.0.1"]
        command += ["--log_dir", str(logs), str(_RANKS), str(self._path), str(measured)]
        _, output = self._process(command)
        for rank in range(self._ranks):
            outcomes, _ = read_record(self._path / f"rank.{rank}")
            log = logs / f"workerlog.{rank}"
            tail = log.read_text(errors="replace")[-3000:] if log.exists() else output
            self._collect(outcomes, 0 if outcomes else 1, tail, f"rank {rank}")

    def _collect(self, outcomes: Sequence[Outcome], code: int, output: str, who: str) -> None:
        unfinished = [outcome for outcome in outcomes if outcome.result == "begun"]
        for outcome in unfinished:
            outcome.result, outcome.detail = "WRONG", f"the process ended during this check. {output[-2000:]}"
        self.outcomes += outcomes
        if code and not unfinished:
            self.outcomes.append(Outcome(who, "WRONG", detail=f"ended with code {code}. {output[-2000:]}"))

    def _process(self, command: list[str]) -> tuple[int, str]:
        try:
            done = subprocess.run(
                command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_PATIENCE
            )
        except KeyboardInterrupt:
            # The report has the results so far.
            self._interrupted = True
            return 1, "interrupted"
        except subprocess.TimeoutExpired as error:
            return 1, f"not done within {_PATIENCE:.0f} s\n{(error.stdout or b'').decode(errors='replace')}"
        return done.returncode, done.stdout.decode(errors="replace")

    def close(self) -> None:
        """Remove the files of the checks."""
        self._folder.cleanup()

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        prefixes = ("FLAGS_", "NCCL_", "XCCL_", "PADDLE_", "REHEARSAL_", "FLEXCKPT_", "CUDA_VISIBLE_DEVICES")
        return {
            "device": _SIMULATED if self.simulated else self._devices[0].partition(":")[0],
            "simulated": self.simulated,
            "ok": self.ok,
            "seconds": seconds,
            "ranks": self._ranks,
            "paddle_flexckpt": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "environment": {name: value for name, value in sorted(self._env.items()) if name.startswith(prefixes)},
            **self.facts,
            "checks": [asdict(outcome) for outcome in self.outcomes],
        }

    @property
    def ok(self) -> bool:
        """Return whether checks were made, and all of them passed."""
        made = [outcome for outcome in self.outcomes if outcome.result != "skipped"]
        return bool(made) and all(outcome.result == "ok" for outcome in made)


def table(report: Mapping[str, Any]) -> str:
    """Return the results as text, one line for each check; details of failures follow."""
    simulated = report["simulated"]
    loud = f"*** {_SIMULATED.upper()}: this proves nothing about an accelerator ***"
    devices = ", ".join(report.get("devices", {}))
    lines = [loud] if simulated else []
    lines.append(f"paddle_flexckpt {report['paddle_flexckpt']}, Paddle {report.get('paddle')}, on {devices}")
    lines.append(f"{'check':42s} {'rank':>4s} {'result':8s} {'bytes':>12s} {'s':>7s}  found")
    wrong = []
    for check in report["checks"]:
        rank = "" if check["rank"] is None else str(check["rank"])
        first = check["detail"].splitlines()[0][:100] if check["detail"] else ""
        lines.append(
            f"{check['check'][:42]:42s} {rank:>4s} {check['result']:8s} {check['nbytes']:12,d} "
            f"{check['seconds']:7.2f}  {first}"
        )
        if check["result"] == "WRONG":
            wrong.append(f"--- {check['check']} {rank}\n{check['detail']}")
    lines += wrong
    number = sum(check["result"] == "ok" for check in report["checks"])
    skipped = sum(check["result"] == "skipped" for check in report["checks"])
    verdict = "everything is right" if report["ok"] else "SOMETHING IS WRONG"
    where = f" (on a {_SIMULATED})" if simulated else ""
    lines.append(
        f"{verdict}{where}: {number} checks ok, {len(wrong)} wrong, {skipped} skipped, {report['seconds']:.0f} s"
    )
    return "\n".join(lines + ([loud] if simulated else []))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paddle_flexckpt.testing.device_check", description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="number of devices, one rank each (2 by default)")
    parser.add_argument("--json", type=Path, help="where to write everything")
    parser.add_argument("--mib", type=int, default=256, help="size of the states that are timed (256 by default)")
    options = parser.parse_args(arguments)
    if options.devices < 1:
        parser.error(f"--devices has to be 1 or more; got {options.devices}")
    if options.mib < 1:
        parser.error(f"--mib has to be 1 or more; got {options.mib}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json names a file in a directory that is not there: {options.json}")
    begin = time.perf_counter()
    try:
        check = DeviceCheck(options.devices, options.mib << 20)
    except NoAcceleratorError as error:
        sys.stderr.write(f"device_check: {error}\n")
        return 2
    try:
        if check.simulated:
            sys.stdout.write(f"*** no accelerator is used: the checks run on a {_SIMULATED} ***\n")
            sys.stdout.flush()
        check.run()
        report = check.report(time.perf_counter() - begin)
    finally:
        check.close()
    sys.stdout.write(table(report) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
