"""The oracle's steps: what every attribute and tag does to whole numpy arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns its names)
import numpy as np

from tests.aoa.oracle_text import OracleError

MASTER = "w_0"
FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value. Where ``keep`` is True the destination keeps what it has (None: nowhere)."""

    array: np.ndarray
    keep: np.ndarray | None = None

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        return Tensor(move(self.array), None if self.keep is None else move(self.keep))


# ------------------------------------------------------------------------------------------- steps on single variables


def permuted(array: np.ndarray, permutation: Sequence[int]) -> np.ndarray:
    return np.transpose(array, permutation or tuple(range(array.ndim))[::-1])


def sliced(array: np.ndarray, text: str) -> np.ndarray:
    parts = [part.strip() for part in text.strip()[1:-1].split(",")]
    return array[
        tuple(
            slice(*(int(bound) if bound.strip() else None for bound in part.split(":"))) if ":" in part else int(part)
            for part in parts
        )
    ]


def extended(tensor: Tensor, before: Sequence[int], after: Sequence[int], fill: Any) -> Tensor:
    """New elements around a tensor; a negative number cuts."""
    low = [slice(max(0, -b), n + min(0, a)) for n, a, b in zip(tensor.array.shape, after, before)]
    tensor = tensor.moved(lambda array: array[tuple(low)])
    before, after = [max(0, b) for b in before], [max(0, a) for a in after]
    if not any((*before, *after)):
        return tensor
    shape = tuple(b + n + a for b, n, a in zip(before, tensor.array.shape, after))
    inside = tuple(slice(b, b + n) for b, n in zip(before, tensor.array.shape))
    array, keep = np.zeros(shape, dtype=tensor.array.dtype), None
    if fill is None:
        raise OracleError("fill is required")
    if fill == "keep" or tensor.keep is not None:
        keep = np.full(shape, fill == "keep")
        keep[inside] = False if tensor.keep is None else tensor.keep
    if fill != "keep":
        array[...] = np.asarray(fill).astype(array.dtype)
    array[inside] = tensor.array
    return Tensor(array, keep)


def repeated(array: np.ndarray, times: int, axis: int, block: int | None) -> np.ndarray:
    axis %= array.ndim
    blocks = np.split(array, array.shape[axis] // (block or array.shape[axis]), axis)
    return np.concatenate([copy for each in blocks for copy in [each] * times], axis)


def working(*operands: np.ndarray) -> np.dtype:
    """The dtype in which element-wise steps are computed."""
    return np.dtype(np.float64 if any(each.dtype == np.float64 for each in operands) else np.float32)


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
    wide = working(array)
    return (wide.type(factor) * array.astype(wide)).astype(array.dtype)


class Skipped(Exception):
    """A state has no meaning after this step."""


def treat(tensor: Tensor, attributes: Sequence[tuple[str, Any]], shape: tuple[int, ...] | None, world: str) -> Tensor:
    """Carries out the attributes that act on single variables, in their order.

    Args:
        tensor: The variable.
        attributes: All attributes of the part of the statement; those of other kinds are passed over.
        shape: The destination's shape, for "auto".
        world: "model", or the state that the variable is.
    """
    values = dict(attributes)
    fill = values.get("fill")
    for key, value in attributes:
        n = tensor.array.ndim
        if key == "permute":
            tensor = tensor.moved(lambda a, text=value: permuted(a, json.loads(text)))
        elif key == "reshape":
            wanted = shape if value == "auto" else json.loads(value)
            tensor = tensor.moved(lambda a, s=wanted: a.reshape(s))
        elif key == "slice":
            tensor = tensor.moved(lambda a, text=value: sliced(a, text))
        elif key == "pad":
            tensor = extended(tensor, *zip(*json.loads(value)), fill=fill) if n else tensor
        elif key == "resize":
            wanted = shape if value == "auto" else json.loads(value)
            change = [0 if w == -1 else w - e for w, e in zip(wanted, tensor.array.shape)]
            tensor = extended(tensor, [0] * n, change, fill)
        elif key == "repeat":
            axis, block = values["axis"], values.get("block")
            tensor = tensor.moved(lambda a, r=value, x=axis, b=block: repeated(a, r, x, b))
        elif key in ("dtype", "dst_dtype"):
            if world == "model":
                if key == "dst_dtype" and tensor.array.dtype != np.dtype(values["src_dtype"]):
                    raise OracleError(f"{tensor.array.dtype} is not {values['src_dtype']}")
                tensor = Tensor(tensor.array.astype(np.dtype(value)), tensor.keep)
        elif key == "scale":
            if world not in ("model", MASTER):
                raise Skipped
            tensor = Tensor(scaled(tensor.array, value), tensor.keep)
    return tensor


# ---------------------------------------------------------------------------------------- steps of several variables


def split_fused(array: np.ndarray, axis: int, parts: int, weights: Sequence[int]) -> list[np.ndarray]:
    """The components of a fused tensor: every one of its equal parts holds all components, in these proportions."""
    per_part = array.shape[axis] // parts
    edges = np.cumsum([per_part * w // sum(weights) for w in weights])[:-1]
    cells = [np.split(part, edges, axis) for part in np.split(array, parts, axis)]
    return [np.concatenate(column, axis) for column in zip(*cells)]


def join_fused(components: Sequence[np.ndarray], axis: int, parts: int) -> np.ndarray:
    cells = [np.split(component, parts, axis) for component in components]
    return np.concatenate([np.concatenate(row, axis) for row in zip(*cells)], axis)


def summed(arrays: Sequence[np.ndarray], weights: Sequence[float] | None, divisor: int = 1) -> np.ndarray:
    wide = working(*arrays)
    terms = [each.astype(wide) for each in arrays]
    if weights is not None:
        terms = [wide.type(w) * each for w, each in zip(weights, terms)]
    total = reduce(np.add, terms)
    return (total if divisor == 1 else total / wide.type(divisor)).astype(arrays[0].dtype)


def lora_merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, factor: float) -> np.ndarray:
    wide = working(w, a, b)
    a, b = a.astype(wide), b.astype(wide)
    product = reduce(np.add, [a[:, k : k + 1] * b[k : k + 1, :] for k in range(a.shape[1])])
    return (w.astype(wide) + wide.type(factor) * product).astype(w.dtype)


def dequantized_fp8(w: np.ndarray, s: np.ndarray, block: Sequence[int]) -> np.ndarray:
    wide = working(w, s)
    rows, columns = (np.arange(n) // b for n, b in zip(w.shape, block))
    return (w.astype(wide) * s.astype(wide)[rows[:, None], columns[None, :]]).astype(np.float32)


def dequantized_mxfp4(w: np.ndarray, s: np.ndarray) -> np.ndarray:
    values = np.stack([FP4[w & 15], FP4[w >> 4]], axis=-1)
    exact = np.ldexp(values.astype(np.float64), s.astype(np.int32)[..., None, None] - 127)
    return exact.reshape(*w.shape[:-2], -1).astype(np.float32)
