"""See in a minute whether the device does anything: allocate, copy, compare bit for bit, save and load once.

``python -m tests.device.gpu.smoke --json FILE``, in a process that has the plugin's device (``on_plugin.py``). Each
line is printed before it is tried: the last line of a log that ends early names what did not work.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import paddle_flexckpt as fc
from tests.device import plugin

ELEMENTS = 16 << 20
DTYPES = ("float32", "float16", "bfloat16", "int64", "bool")


class Smoke:
    """Make small things on one device, one after the other."""

    def __init__(self, device: str, elements: int) -> None:
        self.done: dict[str, float] = {}
        self._device = device
        self._values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32).reshape(-1, 1024)

    def all(self) -> None:
        """Make them in their order; what raises ends it."""
        paddle.set_device(self._device)
        self._make("allocate", self._allocate)
        self._make("copy to the device and back", self._copies)
        self._make("copy on the device", self._copy_within)
        self._make("fill and add", self._kernels)
        self._make("every second column, and the transposed", self._views)
        for dtype in DTYPES:
            self._make(f"save and load {dtype}", lambda dtype=dtype: self._saves(dtype))

    def _make(self, name: str, work: Callable[[], None]) -> None:
        print(name, end=" ", flush=True)
        begin = time.perf_counter()
        work()
        paddle.device.synchronize()
        self.done[name] = time.perf_counter() - begin
        print(f"{self.done[name]:.3f} s", flush=True)

    def _allocate(self) -> None:
        tensor = paddle.empty(list(self._values.shape), dtype="float32")
        require(str(tensor.place) == f"Place({self._device})", f"an empty tensor is on {tensor.place}")

    def _copies(self) -> None:
        equal(paddle.to_tensor(self._values).numpy(), self._values, "what came back")

    def _copy_within(self) -> None:
        source = paddle.to_tensor(self._values)
        copy = source.clone()
        source.fill_(0.0)
        equal(copy.numpy(), self._values, "the copy")

    def _kernels(self) -> None:
        tensor = paddle.full(list(self._values.shape), 2.0)
        tensor.add_(paddle.full(list(self._values.shape), 3.0))
        equal(tensor.numpy(), np.full_like(self._values, 5.0), "2 + 3")

    def _views(self) -> None:
        tensor = paddle.to_tensor(self._values)
        equal(tensor[:, ::2].numpy(), self._values[:, ::2], "every second column")
        equal(tensor.transpose([1, 0]).numpy(), self._values.T, "the transposed")

    def _saves(self, dtype: str) -> None:
        source = paddle.to_tensor(self._values[:1024]).cast(dtype)
        target = paddle.zeros(source.shape, dtype=dtype)
        with tempfile.TemporaryDirectory() as folder:
            fc.save_state_dict({"w": source}, folder)
            fc.load_state_dict({"w": target}, folder)
        equal(bits(target), bits(source), "what was loaded")
        require(bool(bits(source).any()), "what was saved is all zeros")


def bits(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor."""
    return tensor._copy_to(paddle.CPUPlace(), True).reshape([-1]).view("uint8").numpy()


def equal(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raise if two arrays differ in a bit."""
    differ = int((np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)).sum())
    require(differ == 0, f"{what}: {differ} of {expected.nbytes} bytes are other ones")


def require(truth: bool, otherwise: str) -> None:
    if not truth:
        raise RuntimeError(otherwise)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of the largest tensor (default %(default)s)")
    options = parser.parse_args(argv)
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    device = f"{plugin.DEVICE_TYPE}:0"
    smoke = Smoke(device, options.elements)
    try:
        smoke.all()
    finally:
        found = {
            "device": device,
            "runtime": plugin.runtime(),
            "paddle": paddle.__version__,
            "seconds": smoke.done,
            "stats": plugin.stats(),
        }
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"all {len(smoke.done)} went well; kernels on the host: {found['stats'].get('fallbacks')}")


if __name__ == "__main__":
    main()
