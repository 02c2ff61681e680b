"""Explain AOA statements for what users have in hand: checkpoints, state dicts, or catalogs.

Tested in tests/aoa/test_docs.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Union

from paddle_flexckpt import aoa
from paddle_flexckpt.aoa import AoaConfig
from paddle_flexckpt.catalog import Catalog, ValidationError, without_extra_state
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.live.state import open_state
from paddle_flexckpt.media.backend import Backend, Location

Tensors = Union[Location, Mapping[str, Any], Catalog]


def explain(aoa_config: AoaConfig, src: Tensors, dst: Tensors | None = None, keys: Iterable[str] = ()) -> str:
    """Tell where each target of a load with AOA statements would come from; nothing is read but the manifest.

    Args:
        aoa_config: The statements, as in :func:`load_state_dict`.
        src: The source: a checkpoint's directory, a state dict of this rank's shards, or a catalog.
        dst: The destination, likewise; None takes what the statements make and leave of the source.
        keys: Only these targets; all by default.

    Returns:
        A few lines for each target; at the end, what nothing feeds and what nothing uses.

    Raises:
        ValidationError: The statements are malformed or do not fit, or there is no such key.
    """
    return aoa.explain(aoa_config, _catalog(src), None if dst is None else _catalog(dst), keys)


def _catalog(tensors: Tensors) -> Catalog:
    """Return the shards of a checkpoint or of a state, without a run's extra state."""
    if isinstance(tensors, Catalog):
        return tensors
    if isinstance(tensors, Mapping):
        return open_state(tensors, 0).catalog
    if not isinstance(tensors, (str, os.PathLike, Backend)):
        raise ValidationError(
            [f"expected a checkpoint's directory, a state dict or a catalog; got a {type(tensors).__name__}"]
        )
    return without_extra_state(SourceDirectory(tensors).read_manifest(None).catalog)
