"""Checks of the speed of copies between device and host, and of their overlap with other work.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.media.local import LocalOutputFile
from paddle_flexckpt.memory import device_bytes
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.native import checksums
from paddle_flexckpt.testing.device_check_record import (
    Found,
    NotHere,
    Work,
    bytes_of,
    counters,
    is_simulated,
    require,
    state_of,
)

MIB = 1 << 20
#: Bounds: parts of a bare copy's speed and of the shorter of two stages, a multiple of a step's time without a save.
_OF_BARE_COPY, _AT_ONCE, _SLOWER_STEP = 0.3, 0.5, 1.5
#: Steps of training that are timed, alone, and during a save if it takes that long.
_STEPS = 20
#: Rows and columns of the matrices that a step multiplies.
_EXTENT, _SIMULATED_EXTENT = 4096, 128
#: Products of integers in a step of a device that has no kernel for matrices.
_PRODUCTS = 20
#: The least buffers of a save whose stages can overlap: a smaller one has hardly begun when its last copy is done.
_LEAST_BUFFERS = 16

_Spans = list[tuple[float, float]]


class LinkChecks:
    """The checks of the link, in one process and on one device."""

    def __init__(self, device: str, folder: Path, measured_bytes: int, writer: fc.BackgroundWriter) -> None:
        """Take the device, which is current, the folder for checkpoints, the size of states, and a writer."""
        self._device, self._folder, self._measured, self._writer = device, folder, measured_bytes, writer

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "copies to the host beside bare ones", self._bare_copies
        yield "copy, hash and write at the same time", self._overlap
        yield "speed", self._speed
        yield "slices on a stream of their own", self._slices
        yield "a training step while a save is written", self._training_step

    def _bare_copies(self) -> Found:
        """Compare the ring of a save with bare copies of the same bytes."""
        tensor = paddle.arange(max(1, self._measured // 4), dtype="int32")
        nbytes = int(tensor.size) * 4
        memory, whole = DeviceMemory(tensor), np.empty(nbytes, dtype=np.uint8)
        whole.fill(0)  # allocates its pages
        bare = {"pageable": _best(lambda: memory.read_into(0, whole))}
        unlock = device_bytes.lock_pages(whole, self._device)
        if unlock is not None:
            try:
                bare["page_locked"] = _best(lambda: memory.read_into(0, whole))
            finally:
                unlock()
        wanted = np.arange(len(tensor), dtype=np.int32)
        require(np.array_equal(whole.view(np.int32), wanted), "other values after a bare copy")
        position = 0

        def compare(part: np.ndarray) -> None:
            nonlocal position
            right = np.array_equal(part, wanted.view(np.uint8)[position : position + len(part)])
            require(right, f"other values in the ring, from byte {position} on")
            position += len(part)

        self._through_ring(tensor, nbytes, compare)
        times = [self._through_ring(tensor, nbytes, lambda part: None) for _ in range(3)]
        setup, ring = min(times, key=lambda each: each[1])
        gib = nbytes / 2**30
        figures = {f"bare_{kind}_gib_per_s": gib / seconds for kind, seconds in bare.items()}
        figures |= {"ring_gib_per_s": gib / ring, "ring_setup_seconds": setup}
        figures["ring_of_bare_copy"] = bare.get("page_locked", bare["pageable"]) / ring
        bounds = {"ring_of_bare_copy": {"at_least": _OF_BARE_COPY}}
        if "page_locked" in bare:
            figures["page_locked_of_pageable"] = bare["pageable"] / bare["page_locked"]
            bounds["page_locked_of_pageable"] = {"at_least": 1.0}
        detail = ", ".join(
            f"{name.removesuffix('_gib_per_s').replace('_', ' ')} {figure:.2f} GiB/s"
            for name, figure in figures.items()
            if name.endswith("_gib_per_s")
        )
        return {"nbytes": nbytes, "detail": detail, "figures": figures, "bounds": bounds}

    def _through_ring(self, tensor: Any, nbytes: int, use: Callable[[np.ndarray], None]) -> tuple[float, float]:
        """Read a tensor as a save does; return the seconds until memory was allocated, and those of the copies."""
        begin = time.perf_counter()
        with device_bytes.DeviceBytes([(tensor, 0, nbytes)], self._device, nbytes) as source:
            ready = time.perf_counter()
            for part in source.read(nbytes):
                use(part)
            return ready - begin, time.perf_counter() - ready

    def _overlap(self) -> Found:
        """Save, and compare the device's trace of copies with the times of writes and hashes."""
        device, state = counters(), state_of(self._measured, 1)
        fc.save_state_dict(state, self._folder / "overlap")  # memory and files get warm
        paddle.device.synchronize()
        device.reset()
        with _timed_calls(LocalOutputFile, "write_many") as writes, _timed_calls(checksums, "hash_blocks") as hashes:
            begin = time.monotonic()
            fc.save_state_dict(state, self._folder / "overlap")
            end = time.monotonic()
        paddle.device.synchronize()
        spans = [span for span in device.spans() if span.what == "d2h"]
        nbytes = bytes_of(state)
        traced = sum(span.nbytes for span in spans)
        require(traced == nbytes, f"the trace has {traced} bytes to the host; {nbytes} crossed")
        copies = [(span.begin, span.end) for span in spans]
        outside = [copy for copy in copies if not begin <= copy[0] <= copy[1] <= end]
        require(not outside, f"of a save from {begin} to {end} the trace has copies {outside}: is it another clock's?")
        stages = {"copy": _merged(copies), "write": _merged(writes), "hash": _merged(hashes)}
        figures = {f"{stage}_seconds": _length(spans) for stage, spans in stages.items()}
        figures["save_seconds"] = end - begin
        bounds = {}
        for one in ("copy", "hash"):
            if stages[one]:
                name = f"{one}_beside_write"
                shorter = min(_length(stages[one]), _length(stages["write"]))
                figures[name] = _length(_shared(stages[one], stages["write"])) / shorter
                if nbytes >= _LEAST_BUFFERS * device_bytes.BUFFER_BYTES:
                    bounds[name] = {"at_least": _AT_ONCE}
        detail = ", ".join(f"{stage} {_length(spans):.3f} s" for stage, spans in stages.items())
        return {"nbytes": nbytes, "detail": f"{detail} of {end - begin:.3f} s", "figures": figures, "bounds": bounds}

    def _slices(self) -> Found:
        """Check the streams of the copies of a save in slices, by the device's trace."""
        device, state = counters(), state_of(self._measured)
        nbytes = bytes_of(state)
        if not device_bytes.can_lock(self._device):
            raise NotHere("slices are begun beside other work where memory is page-locked, which it is not here")
        current = self._stream_of_a_copy(state["0"])
        path, slice_bytes = self._folder / "slices", max(nbytes // 16, MIB)
        handle: Any = fc.save_state_dict(state, path, async_save=self._writer, slice_bytes=slice_bytes)
        paddle.device.synchronize()
        device.reset()
        seconds, more = [], True
        while more:
            begin = time.perf_counter()
            more = handle.stage_next()
            seconds.append(time.perf_counter() - begin)
        handle.finish_staging()
        paddle.device.synchronize()
        copies = [span for span in device.spans() if span.what == "d2h" and span.nbytes >= MIB // 2]
        handle.result()
        streams = {span.stream for span in copies}
        require(bool(copies), "the trace has no copy of a slice")
        require(len(streams) == 1 and streams != {current}, f"slices are copied on {streams}, a step on {current}")
        fc.load_state_dict(state, path)
        wrong = [key for key, tensor in state.items() if not (tensor.numpy() == float(int(key))).all()]
        require(not wrong, f"other values in the checkpoint: {wrong}")
        figures = {
            "stage_next_seconds": statistics.median(seconds),
            "slice_copy_seconds": statistics.median(span.end - span.begin for span in copies),
        }
        return {"nbytes": nbytes, "detail": f"{len(seconds)} slices of {slice_bytes >> 20} MiB", "figures": figures}

    def _stream_of_a_copy(self, tensor: Any) -> int:
        """Return the stream of an ordinary copy."""
        device, host = counters(), np.empty(MIB, dtype=np.uint8)
        unlock = device_bytes.lock_pages(host, self._device)
        paddle.device.synchronize()
        device.reset()
        try:
            DeviceMemory(tensor).read_into(0, host[: bytes_of({"": tensor})], wait=False)
            paddle.device.synchronize()
        finally:
            if unlock is not None:
                unlock()
        (stream,) = {span.stream for span in device.spans() if span.what == "d2h"}
        return int(stream)

    def _training_step(self) -> Found:
        """Time a step of fixed size alone, and while the writer of an asynchronous save writes."""
        step, what = _step()
        state = state_of(self._measured)
        alone = [_timed(step) for _ in range(_STEPS)]
        beside: list[float] = []
        first: Any = fc.save_state_dict(state, self._folder / "beside", async_save=self._writer)
        first.result()  # the writer has started, and has its memory
        saves = 0
        while len(beside) < _STEPS and saves < 5:
            begin = time.perf_counter()
            handle: Any = fc.save_state_dict(state, self._folder / "beside", async_save=self._writer)
            blocked = time.perf_counter() - begin
            while not handle.done() and len(beside) < _STEPS:
                beside.append(_timed(step))
            handle.result()
            saves += 1
        if len(beside) < 3:
            raise NotHere(
                f"{saves} saves were written within {len(beside)} steps ({what}); --mib gives them more to do"
            )
        figures = {
            "step_seconds": statistics.median(alone),
            "step_beside_save_seconds": statistics.median(beside),
            "steps_beside_save": len(beside),
            "blocked_seconds": blocked,
        }
        figures["step_beside_of_alone"] = figures["step_beside_save_seconds"] / figures["step_seconds"]
        return {
            "nbytes": bytes_of(state),
            "detail": f"{len(beside)} steps ({what})",
            "figures": figures,
            "bounds": {"step_beside_of_alone": {"at_most": _SLOWER_STEP}},
        }

    def _speed(self) -> Found:
        state = state_of(self._measured)
        gib = bytes_of(state) / 2**30
        host = paddle.CPUPlace()
        paddle.device.synchronize()
        copies = {key: tensor._copy_to(host, True) for key, tensor in state.items()}  # memory and caches get warm
        down = _timed(lambda: [tensor._copy_to(host, True) for tensor in state.values()])
        up = _timed(lambda: [copy._copy_to(state["0"].place, True) for copy in copies.values()])
        write = _timed(lambda: self._write(copies))
        fc.save_state_dict(state, self._folder / "speed")
        save = _timed(lambda: fc.save_state_dict(state, self._folder / "speed"))
        load = _timed(lambda: fc.load_state_dict(state, self._folder / "speed"))
        wrong = [key for key, tensor in state.items() if not (tensor.numpy() == float(int(key))).all()]
        require(not wrong, f"other values after the load: {wrong}")
        overlap = (down + write - save) / min(down, write)
        figures = {
            "raw_device_to_host_gib_per_s": gib / down,
            "raw_host_to_device_gib_per_s": gib / up,
            "raw_write_gib_per_s": gib / write,
            "save_gib_per_s": gib / save,
            "load_gib_per_s": gib / load,
            "overlap_of_copy_and_write": max(0.0, min(1.0, overlap)),
        }
        detail = (
            f"save {gib / save:.2f} GiB/s (raw copy {gib / down:.2f}, raw write {gib / write:.2f}, overlap "
            f"{figures['overlap_of_copy_and_write']:.0%}), load {gib / load:.2f} (raw copy {gib / up:.2f})"
        )
        return {"nbytes": bytes_of(state), "detail": detail, "figures": figures}

    def _write(self, copies: dict[str, Any]) -> None:
        with open(self._folder / "raw", "wb") as file:
            for copy in copies.values():
                file.write(memoryview(copy.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())


def _step() -> tuple[Callable[[], object], str]:
    """Return a step of fixed size for the device alone, and its description."""
    extent = _SIMULATED_EXTENT if is_simulated() else _EXTENT
    steps = {
        f"a product of matrices, {extent} x {extent}": _matrices,
        f"{_PRODUCTS} products of {extent * extent} integers": _integers,
    }
    for what, step_of in steps.items():
        if not _falls_back(step_of(2)):
            return step_of(extent), what
    raise NotHere(f"this device has no kernel for {' or '.join(steps)}")


def _matrices(extent: int) -> Callable[[], object]:
    table = paddle.ones([extent, extent])
    return lambda: paddle.matmul(table, table)


def _integers(extent: int) -> Callable[[], object]:
    numbers = paddle.ones([extent * extent], dtype="int64")
    return lambda: [numbers * numbers for _ in range(_PRODUCTS)]


def _falls_back(step: Callable[[], object]) -> bool:
    """Return whether the host does the work for the device, as far as the device's counters show."""
    try:
        device = counters()
    except NotHere:
        return False
    device.reset()
    step()
    paddle.device.synchronize()
    return bool(device.stats().get("fallbacks"))


@contextlib.contextmanager
def _timed_calls(owner: Any, name: str) -> Iterator[_Spans]:
    """Record the spans in which a function runs, by the clock of the device's trace."""
    spans: _Spans = []
    real = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        begin = time.monotonic()
        try:
            return real(*arguments)
        finally:
            spans.append((begin, time.monotonic()))

    with mock.patch.object(owner, name, timed):
        yield spans


def _merged(spans: _Spans) -> _Spans:
    """Return spans in order, with overlapping spans merged."""
    merged: _Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return merged


def _shared(one: _Spans, other: _Spans) -> _Spans:
    """Return the intersection of two merged lists of spans."""
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(begin, end) for begin, end in both if begin < end]


def _length(spans: _Spans) -> float:
    return sum(end - begin for begin, end in spans)


def _best(work: Callable[[], object]) -> float:
    return min(_timed(work) for _ in range(3))


def _timed(work: Callable[[], object]) -> float:
    paddle.device.synchronize()
    begin = time.perf_counter()
    work()
    paddle.device.synchronize()
    return time.perf_counter() - begin
