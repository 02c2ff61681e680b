"""Make patches and their index. For the maintainers: nothing of the package needs it.

A patch is ``patches/NAME.patch``: a head of ``Key: text`` lines (a line that begins with a space goes on), an empty
line, and a unified diff against the released files. The index is made from the heads and the released files.

    # from a tree of the released package and an edited copy of it
    python patches/make.py diff NAME --released wheels/paddle-3.3.1 --edited work/paddle-3.3.1 [--head HEAD.txt]

    # from a script of replacements (TOML), for changes that have to be made again for another release
    python patches/make.py edit patches/edits/NAME.toml --released wheels/paddlenlp-3.0.0b4

    # the index alone, after a head was edited; and whether all is as it would be made
    python patches/make.py index --released wheels/*
    python patches/make.py check --released wheels/*

A tree is an unpacked wheel (``unzip``), or a ``site-packages``: the directory that the package is in, with its
``.dist-info``, which says what release it is. Several trees of the same files (other versions of Paddle, builds for
other Pythons) may be given to ``index``: a patch is for all releases that have the files that it was made from.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from paddle_flexckpt.patching import PatchError, read_diff, replace_lines, sha256, split_lines  # noqa: E402

FORMAT = 1
DISTRIBUTIONS = {
    "paddle": ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu", "paddlepaddle-dcu"),
    "paddlenlp": ("paddlenlp",),
    "paddleformers": ("paddleformers",),
}
KEYS = ("Title", "Symptom", "Mends", "Test")


def read_head(text: bytes) -> dict[str, str]:
    """Return the head of a patch."""
    head: dict[str, str] = {}
    key = ""
    for line in text.decode().split("\n"):
        if not line.strip():
            break
        if line.startswith(" "):
            head[key] += " " + line.strip()
        else:
            key, colon, value = line.partition(":")
            if not colon or key not in KEYS:
                raise PatchError(f"expected one of {KEYS} at the beginning of a line of a patch's head; got {line!r}")
            head[key] = value.strip()
    missing = [key for key in KEYS if not head.get(key)]
    if missing:
        raise PatchError(f"the head of a patch lacks {missing}")
    return head


def format_head(head: dict[str, str]) -> bytes:
    """Return the head as it stands in a patch."""
    lines = []
    for key in KEYS:
        words, line = head[key].split(), f"{key}:"
        for word in words:
            if len(line) + len(word) > 110:
                lines, line = [*lines, line], ""
            line += " " + word
        lines.append(line)
    return "\n".join([*lines, "", ""]).encode()


def releases(trees: Sequence[Path]) -> dict[str, list[tuple[str, Path]]]:
    """Return the version and tree of each release that is at hand, by package."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for package, names in DISTRIBUTIONS.items():
        for tree in trees:
            for distribution in importlib.metadata.distributions(path=[str(tree)]):
                if distribution.metadata["Name"].lower() in names and (tree / package).is_dir():
                    found.setdefault(package, []).append((distribution.version, tree))
    return found


def make_entry(name: str, text: bytes, available: dict[str, list[tuple[str, Path]]]) -> dict[str, Any]:
    """Return what the index says of a patch.

    A patch is for the release that it is named after, and for those with the same files. Another release in which every
    hunk happens to fit is another patch: its other lines have not been looked at.
    """
    diffs = read_diff(text)
    package = next(iter(diffs)).split("/")[0]
    files = None
    versions = set()
    for version, tree in sorted(
        available.get(package, []), key=lambda release: not name.startswith(f"{package}-{release[0]}-")
    ):
        try:
            released = {path: (tree / path).read_bytes() for path in diffs}
        except FileNotFoundError:
            continue
        if files is None and name.startswith(f"{package}-{version}-"):
            for path, edits in diffs.items():
                for edit in edits:
                    got = split_lines(released[path])[edit.start : edit.start + len(edit.old)]
                    if got != edit.old:
                        raise PatchError(f"{name!r} does not fit ({tree / path}, line {edit.start + 1}); got {got}")
            files = {
                path: {"before": sha256(released[path]), "after": sha256(replace_lines(released[path], edits))}
                for path, edits in diffs.items()
            }
        if files is not None and all(sha256(released[path]) == file["before"] for path, file in files.items()):
            versions.add(version)
    if files is None:
        raise PatchError(f"no tree of the release that {name!r} is named after")
    head = {key.lower(): value for key, value in read_head(text).items()}
    known = {"name": name, "package": package, "distributions": list(DISTRIBUTIONS[package])}
    return {**known, "versions": sorted(versions), **head, "files": files}


