"""Two ranks, of which one alone saves, inside ``if rank == 0``, while the other is in a collective of the training.

Started by test_plain_gloo.
"""

import functools
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.ranks import host_channel

dist.init_parallel_env()
rank, directory = dist.get_rank(), sys.argv[1]
host_channel.HostChannel = functools.partial(host_channel.HostChannel, patience=0.5)
state = {"w": paddle.arange(6, dtype="float32")}
if rank == 0:
    try:
        fc.save_state_dict(state, directory)
        raise SystemExit("one rank alone has saved for two")
    except fc.CheckpointError as error:
        assert "rank 1 is missing" in str(error)
        assert "is it inside `if rank == 0`?); else look into its log" in str(error)
    # This rank has all of it.
    fc.save_state_dict(state, directory, process_group="self")
    loaded = {"w": np.zeros(6, np.float32)}
    fc.load_state_dict(loaded, directory, process_group="self")
    assert loaded["w"].tolist() == [0, 1, 2, 3, 4, 5]
gathered = []
dist.all_gather_object(gathered, f"of rank {rank}")
assert gathered == ["of rank 0", "of rank 1"], gathered
print(f"rank {rank} is done", flush=True)
