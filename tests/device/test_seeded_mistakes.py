"""Mistakes put into the device path one at a time: each has to be found, and for the right reason.

The jobs: mistakes, each in the library or the device for the time of a job, and the checks that have to find them.

A check returns what it finds wrong, as text. Without a mistake that is nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication import device_exchange
from paddle_flexckpt.memory import device_bytes, tensors
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.saving import background_saves, saver
from paddle_flexckpt.testing import World, WorldError
from tests.device import plugin

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.paddle,
    pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools()),
]

# -- what each rank runs -----------------------------------------------------------------------------------------------

# Elements of four bytes: three steps of a copy to the host, the last one short; many rounds of the small size below.
LARGE = 5_000_011
ROUND_BYTES = 1 << 16


def values(count, salt=0):
    return (np.arange(count, dtype="int64") * 2654435761 % (2**31 - 1) + salt + 1).astype("int32")


def different(found, wanted, what):
    """What differs between two arrays, in words."""
    wrong = int((found != wanted).sum())
    if not wrong:
        return []
    first = int(np.flatnonzero(found.reshape(-1) != wanted.reshape(-1))[0])
    return [f"{what}: {wrong} of {wanted.size} values are wrong, the first at {first}"]


@contextlib.contextmanager
def lazily():
    """The device does nothing that nobody waits for: a wait that is missing shows each time."""
    plugin.configure(lazy=1)
    try:
        yield
    finally:
        plugin.configure(lazy=0)
        paddle.device.synchronize()


# -- checks ------------------------------------------------------------------------------------------------------------


def check_save(folder):
    """A save of this rank alone: a tensor of several steps, a strided one, and what crosses the link for them."""
    whole = values(LARGE)
    table = values(120_000 * 40, 5).reshape(120_000, 40)
    state = {"large": paddle.to_tensor(whole), "columns": paddle.to_tensor(table)[:, 7:29]}
    paddle.device.synchronize()
    before = plugin.stats()["d2h"]["bytes"]
    fc.save_state_dict(state, folder, process_group="self")
    crossed = plugin.stats()["d2h"]["bytes"] - before
    saved = fc.load_merged_state_dict(folder)
    problems = different(saved["large"].cpu().numpy(), whole, "large")
    problems += different(saved["columns"].cpu().numpy(), table[:, 7:29], "columns")
    least = whole.nbytes + table[:, 7:29].nbytes
    if crossed != least:
        problems.append(f"{crossed} bytes crossed to the host, for {least} that were written")
    return problems


def check_stream(folder):
    """A save of a tensor that another stream still has to write."""
    with lazily():
        tensor = paddle.zeros([1024], "int32")
        new = paddle.to_tensor(values(1024))
        paddle.device.synchronize()
        stream = paddle.device.Stream(paddle.device.get_device())  # kept: its end would wait for its work
        with paddle.device.stream_guard(stream):
            paddle.assign(new, tensor)
        fc.save_state_dict({"t": tensor}, folder, process_group="self")
    return different(fc.load_merged_state_dict(folder)["t"].cpu().numpy(), values(1024), "written by another stream")


def check_other_device(folder):
    """The same of a tensor on the device that is not current; in a process that has two."""
    mine, other = (f"{plugin.DEVICE_TYPE}:{number}" for number in range(2))
    with lazily():
        paddle.set_device(other)
        tensor, new = paddle.zeros([1024], "int32"), paddle.to_tensor(values(1024))
        paddle.device.synchronize(other)
        stream = paddle.device.Stream(other)
        with paddle.device.stream_guard(stream):
            paddle.assign(new, tensor)
        paddle.set_device(mine)
        fc.save_state_dict({"t": tensor}, folder, process_group="self")
    return different(fc.load_merged_state_dict(folder)["t"].cpu().numpy(), values(1024), "on the other device")


def check_asynchronous(folder):
    """An asynchronous save, after which the step changes the tensor at once."""
    tensor = paddle.to_tensor(values(LARGE))
    STEP[:] = [lambda: tensor.fill_(-1)]
    with fc.BackgroundWriter() as writer:
        handle = fc.save_state_dict({"t": tensor}, folder, process_group="self", async_save=writer)
        while STEP:
            STEP.pop()()
        handle.result()
    return different(fc.load_merged_state_dict(folder)["t"].cpu().numpy(), values(LARGE), "saved before the step")


def check_load(folder):
    """A load into device memory: contiguous and strided, and that nothing is read off the device for it."""
    whole, table = values(LARGE), values(600 * 40, 5).reshape(600, 40)
    fc.save_state_dict({"t": paddle.to_tensor(whole), "c": paddle.to_tensor(table)}, folder, process_group="self")
    base = paddle.zeros([700, 50], "int32")
    target = {"t": paddle.zeros([LARGE], "int32"), "c": base[50:650, 5:45]}
    paddle.device.synchronize()
    before = plugin.stats()["d2h"]["bytes"]
    fc.load_state_dict(target, folder, process_group="self")
    crossed = plugin.stats()["d2h"]["bytes"] - before
    expected = np.zeros([700, 50], "int32")
    expected[50:650, 5:45] = table
    problems = different(target["t"].numpy(), whole, "large") + different(base.numpy(), expected, "strided")
    return problems + ([f"{crossed} bytes crossed to the host in a load"] if crossed else [])


def check_reshard(folder, one_way=False, lazy=False):
    """Rows to columns between the ranks in many small rounds, or all from the first rank to the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns = 301, 400
    whole = values(rows * size * columns).reshape(rows * size, columns)
    share = columns // size
    part, offset = whole[rows * rank : rows * (rank + 1)], (rows * rank, 0)
    if one_way:
        part, offset = whole, (0, 0)
    source = {"w": fc.ShardedWeight("w", paddle.to_tensor(part), part.shape, whole.shape, offset)}
    wanted, begin = whole[:, share * rank : share * (rank + 1)], (0, share * rank)
    target = {
        "w": fc.ShardedWeight("w", paddle.full(list(wanted.shape), -1, "int32"), wanted.shape, whole.shape, begin)
    }
    if one_way:
        source, target = (source if rank == 0 else {}), (target if rank == size - 1 else {})
    rounds, device_exchange.ROUND_BYTES = device_exchange.ROUND_BYTES, ROUND_BYTES
    before = _crossed()
    try:
        with lazily() if lazy else contextlib.nullcontext():
            fc.reshard_sharded_state_dict(source, target)
            crossed = _crossed() - before
    finally:
        device_exchange.ROUND_BYTES = rounds
    problems = different(target["w"].local_tensor.numpy(), wanted, "target") if target else []
    problems += different(source["w"].local_tensor.numpy(), part, "source") if source else []
    return problems + ([f"{crossed} bytes crossed the link in a reshard"] if crossed else [])


