"""Mistakes put into the library one at a time: the checks of a device have to find each of them, and say which it is.

The jobs: single checks of ``device_check``, each with a mistake.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("paddle")
import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication import device_exchange
from paddle_flexckpt.memory import device_bytes
from paddle_flexckpt.memory.device_bytes import DeviceBytes
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.saving import background_saves
from paddle_flexckpt.saving.shared_saves import SharedSave
from paddle_flexckpt.testing import device_check_link, device_check_memory
from paddle_flexckpt.testing.device_check_counts import count_alone, count_ranks
from paddle_flexckpt.testing.device_check_link import LinkChecks
from paddle_flexckpt.testing.device_check_memory import MemoryChecks, PageChecks, reshard_of_ranks
from paddle_flexckpt.testing.device_check_ranks import RankChecks
from paddle_flexckpt.testing.device_check_record import COUNTERS_VARIABLE, SIMULATED_VARIABLE, Record, read_record
from paddle_flexckpt.testing.device_check_single import DtypeChecks
from paddle_flexckpt.transfer import transfer
from tests.device import plugin

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
MIB = 1 << 20

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Alone:
    """The library, of which every call is one of this rank alone."""

    def __getattr__(self, name):
        function = getattr(fc, name)
        together = ("save_state_dict", "load_state_dict", "reshard_sharded_state_dict")
        return functools.partial(function, process_group="self") if name in together else function


def single_checks(folder, writer):
    device = paddle.device.get_device()
    yield from DtypeChecks(folder, MIB, writer).all()
    yield from MemoryChecks(folder).all()
    yield from PageChecks(device, folder, 9 * MIB).all()
    yield from LinkChecks(device, folder, 9 * MIB, writer).all()
    yield "what crosses the link", lambda: count_alone(folder, MIB, writer)


def check(directory, name, mistake="", simulated="1"):
    """One check of the first rank, with a mistake in the library or the device; what came of it."""
    if dist.get_rank():
        return None
    folder = Path(directory)
    plugin.configure(memory_gib=0.0625)
    with contextlib.ExitStack() as patches:
        patches.callback(plugin.configure, memory_gib=4)
        for module in ("single", "memory", "link", "counts"):
            owner = importlib.import_module(f"paddle_flexckpt.testing.device_check_{module}")
            patches.enter_context(mock.patch.object(owner, "fc", Alone()))
        patches.enter_context(mock.patch.dict(os.environ, {SIMULATED_VARIABLE: simulated}))
        if mistake:
            patches.enter_context(MISTAKES[mistake]())
        writer = patches.enter_context(fc.BackgroundWriter())
        for found, work in single_checks(folder, writer):
            if found == name:
                Record(folder / "record").check(name, work)
    outcome = read_record(folder / "record")[0][0]
    return outcome.result, outcome.detail, outcome.bounds


def check_ranks(directory, name, mistake=""):
    """The same of a check that all ranks make."""
    folder, rank = Path(directory), dist.get_rank()
    barrier = RankChecks(folder, MIB)._barrier
    plugin.configure(memory_gib=0.25)
    with contextlib.ExitStack() as patches:
        patches.callback(plugin.configure, memory_gib=4)
        if mistake:
            patches.enter_context(MISTAKES[mistake]())
        works = {"memory": lambda: reshard_of_ranks(barrier), "counts": lambda: count_ranks(folder, 20 * MIB)}
        Record(folder / f"record.{rank}", rank).check(name, works[name])
    outcome = read_record(folder / f"record.{rank}")[0][0]
    return outcome.result, outcome.detail


# -- mistakes ----------------------------------------------------------------------------------------------------------


def slices_change_a_bit():
    def copy(memory, start, target, wait):
        right(memory, start, target, True)
        target[-1:] ^= 1

    right = background_saves._copy_bytes
    return mock.patch.object(background_saves, "_copy_bytes", copy)


def strided_tensors_are_shifted():
    def read_into(self, start, target, wait=True):
        right(self, start, target, True)
        if self._strides is not None:
            target[...] = np.roll(target, 1)

    right = DeviceMemory.read_into
    return mock.patch.object(DeviceMemory, "read_into", read_into)


def failed_saves_are_left():
    return mock.patch.object(SharedSave, "discard", lambda self: None)


def overwritten_targets_are_not_told():
    return mock.patch.object(transfer, "_errors_name_the_targets", contextlib.nullcontext)


def missing_memory_is_passed_over():
    def read_into(self, start, target, wait=True):
        with contextlib.suppress(MemoryError):
            right(self, start, target, wait)

    right = DeviceMemory.read_into
    return mock.patch.object(DeviceMemory, "read_into", read_into)


def pages_are_not_locked():
    return mock.patch.object(device_bytes, "lock_pages", lambda memory, device: None)


@contextlib.contextmanager
def pages_stay_locked():
    kept = []

    def close(self):
        kept.append(self._unlock)
        self._ring.close()

    with mock.patch.object(DeviceBytes, "close", close):
        yield
    for unlock in kept:
        unlock()


def copies_take_a_detour():
    def read_into(self, start, target, wait=True):
        other = np.empty_like(target)
        right(self, start, other, True)
        target[...] = other

    right = DeviceMemory.read_into
    return mock.patch.object(DeviceMemory, "read_into", read_into)


class Cudart(dict):
    """Page-locks as CUDA says that it does: one lock, and one unlock."""

    def __init__(self, locks=True, unlocks=True):
        self._locked, self._locks, self._unlocks = set(), locks, unlocks
        super().__init__(cudaHostRegister=self.cudaHostRegister, cudaHostUnregister=self.cudaHostUnregister)

    def cudaHostRegister(self, address, nbytes, flags):
        assert nbytes.value == 8 * MIB
        assert flags.value == 1
        if address.value in self._locked:
            return 712
        if self._locks:
            self._locked.add(address.value)
        return 0

    def cudaHostUnregister(self, address):
        if address.value not in self._locked:
            return 713
        if self._unlocks:
            self._locked.remove(address.value)
        return 0

    def cudaGetLastError(self):
        return 0


def cudart(**mistakes):
    def patch():
        library = Cudart(**mistakes)
        return mock.patch.object(device_bytes, "loaded_library", lambda name: library)

    return patch


def the_trace_has_another_clock():
    def spans():
        return [span._replace(begin=span.begin - 5, end=span.end - 5) for span in right()]

    right = plugin.spans
    return mock.patch.object(plugin, "spans", spans)


def slices_have_no_stream():
    return mock.patch.object(background_saves.Staging, "_side_stream", lambda self: contextlib.nullcontext())


def a_reshard_drops_what_is_strided():
    def copy_from(self, source, copy):
        if self._strides is None:
            right(self, source, copy)

    right = DeviceMemory.copy_from
    return mock.patch.object(DeviceMemory, "copy_from", copy_from)


def a_reshard_takes_memory():
    def copy_from(self, source, copy):
        paddle.empty([2 * MIB], dtype="uint8")
        right(self, source, copy)

    right = DeviceMemory.copy_from
    return mock.patch.object(DeviceMemory, "copy_from", copy_from)


@contextlib.contextmanager
def nothing_is_fast_enough():
    bounds = {"_OF_BARE_COPY": 1e9, "_AT_ONCE": 1e9, "_SLOWER_STEP": 0, "_LEAST_BUFFERS": 0, "_EXTENT": 128}
    with mock.patch.multiple(device_check_link, **bounds):
        yield


def the_host_does_all():
    return mock.patch.object(plugin, "stats", lambda: {"fallbacks": {"matmul": 1}})


def no_counters():
    return mock.patch.dict(os.environ, {COUNTERS_VARIABLE: ""})


def everything_crosses_twice():
    def read_into(self, start, target, wait=True):
        right(self, start, target.copy(), True)
        right(self, start, target, wait)

    right = DeviceMemory.read_into
    return mock.patch.object(DeviceMemory, "read_into", read_into)


def a_kernel_is_the_hosts():
    right = plugin.stats
    fallbacks = {"fallbacks": {"strided_copy": 2, "all_to_all": 1}, "collectives": {"all_to_all": 1}}
    return mock.patch.object(plugin, "stats", lambda: {**right(), **fallbacks})


def rounds_are_small():
    return mock.patch.object(device_exchange, "ROUND_BYTES", 8 * MIB)


def failed_reshards_clear_their_source():
    def reshard(source, target):
        try:
            fc.reshard_sharded_state_dict(source, target)
        except fc.CheckpointError:
            source["w"].local_tensor.zero_()
            raise

    careless = SimpleNamespace(ShardedWeight=fc.ShardedWeight, reshard_sharded_state_dict=reshard)
    return mock.patch.object(device_check_memory, "fc", careless)


MISTAKES = {
    "slices change a bit": slices_change_a_bit,
    "strided tensors are shifted": strided_tensors_are_shifted,
    "failed saves are left": failed_saves_are_left,
    "overwritten targets are not told": overwritten_targets_are_not_told,
    "missing memory is passed over": missing_memory_is_passed_over,
    "pages are not locked": pages_are_not_locked,
    "pages stay locked": pages_stay_locked,
    "copies take a detour": copies_take_a_detour,
    "cudart": cudart(),
    "cudart locks nothing": cudart(locks=False),
    "cudart unlocks nothing": cudart(unlocks=False),
    "the trace has another clock": the_trace_has_another_clock,
    "slices have no stream": slices_have_no_stream,
    "a reshard drops what is strided": a_reshard_drops_what_is_strided,
    "a reshard takes memory": a_reshard_takes_memory,
    "nothing is fast enough": nothing_is_fast_enough,
    "the host does all": the_host_does_all,
    "no counters": no_counters,
    "everything crosses twice": everything_crosses_twice,
    "a kernel is the host's": a_kernel_is_the_hosts,
    "rounds are small": rounds_are_small,
    "failed reshards clear their source": failed_reshards_clear_their_source,
}


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mistake", "text"),
    [
        ("asynchronous save in slices, all dtypes", "slices change a bit", "other values in the checkpoint: ['bool'"),
        ("merged load, all dtypes", "strided tensors are shifted", "other values in the checkpoint: ['bool turned'"),
        ("no device memory left, save", "failed saves are left", "the save without memory has left ["),
        pytest.param(
            "no device memory left, save",
            "missing memory is passed over",
            "a save that needs device memory went well",
            marks=pytest.mark.slow,
        ),
        ("no device memory left, load", "overwritten targets are not told", "['whole'] changed, of which the error"),
        ("host memory is page-locked", "pages are not locked", "the save has memory that is not page-locked"),
        ("host memory is page-locked", "pages stay locked", "the save has left memory page-locked"),
        ("host memory is page-locked", "copies take a detour", "the save has copied from or to pageable memory"),
        ("cudaHostRegister", "cudart locks nothing", "cudaHostRegister locked the memory a second time"),
        ("cudaHostRegister", "cudart unlocks nothing", "cudaHostUnregister unlocked the memory a second time"),
        ("reshard, all dtypes", "a reshard drops what is strided", "other values after the reshard: ['bool turned'"),
        ("slices on a stream of their own", "slices have no stream", "CheckFailed: slices are copied on {"),
        pytest.param(
            "asynchronous save, all dtypes",
            "slices change a bit",
            "other values in the checkpoint: ['bool'",
            marks=pytest.mark.slow,
        ),
        pytest.param("no device memory left, reshard", "a reshard takes memory", "Out of", marks=pytest.mark.slow),
        ("copy, hash and write at the same time", "the trace has another clock", "is it another clock's?"),
        ("what crosses the link", "a kernel is the host's", "save: kernels that ran on the host: strided_copy; "),
        pytest.param(
            "what crosses the link",
            "everything crosses twice",
            "save: to_host is 2097152, and should be 1048576",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_check_finds_what_it_is_there_for(device_world2, tmp_path, name, mistake, text):
    result, detail, _ = device_world2.run(check, directory=str(tmp_path), name=name, mistake=mistake)[0]
    assert result == "WRONG"
    assert text in detail


@pytest.mark.parametrize(
    ("name", "mistake", "text"),
    [
        ("memory", "failed reshards clear their source", "the reshard without memory has changed its source"),
        ("counts", "rounds are small", "reshard: collectives is 2, and should be 1"),
    ],
)
def test_a_check_of_ranks_finds_what_it_is_there_for(device_world2, tmp_path, name, mistake, text):
    for result, detail in device_world2.run(check_ranks, directory=str(tmp_path), name=name, mistake=mistake):
        assert result == "WRONG"
        assert text in detail


@pytest.mark.parametrize(
    ("name", "mistake", "text"),
    [
        ("what crosses the link", "no counters", "FLEXCKPT_DEVICE_COUNTERS names no module"),
        ("a training step while a save is written", "the host does all", "this device has no kernel for a product of"),
    ],
)
def test_what_cannot_be_checked_here_says_why(device_world2, tmp_path, name, mistake, text):
    result, detail, _ = device_world2.run(check, directory=str(tmp_path), name=name, mistake=mistake)[0]
    assert result == "skipped"
    assert text in detail


def test_what_page_locks_on_cuda_is_called_as_its_documentation_says(device_world2, tmp_path):
    found = device_world2.run(check, directory=str(tmp_path), name="cudaHostRegister", mistake="cudart")[0]
    assert found[:2] == ["ok", "locked and unlocked; status 712 for a second lock, 713 for a second unlock"]


@pytest.mark.parametrize(("simulated", "result"), [("1", "ok"), ("", "WRONG")])
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("copies to the host beside bare ones", {"ring_of_bare_copy": {"at_least": 1e9}}),
        ("copy, hash and write at the same time", {"copy_beside_write": {"at_least": 1e9}}),
        pytest.param(
            "a training step while a save is written", {"step_beside_of_alone": {"at_most": 0}}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_bound_of_the_clock_counts_on_a_real_device(device_world2, tmp_path, name, bound, simulated, result):
    arguments = {"name": name, "mistake": "nothing is fast enough", "simulated": simulated}
    found, detail, bounds = device_world2.run(check, directory=str(tmp_path), **arguments)[0]
    assert found == result
    assert ": not kept)" in detail
    assert ("a simulated device need not keep it" in detail) == (simulated == "1")
    assert bounds.items() >= bound.items()


def test_what_goes_on_at_the_same_time_is_counted_once():
    copies = device_check_link._merged([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0), (5.5, 5.6)])
    assert copies == [(0.0, 3.0), (5.0, 6.0)]
    assert device_check_link._shared(copies, [(2.5, 5.5), (6.0, 7.0)]) == [(2.5, 3.0), (5.0, 5.5)]
    assert device_check_link._length(copies) == 4.0
