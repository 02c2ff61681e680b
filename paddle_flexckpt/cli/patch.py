"""flexckpt patch: patches for installed packages. Tested in tests/patching/test_patching.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paddle_flexckpt.cli.common import Outcome
from paddle_flexckpt.patching import PatchError, check_patch, find_root, plan_change, read_patches, write_files


def add_command(commands: Any) -> None:
    """Add the command's parser."""
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
    parser.set_defaults(run=run, errors=(PatchError,))


def run(options: argparse.Namespace) -> Outcome:
    """Run the command. The code is 1 if ``--check NAME`` finds a patch that is neither applied nor fits."""
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
        # Without names most patches are for other versions: how their files differ is of no interest.
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
