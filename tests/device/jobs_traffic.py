"""Reshards of given traffic between ranks, against the global values; and one in which a rank is killed."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc

#: What may carry tensor data between devices. At the first of these a victim dies.
TRANSPORTS = (
    *("alltoall_single", "alltoall", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather", "broadcast", "scatter"),
)


def values(extent, salt):
    """A tensor's global value: no two neighbours alike, none zero."""
    return (np.arange(extent, dtype="int64") * 2654435761 % (2**31 - 1) + salt + 1).astype("int32")


def shards(extents, ranges, fill):
    """One-dimensional shards: of tensor ``t{i}``, the elements ``ranges[i]``, unless that is None."""
    state = {}
    for number, (extent, taken) in enumerate(zip(extents, ranges)):
        if taken is not None:
            start, stop = taken
            array = values(extent, number)[start:stop] if fill else np.full(stop - start, -1, "int32")
            state[f"t{number}"] = fc.ShardedWeight(
                f"t{number}", paddle.to_tensor(array), (stop - start,), (extent,), (start,)
            )
    return state


def reshard(extents, sources, targets, times=1):
    """Moves between one-dimensional layouts, several times; ``sources`` and ``targets`` hold ranges by rank."""
    rank = dist.get_rank()
    received = []
    for _ in range(times):
        source = shards(extents, sources[rank], fill=True)
        target = shards(extents, targets[rank], fill=False)
        report = fc.reshard_sharded_state_dict(source, target)
        received.append(report.bytes_received)
    wrong = [
        [key, int((weight.local_tensor.numpy() != wanted).sum())]
        for key, weight in target.items()
        for wanted in [_part(extents, key, targets[rank])]
        if not np.array_equal(weight.local_tensor.numpy(), wanted)
    ]
    touched = [
        key
        for key, weight in source.items()
        if not np.array_equal(weight.local_tensor.numpy(), _part(extents, key, sources[rank]))
    ]
    places = sorted({str(weight.local_tensor.place) for weight in (*source.values(), *target.values())})
    # The backend still does what it should: a collective that was left out on one rank would meet this one.
    total = paddle.to_tensor([1.0])
    dist.all_reduce(total)
    return {"wrong": wrong, "touched": touched, "received": received, "places": places, "ranks": float(total[0])}


def _part(extents, key, ranges):
    number = int(key[1:])
    start, stop = ranges[number]
    return values(extents[number], number)[start:stop]


def killed(extent, victim, folder):
    """Reshards parts into the whole; the victim is killed when its first tensor data would go.

    The others leave their error in the folder: after it, their device fails whatever it is asked.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # The launcher ends the ranks that are left.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == victim:
        for module in (dist, dist.stream, dist.communication.stream):
            for name in TRANSPORTS:
                if hasattr(module, name):
                    setattr(module, name, _die)
    source = shards([extent], [[extent * rank // size, extent * (rank + 1) // size]], fill=True)
    target = shards([extent], [[0, extent]], fill=False)
    try:
        fc.reshard_sharded_state_dict(source, target)
    except fc.CheckpointError as error:
        with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
            json.dump([type(error).__name__, str(error)], file)


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
