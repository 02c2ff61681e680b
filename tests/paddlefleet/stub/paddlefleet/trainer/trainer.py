"""The imitated trainer: its methods call each other in the order of PaddleFleet's, with the faults of that.

``calls`` has the methods that write, read or remove, as they were called.
"""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace
from typing import Any

import paddle
import paddle.distributed as dist

from paddlefleet.trainer.trainer_callback import Averages, CallbackHandler, NonZCCEMACallback, TrainerCallback
from paddlefleet.trainer.trainer_utils import get_last_checkpoint

PARTS = ("model_state", "optimizer_state", "master_weight")


class FlexAsyncSaver:
    """Would write in the background, in Paddle's own format."""

    is_saving = False

    def save_async(self, trainer: Any, output_dir: str) -> None:
        trainer.calls.append("FlexAsyncSaver.save_async")


class Trainer:
    hcg = None

    def __init__(self, model: Any, args: Any, optimizer: Any, step: Any = None, wrap: Any = None) -> None:
        self.model = self.model_wrapped = model
        self.args, self._made_optimizer, self._step, self._wrap = args, optimizer, step, wrap
        self.optimizer: Any = None
        self.lr_scheduler = self.scaler = self.sharding_io = self.tokenizer = self.processing_class = None
        self.do_grad_scaling = False
        self.calls: list[str] = []
        self.callback_handler = CallbackHandler([TrainerCallback()])
        self.state = SimpleNamespace(global_step=0, best_model_checkpoint=None)
        self._flex_async_saver = FlexAsyncSaver()

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def _event(self, name: str) -> None:
        self.callback_handler.call(name, self.args, self.state, None)

    def prepare_resume_from_checkpoint(self, args: Any, resume_from_checkpoint: Any) -> None:
        """Finds the last checkpoint, and keeps that to itself."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(args.output_dir)

    def train(self, resume_from_checkpoint: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        args = self.args
        self.prepare_resume_from_checkpoint(args, resume_from_checkpoint)
        self.optimizer = self._made_optimizer
        if args.load_checkpoint_format != "flex_checkpoint":
            self._load_from_checkpoint(resume_from_checkpoint)
        if self._wrap is not None:
            self.model_wrapped, self.optimizer = self._wrap(self.model, self.optimizer)
        if args.load_checkpoint_format == "flex_checkpoint" and resume_from_checkpoint is not None:
            self._load_flex_checkpoint(resume_from_checkpoint)
        else:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        if args.zcc_save_ema_coef is not None:
            assembler = object() if args.save_hf_steps > 0 else None
            self.add_non_zcc_ema_callback(resume_from_checkpoint, assembler)
        return self._inner_training_loop(
            args, self.model_wrapped, None, None, args.max_steps, 1, 1, 1, resume_from_checkpoint, ignore_keys_for_eval
        )

    def _inner_training_loop(
        self,
        args: Any,
        model: Any,
        train_dataloader: Any,
        len_dataloader: Any,
        max_steps: int,
        num_train_epochs: int,
        num_update_steps_per_epoch: int,
        num_train_samples: int,
        resume_from_checkpoint: Any,
        ignore_keys_for_eval: Any,
    ) -> Any:
        if resume_from_checkpoint is not None:
            self.calls.append("trainer_state")
            with open(os.path.join(resume_from_checkpoint, "trainer_state.bin"), encoding="utf-8") as file:
                self.state = SimpleNamespace(**json.load(file))
        self._load_rng_state(resume_from_checkpoint)
        self._event("on_train_begin")
        while self.state.global_step < max_steps:
            self._event("on_step_begin")
            self._wait_flex_async_save()
            self._event("on_optimizer_begin")
            if self._step is not None:
                self._step(model, self.optimizer, self.state.global_step)
            self.state.global_step += 1
            self._event("on_step_end")
            if self.state.global_step % args.save_steps == 0:
                self._save_checkpoint(model, None)
                self._event("on_save")
        if args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.calls.append("looks for model_state.pdparams of the best")
        self._event("on_train_end")
        return self.state.global_step

    def _wait_flex_async_save(self) -> None:
        """Nothing is written in the background."""

    def _save_checkpoint(self, model: Any, metrics: Any = None) -> None:
        args = self.args
        output_dir = os.path.join(args.output_dir, f"checkpoint-{self.state.global_step}")
        self.save_model(output_dir)
        if self.state.global_step == args.best_at:
            self.state.best_model_checkpoint = output_dir
        if args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            with open(os.path.join(output_dir, "trainer_state.bin"), "w", encoding="utf-8") as file:
                json.dump(vars(self.state), file)
            self.calls.append("state.save")
        if not args.ignore_save_lr_and_optim:
            # A step of all ranks, behind a gate: with two-fold data parallelism the others never come.
            if not args.hybrid or dist.get_rank() % args.data_parallel_size == 0:
                self._save_flex_optimizer_state(output_dir)
            if args.should_save and self.lr_scheduler is not None:
                paddle.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pdparams"))
        self._rotate_checkpoints(use_mtime=True, output_dir=args.output_dir)

    def save_model(
        self, output_dir: Any = None, merge_tensor_parallel: bool = False, last_fc_to_hf: bool = False
    ) -> None:
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save_model_state:
            self._save(output_dir=output_dir, last_fc_to_hf=last_fc_to_hf)

    def _save(self, output_dir: str, last_fc_to_hf: bool) -> None:
        if self.args.use_flex_async_save and not last_fc_to_hf:
            self._flex_async_saver.save_async(self, output_dir)
        elif last_fc_to_hf:
            self.calls.append("model.save_pretrained")
        else:
            self._save_flex_model_state(output_dir)

    def _save_flex_model_state(self, output_dir: str) -> None:
        self.calls.append("_save_flex_model_state")
        state = self.model.sharded_state_dict()
        dist.save_state_dict(state, os.path.join(output_dir, PARTS[0]), save_replicas=False)

    def _save_flex_optimizer_state(self, output_dir: str) -> None:
        self.calls.append("_save_flex_optimizer_state")
        states = self.optimizer.sharded_state_dict(self.model.sharded_state_dict())
        masters = {key: weight for key, weight in states.items() if key.endswith(".w_0")}
        others = {key: weight for key, weight in states.items() if key not in masters}
        for name, part in zip(PARTS[1:], (others, masters)):
            dist.save_state_dict(part, os.path.join(output_dir, name), save_replicas=False)
        with open(os.path.join(output_dir, f"saved_signal_{dist.get_rank()}"), "w", encoding="utf-8") as file:
            file.write("1")

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: Any = None) -> None:
        """Removes by age; whether the new one is complete nobody asks."""
        self.calls.append("_rotate_checkpoints")
        limit = self.args.save_total_limit
        if limit and self.args.should_save:
            names = [name for name in os.listdir(output_dir) if name.startswith("checkpoint-")]
            paths = sorted((os.path.join(output_dir, name) for name in names), key=os.path.getmtime)
            for path in paths[: max(0, len(paths) - limit)]:
                shutil.rmtree(path)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any = None) -> None:
        self.calls.append("_load_from_checkpoint")

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self.calls.append("_load_optimizer_and_scheduler")

    def _load_flex_checkpoint(self, resume_from_checkpoint: str) -> None:
        self.calls.append("_load_flex_checkpoint")
        os.path.join(resume_from_checkpoint, PARTS[0])  # True is no path

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self.calls.append("_load_rng_state")

    def _load_best_model_from_peft_checkpoint(self) -> None:
        self.calls.append("_load_best_model_from_peft_checkpoint")

    def add_non_zcc_ema_callback(self, resume_from_checkpoint: Any, ema_state_assembler: Any = None) -> None:
        buffer = Averages(resume_from_checkpoint, self.args, self.model, self.optimizer)
        self.add_callback(NonZCCEMACallback(buffer, ema_state_assembler))
