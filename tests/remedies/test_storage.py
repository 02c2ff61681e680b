"""Remedies of saves and loads about files, storage and memory, each provoked and followed."""

from __future__ import annotations

import errno
import io
import json
import os

import numpy as np
import paddle
import safetensors.numpy

import paddle_flexckpt as fc
from paddle_flexckpt.background import staging
from paddle_flexckpt.manager import KeepLatest
from paddle_flexckpt.media.local import LocalOutputFile
from paddle_flexckpt.media.opening import open_storage, reopen
from paddle_flexckpt.memory import device_memory
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.media.stores import KINDS, Disk
from tests.remedies.following import Advice, advised, provoked
from tests.saved import data_file

A = np.arange(24, dtype=np.float32).reshape(6, 4)


def loaded(path, key="a", **options) -> list:
    target = np.full_like(A, -1)
    fc.load_state_dict({key: target}, path, **options)
    return target.tolist()


def test_too_little_memory_for_a_copy_of_the_state(tmp_path, monkeypatch):
    """In waves it takes a buffer, synchronously none."""
    state, available = {"a": np.ones(17 << 20, np.float32)}, [66 << 20]
    check = staging._check_memory

    def short(more):
        if more > available[0]:
            monkeypatch.setattr(staging, "open", lambda *_, **__: io.StringIO("MemAvailable: 0 kB"), raising=False)
        check(more)

    monkeypatch.setattr(staging, "_check_memory", short)
    words = Advice(
        "background/staging.py", "pass staging_bytes=, to copy through so much memory (64 MiB at least), save"
    )
    with provoked(*words):
        fc.save_state_dict(state, tmp_path / "x", async_save=True).result()
    monkeypatch.delattr(staging, "open")
    fc.save_state_dict(state, tmp_path / "waves", async_save=True, staging_bytes=64 << 20).result()
    fc.save_state_dict(state, tmp_path / "synchronous")
    available[0] = 1 << 40
    fc.save_state_dict(state, tmp_path / "more", async_save=True).result()
    digest = fc.digest(state)
    assert all(fc.digest(tmp_path / each) == digest for each in ("waves", "synchronous", "more"))


