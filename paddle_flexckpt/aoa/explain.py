"""Explain where each target comes from, and what macros expand to. Tested in tests/aoa/test_language.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.aoa.compile import compile_program, run_program
from paddle_flexckpt.aoa.config import AoaConfig, Statements
from paddle_flexckpt.aoa.element_maps import Region, TensorMapping
from paddle_flexckpt.aoa.macros import expand, expand_arrays
from paddle_flexckpt.aoa.parser import parse
from paddle_flexckpt.aoa.rule import instantiate
from paddle_flexckpt.aoa.statement_errors import AoaError
from paddle_flexckpt.catalog import Catalog

# Lines per target: of hundreds of heads, the first are shown.
MAX_LINES = 8


@dataclass(frozen=True)
class Expanded:
    """A statement with one combination of ids: its number from 1, text, and the simple statements that macros made."""

    number: int
    text: str
    texts: tuple[str, ...]


def expand_program(
    aoa_config: AoaConfig | Statements, source: Catalog, target: Catalog | None = None
) -> list[Expanded]:
    """Write out all ids, stars, transposes and fused layouts of statements, as the in-tree engine does.

    Raises:
        AoaError: The statements are malformed or do not fit.
    """
    program = run_program(aoa_config, source, target, traced=True)
    result = []
    for rule, ids, parts in program.trace or ():
        text = instantiate(expand_arrays(rule.statement), dict(zip(rule.placeholders, ids)))
        (statement,) = parse(text)
        result.append(Expanded(rule.place.number, text, expand(statement, *parts)))
    return result


def explain(
    aoa_config: AoaConfig | Statements, source: Catalog, target: Catalog | None = None, keys: Iterable[str] = ()
) -> str:
    """Explain where each target comes from.

    Args:
        aoa_config: The statements.
        source: All source shards.
        target: All target shards; None derives the outputs.
        keys: Only these targets; all by default.

    Returns:
        A few lines for each target; then the targets that nothing feeds, and the source keys that nothing uses.

    Raises:
        AoaError: The statements are malformed or do not fit, or there is no such target.
    """
    mapping = compile_program(aoa_config, source, target)
    names = list(mapping.outputs) if target is None else _present(target)
    wanted = set(keys)
    unknown = sorted(wanted.difference(names))
    if unknown:
        raise AoaError([f"there is no target key {unknown[0]!r}; there are, for example, {names[:3]}"])
    lines: list[str] = []
    stored = set(_present(source))
    missing = [name for name in names if name in mapping.unfed or (name not in mapping.tensors and name not in stored)]
    rows = mapping.maps.rows_by_target
    for name in sorted(wanted or names):
        if name in missing:
            continue
        if name not in mapping.tensors:
            lines += [name, f"  all <- {name}"]
            continue
        info = mapping.tensors[name]
        lines.append(f"{name}  {info.dtype} {list(info.shape)}")
        if name in mapping.provenance:
            lines.append(f"  by {mapping.provenance[name]}")
        made = list(_lines(mapping, rows, name, "  "))
        lines += made[:MAX_LINES]
        if len(made) > MAX_LINES:
            lines.append(f"  ... and {len(made) - MAX_LINES} more")
    if not wanted:
        lines += [f"nothing feeds {name}: {mapping.provenance.get(name, 'no such source key')}" for name in missing]
        lines += [f"nothing uses source key {name}" for name in unused_sources(mapping, _present(source), names)]
    return "\n".join(lines)


def _present(catalog: Catalog) -> list[str]:
    """Return the keys that a catalog has rows of."""
    return [catalog.keys[key] for key in np.unique(catalog.key)]


def unused_sources(mapping: TensorMapping, source_keys: Iterable[str], target_keys: Iterable[str]) -> list[str]:
    """Return the source keys that feed no target and that no statement removes."""
    used = {*mapping.maps.sources, *mapping.removed}
    used.update(name for name in target_keys if name not in mapping.tensors and name not in mapping.unfed)
    return [name for name in source_keys if name not in used]


def _lines(mapping: TensorMapping, rows: dict[str, slice], name: str, indent: str) -> Iterator[str]:
    maps, rank = mapping.maps, len(mapping.tensors[name].shape)
    first = maps.width - rank
    span = rows.get(name, slice(0, 0))
    for row in range(span.start, span.stop):
        offset, shape = maps.target_offset[row, first:], maps.target_shape[row, first:]
        axes = maps.target_axis[row] - first
        used = np.flatnonzero(maps.target_axis[row] >= 0)
        extent, origin = maps.source_shape[row], maps.source_offset[row]
        # Padded axes of the source are those in front along which nothing runs.
        begin = min([*used.tolist(), *np.flatnonzero(origin).tolist(), maps.width - rank])
        order = [int(axes[a]) for a in used]
        moved = f", axes {tuple(int(a) for a in np.argsort(order))}" if order != sorted(order) else ""
        yield (
            f"{indent}{_box(offset, shape)} <- {maps.sources[maps.source[row]]} "
            f"{_box(origin[begin:], extent[begin:])}{moved}"
        )
    for region in mapping.regions.get(name, ()):
        yield from _region_lines(mapping, rows, region, indent)


def _region_lines(mapping: TensorMapping, rows: dict[str, slice], region: Region, indent: str) -> Iterator[str]:
    box = _box(np.asarray(region.offset), np.asarray(region.shape))
    if region.node is None:
        yield f"{indent}{box} keeps what it has"
        return
    node = mapping.nodes[region.node]
    yield f"{indent}{box} <- {node.step}" + (" of" if node.operands else "")
    for operand in node.operands:
        yield from _lines(mapping, rows, operand, indent + "    ")


def _box(offset: np.ndarray, shape: np.ndarray) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset.tolist(), shape.tolist())) + "]"
