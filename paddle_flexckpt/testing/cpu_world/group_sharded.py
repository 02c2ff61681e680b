"""Patches of other code that asks for a GPU: group-sharded stages 2 and 3, tensor fusion, pipelines, input broadcast.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import paddle
from paddle.base import core

from paddle_flexckpt.undo import Undo

# Bytes to which stage 2/3 align a parameter in their fused storage; the same as on a GPU, so that the layouts are the
# same.
_ALIGNMENT = 256


class ModuleView:
    """A view of a module with some names replaced.

    Some of Paddle's modules ask ``paddle.device`` or ``core`` whether there is a GPU and refuse to work without. Giving
    *that* module a view with other answers leaves the rest of Paddle with the true ones.
    """

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def patch_group_sharded(patches: Undo) -> None:
    """Make stages 1 (os), 2 (os_g) and 3 (p_g_os) of ``group_sharded_parallel``, and FullyShard, accept a CPU."""
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_optimizer_stage2,
        group_sharded_stage2,
        group_sharded_stage3,
        group_sharded_storage,
        group_sharded_utils,
    )
    from paddle.distributed.sharding import group_sharded

    fully_shard: tuple[ModuleType, ...] = ()
    with contextlib.suppress(ImportError):  # it came with Paddle 3.3
        from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_fully_shard

        fully_shard = (group_sharded_fully_shard,)

    # They assert a CUDA build or a custom device, and parse the device number after the colon of "gpu:0". As a custom
    # device the CPU has a place to copy to, which offload does.
    custom: dict[str, Any] = {"get_all_custom_device_type": lambda: ["cpu"]}
    numbered: dict[str, Any] = {"get_device": lambda: "cpu:0", "set_device": _set_device}
    view = ModuleView(paddle, device=ModuleView(paddle.device, **numbered), **numbered)
    patches.set(group_sharded, "paddle", ModuleView(paddle, device=ModuleView(paddle.device, **custom)))
    chunks = ModuleView(
        core.libpaddle,  # type: ignore[attr-defined]
        _get_device_min_chunk_size=lambda device: _ALIGNMENT,
    )
    custom_core = ModuleView(core, is_compiled_with_cuda=lambda: True, libpaddle=chunks, **custom)
    custom_device = ModuleView(paddle.device, **numbered, **custom)
    places: dict[str, Any] = {"CustomPlace": lambda device, number: paddle.CPUPlace()}
    for module in (group_sharded_optimizer_stage2, group_sharded_stage3, *fully_shard):
        patches.set(module, "core", custom_core)
        patches.set(module, "paddle", ModuleView(paddle, device=custom_device, **numbered, **places))
    patches.set(group_sharded_utils, "paddle", view)
    patches.set(group_sharded_stage3, "_device2cpu", _to_host)

    # On a CPU param.cpu() shares its storage with param, and the _clear_data() that follows would drop it: never
    # "convert".
    storage = group_sharded_storage.ParamStorage
    add_rank_params = storage.add_rank_params

    def add_without_convert(self: Any, params: Any, align: Any, convert_gpu: bool = True) -> Any:
        return add_rank_params(self, params, align, False)

    patches.set(storage, "add_rank_params", add_without_convert)
    for module in (
        group_sharded_optimizer_stage2,
        group_sharded_stage2,
        group_sharded_stage3,
        group_sharded_storage,
        group_sharded_utils,
        *fully_shard,
    ):
        # Which of them imports these two names differs between versions.
        if hasattr(module, "cvt_to_device"):
            patches.set(module, "cvt_to_device", lambda x, dev_id=0, blocking=True: x)
        if isinstance(getattr(module, "alignment", None), dict):
            patches.set(module, "alignment", {**module.alignment, "cpu": _ALIGNMENT})


def patch_devices(patches: Undo) -> None:
    """Answer the questions about the device that hybrid-parallel code asks outside group sharding."""
    from paddle.distributed import fleet  # noqa: F401  loads the modules that are searched below
    from paddle.distributed.fleet.utils import hybrid_parallel_util, tensor_fusion_helper

    # PipelineLayer reads ParallelEnv().device_id, and a CPU build never sets what it returns.
    if not hasattr(paddle.distributed.ParallelEnv, "_device_id"):
        patches.set(paddle.distributed.ParallelEnv, "_device_id", 0)

    # all_reduce with AVG asks whether NCCL is recent enough. The answer is the packed form of 2.18.0.
    if not hasattr(core, "nccl_version"):
        patches.set(core, "nccl_version", lambda: 21800)

    # Asserts that the inputs are on a GPU. Other modules have imported it by name.
    patches.replace_everywhere(
        "broadcast_input_data", hybrid_parallel_util.broadcast_input_data, broadcast_input_data, "paddle"
    )

    # Tensor fusion (sharding V2) looks up its alignment by device type and has none for "cpu"; take the GPU's.
    if hasattr(tensor_fusion_helper, "get_current_device_type"):
        patches.replace_everywhere(
            "get_current_device_type", tensor_fusion_helper.get_current_device_type, lambda: "gpu", "paddle"
        )
    with contextlib.suppress(ImportError):  # of fused states
        from paddle.optimizer import fusion_utils

        patches.set(fusion_utils, "get_current_device_type", lambda: "gpu")

    # DualPipeV waits for streams and for events of deep_ep.
    with contextlib.suppress(ImportError):  # it came with Paddle 3.1
        from paddle.distributed.fleet.meta_parallel.dualpipev import DualPipeVParallel

        patches.set(DualPipeVParallel, "_commit_and_wait_comm", _commit_and_wait)

    # Refuses the CPU, where there is nothing to wait for. A trainer calls it after every step of a pipeline.
    patches.set(paddle.device, "synchronize", lambda device=None: None)


def broadcast_input_data(hcg: Any, *inputs: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give model-parallel peers the inputs of the first of them: upstream's function without its device assert."""
    group, src = hcg.get_model_parallel_group(), hcg.get_model_parallel_group_src_rank()

    def copy(value: Any) -> Any:
        if isinstance(value, paddle.Tensor):
            with paddle.no_grad():
                out = paddle.assign(value.detach())
                paddle.distributed.broadcast(out, src=src, group=group, sync_op=True)
                out.stop_gradient = value.stop_gradient
            return out
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        return value

    return tuple(copy(value) for value in inputs), {key: copy(value) for key, value in named.items()}


def _to_host(tensor: Any, convert_dtype: bool = False) -> Any:
    """Copy to other memory; Paddle's shares the storage of a tensor on the CPU, and drops it."""
    return tensor.astype("float32").clone() if convert_dtype else tensor.clone()


def _commit_and_wait(self: Any, *_: Any, **__: Any) -> None:
    """Do as upstream's method of DualPipeV, without its streams."""
    for operations in (self.comm_forward_ops, self.comm_backward_ops):
        for task in paddle.distributed.batch_isend_irecv(operations) if operations else ():
            task.wait()
    self.comm_forward_ops, self.comm_backward_ops = [], []
    self._free_tensors()


def _set_device(device: str) -> Any:
    # Tensor fusion, which is told that there is a GPU, lets its storage be there.
    return paddle.set_device("cpu" if device.startswith(("cpu", "gpu")) else device)
