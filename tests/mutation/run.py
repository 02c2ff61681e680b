"""Run mutants of a room against its tests: ``python -m tests.mutation.run planning engine``.

mutmut makes the mutants and runs them. This script chooses the tests of each room, leaves out mutants that change prose
alone, and compares the survivors with ``explained.txt``. It fails if a survivor is not explained there, or if an
explanation fits no mutant that survives. Mutants of properties and of module constants are not made.

With ``--modules`` it changes some modules of a room, and runs the tests of these alone: minutes instead of hours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from difflib import ndiff
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import change_cwd
from mutmut.utils.format_utils import get_mutant_name

from tests.test_mirror import has_file_of_its_name, named_tests

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).with_name("explained.txt")
TESTS = {
    "algebra": ["tests/algebra"],
    "catalog": ["tests/catalog"],
    "planning": ["tests/planning"],
    "transfer": [
        "tests/transfer",
        "tests/loading/test_policies.py",
        "tests/memory/test_shared_memory.py",
        "tests/loading/test_aoa_tiles.py",
        "tests/loading/test_masters_and_fused.py",
        "tests/loading/test_name_compatibility.py",
    ],
    "tools": [
        "tests/tools",
        "tests/native/test_verify.py",
        "--deselect=tests/native/test_verify.py::test_every_one_of_3000_random_changes_is_found_and_located",
        "--deselect=tests/native/test_verify.py::test_truncated_files_are_found_and_what_is_left_is_verified",
        "--deselect=tests/native/test_verify.py::test_all_of_many_damages_are_listed",
        "tests/native/test_repair.py",
        "--deselect=tests/native/test_repair.py::test_no_change_of_a_header_makes_another_checkpoint",
    ],
    "aoa": ["tests/aoa"],
}
# A mutant that allocates without end must not take the machine's memory.
MEMORY = 8 << 30
CONFIG = """[mutmut]
source_paths=
    paddle_flexckpt
only_mutate=
{mutated}
also_copy=
    benchmarks
    docs
pytest_add_cli_args_test_selection=
{tests}
pytest_add_cli_args=
    -p
    no:cacheprovider
    -p
    tests.mutation.fastest_first
    -m
    not slow
