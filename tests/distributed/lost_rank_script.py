"""One rank of a job in which a rank is killed while it saves or loads. Started by test_lost_rank."""

import functools
import os
import signal
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.ranks import host_channel

directory, transport, victim, point = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if point == "before the first call":
    # A rank that has never come is not watched.
    host_channel.HostChannel = functools.partial(host_channel.HostChannel, patience=20.0)
if transport == "mesh":
    from paddle_flexckpt.testing import cpu_world

    cpu_world.install()
dist.init_parallel_env()
rank, size = dist.get_rank(), dist.get_world_size()


def state(version):
    rows = np.arange(40, dtype="float32").reshape(4, 10) + 100 * version + 1000 * rank
    return {"w": fc.ShardedWeight("w", paddle.to_tensor(rows), (4, 10), (4 * size, 10), (4 * rank, 0))}


if point == "while it reads for others":
    from paddle_flexckpt.native.reader import FileReader

    def stop(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

    fc.save_state_dict(state(1), directory, unique_id=0)
    if rank == victim:
        FileReader.read = stop
    try:
        fc.load_state_dict({"w": paddle.zeros([4 * size, 10])}, directory, comm_method="cooperative")
    except fc.CheckpointError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        os._exit(3)
    print("loaded", flush=True)
    os._exit(0)
if point == "after install()":
    fc.install()
if point not in ("before the first call", "after install()"):
    fc.save_state_dict(state(1), directory, unique_id=0)
elif rank == victim:
    communicator.default_store().get("all are connected")  # waits
    os.kill(os.getpid(), signal.SIGKILL)
else:
    communicator.default_store().set("all are connected", "")
if rank == victim and point == "in the middle of a collective":
    # The others but rank 0 get its part of the collective after it has written, and go on to the next one.
    from paddle_flexckpt.testing.cpu_world import Mesh

    send, fsync = Mesh.send, os.fsync
    has_written = []

    def send_to_some(self, peer, *args):
        if not has_written or peer != 0:
            send(self, peer, *args)
        if has_written and peer == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Mesh.send = send_to_some
    os.fsync = lambda descriptor: (fsync(descriptor), has_written.append(descriptor))[0]
elif rank == victim:
    real = getattr(os, point)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, point, die)
try:
    fc.save_state_dict(state(2), directory, unique_id=0)
except fc.CheckpointError as error:
    print(f"{type(error).__name__} {error}", flush=True)
    os._exit(3)  # an ordinary end would wait for the lost rank
print("saved", flush=True)
