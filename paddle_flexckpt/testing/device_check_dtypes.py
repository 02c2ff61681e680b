"""Checks that every kind of save, and a reshard, preserve the bits of all data types, contiguous and strided.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.save.save_options import LEAST_BYTES
from paddle_flexckpt.testing.device_check_record import (
    DTYPES,
    FP8,
    Found,
    NotHere,
    Work,
    elements,
    on_device,
    require,
    same,
)

#: Tensors of one type have more bytes than a save in slices copies at once, and no round number of elements.
_SHAPE = (257, 289)
_SLICE_BYTES = 100_000


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
