"""A pretraining script for PaddleFormers that knows nothing of paddle_flexckpt but its CPU rehearsal world.

Started by test_trainer.py, for some ranks. At its end every rank writes ``result.{rank}.json``: the losses, and the
digests of all tensors of model and optimizer after the resume and at the end.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_flexckpt.testing import cpu_world

cpu_world.install()

from paddleformers.trainer import PdArgumentParser, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe  # noqa: E402

VOCABULARY, LENGTH = 64, 16


@dataclass
class Arguments:
    """What is not the trainer's."""

    tied: bool = field(default=False)
    adapter: bool = field(default=False)
    fuse: bool = field(default=False)
    die_at: int = field(default=0)
    save_at_end: str = field(default="")


class Progressions(paddle.io.Dataset):  # type: ignore[misc]
    """Token sequences of constant difference."""

    def __init__(self, count: int = 64) -> None:
        """Args: count: of sequences."""
        starts = np.random.RandomState(0).randint(0, VOCABULARY, size=(count, 1))
        self._tokens = (starts + 3 * np.arange(LENGTH + 1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index].astype("int64")
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def make_model(args: Any, more: Arguments) -> Any:
    """A Llama of 23,000 parameters, as the arguments cut it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=more.tied,
    )  # fmt: skip
    config.fuse_rms_norm = config.apply_rope_fusion = False
    config.fuse_attention_qkv = config.fuse_attention_ffn = more.fuse
    config._attn_implementation = "eager"
    config.tensor_model_parallel_size = args.tensor_model_parallel_size
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config.sequence_parallel = args.sequence_parallel
    model_class = LlamaForCausalLMPipe if args.pipeline_model_parallel_size > 1 else LlamaForCausalLM
    model = model_class._from_config(config, dtype="float32")
    if not more.adapter:
        return model
    from paddleformers.peft import LoRAConfig, LoRAModel

    lora = LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=4, lora_alpha=8, dtype="float32",
                      tensor_model_parallel_size=args.tensor_model_parallel_size)  # fmt: skip
    model = LoRAModel(model, lora)
    model.mark_only_lora_as_trainable()
    return model


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Takes the state after the resume; may die in the middle of the training."""

    def __init__(self, die_at: int) -> None:
        """Args: die_at: the step after which the process ends."""
        self.trainer: Any = None
        self.begin: dict[str, Any] = {}
        self.losses: dict[int, float] = {}
        self._die_at = die_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin = describe(self.trainer) if state.global_step else {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._die_at:
            os._exit(17)


def describe(trainer: Any) -> dict[str, Any]:
    """All shards of model and optimizer on this rank: where they are cut, and their values."""
    from paddle_flexckpt.trainer.contents import collect_shards

    return {
        key: {
            "global_shape": list(weight.global_shape),
            "local_shape": list(weight.local_shape),
            "global_offset": list(weight.global_offset),
            "flattened": [weight.flattened_range.start, weight.flattened_range.stop] if weight.is_flattened else None,
            "values": weight.local_tensor.numpy().reshape(-1).tolist(),
        }
        for key, weight in collect_shards(trainer, True).items()
    }


def main() -> None:
    """Trains."""
    args, more = PdArgumentParser((TrainingArguments, Arguments)).parse_args_into_dataclasses()
    paddle.set_device(args.device)
    paddle.seed(args.seed)
    np.random.seed(args.seed)
    recorder = Recorder(more.die_at)
    trainer = Trainer(
        model=make_model(args, more),
        args=args,
        train_dataset=Progressions(),
        eval_dataset=Progressions(8) if args.do_eval else None,
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    written = {
        "step": trainer.state.global_step,
        "loss": result.training_loss,
        "losses": recorder.losses,
        "begin": recorder.begin,
        "end": describe(trainer),
        "best": trainer.state.best_model_checkpoint,
    }
    if more.save_at_end:
        trainer.save_model(more.save_at_end)
    rank = paddle.distributed.get_rank()
    Path(args.output_dir, f"result.{rank}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
