"""Run the numbered steps of the kit, each within a time limit of its own: ``tests/device/gpu/run.sh STEP ...``.

Every step leaves ``NUMBER-NAME.json`` and ``NUMBER-NAME.log``, of at most 200 lines, in the folder of results. A step
that fails, or is not done in time, does not keep the next from running. Where the environment variable ``OUT`` names
a folder, an archive of all results goes there after each step, with a summary.

    tests/device/gpu/run.sh --dry-run all                       # what would be run, with limits and sizes
    tests/device/gpu/run.sh all                                 # on a GPU
    tests/device/gpu/run.sh --runtime simulated --small all     # a rehearsal

The standard library is all that this module needs: the first step installs the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.device.gpu import pack

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: Of a step's limit, for what was interrupted to end by itself.
GRACE = 5.0
LINES, FIRST_LINES, WIDTH = 200, 60, 500
PLUGIN = "tests.device.gpu.on_plugin"
CHECK = "paddle_flexckpt.testing.device_check"


@dataclass(frozen=True)
class Step:
    """Describe one step.

    Attributes:
        number: By which it is called.
        name: In a word or two, for files.
        limit: Seconds that it may take.
        commands: Words after the interpreter. ``{json}`` stands for a file whose content the record of the step gets.
    """

    number: int
    name: str
    limit: float
    commands: tuple[tuple[str, ...], ...]

    @property
    def stem(self) -> str:
        """Return the name of its files."""
        return f"{self.number}-{self.name}"


def steps(options: argparse.Namespace) -> list[Step]:
    """Return all steps, as they would be run with these options.

    The limits are for 16 cores. Together they are nine minutes, where a call has ten.
    """
    work, kit = options.work, options.kit
    one, two = (("-m", PLUGIN, options.runtime, number) for number in ("1", "2"))
    peers = ("--python", options.peers) if options.peers else ()
    saved, cores = ("--mib", "1024", "--gibs", "0"), ("--pairs", "3", "--mib", "512", *peers)
    if options.small:
        saved = ("--mib", "8", "--tensors", "2", "--pairs", "1", "--gibs", "0")
        cores = ("--pairs", "1", "--mib", "16", "--tensors", "32", "--reshards", "3x65536", *peers)
    disk, ram = ("--directory", str(work)), ("--directory", options.ram)
    written = ("--json", "{json}")
    made = [
        Step(1, "install", 50, ((str(HERE / "pack.py"), "install", str(kit), str(work / "site")), ("-c", IMPORTED))),
        Step(2, "compile", 50, (("-c", COMPILED, options.runtime), (*two, "-c", DEVICES))),
        Step(3, "smoke", 60, ((*one, "-m", "tests.device.gpu.smoke", *written),)),
        Step(4, "check-one", 80, ((*one, "-m", CHECK, "--devices", "1", *written),)),
        Step(5, "check-two", 110, ((*two, "-m", CHECK, "--devices", "2", *written),)),
        Step(
            6, "bench-device", 50, tuple((*one, "-m", "benchmarks.device", *saved, *at, *written) for at in (ram, disk))
        ),
        Step(7, "bench-host", 140, (("-m", "benchmarks.cores", *cores, *disk, "--ram", options.ram, *written),)),
    ]
    return [replace(step, limit=step.limit * options.stretch) for step in made]


IMPORTED = "import paddle, paddle_flexckpt; print('paddle', paddle.__version__, paddle_flexckpt.__version__)"
COMPILED = "import sys; from tests.device import plugin; print(plugin.build(sys.argv[1]))"
DEVICES = "import sys, paddle; found = paddle.device.get_available_custom_device(); print(found); sys.exit(not found)"


# -- running -----------------------------------------------------------------------------------------------------------


def run(step: Step, environment: Mapping[str, str], results: Path, work: Path) -> dict[str, Any]:
    """Run the commands of one step; write its log and its JSON, and return what the JSON has."""
    raw, begin = work / f"{step.stem}.raw", time.monotonic()
    record: dict[str, Any] = {"step": step.number, "name": step.name, "limit_s": step.limit, "commands": []}
    with open(raw, "wb") as log:
        for place, words in enumerate(step.commands):
            made = work / f"{step.stem}.{place}.json"
            made.unlink(missing_ok=True)
            command = [sys.executable, *(word.format(json=made) if word == "{json}" else word for word in words)]
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            started = time.monotonic()
            code, in_time = run_within(command, environment, log, begin + step.limit - started)
            told = {"command": command, "code": code, "in_time": in_time, "seconds": time.monotonic() - started}
            record["commands"].append({**told, "found": read_json(made)})
    record["seconds"] = time.monotonic() - begin
    record["ok"] = all(each["code"] == 0 for each in record["commands"])
    (results / f"{step.stem}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = raw.read_text(encoding="utf-8", errors="replace").splitlines()
    (results / f"{step.stem}.log").write_text("".join(f"{line}\n" for line in cut(lines)), encoding="utf-8")
    return record


def run_within(command: Sequence[str], environment: Mapping[str, str], log: Any, seconds: float) -> tuple[int, bool]:
    """Run a command for so many seconds at most; return its exit status, and whether it ended in time.

    What is interrupted gets a moment to say where it is. Then all processes of its group are killed.
    """
    if seconds <= GRACE:
        log.write(b"[kit] not begun: the time of this step is used up\n")
        return 1, False
    process = subprocess.Popen(
        command, env=dict(environment), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(seconds - GRACE), True
    except subprocess.TimeoutExpired:
        log.write(f"[kit] not done after {seconds - GRACE:.0f} s: interrupted\n".encode())
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE * 0.8)
        return process.poll() or 1, False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_json(path: Path) -> Any:
    """Return what a command has written; None if it has written nothing, or half of it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def cut(lines: Sequence[str]) -> Iterator[str]:
    """Yield the first and the last lines of a log, 200 at most, none of them long."""
    if len(lines) > LINES:
        last = LINES - FIRST_LINES - 1
        left_out = f"[kit] {len(lines) - FIRST_LINES - last} lines are left out here"
        lines = [*lines[:FIRST_LINES], left_out, *lines[-last:]]
    for line in lines:
        yield line if len(line) <= WIDTH else f"{line[:WIDTH]} ..."


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of all commands: nothing that this shell says of Paddle, devices or pip."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PADDLE_", "REHEARSAL_", "FLAGS_", "PIP_")) and name != "CUSTOM_DEVICE_ROOT"
    }
    path = os.pathsep.join([str(options.work / "site"), str(ROOT)])
    cache = {"XDG_CACHE_HOME": str(options.work / "cache"), "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **cache, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def machine() -> dict[str, Any]:
    """Return what a reader of the results has to know of the machine; what there is no command for is empty."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"]
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0].split()[1]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "memory GiB": round(int(memory) / (1 << 20), 1),
        "gpu": said([*query, "--format=csv,noheader"]),
        "nvcc": said(["nvcc", "--version"])[-1:],
        "compiler": said(["g++", "--version"])[:1],
        "disks": said(["df", "-h", "/", "/dev/shm"]),
    }


def said(command: list[str]) -> list[str]:
    """Return the lines that a command prints; none if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


# -- telling -----------------------------------------------------------------------------------------------------------


def plan(chosen: Sequence[Step], kit: Path) -> list[str]:
    """Return what would be run, with limits, and the sizes of the kit's parts."""
    lines = []
    for step in chosen:
        lines.append(f"{step.number}  {step.name:12s} {step.limit:4.0f} s at most")
        lines += [f"   python {' '.join(map(shown, words))}" for words in step.commands]
    lines.append(f"all: {sum(step.limit for step in chosen):.0f} s at most")
    try:
        return [*lines, *pack.sizes(kit)]
    except pack.KitError as error:
        return [*lines, f"no kit: {error}"]


def shown(word: str) -> str:
    """Return a word as a reader may want it: a path below the repository without what is above."""
    return repr(word) if " " in word else word.replace(f"{ROOT}/", "")


def summary(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step that was run."""
    lines = []
    for record in records:
        late = not all(each["in_time"] for each in record["commands"])
        verdict = "ok" if record["ok"] else "NOT DONE IN TIME" if late else "FAILED"
        lines.append(
            f"{record['step']}  {record['name']:12s} {record['seconds']:6.1f} s of {record['limit_s']:.0f}  {verdict}"
        )
    return lines


def hand_over(results: Path, out: Path) -> None:
    """Put an archive of all results, and the summary, where the machine gives files back from."""
    with tarfile.open(out / "results.tar.gz.new", "w:gz") as tar:
        for path in sorted(results.iterdir()):
            if path.suffix in (".json", ".log"):
                tar.add(path, path.name)
    os.replace(out / "results.tar.gz.new", out / "results.tar.gz")
    shutil.copy(results / "summary.json", out / "summary.json")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    wanted = [step for step in steps(options) if options.steps == ["all"] or str(step.number) in options.steps]
    if options.dry_run:
        print("\n".join(plan(wanted, options.kit)))
        return 0
    results = options.results
    for folder in (results, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    environment, records = environment_of(options), []
    told = {"runtime": options.runtime, "small": options.small, "stretch": options.stretch, "machine": machine()}
    for step in wanted:
        print(f"[kit] step {step.number}, {step.name}: {step.limit:.0f} s at most", flush=True)
        records.append(run(step, environment, results, options.work))
        print(summary(records)[-1], flush=True)
        brief = [{name: value for name, value in record.items() if name != "commands"} for record in records]
        (results / "summary.json").write_text(json.dumps({**told, "steps": brief}, indent=1) + "\n", encoding="utf-8")
        if options.out is not None:
            hand_over(results, options.out)
    print("\n".join([f"[kit] {options.runtime} runtime; results in {results}", *summary(records)]))
    return 0 if all(record["ok"] for record in records) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is not given follows from the machine."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="+", metavar="STEP", help="numbers from 1 to 7, or all")
    parser.add_argument("--runtime", choices=("cuda", "simulated", "fake"), default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="benchmarks of a few MiB, to see that they run")
    parser.add_argument("--stretch", type=float, default=1, help="multiply all limits, where there are few cores")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be run")
    parser.add_argument("--kit", type=Path, default=ROOT / "gpu-kit", help="where the parts are (default gpu-kit)")
    parser.add_argument("--work", type=Path, help="where to install and to write (default work/ in the kit)")
    parser.add_argument("--results", type=Path, help="where JSON and logs go")
    parser.add_argument("--ram", default="/dev/shm", help="a folder on a RAM disk")
    parser.add_argument(
        "--peers", help="interpreter of an environment with torch, for DCP (default: this one, if it has)"
    )
    options = parser.parse_args(argv)
    numbers = {str(step.number) for step in steps(argparse.Namespace(**{**vars(options), "work": Path()}))}
    unknown = set(options.steps) - numbers - {"all"}
    if unknown or ("all" in options.steps and len(options.steps) > 1):
        parser.error(f"STEP is all, or numbers from {min(numbers)} to {max(numbers)}; got {' '.join(options.steps)}")
    options.kit = options.kit.absolute()
    options.work = (options.work or options.kit / "work").absolute()
    options.out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    options.results = (
        options.results or (HERE / "results" if options.out is None else options.work / "results")
    ).absolute()
    if options.peers is None and has_torch():
        options.peers = sys.executable
    return options


def has_torch() -> bool:
    """Return whether this interpreter has torch, without importing it."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


if __name__ == "__main__":
    sys.exit(main())
