"""Versions of weights in directories by step, as an engine of FastDeploy takes them.

A *snapshot* is a directory with files for each rank of the engine, ``model_state.tp{rank}.{gpu}.part{n}.pdparams``, in
the format of safetensors, and ``version.yaml``, which appears last. That is JSON, and so YAML too: the step, the number
of ranks, and size and XXH3-128 of each file.

Tested in tests/rollout/test_fastdeploy_versions.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import xxhash

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.foreign.huggingface import find_weights, read_weights
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.rollout.mapped_tensors import MappedTensors

VERSION_FILE = "version.yaml"
_CHUNK_BYTES = 16 << 20
_PART_FILE = re.compile(r"model_state\.tp(\d+)\.\d+\.part\d+\.pdparams")


def part_file(rank: int, gpu: int, part: int) -> str:
    """Return the name of a snapshot's file, by the engine's rank, the GPU of that rank, and the number of the part."""
    return f"model_state.tp{rank}.{gpu}.part{part}.pdparams"


class Listing(NamedTuple):
    """The contents of ``version.yaml``: the step, the engine's ranks, size and digest of each file by its name."""

    step: int | str
    ranks: int
    files: Mapping[str, tuple[int, str]]

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return (json.dumps(self._asdict(), indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: str) -> Listing:
        """Read it; CorruptCheckpointError: this library has not written it, or it is damaged."""
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            files = {name: (int(nbytes), str(digest)) for name, (nbytes, digest) in found["files"].items()}
            ranks = {int(match[1]) if (match := _PART_FILE.fullmatch(name)) else -1 for name in files}
            if ranks != set(range(int(found["ranks"]))):
                raise ValueError("it lists no such files for each rank, or others")
            return cls(found["step"], len(ranks), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{path} is not as publish_fastdeploy writes it: {error}. Remedy (FC305): publish the version again, "
                "in another directory"
            ) from error


def file_digest(path: str) -> str:
    """Return the XXH3-128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def version_directory(directory: str, step: object) -> str:
    """Return the directory of a step; ValidationError if there is none."""
    name = str(step)
    path = os.path.join(directory, name)
    if name in ("", ".", "..") or os.sep in name or "\0" in name or not os.path.isdir(path):
        there = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
        raise ValidationError(
            f"{directory} has no directory for step {name!r}; there are {there[-5:] or 'none'}. Remedy (FC301): "
            "publish the step there, or ask for one that is there"
        )
    return path


def open_snapshot(directory: str, step: object, rank: int, ranks: int | None, verify: bool) -> MappedTensors:
    """Map the tensors of a rank of the engine, of which ``ranks`` may not be known.

    Sizes and headers of its files are checked, and with ``verify`` their digests. ValidationError: there is no such
    version, or it is not for such an engine. CorruptCheckpointError: it is damaged.
    """
    path = version_directory(directory, step)
    listing = os.path.join(path, VERSION_FILE)
    if not os.path.isfile(listing):
        raise ValidationError(
            f"{path} has no {VERSION_FILE}: the version is not whole yet, or was not. Remedy (FC303): wait for the "
            "call that publishes it, or publish it again, in another directory"
        )
    snapshot = Listing.read(listing)
    if str(snapshot.step) != str(step):
        raise ValidationError(
            Problem("a directory has another step's version", file=listing, expected=step, got=snapshot.step)
        )
    if not 0 <= rank < snapshot.ranks or ranks not in (None, snapshot.ranks):
        raise ValidationError(
            f"{path} is for an engine of {snapshot.ranks} ranks; got rank {rank} of {'?' if ranks is None else ranks}. "
            "Remedy (FC101): publish the step for this engine, in another directory"
        )
    return MappedTensors([*_checked(path, snapshot, rank, verify)])


def _checked(path: str, snapshot: Listing, rank: int, verify: bool) -> Iterator[str]:
    """Yield the paths of a rank's files, which are as the snapshot says."""
    for name, (nbytes, digest) in snapshot.files.items():
        if name.startswith(f"model_state.tp{rank}."):
            file = os.path.join(path, name)
            found = os.path.getsize(file) if os.path.isfile(file) else None
            if found != nbytes or (verify and file_digest(file) != digest):
                got = "no file" if found is None else f"{found} bytes" if found != nbytes else "other bytes"
                raise CorruptCheckpointError(
                    f"{file} is not as it was written: expected {nbytes} bytes with XXH3-128 {digest}; got {got}. "
                    "Remedy (FC305): publish the version again, in another directory"
                )
            yield file


def open_model(directory: str, step: object) -> MappedTensors:
    """Map whole tensors under Hugging Face names, as ``publish`` writes them; index and headers are checked.

    ValidationError: there is no such version, or it is a delta. CorruptCheckpointError: it is damaged, or not whole.
    """
    path = version_directory(directory, step)
    backend = open_backend(path)
    sources = find_weights(path, backend.names())
    if not sources:
        raise ValidationError(
            f"{path} has no safetensors files: the version is not whole yet, or was not. Remedy (FC303): wait for the "
            "call that publishes it, or publish it again, in another directory"
        )
    weights = read_weights(backend, *sources)
    if weights.is_delta:
        raise ValidationError(f"{path} is a delta to another version. Remedy (FC101): publish this step whole")
    return MappedTensors(map(backend.where, weights.files))
