"""Turning the CPU world on and off, and giving fleet fresh degrees. Tested in tests/distributed/test_cpu_world.py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective, fleet, parallel

from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.overlaps import forget_overlaps
from paddle_flexckpt.testing.cpu_world.auto_parallel import patch_semi_auto, patch_static_graphs, reset_semi_auto
from paddle_flexckpt.testing.cpu_world.kernels import patch_kernels, patch_moe
from paddle_flexckpt.testing.cpu_world.mesh import Mesh
from paddle_flexckpt.testing.cpu_world.process_group import MeshChannel, MeshProcessGroup
from paddle_flexckpt.testing.cpu_world.training import (
    patch_adamw,
    patch_data_parallel,
    patch_devices,
    patch_group_sharded,
    patch_sharding_v2,
)
from paddle_flexckpt.undo import Undo

# More than a job makes on a device; group ids are C integers.
_GROUPS_OF_A_JOB = 4096
# The rank that holds Paddle's store aborts where a peer hangs up while that rank's statics are destroyed: the store on
# libuv, new in 3.3, then writes its first log line under glog's destroyed mutex (U18).
_STORE_ON_LIBUV = "FLAGS_tcp_store_using_libuv"

_patches: Undo | None = None
_mesh: Mesh | None = None


def install(
    *, timeout: float | None = 120.0, mend_split: bool = True, mend_sharding_v2: bool = True, close_at_exit: bool = True
) -> None:
    """Give this process the parts of hybrid-parallel training that Paddle's CPU build lacks.

    Call it on every rank after ``import paddle`` and before ``fleet.init`` or ``init_parallel_env``. A second call does
    nothing. It must not be used together with a GPU.

    Args:
        timeout: seconds a rank waits for a message before it raises :class:`~.mesh.MeshError`; None waits for ever.
        mend_split: replace upstream's ``c_split_eager``, whose backward is wrong (U4).
        mend_sharding_v2: replace upstream's ``clear_grad`` of sharding V2, which loses gradients on a CPU (U5).
        close_at_exit: close the connections to the peers and end the mesh's threads when the interpreter exits.

    Raises:
        RuntimeError: Paddle was initialised before, so the world group is not ours.
    """
    global _patches, _mesh
    if _patches is not None:
        return
    world = collective._get_group_map_by_name().get(collective._default_group_name)
    if world is not None and not isinstance(world.process_group, MeshProcessGroup):
        raise RuntimeError("cpu_world.install() must come before init_parallel_env() and fleet.init()")
    if _mesh is None:
        _mesh = Mesh(timeout)
        if close_at_exit:
            atexit.register(_close_at_exit)
    _mesh.timeout = timeout
    _patches = Undo()
    _patch_store(_patches)
    _patch_new_group(_patches, _mesh)
    patch_kernels(_patches, mend_split)
    patch_moe(_patches)
    patch_devices(_patches)
    patch_group_sharded(_patches)
    patch_data_parallel(_patches)
    patch_adamw(_patches)
    patch_semi_auto(_patches)
    patch_static_graphs(_patches)
    if mend_sharding_v2:
        patch_sharding_v2(_patches)


def _patch_store(patches: Undo) -> None:
    if core.globals().is_public(_STORE_ON_LIBUV):
        before = paddle.get_flags(_STORE_ON_LIBUV)
        paddle.set_flags({_STORE_ON_LIBUV: False})
        patches.call(functools.partial(paddle.set_flags, before))


def uninstall() -> None:
    """Revert every patch. Groups that were made meanwhile stay on the mesh, which lasts as long as the process."""
    global _patches
    if _patches is not None:
        _patches.put_back()
        _patches = None


def mesh() -> Mesh:
    """Return the mesh of this process.

    Raises:
        RuntimeError: ``install()`` was not called.
    """
    if _mesh is None:
        raise RuntimeError("cpu_world.install() was not called")
    return _mesh


def reset_fleet(job: int | None = None) -> None:
    """Let fleet be initialised again with other degrees in the same processes; upstream ignores a second init (U17).

    Forgets all groups but the world, fleet's topology and its random states, and drops unread messages. Every rank must
    call it equally often. Objects made for the old degrees must not be used any more. It also serves processes in which
    the CPU world is not installed, whose groups are the device backend's.

    Args:
        job: an absolute number that brings ranks together whose counts differ; see :meth:`.mesh.Mesh.next_epoch`.
    """
    from paddle.distributed.communication import group as group_manager
    from paddle.distributed.fleet.base import topology
    from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

    topology._HYBRID_PARALLEL_GROUP = None
    # A ProcessMesh takes its group from here, if there is one, for whatever mesh.
    vars(fleet.fleet).pop("_hcg", None)
    get_rng_state_tracker().reset()
    for gid in [gid for gid in collective._group_map if gid != 0]:
        group = collective._group_map.pop(gid)
        collective._group_map_by_name.pop(getattr(group, "_name", None), None)
        collective._group_map_backend.pop(group, None)
        group_manager._GroupManager.group_map_by_id.pop(gid, None)
    # Group ids are counted per process. A job that ended half way on one rank must not leave it with other numbers than
    # its peers. On the mesh a number can be used again, since the mesh's epoch is part of every address; a device
    # backend would find the old group under it in the store.
    if _mesh is not None:
        collective._start_ring_id = 0
    elif job is not None:
        collective._start_ring_id = job * _GROUPS_OF_A_JOB
    reset_semi_auto()
    forget_overlaps()
    gc.collect()
    if _mesh is not None:
        _mesh.next_epoch(job)


def init_fleet(
    dp: int = 1,
    mp: int = 1,
    pp: int = 1,
    sharding: int = 1,
    sep: int = 1,
    *,
    split_param: bool = False,
    accumulate_steps: int = 1,
    micro_batch_size: int = 1,
    strategy: Any = None,
    hybrid: Mapping[str, Any] | None = None,
) -> Any:
    """Initialise fleet with fresh degrees, whatever it was initialised with before. Collective.

    Args:
        dp: degree of data parallelism; ``mp``, ``pp``, ``sharding`` and ``sep`` are those of tensor, pipeline,
            optimizer and segment parallelism. Their product must be the size of the world.
        split_param: sharding V2, where a parameter may straddle ranks, instead of V1.
        accumulate_steps: micro batches of one ``train_batch`` of a pipeline, each of ``micro_batch_size`` samples.
        strategy: a ``DistributedStrategy`` to start from; a new one by default.
        hybrid: further entries of ``hybrid_configs``.

    Returns:
        The hybrid communicate group.

    Raises:
        ValueError: the degrees do not multiply to the size of the world.
    """
    size = paddle.distributed.ParallelEnv().world_size
    if dp * mp * pp * sharding * sep != size:
        raise ValueError(f"dp {dp} x mp {mp} x pp {pp} x sharding {sharding} x sep {sep} is not the world size {size}")
    reset_fleet()
    strategy = fleet.DistributedStrategy() if strategy is None else strategy
    degrees = {"dp_degree": dp, "mp_degree": mp, "pp_degree": pp, "sharding_degree": sharding, "sep_degree": sep}
    strategy.hybrid_configs = {**degrees, **(hybrid or {})}
    # Only after hybrid_configs has been set: inside the dictionary it raises "Assignment not allowed to message field".
    strategy.hybrid_configs["sharding_configs"].split_param = split_param
    strategy.pipeline_configs = {"accumulate_steps": accumulate_steps, "micro_batch_size": micro_batch_size}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


@contextlib.contextmanager
def tensor_cuda_stays() -> Iterator[None]:
    """Let ``Tensor.cuda()`` return the tensor itself while open.

    Paddle's own ``load_state_dict`` calls it without asking whenever a shard moves between ranks (U6); to compare with
    it on a CPU, its call has to be made harmless.
    """
    patches = Undo()
    patches.set(paddle.Tensor, "cuda", lambda self, *_, **__: self)
    try:
        yield
    finally:
        patches.put_back()


def _patch_new_group(patches: Undo, own: Mesh) -> None:
    """Make every gloo group a mesh group."""
    native = collective._new_process_group_impl

    def new_process_group(
        backend: str,
        store: Any,
        rank: int,
        world_size: int,
        group_name: str,
        pg_options: Any,
        group_id: int = 0,
        *args: Any,
        **named: Any,
    ) -> Any:
        if backend != "gloo":
            return native(backend, store, rank, world_size, group_name, pg_options, group_id, *args, **named)
        if not own.started:
            env = paddle.distributed.ParallelEnv()
            own.start(core.create_or_get_global_tcp_store(), env.rank, env.world_size)
        return MeshProcessGroup(own, rank, world_size, group_id)

    def open_channel(group: Any, ranks: tuple[int, ...], position: int) -> Any:
        if isinstance(group.process_group, MeshProcessGroup):
            return MeshChannel(group, ranks, position)
        return open_host_channel(group, ranks, position)

    open_host_channel = communicator.open_channel
    patches.set(communicator, "open_channel", open_channel)
    patches.set(collective, "_new_process_group_impl", new_process_group)
    patches.set(parallel, "_new_process_group_impl", new_process_group)


def _close_at_exit() -> None:
    # The interpreter keeps the exception that ended the main program in sys.last_type: peers may be stuck then, do not
    # wait.
    failed = getattr(sys, "last_type", None) is not None
    if _mesh is not None:
        _mesh.close(None if failed else 10.0)
