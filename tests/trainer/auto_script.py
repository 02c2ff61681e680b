"""Trainings of PaddleNLP's semi-automatic trainer (``--enable_auto_parallel``), one after the other in one launch.

    python -m paddle.distributed.launch --nproc_per_node 2 auto_script.py STRATEGY JOBS.json RESULTS.json

A job is as for train_script.py, without ``lora`` and ``kill_at``; ``strategy`` is one of the same number of ranks in
place of the launch's, ``samples`` the size of the data, and ``unruled`` marks a parameter as cut without a rule.
"""

from __future__ import annotations

import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import paddle

from paddle_flexckpt.testing import cpu_world

cpu_world.install()

import paddle_flexckpt as fc
from paddle_flexckpt.trainer import install
from paddle_flexckpt.trainer.contents import collect_shards
from tests.trainer.job_list import run_jobs
from tests.trainer.models import Sequences, build_auto
from tests.trainer.strategies import AUTO

install()  # the one line that a script needs

COMMON = (
    "--device cpu --enable_auto_parallel 1 --max_steps 6 --save_steps 3 --logging_steps 1 --learning_rate 1e-3 "
    "--report_to none --disable_tqdm 1 --max_grad_norm 0 "
    "--save_checkpoint_format flex_checkpoint --load_checkpoint_format flex_checkpoint"
).split()


def run(job: dict[str, Any], strategy: str) -> dict[str, Any]:
    from paddlenlp.trainer import AutoTrainingArguments, PdArgumentParser, TrainerCallback
    from paddlenlp.trainer.auto_trainer import AutoTrainer
    from paddlenlp.trainer.trainer_utils import _exec_mode_guard

    cpu_world.reset_fleet()
    losses: dict[int, float] = {}

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job.get("loaded") and not losses:
                with _exec_mode_guard("dynamic"):
                    fc.save_state_dict(collect_shards(trainer, True), job["loaded"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

    flags = [*COMMON, *AUTO[strategy].flags.split(), "--output_dir", job["output_dir"], *job.get("flags", [])]
    (args,) = PdArgumentParser((AutoTrainingArguments,)).parse_args_into_dataclasses(flags)
    paddle.set_device(args.device)
    model, criterion = build_auto(job["model"], args)
    if job.get("unruled"):
        next(iter(model.parameters())).is_distributed = True
    data = Sequences(job.get("samples", 64))
    trainer = AutoTrainer(model=model, criterion=criterion, args=args, train_dataset=data, callbacks=[Note()])
    try:
        result = trainer.train(resume_from_checkpoint=job.get("resume"))
    except fc.CheckpointError as error:
        if not job.get("unruled"):
            raise
        return {"refused": str(error), "step": trainer.state.global_step}
    return {"losses": losses, "step": trainer.state.global_step, "training_loss": float(result.training_loss)}


def main() -> None:
    name, jobs_file, results_file = sys.argv[1:]
    run_jobs(jobs_file, results_file, lambda job: run(job, job.get("strategy", name)))


if __name__ == "__main__":
    main()
