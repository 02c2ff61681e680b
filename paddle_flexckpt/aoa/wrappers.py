"""Names inside fleet's wrappers: ``_layers.w``, as the wrapper's own methods name it, and ``w`` are the same tensor.

``fleet.distributed_model(net)`` holds the model as ``_layers``, GroupSharded's stages as ``_layer``. A program works
on the names inside, whichever form its source, its destination and its statements use. Tested in
tests/aoa/test_wrappers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paddle_flexckpt.aoa.config import Statements
from paddle_flexckpt.aoa.element_maps import TensorMapping
from paddle_flexckpt.aoa.macros import array_names
from paddle_flexckpt.aoa.parser import parse, tokenize
from paddle_flexckpt.aoa.placeholders import KeyIndex, Template, parse_name
from paddle_flexckpt.aoa.statement_errors import StatementError
from paddle_flexckpt.aoa.states import WRAPPED_HINT, unwrapped
from paddle_flexckpt.catalog import Catalog


@dataclass(frozen=True)
class Inside:
    """A program with all names inside wrappers, and the names outside.

    Attributes:
        config: The statements.
        completion: Those that follow.
        source: The source.
        target: The destination, or None.
        sources: Keys of the source by name, where the two differ.
        targets: Keys of the destination likewise.
        made: Names that are written with wrappers on the right, by the name inside, if there is no destination.
    """

    config: Statements
    completion: tuple[str, ...]
    source: Catalog
    target: Catalog | None
    sources: Mapping[str, str]
    targets: Mapping[str, str]
    made: tuple[tuple[Template, Template], ...]

    def outside(self, mapping: TensorMapping) -> TensorMapping:
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


def go_inside(config: Statements, completion: Sequence[str], source: Catalog, target: Catalog | None) -> Inside | None:
    """Return a program with all names inside wrappers; None if there are no wrappers, or two names would become one."""
    sides = [source] if target is None else [source, target]
    texts = [*config.statements, *completion]
    if not any(WRAPPED_HINT in name for names in (texts, *(side.keys for side in sides)) for name in names):
        return None
    inner = [tuple(map(unwrapped, side.keys)) for side in sides]
    if any(len(set(keys)) < len(keys) for keys in inner):
        return None
    outer = [{name: key for name, key in zip(keys, side.keys) if name != key} for keys, side in zip(inner, sides)]
    statements = tuple(map(_inner_text, texts))
    if not any(outer) and [*statements] == texts:
        return None
    inside = [replace(side, keys=keys) for side, keys in zip(sides, inner)]
    count = len(config.statements)
    return Inside(
        replace(config, statements=statements[:count]),
        statements[count:],
        inside[0],
        None if target is None else inside[1],
        outer[0],
        {} if target is None else outer[1],
        tuple(_made(texts)) if target is None else (),
    )


def _inner_text(text: str) -> str:
    """Return a statement with the names inside; a malformed one unchanged."""
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
    """Yield the names that are written with wrappers on the right: the name inside, and as written."""
    for text in texts:
        try:
            statements = parse(text) if WRAPPED_HINT in text else []
            for name in [name for statement in statements for name in array_names(statement.right)]:
                if unwrapped(name) != name:
                    yield parse_name(unwrapped(name)), parse_name(name)
        except StatementError:
            continue  # the program is refused
