"""Mappings at work: AOA statements compiled for a load, and what a load asks of the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from paddle_flexckpt import aoa
from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import Mapping
from paddle_flexckpt.aoa.config import read_config
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.runtime.state import EXTRA_STATE


def compile_mapping(aoa_config: Any, source: Catalog, target: Catalog | None, master_weights: Any) -> Mapping:
    """The statements as a mapping.

    Args:
        aoa_config: A dict, a JSON text or the path of a JSON or YAML file; or what is compiled already.
        source: The shards of all sources.
        target: The targets of all ranks; None: they follow from the statements.
        master_weights: As in ``load_state_dict``.

    Raises:
        ValidationError: The statements do not fit.
    """
    if isinstance(aoa_config, Mapping):
        return aoa_config
    return aoa.compile_program(aoa_config, source, target, master_weights=master_weights)


def config_digest(aoa_config: Any, master_weights: str) -> str | None:
    """What tells one program from another, however it is given; None where there is none."""
    if aoa_config is None:
        return None
    if isinstance(aoa_config, Mapping):
        return "compiled"
    text = json.dumps([asdict(read_config(aoa_config)), master_weights])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def map_rows(maps: BoxMaps) -> dict[str, slice]:
    """The rows of every name that box maps define."""
    start = np.searchsorted(maps.target, np.arange(len(maps.targets) + 1)).tolist()
    return {name: slice(low, high) for name, low, high in zip(maps.targets, start[:-1], start[1:])}


def source_names(mapping: Mapping, names: Iterable[str]) -> set[str]:
    """The source keys that tensors are made of, directly or through what they are computed from."""
    rows = map_rows(mapping.maps)
    todo, seen, found = list(names), set(), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in mapping.tensors:
            found.add(name)
            continue
        sources = np.unique(mapping.maps.source[rows.get(name, slice(0, 0))])
        found.update(mapping.maps.sources[source] for source in sources.tolist())
        for region in mapping.regions.get(name, ()):
            if region.node is not None:
                todo += mapping.nodes[region.node].operands
    return found


def direct_rows(catalog: Catalog, mapping: Mapping | None, source: Catalog) -> np.ndarray:
    """Rows of a work's catalog into which pieces go straight: all but those of :func:`rounded_rows`."""
    return np.arange(len(catalog)) if mapping is None else np.flatnonzero(~rounded_rows(catalog, mapping, source))


def rounded_rows(catalog: Catalog, mapping: Mapping, source: Catalog) -> np.ndarray:
    """Bool per row: values that the statements cast to a dtype that is not the target's.

    What is moved is cast once, on its way into the target. These are rounded twice, so they cannot go straight there.
    """
    dtype_of_key = np.zeros(len(source.keys), dtype=np.int64)
    dtype_of_key[source.key] = source.dtype
    given = {name: source.dtypes[dtype_of_key[i]] for i, name in enumerate(source.keys)}
    maps, rows = mapping.maps, map_rows(mapping.maps)
    table = np.zeros((len(catalog.keys), len(catalog.dtypes)), dtype=bool)
    for i, name in enumerate(catalog.keys):
        if name not in mapping.tensors:
            continue
        made = mapping.tensors[name].dtype
        sources = np.unique(maps.source[rows.get(name, slice(0, 0))]).tolist()
        if any(given.get(maps.sources[s], made) != made for s in sources):
            table[i] = [dtype != made for dtype in catalog.dtypes]
    return table[catalog.key, catalog.dtype]


def stored(source: Catalog) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global shape and dtype of every key."""
    keys, rows = np.unique(source.key, return_index=True)
    return {
        source.keys[key]: (source.unpadded(row, source.global_shape), source.dtype_name(row))
        for key, row in zip(keys.tolist(), rows.tolist())
    }


def outputs(mapping: Mapping, source: Catalog) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of everything that a program without a destination makes: what it defines and does not touch.

    Raises:
        ValidationError: A statement keeps what a target has, and there is none.
    """
    operands = {name for node in mapping.nodes for name in node.operands}
    names = [name for name in mapping.tensors if name in mapping.provenance or name not in operands]
    kept = [name for name in names if any(region.node is None for region in mapping.regions.get(name, ()))]
    if kept:
        raise ValidationError(
            [
                Problem(
                    "statements keep what a target has, but a merged load makes new tensors",
                    key=name,
                    got=statement(mapping, name) or None,
                    remedy="say what new elements hold, as with fill=0",
                )
                for name in kept
            ]
        )
    used = source_names(mapping, mapping.tensors) | mapping.removed | mapping.unfed
    found = {key: what for key, what in stored(source).items() if key not in used and not key.startswith(EXTRA_STATE)}
    found.update({name: (mapping.tensors[name].shape, mapping.tensors[name].dtype) for name in names})
    return found


def statement(mapping: Mapping, name: str) -> str:
    """`` (statement "...")`` that made a target, where it is known."""
    text = mapping.provenance.get(name)
    return f' (statement "{text}")' if text else ""


def numpy_dtype(mapping: Mapping, name: str) -> np.dtype:
    """Element type of something that a mapping defines."""
    return dtype_of(mapping.tensors[name].dtype).numpy