def _crossed():
    stats = plugin.stats()
    return stats["d2h"]["bytes"] + stats["h2d"]["bytes"]


CHECKS = {
    "save": check_save,
    "stream": check_stream,
    "asynchronous": check_asynchronous,
    "load": check_load,
    "reshard": check_reshard,
    "lazy reshard": lambda folder: check_reshard(folder, lazy=True),
    "one way": lambda folder: check_reshard(folder, one_way=True),
}
# In a process of its own: a rank of a job sees its own device only.
ALONE = {"other device": check_other_device}
# What the step does to the tensors right after an asynchronous save has returned.
STEP = []


# -- mistakes ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(owner, name, value):
    right = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)


@contextlib.contextmanager
def configured(**settings):
    plugin.configure(**settings)
    try:
        yield
    finally:
        plugin.configure(**dict.fromkeys(settings, 0))


def missing_wait():
    """A save does not wait for the device."""
    return replaced(saver, "wait_for_devices", lambda tensors: None)


def wait_for_the_wrong_device():
    """A save waits for the current device, whatever device the tensors are on."""
    return replaced(saver, "wait_for_devices", lambda tensors: paddle.device.synchronize())


@contextlib.contextmanager
def a_wait_is_lost():
    """The device forgets each wait of the host."""
    with configured(lose_wait=-1):
        yield


@contextlib.contextmanager
def an_event_is_lost():
    """The device forgets each recording of an event: streams no longer wait for each other."""
    with configured(lose_event=-1):
        yield


@contextlib.contextmanager
def reused_buffer():
    """A save fills a buffer again that has not been written yet."""
    small = replaced(device_bytes, "BUFFER_BYTES", 4 << 20)
    with small, replaced(device_bytes, "BUFFERS", 1), replaced(device_bytes, "BATCH_BYTES", 0):
        yield


def wrong_stream():
    """Pieces are packed on a stream that the collective does not wait for."""
    right, streams = device_exchange.DeviceExchange._pack, []

    def pack(self, *arguments):
        streams.append(paddle.device.Stream(paddle.device.get_device()))  # kept: its end would wait for its work
        with paddle.device.stream_guard(streams[-1]):
            right(self, *arguments)

    return replaced(device_exchange.DeviceExchange, "_pack", pack)


