"""Checks of the rehearsal device in one process: the script of that process.

After each check it prints what came out so far as one line of JSON: the traceback of each, empty where it held.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import paddle

from tests.device import plugin
from tests.device.plugin import HostTouchError, configure, stats

DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2"
).split()


def main(names: Mapping[str, Any], wanted: Sequence[str]) -> NoReturn:
    """Make the checks of these names, and end the process."""
    answers = {}
    for name in wanted:
        try:
            names[f"check_{name}"]()
            answers[name] = ""
        except Exception:
            answers[name] = traceback.format_exc()
        print("\n" + json.dumps(answers), flush=True)
    os._exit(0)  # a device that has failed cannot be finalized


def tensor(array: Any, device: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(array), place=paddle.CustomPlace("rehearsal", device))


def host_view(tensor: paddle.Tensor) -> np.ndarray:
    """Follow the address of a device, as no host code may."""
    nbytes = int(tensor.size) * tensor.element_size()
    return np.frombuffer((ctypes.c_char * nbytes).from_address(tensor.data_ptr()), dtype=np.uint8)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        text = str(error)
        assert all(word in text for word in words), f"{words} are not all in: {text}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextlib.contextmanager
def configured(**settings: float) -> Iterator[None]:
    defaults = {"lazy": 0, "delay_us": 0, "memory_gib": 0.25, "trace": 0, "lose_event": 0, "lose_wait": 0, "seed": 0}
    configure(**settings)
    try:
        yield
    finally:
        configure(**{name: defaults[name] for name in settings})
        paddle.device.synchronize()


def on_side(stream: paddle.device.Stream, source: paddle.Tensor, target: paddle.Tensor) -> None:
    with paddle.device.stream_guard(stream):
        paddle.assign(source, target)


# ---- the host and device memory ----


def check_a_host_read_names_the_tensor() -> None:
    weights = tensor(np.arange(12, dtype="float32").reshape(3, 4))
    with raises(HostTouchError, "rehearsal:0", f"{weights.data_ptr():#x}", "'weights' of", "[3, 4]", "float32"):
        host_view(weights).copy()
    assert stats()["host_touches"] == 1
    # The process goes on, and so does the watch.
    assert weights.numpy().tolist() == np.arange(12).reshape(3, 4).tolist()
    state = {"layer": {"bias": tensor(np.zeros(5))}}
    with raises(HostTouchError, "['bias']", "[5]", "float64"):
        host_view(state["layer"]["bias"]).copy()
    assert stats()["host_touches"] == 2


def check_a_host_write_is_lost() -> None:
    weights = tensor(np.arange(8, dtype="int32"))
    with raises(HostTouchError, "[8]", "int32"):
        ctypes.memset(weights.data_ptr(), 0, 32)
    assert weights.numpy().tolist() == list(range(8))


def check_one_touch_is_counted_of_a_large_tensor() -> None:
    large = tensor(np.zeros(1 << 22, dtype="float32"))
    with raises(HostTouchError, "[4194304]"):
        host_view(large).max()
    assert stats()["host_touches"] == 1


def check_a_host_kernel_of_paddle_is_noticed() -> None:
    """Paddle's copy_ of a host tensor into a strided device tensor runs a CPU kernel on the device's address."""
    base = paddle.zeros([8, 8])
    columns = base[:, ::2]
    with raises(HostTouchError, "'columns' of", "[8, 4]"):
        columns.copy_(paddle.to_tensor(np.ones((8, 4), "float32"), place=paddle.CPUPlace()), True)
    assert stats()["host_touches"] == 1


def check_a_touch_in_another_thread_is_raised_in_the_main_one() -> None:
    weights = tensor(np.zeros(7, dtype="int16"))
    thread = threading.Thread(target=lambda: host_view(weights).copy(), name="reader")
    with raises(HostTouchError, "[7]", "int16", "another thread"):
        thread.start()
        thread.join()
    thread.join()
    assert stats()["host_touches"] == 1


def check_a_touch_of_freed_memory_says_so() -> None:
    weights = tensor(np.zeros(7, dtype="int16"))
    address = weights.data_ptr()
    del weights
    with raises(HostTouchError, "freed memory"):
        assert ctypes.string_at(address, 4) != b"\0\0\0\0"


def check_fresh_memory_is_poisoned() -> None:
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        assert bool(np.isnan(paddle.empty([1000], dtype=dtype).astype("float32").numpy()).all())
    assert paddle.empty([100], dtype="int64").numpy().tolist() == [-1] * 100


def check_a_use_of_freed_memory_is_an_error() -> None:
    weights = tensor(np.arange(256, dtype="uint8"))
    address = weights.data_ptr()
    assert plugin.read(address + 3, 2) == b"\x03\x04"
    del weights
    with raises(RuntimeError, "use of freed memory", "2 bytes", "256 bytes"):
        plugin.read(address + 3, 2)
    # Even when much has been allocated since.
    kept = [paddle.ones([64]) for _ in range(50)]
    with raises(RuntimeError, "use of freed memory"):
        plugin.read(address, 256)
    assert stats()["freed_uses"] == 2
    with raises(RuntimeError, "over the end"):
        plugin.read(kept[0].data_ptr(), 257)
    with raises(RuntimeError, "not an address of a device"):
        plugin.read(id(kept), 1)
    assert stats()["freed_uses"] == 2


def check_what_is_still_queued_meets_freed_memory() -> None:
    """A buffer that is dropped while another stream has yet to read it."""
    source, target = tensor(np.ones(64, "float32")), tensor(np.zeros(64, "float32"))
    side = paddle.device.Stream()
    with configured(lazy=1):
        on_side(side, source, target)
        kept = source
        del source
        side.synchronize()
        assert target.numpy().tolist() == [1.0] * 64
        on_side(side, kept, target)
        del kept
        gc.collect()
        assert paddle.ones([1]).numpy().tolist() == [1.0]  # the framework's stream goes on
        side.synchronize()
        assert set(target.numpy().tobytes()) == {0xFB}


def check_memory_is_counted_exactly() -> None:
    before = stats()["device_bytes"]
    first = paddle.ones([1000])
    assert stats()["device_bytes"] == before + 4096
    second = tensor(np.zeros(1 << 20, "uint8"), device=1)
    assert stats()["device_bytes"] == before + 4096 + (1 << 20)
    del first, second
    gc.collect()
    assert stats()["device_bytes"] == before
    assert stats()["device_peak"] == before + 4096 + (1 << 20)
    plugin.reset()
    assert stats()["device_peak"] == before


def check_memory_runs_out_at_the_set_size() -> None:
    rest = (1 << 28) - stats()["device_bytes"]
    with raises(MemoryError, "Out of memory error on rehearsal:0", "Cannot allocate"):
        paddle.ones([rest // 4 + 1])
    with configured(memory_gib=0.5):
        big = paddle.ones([1 << 26])
        with raises(MemoryError, "Out of memory error on rehearsal:0"):
            paddle.ones([(1 << 26) + 1])
        assert tensor(np.zeros(1 << 28, "uint8"), device=1).shape == [1 << 28]  # each device has its own
        del big
        paddle.ones([1 << 26])
    assert stats()["refused_allocations"] >= 3


# ---- copies ----


def check_all_types_go_there_and_come_back() -> None:
    for dtype in DTYPES:
        host = paddle.cast(paddle.to_tensor(np.arange(5, dtype="float32"), place=paddle.CPUPlace()), dtype)
        there = host._copy_to(paddle.CustomPlace("rehearsal", 0), True)
        across = there._copy_to(paddle.CustomPlace("rehearsal", 1), True)
        assert str(across.place) == "Place(rehearsal:1)"
        back, nbytes = across.cpu(), 5 * host.element_size()
        assert ctypes.string_at(back.data_ptr(), nbytes) == ctypes.string_at(host.data_ptr(), nbytes), dtype


def check_copies_are_counted() -> None:
    here = tensor(np.zeros(1024, "float32"))
    here.numpy()
    here.cpu()
    counters = stats()
    assert (counters["h2d"]["calls"], counters["h2d"]["bytes"]) == (1, 4096)
    assert (counters["d2h"]["calls"], counters["d2h"]["bytes"]) == (2, 8192)
    assert counters["d2h"]["pageable_bytes"] == 8192 and counters["d2h"]["largest"] == 4096
    assert counters["ccl"]["calls"] == 0 and counters["collectives"] == {}
    assert counters["guarded_calls"] == 3 + counters["kernels"]
    assert counters["waits"] >= 2
    paddle.device.synchronize()
    assert stats()["device_syncs"] == counters["device_syncs"] + 1
    plugin.reset()
    counters = stats()
    assert counters["guarded_calls"] == counters["waits"] == counters["h2d"]["bytes"] == counters["allocations"] == 0


def check_page_locked_memory_is_copied_asynchronously() -> None:
    source = tensor(np.full(1024, 7, "uint8"))
    host = paddle.to_tensor(np.zeros(1024, "uint8"), place=paddle.CPUPlace())
    with configured(lazy=1):
        host.copy_(source, False)
        assert set(host.numpy().tolist()) == {7}  # pageable: the copy has waited
        assert stats()["d2h"]["pageable_bytes"] == 1024
        host = paddle.to_tensor(np.zeros(1024, "uint8"), place=paddle.CPUPlace())
        address = host.data_ptr()
        plugin.page_lock(address, 1024)
        host.copy_(source, False)
        assert host.data_ptr() == address
        assert ctypes.string_at(address, 1024) == bytes(1024)
        paddle.device.synchronize()
        assert ctypes.string_at(address, 1024) == b"\7" * 1024
        assert stats()["d2h"]["pageable_bytes"] == 1024 and stats()["d2h"]["bytes"] == 2048
        plugin.page_unlock(address)


# ---- streams ----


def check_a_missing_wait_shows() -> None:
    ones, target = tensor(np.ones(64, "float32")), tensor(np.zeros(64, "float32"))
    side = paddle.device.Stream()
    with configured(lazy=1):
        on_side(side, ones, target)
        assert target.numpy().max() == 0
        side.synchronize()
        assert target.numpy().min() == 1


def check_an_event_orders_two_streams() -> None:
    ones, twos, target = (tensor(np.full(64, value, "float32")) for value in (1, 2, 0))
    side = paddle.device.Stream()
    with configured(lazy=1):
        on_side(side, ones, target)
        event = side.record_event()
        event.synchronize()
        assert target.numpy().min() == 1
        on_side(side, twos, target)
        paddle.device.current_stream().wait_stream(side)
        assert target.numpy().min() == 2
    assert all(stats()[name] >= 1 for name in ("events", "stream_waits", "event_syncs"))


def check_an_event_of_a_stream_that_is_no_more_asks_nothing_of_a_later_one() -> None:
    ones = tensor(np.ones(64, "float32"))
    before = paddle.device.Stream()
    for _ in range(20):
        on_side(before, ones, tensor(np.zeros(64, "float32")))
    event = before.record_event()
    before.synchronize()
    del before
    gc.collect()
    # One of these may be where the other was.
    later = [(paddle.device.Stream(), tensor(np.zeros(64, "float32"))) for _ in range(8)]
    with configured(lazy=1):
        for stream, target in later:
            on_side(stream, ones, target)
        for _ in range(50):
            assert event.query()
            assert [target.numpy().max() for _, target in later] == [0.0] * 8
        for stream, _ in later:
            stream.synchronize()


def check_an_event_and_a_wait_can_be_lost() -> None:
    ones, twos, target = (tensor(np.full(64, value, "float32")) for value in (1, 2, 0))
    side = paddle.device.Stream()
    with configured(lazy=1, lose_event=2):
        first = paddle.device.Event()
        first.record(paddle.device.current_stream())
        on_side(side, ones, target)
        paddle.device.current_stream().wait_stream(side)  # its recording is the second
        assert stats()["lost"] == 1
        assert target.numpy().max() == 0
    assert target.numpy().min() == 1
    with configured(lazy=1, lose_wait=1):
        on_side(side, twos, target)
        side.synchronize()
        assert stats()["lost"] == 2
        assert target.numpy().max() == 1
        side.synchronize()
        assert target.numpy().min() == 2


def check_delays_follow_from_the_seed() -> None:
    with configured(delay_us=2000, seed=5):
        planned = [plugin.delay(0, 3, k) for k in range(1, 40)]
        assert planned == [plugin.delay(0, 3, k) for k in range(1, 40)]
        assert 0 <= min(planned) < 0.0004 and 0.0016 < max(planned) <= 0.002
        assert planned != [plugin.delay(0, 4, k) for k in range(1, 40)]
        source, target = tensor(np.ones(4)), tensor(np.zeros(4))
        side = paddle.device.Stream()
        plugin.reset()
        for _ in range(10):
            on_side(side, source, target)
        paddle.device.synchronize()
        spans = [span for span in plugin.spans() if span.what == "d2d"]
        (number,) = {span.stream for span in spans}
        gaps = [after.begin - before.end for before, after in zip(spans, spans[1:])]
        assert len(gaps) == 9
        assert all(gap >= plugin.delay(0, number, k) for k, gap in enumerate(gaps, 2))
    with configured(delay_us=2000, seed=6):
        assert planned != [plugin.delay(0, 3, k) for k in range(1, 40)]


# ---- the trace ----


def check_a_trace_names_the_callers() -> None:
    here = tensor(np.zeros(64, "float32"))
    plugin.reset()
    here.numpy()
    (span,) = plugin.trace()
    assert span.what == "d2h" and span.caller == ""
    with configured(trace=1):
        plugin.reset()
        line = sys._getframe().f_lineno + 1
        here.numpy()
        thread = threading.Thread(target=lambda: paddle.device.synchronize())
        thread.start()
        thread.join()
        trace = plugin.trace()
    (copy,) = [span for span in trace if span.what == "d2h"]
    assert copy.caller == f"{__file__}:{line}"
    assert (copy.device, copy.nbytes, copy.pageable) == (0, 256, True)
    assert 0 < copy.begin <= copy.end
    (wait,) = [span for span in trace if span.what == "wait_device"]
    assert wait.caller == f"{__file__}:{line + 1}"
    assert any(span.what == "wait_stream" and span.caller == copy.caller for span in trace)
    assert [span.what for span in plugin.spans()] == ["d2h"]


def check_a_touch_and_a_freed_use_are_traced_to_the_allocation() -> None:
    with configured(trace=1):
        allocated = sys._getframe().f_lineno + 1
        weights = paddle.ones([6])
        with raises(HostTouchError, f"allocated at {__file__}:{allocated}"):
            host_view(weights).copy()
        address = weights.data_ptr()
        freed = sys._getframe().f_lineno + 1
        del weights
        with raises(RuntimeError, f"{__file__}:{freed}"):
            plugin.read(address, 4)


# ---- the process ----


def check_a_forked_child_has_no_device() -> None:
    here = tensor(np.ones(3))
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for use in (lambda: here.numpy(), lambda: paddle.ones([3])):
            try:
                use()
                said.append("")
            except Exception as error:
                said.append(str(error))
        os.write(writable, json.dumps(said).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        said = json.load(pipe)
    assert os.waitpid(child, 0)[1] == 0
    assert all("a forked child has no device" in text for text in said), said
    assert here.numpy().tolist() == [1, 1, 1]


def check_a_setting_that_does_not_exist_is_refused() -> None:
    with raises(ValueError, "'speed'"):
        configure(speed=1)


if __name__ == "__main__":
    known = dict(globals())
    for name in sys.argv[1:]:
        known[f"check_{name}"] = (lambda check: lambda: (plugin.reset(), check()))(known[f"check_{name}"])
    main(known, sys.argv[1:])
