"""One rank on a device of its own, whose library calls are counted by the device. Started by test_control_traffic."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication.group_communicators import communicator_for
from tests.device import plugin

work, case = Path(sys.argv[1]), sys.argv[2]
dist.init_parallel_env()
rank, size = dist.get_rank(), dist.get_world_size()


def shards(version: int | None) -> dict[str, fc.ShardedWeight]:
    """Host tensors: whatever then crosses the link is the ranks' talk. Rows of ``w`` for each rank, all of ``b``."""
    rows = np.arange(40, dtype="float32").reshape(4, 10) + 1000 * rank
    whole = np.arange(64, dtype="float32")
    arrays = {"w": rows, "b": whole}
    place = paddle.CPUPlace()
    tensors = {
        key: paddle.to_tensor(array + 100 * version if version is not None else array * 0, place=place)
        for key, array in arrays.items()
    }
    return {
        "w": fc.ShardedWeight("w", tensors["w"], (4, 10), (4 * size, 10), (4 * rank, 0)),
        "b": fc.ShardedWeight("b", tensors["b"], (64,), (64,), (0,)),
    }


def check(state: dict[str, fc.ShardedWeight], version: int) -> bool:
    wanted = shards(version)
    return all((state[key].local_tensor.numpy() == wanted[key].local_tensor.numpy()).all() for key in wanted)


def save_and_load() -> bool:
    fc.save_state_dict(shards(1), str(work / "checkpoint"))
    target = shards(None)
    fc.load_state_dict(target, str(work / "checkpoint"))
    return check(target, 1)


def manage() -> bool:
    with fc.CheckpointManager(str(work / "run"), async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, state=shards(step))
        manager.should_save(3)
        target = shards(None)
        manager.restore("latest", state=target)
    return check(target, 2)


def sub_group() -> bool:
    group = dist.new_group(list(range(size)))
    return communicator_for(group).all_gather(b"%d" % rank) == [b"%d" % other for other in range(size)]


def host_group() -> bool:
    group = dist.new_group(list(range(size)), backend="gloo")
    return communicator_for(group).all_gather(b"%d" % rank) == [b"%d" % other for other in range(size)]


def fail_on_one() -> bool:
    state = shards(1)
    if rank == 1:
        state["w"] = fc.ShardedWeight("w", state["w"].local_tensor, (4, 10), (4 * size + 1, 10), (4 * rank, 0))
    try:
        fc.save_state_dict(state, str(work / "bad"))
    except fc.ValidationError as error:
        return "global shape" in str(error)
    return False


def counted(do) -> dict[str, object]:
    """What a call did, and what the device saw of it."""
    plugin.reset()
    try:
        right: object = do()
    except Exception as error:
        right = f"{type(error).__name__}: {error}"
    seen = plugin.stats()
    paths = {way: seen[way]["calls"] for way in ("ccl", "h2d", "d2h", "d2d")}
    return {"right": right, **paths, "allocations": seen["allocations"]}


def killed() -> None:
    """A rank dies while it saves."""
    fc.save_state_dict(shards(1), str(work / "checkpoint"))
    if rank == int(sys.argv[3]):
        os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        fc.save_state_dict(shards(2), str(work / "checkpoint"))
    except fc.CheckpointError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        os._exit(3)  # an ordinary end would wait for the lost rank


if case == "killed":
    killed()
else:
    if case == "host":
        paddle.set_device("cpu")
    calls = [save_and_load, manage, sub_group, host_group, fail_on_one]
    answers = {call.__name__: counted(call) for call in calls}
    # A job whose store is not known here.
    dist.collective._default_store = None
    try:
        fc.save_state_dict(shards(1), str(work / "no_store"))
        answers["no_store"] = {"error": ""}
    except Exception as error:
        answers["no_store"] = {"error": f"{type(error).__name__}: {error}"}
    (work / f"{case}.{rank}.json").write_text(json.dumps(answers))
