"""AOA: statements by which tensors of one model become tensors of another, compiled to box maps.

Pure numpy. ``docs/aoa.md`` describes the language. All that reads statements is imported on first use, as most loads
have none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddle_flexckpt.aoa.element_maps import Node, Region, Step, TensorInfo, TensorMapping
from paddle_flexckpt.catalog import AoaError

if TYPE_CHECKING:
    from paddle_flexckpt.aoa.compile import Expanded, compile_program, expand_program, unused_sources
    from paddle_flexckpt.aoa.macros import fused_statement
    from paddle_flexckpt.aoa.statements import AoaConfig, Statements, read_config

__all__ = [
    "AoaConfig",
    "AoaError",
    "Expanded",
    "Node",
    "Region",
    "Statements",
    "Step",
    "TensorInfo",
    "TensorMapping",
    "compile_program",
    "expand_program",
    "fused_statement",
    "read_config",
    "unused_sources",
]
_HOME = {
    "AoaConfig": "statements",
    "Expanded": "compile",
    "Statements": "statements",
    "compile_program": "compile",
    "expand_program": "compile",
    "fused_statement": "macros",
    "read_config": "statements",
    "unused_sources": "compile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
