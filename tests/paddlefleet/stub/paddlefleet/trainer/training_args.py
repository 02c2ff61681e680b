"""The flags of the imitated trainer that concern checkpoints, with PaddleFleet's defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class TrainingArguments:
    output_dir: str = field(default="", metadata={"help": "Where checkpoints go."})
    max_steps: int = 4
    save_steps: int = 2
    save_total_limit: Optional[int] = None  # noqa: UP045
    save_checkpoint_format: Optional[str] = "flex_checkpoint"  # noqa: UP045
    load_checkpoint_format: Optional[str] = "flex_checkpoint"  # noqa: UP045
    aoa_config: Optional[dict] = field(default=None, metadata={"help": "AOA statements of the library."})  # noqa: UP045
    load_via_cpu: bool = True
    flex_ckpt_comm_method: Optional[str] = None  # noqa: UP045
    flex_ckpt_load_num_workers: int = 1
    replicate_saved_into_local: bool = False
    ignore_load_lr_and_optim: bool = False
    ignore_save_lr_and_optim: bool = False
    resume_from_checkpoint: Optional[str] = None  # noqa: UP045
    load_from_hf: bool = False
    convert_from_hf: bool = True
    save_safetensors: bool = True
    save_hf_steps: int = -1
    save_hf_output_dir: Optional[str] = None  # noqa: UP045
    save_tokenizer: bool = True
    save_rng_states: bool = True
    load_best_model_at_end: bool = False
    use_async_save: bool = False
    use_flex_async_save: bool = False
    tensorwise_offload_optimizer: bool = False
    unified_checkpoint: bool = False
    enable_zero_cost_checkpoint: bool = False
    zcc_save_ema_coef: Optional[float] = None  # noqa: UP045
    sharded_model_from_ema: bool = False
    pdc_download_ckpt: bool = False
    enable_auto_parallel: bool = False
    data_parallel_size: int = 1
    hybrid: bool = False
    best_at: Optional[int] = None  # noqa: UP045

    def __post_init__(self) -> None:
        self.made = True

    @property
    def should_save(self) -> bool:
        import paddle.distributed as dist

        return dist.get_rank() == 0

    @property
    def should_save_model_state(self) -> bool:
        return True
