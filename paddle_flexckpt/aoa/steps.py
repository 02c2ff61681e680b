"""Steps: element-wise computations whose result is the same, bit for bit, for any box of it.

The same scalar operations in the same order compute an element, whatever box it is in. There are no matrix products and
no reductions, whose order of summation depends on the shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa.casts import COMPLEX, FLOATS, Number, converted, number_in
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.structure import StructureError, TypedStep
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.dtypes import check_range

# Sign, exponent and mantissa of 4-bit floats: s eem.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _check(what: str, infos: Sequence[TensorInfo], count: int) -> None:
    if len(infos) != count:
        raise StructureError(f"{what} takes {count} operand{'s' if count != 1 else ''}; got {len(infos)}")


def _check_floats(what: str, infos: Sequence[TensorInfo], first: int = 0) -> None:
    for number, info in enumerate(infos, first + 1):
        if info.dtype not in FLOATS:
            raise StructureError(f"{what} takes floating-point numbers; got {info.dtype} (operand {number})")


def _check_equal_shapes(what: str, infos: Sequence[TensorInfo]) -> None:
    for number, info in enumerate(infos, 1):
        if info.shape != infos[0].shape:
            raise StructureError(
                f"{what} takes operands of equal shape; expected {list(infos[0].shape)} as operand 1 has, "
                f"got {list(info.shape)} (operand {number})"
            )


def _work_dtype(operands: Sequence[np.ndarray]) -> type[np.floating]:
    return np.float64 if any(operand.dtype == np.float64 for operand in operands) else np.float32


def _weighted_sum(operands: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return ``w0 * A + w1 * B + ...``, from left to right."""
    work = _work_dtype(operands)
    with np.errstate(all="ignore"):
        terms = (a.astype(work) if w == 1 else a.astype(work) * work(w) for w, a in zip(weights, operands))
        return functools.reduce(operator.add, terms)


