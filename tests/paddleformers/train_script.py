"""Trainings under one strategy with PaddleFormers; a script that knows nothing of paddle_flexckpt's trainer package.

    python -m paddle_flexckpt.trainer.launch --nproc_per_node 2 train_script.py STRATEGY JOBS.json RESULTS.json

What a job is, see tests/trainer/train_script.py. In addition, ``save_model`` is a directory for the model alone, and
``cuda_stays`` makes Paddle's own communication of tensors possible on a CPU. With
REPLACE_IN_TREE in the environment Paddle's functions are replaced, and the trainer is not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import paddle

from paddle_flexckpt.testing import cpu_world

cpu_world.install()

from paddleformers.trainer import PdArgumentParser, Trainer, TrainerCallback, TrainingArguments

import paddle_flexckpt as fc
from paddle_flexckpt.trainer.contents import collect_shards
from tests.paddleformers.models import Sequences, build
from tests.paddleformers.strategies import STRATEGIES
from tests.trainer.job_list import run_jobs
from tests.trainer.strategies import split_parameters

# The flags for checkpoints are the defaults of PaddleFormers; the rest is what a CPU cannot do.
COMMON = (
    "--device cpu --max_steps 6 --save_steps 3 --logging_steps 1 --learning_rate 1e-3 --report_to none "
    "--disable_tqdm 1 --amp_master_grad false --split_param false --max_grad_norm 0 --load_via_cpu false"
).split()


def run(job: dict[str, Any], flags: str) -> dict[str, Any]:
    losses: dict[int, float] = {}

    class Note(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job.get("loaded"):
                fc.save_state_dict(collect_shards(trainer, True), job["loaded"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

    line = [*COMMON, *flags.split(), "--output_dir", job["output_dir"], *job.get("flags", [])]
    (args,) = PdArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(line)
    paddle.set_device(args.device)
    model = build(job["model"], args)
    if job.get("lora"):
        from paddleformers.peft import LoRAConfig, LoRAModel

        config = LoRAConfig(target_modules=[".*q_proj.*", ".*o_proj.*"], r=4, lora_alpha=8, dtype="float32",
                            tensor_model_parallel_size=args.tensor_model_parallel_size)  # fmt: skip
        model = LoRAModel(model, config)
        model.mark_only_lora_as_trainable()
    trainer = Trainer(
        model=model, args=args, train_dataset=Sequences(), eval_dataset=Sequences(8, 1), callbacks=[Note()]
    )
    with cpu_world.tensor_cuda_stays() if job.get("cuda_stays") else contextlib.nullcontext():
        result = trainer.train(resume_from_checkpoint=job.get("resume"))
    if job.get("save_model"):
        trainer.save_model(job["save_model"])
    return {"losses": losses, "step": trainer.state.global_step, "training_loss": float(result.training_loss)}


def main() -> None:
    name, jobs_file, results_file = sys.argv[1:]
    if "REPLACE_IN_TREE" in os.environ:
        from paddle_flexckpt.trainer import replace_in_tree

        replace_in_tree()
    if STRATEGIES[name].split_param:
        split_parameters()
    run_jobs(jobs_file, results_file, lambda job: run(job, STRATEGIES[name].flags))


if __name__ == "__main__":
    main()
