"""A package of two modules, and patches for it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from paddle_flexckpt.patching import Patch, read_patches, sha256, split_lines

FIRST = "".join(f"first_{number} = {number}\n" for number in range(1, 41)).encode()
SECOND = b"second = 1\r\nname = '\xc3\xa4'\x0c\nlast = 2\n"
EDITS = {
    "both": {
        "first": (b"first_5 = 5\n", b"first_5 = 50\nfirst_6 = 60\n"),
        "second": (b"last = 2", b"last = 3"),
    },
    "later": {"first": (b"first_9 = 9\nfirst_10 = 10\n", b"first_9 = 90\n")},
    "clash": {"first": (b"first_5 = 5\nfirst_6 = 6\n", b"first_5 = -5\n")},
}


def install(root: Path) -> Path:
    """Writes the package below a directory."""
    package = root / "sample" / "inner"
    package.mkdir(parents=True)
    for file, content in (("../__init__.py", b""), ("__init__.py", b""), ("first.py", FIRST), ("second.py", SECOND)):
        (package / file).write_bytes(content)
    return root


def format_diff(path: str, before: bytes, after: bytes) -> bytes:
    """The unified diff of one file."""
    names = f"a/{path}".encode(), f"b/{path}".encode()
    return b"".join(difflib.diff_bytes(difflib.unified_diff, split_lines(before), split_lines(after), *names))


def write_patches(directory: Path, *names: str) -> dict[str, Patch]:
    """Writes an index and the patches that are named, and reads them."""
    originals = {"first": FIRST, "second": SECOND}
    directory.mkdir()
    entries = []
    for name in names or EDITS:
        files, text = {}, b"What this is.\n\n"
        for module, (old, new) in EDITS[name].items():
            before, path = originals[module], f"sample/inner/{module}.py"
            assert before.count(old) == 1
            after = before.replace(old, new)
            files[path] = {"before": sha256(before), "after": sha256(after)}
            text += format_diff(path, before, after)
        entries.append({"name": name, "package": "sample", "versions": ["1.0"], "title": "title", "files": files})
        (directory / f"{name}.patch").write_bytes(text)
    (directory / "index.json").write_text(json.dumps({"format": 1, "patches": entries}))
    return read_patches(directory)


def files(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
