"""Hybrid-parallel Paddle on a CPU: real processes, real collectives, no GPU.

::

    import paddle
    from paddle_flexckpt.testing import cpu_world

    cpu_world.install()                          # on every rank, before fleet.init; nothing happens without this call
    hcg = cpu_world.init_fleet(mp=2, pp=2)       # fleet.init; may be called again with other degrees

Start it with ``python -m paddle.distributed.launch --nproc_per_node 4 script.py``, or let
:class:`paddle_flexckpt.testing.World` keep the processes for you.

What works: tensor and sequence parallelism, sharding V1 and V2, group-sharded stages 1-3, pipelines (interleaved too),
data parallelism, mixture of experts, and their products, in float32; half precision for parameters and optimizer
states, but not for the computation (the CPU build has no half-precision matmul: cast to float32 in forward). What this
is for is state, not speed. Semi-automatic parallelism works too (``shard_optimizer`` of every stage, tensor fusion,
``fsdp.fully_shard``), over C++ communication of its own, which no abort of a job can reach; and so do its static graphs
(``dist.to_static``) on a mesh of one axis. On a mesh of two they run too, but where one axis cuts parameters their
gradients are not summed over the other.

The comments in this package name the upstream defects that they work around:

- U1: gloo groups of three and more ranks read another group's addresses and fail to connect.
- U2: gloo's float16 reductions are inf.
- U3: gloo's send and recv advance the tag of its collectives on two peers only; the next collective hangs.
- U4: the backward of ``c_split_eager`` gathers on axis 0, its forward split the last axis.
- U5: sharding V2's ``clear_grad`` detaches gradients from the fused buffer; from step 2 on they are zero.
- U6: ``load_state_dict`` calls ``Tensor.cuda()`` on any build.
- U17: a second ``fleet.init`` with other degrees is ignored.
- U18: where a peer hangs up while the rank that holds the store exits, Paddle 3.3 aborts that rank (exit code -6).
- S9: ``ProcessMesh.get_rank_by_dim_and_process_id`` raises with NumPy 2.4.
- S11: semi-automatic parallelism leaves globals and environment variables behind that change what comes after.
- S12: nothing cuts a float16 or bfloat16 tensor into shards.
- S13: no kernel of reduce_scatter and all_to_all, on which reshards to another sharding stand.
- S14: shares are rounded up, and those of 6 rows over 4 ranks (2, 2, 2, 0) or 5 (2, 2, 1, -1) end in SIGSEGV, errors on
  one rank alone or a hang.
- S15: groups of static graphs want a GPU to connect.
"""

from paddle_flexckpt.testing.cpu_world.auto_parallel import reset_semi_auto
from paddle_flexckpt.testing.cpu_world.lifecycle import (
    init_fleet,
    install,
    mesh,
    reset_fleet,
    tensor_cuda_stays,
    uninstall,
)
from paddle_flexckpt.testing.cpu_world.mesh import Mesh, MeshError
from paddle_flexckpt.testing.cpu_world.process_group import MeshProcessGroup

__all__ = [
    "Mesh",
    "MeshError",
    "MeshProcessGroup",
    "init_fleet",
    "install",
    "mesh",
    "reset_fleet",
    "reset_semi_auto",
    "tensor_cuda_stays",
    "uninstall",
]
