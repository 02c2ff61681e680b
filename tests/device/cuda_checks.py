"""Checks of the plugin over CUDA's runtime, or over functions that look like it. See tests/device/test_cuda_runtime.py.

Every check compares with numpy, bit for bit, and says which kernels may have run on the host.
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from paddle_flexckpt.testing.device_check_record import same
from tests.device import plugin
from tests.device.plugin_checks import main

RANDOM = np.random.RandomState(11)
FLOAT_BITS = {"float16": (np.uint16, np.float16), "bfloat16": (np.uint16, ml_dtypes.bfloat16)}


def on_device(values: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(np.ascontiguousarray(values), place=paddle.CustomPlace("rehearsal", 0))


def fallbacks() -> dict[str, int]:
    """Return the kernels that have run on the host since the last reset, but for those that made the operands."""
    found: dict[str, int] = plugin.stats()["fallbacks"]
    return found


def equal(tensor: paddle.Tensor, wanted: np.ndarray) -> None:
    found = tensor.numpy()
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def random_values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.startswith("complex"):
        return (RANDOM.rand(*shape) + 1j * RANDOM.rand(*shape)).astype(dtype)
    return (RANDOM.rand(*shape) * 200 - 100).astype(dtype)


# ---- kernels of the device's own ----


def check_strided_memory_is_gathered_and_scattered() -> None:
    for dtype in ("uint8", "int16", "float32", "int64", "complex128"):
        values = random_values(dtype, (12, 10, 6))
        base = on_device(values)
        for cut in (np.s_[2:9], np.s_[:, 1:8:2], np.s_[1:11:3, ::2, 5], np.s_[:, :, 1:2]):
            view = base[cut]
            equal(view.contiguous(), values[cut])
            target = on_device(values)
            wanted = values.copy()
            wanted[cut] = wanted[cut] * 0 + np.arange(wanted[cut].size).reshape(wanted[cut].shape).astype(dtype)
            target[cut].copy_(on_device(wanted[cut]), False)
            equal(target, wanted)
        turned = base.transpose([2, 0, 1])
        equal(turned.contiguous(), values.transpose(2, 0, 1))
    assert fallbacks() == {}


def check_rows_are_put_together_and_taken_apart() -> None:
    parts = [random_values("float32", (3, n, 4)) for n in (1, 5, 2)]
    whole = paddle.concat([on_device(part) for part in parts], axis=1)
    equal(whole, np.concatenate(parts, 1))
    for part, wanted in zip(paddle.split(whole, [1, 5, 2], axis=1), parts):
        equal(part, wanted)
    equal(paddle.stack([on_device(parts[0]), on_device(parts[0] + 1)], axis=1), np.stack([parts[0], parts[0] + 1], 1))
    equal(paddle.full([5, 3], 7, dtype="int16"), np.full((5, 3), 7, "int16"))
    equal(paddle.full([4], -2.5, dtype="float64"), np.full(4, -2.5))
    assert fallbacks() == {}


def check_casts_round_as_numpy_does() -> None:
    whole = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    values = np.asarray([0, 1, 2, 3, 57, 100, 127], "int64")
    for source in whole:
        for target in whole:
            equal(on_device(values.astype(source)).astype(target), values.astype(source).astype(target))
    bits = np.concatenate([RANDOM.randint(0, 1 << 32, 100_000, "uint64"), np.arange(0x33000000, 0x39000000, 4099)])
    singles = bits.astype("uint32").view("float32")
    edges = np.asarray(
        [65503.9, 65504, 65519.99, 65520, 65536, -65520, 2**-24, 2**-25, 2**-25 * 1.001, -(2**-26), np.inf]
    )
    singles = np.concatenate([singles, edges.astype("float32"), -edges.astype("float32")])
    for name, (carrier, dtype) in FLOAT_BITS.items():
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = singles.astype(dtype)
        found = on_device(singles).astype(name)
        known = ~np.isnan(singles)
        assert (found.view("int16").numpy().view(carrier)[known] == narrow.view(carrier)[known]).all()
        assert np.isnan(found.astype("float32").numpy()[~known]).all()
        every = np.arange(1 << 16, dtype="uint32").astype(carrier)
        wide = every.view(dtype).astype("float32")
        back = on_device(every.view("int16")).view(name).astype("float32").numpy()
        number = ~np.isnan(wide)
        assert (back.view("uint32")[number] == wide.view("uint32")[number]).all()
        assert np.isnan(back[~number]).all()
    assert fallbacks() == {}


def check_integers_are_multiplied_added_and_summed() -> None:
    for dtype in ("uint8", "int8", "int16", "int32", "int64"):
        limits = np.iinfo(dtype)
        a = RANDOM.randint(limits.min, limits.max, (7, 5, 130)).astype(dtype)
        b = RANDOM.randint(limits.min, limits.max, (5, 1)).astype(dtype)
        with np.errstate(over="ignore"):
            equal(on_device(a) * on_device(b), a * b)
            equal(on_device(a) + on_device(a), a + a)
    for axis in (None, 0, 1, 2, (0, 2)):
        wanted = np.asarray(a.sum(axis, dtype="int64"))
        equal(paddle.sum(on_device(a), axis=axis), wanted)
        equal(
            paddle.sum(on_device(a.astype("int32")), axis=axis, dtype="int64"),
            np.asarray(a.astype("int32").sum(axis, dtype="int64")),
        )
    assert fallbacks() == {}


# ---- kernels that run on the host ----


def check_other_kernels_run_on_the_host_and_are_listed() -> None:
    a, b = random_values("float32", (6, 4)), random_values("float32", (4, 5))
    left, right = on_device(a), on_device(b)
    plugin.reset()
    product = paddle.matmul(left, right)
    assert np.allclose(product.numpy(), a @ b, rtol=1e-6)
    assert fallbacks() == {"matmul": 1}
    address = left.data_ptr()
    left.scale_(2.0)
    assert left.data_ptr() == address  # written where it lies
    equal(left, a * np.float32(2))
    view = left[2:4]
    view.add_(on_device(np.ones((2, 4), "float32")))
    wanted = a * np.float32(2)
    wanted[2:4] += 1
    equal(left, wanted)
    assert set(fallbacks()) == {"matmul", "scale", "grad_add"}, fallbacks()


# ---- the table of functions ----


def check_copies_are_counted_and_timed() -> None:
    values = RANDOM.randint(0, 255, 3 << 20).astype("uint8")
    held = on_device(values)
    paddle.device.synchronize()
    plugin.reset()
    host = held._copy_to(paddle.CPUPlace(), True)
    assert host.numpy().tobytes() == values.tobytes()
    found = plugin.stats()["d2h"]
    assert (found["calls"], found["bytes"], found["pageable_bytes"]) == (1, values.nbytes, values.nbytes)
    (span,) = plugin.spans()
    assert (span.what, span.nbytes, span.pageable) == ("d2h", values.nbytes, True)
    assert span.begin <= span.end


def check_an_event_that_is_not_there_yet_harms_no_later_call() -> None:
    held = on_device(np.arange(6, dtype="int64"))
    event = paddle.device.Event()
    event.record()
    answers = [event.query(), event.query()]
    assert answers[-1]
    equal(held * held, np.arange(6) ** 2)  # a kernel of the device's own


def check_host_memory_is_page_locked() -> None:
    from paddle_flexckpt.memory.device_bytes import lock_pages

    memory = np.zeros(1 << 20, "uint8")
    unlock = lock_pages(memory, "rehearsal:0")
    assert unlock is not None
    assert plugin.stats()["pinned_bytes"] == memory.nbytes
    assert lock_pages(memory, "rehearsal:0") is None  # what is locked cannot be locked again
    unlock()
    assert plugin.stats()["pinned_bytes"] == 0


def check_memory_that_is_not_there_is_refused() -> None:
    held = on_device(np.arange(1000, dtype="float32"))
    address = held.data_ptr()
    assert plugin.read(address, 4000) == np.arange(1000, dtype="float32").tobytes()
    for wrong in (address + (1 << 40), 16):
        refused(lambda wrong=wrong: plugin.read(wrong, 4), "not within one live allocation")
    del held


def check_memory_ends() -> None:
    plugin.configure(memory_gib=1 / 16)
    held = paddle.zeros([8 << 20], dtype="uint8")
    refused(lambda: paddle.zeros([64 << 20], dtype="uint8"), "memory")
    plugin.configure(memory_gib=0)
    again = paddle.full([64 << 20], 3, dtype="uint8")
    assert int(again[-1]) == 3
    assert same(held, np.zeros(8 << 20, "V1"))


def check_a_forked_child_is_told() -> None:
    held = on_device(np.zeros(4))
    if not (child := os.fork()):
        try:
            held.numpy()
        except Exception as error:
            os._exit(7 if "forked child" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def refused(work: Any, words: str) -> None:
    try:
        work()
    except Exception as error:
        assert words in str(error).lower(), error
    else:
        raise AssertionError(f"no error with {words!r}")


if __name__ == "__main__":
    paddle.set_device("rehearsal:0")
    checks = {name: work for name, work in globals().items() if name.startswith("check_")}
    main(
        {name: (lambda work=work: (plugin.reset(), work())) for name, work in checks.items()},
        [name[6:] for name in checks],
    )
