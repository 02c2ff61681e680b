"""Patches of optimizers, data parallelism, group-sharded stages 2 and 3, tensor fusion, pipelines and input broadcast.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops
from paddle.base import core
from paddle.distributed.auto_parallel import api
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

from paddle_flexckpt.testing.cpu_world.process_group import HALF, MeshProcessGroup, copy_into
from paddle_flexckpt.undo import Undo

# Place of `multi_precision` after `found_inf`: beta1, beta2, epsilon, lr_ratio, coeff, with_decay, lazy_mode,
# min_row_size, *it*.
_MULTI_PRECISION = 8
# Bytes to which stage 2/3 align a parameter in their fused storage; the same as on a GPU, so that the layouts are the
# same.
_ALIGNMENT = 256


def patch_adamw(patches: Undo) -> None:
    """Emulate AdamW of float16 and bfloat16 parameters: the CPU kernel knows float32 only.

    The float32 master weight is updated and rounded into the parameter, which is what the CUDA kernel does.
    """
    native: Any = _C_ops.adamw_

    def adamw_(param: Any, grad: Any, *args: Any) -> Any:
        if param.dtype not in HALF:
            return native(param, grad, *args)
        # (lr, moment1, moment2, moment2_max, beta1_pow, beta2_pow, master, found_inf, ...): 3.0 and later.
        master, rest = args[6], list(args[8:])
        if master is None:
            raise ValueError("AdamW on half-precision parameters needs multi_precision=True in the CPU world")
        rest[_MULTI_PRECISION] = False
        native(master, grad.astype("float32"), *args[:6], None, args[7], *rest)
        if param.is_dist():  # under stages 1 and 2 its master is cut where it is not
            with paddle.no_grad():
                master = api.reshard(master, param.process_mesh, param.placements)
            copy_into(param._local_value(), master._local_value().astype(param.dtype))
        else:
            copy_into(param, master.astype(param.dtype))
        return (None,) * 7

    patches.set(_C_ops, "adamw_", adamw_)


def _clear_grad(self: Any, set_to_zero: bool = True) -> None:
    for param in self._parameter_list:
        main_grad = getattr(param, "main_grad", None)
        grad = param.grad if main_grad is None else main_grad
        if grad is not None:
            with paddle.no_grad():
                grad.zero_()
    # Names of 3.1 and later; 3.0 never releases its gradient buffers.
    if getattr(self, "sd_release_grads", False) and not getattr(self, "pp_overlap", False):
        for buffer in self._comm_buffer_list:
            if buffer.need_reduce_scale_sync():
                buffer._clear_grad_storage()


def patch_sharding_v2(patches: Undo) -> None:
    """Clear V2's gradients in place.

    Upstream calls ``clear_gradient(True)``, which on the CPU marks the leaf "fake empty"; the next backward then
    *replaces* the gradient instead of adding into the fused buffer, and from step 2 on V2 reduces a buffer of zeros
    (U5).
    """
    # V2 came with 2.6 and is in every 3.x; a version without it has nothing to mend.
    v2 = getattr(dygraph_sharding_optimizer, "DygraphShardingOptimizerV2", None)
    if v2 is not None:
        patches.set(v2, "clear_grad", _clear_grad)


class Reducer:
    """A reducer that averages gradients of ``paddle.DataParallel`` after a backward pass, like ``core.EagerReducer``.

    The latter is C++ and takes only a native process group. That is a gloo group, with its defects (U1, U2) and
    fourteen file descriptors that are never closed.

    1. The forward pass of the wrapper calls :meth:`prepare_for_backward` (not under ``no_sync``).
    2. The first parameter whose gradient is ready asks to be called at the end of this backward pass.
    3. There, each gradient is averaged over the group, in the order of the parameters.

    A parameter that got no gradient on this rank counts as zero when another rank has one, and is left alone when none
    has.
    """

    def __init__(self, parameters: Sequence[Any], is_sparse: Sequence[bool], process_group: MeshProcessGroup) -> None:
        if any(is_sparse):
            raise NotImplementedError("the CPU world does not average sparse gradients; use Embedding(sparse=False)")
        self._parameters = list(parameters)
        self._group = process_group
        self._armed = False
        for parameter in self._parameters:
            parameter._register_backward_hook(self._on_gradient)

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Arm the reducer for the next backward pass."""
        self._armed = True

    def _on_gradient(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            core.eager._add_backward_final_hook(self._average)

    def _average(self) -> None:
        # One message says who has which gradient, so that all ranks agree on what follows.
        have = paddle.to_tensor(np.array([p.grad is not None for p in self._parameters], "int32"))
        self._group.all_reduce(have, core.ReduceOp.MAX)
        with paddle.no_grad():
            for parameter, anyone in zip(self._parameters, have.numpy()):
                if not anyone:
                    continue
                if parameter.grad is None:
                    parameter.grad = paddle.zeros_like(parameter)
                self._group.all_reduce(parameter.grad, core.ReduceOp.AVG)


def patch_data_parallel(patches: Undo) -> None:
    """Give ``DataParallel`` over a mesh group this reducer; other groups keep the native one."""
    native = core.EagerReducer

    def reducer(parameters: Any, indices: Any, is_sparse: Any, process_group: Any, *rest: Any) -> Any:
        if isinstance(process_group, MeshProcessGroup):
            return Reducer(parameters, is_sparse, process_group)
        return native(parameters, indices, is_sparse, process_group, *rest)

    patches.set(core, "EagerReducer", reducer)


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
