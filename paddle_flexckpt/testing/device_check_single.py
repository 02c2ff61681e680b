"""Checks of the library in one process on a device. Started by :mod:`~paddle_flexckpt.testing.device_check`.

Tested in tests/device/test_device_check.py.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.saving.save_options import LEAST_BYTES
from paddle_flexckpt.testing.device_check_counts import count_alone
from paddle_flexckpt.testing.device_check_link import LinkChecks
from paddle_flexckpt.testing.device_check_memory import MemoryChecks, PageChecks
from paddle_flexckpt.testing.device_check_record import (
    DTYPES,
    FP8,
    Found,
    NotHere,
    Record,
    Work,
    elements,
    on_device,
    require,
    require_same,
    same,
)

#: Tensors of one type have more bytes than a save in slices copies at once, and no round number of elements.
_SHAPE = (257, 289)
_SLICE_BYTES = 100_000


class SingleChecks:
    """The checks of one process, in their order."""

    def __init__(self, devices: list[str], folder: Path, writer: fc.BackgroundWriter) -> None:
        """Take all accelerators (most checks use the first), the folder for checkpoints, and a writer."""
        self._devices, self._folder, self._writer = devices, folder, writer
        paddle.set_device(devices[0])

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "save and load, all dtypes", lambda: self._round_trip("dtypes", DTYPES)
        yield "float8", lambda: self._round_trip("float8", FP8)
        yield "views and strided tensors", self._views
        yield "a tensor written on another stream", self._other_stream
        yield "tensors change after an asynchronous save", self._asynchronous
        yield "a tensor on the second device", self._second_device
        yield "model, optimizer and random state", self._training

    def _round_trip(self, name: str, dtypes: dict[str, int]) -> Found:
        known = {dtype: width for dtype, width in dtypes.items() if hasattr(paddle, dtype)}
        if not known:
            raise NotHere(f"this Paddle has none of {', '.join(dtypes)}")
        shapes: list[tuple[int, ...]] = [(257, 129), (), (0, 3), (1,)]
        items = {
            f"{dtype}{list(shape)}": (elements(f"{dtype}{shape}", shape, dtype), dtype)
            for dtype in known
            for shape in (shapes if name == "dtypes" else shapes[:1])
        }
        source = {key: on_device(*item) for key, item in items.items()}
        fc.save_state_dict(source, self._folder / name)
        target = {key: on_device(np.zeros_like(item[0]), item[1]) for key, item in items.items()}
        fc.load_state_dict(target, self._folder / name)
        wanted = {key: values for key, (values, _) in items.items()}
        require_same(target, wanted, "other values after the load")
        require_same(source, wanted, "the save has changed its source")
        return {"nbytes": sum(values.nbytes for values, _ in items.values()), "detail": f"{len(known)} dtypes"}

    def _views(self) -> Found:
        whole = np.random.RandomState(1).rand(96, 80).astype("float32")
        base = paddle.to_tensor(whole)
        cuts = {
            "rows": (slice(8, 40), slice(None)),
            "columns": (slice(None), slice(16, 48)),
            "steps": (slice(1, 90, 3), slice(2, 70, 2)),
        }
        views = {key: base[cut] for key, cut in cuts.items()}
        views["turned"] = base.transpose([1, 0])
        wanted = {**{key: whole[cut] for key, cut in cuts.items()}, "turned": whole.T}
        fc.save_state_dict(views, self._folder / "views")
        saved = fc.load_merged_state_dict(self._folder / "views")
        wrong = [key for key, values in wanted.items() if not np.array_equal(saved[key].numpy(), values)]
        require(not wrong, f"other values in the checkpoint: {wrong}")
        base.fill_(0.0)
        require(float(np.abs(views["rows"].numpy()).max()) == 0.0, "the save has cut a view off its tensor")
        for key, cut in cuts.items():
            target = paddle.zeros([96, 80])
            fc.load_state_dict({key: target[cut]}, self._folder / "views", strict=False)
            expected = np.zeros_like(whole)
            expected[cut] = whole[cut]
            require(np.array_equal(target.numpy(), expected), f"a load into a view ({key}) has not reached its tensor")
        return {"nbytes": sum(values.nbytes for values in wanted.values())}

    def _other_stream(self) -> Found:
        steps, shape = 60, [1024, 1024]
        tensor, ones = (paddle.full(shape, value, dtype="int64") for value in (0, 1))
        paddle.device.synchronize()
        stream = paddle.device.Stream(self._devices[0])
        with paddle.device.stream_guard(stream):
            for _ in range(steps):
                tensor.add_(ones)
        # Nothing has waited for that stream yet.
        fc.save_state_dict({"w": tensor}, self._folder / "stream")
        values = fc.load_merged_state_dict(self._folder / "stream")["w"].numpy()
        share = float((values == steps).mean())
        require(share == 1.0, f"saved while another stream wrote it: {share:.0%} of the values are the last ones")
        return {"nbytes": tensor.numpy().nbytes}

    def _asynchronous(self) -> Found:
        shape, count = [512, 1024], 8
        tensors = {str(i): paddle.full(shape, float(i + 1)) for i in range(count)}
        begin = time.perf_counter()
        handle: Any = fc.save_state_dict(tensors, self._folder / "async", async_save=self._writer)
        blocked = time.perf_counter() - begin
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        handle.result()
        total = time.perf_counter() - begin
        saved = fc.load_merged_state_dict(self._folder / "async")
        wrong = [key for key in tensors if not (saved[key].numpy() == float(int(key) + 1)).all()]
        require(not wrong, f"values from after the save are in it: {wrong}")
        nbytes = sum(tensor.numpy().nbytes for tensor in tensors.values())
        return {"nbytes": nbytes, "figures": {"blocked_seconds": blocked, "total_seconds": total}}

    def _second_device(self) -> Found:
        if len(self._devices) < 2:
            raise NotHere("this process sees one device only")
        items = {"first": elements("first", (300, 70), "float32"), "second": elements("second", (300, 70), "float32")}
        state = {key: on_device(values, "float32", self._devices[i]) for i, (key, values) in enumerate(items.items())}
        places = {key: str(tensor.place) for key, tensor in state.items()}
        require(len(set(places.values())) == 2, f"the tensors are on {places}")
        fc.save_state_dict(state, self._folder / "second")
        empty = np.zeros_like(items["first"])
        # Each tensor is loaded on the other device.
        target = {key: on_device(empty, "float32", self._devices[1 - i]) for i, key in enumerate(items)}
        fc.load_state_dict(target, self._folder / "second")
        require_same(target, items, "other values after the load")
        require(paddle.get_device() == self._devices[0], "the library has changed the current device")
        return {"nbytes": sum(values.nbytes for values in items.values()), "detail": " and ".join(places.values())}

    def _training(self) -> Found:
        fc.install()

        def build(seed: int) -> tuple[Any, Any]:
            paddle.seed(seed)
            model = paddle.nn.Sequential(paddle.nn.Linear(32, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 8))
            return model, paddle.optimizer.AdamW(0.01, parameters=model.parameters())

        def train(model: Any, optimizer: Any, steps: int) -> list[float]:
            losses = []
            for _ in range(steps):
                loss = (model(paddle.randn([16, 32])) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                losses.append(float(loss))
            return losses

        model, optimizer = build(1)
        train(model, optimizer, 3)
        with fc.CheckpointManager(self._folder / "training") as manager:
            manager.save(3, model=model, optimizer=optimizer)
        wanted = train(model, optimizer, 3)
        with paddle.utils.unique_name.guard():
            model, optimizer = build(2)
        with fc.CheckpointManager(self._folder / "training") as manager:
            manager.restore(model=model, optimizer=optimizer)
        losses = train(model, optimizer, 3)
        require(losses == wanted, f"losses after the restore are {losses}, without it {wanted}")
        return {"detail": f"losses {', '.join(f'{loss:.6f}' for loss in losses)}"}


def accelerators() -> list[str]:
    """Return the names of the devices that are not the host, such as ``gpu:0``."""
    names = [*paddle.device.get_available_device(), *(paddle.device.get_available_custom_device() or [])]
    return list(dict.fromkeys(name for name in names if name.partition(":")[0] != "cpu"))


def facts(devices: list[str]) -> dict[str, Any]:
    """Return the facts about the machine that a reader of the results needs."""
    described: dict[str, str] = {}
    for device in devices:
        described[device] = ""
        # Some kinds of devices and versions of Paddle do not have this.
        with contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError, OSError):
            described[device] = str(paddle.device.get_device_properties(device))
    flags = ("FLAGS_use_stride_kernel", "FLAGS_allocator_strategy", "FLAGS_fraction_of_gpu_memory_to_use")
    known = {}
    for flag in flags:
        with contextlib.suppress(ValueError):  # not in every build
            known.update(paddle.get_flags(flag))
    return {
        "paddle": paddle.__version__,
        "paddle_commit": paddle.version.commit,
        "cuda": str(paddle.version.cuda()),
        "devices": described,
        "flags": known,
    }


def main() -> None:
    """Make the checks: ``RECORD DEVICE-COUNT MEASURED-BYTES``; a count of 0 only lists the devices."""
    record, count, measured = Record(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    devices = accelerators()
    record.note(accelerators=devices)
    if not count:
        return
    record.note(**facts(devices[:count]))
    with tempfile.TemporaryDirectory() as path, fc.BackgroundWriter() as writer:
        folder = Path(path)
        checks = (
            SingleChecks(devices[:count], folder, writer).all(),
            DtypeChecks(folder, measured, writer).all(),
            MemoryChecks(folder).all(),
            PageChecks(devices[0], folder, measured).all(),
            LinkChecks(devices[0], folder, measured, writer).all(),
            [("what crosses the link", lambda: count_alone(folder, measured, writer))],
        )
        for name, work in itertools.chain.from_iterable(checks):
            record.check(name, work)


class Tensors:
    """A tensor of every data type, and a transposed view of another of that type.

    Attributes:
        state: The tensors by key.
    """

    def __init__(self, name: str) -> None:
        """Make the tensors, of random elements that follow from the name."""
        self._dtypes = [dtype for dtype in (*DTYPES, *FP8) if hasattr(paddle, dtype)]
        self._items = {
            key: (elements(f"{name} {key}", _SHAPE, dtype), dtype)
            for dtype in self._dtypes
            for key in (dtype, f"{dtype} turned")
        }
        self._bases = {key: on_device(*item) for key, item in self._items.items()}
        self.state = {key: _seen(key, base) for key, base in self._bases.items()}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all."""
        return sum(values.nbytes for values, _ in self._items.values())

    def overwrite(self) -> None:
        """Overwrite all elements."""
        for key, (values, dtype) in self._items.items():
            self._bases[key].copy_(on_device(np.roll(values, 1), dtype), True)

    def wrong(self, found: Mapping[str, Any]) -> list[str]:
        """Return the keys of contiguous tensors whose elements differ from the original ones here."""
        wanted = {key: np.ascontiguousarray(_seen(key, values)) for key, (values, _) in self._items.items()}
        return [key for key, values in wanted.items() if not same(found[key], values)]

    def wrong_in_place(self, other: Tensors) -> list[str]:
        """Return the keys of tensors of another such state whose elements differ from the original ones here."""
        return [key for key, (values, _) in self._items.items() if not same(other._bases[key], values)]


