"""A fork has nothing of this library's: no socket, no lock, no memory, whatever was under way when it was made."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.background.staging import WaveSender
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.ranks.transport import SocketTransport
from paddle_flexckpt.saving.saver import save_state_dict
from tests.background.helpers import SOLO, load, save, stopped

PATIENCE_SECONDS = 300


def in_fork(work: Callable[[], object]) -> object:
    """What a function returns, JSON-safe, in a fork of this process."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(work()).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return json.loads(said)


def belongings() -> list[str]:
    """Descriptors of this process, but for pipes, and memory that it shares with others."""
    gc.collect()  # a call that has ended may have left cycles
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found += [line.split(maxsplit=5)[-1] for line in maps.splitlines() if "memfd:" in line]
    return sorted(each for each in found if not each.startswith(("pipe:", "/proc")))


def test_a_fork_has_what_a_fork_of_a_process_without_the_library_has(tmp_path):
    before = in_fork(belongings)
    with BackgroundWriter(nice=0) as writer, BackgroundWriter(nice=0, max_pending=2) as other:
        for each in (writer, other):
            save(tmp_path / "first", 1, each).result()
        sliced = save_state_dict(
            {"w": np.zeros(5000, "float32")}, tmp_path / "sliced", SOLO, async_save=writer, slice_bytes=4096
        )
        backend = open_backend(tmp_path / "first")
        transport = SocketTransport((0, 1), 0)
        transport.address()
        waves = WaveSender(np.zeros(8, np.uint8))
        with stopped(other), backend.locks.take(), backend.locks.share("0.manifest"):
            handle = save(tmp_path / "pending", 2, other)
            assert in_fork(belongings) == before
            assert len(belongings()) > len(before) + 8  # all of it is here still
        waves.close()
        transport.close()
        assert handle.result().unique_id == 0
        sliced.finish_staging().result()
    assert load(tmp_path / "pending") == 2


@pytest.mark.parametrize("kind", ["right to save", "reading", "removing"])
def test_a_fork_that_gives_a_lock_back_leaves_it_to_its_owner(tmp_path, kind):
    """As one made by a callback of a save, whose frames end with it."""
    save(tmp_path, 1)
    locks = open_backend(tmp_path).locks
    take = {"right to save": locks.take, "reading": lambda: locks.share("0.manifest"),
            "removing": lambda: locks.claim("0.manifest")}[kind]  # fmt: skip
    with take() as lock:
        in_fork(lock.release)
        if kind == "right to save":
            with pytest.raises(CheckpointError, match="another save is writing"):
                locks.take()
        else:
            assert locks.claim("0.manifest") is None


def test_a_fork_that_steps_stages_nothing(tmp_path):
    class Optimizer:
        def step(self) -> str:
            return "stepped"

    state, optimizer = {"w": np.arange(5000, dtype="float32")}, Optimizer()
    with BackgroundWriter(nice=0) as writer:
        handle = save_state_dict(state, tmp_path, SOLO, async_save=writer, slice_bytes=4096)
        handle.finish_before(optimizer)

        def use() -> list[str]:
            said = [optimizer.step()]
            for call in (handle.stage_next, handle.finish_staging, handle.give_up):
                with pytest.raises(CheckpointError, match="of which this one is a fork") as error:
                    call()
                said.append(type(error.value).__name__)
            return said

        assert in_fork(use) == ["stepped"] + ["CheckpointError"] * 3
        assert not handle.is_staged
        optimizer.step()
        handle.result()
    assert np.array_equal(np.asarray(state["w"]), np.arange(5000, dtype="float32"))


def test_what_has_gone_is_not_held_and_one_that_fails_does_not_keep_the_others():
    class Failing:
        def close(self) -> None:
            raise OSError("it cannot be closed")

    gone = close_in_forks(Failing())
    known = weakref.ref(gone)
    del gone
    gc.collect()
    assert known() is None
    ours, theirs = socket.socketpair()
    failing = close_in_forks(Failing())
    assert close_in_forks(ours) is ours
    assert in_fork(lambda: (ours.fileno(), theirs.fileno() >= 0)) == [-1, True]
    assert ours.fileno() >= 0 and failing
    ours.close()
    theirs.close()


def test_a_pool_ends_after_all_that_a_manager_does(tmp_path):
    """The pool ends its workers by SIGTERM, one of which has an hour to sleep."""
    code = """
import multiprocessing, sys, time
import numpy as np
from paddle_flexckpt.manager import CheckpointManager
root = sys.argv[1]
outer = CheckpointManager(root + "/outer")
manager = CheckpointManager(root + "/inner", async_save=True)
outer.save(1, state={"w": np.ones(3)}, blocking=True)
manager.save(1, state={"w": np.ones(3)})
manager.restore(state={"w": np.zeros(3)})
with multiprocessing.get_context("fork").Pool(2) as pool:
    for _ in pool.imap_unordered(time.sleep, [0.1] * 2 + [3600] * 2):
        break
manager.close(), outer.close()
print("ended")
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ended"]), done.stderr
