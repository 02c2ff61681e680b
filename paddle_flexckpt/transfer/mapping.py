"""Compile AOA statements for a load, and bring fused parameters into natural order.

Tested in tests/transfer/test_mapping.py, tests/loading/test_aoa_policies.py and tests/loading/test_merged.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from paddle_flexckpt import aoa
from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Order, Problem, ValidationError

Settings = Callable[[], Mapping[str, Any]]


def compile_mapping(
    aoa_config: Any,
    source: Catalog,
    target: Catalog | None,
    master_weights: Any,
    completion: Sequence[str] = (),
    settings: Settings = dict,
) -> TensorMapping:
    """Compile statements, and those that follow them, to a mapping from all sources to the targets of all ranks.

    Without targets these follow from the statements, and untouched tensors get natural order. ``settings`` returns the
    ``config.json`` of the model, which is read for statements with head counts.

    Raises:
        ValidationError: The statements do not fit, head counts or family are not those of the settings, rules of a
            family leave weights of layers as they are, or make a model that lacks layers, or ranks want one key in
            different dtypes.
    """
    statements = aoa.read_config([] if aoa_config is None else aoa_config)
    if statements.rules is not None:
        from paddle_flexckpt.aoa.model_rules import with_head_of

        wanted = None if target is None else _shapes(target)
        statements = aoa.read_config(with_head_of(_shapes(source), statements.rules, wanted))
    if any("num_heads" in text for text in statements.statements):
        from paddle_flexckpt.aoa.head_counts import check_heads

        check_heads(statements, settings())
    if statements.rules is None:
        return _compiled(statements, source, target, master_weights, completion)
    from paddle_flexckpt.aoa import rule_fits

    rule_fits.check_family(statements.rules, source, settings())
    try:
        mapping = _compiled(statements, source, target, master_weights, completion)
    except aoa.AoaError as error:
        if target is None:
            rule_fits.check_layers(statements.rules, source, settings())
        rule_fits.check_others(statements.rules, error, source)
        raise
    rule_fits.check_touched(statements.rules, mapping, source, target)
    if target is None:
        rule_fits.check_layers(statements.rules, source, settings())
    return mapping


def _shapes(catalog: Catalog) -> dict[str, tuple[int, ...]]:
    return {key: info.shape for key, info in tensor_infos(catalog).items()}


def _compiled(
    statements: aoa.Statements, source: Catalog, target: Catalog | None, master_weights: Any, completion: Sequence[str]
) -> TensorMapping:
    if target is not None:
        mapping = aoa.compile_program(statements, source, target, master_weights=master_weights, completion=completion)
        _check_dtypes(mapping, target)
        return mapping
    mapping = aoa.compile_program(statements, source, None, master_weights=master_weights)
    following = (*_to_natural_order(mapping, source), *completion)
    if not following:
        return mapping
    return aoa.compile_program(statements, source, None, master_weights=master_weights, completion=following)


def whole_mapping(
    aoa_config: Any,
    source: Catalog,
    names: Collection[str] | None = None,
    completion: Sequence[str] = (),
    settings: Settings = dict,
) -> TensorMapping | None:
    """Return the mapping to whole tensors in natural order, of :func:`compile_mapping`, for some keys or all.

    None: each is the source's, unchanged.

    Raises:
        ValidationError: The statements do not fit, or no statement for natural order is known.
    """
    if aoa_config is None and not completion and not any(names is None or key in names for key in permuted(source)):
        return None
    return compile_mapping(aoa_config, source, None, "exact", completion, settings)


def permuted(source: Catalog) -> dict[str, Order]:
    """Return the keys that are known not to be in natural order, with their orders."""
    if not any(order.is_permuted for order in source.orders):
        return {}
    orders = ((key, source.order(number)) for number, key in enumerate(source.keys))
    return {key: order for key, order in orders if order is not None and order.is_permuted}


def _to_natural_order(mapping: TensorMapping, source: Catalog) -> tuple[str, ...]:
    """Return the statements for natural order of tensors that a program without a destination leaves or only renames.

    Raises:
        ValidationError: No statement is known for a tensor.
    """
    moved = permuted(source)
    copied = mapping.copied_keys(mapping.outputs) if moved else {}
    # A statement ``key -> key`` means the stored order.
    left = {
        key: moved[own] for key, own in copied.items() if own in moved and (key != own or key not in mapping.provenance)
    }
    problems = [
        Problem(
            "a fused parameter is not in natural order, and no AOA statement is known that would put it right",
            key=key,
            expected="a FusedAxis with a statement at the save",
            got=order.describe(),
            code="FC207",
            remedy=f'take it as it is stored, by the AOA statement "{aoa.fused_statement(key, key, "", ())}"',
        )
        for key, order in left.items()
        if order.statement is None
    ]
    if problems:
        raise ValidationError(problems)
    keys = {*source.keys, *mapping.outputs}
    return tuple(sorted({aoa.fused_statement(key, key, order.tags or "", keys) for key, order in left.items()}))


def _check_dtypes(mapping: TensorMapping, target: Catalog) -> None:
    """Check that a key has one dtype on all ranks, to which statements cast."""
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


def config_digest(aoa_config: Any) -> str | None:
    """Return a digest of a program, whatever its form; None if there is none."""
    if aoa_config is None:
        return None
    config = asdict(replace(aoa.read_config(aoa_config), rules=None))
    lenient = config.pop("is_lenient")
    del config["rules"]
    text = json.dumps({**config, **({"is_lenient": True} if lenient else {})})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tensor_infos(
    source: Catalog, mapping: TensorMapping | None = None, extra_state: bool = False
) -> dict[str, TensorInfo]:
    """Return global shape and dtype of every key of a source, or of a mapping that was compiled without a target.

    Raises:
        ValidationError: Statements keep values of targets, and there are no targets.
    """
    if mapping is not None:
        return mapping.output_infos(extra_state)
    keys, rows = np.unique(source.key, return_index=True)
    return {
        source.keys[key]: TensorInfo(source.unpadded(row, source.global_shape), source.dtype_name(row))
        for key, row in zip(keys.tolist(), rows.tolist())
        if extra_state or not source.keys[key].startswith(EXTRA_STATE)
    }
