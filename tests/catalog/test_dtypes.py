"""The table of element types against safetensors itself and against numpy and ml_dtypes."""

from __future__ import annotations

import json
import re
import struct
import warnings

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from paddle_flexckpt.catalog import CheckpointError, DType, ValidationError, dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES, assign, castable, is_float

# What paddle.dtype has names for and tensors can be made of.
PADDLE_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64 "
    "complex64 complex128"
).split()
# Codes of types that Paddle has no tensors of.
NOT_IN_PADDLE = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
STORED = [dtype for dtype in DTYPES.values() if dtype.trailing == 1]


def container(code: str, size: int) -> bytes:
    """A safetensors file with one element of that code in so many bytes."""
    header = json.dumps({"x": {"dtype": code, "shape": [1], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def header_of(data: bytes) -> dict:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def known_codes() -> set[str]:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(container("no such code", 1))
    return set(re.findall(r"`(\w+)`", str(caught.value)))


def test_the_table_has_every_paddle_type_once():
    assert sorted(DTYPES) == sorted(PADDLE_NAMES)
    assert all(dtype.name == name for name, dtype in DTYPES.items())
    assert len({dtype.numpy for dtype in DTYPES.values()}) == len(DTYPES)
    assert len({(dtype.safetensors, dtype.trailing) for dtype in DTYPES.values()}) == len(DTYPES)


def test_the_table_has_every_safetensors_code_of_a_paddle_type():
    known = known_codes()
    assert "BF16" in known
    assert known - {dtype.safetensors for dtype in DTYPES.values()} <= NOT_IN_PADDLE


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_numpy_type_has_the_name(dtype: DType):
    assert dtype.numpy.name == dtype.name
    assert dtype.itemsize == dtype.numpy.itemsize == np.zeros(1, dtype.numpy).nbytes


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_types_that_numpy_lacks_are_those_of_ml_dtypes(name):
    assert DTYPES[name].numpy == np.dtype(getattr(ml_dtypes, name))


@pytest.mark.parametrize("dtype", STORED, ids=lambda d: d.name)
def test_safetensors_accepts_the_code_with_the_element_size(dtype: DType):
    if dtype.safetensors not in known_codes():
        pytest.skip(f"this safetensors release does not know {dtype.safetensors}")
    safetensors.deserialize(container(dtype.safetensors, dtype.itemsize))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(container(dtype.safetensors, dtype.itemsize + 1))


@pytest.mark.parametrize("dtype", STORED, ids=lambda d: d.name)
def test_safetensors_writes_the_numpy_type_under_the_code(dtype: DType):
    try:
        data = safetensors.numpy.save({"x": np.zeros(3, dtype.numpy)})
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError):
        pytest.skip(f"this safetensors release does not write {dtype.name}")
    assert header_of(data)["x"]["dtype"] == dtype.safetensors


def test_complex128_is_stored_as_pairs_of_f64():
    dtype = DTYPES["complex128"]
    value = np.asarray([1 + 2j, 3 - 4j])
    pairs = value.view(dtype_of("float64").numpy).reshape(*value.shape, dtype.trailing)
    assert (dtype.safetensors, pairs.tolist()) == ("F64", [[1, 2], [3, -4]])


def test_names_with_and_without_the_module():
    assert dtype_of("paddle.bfloat16") is dtype_of("bfloat16") is DTYPES["bfloat16"]
    assert dtype_of(str(np.dtype(np.int32))).name == "int32"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValidationError, match=r"'float7' is not supported.*bfloat16.*complex128"):
        dtype_of("float7")
    assert issubclass(ValidationError, CheckpointError)
    assert issubclass(ValidationError, ValueError)


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        DTYPES["float7"] = DTYPES["float32"]


CASTS = {
    "floats": (("float32", "bfloat16"), ("float8_e4m3fn", "float64"), ("float16", "complex64")),
    "complex numbers": (("complex64", "complex128"), ("complex128", "complex64")),
    "integers": (("int32", "int64"), ("uint8", "int16"), ("int64", "bfloat16"), ("bool", "float32"), ("bool", "int8")),
}
NO_CASTS = (
    *(("complex64", "float32"), ("float32", "int64"), ("float32", "bool")),
    *(("int64", "int32"), ("uint8", "int8"), ("int8", "uint8"), ("int8", "bool"), ("complex64", "bool")),
)


@pytest.mark.parametrize(("source", "target"), [pair for pairs in CASTS.values() for pair in pairs])
def test_what_a_load_may_cast(source, target):
    assert castable(source, target)


@pytest.mark.parametrize(("source", "target"), NO_CASTS)
def test_what_would_lose_its_meaning_is_not_cast(source, target):
    assert not castable(source, target)


@pytest.mark.parametrize("source", [name for name in DTYPES if is_float(name)])
def test_a_cast_of_signalling_nans_warns_of_nothing(source):
    """Their bits come from anywhere: memory that was never filled, a damaged file. NaN is what they are as a float."""
    dtype = DTYPES[source]
    bits = np.arange(1 << min(8 * dtype.itemsize, 16), dtype=np.uint64) << np.uint64(max(0, 8 * dtype.itemsize - 16))
    every = (bits + np.uint64(dtype.itemsize > 2)).astype(f"u{dtype.itemsize}").view(dtype.numpy)
    with np.errstate(invalid="ignore"):
        nans = every[np.isnan(every)]
    assert len(nans)
    for name, target in DTYPES.items():
        if castable(source, name):
            out = np.zeros(len(nans), target.numpy)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assign(out, nans)
            with np.errstate(invalid="ignore"):
                assert np.isnan(out).all()
