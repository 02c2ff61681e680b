"""flexckpt patch: patches for installed packages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_flexckpt.cli.outcome import Outcome
from paddle_flexckpt.patching import (
    Finding,
    Package,
    Patch,
    PatchError,
    applied_patches,
    apply_patches,
    check_patches,
    locate_package,
    read_patches,
    revert_patches,
)


def add_command(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "patch",
        help="mend an installed PaddlePaddle, PaddleNLP or PaddleFormers",
        description="Lists patches for installed packages, says whether they fit, puts them in and takes them out. "
        "A patch fits exactly the released files that it was made from; reverting restores them to the byte.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the patches that there are, and the versions they are for")
    what.add_argument(
        "--check", nargs="*", metavar="NAME", help="whether these patches, or all, are in, fit, or do not"
    )
    what.add_argument("--apply", nargs="+", metavar="NAME", help="put patches in, all of these or none")
    what.add_argument("--revert", nargs="+", metavar="NAME", help="take patches out")
    parser.add_argument(
        "--package-dir",
        type=Path,
        metavar="DIR",
        help="the directory that holds the package, such as site-packages; by default where Python would find it",
    )
    parser.add_argument("--json", action="store_true", help="print --list and --check as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Outcome:
    """What the chosen action prints; code 1 if ``--check NAME`` finds a patch that is neither in nor fits."""
    patches = read_patches()
    if options.list:
        return _list(list(patches.values()), options.json)
    if options.check is not None:
        return _check(_chosen(patches, options.check or list(patches)), bool(options.check), options)
    if options.revert:
        patches = {**_applied(list(patches.values()), options.package_dir), **patches}
    chosen = _chosen(patches, options.apply or options.revert)
    lines = []
    for package, mine in _by_package(chosen, options.package_dir):
        if package is None:
            raise PatchError(f"package {mine[0].package!r} is not installed{_where(options.package_dir)}")
        lines.append(_change(package, mine, bool(options.apply)))
    return Outcome("\n".join(lines))


def _applied(patches: Sequence[Patch], directory: Path | None) -> dict[str, Patch]:
    """The patches that are in: another release of this library may have put in some that this one does not have."""
    packages = [package for package, _ in _by_package(patches, directory) if package is not None]
    return {patch.name: patch for package in packages for patch in applied_patches(package)}


def _change(package: Package, patches: Sequence[Patch], apply: bool) -> str:
    names = [patch.name for patch in patches]
    files = apply_patches(package, patches) if apply else revert_patches(package, names)
    done = "applied" if apply else "reverted"
    changed = [f"  {package.root / path}" for path in files] or ["  no file had to be changed"]
    return "\n".join(
        [f"{done} {', '.join(names)} ({package.name} {package.version or 'of unknown version'})", *changed]
    )


def _list(patches: Sequence[Patch], as_json: bool) -> Outcome:
    if as_json:
        return Outcome(json.dumps([patch.as_dict() for patch in patches], indent=2))
    width = max((len(patch.name) for patch in patches), default=0)
    return Outcome(
        "\n".join(
            f"{patch.name:{width}}  {patch.package} {', '.join(patch.versions)}: {patch.title}" for patch in patches
        )
    )


def _check(patches: Sequence[Patch], by_name: bool, options: argparse.Namespace) -> Outcome:
    findings = [
        finding
        for package, mine in _by_package(patches, options.package_dir)
        for finding in check_patches(package, mine)
    ]
    bad = any(not finding.ok if by_name else finding.status in ("interrupted", "changed") for finding in findings)
    if options.json:
        return Outcome(json.dumps([_as_dict(finding) for finding in findings], indent=2), int(bad))
    lines: list[str] = []
    for finding in findings:
        package = finding.package
        where = f" ({package.name} {package.version or 'of unknown version'} in {package.root})" if package else ""
        lines.append(f"{finding.patch.name}: {finding.status}{where}")
        # Without names most patches are for other versions, and how their files differ is nobody's question.
        if by_name or finding.status in ("interrupted", "changed"):
            lines += [f"  {detail}" for detail in finding.details]
    return Outcome("\n".join(lines), int(bad))


def _as_dict(finding: Finding) -> dict[str, Any]:
    package = finding.package
    return {
        "name": finding.patch.name,
        "status": finding.status,
        "package": finding.patch.package,
        "version": package.version if package else None,
        "directory": str(package.root) if package else None,
        "details": list(finding.details),
    }


def _chosen(patches: dict[str, Patch], names: Sequence[str]) -> list[Patch]:
    unknown = [name for name in names if name not in patches]
    if unknown:
        raise PatchError(
            f"there is no patch {', '.join(map(repr, unknown))}; `flexckpt patch --list` prints those there are"
        )
    return [patches[name] for name in dict.fromkeys(names)]


def _by_package(patches: Sequence[Patch], directory: Path | None) -> list[tuple[Package | None, list[Patch]]]:
    groups: dict[str, list[Patch]] = {}
    for patch in patches:
        groups.setdefault(patch.package, []).append(patch)
    return [(locate_package(name, mine[0].distributions, directory), mine) for name, mine in groups.items()]


def _where(directory: Path | None) -> str:
    return f" in {directory}" if directory else ""
