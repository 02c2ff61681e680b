"""Read the safetensors files of ranks that torch.distributed.checkpoint writes (``HuggingFaceStorageWriter``).

``shard-00001-model-00001-of-00002.safetensors`` has a rank's chunks; ``DCP_SHARDING_INFO`` in its header has the begin
of each. There is no index: a tensor reaches as far as its chunks do, as for torch itself.

Tested in tests/foreign/test_dcp_safetensors.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, group_replicas, validate_coverage
from paddle_flexckpt.foreign.huggingface import StoredShard, TensorFile, manifest_of_files, read_tensor_file
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.native.json_cursor import JsonCursor
from paddle_flexckpt.native.manifest import Manifest

_FILE = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors", re.ASCII)
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_MOST_OFFSET = 1 << 60


def find_shard_files(names: Sequence[str]) -> list[str]:
    """Return the files of ranks among the names of a directory."""
    return sorted(filter(_FILE.fullmatch, names))


def read_shards_manifest(backend: Backend, names: Sequence[str]) -> Manifest:
    """Read the files of ranks as a manifest without checksums.

    Raises:
        CorruptCheckpointError: A file is damaged or has no places, or the chunks leave holes or overlap.
    """
    files = map_files(backend, lambda name: read_tensor_file(backend, name), names)
    offsets = [_read_offsets(file, backend.where(file.name)) for file in files]
    wholes: dict[str, list[int]] = {}
    for file, places in zip(files, offsets):
        for key, offset in places.items():
            shape = file.tensors[key].shape
            whole = wholes.setdefault(key, [0] * len(shape))
            if len(whole) != len(shape):
                where = backend.where(file.name)
                raise CorruptCheckpointError(
                    f"{where}: key {key[:80]!r} has {len(shape)} axes here, and {len(whole)} in another file. "
                    "Remedy: restore the files of one save"
                )
            whole[:] = (max(size, begin + extent) for size, begin, extent in zip(whole, offset, shape))
    shards = []
    for file, places in zip(files, offsets):
        match = _FILE.fullmatch(file.name)
        rank = int(match[1]) - 1 if match else 0
        shards += [StoredShard(key, key, file, wholes[key], offset, max(rank, 0)) for key, offset in places.items()]
    size = 1 + max((shard.rank for shard in shards), default=0)
    manifest = manifest_of_files(backend, shards, files, [], "torch_dcp", size)
    problems = validate_coverage(manifest.catalog, group_replicas(manifest.catalog)).problems
    if problems:
        error = ValidationError(problems, f"{backend.path} lacks the files of some ranks, or has those of two saves")
        raise CorruptCheckpointError(f"{error}. Remedy: restore the files of one save")
    return manifest


def _read_offsets(file: TensorFile, where: str) -> Mapping[str, Sequence[int]]:
    """Return where each chunk of a file begins."""
    places: dict[str, Sequence[int]] = {}
    cursor = JsonCursor(file.info.get(_INFO, "").encode())
    try:
        for key in cursor.entries():
            entry = cursor.value()
            offset = entry.get(_OFFSETS) if type(entry) is dict else None
            if type(offset) is not list or not all(type(n) is int and 0 <= n < _MOST_OFFSET for n in offset):
                raise ValueError(f"{key[:80]!r} has no {_OFFSETS}")
            if key not in file.tensors or len(offset) != len(file.tensors[key].shape):
                raise ValueError(f"{key[:80]!r} is no tensor of the file with {len(offset)} axes")
            places[key] = offset
        cursor.end()
        missing = sorted(set(file.tensors) - set(places))
        if missing:
            raise ValueError(f"{missing[0][:80]!r} has no place")
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{where}: {_INFO} in its header does not place the chunks: {error}. Remedy: restore the file"
        ) from error
    return places