def test_without_linux_saves_are_synchronous(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with provoked("background/writer.py", "save synchronously"):
        fc.BackgroundWriter()
    fc.save_state_dict({"a": A}, tmp_path)
    assert loaded(tmp_path) == A.tolist()


def test_the_memory_of_this_process_is_not_saved_to_by_another(tmp_path):
    url = f"memory://{tmp_path.name}"
    with provoked("media/remote.py", "save synchronously, or elsewhere"):
        fc.save_state_dict({"a": A}, url, async_save=True)
    fc.save_state_dict({"a": A}, url)
    fc.save_state_dict({"a": A}, tmp_path, async_save=True).result()
    assert loaded(url) == loaded(tmp_path) == A.tolist()


def test_an_option_of_a_store_that_another_process_cannot_be_given(monkeypatch):
    monkeypatch.setattr(KINDS["put"], "disk", Disk())
    store = open_storage("teststore://d/run", commit="put", region=np.int64(3))
    with provoked("media/remote.py", "save synchronously, or give it as text, or by the environment"):
        fc.save_state_dict({"a": A}, store, async_save=True)
    fc.save_state_dict({"a": A}, store)
    assert loaded(store) == A.tolist()
    for options in ({"region": "3"}, {}):
        token = open_storage("teststore://d/run", commit="put", **options).reopen_token()
        assert loaded(reopen(json.loads(json.dumps(token)))) == A.tolist()


def test_a_checkpoint_without_checksums_gets_them_by_a_save(tmp_path):
    (tmp_path / "theirs").mkdir()
    safetensors.numpy.save_file({"a": A}, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    with provoked("native/block_reader.py", "load it with another mode, and save it again"):
        loaded(tmp_path / "theirs", verify="full")
    target = {"a": np.zeros_like(A)}
    fc.load_state_dict(target, tmp_path / "theirs", verify="read")
    fc.save_state_dict(target, tmp_path / "ours")
    assert loaded(tmp_path / "ours", verify="full") == A.tolist()


def test_a_header_that_is_too_long_is_divided(tmp_path, monkeypatch):
    state = {f"layers.{number}.weight": np.full(2, number, np.float32) for number in range(8)}
    monkeypatch.setattr("paddle_flexckpt.native.data_file.MAX_HEADER_BYTES", 900)

    def save(comm, path, names):
        fc.save_state_dict({name: state[name] for name in names}, path, comm)

    names = [*state]
    words = Advice(
        "native/data_file.py", "save with more ranks, or parts of the state dict in directories of their own"
    )
    with provoked(*words):
        fc.save_state_dict(state, tmp_path / "x")
    SimulatedWorld(4).run(lambda comm: save(comm, tmp_path / "ranks", names[comm.rank :: 4]))
    for number in range(4):
        fc.save_state_dict({name: state[name] for name in names[number::4]}, tmp_path / f"{number}")
    target = {name: np.zeros(2, np.float32) for name in names}
    fc.load_state_dict(target, tmp_path / "ranks")
    assert fc.digest(target) == fc.digest(state)
    target = {name: np.zeros(2, np.float32) for name in names}
    for number in range(4):
        fc.load_state_dict({name: target[name] for name in names[number::4]}, tmp_path / f"{number}")
    assert fc.digest(target) == fc.digest(state)


def test_a_manifest_whose_link_leads_nowhere_for_a_while(tmp_path):
    """It is not removed: what it leads to may come back."""
    fc.save_state_dict({"a": A}, tmp_path, unique_id=0)
    fc.save_state_dict({"a": A + 1}, tmp_path, unique_id=1)
    (tmp_path / "1.manifest").rename(tmp_path / "blob")
    (tmp_path / "1.manifest").symlink_to("blob")
    assert loaded(tmp_path) == (A + 1).tolist()
    (tmp_path / "blob").rename(tmp_path / "elsewhere")
    words = Advice(
        "native/directory.py",
        "try again; if it stays so, restore the file that the link leads to, or load another checkpoint by its id",
    )
    for _ in range(2):
        with provoked(*words):
            loaded(tmp_path)
    assert loaded(tmp_path, unique_id=0) == A.tolist()
    (tmp_path / "elsewhere").rename(tmp_path / "blob")
    assert loaded(tmp_path) == (A + 1).tolist()


def test_an_id_that_exists(tmp_path):
    fc.save_state_dict({"a": A}, tmp_path, unique_id=3, overwrite=False)
    with provoked(
        "native/save_directory.py",
        "save under another id; or, to lose that checkpoint, overwrite=True replaces it as soon as the new one",
    ):
        fc.save_state_dict({"a": A + 1}, tmp_path, unique_id=3, overwrite=False)
    assert loaded(tmp_path) == A.tolist()
    fc.save_state_dict({"a": A + 1}, tmp_path, unique_id=4, overwrite=False)
    assert (loaded(tmp_path, unique_id=3), loaded(tmp_path, unique_id=4)) == (A.tolist(), (A + 1).tolist())
    fc.save_state_dict({"a": A + 2}, tmp_path, unique_id=3, overwrite=True)
    assert loaded(tmp_path, unique_id=3) == (A + 2).tolist()


def test_a_disk_that_is_full_of_checkpoints(tmp_path, monkeypatch):
    """It has room for two."""
    write = LocalOutputFile.write

    def limited(self, data):
        there = sum(1 for _ in tmp_path.glob("step_*/*.manifest"))
        if ".safetensors" in self._path and there >= room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        return write(self, data)

    def restored(manager) -> list:
        target = np.zeros_like(A)
        return [manager.restore(state={"a": target}).step, target.tolist()]

    room = [2]
    monkeypatch.setattr(LocalOutputFile, "write", limited)
    with fc.CheckpointManager(tmp_path, keep=KeepLatest(2), preemption_signals=()) as manager:
        for step in (1, 2):
            manager.save(step, state={"a": A + step})
        words = Advice(
            "manager/step_directories.py",
            "make room; or, if more than one step is kept, keep fewer, and save twice: the first removes the others",
        )
        with provoked(*words):
            manager.save(3, state={"a": A + 3})
        assert (manager.all_steps(), restored(manager)) == ([1, 2], [2, (A + 2).tolist()])
        room[0] = 3
        manager.save(3, state={"a": A + 3})
        assert (manager.all_steps(), restored(manager)) == ([2, 3], [3, (A + 3).tolist()])
    room[0] = 2
    with fc.CheckpointManager(tmp_path, keep=KeepLatest(1), preemption_signals=()) as manager:
        restored(manager)
        with provoked("manager/step_directories.py", "save again") as caught:
            manager.save(4, state={"a": A + 4})
        assert "To make room, steps that need not be kept were removed: step 2. Remedy" in str(caught.value)
        assert (manager.all_steps(), restored(manager)) == ([3], [3, (A + 3).tolist()])
        manager.save(4, state={"a": A + 4})
        assert (manager.all_steps(), restored(manager)) == ([4], [4, (A + 4).tolist()])


def test_a_damaged_file_whose_replica_is_intact(tmp_path):
    def save(comm):
        fc.save_state_dict({"a": A}, tmp_path, comm, save_replicas=True)

    SimulatedWorld(2).run(save)
    file = tmp_path / data_file(tmp_path)
    copy = file.read_bytes()
    file.write_bytes(copy[:-1] + bytes([copy[-1] ^ 1]))
    (problem,) = fc.verify_checkpoint(tmp_path).problems
    assert problem.remedy.endswith(data_file(tmp_path, 1))
    advised("native/verify.py", "; until then, a load reads the intact replica in ", str(problem))
    assert loaded(tmp_path) == A.tolist()
    file.write_bytes(copy)
    assert fc.verify_checkpoint(tmp_path).ok


def test_a_strided_tensor_of_a_device_without_views(monkeypatch):
    """Paddle makes a tensor contiguous in place."""
    strided = paddle.to_tensor(A.T).transpose([1, 0])
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "has_views", lambda names: False)  # Paddle 3.1 has views
        with provoked("memory/device_memory.py", "make it contiguous, or use Paddle 3.1"):
            DeviceMemory(strided)._run(0, 2)
        strided.contiguous()
        assert (strided.numpy() == A).all()
        DeviceMemory(strided)._run(0, 2).fill_(-1)
        assert strided.numpy().ravel().tolist() == [-1, -1, *A.ravel()[2:]]
