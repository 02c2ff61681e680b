"""Codes: tensors of 8-bit floats or integers that are numbers only together with scales, and their dequantization.

A cast would take a code for a plain number. So a cast is refused for float8 of another program, whatever stands beside
it, and elsewhere if there is evidence of codes: a scale in their module, or a ``quantization_config`` in the
``config.json`` of the source's directory.

Tested in tests/transfer/test_codes.py.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem
from paddle_flexckpt.catalog.dtypes import BYTES, is_float
from paddle_flexckpt.transfer.mapping import tensor_infos

_EIGHT_BITS = frozenset({"float8_e4m3fn", "float8_e5m2", "int8", "uint8", *(dtype.name for dtype in BYTES)})
# Wider types are positions and counters: codes are not packed into them.
CODE_DTYPES = _EIGHT_BITS | {"int16", "uint16", "int32", "uint32"}
# What names of scales and markers beside codes contain.
_SIGN = re.compile(r"scale|scb|absmax|zero|qmap|quant|_s$", re.IGNORECASE)
# Names of codes that differ from the tensor's: gate_proj_blocks, weight_packed.
_PACKED = re.compile(r"_(?:blocks|packed|codes|q)$")
# The scales by which fp8 codes are multiplied, the best known first.
_FACTORS = ("{}_scale_inv", "{}_scale", "{}.scale_inv", "{}.scale", "{}._scale", "{}_scales", "{}.scales")
_QUANTIZATION = ("quantization_config", "compression_config")
# Without a scale beside them only matrices count as weights.
_WEIGHT_AXES = 2


class Codes:
    """The tensors of a source that are codes, and the tensors that would be made of codes alone."""

    def __init__(
        self,
        source: Catalog,
        mapping: TensorMapping | None = None,
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Take the source's shards, the statements' mapping, and a function that returns the model's configuration."""
        self._source, self._mapping, self._settings = source, mapping, settings
        coded = np.asarray([dtype in CODE_DTYPES for dtype in source.dtypes], dtype=bool)[source.dtype]
        keys = (source.keys[number] for number in np.unique(source.key[coded]).tolist())
        self._coded = {key for key in keys if not key.startswith(EXTRA_STATE)}
        # This library's saves record the order of each tensor's elements, other programs' do not.
        ordered = source.key_order >= 0 if len(source.key_order) else np.zeros(len(source.keys), dtype=bool)
        self._ours = frozenset(itertools.compress(source.keys, ordered.tolist()))

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return tensor_infos(self._source)

    @cached_property
    def _siblings(self) -> Mapping[str, list[str]]:
        """Return the names in each module."""
        found: dict[str, list[str]] = defaultdict(list)
        for key in self._infos:
            base, _, leaf = key.rpartition(".")
            found[base].append(leaf)
        return found

    @cached_property
    def _quantization(self) -> Mapping[str, Any]:
        settings = self._settings()
        setting: Any = next((settings[name] for name in _QUANTIZATION if settings.get(name)), {})
        return setting if isinstance(setting, Mapping) else {"quant_method": str(setting)}

    def scales(self, key: str) -> list[str]:
        """Return the keys beside a key of the source that show it to be codes, the strongest evidence first."""
        if key not in self._coded:
            return []
        base, dot, leaf = key.rpartition(".")
        stem, siblings = _PACKED.sub("", leaf), self._siblings
        beside = [name for name in siblings[base] if name != leaf and _SIGN.search(name)]
        if self._infos[key].dtype not in _EIGHT_BITS and not leaf.startswith("q"):
            # Wider integers may be positions, beside the scale of another tensor (logit_scale).
            beside = [
                n for n in beside if n.startswith(stem) or "weight" in n or any(map(_SIGN.match, (n, n.lstrip("_q"))))
            ]
        beside.sort(key=lambda name: (not name.startswith(stem), len(name), name))
        inside = [f"{key}.{name}" for name in siblings.get(key, ()) if _SIGN.search(name)]
        return [*(f"{base}{dot}{name}" for name in beside), *sorted(inside)]

    @property
    def are_dequantized(self) -> bool:
        """Return whether statements dequantize codes."""
        from paddle_flexckpt.aoa.steps import DequantFp8, DequantMxfp4

        nodes = () if self._mapping is None else self._mapping.nodes
        return any(isinstance(node.step, (DequantFp8, DequantMxfp4)) for node in nodes)

    def are_foreign(self, name: str) -> bool:
        """Return whether float8 of another program, not dequantized, becomes a tensor, the source's or a made one."""
        if self._mapping is None or name not in self._mapping.tensors:
            return self._is_foreign(name)
        return any(self._is_foreign(key) for key, _ in self._made_of(self._mapping, name, ""))

    def _is_foreign(self, key: str) -> bool:
        return key in self._coded and self._infos[key].dtype.startswith("float8") and key not in self._ours

    def problem(self, name: str, dtype: str, **where: Any) -> Problem | None:
        """Return the problem if a cast of a key, the source's or a made one, would take codes for numbers."""
        if not self._coded or not _is_number(dtype):
            return None
        if self._mapping is None or name not in self._mapping.tensors:
            return self._cast(name, dtype, where)
        steps = (self._cast(key, made, where) for key, made in self._made_of(self._mapping, name, dtype))
        return next((problem for problem in steps if problem is not None), None)

    def _cast(self, key: str, dtype: str, where: Mapping[str, Any]) -> Problem | None:
        if key not in self._coded or dtype == self._infos[key].dtype or not _is_number(dtype):
            return None
        codes, sign = self._infos[key], next(iter(self.scales(key)), "")
        if not sign and len(codes.shape) >= _WEIGHT_AXES and self._quantization:
            sign = "quantization_config"
        if not sign and not self._is_foreign(key):
            return None
        expected = f"{dtype}, of codes and their scales"
        got = f"{codes.dtype} of {key!r}, {f'with {sign!r}' if sign else 'as another program has written it'}"
        what = "a cast would take codes of a quantised tensor for numbers"
        statements = " and ".join(f"'{each}'" for each in self._statements(key, dtype))
        remedy = f"make numbers of codes and scales by the AOA statements {statements}"
        if "[rows, columns]" in statements:
            remedy += ", with the extents of a block that has one scale: its writer's settings tell them"
        if not statements:
            by = self._quantization.get("quant_method", "")
            remedy = (
                f"have the library that quantised them {by and f'({by}) '}write them dequantized; or load the codes, "
                "and their scales, into targets of the saved dtypes"
            )
        return Problem(what, **{"key": key, **where}, expected=expected, got=got, code="FC208", remedy=remedy)

    def _made_of(self, mapping: TensorMapping, name: str, dtype: str) -> Iterator[tuple[str, str]]:
        """Yield the source keys whose elements become a tensor's without dequantization, and in which type."""
        from paddle_flexckpt.aoa.steps import DequantFp8, DequantMxfp4, Scale

        rows, todo, seen = mapping.maps.rows_by_target, [(name, dtype)], {(name, dtype)}
        while todo:
            name, dtype = todo.pop()
            for number in np.unique(mapping.maps.source[rows.get(name, slice(0, 0))]).tolist():
                yield mapping.maps.sources[number], dtype
            for region in mapping.regions.get(name, ()):
                node = None if region.node is None else mapping.nodes[region.node]
                if node is None or isinstance(node.step, (DequantFp8, DequantMxfp4, Scale)):
                    continue
                made = dtype if node.info.dtype in CODE_DTYPES else node.info.dtype
                more = {(operand, made) for operand in node.operands} - seen
                todo += more
                seen |= more

    def _statements(self, key: str, dtype: str) -> list[str]:
        """Return the statements that dequantize codes to a type; empty if none is known."""
        from paddle_flexckpt.aoa.parser import quoted

        codes, rounds = self._infos[key], "" if dtype == "float32" else f', dtype="{dtype}"'
        base, dot, leaf = key.rpartition(".")
        if leaf.endswith("_blocks") and codes.dtype == "uint8":
            tensor = key[: -len("_blocks")]
            scales = self._infos.get(f"{tensor}_scales")
            if scales is not None and scales.dtype in ("uint8", "float8_e8m0fnu") and scales.shape == codes.shape[:-1]:
                return [f'{quoted(key)}, {quoted(f"{tensor}_scales")} -> {quoted(tensor)}, dequant="mxfp4"{rounds}']
        names = [each.format(key) for each in _FACTORS] + [f"{base}{dot}scale"]
        name = next((each for each in names if each in self._infos), None)
        scale = None if name is None else self._infos[name]
        if name is None or scale is None or not codes.dtype.startswith("float8") or not is_float(scale.dtype):
            return []
        block, shape, statements = self._block(codes.shape, scale.shape), scale.shape, list[str]()
        if block is None and len(shape) < len(codes.shape):
            # One scale of all, or one of each row.
            shape = (*shape, *(1 for _ in codes.shape[len(shape) :]))
            block = self._block(codes.shape, shape)
            statements = [f'{quoted(name)} -> {quoted(name)}, reshape="{list(shape)}"']
        if block is None:
            return []
        extents = "rows, columns" if not all(block) else ", ".join(map(str, block))
        return [
            *statements,
            f'{quoted(key)}, {quoted(name)} -> {quoted(key)}, dequant="fp8", block="[{extents}]"{rounds}',
        ]

    def _block(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the extents of a block with one scale; zeros if shapes leave it open, None if they do not fit."""
        if len(codes) != len(scales) or not codes:
            return None
        setting = self._quantization.get("weight_block_size")
        sizes = tuple(n for n in setting if type(n) is int and n > 0) if isinstance(setting, list) else ()
        if len(sizes) == len(codes) and all(-(-e // n) == count for e, n, count in zip(codes, sizes, scales)):
            return sizes
        block = [extent if count == 1 else 1 if count == extent else 0 for extent, count in zip(codes, scales)]
        if all(0 < count <= extent for extent, count in zip(codes, scales)):
            return tuple(block) if all(block) else (0,) * len(block)
        return None


def _is_number(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))
