"""From a configuration and two catalogs to a mapping, to expanded statements, or to an explanation.

``fleet.distributed_model(net)`` holds the model as ``_layers``, GroupSharded's stages as ``_layer``: ``_layers.w`` and
``w`` are the same tensor. A program works on names without such wrappers, whichever form its source, its destination
and its statements use.
Tested in tests/aoa/test_compile_errors.py, tests/aoa/test_wrappers.py and tests/aoa/test_language.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paddle_flexckpt.aoa.element_maps import Region, TensorMapping
from paddle_flexckpt.aoa.emit import Compilation
from paddle_flexckpt.aoa.invert import inverse_texts, overwritten_names
from paddle_flexckpt.aoa.macros import array_names, expand, expand_arrays
from paddle_flexckpt.aoa.parser import Statement, parse, parse_program, tokenize
from paddle_flexckpt.aoa.placeholders import KeyIndex, Template, parse_name
from paddle_flexckpt.aoa.program import Program
from paddle_flexckpt.aoa.reverse import Reversal
from paddle_flexckpt.aoa.rule import instantiate
from paddle_flexckpt.aoa.sides import Side
from paddle_flexckpt.aoa.statements import AoaConfig, AoaError, StatementError, Statements, read_config
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.optimizer_states import WRAPPED_HINT, unwrapped

# Lines per target: of hundreds of heads, the first are shown.
MAX_LINES = 8


def compile_program(
    aoa_config: AoaConfig | Statements,
    source: Catalog,
    target: Catalog | None,
    *,
    master_weights: Literal["exact", "convert"] = "exact",
    completion: Sequence[str] = (),
) -> TensorMapping:
    """Compile AOA statements for a source and a destination.

    Args:
        aoa_config: The statements; see ``docs/aoa.md``.
        source: All source shards.
        target: All target shards, of all ranks; None derives the outputs: what the statements assign and do not use
            up, and the source keys that they do not mention.
        master_weights: With ``"convert"``, a master weight that the source lacks starts from its parameter, and a
            float32 parameter comes from the master weight of a half-precision source.
        completion: Statements that follow those of the configuration, and are never inverted.

    Returns:
        Where every element of every target comes from.

    Raises:
        AoaError: The statements are malformed or do not fit the tensors; all problems are listed.
    """
    with without_collector():
        unwrapped_program = strip_wrappers(read_config(aoa_config), completion, source, target)
        if unwrapped_program is None:
            return Compilation(run_program(aoa_config, source, target, completion), master_weights).run()
        program = run_program(
            unwrapped_program.config, unwrapped_program.source, unwrapped_program.target, unwrapped_program.completion
        )
        return unwrapped_program.with_wrappers(Compilation(program, master_weights).run())


def run_program(
    aoa_config: AoaConfig | Statements,
    source: Catalog,
    target: Catalog | None,
    completion: Sequence[str] = (),
    traced: bool = False,
) -> Program:
    """Carry out statements, and those that follow, on names and shapes; ``traced``: :attr:`Program.trace` is kept.

    Raises:
        AoaError: They are malformed or do not fit the tensors.
    """
    config = read_config(aoa_config)
    statements = parse_program(config.statements)
    following = parse_program(completion, len(config.statements) + 1)
    here = Side(source, set() if target is None else target.keys)
    there = None if target is None else Side(target, source.keys)
    program = Program(here, there, config.is_lenient)
    if traced:
        program.trace = {}
    lost: list[str] = []
    if config.reverse:
        forward = None if there is None else _carried_out(statements, Program(there, here, config.is_lenient))
        if forward is not None:
            Reversal(forward, program).run()
            statements = []
        else:
            lost = overwritten_names(statements)
            statements = parse_program(inverse_texts(statements, exact=False))
    program.run([*statements, *following])
    if config.reverse and there is not None:
        # A reverse load may want only a part of what the statements were written for.
        program.read.update(program.values, *program.state_values.values())
    program.forget(lost)
    return program


def _carried_out(statements: Sequence[Statement], program: Program) -> Program | None:
    """Return the program after its statements; None where tensors that they read are missing.

    A reverse load may want only a part of these tensors. Then the inverse is made from the statements alone, and
    anything that they leave open is an error.
    """
    try:
        program.run(statements)
    except AoaError:
        return None
    return program


@dataclass(frozen=True)
class Unwrapped:
    """A program with all names stripped of fleet's wrappers, and the names as they are.

    Attributes:
        config: The statements.
        completion: Those that follow.
        source: The source.
        target: The destination, or None.
        sources: Keys of the source by name, where the two differ.
        targets: Keys of the destination likewise.
        made: Names that are written with wrappers on the right, by the stripped name, if there is no destination.
    """

    config: Statements
    completion: tuple[str, ...]
    source: Catalog
    target: Catalog | None
    sources: Mapping[str, str]
    targets: Mapping[str, str]
    made: tuple[tuple[Template, Template], ...]

    def with_wrappers(self, mapping: TensorMapping) -> TensorMapping:
        """Return a compiled program with the keys of source and destination as they are."""
        target = self._target_key(mapping)
        maps = replace(
            mapping.maps,
            targets=tuple(map(target, mapping.maps.targets)),
            sources=tuple(self.sources.get(name, name) for name in mapping.maps.sources),
        )
        return replace(
            mapping,
            maps=maps,
            regions={target(name): regions for name, regions in mapping.regions.items()},
            tensors={target(name): info for name, info in mapping.tensors.items()},
            removed=frozenset(self.sources.get(name, name) for name in mapping.removed),
            unfed=frozenset(map(target, mapping.unfed)),
            masters={target(name): self.sources.get(key, key) for name, key in mapping.masters.items()},
            outputs=tuple(sorted(map(target, mapping.outputs))),
            provenance={target(name): text for name, text in mapping.provenance.items()},
        )

    def _target_key(self, mapping: TensorMapping) -> Callable[[str], str]:
        """Return the function from an assigned name to its key: the destination's, or as it was written."""
        if self.target is not None:
            return lambda name: self.targets.get(name, name)
        keys = {}
        for name in mapping.outputs:
            if name not in mapping.provenance:
                keys[name] = self.sources.get(name, name)
                continue
            for base in (name, name.rpartition(".")[0]):
                for inner, outer in self.made:
                    for ids in KeyIndex([base]).bindings(inner):
                        keys[name] = outer.formatter(inner.placeholders)(ids) + name[len(base) :]
        return lambda name: keys.get(name, name)


