"""Pack what a GPU machine without a network lacks into parts that can be carried there, and install it from them.

The kit holds Paddle's CPU wheel and the wheels that it needs, for one version of Python. Wheels are zip files, whose
members are compressed one by one. Stored instead, all in one tar archive, and compressed with xz, they take two thirds
of the bytes. The archive is cut into blocks that are compressed by themselves, so that all processors can work; a part
is a number of blocks. ``cat gpu-kit/*/part.tar.xz | xz -dc | tar -x`` gives the wheels, too.

    python tests/device/gpu/pack.py fill gpu-kit                         # needs the network, and some minutes
    python tests/device/gpu/pack.py install gpu-kit gpu-kit/work/site    # needs neither

The standard library and pip are all that this module needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MB = 1_000_000
#: Of a part. The machine takes 64 MiB a call, the working tree included.
PART_BYTES = 50 * MB
#: Of the archive, before it is compressed. As large as the dictionary of xz: a block more costs little.
BLOCK_BYTES = 64 << 20
PYTHON = "3.12"
PADDLE = "paddlepaddle==3.3.1"
#: What Paddle and this library import; pip finds what these need. setuptools is imported by Paddle.
REQUIREMENTS = (PADDLE, "numpy", "safetensors", "xxhash", "ml_dtypes", "setuptools")
#: Paddle asks for exactly one version of these: what the machine has of them does not do.
PINNED = ("opt-einsum", "paddlepaddle")
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 12, 5)), "manylinux2014_x86_64", "manylinux1_x86_64")
# Addresses of calls and jumps become the same bytes for the same target.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
KIT, PART = "kit.json", "part.tar.xz"


class KitError(RuntimeError):
    """Say that the kit cannot be made or used, and what to do."""


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(kit: Path) -> None:
    """Download the wheels, pack them and print the size of each part."""
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        wheels = Path(scratch) / "wheels"
        say(f"downloading {', '.join(REQUIREMENTS)} for Python {PYTHON}, and what they need")
        download(wheels)
        pack(sorted(wheels.glob("*.whl")), kit)
    for line in sizes(kit):
        say(line)


def download(target: Path) -> None:
    """Have pip download wheels for the machine's Python, whichever runs here."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--only-binary=:all:", "--dest", str(target)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [word for abi in ("cp" + PYTHON.replace(".", ""), "abi3", "none") for word in ("--abi", abi)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *REQUIREMENTS], check=True)


