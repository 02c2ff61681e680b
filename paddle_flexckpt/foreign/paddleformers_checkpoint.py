"""Read FlexCheckpoints of PaddleFormers: one checkpoint in several directories of Paddle's own format.

``model_state``, ``optimizer_state`` and ``master_weight`` have keys of their own; ``ema_state`` repeats them, and so
has its name in front of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError, concat
from paddle_flexckpt.foreign.paddle_checkpoint import paddle_ids, read_paddle_manifest
from paddle_flexckpt.media.backend import Backend, inner
from paddle_flexckpt.native.manifest import Manifest

# Only the last of them has keys that another has.
STATE_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")
EMA_DIRECTORY = "ema_state"


def paddleformers_directories(backend: Backend, directories: Sequence[str]) -> list[str]:
    """Return the inner directories that make up a FlexCheckpoint of PaddleFormers; none if it is none."""
    there = [name for name in STATE_DIRECTORIES if name in directories]
    if not any(paddle_ids(inner(backend, name)) for name in there):
        return []
    # Averages without metadata are parts whose places only the run that wrote them knows.
    averages = EMA_DIRECTORY in directories and paddle_ids(inner(backend, EMA_DIRECTORY))
    return [*there, EMA_DIRECTORY] if averages else there


def read_paddleformers_manifest(backend: Backend, directories: Sequence[str], unique_id: int | None = None) -> Manifest:
    """Read several directories as one manifest without checksums; its files have their directory in front.

    Args:
        backend: The directory that has them.
        directories: Their names.
        unique_id: The id in each of them; None takes the highest of the first.

    Raises:
        ValidationError: There is no such checkpoint, or its metadata contradicts itself.
        CorruptCheckpointError: One of the directories has no such checkpoint, a file is damaged, missing, or not what
            the metadata says, or two directories have the same key; UnsafePickleError where a pickle is more than data.
    """
    ids = {name: paddle_ids(inner(backend, name)) for name in directories}
    if unique_id is not None and not any(unique_id in found for found in ids.values()):
        raise ValidationError([f"{backend.path} has no checkpoint with id {unique_id}; ids by directory: {ids}"])
    chosen = max(next(found for found in ids.values() if found)) if unique_id is None else unique_id
    manifests = []
    for name in directories:
        if chosen not in ids[name]:
            raise CorruptCheckpointError(
                f"{backend.where(name)} has no {chosen}.metadata, which the other directories have: the save was not "
                "finished. Remedy: load another checkpoint"
            )
        manifests.append(_renamed(read_paddle_manifest(inner(backend, name), chosen), name))
    seen: dict[str, str] = {}
    problems = []
    for name, manifest in zip(directories, manifests):
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
