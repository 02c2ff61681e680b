"""Saves from devices: copies and writes at the same time, bounded memory, errors that leave nothing, straight staging.

The jobs: what each rank runs.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.media.local import LocalOutputFile
from paddle_flexckpt.memory import device_bytes
from paddle_flexckpt.memory.device_memory import DeviceMemory
from tests.device import plugin
from tests.device.jobs_findings import measured

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
MIB = 1 << 20
PATIENCE = 60.0

# -- what each rank runs -----------------------------------------------------------------------------------------------


def words(nbytes, seed):
    """A device tensor of this rank's random words."""
    random = np.random.default_rng([seed, dist.get_rank()])
    return paddle.to_tensor(random.integers(0, 1 << 31, nbytes // 4, dtype=np.int32))


def own(tensors):
    """A state of which each rank has its own part."""
    return {f"{key}.of{dist.get_rank()}": tensor for key, tensor in tensors.items()}


def mixed_state():
    """More than all buffers hold: large and small, strided, empty, of odd sizes, of several types, and on the host."""
    large = words(20 * MIB, 0)
    tensors = {"a": large, "b": large.reshape([1024, -1]).t(), "empty": paddle.empty([0, 3])}
    tensors |= {f"c{i:04}": large[7 * i : 7 * i + i % 5] for i in range(1500)}
    tensors["d"] = words(9 * MIB + 4, 1)
    tensors["e"] = words(MIB, 2)._copy_to(paddle.CPUPlace(), True)
    tensors["f"] = words(3 * MIB, 3).astype("bfloat16")
    tensors["g"] = words(5 * MIB, 4).view("uint8")[3:]
    tensors["i"] = words(24 * MIB, 5)
    tensors["h"] = paddle.to_tensor(np.array([1 + 2j, 3], np.complex128))
    return own(tensors)


def is_equal(state, path, **options):
    """Whether a checkpoint has the very bits of a state."""
    target = {key: paddle.zeros_like(tensor) for key, tensor in state.items()}
    fc.load_state_dict(target, path, **options)
    bits = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}
    for key, tensor in state.items():
        one, other = (
            np.ascontiguousarray(each.contiguous().view(bits[each.element_size()]).numpy() if each.size else [])
            for each in (tensor.clone(), target[key])
        )
        if one.tobytes() != other.tobytes():
            return key
    return True


def locked():
    """Page-locked bytes. The writer of earlier jobs in this process may have some."""
    return plugin.stats()["pinned_bytes"]


def leftovers(before):
    """What a save may not leave: threads, and page-locked memory beyond what there was before."""
    gc.collect()
    threads = [each.name for each in threading.enumerate() if each.name == "flexckpt-ring"]
    return [threads, locked() - before]


def save_mixed(directory):
    before, state = locked(), mixed_state()
    fc.save_state_dict(state, f"{directory}/sync")
    writer = fc.BackgroundWriter()
    fc.save_state_dict(state, f"{directory}/async", async_save=writer).result()
    report = fc.save_state_dict(state, f"{directory}/waves", async_save=writer, staging_bytes=64 * MIB).result()
    assert report.bytes_written > 64 * MIB
    writer.close()
    return [is_equal(state, f"{directory}/{kind}") for kind in ("sync", "async", "waves")], leftovers(before)


@contextmanager
def copies_that_count(copies, raises_at=None) -> Iterator[None]:
    """Count copies from the device, under a condition that others may wait for."""
    real = DeviceMemory.read_into

    def counted(self, start, target, *rest):
        if raises_at is not None and len(copies[1]) >= raises_at:
            raise RuntimeError("the link is down")
        real(self, start, target, *rest)
        with copies[0]:
            copies[1].append(target.nbytes)
            copies[0].notify_all()

    with mock.patch.object(DeviceMemory, "read_into", counted):
        yield


@contextmanager
def writes_that(do) -> Iterator[None]:
    """Call a function before each write of a data file's data."""
    real = LocalOutputFile.write_many

    def write_many(self, parts):
        size = sum(memoryview(part).nbytes for part in parts)
        if size >= MIB:
            do(size)
        real(self, parts)

    with mock.patch.object(LocalOutputFile, "write_many", write_many):
        yield


def save_overlapped(directory):
    """Let no write end before the buffer after it is full; return bytes copied before each write's end."""
    before, nbytes = locked(), 64 * MIB
    state, copies, seen, written = own({"w": words(nbytes, 5)}), (threading.Condition(), []), [], []

    def wait_for_copies(size):
        written.append(size)
        ahead = min(nbytes, sum(written) + device_bytes.BUFFER_BYTES)
        with copies[0]:
            assert copies[0].wait_for(lambda: sum(copies[1]) >= ahead, PATIENCE)
            seen.append(sum(copies[1]))

    cost = {}
    with copies_that_count(copies), writes_that(wait_for_copies):
        cost = measured(lambda: fc.save_state_dict(state, directory))
    stats = plugin.stats()
    cost |= {"pageable": stats["d2h"]["pageable_bytes"], "locked": stats["pinned_peak"] - before}
    return written, seen, cost, is_equal(state, directory), leftovers(before)


def save_queued(directory):
    """Let no copy end before the next one is asked for; return how many there were."""
    before, state, real = locked(), own({"w": words(96 * MIB, 7)}), DeviceMemory.read_into
    asked, last = threading.Condition(), 96 * MIB - device_bytes.BUFFER_BYTES
    starts = []

    def read_into(self, start, target, *rest):
        with asked:
            starts.append(start)
            asked.notify_all()
            assert start == last or asked.wait_for(lambda: max(starts) > start, PATIENCE), "the link has nothing to do"
        real(self, start, target, *rest)

    with mock.patch.object(DeviceMemory, "read_into", read_into):
        fc.save_state_dict(state, directory)
    return len(starts), is_equal(state, directory), leftovers(before)


def fail(kind):
    if kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise KeyboardInterrupt


def save_failing(directory, kind):
    """A save that fails on rank 1 in one way; what it says, what it leaves, and whether the next one goes well."""
    before, state, copies = locked(), own({"w": words(48 * MIB, 6)}), (threading.Condition(), [])
    fails = dist.get_rank() == 1
    said = ""
    counting = copies_that_count(copies, 3 if fails and kind == "copy" else None)
    with counting, writes_that(lambda size: fail(kind) if fails and kind != "copy" else None):
        try:
            fc.save_state_dict(state, directory)
        except fc.CheckpointError as error:
            said = str(error)
    left = leftovers(before)
    dist.barrier()
    files = sorted(os.listdir(directory))
    dist.barrier()
    fc.save_state_dict(state, directory)
    return said, left, files, len(copies[1]), is_equal(state, directory)


def save_interrupted(directory):
    """Ctrl-C while the first write waits, in a job of one rank."""
    if dist.get_rank():
        return None
    before, state = locked(), {"w": words(48 * MIB, 6)}
    interrupted = False
    with writes_that(lambda size: fail("interrupt")):
        try:
            fc.save_state_dict(state, directory, process_group="self")
        except KeyboardInterrupt:
            interrupted = True
    left = leftovers(before)
    fc.save_state_dict(state, directory, process_group="self")
    return interrupted, left, is_equal(state, directory, process_group="self")


def stage(directory):
    """Two asynchronous saves with one writer, the second of a larger state."""
    before, answers = locked(), []
    with fc.BackgroundWriter() as writer:
        for number, mib in enumerate((24, 24, 40)):
            state = own({"w": words(mib * MIB, number), "host": paddle.ones([4], dtype="int32").cpu()})
            copies = (threading.Condition(), [])
            plugin.reset()
            with copies_that_count(copies):
                handle = fc.save_state_dict(state, f"{directory}/{number}", async_save=writer)
            stats = plugin.stats()
            handle.result()
            answers.append(
                {
                    "copies": copies[1],
                    "d2h": stats["d2h"]["bytes"],
                    "pageable": stats["d2h"]["pageable_bytes"],
                    "is locked": stats["pinned_bytes"] - before == writer.staging_bytes,
                    "right": is_equal(state, f"{directory}/{number}"),
                }
            )
    return answers, leftovers(before)


def stage_of_the_host(directory):
    """Two asynchronous saves with one writer, the second of tensors of the host alone."""
    right = []
    with fc.BackgroundWriter() as writer:
        for number, state in enumerate(({"w": words(MIB, 1)}, {"w": paddle.ones([5], dtype="int32").cpu()})):
            state = own(state)
            fc.save_state_dict(state, f"{directory}/{number}", async_save=writer).result()
            right.append(is_equal(state, f"{directory}/{number}"))
    return right


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_every_kind_of_tensor_is_saved_bit_for_bit(device_world2, tmp_path):
    for right, left in device_world2.run(save_mixed, directory=str(tmp_path)):
        assert right == [True, True, True]
        assert left == [[], 0]


def test_a_save_copies_the_next_buffer_while_it_writes_one(device_world2, tmp_path):
    for written, seen, cost, right, left in device_world2.run(save_overlapped, directory=str(tmp_path / "x")):
        assert right is True
        assert sum(written) == 64 * MIB
        # Before the end of each write, and not only of the last, the link had gone on.
        assert all(copied > before for copied, before in zip(seen[:-1], np.cumsum(written)))
        assert cost["d2h"] == 64 * MIB
        assert cost["pageable"] == 0
        assert cost["locked"] == device_bytes.BUFFERS * device_bytes.BUFFER_BYTES
        assert cost["host"] <= 64 * MIB <= 256 * MIB
        assert left == [[], 0]


def test_a_copy_is_queued_before_the_one_before_is_waited_for(device_world2, tmp_path):
    for copies, right, left in device_world2.run(save_queued, directory=str(tmp_path / "x")):
        assert copies == 96 * MIB // device_bytes.BUFFER_BYTES
        assert right is True
        assert left == [[], 0]


@pytest.mark.parametrize(("kind", "text"), [("copy", "the link is down"), ("full", "No space left on device")])
def test_a_failure_leaves_nothing_running_and_nothing_half(device_world2, tmp_path, kind, text):
    answers = device_world2.run(save_failing, directory=str(tmp_path), kind=kind)
    assert len({said for said, *_ in answers}) == 1
    for said, left, files, copies, right in answers:
        assert text in said
        assert "[rank 1]" in said
        assert left == [[], 0]
        assert not [name for name in files if name.endswith((".safetensors", ".manifest"))]
        assert copies <= 12
        assert right is True


def test_ctrl_c_leaves_nothing_running(device_world2, tmp_path):
    interrupted, left, right = device_world2.run(save_interrupted, directory=str(tmp_path))[0]
    assert interrupted
    assert left == [[], 0]
    assert right is True


def test_memory_that_was_locked_for_a_device_serves_a_save_of_the_host(device_world2, tmp_path):
    assert device_world2.run(stage_of_the_host, directory=str(tmp_path)) == [[True, True]] * 2


def test_an_asynchronous_save_copies_straight_into_the_segment(device_world2, tmp_path):
    for answers, left in device_world2.run(stage, directory=str(tmp_path)):
        for answer, mib in zip(answers, (24, 24, 40)):
            assert answer["copies"] == [mib * MIB]
            assert answer["d2h"] == mib * MIB
            assert answer["pageable"] == 0
            assert answer["is locked"]
            assert answer["right"] is True
        assert left == [[], 0]