def _rounded(result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    # Operations on 0-d arrays give scalars.
    result = np.asarray(result)
    # An operation on two NaNs may return either, and the sign of a new NaN is not fixed: vector and scalar code differ,
    # so the result would depend on the place in the array. Here all NaNs become one.
    is_nan = np.isnan(result)
    if is_nan.any():
        result = np.where(is_nan, result.dtype.type(np.nan), result)
    return converted(result, dtype.name)


@dataclass(frozen=True)
class Constant:
    """The same number for every element; ``dtype`` is Paddle's name."""

    fill: Number
    dtype: str

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return nothing."""
        return ()

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Raise StructureError: a constant has the shape that is asked for."""
        raise StructureError("a constant's shape does not follow from operands")

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Fill the box."""
        value = number_in(self.fill, self.dtype)
        return np.full(box.shape, value, value.dtype)


class _Pointwise:
    """The base of steps that compute an element from the elements at the same place."""

    what: ClassVar[str]

    @property
    def operands(self) -> int:
        """Return the number of operands."""
        return 1

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the same box of each."""
        return (box,) * self.operands

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return the first operand's shape and dtype."""
        _check(self.what, infos, self.operands)
        _check_floats(self.what, infos)
        _check_equal_shapes(self.what, infos)
        return infos[0]


@dataclass(frozen=True)
class Convert(_Pointwise):
    """Casts to ``dtypes``, Paddle's names, one after the other."""

    dtypes: tuple[str, ...]

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return the operand's shape with the last dtype."""
        _check("a cast", infos, 1)
        for before, after in zip((infos[0].dtype, *self.dtypes), self.dtypes):
            if before in COMPLEX and after not in (*COMPLEX, "bool"):
                raise StructureError(f"a cast of {before} to {after} would drop the imaginary parts")
        return TensorInfo(infos[0].shape, (infos[0].dtype, *self.dtypes)[-1])

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Cast the elements."""
        array = operands[0]
        for dtype in self.dtypes:
            before, array = array, converted(array, dtype)
            check_range(before, array)
        return array


@dataclass(frozen=True)
class Scale(_Pointwise):
    """``factor * A[i]``."""

    what: ClassVar[str] = "scale"
    factor: float

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Multiply the elements."""
        return _rounded(_weighted_sum(operands, (self.factor,)), operands[0].dtype)


@dataclass(frozen=True)
class WeightedSum(_Pointwise):
    """``w0 * A[i] + w1 * B[i] + ...``, from left to right; all weights are 1 for a plain sum."""

    what: ClassVar[str] = "sum"
    weights: tuple[float, ...]

    @property
    def operands(self) -> int:
        """Return the number of operands."""
        return len(self.weights)

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Add the elements."""
        return _rounded(_weighted_sum(operands, self.weights), operands[0].dtype)


@dataclass(frozen=True)
class Average(_Pointwise):
    """``(A[i] + B[i] + ...) / count``, summed from left to right."""

    what: ClassVar[str] = "average"
    count: int

    @property
    def operands(self) -> int:
        """Return the number of operands."""
        return self.count

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Average the elements."""
        total = _weighted_sum(operands, (1.0,) * self.count)
        with np.errstate(all="ignore"):
            return _rounded(total / total.dtype.type(self.count), operands[0].dtype)


@dataclass(frozen=True)
class Same(_Pointwise):
    """The first of operands that have to be equal bit for bit. ``names`` are their keys, for the message."""

    names: tuple[str, ...]

    @property
    def operands(self) -> int:
        """Return the number of operands."""
        return len(self.names)

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return shape and dtype, which every operand has."""
        _check("a comparison", infos, len(self.names))
        for name, info in zip(self.names, infos):
            if info != infos[0]:
                raise StructureError(
                    f"{self.names[0]!r} and {name!r} have to be equal; got {infos[0].dtype} {list(infos[0].shape)} "
                    f"and {info.dtype} {list(info.shape)}"
                )
        return infos[0]

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Compare the elements and return the first operand's.

        Raises:
            CheckpointError: The operands differ.
        """
        rows = [np.ascontiguousarray(operand).reshape(-1) for operand in operands]
        width = rows[0].itemsize
        for name, row in zip(self.names[1:], rows[1:]):
            different = (row.view(np.uint8) != rows[0].view(np.uint8)).reshape(-1, width).any(axis=1)
            if different.any():
                first = int(np.argmax(different))
                index = np.unravel_index(first, box.shape) if box.shape else ()
                place = [int(o + i) for o, i in zip(box.offset, index)]
                values = ", ".join(f"{n!r} has {r[first]}" for n, r in zip(self.names, rows))
                raise CheckpointError(
                    f"{self.names[0]!r} and {name!r} go to one target and have to be equal; at element {place} "
                    f"{values}. Remedy (FC603): say in a statement which of them the target shall take"
                )
        return operands[0]


@dataclass(frozen=True)
class LoraMerge:
    """``W[i, j] + scale * (A[i, 0] * B[0, j] + A[i, 1] * B[1, j] + ...)``, from left to right.

    Attributes:
        scale: Factor of the product.
        rank: Extent of A's second and B's first axis; -1: not known yet, see :func:`bound`.
    """

    scale: float
    rank: int = -1

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the same box of W, its rows of A and its columns of B."""
        (row, column), (rows, columns) = box.offset, box.shape
        return box, Box((row, 0), (rows, self.rank)), Box((0, column), (self.rank, columns))

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return W's shape and dtype."""
        _check("lora_merge", infos, 3)
        _check_floats("lora_merge", infos)
        shape = infos[0].shape
        if len(shape) != 2:
            raise StructureError(f"lora_merge takes a matrix W; got shape {list(shape)}")
        expected = [(shape[0], self.rank), (self.rank, shape[1])]
        for name, info, wanted in zip("AB", infos[1:], expected):
            if info.shape != wanted:
                raise StructureError(
                    f"lora_merge of W {list(shape)} with rank {self.rank}: expected {name} {list(wanted)}, "
                    f"got {list(info.shape)}"
                )
        return infos[0]

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the elements of the box."""
        work = _work_dtype(operands)
        weight, left, right = (operand.astype(work) for operand in operands)
        if not self.rank:
            return operands[0]
        with np.errstate(all="ignore"):
            # Not a matrix product: its order of summation depends on the shape of the box.
            product = left[:, :1] * right[:1]
            for index in range(1, self.rank):
                product += left[:, index : index + 1] * right[index : index + 1]
            return _rounded(weight + work(self.scale) * product, operands[0].dtype)


@dataclass(frozen=True)
class DequantFp8:
    """Each block of W times its scale: ``W[i, j] * S[i // b0, j // b1]``, as float32."""

    block: tuple[int, ...]

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the same box of W and the scales of the blocks that it touches."""
        first = tuple(o // b for o, b in zip(box.offset, self.block))
        stop = tuple(-(-s // b) for s, b in zip(box.stop, self.block))
        return box, Box(first, tuple(max(s - f, 0) for f, s in zip(first, stop)))

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return W's shape, float32."""
        _check('dequant="fp8"', infos, 2)
        _check_floats('dequant="fp8"', infos)
        weight, scales = infos
        if len(self.block) != len(weight.shape) or min(self.block, default=1) < 1:
            raise StructureError(
                f'dequant="fp8" takes one positive block extent for each axis of W; got block {list(self.block)} '
                f"for shape {list(weight.shape)}"
            )
        expected = tuple(-(-extent // b) for extent, b in zip(weight.shape, self.block))
        if scales.shape != expected:
            raise StructureError(
                f'dequant="fp8" of {list(weight.shape)} in blocks of {list(self.block)}: expected scales of shape '
                f"{list(expected)}, got {list(scales.shape)}"
            )
        return TensorInfo(weight.shape, "float32")

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the elements of the box."""
        work = _work_dtype(operands)
        weight, scales = (operand.astype(work) for operand in operands)
        for axis, (start, extent, block) in enumerate(zip(box.offset, box.shape, self.block)):
            scales = scales.take((start + np.arange(extent)) // block - start // block, axis=axis)
        with np.errstate(all="ignore"):
            return _rounded(weight * scales, np.dtype(np.float32))


@dataclass(frozen=True)
class DequantMxfp4:
    """``fp4(nibble) * 2 ** (S - 127)`` as float32, from W uint8 ``[..., G, n]`` and S uint8 ``[..., G]``.

    Attributes:
        group: Bytes per group, n; -1: not known yet, see :func:`bound`.
    """

    group: int = -1

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the bytes and the scales of the groups that the box touches."""
        first, stop = box.offset[-1] // (2 * self.group), -(-box.stop[-1] // (2 * self.group))
        scales = Box((*box.offset[:-1], first), (*box.shape[:-1], max(stop - first, 0)))
        return Box((*scales.offset, 0), (*scales.shape, self.group)), scales

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return ``[..., G * 2 * n]``, float32."""
        _check('dequant="mxfp4"', infos, 2)
        weight, scales = infos
        for name, info in zip("WS", infos):
            if info.dtype not in ("uint8", "float8_e8m0fnu"):
                raise StructureError(f'dequant="mxfp4" takes {name} of dtype uint8; got {info.dtype}')
        if len(weight.shape) < 2 or weight.shape[-1] != self.group or self.group < 1:
            raise StructureError(
                f'dequant="mxfp4" takes W of shape [..., groups, {self.group}]; got {list(weight.shape)}'
            )
        if scales.shape != weight.shape[:-1]:
            raise StructureError(
                f'dequant="mxfp4" of W {list(weight.shape)}: expected S {list(weight.shape[:-1])}, '
                f"got {list(scales.shape)}"
            )
        return TensorInfo((*weight.shape[:-2], weight.shape[-2] * 2 * self.group), "float32")

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the elements of the box."""
        weight, scales = operands
        nibbles = np.stack([weight & 15, weight >> 4], axis=-1)
        exponents = scales.astype(np.int32)[..., None, None] - 127
        with np.errstate(all="ignore"):
            values = np.ldexp(_FP4[nibbles], exponents)
        # reshape cannot tell the last extent of an array without elements.
        values = values.reshape(*scales.shape[:-1], scales.shape[-1] * 2 * self.group)
        start = box.offset[-1] % (2 * self.group)
        return np.ascontiguousarray(values[..., start : start + box.shape[-1]])


def bound(step: TypedStep, infos: Sequence[TensorInfo]) -> TypedStep:
    """Return a step that knows its operands' extents, on which the boxes that it reads depend."""
    if isinstance(step, LoraMerge) and step.rank < 0 and len(infos) == 3 and infos[1].shape:
        return replace(step, rank=infos[1].shape[-1])
    if isinstance(step, DequantMxfp4) and step.group < 0 and len(infos) == 2 and infos[0].shape:
        return replace(step, group=infos[0].shape[-1])
    return step
