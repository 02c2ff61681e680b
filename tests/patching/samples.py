"""A package of two modules, and patches for it."""

from __future__ import annotations

from pathlib import Path

from paddle_flexckpt.patching import Package, Patch, PatchedFile, format_diff
from paddle_flexckpt.patching.index import sha256

FIRST = "".join(f"first_{number} = {number}\n" for number in range(1, 41)).encode()
SECOND = b"second = 1\r\nname = '\xc3\xa4'\x0c\nlast = 2"


def install(root: Path, version: str = "1.0") -> Package:
    """Writes the package and its distribution's metadata below a directory."""
    package = root / "sample" / "inner"
    package.mkdir(parents=True)
    for file, content in (("../__init__.py", b""), ("__init__.py", b""), ("first.py", FIRST), ("second.py", SECOND)):
        (package / file).write_bytes(content)
    info = root / f"sample_dist-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Sample_Dist\nVersion: {version}\n")
    return Package("sample", root, version)


def patch(name: str, **edits: tuple[bytes, bytes]) -> Patch:
    """A patch that replaces one text by another in each of the modules named."""
    originals = {"first": FIRST, "second": SECOND}
    files, text = [], b"What this is.\n\n"
    for module, (old, new) in edits.items():
        before, path = originals[module], f"sample/inner/{module}.py"
        assert before.count(old) == 1
        after = before.replace(old, new)
        files.append(PatchedFile(path, sha256(before), sha256(after)))
        text += format_diff(path, before, after)
    return Patch(name, "sample", ("sample-dist",), ("1.0",), "title", "symptom", "mends", "test", tuple(files), text)


BOTH = patch("both", first=(b"first_5 = 5\n", b"first_5 = 50\nfirst_6 = 60\n"), second=(b"last = 2", b"last = 3"))
LATER = patch("later", first=(b"first_9 = 9\nfirst_10 = 10\n", b"first_9 = 90\n"))
CLASH = patch("clash", first=(b"first_5 = 5\nfirst_6 = 6\n", b"first_5 = -5\n"))


def files(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
