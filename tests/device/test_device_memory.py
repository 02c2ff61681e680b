"""Device storages against arrays: random copies, with views of device memory and without; digests; two devices.

The jobs: device storages against arrays, with views of device memory and without.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

from paddle_flexckpt.algebra import StridedCopy, row_major_strides
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.memory import replica_digests as digests
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.memory.tensor_memory import empty_on_host, host_memory
from paddle_flexckpt.memory.tensors import HostTensor, open_storage
from paddle_flexckpt.transfer import copies
from paddle_flexckpt.transfer.copies import copy_values, pack_copy, read_values, write_values
from tests.device import plugin

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64", "complex128", "uint8", "float16")


@contextlib.contextmanager
def stride_kernels(on):
    """Paddle with or without views of device memory."""
    paddle.set_flags({"FLAGS_use_stride_kernel": on})
    try:
        yield
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})


def random_values(random, dtype, shape):
    """Random bits of a dtype."""
    kind = dtype_of(dtype)
    raw = random.integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * kind.itemsize, dtype=np.uint8)
    return raw.view(kind.numpy).reshape(shape)


def on_device(values, dtype):
    """A fresh device tensor of these bits."""
    host = empty_on_host(values.shape, dtype)
    if values.size:
        host_memory(host)[...] = values.reshape(-1)
    return host._copy_to(paddle.empty([1]).place, True)


def strided(random, values, dtype):
    """A device tensor that shows these values, of a larger tensor's memory, and the array that stands for that."""
    order = random.permutation(values.ndim)
    step = random.integers(1, 3, values.ndim)
    room = [values.shape[axis] * int(s) + int(random.integers(0, 2)) for axis, s in zip(order, step)]
    around = random_values(random, dtype, room)
    cut = tuple(slice(0, values.shape[axis] * int(s), int(s)) for axis, s in zip(order, step))
    back = np.argsort(order)
    around[cut].transpose(back)[...] = values
    base = on_device(around, dtype)
    return base[cut].transpose([int(axis) for axis in back]), base, around, (cut, back)


def random_box(random, shape):
    """A copy of a box of such an array, its axes in any order, to a row-major array of its own; maybe simplified."""
    offset = [int(random.integers(0, extent)) for extent in shape]
    count = [int(random.integers(1, extent - o + 1)) for extent, o in zip(shape, offset)]
    units = row_major_strides(np.asarray([shape]))[0].tolist() if shape else []
    order = random.permutation(len(shape)).tolist()
    extents = tuple(count[axis] for axis in order)
    inner = tuple(row_major_strides(np.asarray([extents]))[0].tolist()) if extents else ()
    base = sum(o * unit for o, unit in zip(offset, units))
    return StridedCopy(extents, base, tuple(units[axis] for axis in order), 0, inner)


def swapped(copy):
    """The same copy the other way."""
    return StridedCopy(copy.extents, copy.target_base, copy.target_strides, copy.source_base, copy.source_strides)


def random_copies(seed, count, views):
    """Random copies to, from and within the device; returns those that went wrong."""
    random = np.random.default_rng(seed)
    wrong = []
    copies.DEVICE_CHUNK_BYTES, before = 64, copies.DEVICE_CHUNK_BYTES
    digests._factors()
    digests.ROW_WORDS, row_words = 8, digests.ROW_WORDS  # several rows and steps
    try:
        with stride_kernels(views):
            for number in range(count):
                dtype = DTYPES[number % len(DTYPES)]
                shape = tuple(random.integers(1, 9, random.integers(0, 4)).tolist())
                error = one(random, dtype, shape, views and number % 2 == 1)
                if error:
                    wrong.append([seed, number, dtype, list(shape), error])
    finally:
        copies.DEVICE_CHUNK_BYTES, digests.ROW_WORDS = before, row_words
    return wrong


