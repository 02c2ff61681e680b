"""Read safetensors files, one by one or under an index as Hugging Face's are, and make a manifest of them.

A Hugging Face style index is JSON: ``weight_map`` has the file of every tensor. Index and files have to agree; a file
that an index names is in the same directory.

torch.distributed.checkpoint (``HuggingFaceStorageWriter``) writes a file for each rank,
``shard-00001-model-00001-of-00002.safetensors``, without an index. ``DCP_SHARDING_INFO`` in its header has the first
element of each chunk. A tensor reaches as far as its chunks do, as for torch itself.

Tested in tests/foreign/test_huggingface.py and tests/foreign/test_dcp_safetensors.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import xxhash

from paddle_flexckpt.catalog import (
    Catalog,
    CatalogBuilder,
    CorruptCheckpointError,
    Problem,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.catalog.dtypes import CODES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import INDEX_FILE, TENSOR_FILE, ForeignCheckpoint, Listing, Reader, more_than_one
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.media.file_names import check_member
from paddle_flexckpt.native.json_cursor import JsonCursor
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.safetensors_header import StoredTensor, read_header
from paddle_flexckpt.native.save_names import save_of

MODEL_FILE = "model" + TENSOR_FILE
_NUMBERED = re.compile(r".*-\d+-of-\d+\.safetensors", re.ASCII)
_NAMES = {code: dtype.name for code, dtype in CODES.items()}
# Numpy's types for Paddle's arrays: bfloat16 is numpy's uint16 there, and is written as that.
_NUMPY_NAMES = {**_NAMES, "U16": "bfloat16"}
# The index of a model of 100,000 tensors has about 10 MB.
MAX_INDEX_BYTES = 64 << 20
# Long enough for every file name, in JSON's longest spelling.
_MAX_NAME_BYTES = 6 * 255
_FORMAT = "format"
_EXPERT = re.compile(r"\bexperts?\b")
PADDLE_FORMAT = "np"
# A rank's file of torch's HuggingFaceStorageWriter, and the entry of its header with the first element of each chunk.
_SHARD_FILE = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors", re.ASCII)
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_MOST_OFFSET = 1 << 60


class TensorFile(NamedTuple):
    """A safetensors file.

    Attributes:
        name: The file's name in the directory.
        size: The number of bytes of the file.
        tensors: The tensors by name.
        info: The file's ``__metadata__``.
        digest: A hash of the header.
    """

    name: str
    size: int
    tensors: Mapping[str, StoredTensor]
    info: Mapping[str, str]
    digest: bytes

    @property
    def is_of_paddle(self) -> bool:
        """Return whether Paddle's tensors were written, by way of numpy, as PaddleNLP does."""
        return self.info.get(_FORMAT) == PADDLE_FORMAT

    def dtype(self, tensor: str) -> str:
        """Return the name of a tensor's element type."""
        return (_NUMPY_NAMES if self.is_of_paddle else _NAMES)[self.tensors[tensor].code]


class TensorIndex(NamedTuple):
    """An index of safetensors files.

    Attributes:
        files: The file's name of each tensor; None if the index has no such table.
        settings: The other contents of the index.
        digest: A hash of the index.
    """

    files: Mapping[str, str] | None
    settings: Mapping[str, Any]
    digest: bytes


class Weights(NamedTuple):
    """Whole tensors.

    Attributes:
        files: Their files, by name.
        file_of: The file's name of each tensor.
        digest: A hash of the index.
        metadata: The index's ``metadata``.
    """

    files: Mapping[str, TensorFile]
    file_of: Mapping[str, str]
    digest: bytes = b""
    metadata: Mapping[str, Any] = {}

    @property
    def is_delta(self) -> bool:
        """Return whether the files have the changes since another version (docs/rollout.md), and no tensors.

        The index says so; where it was damaged, files of frames with their checksums do.
        """
        return "delta_encoding" in self.metadata or any(
            file.tensors and all(each.code == "U8" and name in file.info for name, each in file.tensors.items())
            for file in self.files.values()
        )


class StoredShard(NamedTuple):
    """A tensor in a file.

    Attributes:
        key: The tensor's key in the catalog.
        tensor: Its name in the file.
        file: The file.
        global_shape: The shape of the whole, if the tensor is a part.
        offset: The first element of the part in the whole.
        rank: The rank that has saved it.
    """

    key: str
    tensor: str
    file: TensorFile
    global_shape: Sequence[int] | None = None
    offset: Sequence[int] | None = None
    rank: int = 0


def read_tensor_file(backend: Backend, name: str, named_by: str | None = None) -> TensorFile:
    """Read the header of a safetensors file; ``named_by`` is the file that names it, for errors.

    Raises:
        CorruptCheckpointError: It is missing or damaged, or the name leads out of the directory.
    """
    path = backend.where(name)
    try:
        with backend.open(name) as file:
            header = read_header(file, path)
            digest = xxhash.xxh3_128_digest(header.text)
            return TensorFile(name, file.size, header.tensors, header.metadata, digest)
    except FileNotFoundError as error:
        who = f"; {named_by} names it" if named_by else ""
        remedy = "Remedy (FC304): restore the file or load another checkpoint"
        raise CorruptCheckpointError(f"{path} is missing{who}. {remedy}") from error


