"""Explain a missing checkpoint: what the directory holds instead."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paddle_flexckpt.foreign.paddle_checkpoint import paddle_ids
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.media.backend import Backend, exists, map_files
from paddle_flexckpt.native.save_names import MANIFEST, save_of

# Weights in pickles of tensors, which no reader here takes.
_PICKLES = (".pdparams", ".pdopt", ".bin", ".pt", ".pth")
_MOST_DIRECTORIES = 20


def explain_missing(backend: Backend, ids: Sequence[int], unique_id: int | None) -> str:
    """Return the problem and its remedy in a sentence.

    Args:
        backend: The directory.
        ids: Of the checkpoints in it that have a manifest.
        unique_id: The id that is wanted; None stands for any.
    """
    path = backend.path
    if not exists(backend):
        if backend.has_path and os.path.exists(path):
            return f"{path} is not a directory. Remedy: give the checkpoint's directory, not a file in it"
        return f"{path} does not exist. Remedy: correct the path"
    names = backend.names()
    begun = sorted({save[0] for save in map(save_of, names) if save} - set(ids))
    wanted = begun if unique_id is None else [unique_id] if unique_id in begun else []
    if wanted:
        return (
            f"{path} has an unfinished save (id {', '.join(map(str, wanted))}): its manifest is missing, so it was "
            f"never committed; complete ids here: {ids or 'none'}. Remedy: load another checkpoint"
        )
    if ids:
        return f"{path} has no checkpoint with id {unique_id}; complete ids here: {ids}"
    if any(name.endswith(".metadata") and name != PADDLE_METADATA for name in names):
        return (
            f"{path} is no checkpoint of Paddle's own save_state_dict that can be read: its .metadata files have the "
            f"ids {paddle_ids(backend) or 'none'}. Remedy: give the path and id of a complete save"
        )
    start = f"{path} is not a checkpoint: there is no *.manifest file in it"
    inside = _directories_with_manifests(backend)
    if inside:
        return f"{start}, but in {', '.join(inside)}. Remedy: give the path of that directory"
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return (
            f"{start}, nor a safetensors file, but {', '.join(pickles[:3])}. Remedy: have their writer save "
            "safetensors files (PaddleNLP: --unified_checkpoint 1); if there is no model in them, correct the path"
        )
    return f"{start}. Remedy: correct the path"


def _directories_with_manifests(backend: Backend) -> list[str]:
    names = sorted(backend.names("directories"))[:_MOST_DIRECTORIES]
    found = map_files(backend, lambda name: any(map(MANIFEST.fullmatch, backend.child(name).names())), names)
    return [name for name, has in zip(names, found) if has]
