"""Run suites that were written for the host with a simulated device current: ``python -m tests.device.suites``.

Each file runs in a process of its own: one that crashes takes no other with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.device import plugin

ROOT = Path(__file__).resolve().parents[2]
#: Suites whose tests put tensors into the library in this process.
SUITES = (
    "tests/memory",
    "tests/communication",
    "tests/saving",
    "tests/loading",
    "tests/run_state",
    "tests/manager",
    "tests/parallel",
    "tests/trainer",
    "tests/transfer",
    "tests/tools",
)
PATIENCE = 1800.0


def files(chosen: list[str]) -> list[str]:
    """Return the test files of directories, and those given as files."""
    found = []
    for name in chosen:
        path = ROOT / name
        found += [str(each.relative_to(ROOT)) for each in sorted(path.glob("test_*.py"))] if path.is_dir() else [name]
    return found


def run(file: str, arguments: list[str]) -> tuple[int, str]:
    """Run one file; return pytest's exit status, negative for a crash, and what it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "REHEARSAL_"))}
    env.update(plugin.environment(devices=2), OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH", "")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.device.on_device", *arguments, file]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout


def main() -> int:
    """Run the suites; return 1 if anything in them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help="files or directories of tests")
    options, arguments = parser.parse_known_args()
    failed = []
    for file in files(options.suites or list(SUITES)):
        begin = time.perf_counter()
        status, said = run(file, arguments)
        # 5: no test was collected, as where a trainer is not installed.
        if status not in (0, 5):
            failed.append(file)
            print(said, flush=True)
        lines = [line for line in said.splitlines() if line.startswith("device:") or " in " in line]
        print(f"{file:50s} {status:3d} {time.perf_counter() - begin:6.1f} s  {' | '.join(lines[-2:])}", flush=True)
    print(f"failed: {failed}" if failed else "all suites passed on the simulated device")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
