"""What ranks do with stock Paddle: its own ``save_state_dict`` and ``load_state_dict``, beside those of this library.

Every rank gives its state values that follow from names, so that nothing has to be trained.
"""

from __future__ import annotations

import importlib
import os
from unittest import mock

import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed.matrix import jobs
from tests.distributed.matrix.network import fill

LOADER = "paddle.distributed.flex_checkpoint.dcp.load_state_dict"


def save(strategy, model, folder):
    """Saves the same state with Paddle, each shard once and with replicas, and with this library."""
    trainer = jobs.begin(strategy, model, "begun")
    state = trainer.state()
    fill(trainer.shards(), "saved")
    for name, replicas in (("once", False), ("replicas", True)):
        dist.save_state_dict(state, os.path.join(folder, f"stock-{name}"), save_replicas=replicas)
    fc.save_state_dict(state, os.path.join(folder, "ours"))  # its collectives wait for all ranks' files
    jobs.leave(trainer.shards(), os.path.join(folder, "saved"))
    return sorted(state)


def load_with_us(strategy, model, folder, names):
    """Loads what Paddle has saved, each into other values."""
    trainer = jobs.begin(strategy, model, "other")
    state = trainer.state()
    for name in names:
        fill(trainer.shards(), "other")
        fc.load_state_dict(state, os.path.join(folder, name), strict=True)
        jobs.leave(trainer.shards(), os.path.join(folder, f"loaded-{name}"))


def load_with_stock(strategy, model, folder, names):
    """Loads checkpoints in Paddle's format with Paddle; returns for which of them it moved nothing between ranks.

    Where Paddle moves something, it copies to a GPU first. Without one, that copy is left out.
    """
    loader = importlib.import_module(LOADER)
    trainer = jobs.begin(strategy, model, "other")
    state, local = trainer.state(), []
    for name in names:
        fill(trainer.shards(), "other")
        loader._metadata_manager.clear()
        loader.PATH_TO_CHECKPOINT_FILES.clear()
        moving = mock.patch.object(loader, "load_state_dict_impl", wraps=loader.load_state_dict_impl)
        with cpu_world.tensor_cuda_stays(), moving as moved:
            loader.load_state_dict(state, os.path.join(folder, name))
        local += [] if moved.called else [name]
        # What was given to Paddle: a range that it has mangled cannot be described anew.
        jobs.leave(state if name.startswith("stock") else trainer.shards(), os.path.join(folder, f"loaded-{name}"))
    return local
