"""Mappings at work: AOA statements compiled for a load, and what a load asks of the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from paddle_flexckpt import aoa
from paddle_flexckpt.aoa import Mapping, TensorInfo
from paddle_flexckpt.aoa.config import read_config
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ValidationError


def compile_mapping(
    aoa_config: Any, source: Catalog, target: Catalog | None, master_weights: Any, completion: Sequence[str] = ()
) -> Mapping:
    """The statements as a mapping.

    Args:
        aoa_config: A dict, a JSON text or the path of a JSON or YAML file; or what is compiled already; None for no
            statements.
        source: The shards of all sources.
        target: The targets of all ranks; None: they follow from the statements.
        master_weights: As in ``load_state_dict``.
        completion: Statements that follow those of the configuration.

    Raises:
        ValidationError: The statements do not fit, or ranks want one key in different dtypes.
    """
    if isinstance(aoa_config, Mapping):
        return aoa_config
    statements = [] if aoa_config is None else aoa_config
    mapping = aoa.compile_program(statements, source, target, master_weights=master_weights, completion=completion)
    if target is not None:
        _check_dtypes(mapping, target)
    return mapping


def _check_dtypes(mapping: Mapping, target: Catalog) -> None:
    """Checks that a key has one dtype on all ranks: it is to this that statements cast."""
    kinds = np.unique(np.stack([target.key.astype(np.int64), target.dtype.astype(np.int64)], axis=1), axis=0)
    found: dict[int, list[str]] = {}
    for key, dtype in kinds.tolist():
        found.setdefault(key, []).append(target.dtypes[dtype])
    problems = [
        Problem(
            "ranks want a tensor that AOA statements make in different dtypes",
            key=target.keys[key],
            expected="one dtype",
            got=sorted(dtypes),
        )
        for key, dtypes in found.items()
        if len(dtypes) > 1 and target.keys[key] in mapping.tensors
    ]
    if problems:
        raise ValidationError(problems)


def config_digest(aoa_config: Any, master_weights: str) -> str | None:
    """What tells one program from another, however it is given; None where there is none."""
    if aoa_config is None:
        return None
    if isinstance(aoa_config, Mapping):
        return "compiled"
    text = json.dumps([asdict(read_config(aoa_config)), master_weights])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_names(mapping: Mapping, names: Iterable[str]) -> set[str]:
    """The source keys that tensors are made of, directly or through what they are computed from."""
    rows = mapping.maps.rows_by_target()
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


def moved_keys(mapping: Mapping, names: Iterable[str]) -> set[str]:
    """Names of which anything is computed or comes from elsewhere than the same element of the source key of that name.

    Values may be cast; but a target of another dtype is not the shard that the source has.
    """
    maps, rows, moved = mapping.maps, mapping.maps.rows_by_target(), set()
    for name in names:
        if name not in mapping.tensors:
            continue
        shape = mapping.tensors[name].shape
        row, first = rows.get(name, slice(0, 0)), maps.width - len(shape)
        alone = row.stop - row.start == 1 and not mapping.regions.get(name)
        if not alone or maps.sources[maps.source[row.start]] != name:
            moved.add(name)
            continue
        # Along axes of extent 1, padding included, it makes no difference which axis runs.
        long = np.flatnonzero(maps.target_shape[row.start] > 1)
        whole = maps.target_shape[row.start, first:].tolist() == list(shape)
        straight = (maps.target_axis[row.start, long] == long).all()
        if not (whole and straight and not maps.source_offset[row.start].any()):
            moved.add(name)
    return moved


def stored(source: Catalog, extra_state: bool = False) -> dict[str, TensorInfo]:
    """Global shape and dtype of every key.

    Args:
        source: The shards.
        extra_state: Whether a run's extra state is wanted too.
    """
    keys, rows = np.unique(source.key, return_index=True)
    return {
        source.keys[key]: TensorInfo(source.unpadded(row, source.global_shape), source.dtype_name(row))
        for key, row in zip(keys.tolist(), rows.tolist())
        if extra_state or not source.keys[key].startswith(EXTRA_STATE)
    }


def outputs(mapping: Mapping, extra_state: bool = False) -> dict[str, TensorInfo]:
    """Shape and dtype of everything that a program without a destination makes.

    Args:
        mapping: Compiled without a destination.
        extra_state: Whether a run's extra state is wanted too.

    Raises:
        ValidationError: A statement keeps what a target has, and there is none.
    """
    names = [name for name in mapping.outputs if extra_state or not name.startswith(EXTRA_STATE)]
    kept = [name for name in names if any(region.node is None for region in mapping.regions.get(name, ()))]
    if kept:
        raise ValidationError(
            [
                Problem(
                    "statements keep what a target has, but here are no targets that have anything",
                    key=name,
                    got=mapping.provenance.get(name),
                    remedy="say what new elements hold, as with fill=0",
                )
                for name in kept
            ]
        )
    return {name: mapping.tensors[name] for name in names}


def made_by(mapping: Mapping, name: str) -> str:
    """`` (AOA statement 1: ...)`` that made a target, where it is known."""
    text = mapping.provenance.get(name)
    return f" ({text})" if text else ""