timeout_multiplier=2
timeout_constant=15
use_git_change_detection=false
process_isolation=forkserver
"""
KILLED = ("killed", "timeout", "segfault")
Change = tuple[str, str]  # function, and "line => changed line"


def tests_of(room: str, modules: Sequence[str]) -> list[str]:
    """The tests of a room, or of some of its modules: those in the room, else those that its text names."""
    if not modules:
        return TESTS[room]
    found: list[str] = []
    for path in (f"{room}/{module}.py" for module in modules):
        own = [f"tests/{room}/test_{Path(path).name}"] if has_file_of_its_name(path) else []
        own += [named for named in named_tests(path) if named.startswith(f"tests/{room}/")]
        found += own or named_tests(path)
    return list(dict.fromkeys(found))


def prepare(room: str, directory: Path, modules: Sequence[str] = ()) -> dict[str, Change]:
    """Make an empty directory to run mutmut in, and return what each mutant of a room, or of some modules, changes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mutated = [f"paddle_flexckpt/{room}/{module}.py" for module in modules] or [f"paddle_flexckpt/{room}/*"]
    lines = {"mutated": mutated, "tests": tests_of(room, modules)}
    (directory / "setup.cfg").write_text(
        CONFIG.format(**{name: "\n".join(f"    {each}" for each in those) for name, those in lines.items()})
    )
    # A copy, so that the sources may change meanwhile.
    for name in ("paddle_flexckpt", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", directory)
    changes = {}
    with change_cwd(directory):
        for path in sorted(Path("paddle_flexckpt", room).rglob("*.py")):
            if modules and path.stem not in modules:
                continue
            made = mutate_file_contents(str(path), path.read_text())
            code = made.code.split("\n")
            body = {name: code[span.start - 1 : span.end] for name, span in made.line_span_by_function_name.items()}
            for name in made.mutant_names:
                function = name.rpartition("__mutmut_")[0]
                shown = f"{path.stem}.{re.sub('^x_?ǁ?', '', function).replace('ǁ', '.')}"
                changes[get_mutant_name(path, name)] = shown, change(body[f"{function}__mutmut_orig"], body[name])
    return changes


def change(before: Sequence[str], after: Sequence[str]) -> str:
    """The changed lines of a function, before and after."""
    lines = [line for line in ndiff(before, after) if not re.match(r"[-+] *def \w+__mutmut_", line)]
    sides = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return " => ".join(side or "(nothing)" for side in sides)


def is_prose(changed: str) -> bool:
    """Whether nothing but the wording of a text changes: a literal that has a blank, in other case or with XX."""
    before, after = changed.split(" => ", 1)
    if before.casefold() == after.replace("XX", "").casefold():
        pairs = zip(re.findall(r"\"[^\"]*\"|'[^']*'", before), re.findall(r"\"[^\"]*\"|'[^']*'", after))
        return all(" " in old.strip("\"' ") for old, new in pairs if old != new)
    return False


def explanations(room: str, modules: Sequence[str] = ()) -> dict[Change, str]:
    """The part of ``explained.txt`` on a room, or on some of its modules: reasons by change."""
    found: dict[Change, str] = {}
    here = reason = function = ""
    for line in EXPLAINED.read_text().splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        elif line and not line.startswith(("#", " ")):
            function, _, reason = line.partition(": ")
        elif line.strip() and here == room and not line.startswith("#"):
            found[function, line.strip()] = reason
    return {each: why for each, why in found.items() if not modules or each[0].partition(".")[0] in modules}


def run(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Run mutants one after the other; return what became of each."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutation", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    begin = "import sys; from mutmut.__main__ import cli; sys.exit(cli())"
    command = [sys.executable, "-c", begin, "run", "--max-children", "1", *names]
    limit = (MEMORY, MEMORY)
    if not names:
        return {}
    with (directory / "log").open("w") as log:
        subprocess.run(
            command, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        )  # fmt: skip
    found = {}
    with change_cwd(directory):
        for path in Path("paddle_flexckpt").rglob("*.py"):
            data = SourceFileMutationData(path=path)
            data.load()
            found.update({name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()})
    missing = [name for name in names if found.get(name, "not checked") == "not checked"]
    if missing:
        raise SystemExit(f"{len(missing)} mutants did not run, such as {missing[0]}; see {directory / 'log'}")
    return {name: found[name] for name in names}


def examine(room: str, arguments: argparse.Namespace) -> bool:
    """Run a room's mutants and print the result. True if every survivor is explained, and each explanation fits."""
    begin = time.perf_counter()
    directory, noted = arguments.output / room, arguments.output / f"{room}.json"
    before = {(f, text): end for f, text, end in json.loads(noted.read_text())} if arguments.again else {}
    changes = prepare(room, directory, arguments.modules)
    chosen = [name for name, (function, _) in changes.items() if re.search(arguments.only, function)]
    names = [name for name in chosen if not is_prose(changes[name][1])]
    prose = len(chosen) - len(names)
    if 0 < arguments.sample < len(names):
        names = random.Random(arguments.seed).sample(names, arguments.sample)
    known = explanations(room, arguments.modules)
    results = {
        name: before[changes[name]]
        for name in names
        if before.get(changes[name]) in KILLED or (changes[name] in before and changes[name] in known)
    }
    results.update(run(directory, [name for name in names if name not in results]))
    # Where two mutants of a function change equal lines, one that survives is noted.
    ends = {changes[name]: end for name, end in sorted(results.items(), key=lambda item: item[1] not in KILLED)}
    noted.write_text(json.dumps([[function, text, end] for (function, text), end in ends.items()], indent=0))
    killed = [name for name in names if results[name] in KILLED]
    survivors = {name: changes[name] for name in names if name not in set(killed)}
    explained = [name for name, changed in survivors.items() if changed in known]
    for name, (function, changed) in survivors.items():
        if name not in explained:
            print(f"{function}: {results[name]}\n    {changed}")
    # Two mutants of a function may change equal lines: the explanation fits if one of them survives.
    stale = set(known) - set(survivors.values())
    stale &= {changes[name] for name in names} | (set(known) - set(changes.values()))
    for function, changed in sorted(stale):
        print(f"stale explanation: {function}\n    {changed}")
    count, left = len(names), len(survivors) - len(explained)
    made, ended = (Counter(changes[name][0].partition(".")[0] for name in those) for those in (names, killed))
    print(", ".join(f"{module} {ended[module]} of {number}" for module, number in sorted(made.items())))
    print(
        f"{room}: {count} mutants, {len(killed)} killed ({dict(Counter(results[name] for name in killed))}), "
        f"{len(survivors)} survived, {len(explained)} of these explained; score {len(killed) / max(count, 1):.1%}, "
        f"{len(killed) / max(count - len(explained), 1):.1%} without those explained; {prose} more change prose alone; "
        f"{time.perf_counter() - begin:.0f} s",
        flush=True,
    )
    return not left and not stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", default=list(TESTS), help=f"some of {', '.join(TESTS)}; all by default")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants of each room; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--modules", nargs="+", default=[], help="of the room, by name; all by default")
    parser.add_argument("--only", default="", help="pattern of the functions to change, as module.Class.function")
    parser.add_argument("--again", action="store_true", help="only those that survived last time, unexplained")
    parser.add_argument("--output", type=Path, default=ROOT / "mutation-output", help="where mutants are written")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    return 0 if all([examine(room, arguments) for room in arguments.rooms]) else 1


if __name__ == "__main__":
    sys.exit(main())
