"""Read Hugging Face directories: ``model.safetensors``, or numbered files under an index. All tensors are whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.tensor_files import (
    INDEX_FILE,
    TENSOR_FILE,
    StoredShard,
    Weights,
    manifest_of_files,
)
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import save_of

MODEL_FILE = "model" + TENSOR_FILE
_NUMBERED = re.compile(r".*-\d+-of-\d+\.safetensors", re.ASCII)


def find_weights(path: str, names: Sequence[str]) -> str | None:
    """Find the index or file of a directory's weights; None if it has none.

    An index comes first, then ``model.safetensors``, then the only file there is. Files that the index does not name
    are not looked at, nor are others beside ``model.safetensors``.

    Args:
        path: The directory, for errors.
        names: Of its files.

    Raises:
        ValidationError: There is more than one that it could be.
        CorruptCheckpointError: There are numbered files, and no index.
    """
    indices = sorted(name for name in names if name.endswith(INDEX_FILE))
    # What is named as a rank's data file is that of a save without a manifest.
    files = sorted(name for name in names if name.endswith(TENSOR_FILE) and save_of(name) is None)
    if MODEL_FILE in files:
        choices = [*indices, MODEL_FILE]
    else:
        choices = indices or files
    if choices and not indices and all(map(_NUMBERED.fullmatch, choices)):
        raise CorruptCheckpointError(
            f"{path} has numbered safetensors files ({_listed(choices)}) without their index. Remedy: restore the index"
        )
    if len(choices) > 1:
        raise ValidationError(
            [
                f"{path} has several sets of safetensors files: {_listed(choices)}. Remedy: give the path of the one "
                f"that is meant, such as {path}/{choices[0]}"
            ]
        )
    return choices[0] if choices else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def manifest_of_weights(backend: Backend, weights: Weights, origin: str) -> Manifest:
    """Make the manifest of whole tensors under the names that they are stored under."""
    shards = [StoredShard(tensor, tensor, weights.files[name]) for tensor, name in weights.where.items()]
    return manifest_of_files(backend, shards, weights.files.values(), [weights.digest], origin)
