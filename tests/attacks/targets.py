"""What reads bytes that somebody else may have written, as functions of those bytes, and what each may do.

Whatever the bytes are: an error of this library or a result, no other exception, no long time, and no more memory than
twice the bytes and :data:`SPARE_BYTES`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt import foreign
from paddle_flexckpt.catalog import CheckpointError, group_replicas, validate_coverage, validate_shards
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_checkpoint import read_paddle_manifest
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.repair import rebuild_manifest
from paddle_flexckpt.native.replica_items import StoredReplicas
from paddle_flexckpt.native.safetensors_header import header_bytes, parse_header
from paddle_flexckpt.native.verify import verify_files
from tests.attacks import seeds
from tests.ramdisk import memory_directory

# What is imported at its first need is no file's cost.
importlib.import_module("numpy.ma")
for _module in pkgutil.iter_modules(foreign.__path__, f"{foreign.__name__}."):
    importlib.import_module(_module.name)

# For the interpreter, tracebacks, and what is made of a name or a column before it is looked at.
SPARE_BYTES = 1 << 20
MOST_SECONDS = 5.0
PLAIN = (int, float, complex, bool, str, type(None), np.ndarray)


@dataclass(frozen=True)
class Target:
    """A reader of bytes.

    Attributes:
        name: Of the target, and of its directory in the corpus.
        read: Reads the bytes; a CheckpointError refuses them.
        seeds: Bytes that are accepted, and others worth beginning with.
        words: Parts of them that a change may put anywhere.
        has_length: Whether the first 8 bytes are the length of a text that follows them.
        spare_bytes: Memory that may be used on top of twice the bytes.
    """

    name: str
    read: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...]
    has_length: bool = False
    spare_bytes: int = SPARE_BYTES


def outcome(target: Target, data: bytes) -> CheckpointError | None:
    """Reads bytes; returns the error that refuses them, or None if they are accepted.

    Raises:
        AssertionError: It took too much time or memory, or the error says too little or too much.
        Exception: The reader let another exception through.
    """
    error = None
    tracemalloc.start()
    begin = time.process_time()
    try:
        target.read(data)
    except CheckpointError as refused:
        error = refused
    finally:
        seconds, memory = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert memory <= 2 * len(data) + target.spare_bytes, f"{memory} bytes of memory for {len(data)} bytes"
    assert seconds <= MOST_SECONDS, f"{seconds} s for {len(data)} bytes"
    if error is not None:
        assert 20 < len(str(error)) < 20_000, f"an error of {len(str(error))} characters"
        # Without a traceback, which would keep what was read alive.
        error.__traceback__ = None
    return error


def walk(value: Any) -> None:
    """Visits all that is in a result; a bomb would not let this end."""
    stack = [value]
    while stack:
        each = stack.pop()
        kind = type(each)
        if kind in (list, tuple):
            stack.extend(each)
        elif kind is dict:
            stack.extend(each)
            stack.extend(each.values())
        elif kind in (Metadata, LocalTensorIndex, LocalTensorMetadata):
            stack.extend(vars(each).values())
        else:
            assert kind in PLAIN, kind


def _read_pickle(data: bytes) -> None:
    walk(load_pickle(data))


def _read_header(data: bytes) -> None:
    length = header_bytes(data[:8], len(data), "the file")
    header = parse_header(data[8 : 8 + length], len(data), "the file")
    for tensor in header.tensors.values():
        assert 8 + length <= tensor.begin <= tensor.end <= len(data)


def _read_manifest(data: bytes) -> None:
    """As it is, and with a digest that is right: whoever makes a malicious manifest computes that."""
    sealed = seeds.seal(data)
    try:
        Manifest.decode(data, "the manifest")
    except CheckpointError:
        if sealed == data:
            raise
    manifest = Manifest.decode(sealed, "the manifest")
    catalog = manifest.catalog
    if validate_shards(catalog):
        return
    groups = group_replicas(catalog)
    validate_coverage(catalog, groups)
    replicas = StoredReplicas(manifest)
    for row in range(len(catalog)):
        assert row not in replicas.others(row)


@contextmanager
def _in_place(path: Path, data: bytes) -> Iterator[Path]:
    path.write_bytes(data)
    yield path.parent


@cache
def _directory(kind: str) -> Path:
    """A directory of one of the targets, for the life of the process, with all files but the one that is read."""
    stack = ExitStack()
    path = stack.enter_context(memory_directory())
    # At the end of the process, of a worker too.
    Finalize(None, stack.close, exitpriority=1)
    for name, content in seeds.FILES[kind]().items():
        (path / name).write_bytes(content)
    return path


def _read_metadata(data: bytes) -> None:
    with _in_place(_directory("metadata") / "0.metadata", data) as path:
        catalog = read_paddle_manifest(path).catalog
    validate_coverage(catalog, group_replicas(catalog))


def _read_distcp(data: bytes) -> None:
    with _in_place(_directory("distcp") / "0_0.distcp", data) as path:
        read_paddle_manifest(path)


def _read_foreign_safetensors(data: bytes) -> None:
    with _in_place(_directory("foreign") / "0_0.safetensors", data) as path:
        read_paddle_manifest(path)


def _read_manifest_of(path: Path) -> None:
    """By the names of what is there, as every command does."""
    directory = SourceDirectory(path)
    assert directory.origin() != "native"
    catalog = directory.read_manifest().catalog
    assert not validate_shards(catalog)
    for name in catalog.files:
        assert "/" not in name


def _read_index(data: bytes) -> None:
    with _in_place(_directory("index") / "model.safetensors.index.json", data) as path:
        _read_manifest_of(path)


def _read_weights(data: bytes) -> None:
    with _in_place(_directory("weights") / "model.safetensors", data) as path:
        _read_manifest_of(path)


def _read_paddle_pickle(data: bytes) -> None:
    with _in_place(_directory("paddle_pickle") / "model.pdparams", data) as path:
        _read_manifest_of(path)


def _read_npz(data: bytes) -> None:
    with _in_place(_directory("npz") / "model.npz", data) as path:
        _read_manifest_of(path)


def _read_torch_metadata(data: bytes) -> None:
    with _in_place(_directory("torch_metadata") / ".metadata", data) as path:
        _read_manifest_of(path)


def _read_torch_items(data: bytes) -> None:
    with _in_place(_directory("torch_items") / "__0_0.distcp", data) as path:
        _read_manifest_of(path)


def _read_deepspeed(data: bytes) -> None:
    with _in_place(_directory("deepspeed") / seeds.DEEPSPEED_OPTIMIZER, data) as path:
        _read_manifest_of(path)


def _read_deepspeed_model(data: bytes) -> None:
    with _in_place(_directory("deepspeed_model") / "mp_rank_00_model_states.pt", data) as path:
        _read_manifest_of(path)


def _read_torch_shards(data: bytes) -> None:
    with _in_place(_directory("torch_shards") / seeds.TORCH_SHARD, data) as path:
        _read_manifest_of(path)


def _read_states_of_a_rank(data: bytes) -> None:
    with _in_place(_directory("unified") / "optimizer.tp01.safetensors", data) as path:
        _read_manifest_of(path)


def _read_data_file(data: bytes) -> None:
    """By a verification, which lists what is wrong, and by a repair, which refuses it."""
    with _in_place(_directory("data") / "0_0.safetensors", data) as path:
        manifest = SourceDirectory(path).read_manifest(0)
        found = verify_files(path, manifest)
        is_whole = data == seeds.FILES["data"]()["0_0.safetensors"]
        assert is_whole == (not found.problems), "damage that is not found"
        json.dumps([vars(problem) for problem in found.problems])
        rebuild_manifest(SourceDirectory(path), 0, True, None, True)


TARGETS = {
    target.name: target
    for target in (
        Target("header", _read_header, seeds.headers, seeds.HEADER_WORDS, has_length=True),
        Target("manifest", _read_manifest, seeds.manifests, seeds.MANIFEST_WORDS, has_length=True),
        # It is read block by block.
        Target("data_file", _read_data_file, seeds.data_files, seeds.DATA_FILE_WORDS, True, SPARE_BYTES + BLOCK_BYTES),
        Target("pickle", _read_pickle, seeds.pickles, seeds.PICKLE_WORDS),
        Target("metadata", _read_metadata, seeds.metadata, seeds.PICKLE_WORDS),
        Target("distcp", _read_distcp, seeds.distcp, seeds.PICKLE_WORDS),
        Target("paddle_pickle", _read_paddle_pickle, seeds.paddle_pickles, seeds.PICKLE_WORDS),
        Target("npz", _read_npz, seeds.archives, seeds.ARCHIVE_WORDS),
        Target("torch_metadata", _read_torch_metadata, seeds.torch_metadata, seeds.TORCH_WORDS),
        Target("torch_items", _read_torch_items, seeds.torch_items, seeds.TORCH_WORDS),
        Target("deepspeed", _read_deepspeed, seeds.deepspeed_optimizers, seeds.DEEPSPEED_WORDS),
        Target("deepspeed_model", _read_deepspeed_model, seeds.deepspeed_models, seeds.DEEPSPEED_WORDS),
        Target("torch_shards", _read_torch_shards, seeds.torch_shards, seeds.SHARD_WORDS, has_length=True),
        Target("index", _read_index, seeds.indices, seeds.INDEX_WORDS),
        Target("weights", _read_weights, seeds.weights, seeds.HEADER_WORDS, has_length=True),
        Target("rank_states", _read_states_of_a_rank, seeds.states_of_a_rank, seeds.HEADER_WORDS, has_length=True),
        Target("foreign_safetensors", _read_foreign_safetensors, seeds.foreign, seeds.HEADER_WORDS, has_length=True),
    )
}