def copy_after_the_step():
    """An asynchronous save copies when the step has changed the tensors already."""
    right = background_saves.BackgroundSave.write

    def stage(self, *arguments):
        while STEP:
            STEP.pop()()
        return right(self, *arguments)

    return replaced(background_saves.BackgroundSave, "write", stage)


def freed_memory():
    """A save reads the memory of a copy that has been freed."""

    def read_into(self, start, target, wait=True):
        copy = self._tensor.clone()
        paddle.device.synchronize()
        address = int(copy.data_ptr())
        del copy
        data = plugin.read(address + start, target.nbytes, int(self.device.rpartition(":")[2]))
        target[...] = np.frombuffer(data, np.uint8)

    return replaced(DeviceMemory, "read_into", read_into)


def chunk_off_by_one():
    """Each step but the first starts one element too early."""
    right = DeviceMemory.read_into

    def read_into(self, start, target, wait=True):
        right(self, start - (start > 0) * self.dtype.itemsize, target, wait)

    return replaced(DeviceMemory, "read_into", read_into)


def dropped_last_round():
    """The last round of an exchange, which is not a full one, is left out."""
    right = device_exchange.Traffic.of.__func__

    def of(cls, *arguments):
        traffic = right(cls, *arguments)
        quotas = traffic.quotas(device_exchange.ROUND_BYTES)
        return replace(traffic, nbytes=traffic.nbytes // quotas * quotas)

    return replaced(device_exchange.Traffic, "of", classmethod(of))


def zero_size_round():
    """A rank that has nothing to send hands an empty slice to the backend."""
    right, alltoall = device_exchange._Side.sizes, dist.alltoall_single

    def sizes(self, number):
        found = right(self, number)
        found[self._here] = 0
        return found

    def alltoall_single(receive, send, **rest):
        return alltoall(receive, send if int(send.shape[0]) else paddle.zeros([1], "uint8")[:-1], **rest)

    patches = contextlib.ExitStack()
    patches.enter_context(replaced(device_exchange._Side, "sizes", sizes))
    patches.enter_context(replaced(dist, "alltoall_single", alltoall_single))
    return patches


def host_read():
    """The host follows the address of a device tensor."""

    def read_into(self, start, target, wait=True):
        flat = self._tensor.reshape([-1]) if self._strides is None else self._tensor.clone().reshape([-1])
        target[...] = tensors.host_memory(flat).view(np.uint8)[start : start + target.nbytes]

    return replaced(DeviceMemory, "read_into", read_into)


def source_and_target_swapped():
    """A copy within the device goes the other way."""
    right = DeviceMemory.copy_from

    def copy_from(self, source, copy):
        if source.size != self.size:
            return right(self, source, copy)
        swapped = replace(
            copy,
            source_base=copy.target_base,
            source_strides=copy.target_strides,
            target_base=copy.source_base,
            target_strides=copy.source_strides,
        )
        return right(source, self, swapped)

    return replaced(DeviceMemory, "copy_from", copy_from)


def whole_tensor_for_each_step():
    """Each step copies all of the tensor and cuts on the host."""
    right = DeviceMemory.read_into

    def read_into(self, start, target, wait=True):
        whole = np.empty(self.size * self.dtype.itemsize, np.uint8)
        right(self, 0, whole, wait)
        target[...] = whole[start : start + target.nbytes]

    return replaced(DeviceMemory, "read_into", read_into)


def load_reads_its_targets():
    """A load copies what it overwrites to the host first."""
    right = DeviceMemory.write

    def write(self, copy, values):
        self.read_range(0, self.size)
        right(self, copy, values)

    return replaced(DeviceMemory, "write", write)


def reshard_through_the_host():
    """Pieces are copied within a device by way of the host."""

    def copy_from(self, source, copy):
        self.write(copy, source.read(copy))

    return replaced(DeviceMemory, "copy_from", copy_from)


def view_from_the_wrong_place():
    """A strided view is read from the start of its allocation."""
    right = DeviceMemory._anchored

    def anchored(self):
        anchor, _ = right(self)
        return anchor, 0

    return replaced(DeviceMemory, "_anchored", anchored)


MISTAKES = {
    function.__name__: function
    for function in (
        *(missing_wait, wait_for_the_wrong_device, a_wait_is_lost, an_event_is_lost, reused_buffer, wrong_stream),
        *(copy_after_the_step, freed_memory, chunk_off_by_one, dropped_last_round, zero_size_round, host_read),
        *(source_and_target_swapped, whole_tensor_for_each_step, load_reads_its_targets, reshard_through_the_host),
        *(view_from_the_wrong_place,),
    )
}


def run(check, mistake, folder):
    """What a check finds under a mistake; None is no mistake."""
    folder = os.path.join(folder, str(dist.get_rank()))
    with MISTAKES[mistake]() if mistake else contextlib.nullcontext():
        try:
            return {**CHECKS, **ALONE}[check](folder)
        except Exception as error:  # whatever it is, that is how the mistake shows
            return [f"{type(error).__name__}: {error}"]


# -- what is asserted -------------------------------------------------------------------------------------------------

VALUES = r"of \d+ values are wrong"
#: (mistake, the check that finds it, what it says).
FOUND = [
    ("missing_wait", "stream", f"written by another stream: 1024 {VALUES}"),
    ("a_wait_is_lost", "stream", f"written by another stream: 1024 {VALUES}"),
    ("an_event_is_lost", "lazy reshard", f"target: .* {VALUES}"),
    ("reused_buffer", "save", f"large: .* {VALUES}"),
    ("wrong_stream", "lazy reshard", f"target: .* {VALUES}"),
    ("copy_after_the_step", "asynchronous", f"saved before the step: 5000011 {VALUES}"),
    ("freed_memory", "save", "freed"),
    ("chunk_off_by_one", "save", f"large: .* {VALUES}, the first at 2097152"),
    ("dropped_last_round", "reshard", f"target: .* {VALUES}"),
    ("host_read", "asynchronous", "the host has touched memory of device"),
    ("source_and_target_swapped", "reshard", f"target: .* {VALUES}"),
    ("whole_tensor_for_each_step", "save", "bytes crossed to the host, for"),
    ("load_reads_its_targets", "load", "bytes crossed to the host in a load"),
    ("reshard_through_the_host", "reshard", "bytes crossed the link in a reshard"),
    ("view_from_the_wrong_place", "save", "a view of .* is not where it should be"),
]
#: Those that the device itself counts as misuse, so that the job fails whatever the check says.
MISUSED = {"freed_memory": "freed_uses", "host_read": "host_touches"}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_mistake_nothing_is_found(device_world2, tmp_path, check):
    assert device_world2.run(run, check=check, mistake=None, folder=str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("mistake", "check", "said"), [each for each in FOUND if each[0] not in MISUSED])
def test_a_mistake_is_found(device_world2, tmp_path, mistake, check, said):
    answers = device_world2.run(run, check=check, mistake=mistake, folder=str(tmp_path))
    assert any(re.search(said, problem) for problems in answers for problem in problems), answers
    # And it has ended with the job.
    assert device_world2.run(run, check=check, mistake=None, folder=str(tmp_path / "after")) == [[], []]


@pytest.mark.parametrize(("mistake", "check", "said"), [each for each in FOUND if each[0] in MISUSED])
def test_a_misuse_of_device_memory_fails_the_job(tmp_path, mistake, check, said):
    with World(2, device="tests.device.ranks", grace=5) as world, pytest.raises(WorldError) as caught:
        world.run(run, check=check, mistake=mistake, folder=str(tmp_path))
    assert set(caught.value.failures) == {0, 1}
    for failure in caught.value.failures.values():
        assert "DeviceMisuseError" in failure
        assert MISUSED[mistake] in failure


@pytest.mark.parametrize(("mistake", "said"), [("", None), ("wait_for_the_wrong_device", "1024 of 1024 values")])
def test_a_wait_for_the_wrong_device_is_found(tmp_path, mistake, said):
    env = {**os.environ, **plugin.environment(devices=2), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.device.test_seeded_mistakes", "other device", mistake, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert len(problems) == (0 if said is None else 1), problems
    assert said is None or said in problems[0]


def test_a_round_of_nothing_is_refused_and_nobody_waits_for_ever(tmp_path):
    """One rank is refused before the collective; the other waits there for as long as the backend does."""
    with World(2, device="tests.device.ranks", grace=30, env={"REHEARSAL_PATIENCE_S": "2"}) as world:
        try:
            told = str(world.run(run, check="one way", mistake="zero_size_round", folder=str(tmp_path)))
        except WorldError as error:
            assert not error.stacks, error
            told = f"{error} {error.results}"
    assert re.search("must be contiguous", told), told


def test_there_are_at_least_twelve():
    assert {mistake for mistake, _, _ in FOUND} | {"zero_size_round", "wait_for_the_wrong_device"} == set(MISTAKES)
    assert len(MISTAKES) >= 12


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2] or None, sys.argv[3])))
