"""AOA: statements that say how tensors of one model become tensors of another, compiled to box maps.

Pure numpy. ``docs/aoa.md`` describes the language.
"""

from paddle_flexckpt.aoa.compile import compile_program
from paddle_flexckpt.aoa.config import AoaConfig, Statements, read_config
from paddle_flexckpt.aoa.errors import AoaError
from paddle_flexckpt.aoa.explain import Expanded, expand_program, explain, unused_sources
from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.macros import fused_statement
from paddle_flexckpt.aoa.mapping import Node, Region, Step, TensorInfo, TensorMapping

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
    "explain",
    "fused_statement",
    "invert",
    "read_config",
    "unused_sources",
]
