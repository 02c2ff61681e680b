"""Read checkpoints of Paddle's own save_state_dict (``.metadata``, ``.distcp`` or safetensors), not unpickled.

Both kinds of data files hold every tensor's elements in one stretch of bytes. So such a checkpoint becomes a manifest
like any other, without checksums, and is read by byte ranges like any other.

A FlexCheckpoint of PaddleFormers is several directories of this format: ``model_state``, ``optimizer_state`` and
``master_weight`` have distinct keys; ``ema_state`` repeats them, so its name is put in front of its keys.

Tested in tests/foreign/test_paddle_checkpoint.py and tests/foreign/test_paddleformers_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.catalog import (
    Catalog,
    CorruptCheckpointError,
    Problem,
    ValidationError,
    concat,
    dtype_of,
    validate_shards,
)
from paddle_flexckpt.catalog.metadata import LocalTensorMetadata, Metadata, catalog_from_metadata
from paddle_flexckpt.foreign.formats import STATE_DIRECTORIES, ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, PARAMETER_NAMES, STAND_INS
from paddle_flexckpt.foreign.paddle_pickles import load_mapped, locate
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.media.backend import Backend, Location, inner
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.safetensors_header import read_header

_DATA = re.compile(r"(\d{1,9})_\d+\.(distcp|safetensors)", re.ASCII)
_METADATA = re.compile(r"(\d+)\.metadata", re.ASCII)
EMA_DIRECTORY = "ema_state"


class _Stretch(NamedTuple):
    """A tensor's place in its file: its element type's name and shape there, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


def paddle_ids(location: Location) -> list[int]:
    """Return the ids of Paddle's own checkpoints in a directory, in rising order."""
    return _ids(open_backend(location).names())


def _ids(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_METADATA.fullmatch, names) if match)


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    ids = _ids(listing.names)
    return ForeignCheckpoint("paddle", partial(read_paddle_manifest, listing.backend), ids) if ids else None


def _explain(listing: Listing) -> str:
    if not any(name.endswith(".metadata") and name != PADDLE_METADATA for name in listing.names):
        return ""
    return (
        f"{listing.backend.path} is no checkpoint of Paddle's own save_state_dict that can be read: its .metadata "
        f"files have the ids {_ids(listing.names) or 'none'}. Remedy (FC301): give the path and id of a complete save"
    )


def read_paddle_manifest(path: Location, unique_id: int | None = None) -> Manifest:
    """Read a checkpoint of Paddle's own as a manifest without checksums; None takes the highest id.

    Raises:
        ValidationError: There is no such checkpoint, or its metadata contradicts itself.
        CorruptCheckpointError: A file is damaged, missing, or not as in the metadata; UnsafePickleError where a pickle
            is more than data.
    """
    backend = open_backend(path)
    ids = paddle_ids(backend)
    if not ids or (unique_id is not None and unique_id not in ids):
        wanted = "" if unique_id is None else f" with id {unique_id}"
        raise ValidationError(
            f"{backend.path} has no checkpoint of Paddle's own save_state_dict{wanted}; ids here: {ids or 'none'}"
        )
    chosen = ids[-1] if unique_id is None else unique_id
    name = f"{chosen}.metadata"
    file = backend.where(name)
    data = backend.read(name)
    metadata = load_pickle(data, file)
    if type(metadata) is not Metadata:
        raise CorruptCheckpointError(f"{file} has a {type(metadata).__name__} in it; expected Metadata")
    for data_file in metadata.storage_metadata.values():
        try:
            check_file_name(data_file)
        except ValueError as error:
            raise CorruptCheckpointError(f"{file}: {error}. Remedy (FC305): load another checkpoint") from error
    catalog = catalog_from_metadata([_with_global_shapes(metadata)], _rank_of)
    problems = validate_shards(catalog)
    if problems:
        raise ValidationError(problems, f"{file} is not usable")
    indices, sizes = [], {}
    for data_file in catalog.files:
        stretches, sizes[data_file] = _index(backend, data_file)
        indices.append(stretches)
    catalog = replace(catalog, byte_offset=_byte_offsets(catalog, indices, backend))
    digest, world_size = xxhash.xxh3_128_hexdigest(data), len({*catalog.rank.tolist()})
    return Manifest.of_foreign("paddle", catalog, sizes, digest, chosen, world_size)


