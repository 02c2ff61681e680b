"""Parallel strategies of PaddleFormers' trainer, as its flags. Every one sees the same 4 samples in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer import launching
from tests.trainer.strategies import Strategy

_TWO, _FOUR = "--per_device_train_batch_size 2", "--per_device_train_batch_size 4"
_SHARDING = "--sharding stage1 --sharding_parallel_size 2"
_TENSOR = "--tensor_model_parallel_size 2"

STRATEGIES = {
    "single": Strategy(1, _FOUR),
    "dp2": Strategy(2, f"{_TWO} --sharding="),
    "tp2": Strategy(2, f"{_FOUR} {_TENSOR}"),
    "pp2": Strategy(2, f"{_TWO} --gradient_accumulation_steps 2 --pipeline_model_parallel_size 2"),
    "sharding2": Strategy(2, f"{_TWO} {_SHARDING}"),
    "sharding2_v2": Strategy(2, f"{_TWO} {_SHARDING}", split_param=True),
    **{f"stage{stage}": Strategy(2, f"{_TWO} --sharding stage{stage} --sharding_parallel_size 2") for stage in (2, 3)},
    "tp2_dp2": Strategy(4, f"{_TWO} {_TENSOR} --sharding="),
    "tp2_sharding2": Strategy(4, f"{_TWO} {_TENSOR} {_SHARDING}"),
}


def launch(strategy: str, jobs: Any, directory: Path) -> dict[str, Any]:
    """Runs jobs of train_script.py with ``python -m paddle_flexckpt.trainer.launch``, as a user starts a script."""
    return launching.launch(strategy, jobs, directory, _SCRIPT, STRATEGIES, "paddle_flexckpt.trainer.launch")


def launch_stock(strategy: str, jobs: Any, directory: Path) -> dict[str, Any]:
    """The same without paddle_flexckpt, but for its rehearsal world."""
    return launching.launch(strategy, jobs, directory, _SCRIPT, STRATEGIES)


_SCRIPT = Path(__file__).with_name("train_script.py")
