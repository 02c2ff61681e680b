"""Load transforms that only dequantize, replaced by AOA statements, with which a rank reads just what it needs.

The known ones are PaddleFleet's (``HFDequantLoadTransform``): their ``quan_metadata`` has the weight, the scale and the
method of each logical tensor. FP8 weights with floating-point scales of whole blocks become ``dequant="fp8"``; all
other tensors are left to the transform.

Tested in tests/loading/test_transforms.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.aoa.statements import read_config
from paddle_flexckpt.catalog.dtypes import is_float
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.agreement import check_same
from paddle_flexckpt.transfer.mapping import tensor_infos
from paddle_flexckpt.transfer.options import LoadOptions

# Names that a statement can have as they are.
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


class RestOfTransform:
    """A transform that leaves some of its tensors out."""

    def __init__(self, transform: Any, without: Collection[str]) -> None:
        """Take the transform, and the names of those that are made elsewhere."""
        self.source_keys, self.apply = transform.source_keys, transform.apply
        self.read_plan = getattr(transform, "read_plan", None)
        self._transform, self._without = transform, without

    def logical_metadata(self) -> dict[str, Any]:
        """Return what is left."""
        return {key: each for key, each in self._transform.logical_metadata().items() if key not in self._without}


def with_statements(options: LoadOptions, path: Location, comm: Communicator, context: str) -> LoadOptions:
    """Return options with statements in place of the tensors that a transform dequantizes, the same on every rank.

    It is a step that all ranks take together, if there is a transform whose tensors may be made by statements.

    Raises:
        ValidationError: Ranks have different transforms, or there is no such checkpoint; the same on every rank.
        CheckpointError: The checkpoint cannot be read; the same on every rank.
    """
    transform = options.load_transform
    known = getattr(transform, "quan_metadata", None)
    if known is None:
        return options
    given: tuple[str, ...] = ()

    def look() -> tuple[dict[str, str], bytes]:
        nonlocal given
        options.check()
        if options.aoa_config is not None:
            config = read_config(options.aoa_config)
            if config.reverse:  # statements put before these would be inverted too
                return {}, b"{}"
            given = config.statements
        directory = SourceDirectory(path)
        with reading(directory.path):
            infos = tensor_infos(directory.read_manifest(options.unique_id).catalog)
        found = dequant_statements(known, transform.logical_metadata(), infos)
        return found, json.dumps({"load_transform": found}).encode()

    statements, answers = comm.together(look, context)
    check_same(answers, context, comm.ranks)
    if not statements:
        return options
    config = {"aoa_statements": [*statements.values(), *given]}
    rest = RestOfTransform(transform, statements.keys())
    return replace(options, aoa_config=config, load_transform=rest if rest.logical_metadata() else None)


def dequant_statements(known: Any, logical: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return a statement for each logical tensor that one makes bit for bit as the transform does.

    Args:
        known: The transform's ``quan_metadata``, with ``relations`` by logical name and ``groups`` by name.
        logical: Its ``logical_metadata()``.
        stored: The checkpoint's tensors.
    """
    found = {}
    for key, relation in sorted(known.relations.items()):
        group, parts = known.groups[relation.group_name], dict(relation.components)
        weight, scale = stored.get(parts.pop("qweight", "")), stored.get(parts.pop("scale", ""))
        if weight is None or scale is None or parts or key not in logical or group.quant_method != "fp8_block":
            continue
        block, dtype = tuple(group.block_shape), str(logical[key].dtype)
        names = [relation.components["qweight"], relation.components["scale"], key]
        fits = (
            tuple(group.block_axes or ()) == tuple(range(len(block)))
            and len(block) == len(weight.shape)
            and tuple(logical[key].global_shape) == tuple(weight.shape)
            and weight.dtype == "float8_e4m3fn"
            and is_float(scale.dtype)
            and is_float(dtype)
        )
        if fits and all(map(_NAME.fullmatch, names)):
            weight_name, scale_name, _ = names
            shape = ", ".join(map(str, block))
            found[key] = f'{weight_name}, {scale_name} -> {key}, dequant="fp8", block="[{shape}]", dtype="{dtype}"'
    return found
