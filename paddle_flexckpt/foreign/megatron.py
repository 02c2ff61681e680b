"""Read checkpoints of Megatron-Core (``torch_dist``): DCP's files, ``metadata.json`` beside them, and its own keys.

Weights have Megatron's keys, with layers of one kind stacked along a first axis where it stacks them. States of the
optimizer that are fully reshardable have the shapes of their weights; they get this library's names. States that are
slices of a flat buffer (``dp_reshardable``) belong to one layout of tensor and pipeline parallelism, and the checkpoint
does not record the places of weights in the buffer: they are refused.

Tested in tests/foreign/test_megatron.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.torch_dcp import read_dcp_manifest
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.json_cursor import JsonCursor
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.optimizer_states import MASTER, OF_TORCH

MEGATRON_FILE = "metadata.json"
# A file in the directory above: it has the step of the last checkpoint, which is in iter_0000007 for 7.
LATEST_FILE = "latest_checkpointed_iteration.txt"
_MOST_BYTES = 1 << 14
_BACKEND = "sharded_backend"
_STATE = re.compile(r"optimizer\.state\.(exp_avg_sq|exp_avg|fp32_param|param)\.(.+)", re.DOTALL)
_NAMES = {**OF_TORCH, "param": MASTER, "fp32_param": MASTER}
# Keys of buckets; those of one rank's optimizer in a chain have a prefix.
_FLAT = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\..+", re.DOTALL)


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    # Beside DCP's files, or in their place.
    if MEGATRON_FILE not in listing.names or _backend_of(listing.backend) is None:
        return None
    return ForeignCheckpoint("megatron", partial(read_megatron_manifest, listing.backend))


def _explain(listing: Listing) -> str:
    if LATEST_FILE not in listing.names:
        return ""
    steps = sorted(name for name in listing.directories if name.startswith("iter_"))
    found = listed(steps) or "none"
    return f"{listing.no_checkpoint}, but those of Megatron in {found}. Remedy (FC301): give the path of one of them"


def read_megatron_manifest(backend: Backend) -> Manifest:
    """Read a checkpoint as a manifest without checksums; states have the names ``{weight}.moment1_0`` and so on.

    Raises:
        CorruptCheckpointError: A file is damaged; UnsafePickleError if it is more than data.
        ValidationError: It is in another format (zarr), or its states are in one that belongs to a layout.
    """
    where = backend.where(MEGATRON_FILE)
    kind = _backend_of(backend)
    if kind != "torch_dist":
        raise ValidationError(
            f"{where}: {_BACKEND} is {kind!r}, and of Megatron-Core's formats 'torch_dist' is read here. "
            "Remedy (FC701): load it in Megatron-Core and save it with --ckpt-format torch_dist"
        )
    manifest = read_dcp_manifest(backend)
    catalog = manifest.catalog
    flat = [key for key in catalog.keys if _FLAT.fullmatch(key)]
    if flat:
        what = f"dp_reshardable states of the optimizer (such as {listed(flat[:2])}) belong to one layout"
        remedy = "save with --dist-ckpt-optim-fully-reshardable, or without states by --no-save-optim"
        raise ValidationError(Problem(f"{what}, and are not read", flat[0], file=where, code="FC701", remedy=remedy))
    keys = tuple(map(_key, catalog.keys))
    if len(set(keys)) != len(keys):
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValidationError(
            f"{where}: two of Megatron's keys are {twice[:80]!r} here. Remedy (FC701): save it without the states of "
            "the optimizer (--no-save-optim)"
        )
    return replace(manifest, catalog=replace(catalog, keys=keys), origin="megatron")


def _key(key: str) -> str:
    match = _STATE.fullmatch(key)
    return f"{match[2]}.{_NAMES[match[1]]}" if match else key


def _backend_of(backend: Backend) -> str | None:
    """Return the format in ``metadata.json``; None if it is another program's."""
    where = backend.where(MEGATRON_FILE)
    with backend.open(MEGATRON_FILE) as file:
        text = file.read(0, min(file.size, _MOST_BYTES + 1))
    found = None
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        cursor = JsonCursor(text)
        for name in cursor.entries():
            value = cursor.value(with_fractions=True)
            if name == _BACKEND:
                if type(value) is not str:
                    raise ValueError(f"{_BACKEND} is no text")
                found = value
        cursor.end()
    except ValueError as error:
        if _BACKEND.encode() not in text:
            return None
        raise CorruptCheckpointError(f"{where} is damaged: {error}. Remedy (FC305): restore it") from error
    return found


MEGATRON = Reader(_detect, _explain)
