"""Run the simulation on an older state of the library: ``python -m tests.simulation.older --seeds 10000``.

The default is a commit at which survivors of a failed collective removed their files: there a killed rank and a slow
commit together lost the old checkpoint and the new one. The simulation is copied into a worktree of that commit. Names
that have moved since are replaced in the copy, and ranks talk over today's host channel, as Paddle's own collectives
have no simulated form. Saves are synchronous, to a shared file system.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMIT = "f01905d"
_ROOT = Path(__file__).parents[2]
_PACKAGE = "paddle_flexckpt"
# Where the simulation was then; library_modules() has the package's own modules alone.
_HERE = f"{_PACKAGE}.testing.simulation"
# Modules that the simulated ranks bring along.
_BROUGHT = (
    "catalog/layer_ranges.py",
    "catalog/texts.py",
    "ranks/framing.py",
    "ranks/group_listener.py",
    "ranks/host_channel.py",
    "ranks/lost_ranks.py",
    "forks.py",
    "undo.py",
)
_ROOMS = ("background", "catalog", "execution", "manager", "planning", "runtime", "storage")
# What was elsewhere then, or was not yet.
_MOVED = {
    "tests.simulated": _HERE,
    **{f"{_PACKAGE}.{name[:-3].replace('/', '.')}": f"{_HERE}.own_{Path(name).stem}" for name in _BROUGHT},
    f"from {_PACKAGE}.ranks import lost_ranks": f"from {_HERE} import own_lost_ranks as lost_ranks",
    f"from {_PACKAGE}.foreign.paddle_files import PADDLE_METADATA": 'PADDLE_METADATA = "0.metadata"',
    f"from {_PACKAGE}.tools.step_record import RECORD, StepRecord": (
        f"from {_PACKAGE}.manager.contents import RECORD, decode_record\n"
        f"from {_PACKAGE}.manager.policies import StepRecord"
    ),
    f"{_PACKAGE}.media.opening": f"{_PACKAGE}.storage",
    f"{_PACKAGE}.media.lease": f"{_PACKAGE}.storage.lease",
    f"{_PACKAGE}.ranks.communicator": f"{_PACKAGE}.runtime.communicator",
    f"{_PACKAGE}.loading.loader": f"{_PACKAGE}.runtime.loader",
    # Saves of several jobs or with readers alone need these, and files had other names.
    f"from {_PACKAGE}.native.save_names import save_of": "def save_of(name):\n    return None",
    f"{_PACKAGE}.native.directory": f"{_PACKAGE}.storage.listing",
    f"{_PACKAGE}.native.manifest": f"{_PACKAGE}.storage.manifest",
    f"from {_PACKAGE}.native.partition_files import decode_partition, merge_rows": (
        "def merge_rows(manifest, read):\n    return manifest"
    ),
    "enumerate(manifest.partitions)": "()",
    "StepRecord.decode(": "decode_record(",
    "manifest.sizes.items()": "zip(manifest.catalog.files, map(int, manifest.file_bytes))",
    "*manifest.files,": "*manifest.catalog.files,",
    "    def _all_to_all(": "    def open_carrier(self):\n        raise NotImplementedError\n\n    def _all_to_all(",
}
_DRIVER = """
import sys, time
from dataclasses import replace
from paddle_flexckpt.testing.simulation.cluster import simulate
from paddle_flexckpt.testing.simulation.drawing import draw
from paddle_flexckpt.testing.simulation.story import timeline
first, count, stride = map(int, sys.argv[1:])
others = 0
for number, seed in enumerate(range(first, first + count, stride), 1):
    case = draw(seed)
    faults = tuple(fault for fault in case.faults if not fault.kind.startswith(("store", "person", "care")))
    scenario = replace(case.scenario, is_async=False, storage="shared", jobs=1, habits=())
    outcome = simulate(replace(case, scenario=scenario, faults=faults))
    lost = [each for each in outcome.violations if each.invariant == "a committed checkpoint is whole"]
    others += bool(outcome.violations) and not lost
    if lost:
        print(timeline(outcome.story))
        print(f"seed {seed}, run {number} of this process, {others} runs before it with other violations: {lost[0]}")
        sys.exit(1)
print(f"{number} runs, {others} with other violations")
"""


def bring(tree: Path) -> None:
    """Copy the simulation into an older tree."""
    target = tree.joinpath(*_HERE.split("."))
    shutil.copytree(_ROOT / "tests" / "simulated", target, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _BROUGHT:
        shutil.copy(_ROOT / _PACKAGE / name, target / f"own_{Path(name).name}")
    # Object stores were reached by other ways.
    (target / "object_store.py").write_text("class ObjectStore: ...\nclass Effect: ...\nclass Stored: ...\n")
    (target / "object_store_clients.py").write_text("def install(*_): ...\n")
    # Nobody repairs there, and nodes have no disks of their own: these were other modules then.
    (target / "caretaker.py").write_text("class Caretaker:\n    def __init__(self, cluster): ...\n")
    (target / "per_node.py").write_text("class NodeLedger: ...\nclass NodeScript: ...\n")
    for path in target.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for today, then in _MOVED.items():
            text = text.replace(today, then)
        if path.name == "modules.py":
            brought = [f"testing.simulation.own_{Path(name).stem}" for name in _BROUGHT]
            text = re.sub(r"ROOMS = \(.*?\)\n", f"ROOMS = {_ROOMS}\n", text, flags=re.DOTALL)
            text = re.sub(r"SINGLE = \(.*?\)\n", f"SINGLE = {('report', *brought)}\n", text)
            # Processes had less of their own.
            text = re.sub(r'        \("(background|observers|manager).*\n', "", text)
            text = text.replace('("ranks.lost_ranks"', '("testing.simulation.own_lost_ranks"')
            text = text.replace(f"    from {_PACKAGE}.background import writer\n", "")
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, arguments.commit], cwd=_ROOT, check=True)
        try:
            bring(tree)
            runs = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _DRIVER,
                        *map(str, (arguments.first + job, arguments.seeds, arguments.jobs)),
                    ],
                    cwd=tree,
                    env={**os.environ, "PYTHONHASHSEED": "0"},  # as of `run`
                )
                for job in range(arguments.jobs)
            ]
            return max(run.wait() for run in runs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=_ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