def _seen(key: str, base: Any) -> Any:
    return base.transpose([1, 0]) if key.endswith("turned") else base


class DtypeChecks:
    """The checks of data types, in one process and on one device."""

    def __init__(self, folder: Path, measured_bytes: int, writer: fc.BackgroundWriter) -> None:
        """Take the folder for checkpoints, the size of the state that is saved through less memory, and a writer."""
        self._folder, self._measured, self._writer = folder, measured_bytes, writer

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "merged load, all dtypes", self._merged
        yield "reshard, all dtypes", self._reshard
        yield "asynchronous save, all dtypes", self._asynchronous
        yield "asynchronous save in slices, all dtypes", self._slices
        yield "asynchronous save through less memory", self._waves

    def _merged(self) -> Found:
        tensors = Tensors("merged")
        fc.save_state_dict(tensors.state, self._folder / "all")
        self._require_saved(tensors, "all")
        require(not tensors.wrong_in_place(tensors), f"the save has changed {tensors.wrong_in_place(tensors)}")
        target = Tensors("target")
        fc.load_state_dict(target.state, self._folder / "all")
        wrong = tensors.wrong_in_place(target)
        require(not wrong, f"other values after the load: {wrong}")
        return {"nbytes": tensors.nbytes}

    def _asynchronous(self) -> Found:
        tensors = Tensors("asynchronous")
        handle: Any = fc.save_state_dict(tensors.state, self._folder / "all-async", async_save=self._writer)
        tensors.overwrite()
        handle.result()
        self._require_saved(tensors, "all-async")
        return {"nbytes": tensors.nbytes}

    def _slices(self) -> Found:
        tensors, slices = Tensors("slices"), 1
        handle: Any = fc.save_state_dict(
            tensors.state, self._folder / "all-slices", async_save=self._writer, slice_bytes=_SLICE_BYTES
        )
        while handle.stage_next():
            slices += 1
        handle.finish_staging()
        tensors.overwrite()
        handle.result()
        self._require_saved(tensors, "all-slices")
        require(slices >= tensors.nbytes // _SLICE_BYTES, f"{tensors.nbytes} bytes in {slices} slices")
        return {"nbytes": tensors.nbytes, "detail": f"{slices} slices"}

    def _waves(self) -> Found:
        if self._measured <= LEAST_BYTES:
            raise NotHere(f"a state of {self._measured} bytes needs no less; --mib makes it larger")
        base = paddle.arange(self._measured // 8, dtype="int32").reshape([-1, 1024])
        state = {"whole": base, "turned": (base * 2 + 1).transpose([1, 0])}
        wanted = {key: tensor.numpy() for key, tensor in state.items()}
        writer, before = self._writer, self._writer.staging_bytes
        handle: Any = fc.save_state_dict(state, self._folder / "waves", async_save=writer, staging_bytes=LEAST_BYTES)
        base.zero_()
        handle.result()
        saved = fc.load_merged_state_dict(self._folder / "waves")
        wrong = [key for key, values in wanted.items() if not np.array_equal(saved[key].numpy(), values)]
        require(not wrong, f"other values in the checkpoint: {wrong}")
        taken = writer.staging_bytes - before
        require(taken < self._measured, f"the writer has taken {taken} bytes")
        return {"nbytes": self._measured}

    def _reshard(self) -> Found:
        tensors, target = Tensors("reshard"), Tensors("target")
        fc.reshard_sharded_state_dict(tensors.state, target.state)
        wrong = tensors.wrong_in_place(target)
        require(not wrong, f"other values after the reshard: {wrong}")
        return {"nbytes": tensors.nbytes}

    def _require_saved(self, tensors: Tensors, name: str) -> None:
        wrong = tensors.wrong(fc.load_merged_state_dict(self._folder / name))
        require(not wrong, f"other values in the checkpoint: {wrong}")


if __name__ == "__main__":
    main()