def strip_wrappers(
    config: Statements, completion: Sequence[str], source: Catalog, target: Catalog | None
) -> Unwrapped | None:
    """Return a program with all names stripped of wrappers; None without any, or if two names would become one."""
    sides = [source] if target is None else [source, target]
    texts = [*config.statements, *completion]
    if not any(WRAPPED_HINT in name for names in (texts, *(side.keys for side in sides)) for name in names):
        return None
    inner = [tuple(map(unwrapped, side.keys)) for side in sides]
    if any(len(set(keys)) < len(keys) for keys in inner):
        return None
    outer = [{name: key for name, key in zip(keys, side.keys) if name != key} for keys, side in zip(inner, sides)]
    statements = tuple(map(_stripped_text, texts))
    if not any(outer) and [*statements] == texts:
        return None
    inside = [replace(side, keys=keys) for side, keys in zip(sides, inner)]
    count = len(config.statements)
    return Unwrapped(
        replace(config, statements=statements[:count]),
        statements[count:],
        inside[0],
        None if target is None else inside[1],
        outer[0],
        {} if target is None else outer[1],
        tuple(_made(texts)) if target is None else (),
    )


def _stripped_text(text: str) -> str:
    """Return a statement with stripped names; a malformed one unchanged."""
    if WRAPPED_HINT not in text:
        return text
    try:
        tokens = tokenize(text)
    except StatementError:
        return text
    for token in reversed(tokens):
        if token.kind in ("NAME", "STRING"):
            first = token.column - 1 + (token.kind == "STRING")
            text = f"{text[:first]}{unwrapped(text[first : token.end - 1])}{text[token.end - 1 :]}"
    return text


def _made(texts: Sequence[str]) -> Iterator[tuple[Template, Template]]:
    """Yield the names that are written with wrappers on the right: stripped, and as written."""
    for text in texts:
        try:
            statements = parse(text) if WRAPPED_HINT in text else []
            for name in [name for statement in statements for name in array_names(statement.right)]:
                if unwrapped(name) != name:
                    yield parse_name(unwrapped(name)), parse_name(name)
        except StatementError:
            continue  # the program is refused


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
    """Return the text of :func:`explain_targets`, with the same arguments and errors."""
    return explain_targets(aoa_config, source, target, keys)[0]


def explain_targets(
    aoa_config: AoaConfig | Statements, source: Catalog, target: Catalog | None = None, keys: Iterable[str] = ()
) -> tuple[str, list[str]]:
    """Explain where some targets, or all, come from; arguments as of :func:`compile_program`.

    Returns:
        A few lines for each target; then the targets that nothing feeds, and the source keys that nothing uses. And the
        targets that nothing feeds.

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
    asked = sorted(wanted) or names
    missing = [name for name in asked if name in mapping.unfed or (name not in mapping.tensors and name not in stored)]
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
    lines += [f"nothing feeds {name}: {mapping.provenance.get(name, 'no such source key')}" for name in missing]
    if not wanted:
        lines += [f"nothing uses source key {name}" for name in unused_sources(mapping, _present(source), names)]
    return "\n".join(lines), missing


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