def pack(wheels: list[Path], kit: Path, part_bytes: int = PART_BYTES, block_bytes: int = BLOCK_BYTES) -> None:
    """Write the parts of a kit, each into a directory of its own; parts of an earlier kit go."""
    for old in parts(kit).values():
        shutil.rmtree(old)
    kit.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pack-", dir=kit) as scratch:
        archive = Path(scratch) / "kit.tar"
        with tarfile.open(archive, "w") as tar:
            for wheel in wheels:
                stored = Path(scratch) / wheel.name
                store(wheel, stored)
                tar.add(stored, wheel.name, filter=_anonymous)
                stored.unlink()
        say(f"compressing {archive.stat().st_size / MB:.0f} MB of wheels")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compressed = list(pool.map(compress, blocks(archive, block_bytes)))
    described: list[dict[str, Any]] = []
    number, room = 0, 0
    for block in compressed:
        if len(block) > part_bytes:
            raise KitError(f"a block has {len(block)} bytes, and a part may have {part_bytes}. Remedy: smaller blocks.")
        if len(block) > room:
            number, room = number + 1, part_bytes
            (kit / str(number)).mkdir()
        room -= len(block)
        with open(kit / str(number) / PART, "ab") as part:
            part.write(block)
        described.append({"part": number, "bytes": len(block), "sha256": hashlib.sha256(block).hexdigest()})
    told = {"python": PYTHON, "blocks": described, "wheels": {wheel.name: wheel.stat().st_size for wheel in wheels}}
    for each in range(1, number + 1):
        (kit / str(each) / KIT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def store(wheel: Path, target: Path) -> None:
    """Write a wheel anew, with the same members, none of them compressed."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        for member in source.infolist():
            data = source.read(member)
            member.compress_type = zipfile.ZIP_STORED
            copy.writestr(member, data)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who packed it, and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def blocks(path: Path, nbytes: int) -> Iterator[bytes]:
    """Yield a file in blocks."""
    with open(path, "rb") as file:
        while block := file.read(nbytes):
            yield block


def compress(block: bytes) -> bytes:
    """Return a block as an xz stream."""
    return lzma.compress(block, lzma.FORMAT_XZ, filters=FILTERS)


# -- using -------------------------------------------------------------------------------------------------------------


def parts(kit: Path) -> dict[int, Path]:
    """Return the directories of the parts that are there, by number."""
    found = (path.parent for path in kit.glob(f"*/{PART}") if path.parent.name.isdigit())
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}


def described(kit: Path) -> dict[str, Any]:
    """Return what the kit says of itself.

    Raises:
        KitError: A part is missing, or is not of the size that it had.
    """
    first = next(iter(parts(kit).values()), kit) / KIT
    if not first.is_file():
        raise KitError(f"{kit} has no part of a whole kit. Remedy: `make gpu-kit` where there is a network.")
    told = json.loads(first.read_text(encoding="utf-8"))
    expected: dict[int, int] = {}
    for block in told["blocks"]:
        expected[block["part"]] = expected.get(block["part"], 0) + block["bytes"]
    for number, nbytes in expected.items():
        path = kit / str(number) / PART
        got = path.stat().st_size if path.is_file() else None
        if got != nbytes:
            what = "is missing" if got is None else f"has {got} bytes"
            raise KitError(f"{path} {what}; expected {nbytes} bytes. Remedy: carry {kit.name}/{number} again.")
    return told


def sizes(kit: Path) -> list[str]:
    """Return a line for each part, and one for all of them."""
    told = described(kit)
    nbytes = {number: (path / PART).stat().st_size for number, path in parts(kit).items()}
    lines = [f"{kit.name}/{number}/{PART}: {each / MB:.1f} MB" for number, each in nbytes.items()]
    before = sum(told["wheels"].values())
    total = sum(nbytes.values())
    return [*lines, f"{len(nbytes)} parts, {total / MB:.1f} MB; {len(told['wheels'])} wheels, {before / MB:.1f} MB"]


def unpack(kit: Path, target: Path) -> list[Path]:
    """Put the parts together; return the wheels, which are in ``target`` then."""
    told = described(kit)
    target.mkdir(parents=True, exist_ok=True)
    archive = target / "kit.tar"
    with ThreadPoolExecutor(os.cpu_count()) as pool, open(archive, "wb") as file:
        for block in pool.map(decompress, kept_blocks(kit, told)):
            file.write(block)
    with tarfile.open(archive) as tar:
        for member in tar:
            if Path(member.name).name != member.name or not member.isfile():
                raise KitError(f"the kit has {member.name}, which is no wheel. Remedy: `make gpu-kit`.")
            tar.extract(member, target)
    archive.unlink()
    return sorted(target.glob("*.whl"))


def kept_blocks(kit: Path, told: Mapping[str, Any]) -> Iterator[tuple[bytes, str, str]]:
    """Yield each block with its digest and where it is."""
    position: dict[int, int] = {}
    for block in told["blocks"]:
        path, begin = kit / str(block["part"]) / PART, position.get(block["part"], 0)
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(block["bytes"])
        position[block["part"]] = begin + block["bytes"]
        yield data, block["sha256"], f"{path} from byte {begin}"


def decompress(block: tuple[bytes, str, str]) -> bytes:
    """Return what a block has, if it is what was packed."""
    data, digest, where = block
    got = hashlib.sha256(data).hexdigest()
    if got != digest:
        raise KitError(f"{where} has SHA-256 {got}; expected {digest}. Remedy: carry that part again.")
    return lzma.decompress(data)


def install(kit: Path, site: Path) -> None:
    """Install into a directory the wheels of the kit that this Python lacks, without a network.

    Raises:
        KitError: This is another Python than the kit is for, or a part is missing or damaged.
    """
    told, own = described(kit), "{}.{}".format(*sys.version_info)
    if told["python"] != own:
        raise KitError(f"the kit is for Python {told['python']}, and this is {own}. Remedy: run it with that Python.")
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=kit) as scratch:
        wheels = unpack(kit, Path(scratch))
        wanted = [wheel for wheel in wheels if is_wanted(wheel)]
        for wheel in wheels:
            say(f"{'installing' if wheel in wanted else 'there already:'} {wheel.name}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(site), *map(str, wanted)], check=True)


def is_wanted(wheel: Path) -> bool:
    """Return whether this Python lacks what a wheel holds; a version that Paddle asks for exactly is always wanted."""
    name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
    if name in PINNED:
        return True
    try:
        version(name)
    except PackageNotFoundError:
        return True
    return False


def say(text: str) -> None:
    """Print a line at once."""
    print(f"[kit] {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fill", "sizes", "install"), help="what to do")
    parser.add_argument("kit", type=Path, help="the directory of the kit")
    parser.add_argument("site", type=Path, nargs="?", help="where to install")
    options = parser.parse_args(argv)
    if (options.what == "install") != (options.site is not None):
        parser.error("install takes the directory to install into, and nothing else takes one")
    try:
        if options.what == "install":
            install(options.kit, options.site)
        elif options.what == "fill":
            fill(options.kit)
        else:
            print("\n".join(sizes(options.kit)))
    except (KitError, subprocess.CalledProcessError) as error:
        print(f"[kit] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
