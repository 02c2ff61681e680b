"""Versions of a model's weights below one directory, in the format that slime, miles and SGLang share.

Version 7 is the directory ``weight_v000007``. A full version is a Hugging Face directory. A delta has an index whose
metadata names the version before, and files with a frame (:mod:`~paddle_flexckpt.foreign.weight_deltas`) for each
tensor that has changed. Version 0 is the model that an engine has started with.

Tested in tests/foreign/test_weight_versions.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.foreign.huggingface import MODEL_FILE, Weights, find_weights, read_weights
from paddle_flexckpt.foreign.weight_deltas import CHECKSUMS, ENCODINGS
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.media.removals import leads_elsewhere

INDEX_FILE = "model.safetensors.index.json"
COMPRESSION = "zstd"
DIRECTORY = re.compile(r"weight_v(\d{6,9})", re.ASCII)


class WeightVersion(NamedTuple):
    """One version: number, directory and files. A delta has the number of its base, and how it is encoded.

    ``sums`` are the checksums of its tensors; full versions of other programs have none.
    """

    number: int
    backend: Backend
    weights: Weights
    base: int | None = None
    encoding: str = ""
    checksum: str = ""
    sums: Mapping[str, str] = {}


def version_directory(root: Backend, number: int) -> Backend:
    """Return the directory of a version, whether it is there or not."""
    return root.child(f"weight_v{number:06d}")


def list_versions(root: Backend, unfinished: bool = False) -> list[int]:
    """Return the numbers of the versions whose last file is there, or those of all directories, in rising order."""
    found = sorted(int(match[1]) for match in map(DIRECTORY.fullmatch, root.names("directories")) if match)
    return found if unfinished else [number for number in found if _is_published(version_directory(root, number))]


def _is_published(directory: Backend) -> bool:
    names = directory.names()
    return INDEX_FILE in names or [name for name in names if name.endswith(".safetensors")] == [MODEL_FILE]


def newest_full(root: Backend, numbers: Sequence[int]) -> int | None:
    """Return the last of some versions, in rising order, that is full and whole; None if none is."""
    for number in reversed(numbers):
        with contextlib.suppress(CorruptCheckpointError, ValidationError):
            if not read_whole(version_directory(root, number)).is_delta:
                return number
    return None


def remove_version(root: Backend, number: int) -> None:
    """Remove a version: first the file that makes it one."""
    directory = version_directory(root, number)
    if leads_elsewhere(directory):
        return
    for name in sorted(directory.names(), key=lambda name: name not in (INDEX_FILE, MODEL_FILE)):
        directory.remove(name)
    directory.remove_directory()


def read_whole(directory: Backend, wanted: Collection[str] | None = None) -> Weights:
    """Read index and headers of a directory's files; CorruptCheckpointError if they are not there, or not whole.

    ``wanted``: names of tensors; files without any of them need not be read.
    """
    sources = find_weights(directory.path, directory.names())
    if not sources:
        raise CorruptCheckpointError(f"{directory.path} has no weights")
    return read_weights(directory, *sources, wanted=wanted)


def read_version(root: Backend, number: int, wanted: Collection[str] | None = None) -> WeightVersion:
    """Read the index and the headers of one version; errors of :func:`read_chain`."""
    directory = version_directory(root, number)
    try:
        if not _is_published(directory):
            raise ValueError("it is missing, or was not finished")
        weights = read_whole(directory, wanted)
        found = weights.metadata
        if not weights.is_delta:
            return WeightVersion(number, directory, weights, None, "", *_sums_of_full(weights))
        versions = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
        for name, expected in {**versions, "compression_format": COMPRESSION}.items():
            if found.get(name) != expected:
                raise ValueError(f"its {name} is {found.get(name)!r}; expected {expected!r}")
        encoding, checksum = found["delta_encoding"], found.get("checksum_format")
        if encoding not in ENCODINGS or checksum not in CHECKSUMS:
            raise ValueError(f"its encoding {encoding!r}, or the format {checksum!r} of its checksums, is not known")
        for file in weights.files.values():
            for name, tensor in file.tensors.items():
                if tensor.code != "U8" or len(tensor.shape) != 1 or name not in file.info:
                    raise ValueError(f"key {name!r} in {file.name} is no frame with a checksum")
    except (CorruptCheckpointError, ValueError) as error:
        raise broken(root, number, without_remedy(error)) from None
    sums = {name: file.info[name] for file in weights.files.values() for name in file.tensors}
    return WeightVersion(number, directory, weights, number - 1, encoding, checksum, sums)


def _sums_of_full(weights: Weights) -> tuple[str, Mapping[str, str]]:
    """Return format and checksums of a full version's tensors, of which each has one, or none has."""
    if not weights.file_of:
        raise ValueError("it has no tensors")
    checksum, sums = weights.metadata.get("checksum_format"), weights.metadata.get("checksums")
    if checksum is None and sums is None:
        return "", {}
    if checksum not in CHECKSUMS or not isinstance(sums, dict) or sums.keys() != weights.file_of.keys():
        raise ValueError(f"its checksums, in the format {checksum!r}, are not those of its tensors")
    return checksum, sums


def read_chain(
    root: Backend, number: int, applied: int | None = None, wanted: Collection[str] | None = None
) -> list[WeightVersion]:
    """Return the versions that make up a version: a full one, and the deltas after it.

    ``applied``: the version of a copy; from there the deltas are enough, unless there is a full version after it.
    ``wanted``: names of tensors; files without any of them need not be read. None wants all.
    CorruptCheckpointError: one of them is missing or not whole; the text names a full version to take.
    """
    chain: list[WeightVersion] = []
    while number != applied:
        if number <= 0:
            raise broken(root, 0, "it is the model with which the engine has started, and is not here")
        chain.append(read_version(root, number, wanted))
        if chain[-1].base is None:
            break
        number = chain[-1].base
    return chain[::-1]


def broken(root: Backend, number: int, why: str) -> CorruptCheckpointError:
    """Return the error of a version that cannot be used; its remedy names a full version."""
    full = newest_full(root, [each for each in list_versions(root) if each != number])
    remedy = "publish a full version (`publish(model, full=True)`)"
    if full is not None:
        remedy = (
            f"take the full version weight_v{full:06d} (`flexckpt apply` with --version {full} --full), or publish a "
            "full version (`publish(model, full=True)`)"
        )
    where = version_directory(root, number).path
    return CorruptCheckpointError(f"{where} cannot be used: {why}. Remedy (FC308): {remedy}")