def read_tensor_index(backend: Backend, name: str) -> TensorIndex:
    """Read an index.

    Raises:
        CorruptCheckpointError: It is missing or not such JSON, names a file elsewhere, or is larger than
            :data:`MAX_INDEX_BYTES`.
    """
    path = backend.where(name)
    try:
        with backend.open(name) as file:
            if file.size > MAX_INDEX_BYTES:
                raise CorruptCheckpointError(
                    f"{path} has {file.size} bytes; an index has no more than {MAX_INDEX_BYTES}. Remedy (FC305): "
                    "restore it"
                )
            text = file.read(0, file.size)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing. Remedy (FC304): restore it or load another checkpoint"
        ) from error
    files: dict[str, str] | None = None
    settings: dict[str, Any] = {}
    cursor = JsonCursor(text)
    try:
        for entry in cursor.entries():
            if entry != "weight_map":
                settings[entry] = cursor.value(with_fractions=True)
                continue
            files = {}
            seen: dict[str, str] = {}
            for tensor in cursor.entries():
                file_name = cursor.string(_MAX_NAME_BYTES).removeprefix("./")
                # One object for each file's name, however many tensors the file has.
                files[tensor] = seen.setdefault(file_name, file_name)
            for file_name in seen:
                check_member(path, file_name)
        cursor.end()
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path} is not an index of safetensors files: {error}. Remedy (FC305): restore it"
        ) from error
    return TensorIndex(files, settings, xxhash.xxh3_128_digest(text))


def read_weights(backend: Backend, source: str, *more: str, wanted: Collection[str] | None = None) -> Weights:
    """Read the headers of an index's files, and compare them with the index; or those of one file, or of several.

    ``wanted``: names of tensors; of an index's files, those without any of them are left out. None wants all.

    Raises:
        CorruptCheckpointError: A file is missing or damaged, or index and files contradict each other.
        ValidationError: Several files have the same tensor.
    """
    if not source.endswith(INDEX_FILE):
        found = map_files(backend, lambda name: read_tensor_file(backend, name), [source, *more])
        file_of: dict[str, str] = {}
        for file in found:
            twice = sorted(file_of.keys() & file.tensors.keys())
            if twice or file.is_of_paddle != found[0].is_of_paddle:
                both = f" ({listed(twice)} in {file_of[twice[0]]} and {file.name})" if twice else " of several programs"
                raise _several_sets(backend.path, [source, *more], both)
            file_of.update(dict.fromkeys(file.tensors, file.name))
        return Weights({file.name: file for file in found}, file_of)
    index = read_tensor_index(backend, source)
    path, metadata = backend.where(source), index.settings.get("metadata", {})
    if index.files is None or not isinstance(metadata, dict):
        what = "no weight_map" if index.files is None else "metadata that is no object"
        raise CorruptCheckpointError(f"{path} has {what}. Remedy (FC305): restore it")
    names = sorted({name for tensor, name in index.files.items() if wanted is None or tensor in wanted})
    files = dict(zip(names, map_files(backend, lambda name: read_tensor_file(backend, name, path), names)))
    problems = []
    for tensor, name in index.files.items():
        if name in files and tensor not in files[name].tensors:
            problems.append(Problem("a file lacks a tensor that the index has in it", tensor, file=backend.where(name)))
    for name, file in files.items():
        for tensor in file.tensors:
            if index.files.get(tensor) != name and not _is_shared(tensor, file, files.get(index.files.get(tensor, ""))):
                got = index.files.get(tensor)
                what = f"a file has a tensor that the index {'lacks' if got is None else 'has elsewhere'}"
                problems.append(Problem(what, tensor, file=backend.where(name), expected=got and name, got=got))
    if problems:
        error = ValidationError(problems, f"{path} and its files do not fit each other. Remedy (FC304): restore them")
        raise CorruptCheckpointError(str(error))
    return Weights(files, index.files, index.digest, metadata)


def _is_shared(tensor: str, file: TensorFile, other: TensorFile | None) -> bool:
    """Return whether a tensor is in two files of PaddleNLP's because two stages of a pipeline share it.

    The index has one of them. This does not apply to experts: those of several ranks may have the same name.
    """
    if other is None or not (file.is_of_paddle and other.is_of_paddle) or _EXPERT.search(tensor):
        return False
    here, there = file.tensors[tensor], other.tensors.get(tensor)
    return there is not None and (here.code, here.shape) == (there.code, there.shape)


