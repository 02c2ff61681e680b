"""The format of versions that slime, miles and SGLang share, written from its description alone.

Nothing of the library is used, so that both sides of an exchange can be tried against it: a writer of deltas, and a
receiver that changes a copy in place.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"


def checksum(form: str, data: bytes) -> str:
    if form == "adler32":
        return f"{zlib.adler32(data, 1):08x}"
    if form == "blake3":
        import blake3

        return blake3.blake3(data).hexdigest()
    return xxhash.xxh3_128(data).hexdigest()


def read_file(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str], bytes]:
    """Return where tensors begin and end, the metadata and all bytes of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    return {k: tuple(8 + length + at for at in v["data_offsets"]) for k, v in header.items()}, metadata, data


def tensors_of(directory: str | Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a directory's safetensors files."""
    found = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        places, _, data = read_file(path)
        found.update({name: data[begin:end] for name, (begin, end) in places.items()})
    return found


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (code, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def frame_of(old: bytes, new: bytes, encoding: str) -> bytes | None:
    """Return the frame of a tensor; None if it has not changed."""
    a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    at = np.flatnonzero(a != b).astype("<u4")
    if not len(at):
        return None
    delta = (a ^ b).tobytes() if encoding == "xor" else struct.pack("<I", len(at)) + at.tobytes() + b[at].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(delta)


def write_delta(
    root: Path, number: int, old: dict[str, bytes], new: dict[str, bytes], encoding: str, form: str, writers: int = 2
) -> None:
    """Write a version as a delta, in as many files as there are writers with a change."""
    directory = root / f"weight_v{number:06d}"
    directory.mkdir(parents=True)
    parts = []
    for writer in range(writers):
        frames = {name: frame_of(old[name], new[name], encoding) for name in sorted(new)[writer::writers]}
        parts.append({name: frame for name, frame in frames.items() if frame is not None})
    parts, files = [part for part in parts if part], {}
    for number_of_file, part in enumerate(parts):
        name = f"model-{number_of_file:05d}-of-{len(parts):05d}.safetensors"
        sums = {key: checksum(form, new[key]) for key in part}
        write_file(directory / name, {key: ("U8", (len(part[key]),), part[key]) for key in part}, sums)
        files.update(dict.fromkeys(part, name))
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": form,
    }
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": files}))


def pull(local: Path, base: Path | None, root: Path, number: int) -> None:
    """Bring a copy to a version, in place."""
    sync = local / ".weight_sync"
    sync.mkdir(parents=True, exist_ok=True)
    state = sync / "state.json"
    applied = int(json.loads(state.read_text())["version"]) if state.exists() else None
    start = number
    while start > (applied or 0) and "delta_encoding" in _index(root, start)["metadata"]:
        start -= 1
    if applied is None or start > applied:
        seed = base if start == 0 else root / f"weight_v{start:06d}"
        for path in local.iterdir():
            if path.is_file():
                path.unlink()
        for path in seed.iterdir():
            if path.is_file():
                shutil.copy(path, local)
        _write_state(state, start)
        applied = start
    for version in range(applied + 1, number + 1):
        _change(local, root, version)
        _write_state(state, version)


def _index(root: Path, number: int) -> dict:
    path = root / f"weight_v{number:06d}" / INDEX
    if path.exists():
        return json.loads(path.read_text())
    assert [each.name for each in path.parent.glob("*.safetensors")] == ["model.safetensors"], "no index"
    return {"metadata": {}}


def _write_state(state: Path, number: int) -> None:
    state.with_suffix(".tmp").write_text(json.dumps({"version": f"{number:06d}"}))
    os.replace(state.with_suffix(".tmp"), state)


def _change(local: Path, root: Path, number: int) -> None:
    index = _index(root, number)
    metadata = index["metadata"]
    assert (
        metadata.items()
        >= {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": metadata["delta_encoding"],
            "compression_format": "zstd",
            "checksum_format": metadata["checksum_format"],
        }.items()
    )
    copies = {path: bytearray(path.read_bytes()) for path in local.glob("*.safetensors")}
    where = {name: (path, *place) for path in copies for name, place in read_file(path)[0].items()}
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    for file in names:
        places, sums, data = read_file(root / f"weight_v{number:06d}" / file)
        assert set(places) == {name for name, its in index["weight_map"].items() if its == file} == set(sums)
        for name, (begin, end) in places.items():
            delta = np.frombuffer(zstandard.ZstdDecompressor().decompress(data[begin:end]), np.uint8)
            path, low, high = where[name]
            region = np.frombuffer(copies[path], np.uint8)[low:high]
            if metadata["delta_encoding"] == "xor":
                region ^= delta
            else:
                count = int.from_bytes(delta[:4].tobytes(), "little")
                region[delta[4 : 4 + 4 * count].view("<u4")] = delta[4 + 4 * count :]
            assert checksum(metadata["checksum_format"], region.tobytes()) == sums[name], name
            del region
    for path, copy in copies.items():
        path.write_bytes(copy)
