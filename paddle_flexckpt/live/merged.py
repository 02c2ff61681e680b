"""load_merged_state_dict: a checkpoint as whole tensors in one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.engine.files import Files
from paddle_flexckpt.engine.mapping import maybe_fused, stored, whole_mapping
from paddle_flexckpt.engine.options import LoadOptions
from paddle_flexckpt.engine.transfer import Transfer
from paddle_flexckpt.foreign.formats import SourceDirectory, shown
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.targets import describe_targets
from paddle_flexckpt.live.tensor_memory import empty_on_host
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.report import order_warning

logger = logging.getLogger("paddle_flexckpt")

_MAX_AXES = 9


def load_merged_state_dict(
    path: Location,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    *,
    verify: bool | VerifyMode = "read",
    use_replicas: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into whole, fresh tensors on the CPU; no other rank takes part.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        prefix: Only keys that start with this and a dot, which are taken off; by default all keys but a run's extra
            state. With ``aoa_config``, keys are those after the transformation.
        unique_id: The checkpoint's id; None takes the highest.
        offload: Accepted for compatibility: the tensors are on the CPU always.
        aoa_config: AOA statements, as in :func:`load_state_dict`. What they define and do not touch is what is read.
        safetensors: Accepted for compatibility.
        verify: Which bytes are compared with their checksums, as in :func:`load_state_dict`.
        use_replicas: Whether replicas are read where something is damaged, likewise.

    Returns:
        Names to Paddle tensors, sorted by name; fused parameters in natural order (all of q, then of k, then of v).

    Raises:
        ValidationError: There is no such checkpoint, or the statements or ``verify`` do not fit.
        CorruptCheckpointError: It is damaged.
        UnreadableCheckpointError: The storage does not let it be read.
    """
    directory = SourceDirectory(path)
    start = f"{prefix}." if prefix else ""
    with reading(directory.path), LockedManifest(directory, unique_id) as manifest:
        mapping = None if aoa_config is None else whole_mapping(aoa_config, manifest.catalog)
        # Extra state has to be asked for, by its prefix.
        there = stored(manifest.catalog, bool(start)) if mapping is None else mapping.output_infos()
        names = [key for key in sorted(there) if key.startswith(start)]
        _check_complete(manifest.catalog, names if mapping is None else mapping.source_names(names))
        _check_axes({key: len(there[key].shape) for key in names})
        tensors = {key: empty_on_host(there[key].shape, there[key].dtype) for key in names}
        if mapping is not None and mapping.unfed:
            first = sorted(mapping.unfed)[0]
            logger.warning(
                f"nothing feeds {len(mapping.unfed)} keys such as {first!r} ({mapping.provenance.get(first)})"
            )
        unordered = maybe_fused(manifest.catalog, set(names), mapping) if mapping is not None else []
        if unordered:  # what no statement makes is told by the load below
            logger.warning(order_warning(str(path), unordered))
        options = LoadOptions(
            unique_id=manifest.unique_id,
            aoa_config=mapping,  # compiled already; the tensors are what it makes
            verify=verify,
            use_replicas=use_replicas,
            optimizer_states="ignore",  # the prefix, or the statements, have chosen
        )
        context = f"cannot load from {shown(path)}"
        Transfer(
            SoloCommunicator(), Files(path, options), lambda: describe_targets(tensors, 0), options, "merged", context
        ).run()
    return {name[len(start) :]: tensor for name, tensor in tensors.items()}


def empty_tensors(catalog: Catalog, names: Iterable[str]) -> dict[str, Any]:
    """Return a fresh tensor on the CPU for each of some keys of a checkpoint, of its whole shape."""
    there = stored(catalog, extra_state=True)
    names = list(names)
    _check_complete(catalog, names)
    return {name: empty_on_host(there[name].shape, there[name].dtype) for name in names if name in there}


def _check_axes(axes: Mapping[str, int]) -> None:
    """Refuse what numpy arrays can have, and tensors of Paddle cannot."""
    problems: list[Problem | str] = [
        Problem(
            "a tensor of Paddle cannot have so many axes",
            key=key,
            expected=f"at most {_MAX_AXES}",
            got=count,
            remedy="give load_state_dict() an array of numpy as its target, or reshape it by an AOA statement",
        )
        for key, count in axes.items()
        if count > _MAX_AXES
    ]
    if problems:
        raise ValidationError(problems)


def _check_complete(catalog: Catalog, names: Iterable[str]) -> None:
    """Refuse tensors of which too little is there, before memory is taken for a shape that is only declared."""
    there, declared = np.zeros(len(catalog.keys)), np.zeros(len(catalog.keys))
    np.add.at(there, catalog.key, catalog.size)
    # In floating point: a product of extents that are no tensor's must not wrap around.
    declared[catalog.key] = catalog.global_shape.astype(np.float64).prod(axis=1)
    wanted = set(names)
    problems = [
        Problem(
            "the checkpoint does not hold all of a tensor",
            key=catalog.keys[key],
            expected=f"{declared[key]:.0f} elements",
            got=f"{there[key]:.0f}",
            remedy="load another checkpoint, or leave this key out",
        )
        for key in np.flatnonzero(there < declared).tolist()
        if catalog.keys[key] in wanted
    ]
    if problems:
        raise ValidationError(problems)
