"""How long each extra takes to install, and how large it is: one environment made from nothing for each.

Nothing comes from pip's cache, so the minutes include the download and the compilation to bytecode. The sizes are
those of the files in ``site-packages``, with the package itself, and without pip.

    python -m benchmarks.extras                    # all of them: some ten minutes, a few GiB of downloads
    python -m benchmarks.extras cli yaml           # these alone
    python -m benchmarks.extras --json extras.json
"""

from __future__ import annotations

import argparse
import email
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Extras that the documents install together with another one.
WITH = {"paddlenlp": "cpu", "paddleformers": "cpu", "mutation": "cpu,test", "test": "cpu"}
#: Paddle publishes these in an index of its own, one for each version of CUDA.
ELSEWHERE = frozenset({"gpu"})
_PIP = ("-qq", "--disable-pip-version-check", "--no-cache-dir")


@dataclass(frozen=True)
class Measured:
    """An installation.

    Attributes:
        extras: As they stand between brackets, ``""`` for none.
        packages: Number of distributions, this package included.
        mebibytes: Size of all that was installed.
        minutes: Time that pip took.
    """

    extras: str
    packages: int
    mebibytes: float
    minutes: float

    @property
    def line(self) -> str:
        """Its row of the table."""
        name = f"`{self.extras}`" if self.extras else "none"
        return f"| {name} | {self.packages} | {_rounded(self.mebibytes)} | {max(self.minutes, 0.1):.1f} |"


def _rounded(mebibytes: float) -> str:
    """Return a size to two digits, with separators: another day's packages have other sizes."""
    step = 10 ** max(len(str(int(mebibytes))) - 2, 0)
    return f"{round(mebibytes / step) * step:,}"


def combination(extra: str) -> str:
    """Return an extra with those that it is installed with."""
    return f"{WITH[extra]},{extra}" if extra in WITH else extra


def extras_of(wheel: Path) -> list[str]:
    """Return the extras that a wheel's metadata declares."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    return metadata.get_all("Provides-Extra", [])


def installed(site: Path) -> tuple[int, int]:
    """Return the number of distributions in a directory of packages, and the bytes of all files but pip's."""
    distributions = [path for path in site.glob("*.dist-info") if not path.name.startswith("pip-")]
    files = (path for path in site.rglob("*") if path.is_file() and not path.is_symlink())
    size = sum(path.stat().st_size for path in files if not re.match(r"pip(-|$)", path.relative_to(site).parts[0]))
    return len(distributions), size


def build(scratch: Path, python: str) -> Path:
    """Make the wheel from a copy: what an earlier build left in a checkout would be in it."""
    source = scratch / "source"
    for name in ("paddle_flexckpt", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [python, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps", "-w", scratch, source]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    return wheel


def measure(wheel: Path, extras: str, python: str) -> Measured:
    """Install a wheel with extras into an environment of its own, and remove it again."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([python, "-m", "venv", scratch], check=True)
        interpreter = Path(scratch, "bin", "python")
        (site,) = Path(scratch, "lib").glob("python*/site-packages")
        packages_before, size_before = installed(site)
        requirement = f"{wheel}[{extras}]" if extras else str(wheel)
        began = time.monotonic()
        subprocess.run([interpreter, "-m", "pip", "install", *_PIP, requirement], check=True)
        minutes = (time.monotonic() - began) / 60
        packages, size = installed(site)
    return Measured(extras, packages - packages_before, (size - size_before) / 2**20, minutes)


def table(rows: Iterable[Measured], left_out: Sequence[str] = ()) -> str:
    """Return rows as a table of a document."""
    lines = ["| extras | packages | MiB | minutes |", "|---|---|---|---|", *(row.line for row in rows)]
    return "\n".join(lines + [f"| `{extra}` | not in the default index | | |" for extra in left_out])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table as it goes, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="which: all, and none, if none is named")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch), options.python)
        known = extras_of(wheel)
        unknown = sorted(set(options.extras) - set(known))
        if unknown:
            parser.error(f"no extra of setup.py: {', '.join(unknown)}; there are {', '.join(known)}")
        wanted = options.extras or known
        rows = []
        named = [combination(extra) for extra in wanted if extra not in ELSEWHERE]
        for extras in named if options.extras else ["", *named]:
            rows.append(measure(wheel, extras, options.python))
            print(rows[-1].line, file=sys.stderr, flush=True)
    print(table(rows, [extra for extra in wanted if extra in ELSEWHERE]))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
