"""HostTensor: a tensor's bytes on the host, its own memory wherever that is possible."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.catalog.dtypes import DTYPES, dtype_of
from paddle_flexckpt.memory.tensor_memory import address_range, dtype_name, element_count, is_initialized
from paddle_flexckpt.memory.tensors import HostTensor

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]


def paddle_has(name: str) -> bool:
    try:
        # "uint16" is an old name of bfloat16 there.
        return dtype_name(paddle.empty([1], dtype=name)) == name
    except (TypeError, ValueError, RuntimeError):
        return False


NAMES = [name for name in DTYPES if paddle_has(name)]


def of_bits(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[paddle.Tensor, np.ndarray]:
    """A Paddle tensor of random bits, and those bits as an array; not by way of HostTensor."""
    dtype = dtype_of(name)
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        raw %= 2
    values = raw.view(dtype.numpy).reshape(shape)
    if not values.size:
        return paddle.empty(list(shape), dtype=name), values
    if dtype.itemsize == 1 and name not in ("bool", "int8", "uint8"):
        tensor = paddle.to_tensor(raw.reshape(shape)).view(name)
    elif name == "bfloat16":
        tensor = paddle.to_tensor(raw.view(np.int16).reshape(shape)).view(name)
    else:
        tensor = paddle.to_tensor(values)
    assert dtype_name(tensor) == name
    return tensor, values


def test_paddle_has_all_the_types_that_models_use():
    assert {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
            "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"} <= set(NAMES)  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (), (0,), (2, 0, 3), (1, 1)])
def test_bits_are_exact_and_a_contiguous_tensor_is_not_copied(shape):
    for name in NAMES:
        tensor, values = of_bits(name, shape)
        host = HostTensor(tensor)
        assert host.array.tobytes() == values.tobytes(), name
        assert (host.array.dtype, host.array.shape) == (dtype_of(name).numpy, (values.size,))
        assert element_count(tensor) == values.size, name
        assert is_initialized(tensor), name
        if values.size:
            assert not host.staged, name
            assert host.array.ctypes.data == tensor.data_ptr(), name
            assert address_range(tensor) == (tensor.data_ptr(), tensor.data_ptr() + values.nbytes), name
        else:
            assert address_range(tensor) is None, name


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int64"])
def test_what_is_written_to_the_array_is_in_the_tensor(name):
    tensor, _ = of_bits(name, (4, 5))
    _, other = of_bits(name, (4, 5), seed=1)
    host = HostTensor(tensor)
    host.array[...] = other.reshape(-1)
    host.store()
    assert HostTensor(tensor.clone()).array.tobytes() == other.tobytes()


VIEWS = {
    "transposed": lambda tensor: tensor.transpose([1, 0]),
    "columns": lambda tensor: tensor[:, 1:3],
    "rows": lambda tensor: tensor[1:3],
    "every other": lambda tensor: tensor[::2, ::2],
    "one column": lambda tensor: tensor[:, 2],
    "broadcast": lambda tensor: tensor[:1].expand([3, tensor.shape[1]]),
}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex128"])
@pytest.mark.parametrize("which", ["transposed", "columns", "rows", "every other", "one column", "broadcast"])
def test_views_are_read_as_they_are_seen(name, which):
    tensor, values = of_bits(name, (6, 5))
    expected = {
        "transposed": values.T, "columns": values[:, 1:3], "rows": values[1:3], "every other": values[::2, ::2],
        "one column": values[:, 2], "broadcast": np.broadcast_to(values[:1], (3, 5)),
    }[which]  # fmt: skip
    view = VIEWS[which](tensor)
    host = HostTensor(view)
    assert host.array.tobytes() == np.ascontiguousarray(expected).tobytes()
    assert host.staged == (not view.is_contiguous())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("which", ["transposed", "columns", "rows", "every other", "one column"])
def test_a_view_is_written_through_and_nothing_around_it(name, which):
    tensor, values = of_bits(name, (6, 5))
    view = VIEWS[which](tensor)
    if view.data_ptr() != tensor.data_ptr() and not (
        tensor.data_ptr() < view.data_ptr() < tensor.data_ptr() + values.nbytes
    ):
        pytest.skip("this Paddle copies instead of making a view")
    expected = values.copy()
    into = {"transposed": expected.T, "columns": expected[:, 1:3], "rows": expected[1:3],
            "every other": expected[::2, ::2], "one column": expected[:, 2]}[which]  # fmt: skip
    _, new = of_bits(name, into.shape, seed=1)
    into[...] = new
    host = HostTensor(view)
    host.array[...] = new.reshape(-1)
    host.store()
    assert HostTensor(tensor).array.tobytes() == expected.tobytes()


def test_the_array_outlives_the_tensor():
    tensor, values = of_bits("float32", (1 << 18,))
    array = HostTensor(tensor).array
    part = array[1000:2000].view(np.uint8)
    del tensor, array
    gc.collect()
    others = [paddle.ones([1 << 18]) for _ in range(8)]  # would take the memory if it had been given back
    assert part.tobytes() == values[1000:2000].tobytes()
    del others


def test_opening_does_not_keep_a_tensor_for_ever():
    import weakref

    tensor, _ = of_bits("float32", (16,))
    alive = weakref.ref(tensor)
    host = HostTensor(tensor)
    del tensor, host
    gc.collect()
    assert alive() is None


def test_a_parameter_that_needs_gradients_is_written_in_place():
    parameter = paddle.create_parameter([3, 4], "float32")
    address = parameter.data_ptr()
    host = HostTensor(parameter)
    host.array[...] = np.arange(12)
    host.store()
    assert (parameter.numpy().reshape(-1) == np.arange(12)).all()
    assert parameter.data_ptr() == address
    assert not parameter.stop_gradient


def test_an_uninitialised_tensor_is_recognised():
    tensor = paddle.ones([3])
    tensor._clear_data()
    assert not is_initialized(tensor)


def test_numpy_arrays_are_tensors_too():
    base = np.arange(24, dtype=ml_dtypes.bfloat16).reshape(4, 6)
    host = HostTensor(base)
    assert not host.staged
    assert host.array.ctypes.data == base.ctypes.data
    host = HostTensor(base[:, 1:3])
    assert host.staged
    host.array[...] = 0
    assert (base != 0).sum() == 23
    host.store()
    assert (base[:, 1:3] == 0).all()
    assert (base[:, 3:] != 0).all()
    assert dtype_name(base) == "bfloat16"


SCRIPT = """
import sys
import numpy as np
import paddle
paddle.set_flags({"FLAGS_use_stride_kernel": False})
from paddle_flexckpt import ShardedWeight, load_state_dict, save_state_dict
from paddle_flexckpt.memory.tensors import HostTensor

full = np.arange(30, dtype=np.float32).reshape(5, 6)
tensor = paddle.to_tensor(full)
for view, expected in (
    (tensor.transpose([1, 0]), full.T), (tensor[:, 1:3], full[:, 1:3]), (tensor[::2, ::2], full[::2, ::2])
):
    assert HostTensor(view).array.tobytes() == np.ascontiguousarray(expected).tobytes()

path = sys.argv[1]
part = tensor[:, 2:5]
save_state_dict({"w": ShardedWeight("w", part, (5, 3), (5, 3), (0, 0)), "t": tensor.transpose([1, 0])}, path)
target = {"w": paddle.zeros([5, 3]), "t": paddle.zeros([5, 6]).transpose([1, 0])}
target["w"].stop_gradient = False
load_state_dict(target, path)
assert (target["w"].numpy() == full[:, 2:5]).all()
assert (target["t"].numpy() == full.T).all()
print("right")
"""


def test_without_strided_kernels(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip().endswith("right"), done.stderr