def find_weights(path: str, names: Sequence[str]) -> list[str]:
    """Find the index or file of a directory's weights, or all files where there is no index; none if it has none.

    An index comes first, then ``model.safetensors``, then all files. Files that the index does not name are ignored,
    and so are others beside ``model.safetensors``.

    Raises:
        ValidationError: There is more than one candidate.
        CorruptCheckpointError: There are numbered files, and no index.
    """
    indices = sorted(name for name in names if name.endswith(INDEX_FILE))
    # A file named as a rank's data file belongs to a save without a manifest.
    files = sorted(name for name in names if name.endswith(TENSOR_FILE) and save_of(name) is None)
    if MODEL_FILE in files:
        choices = [*indices, MODEL_FILE]
    else:
        choices = indices or files
    numbered = [*filter(_NUMBERED.fullmatch, choices)]
    if choices and not indices and numbered == choices:
        raise CorruptCheckpointError(
            f"{path} has numbered safetensors files ({listed(choices)}) without their index. Remedy (FC304): restore "
            "the index"
        )
    if len(choices) > 1 and (indices or numbered):
        raise _several_sets(path, choices)
    return choices


def _several_sets(path: str, choices: Sequence[str], why: str = "") -> ValidationError:
    return ValidationError(
        f"{path} has several sets of safetensors files: {listed(choices)}{why}. Remedy (FC301): give the path of the "
        f"one that is meant, such as {path}/{choices[0]}"
    )


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    backend = listing.backend
    shards = sorted(filter(_SHARD_FILE.fullmatch, listing.names))
    sources = [listing.file] if listing.file else find_weights(backend.path, sorted(set(listing.names) - set(shards)))
    if shards and sources and not listing.file:  # the consolidated copy of what ranks have written, for example
        raise more_than_one(backend.path, [shards[0], sources[0]])
    if not sources:
        return ForeignCheckpoint("torch_dcp", partial(_read_shards_manifest, backend, shards)) if shards else None
    weights = read_weights(backend, *sources)
    if weights.is_delta:
        raise ValidationError(
            f"{backend.path} has a delta of weights, which is read by the path of its directory beside the version "
            "that it is based on. Remedy (FC301): give the path of the directory weight_v..."
        )
    of_paddle = any(file.is_of_paddle for file in weights.files.values())
    origin = "unified_checkpoint" if of_paddle else "huggingface"
    return ForeignCheckpoint(origin, partial(_manifest_of_weights, backend, weights, origin))


def _manifest_of_weights(backend: Backend, weights: Weights, origin: str) -> Manifest:
    """Make the manifest of whole tensors under their stored names."""
    shards = [StoredShard(tensor, tensor, weights.files[name]) for tensor, name in weights.file_of.items()]
    return manifest_of_files(backend, shards, weights.files.values(), [weights.digest], origin)


def manifest_of_files(
    backend: Backend,
    shards: Iterable[StoredShard],
    files: Iterable[TensorFile],
    digests: Iterable[bytes],
    origin: str,
    world_size: int = 1,
) -> Manifest:
    """Make a manifest, without checksums, of another program's safetensors files.

    ``shards`` are those that the files hold, ``digests`` the hashes of other files that were read, and ``world_size``
    the number of ranks that took part in the save, as far as it is known.

    Raises:
        CorruptCheckpointError: Shards of one tensor contradict each other.
    """
    files = list(files)
    builders: dict[tuple[str, int], CatalogBuilder] = {}
    for shard in shards:
        stored = shard.file.tensors[shard.tensor]
        builder = builders.setdefault((shard.file.name, shard.rank), CatalogBuilder(shard.rank, shard.file.name))
        whole = stored.shape if shard.global_shape is None else shard.global_shape
        offset = (0,) * len(stored.shape) if shard.offset is None else shard.offset
        dtype = shard.file.dtype(shard.tensor)
        builder.add(shard.key, dtype, whole, offset, stored.shape, byte_offset=stored.begin)
    catalog: Catalog = concat([builder.build() for builder in builders.values()])
    problems = validate_shards(catalog)
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{backend.path} contradicts itself")))
    sizes = {file.name: file.size for file in files}
    seen = xxhash.xxh3_128()
    for digest in [*digests, *(file.digest for file in files)]:
        seen.update(digest)
    return Manifest.of_foreign(origin, catalog, sizes, seen.hexdigest(), 0, world_size)


def _read_shards_manifest(backend: Backend, names: Sequence[str]) -> Manifest:
    """Read the files of ranks as a manifest without checksums."""
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
                    "Remedy (FC304): restore the files of one save"
                )
            whole[:] = (max(size, begin + extent) for size, begin, extent in zip(whole, offset, shape))
    shards = []
    for file, places in zip(files, offsets):
        match = _SHARD_FILE.fullmatch(file.name)
        rank = int(match[1]) - 1 if match else 0
        shards += [StoredShard(key, key, file, wholes[key], offset, max(rank, 0)) for key, offset in places.items()]
    size = 1 + max((shard.rank for shard in shards), default=0)
    manifest = manifest_of_files(backend, shards, files, [], "torch_dcp", size)
    problems = validate_coverage(manifest.catalog, group_replicas(manifest.catalog)).problems
    if problems:
        error = ValidationError(problems, f"{backend.path} lacks the files of some ranks, or has those of two saves")
        raise CorruptCheckpointError(f"{error}. Remedy (FC304): restore the files of one save")
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
            f"{where}: {_INFO} in its header does not place the chunks: {error}. Remedy (FC305): restore the file"
        ) from error
    return places


HUGGING_FACE = Reader(_detect)