def make_index(trees: Sequence[Path]) -> bytes:
    """Return the index. Entries of packages that no tree is of stay as they are."""
    available = releases(trees)
    index = json.loads((HERE / "index.json").read_text(encoding="utf-8"))
    old = {entry["name"]: entry for entry in index["patches"]}
    entries = []
    for path in sorted(HERE.glob("*.patch")):
        name, text = path.stem, path.read_bytes()
        package = name.split("-")[0]
        at_hand = any(name.startswith(f"{package}-{version}-") for version, _ in available.get(package, []))
        if at_hand or name not in old:
            entry = make_entry(name, text, available)
            if name in old and old[name]["files"] == entry["files"]:
                entry["versions"] = sorted({*entry["versions"], *old[name]["versions"]})
        else:
            entry = {**old[name], **{key.lower(): value for key, value in read_head(text).items()}}
        entries.append(entry)
    return (json.dumps({"format": FORMAT, "patches": entries}, indent=2) + "\n").encode()


def format_diff(path: str, before: bytes, after: bytes) -> bytes:
    """Return the unified diff of one file, with three lines of context."""
    if not before.endswith(b"\n") or not after.endswith(b"\n"):
        raise PatchError(f"{path}: a line feed at the end of the file is expected, before and after")
    names = f"a/{path}".encode(), f"b/{path}".encode()
    return b"".join(difflib.diff_bytes(difflib.unified_diff, split_lines(before), split_lines(after), *names))


def diff_trees(released: Path, edited: Path) -> bytes:
    """Return the differences of all Python files that both trees have."""
    parts = []
    for path in sorted(edited.rglob("*.py")):
        name = path.relative_to(edited)
        if (released / name).is_file():
            before, after = (released / name).read_bytes(), path.read_bytes()
            if before != after:
                parts.append(format_diff(name.as_posix(), before, after))
    return b"".join(parts)


def carry_out(script: Path, released: Path) -> tuple[dict[str, str], bytes]:
    """Return the head and the diff of a script of replacements, each of which has to have one place."""
    import tomllib

    data = tomllib.loads(script.read_text(encoding="utf-8"))
    contents: dict[str, tuple[bytes, bytes]] = {}
    for edit in data["edit"]:
        path = edit["file"]
        before, now = contents.get(path) or ((released / path).read_bytes(),) * 2
        if "append" in edit:
            now += edit["append"].encode()
        else:
            old, new = edit["old"].encode(), edit["new"].encode()
            if now.count(old) != 1:
                raise PatchError(
                    f"{script.name}: expected one place in {path!r}; got {now.count(old)} of {edit['old']!r}"
                )
            now = now.replace(old, new)
        contents[path] = (before, now)
    head = {key: " ".join(data[key.lower()].split()) for key in KEYS}
    return head, b"".join(format_diff(path, *contents[path]) for path in sorted(contents))


def main() -> int:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("diff", "edit", "index", "check"):
        sub = commands.add_parser(command)
        sub.add_argument("--released", type=Path, nargs="+", required=True, metavar="TREE")
        if command == "diff":
            sub.add_argument("name")
            sub.add_argument("--edited", type=Path, required=True, metavar="TREE")
            sub.add_argument(
                "--head", type=Path, help="a file with the head; by default that of the patch that is there"
            )
        elif command == "edit":
            sub.add_argument("script", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "diff":
            target = HERE / f"{options.name}.patch"
            head = read_head((options.head or target).read_bytes())
            target.write_bytes(format_head(head) + diff_trees(options.released[0], options.edited))
        elif options.command == "edit":
            head, text = carry_out(options.script, options.released[0])
            (HERE / f"{options.script.stem}.patch").write_bytes(format_head(head) + text)
        index = make_index(options.released)
        if options.command == "check":
            if index != (HERE / "index.json").read_bytes():
                raise PatchError("index.json is not what the patches and these trees give")
        else:
            (HERE / "index.json").write_bytes(index)
    except PatchError as error:
        print(f"make.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
