"""Records of campaigns: ``python -m tests.campaigns`` prints a table of those in ``tests/campaigns.json``.

A campaign with ``--record`` adds a record, read from what it has printed. So a record can be added later, too::

    python -m tests.campaigns --add "python -m tests.simulation.run --seeds 1000" --commit 5ce940d3 < OUTPUT
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
_COLUMNS = ("commit", "first", "runs", "days", "many_faults", "violations", "processor_seconds")
_MODES = {"--neighbours", "--store", "--left-out"}
_SIMULATION = {
    "runs": r"^(\d+) runs, \d+ simulated days$",
    "days": r"^\d+ runs, (\d+) simulated days$",
    "many_faults": r"^faults that struck: .* runs with 5 kinds or more: (\d+)$",
    "violations": r"^violations: (\d+)$",
}
_MISTAKE = r"^\| `(\S+)` \| .* \| \w+ \| (\d+) \| (.*) \|$"
_KILLS = r'^ "(?:.*: )?(old|new|not struck|violations)": (\d+),?$'
# A file system's recordings, writes, flushes, states, prefixes, violations and seconds.
_FILE_SYSTEM = r"^\S.*?" + r" +([\d,]+)" * 7 + "$"


def read_totals(output: str) -> dict[str, Any]:
    """Return the fields of a record from what a campaign has printed; none if it has printed no totals."""

    def rows(pattern: str) -> list[Any]:
        return re.findall(pattern, output, re.M)

    if mistakes := rows(_MISTAKE):
        return {"mistakes": {name: [int(seeds), invariant] for name, seeds, invariant in mistakes}}
    if kills := [(end, int(count)) for end, count in rows(_KILLS)]:
        violations = sum(count for end, count in kills if end == "violations")
        return {"runs": sum(count for _, count in kills), "violations": violations}
    if systems := [[int(number.replace(",", "")) for number in row] for row in rows(_FILE_SYSTEM)]:
        return {"runs": sum(row[3] for row in systems), "violations": sum(row[5] for row in systems)}
    for runs, found in rows(r"^(\d+) seeds; (.*)$"):  # it ends at the first violation
        return {"runs": int(runs), "violations": int(not found.startswith("each manifest had its files"))}
    totals = {name: int(numbers[0]) for name, pattern in _SIMULATION.items() if (numbers := rows(pattern))}
    if each := rows(r"^[\d.]+ hours of processor time \((\d+) ms each\)$"):
        totals["processor_seconds"] = round(totals["runs"] * int(each[0]) / 1000)
    return totals


def current_commit() -> str:
    """Return the commit that is checked out, with a mark if files other than the records differ from it."""
    commands = (["rev-parse", "--short", "HEAD"], ["diff", "HEAD", "--name-only", "--", ":/", f":!{FILE.name}"])
    head, changed = (subprocess.check_output(["git", *each], cwd=FILE.parent, text=True) for each in commands)
    return head.strip() + "+changes" * bool(changed)


def add(command: str, commit: str, output: str, notes: list[str]) -> None:
    """Add the record of a campaign with this output to the file."""
    if not (totals := read_totals(output)):
        sys.exit("no totals of a campaign: nothing is recorded")
    first = int(re.findall(r"--first[ =](\d+)|$", command)[0] or 0)
    record = {"command": command, "commit": commit, "first": first, **totals, "notes": notes}
    lines = map(json.dumps, [*json.loads(FILE.read_text(encoding="utf-8")), record])
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


@contextlib.contextmanager
def recording(module: str, is_wanted: bool) -> Iterator[None]:
    """Add a record, if it is wanted, of the campaign that this process runs within the context."""
    output, stdout, commit = io.StringIO(), sys.stdout, current_commit() if is_wanted else ""

    class Copy(io.TextIOBase):
        def write(self, text: str) -> int:
            print(text, end="", file=stdout, flush=True)
            return output.write(text)

    with contextlib.redirect_stdout(Copy()) if is_wanted else contextlib.nullcontext():
        yield
    if is_wanted:
        arguments = [each for each in sys.argv[1:] if each != "--record"]
        add(shlex.join(["python", "-m", module, *arguments]), commit, output.getvalue(), [])


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as text: by kind of campaign, with sums and notes, and the newest count of each mistake."""
    lines, kinds, mistakes = [], {}, {}
    for record in records:
        words = record["command"].split()
        mistakes.update({name: [record["commit"], *found] for name, found in record.get("mistakes", {}).items()})
        if "mistakes" not in record:
            kinds.setdefault(" ".join([*words[:3], *_MODES.intersection(words)]), []).append(record)
    for kind, those in kinds.items():
        sums = {name: sum(each[name] for each in those) for name in ("runs", "violations")}
        lines.append(f"\n{kind}")
        for record in [dict(zip(_COLUMNS, _COLUMNS)), *those, {"commit": "all", **sums}]:
            lines.append("".join(f"{record.get(name, ''):>18}" for name in _COLUMNS))
            lines += [f"        {note}" for note in record.get("notes", [])]
    lines.append("\nmistake, commit, seeds until it was found, invariant")
    for name, (commit, seeds, invariant) in mistakes.items():
        lines.append(f"{name:<28}{commit:>18}{seeds:>8}  {invariant or 'not found'}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", metavar="COMMAND", help="add a record of this campaign, whose output is on stdin")
    parser.add_argument("--commit", help="of which commit it ran (default: the one that is checked out)")
    parser.add_argument("--note", action="append", default=[], help="a line about what it found")
    options = parser.parse_args()
    if options.add:
        add(options.add, options.commit or current_commit(), sys.stdin.read(), options.note)
    print(table(json.loads(FILE.read_text(encoding="utf-8"))))