def _rank_of(file: str) -> int:
    match = _DATA.fullmatch(file)
    return int(match[1]) if match else 0


def _with_global_shapes(metadata: Metadata) -> Metadata:
    """Add the global shapes that older writers left out: the shards of a tensor reach to its end."""
    shapes: dict[str, list[LocalTensorMetadata]] = {}
    for key, shards in metadata.state_dict_metadata.items():
        if shards and all(shard.global_shape is None for shard in shards):
            if len({(len(shard.global_offset), len(shard.local_shape)) for shard in shards}) != 1:
                raise ValidationError(Problem("shards differ in their number of axes", key))
            ends = [[o + s for o, s in zip(shard.global_offset, shard.local_shape)] for shard in shards]
            whole = tuple(max(extents) for extents in zip(*ends))
            shards = [replace(shard, global_shape=whole) for shard in shards]
        shapes[key] = shards
    return replace(metadata, state_dict_metadata=shapes)


def _index(backend: Backend, name: str) -> tuple[Mapping[str, _Stretch], int]:
    """Locate the tensors of a data file; return them and the file's size."""
    path = backend.where(name)
    try:
        file = backend.open(name)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing; the metadata names it. Remedy (FC304): restore the file or load another checkpoint"
        ) from error
    with file:
        if name.endswith(".safetensors"):
            tensors = read_header(file, path).tensors
            return {name: _Stretch(each.code, each.shape, each.begin) for name, each in tensors.items()}, file.size
        size = file.size
    return _index_distcp(backend, name), size


def _index_distcp(backend: Backend, name: str) -> dict[str, _Stretch]:
    state, mapped = load_mapped(backend, name)
    file = backend.where(name)
    if type(state) is not dict:
        raise CorruptCheckpointError(f"{file} has a {type(state).__name__} in it; expected a dict of arrays")
    stretches = {}
    for key, array in state.items():
        if key == PARAMETER_NAMES:
            continue
        is_array = type(key) is str and type(array) is np.ndarray and array.flags.c_contiguous
        stretch = locate(array, mapped) if is_array else None
        if stretch is None:
            raise CorruptCheckpointError(f"{file}: entry {str(key)[:80]!r} is not an array in row-major order")
        stretches[key] = _Stretch(stretch.dtype, stretch.shape, stretch.begin)
    return stretches


def _byte_offsets(catalog: Catalog, indices: list[Mapping[str, _Stretch]], backend: Backend) -> np.ndarray:
    """Return the first byte of every shard, and check that the files agree with the metadata."""
    offsets = np.zeros(len(catalog), dtype=np.int64)
    problems: list[Problem | str] = []
    flattened = catalog.is_flattened
    for row in range(len(catalog)):
        key, file = catalog.key_name(row), catalog.file_name(row) or ""
        where = backend.where(file)
        stretch = indices[int(catalog.file[row])].get(key)
        if stretch is None:
            problems.append(Problem("a data file lacks a tensor that the metadata has in it", key, file=where))
            continue
        dtype = dtype_of(catalog.dtype_name(row))
        size = int(catalog.flat_stop[row] - catalog.flat_start[row])
        shape = (size,) if flattened[row] else catalog.unpadded(row, catalog.shape)
        if file.endswith(".safetensors"):
            code = dtype.safetensors
            shape = (*shape, dtype.trailing) if dtype.trailing > 1 else shape
        else:
            code = STAND_INS.get(dtype.name, dtype.name)
        if (stretch.dtype, stretch.shape) != (code, shape):
            expected, got = f"{code} {list(shape)}", f"{stretch.dtype} {list(stretch.shape)}"
            problems.append(
                Problem("a tensor is not what the metadata says", key, file=where, expected=expected, got=got)
            )
        offsets[row] = stretch.begin
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{backend.path} is damaged")))
    return offsets


