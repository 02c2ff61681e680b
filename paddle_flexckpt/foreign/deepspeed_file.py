"""A file of DeepSpeed's: its pickled object, where the elements of its tensors begin, and its number of steps.

The vocabulary of its pickle has tensors' places, shapes, slices of flat buffers, and arrays. As in ``pickle_values.py``
nothing is looked up: each name stands for a function here, which makes plain data.

Tested in tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.catalog import UnsafePickleError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.pickle_values import PADDLE, Arguments, Symbol, Vocabulary, is_integer, make_record
from paddle_flexckpt.foreign.torch_archive import (
    DCP_METADATA,
    DCP_TENSOR,
    SavedTensor,
    Storage,
    open_archive,
    place_elements,
)
from paddle_flexckpt.media.backend import Backend, open_member

# Names, shapes and settings: for 100,000 parameters some 30 MB.
_MOST_PICKLE_BYTES = 64 << 20


class Progress(NamedTuple):
    """The number of steps that an optimizer has taken, and its betas; None where they are not in the file."""

    steps: float
    betas: tuple[float, ...] = ()


class DeepSpeedFile(NamedTuple):
    """A file.

    Attributes:
        name: The file's name.
        rank: The rank that has written it.
        size: The number of its bytes.
        value: The pickled object.
        places: The first byte of each tensor in the file.
        numbers: The value of each tensor that is one number.
    """

    name: str
    rank: int
    size: int
    value: Mapping[Any, Any]
    places: Mapping[SavedTensor, int]
    numbers: Mapping[SavedTensor, float]

    def number(self, value: Any) -> float | None:
        """Return a number, or that of a tensor of one element; None if it is neither."""
        found: Any = self.numbers.get(value) if type(value) is SavedTensor else value
        return float(found) if type(found) in (int, float) else None

    def progress(self, base: Mapping[Any, Any], number: int) -> Progress | None:
        """Return the progress of a group, as its inner optimizer has saved it; None where it has no number of steps."""
        states, groups = base.get("state"), base.get("param_groups")
        state = states.get(number) if type(states) is dict else None
        group = groups[number] if type(groups) is list and number < len(groups) else None
        fields: dict[Any, Any] = {**(group if type(group) is dict else {}), **(state if type(state) is dict else {})}
        steps, found = self.number(fields.get("step")), fields.get("betas")
        betas = tuple(found) if isinstance(found, (tuple, list)) else ()
        return None if steps is None else Progress(steps, betas if all(type(beta) is float for beta in betas) else ())

    def progress_of_model(self) -> Progress | None:
        """Return the progress of all parameters by a model's file, which counts the steps and the skipped ones."""
        steps, skipped = self.number(self.value.get("global_steps")), self.number(self.value.get("skipped_steps", 0))
        return None if steps is None or skipped is None else Progress(steps - skipped)


def load_deepspeed_file(backend: Backend, name: str, rank: int) -> DeepSpeedFile:
    """Read a file's pickle, and find the elements of all tensors in it.

    Raises:
        CorruptCheckpointError: It is damaged; UnsafePickleError if it is more than data.
    """
    where = backend.where(name)
    with open_member(backend, name) as file:
        archive = open_archive(file.read, file.size, where, DEEPSPEED, _MOST_PICKLE_BYTES, {})
        places, numbers = dict[SavedTensor, int](), dict[SavedTensor, float]()
        stack = [archive.value]
        while stack:
            each = stack.pop()
            if type(each) is dict:
                stack.extend(each.values())
            elif type(each) is list:
                stack.extend(each)
            elif type(each) is SavedTensor and each.dtype in DTYPES and each not in places:
                places[each] = place_elements(file.read, archive, each, where)[0]
                if not each.size:
                    dtype = DTYPES[each.dtype].numpy
                    numbers[each] = np.frombuffer(file.read(places[each], dtype.itemsize), dtype)[0].item()
        value = archive.value if type(archive.value) is dict else {"param": archive.value}
        return DeepSpeedFile(name, rank, file.size, value, places, numbers)


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
    _NAMES, frozenset({Storage, SavedTensor, Fragment}), frozenset(), DCP_TENSOR.persistent, has_ordered_dicts=True
)
