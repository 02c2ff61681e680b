"""Imitations of Muon and of the optimizer that shards it, which came after the newest Paddle of these tests.

They have the attributes of Paddle's own that the library looks at, and its rules of who owns what. What is in buffers
is in FusedCommBuffers of the installed Paddle. Numerics are imitated: a step on a matrix needs all of it, and no more.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from collections import defaultdict

import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.install import is_installed

MUON = "paddle.optimizer.muon"
SHARDING = "paddle.distributed.fleet.meta_optimizers.muon_sharding_optimizer"


@contextlib.contextmanager
def paddle_with_muon():
    """Have ``install()`` find both classes, and be in effect; afterwards all is as before."""
    was_installed = is_installed()
    fc.uninstall()
    for path, owner in ((MUON, Muon), (SHARDING, MuonShardingOptimizer)):
        module = types.ModuleType(path)
        setattr(module, owner.__name__, owner)
        sys.modules[path] = module
    importlib.invalidate_caches()
    try:
        fc.install()
        yield
    finally:
        fc.uninstall()
        for path in (MUON, SHARDING):
            del sys.modules[path]
        if was_installed:
            fc.install()


def put(target, value):
    """Write a tensor in place: into the buffer that it is a part of, too."""
    (target if target.stop_gradient else target.detach()).copy_(value.astype(target.dtype), True)


class Muon(paddle.optimizer.Optimizer):
    """Momentum alone for matrices, the states of AdamW for all others."""

    def __init__(self, learning_rate, parameters, matrices, multi_precision=False):
        super().__init__(learning_rate=learning_rate, parameters=parameters)
        self._multi_precision, self._master_weights, self._matrices = multi_precision, {}, matrices

    def _create_accumulators(self, block, parameters):
        for p in parameters:
            if p.name in self._accumulators.get("moment1", ()):
                continue
            if self._multi_precision and self._is_dtype_fp16_or_bf16(p.dtype):
                self._create_master_weight(p)
            kind = paddle.base.core.VarDesc.VarType.DENSE_TENSOR
            self._add_accumulator("moment1", p, "float32", 0.0, p.shape, kind)
            if p.name not in self._matrices:
                self._add_accumulator("moment2", p, "float32", 0.0, p.shape, kind)
                self._add_accumulator("beta1_pow_acc", p, "float32", 0.9, [1], kind)
                self._add_accumulator("beta2_pow_acc", p, "float32", 0.95, [1], kind)

    def _apply_optimize(self, loss, startup_program, params_grads, **_):
        with paddle.no_grad():
            for p, gradient in params_grads:
                self._create_accumulators(None, [p])
                state = {name: table.get(p.name) for name, table in self._accumulators.items()}
                value = self._master_weights.get(p.name, p)
                gradient = gradient.astype("float32").reshape(value.shape)
                put(state["moment1"], 0.9 * state["moment1"] + 0.1 * gradient)
                if p.name in self._matrices:
                    update = state["moment1"] / (state["moment1"].square().sum().sqrt() + 1e-3)
                else:
                    put(state["moment2"], 0.95 * state["moment2"] + 0.05 * gradient.square())
                    first = state["moment1"] / (1 - state["beta1_pow_acc"])
                    update = first / ((state["moment2"] / (1 - state["beta2_pow_acc"])).sqrt() + 1e-3)
                    put(state["beta1_pow_acc"], state["beta1_pow_acc"] * 0.9)
                    put(state["beta2_pow_acc"], state["beta2_pow_acc"] * 0.95)
                put(value, value.astype("float32") - self.get_lr() * update)
                if value is not p:
                    put(p, value)

    def sharded_state_dict(self, model_sharded_state_dict):
        """As Paddle's own of a fresh optimizer: what does not exist is not described."""
        return {}