def _detect_paddleformers(listing: Listing) -> ForeignCheckpoint | None:
    backend = listing.backend
    ids = {name: paddle_ids(inner(backend, name)) for name in STATE_DIRECTORIES if name in listing.directories}
    if not any(ids.values()):
        return None
    # Averages without metadata are parts whose places only the run that wrote them knows.
    averages = paddle_ids(inner(backend, EMA_DIRECTORY)) if EMA_DIRECTORY in listing.directories else []
    if averages:
        ids[EMA_DIRECTORY] = averages
    return ForeignCheckpoint(
        "paddleformers", partial(_read_paddleformers, backend, ids), {i for found in ids.values() for i in found}
    )


def _read_paddleformers(backend: Backend, ids: Mapping[str, Sequence[int]], unique_id: int | None) -> Manifest:
    """Read several directories, each with its ids, as one manifest; its files have their directory in front.

    None as an id takes the highest of the first directory.
    """
    if unique_id is not None and not any(unique_id in found for found in ids.values()):
        raise ValidationError(f"{backend.path} has no checkpoint with id {unique_id}; ids by directory: {ids}")
    chosen = max(next(found for found in ids.values() if found)) if unique_id is None else unique_id
    manifests = []
    for name, there in ids.items():
        if chosen not in there:
            raise CorruptCheckpointError(
                f"{backend.where(name)} has no {chosen}.metadata, which the other directories have: the save was not "
                "finished. Remedy (FC303): load another checkpoint"
            )
        manifests.append(_renamed(read_paddle_manifest(inner(backend, name), chosen), name))
    seen: dict[str, str] = {}
    problems = []
    for name, manifest in zip(ids, manifests):
        for key in manifest.catalog.keys:
            if seen.setdefault(key, name) != name:
                problems.append(Problem("two directories have the same key", key, got=f"{seen[key]} and {name}"))
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, backend.path)))
    catalog = concat([manifest.catalog for manifest in manifests])
    sizes = {file: size for manifest in manifests for file, size in manifest.sizes.items()}
    tokens = " ".join(manifest.save_token for manifest in manifests)
    digest = xxhash.xxh3_128_hexdigest(tokens.encode())
    world_size = max(manifest.world_size for manifest in manifests)
    return Manifest.of_foreign("paddleformers", catalog, sizes, digest, chosen, world_size)


def _renamed(manifest: Manifest, directory: str) -> Manifest:
    """Return the manifest as seen from the directory above."""
    catalog = manifest.catalog
    keys = catalog.keys
    if directory == EMA_DIRECTORY:
        keys = tuple(f"{EMA_DIRECTORY}.{key}" for key in keys)
    files = tuple(f"{directory}/{file}" for file in catalog.files)
    return replace(manifest, catalog=replace(catalog, keys=keys, files=files))


def read_plain_file(path: Location, name: str) -> Any:
    """Read plain data that ``paddle.save`` has written beside a checkpoint, such as an LR scheduler's state.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        name: The file in it: ``scheduler.pdparams``, ``scaler.pdparams``.

    Returns:
        The data: numbers, texts, tuples, lists, dicts and arrays. Arrays are read-only.

    Raises:
        FileNotFoundError: There is no such file.
        UnsafePickleError: It has other values in it, such as Paddle's own random generator; nothing was called.
        CorruptCheckpointError: It is damaged, or the name leads out of the directory.
    """
    backend = open_backend(path)
    data = load_pickle(backend.read(name), backend.where(name))
    if isinstance(data, dict):
        names = data.pop(PARAMETER_NAMES, {})
        if not isinstance(names, dict):
            raise CorruptCheckpointError(
                f"{backend.where(name)} is not what paddle.save writes. Remedy (FC305): restore it"
            )
    return data


PADDLE = Reader(_detect, _explain)
PADDLEFORMERS = Reader(_detect_paddleformers)
