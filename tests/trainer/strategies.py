"""Parallel strategies of the trainer, as its flags. Every one sees the same 4 samples in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PIPELINE = (
    "--gradient_accumulation_steps 2 --pipeline_parallel_degree 2 --pipeline_parallel_config disable_partial_send_recv"
)


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    Attributes:
        ranks: Number of processes.
        flags: Command line of the trainer.
        split_param: Whether sharding is V2. The trainer asks for half precision with it, which no CPU can compute: the
            test sets it behind the trainer's back.
        overlap: Whether V2 gathers its buffers, which are small, while the next forward runs; likewise.
    """

    ranks: int
    flags: str
    split_param: bool = False
    overlap: bool = False


STRATEGIES = {
    "single": Strategy(1, "--per_device_train_batch_size 4"),
    "dp2": Strategy(2, "--per_device_train_batch_size 2"),
    "tp2": Strategy(2, "--per_device_train_batch_size 4 --tensor_parallel_degree 2"),
    "pp2": Strategy(2, f"--per_device_train_batch_size 2 {_PIPELINE}"),
    "sharding2": Strategy(2, "--per_device_train_batch_size 2 --sharding stage1 --sharding_parallel_degree 2"),
    "sharding2_v2": Strategy(
        2, "--per_device_train_batch_size 2 --sharding stage1 --sharding_parallel_degree 2", split_param=True
    ),
    "sharding2_v2_overlap": Strategy(
        2, "--per_device_train_batch_size 2 --sharding stage1 --sharding_parallel_degree 2", True, overlap=True
    ),
    **{
        f"stage{stage}": Strategy(
            2, f"--per_device_train_batch_size 2 --sharding stage{stage} --sharding_parallel_degree 2"
        )
        for stage in (2, 3)
    },
    "tp2_pp2": Strategy(4, f"--per_device_train_batch_size 2 --tensor_parallel_degree 2 {_PIPELINE}"),
    "tp2_dp2": Strategy(4, "--per_device_train_batch_size 2 --tensor_parallel_degree 2"),
    "tp2_sharding2": Strategy(
        4,
        "--per_device_train_batch_size 2 --tensor_parallel_degree 2 --sharding stage1 --sharding_parallel_degree 2",
    ),
}

_SHARDED = "--per_device_train_batch_size 2 --sharding_parallel_degree 2 --sharding"
# Of the semi-automatic trainer, which takes batches from one sampler, in one process too.
AUTO = {
    "single": Strategy(1, "--per_device_train_batch_size 4"),
    "dp2": Strategy(2, "--per_device_train_batch_size 2"),
    "mp2": Strategy(2, "--per_device_train_batch_size 4 --tensor_parallel_degree 2"),
    **{f"stage{stage}": Strategy(2, f"{_SHARDED} stage{stage}") for stage in (1, 2, 3)},
    "static_mp2": Strategy(2, "--per_device_train_batch_size 4 --tensor_parallel_degree 2 --to_static 1"),
    "static_stage1": Strategy(2, f"{_SHARDED} stage1 --to_static 1"),
    "dp2_mp2": Strategy(4, "--per_device_train_batch_size 2 --tensor_parallel_degree 2"),
}
_HALF = "--bf16 1 --fp16_opt_level O2 --max_grad_norm 0 --per_device_train_batch_size 2"
# In half precision, for which a CPU has no kernels.
ON_DEVICE = {
    "half dp2": Strategy(2, _HALF),
    **{
        f"half stage{stage}": Strategy(2, f"{_HALF} --sharding stage{stage} --sharding_parallel_degree 2")
        for stage in (1, 2, 3)
    },
    "half v2": Strategy(
        2,
        f"{_HALF} --amp_master_grad 1 --sharding stage1 --sharding_parallel_degree 2 "
        "--sharding_parallel_config split_param",
    ),
}


def split_parameters() -> None:
    """Sharding V2 for float32: the flag asks for half precision, which the CPU cannot compute."""
    from paddle.distributed import fleet

    original = fleet.init

    def init(*args: Any, **kwargs: Any) -> Any:
        strategy = kwargs.get("strategy")
        if strategy is not None:
            strategy.hybrid_configs["sharding_configs"].split_param = True
        return original(*args, **kwargs)

    fleet.init = init


def overlap_gathering() -> None:
    """Switch the overlap of sharding V2 on, as the trainer does by its flag, with many buffers."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
        DygraphShardingOptimizerV2,
    )
    from paddlenlp.trainer import Trainer

    build, wrap = DygraphShardingOptimizerV2._build_comm_buffers, Trainer._wrap_model

    def build_small(self: Any, acc_steps: int, group_size: int = 0, free_grads_in_comm: bool = False) -> None:
        build(self, acc_steps, 1 << 12, free_grads_in_comm)

    def wrap_model(self: Any, model: Any, training: bool = True) -> Any:
        wrapped = wrap(self, model, training)
        if training:
            assert len(self.optimizer._inner_opt._comm_buffer_list) > 2
            self.optimizer._set_all_gather_overlap_forward(True, wrapped)
        return wrapped

    DygraphShardingOptimizerV2._build_comm_buffers, Trainer._wrap_model = build_small, wrap_model