def one(random, dtype, shape, is_strided):
    """One tensor through everything; returns what went wrong."""
    values = random_values(random, dtype, shape)
    tensor, base, around, place = on_device(values, dtype), None, None, None
    if is_strided and values.ndim:
        tensor, base, around, place = strided(random, values, dtype)
    memory, flat = DeviceMemory(tensor), values.reshape(-1).copy()
    copy = random_box(random, shape)
    copy = copy.simplified() if random.integers(2) else copy
    box = copy.gather_from(flat)
    if b"".join(part.tobytes() for part in pack_copy(copy, memory)) != box.tobytes():
        return "pack"
    if read_values(memory, memory.along_axes(copy, 0)).tobytes() != box.tobytes():
        return "read"
    start = int(random.integers(0, flat.size))
    if memory.read_range(start, flat.size).tobytes() != flat[start:].tobytes():
        return "range"
    part = int(random.integers(start, flat.size)) + 1
    sums = [digests._sums_digest(storage, {}, start, part) for storage in (memory, flat)]
    if sums[0] != sums[1]:
        return "digest"
    # Within the device, to another dtype's worth of places, and back from the host.
    other = DeviceMemory(on_device(np.zeros(box.size, values.dtype), dtype))
    copy_values(copy, memory, other)
    if other.read_range(0, box.size).tobytes() != box.tobytes():
        return "copy within the device"
    new = random_values(random, dtype, (box.size,))
    target = swapped(copy)
    target.scatter_into(flat)[...] = new.reshape(copy.extents)
    for part in target.along_axes(1, shape).part(0, box.size):
        write_values(memory, part, part.gather_from(new))
    if memory.read_range(0, flat.size).tobytes() != flat.tobytes():
        return "write"
    again = random_values(random, dtype, (box.size,))
    target.scatter_into(flat)[...] = again.reshape(copy.extents)
    copy_values(target, DeviceMemory(on_device(again, dtype)), memory)
    if memory.read_range(0, flat.size).tobytes() != flat.tobytes():
        return "copy into the device"
    if around is not None:
        cut, back = place
        around[cut].transpose(back)[...] = flat.reshape(shape)
        if DeviceMemory(base).read_range(0, around.size).tobytes() != around.tobytes():
            return "something around the view was written"
    host = HostTensor(tensor, fresh=True)
    host.array[...] = values.reshape(-1)
    host.store()
    return "" if memory.read_range(0, flat.size).tobytes() == values.tobytes() else "fill"


def weak_sums():
    """Whether a digest tells mistakes that cancel in weaker sums, on the device and on the host."""
    random = np.random.default_rng(3)
    values = random.standard_normal(200_000).astype(np.float32)
    changed = {"the same": values.copy()}
    for name, change in {
        "one bit": lambda a: a.view(np.uint32).__setitem__(70_000, a.view(np.uint32)[70_000] ^ 1),
        "two signs": lambda a: a.__setitem__([5, 6], -a[[5, 6]]),
        "all signs": lambda a: a.__imul__(-1),
        "two swapped": lambda a: a.__setitem__([1, 2], a[[2, 1]]),
        "rows swapped": lambda a: a.__setitem__(slice(0, 131072), np.roll(a[:131072], 65536)),
        "the last": lambda a: a.__setitem__(-1, a[-1] + 1),
        "shifted": lambda a: a.__setitem__(slice(None), np.roll(a, 1)),
    }.items():
        changed[name] = values.copy()
        change(changed[name])
    found = {
        name: [
            digests._sums_digest(storage, {}, 0, len(array))
            for storage in (array, open_storage(paddle.to_tensor(array)))
        ]
        for name, array in changed.items()
    }
    same = found.pop("the same")
    return [same[0] == same[1], [name for name, pair in found.items() if pair[0] != pair[1] or pair[0] == same[0]]]


def on_the_second_device():
    """Copies to and from a device that is not the current one, and between two."""
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    current, other = "rehearsal:0", "rehearsal:1"
    paddle.set_device(current)
    here = paddle.to_tensor(values)
    paddle.set_device(other)
    there = paddle.zeros([6, 10])
    paddle.set_device(current)
    memory = DeviceMemory(there)
    copy_values(memory.whole(), DeviceMemory(here), memory)
    plugin.reset()
    back = DeviceMemory(here[:, ::2])
    copy_values(back.whole(), DeviceMemory(there[:, 1::2]), back)
    expected = values.copy()
    expected[:, ::2] = values[:, 1::2]
    crossed = plugin.stats()["d2h"]["bytes"]
    return [
        str(there.place),
        paddle.device.get_device() == current,
        crossed,
        bool((there.numpy() == values).all()),
        bool((here.numpy() == expected).all()),
    ]


# -- what is asserted -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("views", [True, False])
def test_random_copies_are_those_of_arrays(device_world2, views):
    assert device_world2.run(random_copies, seed=17, count=180, views=views) == [[], []]


def test_digests_of_device_and_host_are_the_same_and_tell_what_cancels_in_a_plain_sum(device_world2):
    assert device_world2.run(weak_sums) == [[True, []]] * 2


@pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools())
def test_a_device_that_is_not_the_current_one():
    """A rank of a world has one device only, so this is a process of its own."""
    code = (
        "import json; from tests.device.test_device_memory import on_the_second_device as job; print(json.dumps(job()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **plugin.environment(2)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["Place(rehearsal:1)", True, 0, True, True]