class MuonShardingOptimizer:
    """Each matrix is one rank's of its color's group, the largest first; all others are slices of buffers."""

    def __init__(self, optimizer, hcg):
        self._inner_opt, self._hcg = optimizer, hcg
        self._parameter_list = list(optimizer._parameter_list)
        default = hcg.get_sharding_parallel_group()
        self._color_to_group_info = {None: _info(default)}
        matrices, rest = defaultdict(list), defaultdict(list)
        for p in self._parameter_list:
            color = getattr(p, "color", None) or {"color": None, "group": default}
            self._color_to_group_info.setdefault(color["color"], _info(color["group"]))
            if p.name in optimizer._matrices:
                matrices[color["color"]].append(p)
            else:
                rest[color["color"], str(p.dtype)].append(p)
        self._rank2params_2d_by_color = {
            color: _dealt(members, self._color_to_group_info[color]["world_size"])
            for color, members in matrices.items()
        }
        self._slice_params = {p.name: _slice_of(p) for members in rest.values() for p in members}
        self._comm_buffer_list = [
            FusedCommBuffer(
                number,
                members,
                self._color_to_group_info[color]["group"],
                act=HOOK_ACTION.REDUCE_SCATTER,
                slice_params=self._slice_params,
            )
            for number, ((color, _), members) in enumerate(rest.items())
        ]
        local = [p for owned in self._owned().values() for p in owned] + list(self._slice_params.values())
        optimizer._parameter_list = optimizer._param_groups = local

    def _owned(self):
        return {
            color: owners.get(max(self._color_to_group_info[color]["rank"], 0), [])
            for color, owners in self._rank2params_2d_by_color.items()
        }

    def step(self):
        with paddle.no_grad():
            for color, owners in self._rank2params_2d_by_color.items():
                info = self._color_to_group_info[color]
                for p in (p for owned in owners.values() for p in owned):
                    if info["world_size"] > 1:
                        dist.all_reduce(p.grad, group=info["group"])
                        put(p.grad, p.grad / info["world_size"])
            for buffer in self._comm_buffer_list:
                buffer._comm_grads()
                buffer.scale_grads()
                for p in buffer.params:
                    buffer.assign_slice_grad(p, self._slice_params[p.name])
            whole = [(p, p.grad) for owned in self._owned().values() for p in owned]
            slices = [(p, p.grad) for p in self._slice_params.values() if p.grad is not None]
            self._inner_opt._apply_optimize(None, None, whole + slices)
            for color, owners in self._rank2params_2d_by_color.items():
                info = self._color_to_group_info[color]
                for rank, owned in owners.items():
                    for p in owned if info["world_size"] > 1 else ():
                        dist.broadcast(p, src=info["group"].ranks[rank], group=info["group"])
            for buffer in self._comm_buffer_list:
                buffer.sync_params()

    def clear_grad(self):
        for owners in self._rank2params_2d_by_color.values():
            for p in (p for owned in owners.values() for p in owned):
                p.clear_gradient(False)
        for buffer in self._comm_buffer_list:
            buffer.grad_storage.zero_()

    def sharded_state_dict(self, model_sharded_state_dict):
        """As Paddle's own of a fresh optimizer."""
        return self._inner_opt.sharded_state_dict(model_sharded_state_dict)

    def __getattr__(self, name):
        return getattr(self._inner_opt, name)


def _info(group):
    return {"group": group, "world_size": len(group.ranks), "rank": group.rank}


def _dealt(parameters, ranks):
    owners, sizes = {rank: [] for rank in range(ranks)}, [0] * ranks
    for p in sorted(parameters, key=lambda p: -math.prod(p.shape)):
        rank = sizes.index(min(sizes))
        owners[rank].append(p)
        sizes[rank] += math.prod(p.shape)
    return owners


def _slice_of(parameter):
    made = EagerParamBase(shape=[1], dtype=parameter.dtype)
    made.name = parameter.name
    return made


for _owner, _path in ((Muon, MUON), (MuonShardingOptimizer, SHARDING)):
    _owner.__module__ = _owner.sharded_state_dict.__module__ = _path
