"""flexckpt doctor and patch: check the installed packages, and patch them.

Tested in tests/cli/test_overview.py and tests/patching/test_patching.py.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from paddle_flexckpt._version import __version__
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.cli.common import Outcome, table
from paddle_flexckpt.cli.outputs import DoctorReport, Package, PatchState
from paddle_flexckpt.patching import Patch, PatchError, check_patch, find_root, plan_change, read_patches, write_files

#: Distribution, versions that the tests run with (as a pattern), and purpose.
_PACKAGES = (
    ("paddlepaddle", r"3\.[0-3]\.", "saves and loads of live states"),
    ("paddlepaddle-gpu", r"3\.[0-3]\.", "the same on GPUs"),
    ("numpy", r"1\.26\.|2\.", "everything"),
    ("safetensors", r"0\.([7-9]|\d\d)|[1-9]", "everything"),
    ("xxhash", r"3\.([5-9]|\d\d)|[4-9]", "checksums"),
    ("ml_dtypes", r"0\.([5-9]|\d\d)|[1-9]", "bfloat16 and float8"),
    ("fsspec", r"2024\.1[012]|202[5-9]|20[3-9]", "object stores"),
    ("s3fs", r"2024\.1[012]|202[5-9]|20[3-9]", "S3"),
    ("pyyaml", r"[6-9]", "AOA statements in YAML"),
    ("paddlenlp", r"3\.0\.0b4", "PaddleNLP's trainer"),
    ("paddleformers", r"1\.2\.0", "PaddleFormers' trainer"),
)
_REQUIRED = ("numpy", "safetensors", "xxhash", "ml_dtypes")
_SHARED_MEMORY = "/dev/shm"
_TITLES = {"paddle": "Paddle", "paddlenlp": "PaddleNLP", "paddleformers": "PaddleFormers"}


def add_command(commands: Any) -> None:
    """Add the parsers of the commands."""
    doctor = commands.add_parser(
        "doctor",
        help="list the installed packages, whether they are supported, and the optional patches for their defects",
        description="Lists the versions of Python and of the packages that matter, and the patches that fit what is "
        "installed. The exit status is 1 if something needed is missing, or a version is not supported.",
        epilog="example: flexckpt doctor",
    )
    doctor.add_argument("--json", action="store_true", help="print all as JSON")
    doctor.set_defaults(run=_doctor, errors=(PatchError,))
    _add_patch(commands)


def _doctor(options: argparse.Namespace) -> Outcome:
    """Return the installed packages and problems with them; code 1 if something is missing or not supported."""
    packages: list[Package] = []
    problems: list[str] = []
    for name, pattern, purpose in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        supported = bool(version) and re.match(pattern, version) is not None
        packages.append(Package(name, version, supported, purpose))
        if version and not supported:
            problems.append(f"{name} {version} is not a version that the tests run with")
        if not version and name in _REQUIRED:
            problems.append(f"{name} is missing. Remedy (FC901): pip install {name}")
    patches = _patches()
    python = ".".join(map(str, sys.version_info[:3]))
    free = _free_shared_memory()
    if options.json:
        report = DoctorReport(__version__, python, packages, patches, free, problems)
        return Outcome(report.to_json(), int(bool(problems)))
    lines = [("package", "version", "supported", "for"), ("flexckpt", __version__, "", ""), ("python", python, "", "")]
    for each in packages:
        verdict = "-" if not each.version else "yes" if each.supported else "no"
        lines.append((each.package, each.version or "-", verdict, each.purpose))
    text = table(lines)
    text.append(f"shared memory, for asynchronous saves and reshards: {_free(free)}")
    text += _defects(patches)
    text += [f"problem: {problem}" for problem in problems] or ["no problems: this installation is as it should be"]
    return Outcome("\n".join(text), int(bool(problems)))


def _defects(patches: Sequence[PatchState]) -> list[str]:
    """Return lines about the defects of other packages, and the patches that mend them."""
    lines = []
    for owner in dict.fromkeys(each.owner for each in patches):
        own = [each for each in patches if each.owner == owner]
        fitting = [each for each in own if each.status == "fits"]
        if fitting:
            lines.append(
                f"defects of {owner} itself, which optional patches mend; flexckpt works without them, programs that "
                f"call {owner.split()[0]}'s own functions may need them:"
            )
            lines += [f"  {line}" for line in table([(each.name, each.mends) for each in fitting])]
            lines.append(f"  to apply some: flexckpt patch --apply {fitting[0].name} ...; to undo it: --revert")
        lines += [f"patched: {each.mends} ({each.name})" for each in own if each.status != "fits"]
    return lines


def _patches() -> list[PatchState]:
    """Return the patches that are applied to the installed packages, or could be."""
    every = list(read_patches().values())
    roots = {package: find_root(package) for package in {patch.package for patch in every}}
    found = [
        PatchState(each.name, check_patch(roots[each.package], every, each)[0], each.title, _owner(each))
        for each in every
    ]
    return [each for each in found if each.status in ("fits", "applied")]


def _owner(patch: Patch) -> str:
    """Return the package that a patch is for, with its releases."""
    return f"{_TITLES.get(patch.package, patch.package)} {', '.join(patch.versions)}"


def _free_shared_memory() -> int | None:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return None


def _free(count: int | None) -> str:
    return f"there is no {_SHARED_MEMORY}" if count is None else f"{format_bytes(count)} free"


def _add_patch(commands: Any) -> None:
    parser = commands.add_parser(
        "patch",
        help="patch an installed PaddlePaddle, PaddleNLP or PaddleFormers",
        description="Lists, checks, applies and reverts patches for installed packages. A patch fits exactly the "
        "released files from which it was made; reverting restores them to the byte.",
        epilog="example: flexckpt patch --check; flexckpt patch --apply paddle-3.3.1-nested-state",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="list the patches, and the versions that they are for")
    what.add_argument(
        "--check",
        nargs="*",
        metavar="NAME",
        help="check whether these patches, or all, are applied, fit, or do not fit",
    )
    what.add_argument("--apply", nargs="+", metavar="NAME", help="apply these patches, all or none")
    what.add_argument("--revert", nargs="+", metavar="NAME", help="revert these patches")
    parser.add_argument(
        "--package-dir",
        type=Path,
        metavar="DIR",
        help="the directory that holds the package, such as site-packages; by default where Python would find it",
    )
    parser.set_defaults(run=_patch, errors=(PatchError,))


def _patch(options: argparse.Namespace) -> Outcome:
    """Return what was done. The code is 1 if ``--check NAME`` finds a patch that is neither applied nor fits."""
    patches = read_patches()
    names = list(dict.fromkeys(options.check or options.apply or options.revert or patches))
    unknown = [name for name in names if name not in patches]
    if unknown:
        raise PatchError(
            f"there is no patch {', '.join(map(repr, unknown))}; `flexckpt patch --list` prints those there are"
        )
    chosen = [patches[name] for name in names]
    if options.list:
        width = max(map(len, names), default=0)
        lines = [f"{each.name:{width}}  {each.package} {', '.join(each.versions)}: {each.title}" for each in chosen]
        return Outcome("\n".join(lines))
    packages = dict.fromkeys(patch.package for patch in chosen)
    roots = {package: find_root(package, options.package_dir) for package in packages}
    every = list(patches.values())
    if options.check is not None:
        results = [(patch, *check_patch(roots[patch.package], every, patch)) for patch in chosen]
        # Without names, reasons are left out: most patches are for other versions.
        lines = [
            f"{patch.name}: {status}" + (f"\n  {reason}" if reason and options.check else "")
            for patch, status, reason in results
        ]
        bad = options.check and any(status not in ("applied", "fits") for _, status, _ in results)
        return Outcome("\n".join(lines), int(bool(bad)))
    contents: dict[Path, bytes] = {}
    for package, root in roots.items():
        if root is None:
            raise PatchError(
                f"package {package!r} is not installed" + f" in {options.package_dir}" * bool(options.package_dir)
            )
        mine = [patch for patch in chosen if patch.package == package]
        contents.update(plan_change(root, every, mine, reverse=bool(options.revert)))
    write_files(contents)
    changed = [f"  {file}" for file in contents] or ["  no file had to be changed"]
    return Outcome("\n".join([f"{'applied' if options.apply else 'reverted'} {', '.join(names)}", *changed]))
