"""Run all benchmarks, one after the other, and make the table and the plots of what they found.

Each is a process of its own: one that fails or takes too long loses nothing of what the others found.

    python -m benchmarks.run                          # all, into bench-output/
    python -m benchmarks.run compare async_save       # some; the table has what there is of earlier runs too
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
SECONDS, SECONDS_TO_END = 1500, 60
#: What a benchmark is called with, besides ``--json``; in this order.
PARTS: dict[str, tuple[str, ...]] = {
    "compare": (),
    "async_save": (),
    "aoa_compile": (),
    "plan_scale": (),
    "spread_scale": (),
    "rehearsals": (),
    "scaling": (),
    "describe": (),
    "kept_plans": (),
    "object_store": (),
    "device": (),
    "reshard": (),
    "cores": (),
}
#: Only where they are asked for: they need a core for each of 8 ranks.
ASKED_FOR = ("cores",)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"which: {', '.join(PARTS)}; all but the last by default"
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where results go")
    parser.add_argument("--peers", type=Path, help="interpreter of the environment that the peers are installed in")
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = options.parts or [part for part in PARTS if part not in ASKED_FOR]
    failed = [part for part in chosen if not run(part, options.output.resolve(), options.peers)]
    report.main([str(options.output)])
    if failed:
        print(f"[bench] failed: {', '.join(failed)}; see {options.output}/*.log", file=sys.stderr)
    return 1 if failed else 0


def run(part: str, output: Path, peers: Path | None) -> bool:
    """Run one benchmark, its output going to a log; return whether it went well."""
    words = [sys.executable, "-m", f"benchmarks.{part}", *PARTS[part], "--json", str(output / f"{part}.json")]
    words += ["--directory", str(output)]
    if part in ("compare", "cores") and peers is not None:
        words += ["--python", str(peers.absolute())]
    begin = time.monotonic()
    print(f"[bench] {part}", end="", flush=True)
    (output / f"{part}.json").unlink(missing_ok=True)
    with open(output / f"{part}.log", "wb") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            # It removes what it wrote, and ends what it started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
        finally:
            process.kill()
            process.wait()
    went_well = process.returncode == 0
    print(f": {'done' if went_well else 'FAILED'} after {time.monotonic() - begin:.0f} s", flush=True)
    return went_well


if __name__ == "__main__":
    raise SystemExit(main())
