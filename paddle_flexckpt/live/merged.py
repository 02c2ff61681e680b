"""load_merged_state_dict: a checkpoint as whole tensors in one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.engine.files import Files
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import ALONE, UNUSED, WholeOptions, takes
from paddle_flexckpt.engine.targets import Targets
from paddle_flexckpt.engine.transfer import Transfer
from paddle_flexckpt.engine.whole_tensors import CHOSEN
from paddle_flexckpt.foreign.formats import shown
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.targets import describe_targets
from paddle_flexckpt.live.tensor_memory import empty_on_host
from paddle_flexckpt.media.backend import Location

logger = logging.getLogger("paddle_flexckpt")

_MAX_AXES = 9


@takes(WholeOptions, path=ALONE, offload=UNUSED, safetensors=UNUSED)
def load_merged_state_dict(
    path: Location,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Read a checkpoint into whole, fresh tensors on the CPU; no other rank takes part.

    All keys are read but a run's extra state, which has to be asked for by its prefix. With AOA statements, what they
    define and do not touch is read.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        offload: Accepted for compatibility: the tensors are on the CPU always.
        safetensors: Accepted for compatibility.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.engine.options.WholeOptions`.

    Returns:
        Names to Paddle tensors, sorted by name; fused parameters in natural order (all of q, then of k, then of v).

    Raises:
        ValidationError: There is no such checkpoint, or the statements or ``verify`` do not fit.
        CorruptCheckpointError: It is damaged.
        UnreadableCheckpointError: The storage does not let it be read.
    """
    asked = WholeOptions(prefix=prefix, unique_id=unique_id, aoa_config=aoa_config, **options)
    source, tensors = Files(path, asked), dict[str, Any]()

    def describe() -> Targets:
        mapping = None if aoa_config is None else whole_mapping(aoa_config, source.catalog)
        tensors.update(_choose(source.catalog, mapping, asked.start))
        return replace(describe_targets(tensors, 0), mapping=mapping)

    context = f"cannot load from {shown(path)}"
    Transfer(SoloCommunicator(), source, describe, CHOSEN, "load_merged_state_dict", context).run()
    return {name[len(asked.start) :]: tensor for name, tensor in tensors.items()}


def _choose(source: Catalog, mapping: TensorMapping | None, start: str) -> dict[str, Any]:
    """Return a fresh tensor for each key that starts so, sorted by name."""
    there = tensor_infos(source, mapping, extra_state=mapping is None and bool(start))
    names = [key for key in sorted(there) if key.startswith(start)]
    _check_complete(source, names if mapping is None else mapping.source_names(names))
    check_axes({key: len(there[key].shape) for key in names})
    if mapping is not None and mapping.unfed:
        first = sorted(mapping.unfed)[0]
        logger.warning(f"nothing feeds {len(mapping.unfed)} keys such as {first!r} ({mapping.provenance.get(first)})")
    return {key: empty_on_host(there[key].shape, there[key].dtype) for key in names}


def empty_tensors(catalog: Catalog, names: Iterable[str]) -> dict[str, Any]:
    """Return a fresh tensor on the CPU for each of some keys of a checkpoint, of its whole shape."""
    there = tensor_infos(catalog, extra_state=True)
    names = list(names)
    _check_complete(catalog, names)
    return {name: empty_on_host(there[name].shape, there[name].dtype) for name in names if name in there}


def check_axes(axes: Mapping[str, int]) -> None:
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
