"""Small checkpoints on disk, made with the package's own writer, and what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, dtype_of
from paddle_flexckpt.native.checksums import Checksums, hash_block
from paddle_flexckpt.native.data_file import write_data_file
from paddle_flexckpt.native.manifest import Manifest, SaveInfo, merge_parts
from tests.property.layouts import Shard

TOKEN = "0123456789abcdef" * 2


def whole(key: str, dtype: str, shape: tuple[int, ...], rank: int = 0) -> Shard:
    return Shard(key, dtype, shape, (0,) * len(shape), shape, None, rank)


def values_of(shard: Shard, seed: int) -> np.ndarray:
    """Random bits of the shard's dtype, flat: NaNs and all."""
    dtype = dtype_of(shard.dtype)
    raw = np.random.default_rng(seed).integers(0, 256, shard.size * dtype.itemsize, dtype=np.uint8)
    return (raw % 2 if shard.dtype == "bool" else raw).view(dtype.numpy)


def items_of(shards: Sequence[Shard], file: str) -> Catalog:
    """The write plan's rows for shards that are laid end to end in one file."""
    builder, position = CatalogBuilder(shards[0].rank if shards else 0, file), 0
    for s in shards:
        builder.add(s.key, s.dtype, s.global_shape, s.offset, s.shape, s.flat, position)
        position += s.size * dtype_of(s.dtype).itemsize
    return builder.build()


@dataclass(frozen=True)
class Stored:
    """A checkpoint's data files.

    Attributes:
        directory: Where they are.
        manifest: What they hold.
        shards: One per row of the manifest's catalog.
        values: Their elements, flat.
    """

    directory: Path
    manifest: Manifest
    shards: list[Shard]
    values: list[np.ndarray]

    def file(self, index: int = 0) -> Path:
        return self.directory / self.manifest.catalog.files[index]


def write_file(directory: Path, shards: Sequence[Shard], values: Sequence[np.ndarray], **header) -> Manifest:
    """One rank's data file, written; returns its part."""
    info = {"save_token": TOKEN, "unique_id": 0, "world_size": 1, "step": None, **header}
    rank = shards[0].rank if shards else 0
    items = items_of(shards, f"{rank}_{info['unique_id']}.safetensors")
    return write_data_file(str(directory), items, (v.view(np.uint8) for v in values), SaveInfo(**info))


def store(directory: Path, shards: Sequence[Shard], block_bytes: int | None = None, **header) -> Stored:
    """Data files of shards that are sorted by rank; ``block_bytes`` makes checksums of smaller blocks than written.

    Replicas have the same values.
    """
    seeds: dict[tuple, int] = {}
    values = [values_of(shard, seeds.setdefault(shard.identity, seed)) for seed, shard in enumerate(shards)]
    parts = []
    for rank in dict.fromkeys(shard.rank for shard in shards):
        rows = [i for i, shard in enumerate(shards) if shard.rank == rank]
        parts.append(write_file(directory, [shards[i] for i in rows], [values[i] for i in rows], **header))
    manifest = merge_parts(parts)
    if block_bytes is not None:
        manifest = replace(manifest, checksums=checksums_by_hand(values, block_bytes))
    return Stored(directory, manifest, list(shards), values)


def checksums_by_hand(values: Sequence[np.ndarray], block_bytes: int) -> Checksums:
    sums = []
    for array in values:
        raw = array.tobytes()
        sums += [hash_block(raw[i : i + block_bytes]) for i in range(0, len(raw), block_bytes)]
    lengths = np.asarray([array.nbytes for array in values], dtype=np.int64)
    return Checksums.of_items(np.asarray(sums, dtype=np.uint64), lengths, block_bytes)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flips one bit of a file in place."""
    with path.open("r+b") as stream:
        stream.seek(byte)
        value = stream.read(1)[0] ^ (1 << bit)
        stream.seek(byte)
        stream.write(bytes([value]))


def size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)
