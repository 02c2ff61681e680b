"""Trainings under one strategy, one after the other in the processes of one launch; what they did goes to a JSON file.

    python -m paddle.distributed.launch --nproc_per_node 2 train_script.py STRATEGY JOBS.json RESULTS.json

A job is a dict: ``name``, ``model`` (of models.MODELS), ``output_dir``; and optionally ``flags`` (a list), ``resume``
(a directory or true), ``loaded`` (where to save what was resumed, before it is trained), ``lora``, ``kill_at`` (the
step after which rank 1 is killed), and ``samples`` (the length of the data: then the result has the first tokens of all
ranks' samples, in the order of the ranks that divide a batch). On a simulated device it has a ``number``, and may have
a ``strategy`` of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import paddle

from paddle_flexckpt.testing import cpu_world
from tests.device import ranks

DEVICE = os.environ.get("REHEARSED_DEVICE", "cpu")
if DEVICE == "cpu":
    cpu_world.install()
else:
    ranks.prepare()

import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.trainer import install
from paddle_flexckpt.trainer.contents import collect_shards
from tests.trainer.job_list import run_jobs
from tests.trainer.models import Sequences, build
from tests.trainer.strategies import ON_DEVICE, STRATEGIES, Strategy, overlap_gathering, split_parameters

install()  # the one line that a script needs

COMMON = (
    f"--device {DEVICE} --max_steps 6 --save_steps 3 --logging_steps 1 --learning_rate 1e-3 --report_to none "
    "--disable_tqdm 1 --save_checkpoint_format flex_checkpoint --load_checkpoint_format flex_checkpoint"
).split()


def prepare_device_job(number: int) -> None:
    """Lets a job on a simulated device have a strategy of its own, and a Llama whose kernels the device has."""
    from paddle.distributed import parallel_helper
    from paddlenlp.transformers.llama import modeling

    cpu_world.reset_fleet(number)
    parallel_helper.__parallel_ctx__clz__ = None  # on which the trainer looks before it initialises fleet
    modeling.swiglu = lambda x, y: x * paddle.nn.functional.sigmoid(x) * y


def run(job: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    if DEVICE != "cpu":
        prepare_device_job(job["number"])
    from paddlenlp.trainer import PdArgumentParser, Trainer, TrainerCallback, TrainingArguments

    losses: dict[int, float] = {}
    samples: list[list[int]] = []

    class Note(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job.get("loaded"):
                fc.save_state_dict(collect_shards(trainer, True), job["loaded"])

        def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
            if "samples" in job:
                samples.append(inputs["input_ids"][:, 0].tolist())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.get("kill_at") and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

    flags = [*COMMON, *strategy.flags.split(), "--output_dir", job["output_dir"], *job.get("flags", [])]
    (args,) = PdArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(flags)
    if DEVICE == "cpu":
        paddle.set_device(DEVICE)
    model = build(job["model"], args)
    if job.get("lora"):
        from paddlenlp.peft import LoRAConfig, LoRAModel

        config = LoRAConfig(target_modules=[".*q_proj.*", ".*o_proj.*"], r=4, lora_alpha=8, dtype="float32",
                            tensor_parallel_degree=args.tensor_parallel_degree)  # fmt: skip
        model = LoRAModel(model, config)
        model.mark_only_lora_as_trainable()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sequences(job.get("samples", 64)),
        eval_dataset=Sequences(8, 1),
        callbacks=[Note()],
    )
    result = trainer.train(resume_from_checkpoint=job.get("resume"))
    found = {"losses": losses, "step": trainer.state.global_step, "training_loss": float(result.training_loss)}
    return {**found, "samples": in_order(samples, args)} if "samples" in job else found


def in_order(own: list[list[int]], args: Any) -> list[int]:
    """The samples of each step, by the ranks that divide a batch."""
    gathered: list[Any] = [(args.dataset_rank, own)]
    if dist.is_initialized():
        gathered = []
        dist.all_gather_object(gathered, (args.dataset_rank, own))
    by_rank = dict(gathered)
    return [sample for batches in zip(*(by_rank[r] for r in sorted(by_rank))) for batch in batches for sample in batch]


def main() -> None:
    name, jobs_file, results_file = sys.argv[1:]
    strategies = {**STRATEGIES, **ON_DEVICE}
    if strategies[name].split_param:
        split_parameters()
    if strategies[name].overlap:
        overlap_gathering()
    run_jobs(jobs_file, results_file, lambda job: run(job, strategies[job.get("strategy", name)]))


if __name__ == "__main__":
    main()
