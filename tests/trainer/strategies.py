"""Parallel strategies of the trainer, as its flags. Every one sees the same 4 samples in a step."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    ranks: int
    flags: str
    split_param: bool = False


STRATEGIES = {
    "single": Strategy(1, "--per_device_train_batch_size 4"),
    "dp2": Strategy(2, "--per_device_train_batch_size 2"),
    "tp2": Strategy(2, "--per_device_train_batch_size 4 --tensor_parallel_degree 2"),
    "pp2": Strategy(2, f"--per_device_train_batch_size 2 {_PIPELINE}"),
    "sharding2": Strategy(2, "--per_device_train_batch_size 2 --sharding stage1 --sharding_parallel_degree 2"),
    "sharding2_v2": Strategy(
        2, "--per_device_train_batch_size 2 --sharding stage1 --sharding_parallel_degree 2", split_param=True
    ),
    "tp2_pp2": Strategy(4, f"--per_device_train_batch_size 2 --tensor_parallel_degree 2 {_PIPELINE}"),
    "tp2_dp2": Strategy(4, "--per_device_train_batch_size 2 --tensor_parallel_degree 2"),
    "tp2_sharding2": Strategy(
        4,
        "--per_device_train_batch_size 2 --tensor_parallel_degree 2 --sharding stage1 --sharding_parallel_degree 2",
    ),
}
