"""Values for the names in pickles of DeepSpeed's files: tensors' places, shapes, slices of flat buffers, arrays.

As in ``pickle_values.py`` nothing is looked up: each name stands for a function here, which makes plain data.

Tested in tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

from paddle_flexckpt.catalog import UnsafePickleError
from paddle_flexckpt.foreign.pickle_values import PADDLE, Arguments, Symbol, Vocabulary, is_integer, make_record
from paddle_flexckpt.foreign.torch_values import DCP_METADATA, DCP_TENSOR, SavedTensor, Storage


class Fragment(NamedTuple):
    """A parameter's slice in a rank's flat buffer."""

    numel: int
    start: int


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise UnsafePickleError("collections.OrderedDict with arguments")
    return {}


def _stage(arguments: tuple[Any, ...]) -> int:
    if len(arguments) != 1 or not is_integer(arguments[0]):
        raise UnsafePickleError("ZeroStageEnum with other arguments than a number")
    return int(arguments[0])


def _tensor_of_type(arguments: tuple[Any, ...]) -> Any:
    # Tensors and parameters with attributes: (function, type, its arguments, attributes).
    function = arguments[0] if len(arguments) == 4 else None
    inside = arguments[2] if len(arguments) == 4 else None
    if type(function) is not Symbol or function.name != "_rebuild_tensor_v2" or type(inside) is not Arguments:
        raise UnsafePickleError("_rebuild_from_type_v2 with other arguments than those of a tensor")
    return _CALL_TENSOR(inside.items)


def _parameter(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 3 or type(arguments[0]) is not SavedTensor:
        raise UnsafePickleError("_rebuild_parameter with other arguments than a tensor")
    return arguments[0]


class _Anything(dict[str, Any]):
    """A record with fields of any name."""

    def get(self, name: Any, default: Any = None) -> Any:
        return lambda value: True


_REBUILD = DCP_TENSOR.names["torch._utils", "_rebuild_tensor_v2"]
_CALL_TENSOR: Any = _REBUILD.call
_NOTHING = frozenset[str]()
_NAMES = MappingProxyType(
    {
        **PADDLE.names,
        **DCP_TENSOR.names,
        ("torch", "Size"): DCP_METADATA.names["torch", "Size"],
        ("torch", "Tensor"): Symbol("Tensor"),
        ("torch._tensor", "_rebuild_from_type_v2"): Symbol("_rebuild_from_type_v2", _tensor_of_type),
        ("torch._utils", "_rebuild_parameter"): Symbol("_rebuild_parameter", _parameter),
        ("torch.nn.parameter", "Parameter"): Symbol("Parameter"),
        ("collections", "OrderedDict"): Symbol("OrderedDict", _ordered),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Symbol("ZeroStageEnum", _stage),
        ("deepspeed.utils.tensor_fragment", "fragment_address"): Symbol(
            "fragment_address",
            make=make_record(
                "fragment_address", Fragment, {"numel": is_integer, "start": is_integer}, frozenset(("numel", "start"))
            ),
        ),
    }
    | {
        ("deepspeed.runtime.fp16.loss_scaler", name): Symbol(
            name, make=make_record(name, lambda **fields: None, _Anything(), _NOTHING)
        )
        for name in ("LossScaler", "DynamicLossScaler")
    }
)
DEEPSPEED = Vocabulary(
    _NAMES, frozenset({Storage, SavedTensor, Fragment}), frozenset(), DCP_TENSOR.persistent, is_ordered=True
)
