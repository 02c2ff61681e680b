"""The saves and restores of one trainer.

A save, on all ranks:

1. The ranks collect background saves that have ended; the coordinator marks the directory.
2. The trainer's own ``_save_checkpoint`` writes its small files (configuration, tokenizer, state), and no tensors.
3. The coordinator makes these durable.
4. Model, optimizer and extra state are saved as one checkpoint; its manifest is the commit.
   In slices it is copied later: by callbacks of the trainer, between micro-steps and before its optimizer's step.
5. After the commit come the export, the signal for the job's scheduler, and rotation. For a save in the background they
   come when it is collected: at the next save, or at the end of the training.
Tested in tests/trainer/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.manager.pending_steps import PendingSteps
from paddle_flexckpt.memory.sources import check_state
from paddle_flexckpt.parallel.state_creation import no_new_states
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.run_state.extra_state import collect_extra_state
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.trainer.contents import (
    EMA_PREFIX,
    EMA_PREFIX_IN_DIRECTORY,
    AverageState,
    collect_shards,
    export_weights,
    has_averages,
    is_peft,
    is_semi_automatic,
    model_shards,
    write_small_files,
)
from paddle_flexckpt.trainer.directories import (
    SUBDIRECTORY,
    UNIQUE_ID,
    TrainerDirectories,
    choose_checkpoint,
    mark_directory,
    step_of,
)
from paddle_flexckpt.trainer.flags import TrainerOptions, library_of, options_of
from paddle_flexckpt.trainer.model_rules import aoa_config_of, export_config_of, install_model_rules
from paddle_flexckpt.trainer.restoring import Restored, dequant_transform, restore_from
from paddle_flexckpt.trainer.train_sampler import TrainSampler, sampler_of
from paddle_flexckpt.transfer.agreement import check_same
from paddle_flexckpt.transfer.transfer import quiet_loads

logger = logging.getLogger("paddle_flexckpt")

# If this variable is set, the trainer writes a file for the job's scheduler beside each checkpoint.
_SIGNAL = "FLAG_LLM_PDC"
_DONE = ".checkpoint_done"


class TrainerCheckpointer:
    """The saves and restores of one trainer. All methods communicate, except where their docstring says otherwise."""

    def __init__(self, trainer: Any) -> None:
        """Take the trainer; it is not changed as long as its flags are not set."""
        self._trainer = trainer
        self._restored: Restored | None = None
        self._saving = False
        # Moving averages of the weights, if the trainer has them.
        self.average: AverageState | None = None
        # The loader of the training, if the position in the data is saved.
        self._loader: Any = None

    @functools.cached_property
    def _comm(self) -> Communicator:
        """Return all ranks, after installing the methods and rules that describe the model."""
        install_model_rules(library_of(self._trainer))
        return communicator_for(None)

    @functools.cached_property
    def _pending(self) -> PendingSteps:
        return PendingSteps(self._comm)

    @property
    def options(self) -> TrainerOptions:
        """Return the options in the trainer's arguments."""
        return options_of(self._trainer.args)

    @property
    def saving(self) -> bool:
        """Return whether the trainer's own ``_save_checkpoint`` runs for this library; communicates nothing."""
        return self._saving

    def resolve(self, wanted: Any) -> str | None:
        """Return the directory to resume from.

        Args:
            wanted: A directory; True for the latest that can be resumed from; None or False for none. If only some
                ranks have a directory, all take it: the storage is shared.

        Raises:
            ValidationError: There is no such checkpoint, it is not complete, or ranks name different ones.
        """
        context = "cannot resume"
        text = "" if wanted is None or wanted is False else "true" if wanted is True else os.fspath(wanted)
        given = {each.decode() for each in self._comm.together(lambda: (None, text.encode()), context)[1]} - {""}
        if not given:
            return None
        check_same([each.encode() for each in sorted(given)], context)
        (asked,) = given
        return self._text_of_coordinator(context, choose_checkpoint, asked, self._directories(), self.options.fallback)

    def follow(self, loader: Any) -> None:
        """Take the loader of the training, if the position in the data is saved; communicate nothing.

        Raises:
            ValidationError: It has no sampler with a position.
        """
        if self.options.data_position:
            sampler_of(loader)
            self._loader = loader

    @property
    def sampler(self) -> TrainSampler:
        """Return the sampler whose position is saved; communicate nothing.

        Raises:
            ValidationError: The trainer has another one.
        """
        return sampler_of(self._loader)

    def check_export(self) -> None:
        """Raise ValidationError if weights are to be exported and there are no rules for the model."""
        if self.options.export_hf:
            _ = self._export_config  # asks the model on all ranks now; the result is cached

    @functools.cached_property
    def _export_config(self) -> dict[str, Any] | None:
        """Return the AOA statements of the export, which the model gives on all ranks; None for an adapter.

        An adapter is exported under its own names.
        """
        model = self._trainer.model
        return None if is_peft(model) else export_config_of(model, process_group=self._comm)

    def check(self) -> None:
        """Raise the error that the first save would raise; call it once model and optimizer are wrapped."""
        trainer = self._trainer
        everything = not trainer.args.ignore_save_lr_and_optim

        def describe() -> dict[str, Any]:
            with no_new_states():
                return self._contents(everything)

        check_state(describe, self._comm, "cannot save")

    def check_options(self) -> None:
        """Raise ValidationError if the flags of this library differ between ranks."""

        def encode() -> tuple[None, bytes]:
            return None, json.dumps(dataclasses.asdict(self.options), default=repr).encode()

        context = "training arguments"
        check_same(self._comm.together(encode, context)[1], context, self._comm.ranks)

    def _contents(self, everything: bool) -> dict[str, Any]:
        """Return the shards and extra state of a save; without ``everything``, those of the model alone."""
        trainer = self._trainer
        shards = collect_shards(trainer, everything)
        if self.average is not None and everything:
            shards.update(self.average.shards(shards))
        scheduler = trainer.lr_scheduler if everything else None
        scaler = trainer.scaler if everything and trainer.do_grad_scaling else None
        data = self.sampler if self.options.data_position else None
        return {**shards, **collect_extra_state(scheduler, scaler, int(trainer.state.global_step), data=data)}

    def save(self, upstream: Callable[..., Any], model: Any, metrics: Any) -> Any:
        """Save the trainer's step, around its own ``_save_checkpoint``, whose result this returns.

        Raises:
            ValidationError: Something cannot be saved; earlier checkpoints are unchanged.
            CheckpointError: A rank could not write (likewise), or an earlier save in the background has failed.
        """
        trainer, options = self._trainer, self.options
        step = int(trainer.state.global_step)
        directories = self._directories()
        path = directories.directory(step)
        context = f"cannot save {path}"
        self._collect(context, wait_for=step)
        everything = not trainer.args.ignore_save_lr_and_optim
        self._on_coordinator(context, directories.begin, step)
        with self._upstream_saving():
            result, _ = self._comm.together(lambda: (upstream(model, metrics), b""), context)

        def contents() -> tuple[dict[str, Any], bytes]:
            if self._comm.position == 0:
                if is_semi_automatic(trainer):  # its own save has no small files
                    write_small_files(trainer, path)
                directories.make_durable(step)
            return self._contents(everything), b""

        shards, _ = self._comm.together(contents, context)
        report = self._write(shards, path, **options.staging())
        if isinstance(report, SaveHandle):
            self._pending.add(step, report)
        else:
            self._committed([step])
        return result

    def _write(self, shards: dict[str, Any], path: Path, **staging: Any) -> SaveReport | SaveHandle:
        """Save shards as the checkpoint in a directory of the trainer's."""
        return save_state_dict(
            shards,
            path / SUBDIRECTORY,
            self._comm,
            unique_id=UNIQUE_ID,
            step=int(self._trainer.state.global_step),
            save_replicas=self.options.save_replicas,
            check_replicas=self.options.check_replicas,
            **staging,
        )

    def stage_next(self) -> None:
        """Copy a slice of a save that is staged in slices; without one, do nothing. Communicates nothing."""
        self._pending.stage_next()

    def finish_staging(self) -> None:
        """Copy the rest of a save that is staged in slices, before the state changes.

        Raises:
            CheckpointError: It could not be copied, or has changed already; nothing is saved.
        """
        self._pending.finish_staging()

    def _collect(self, context: str, wait_for: Any = None) -> None:
        """Finish the background saves that have ended, after waiting for some (``wait_for``)."""
        before = self._pending.steps
        if before:
            self._pending.collect(context, wait_for)
            self._committed(sorted(before - self._pending.steps))

    def _committed(self, steps: list[int]) -> None:
        """Export, signal and rotate, after commits."""
        directories, args = self._directories(), self._trainer.args
        for step in steps:
            path = directories.directory(step)
            if self.options.export_hf:
                what = f"{path} is complete, but its weights could not be exported"
                self._on_coordinator(what, export_weights, path, self._export_config)
            if _is_set(os.environ.get(_SIGNAL)):
                what = f"{path} is complete, but its signal could not be left"
                self._on_coordinator(what, (path / _DONE).write_text, f"{step}\n")
        if steps and args.save_total_limit:
            what = f"step {steps[-1]} is saved, but what need not be kept in {directories.root} could not be removed"
            self._on_coordinator(what, self._rotate, directories)

    def _rotate(self, directories: TrainerDirectories) -> None:
        best = getattr(self._trainer.state, "best_model_checkpoint", None)
        directories.rotate(self._trainer.args.save_total_limit, best, self._pending.steps)

    def _on_coordinator(self, context: str, work: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the coordinator; its error is raised on every rank."""
        self._comm.lead(0, lambda: work(*arguments), context)

    def _text_of_coordinator(self, context: str, look: Callable[..., str], *arguments: Any) -> str:
        """Return the coordinator's result of ``look`` on every rank; its error is raised on every rank."""

        def alone() -> tuple[None, bytes]:
            return None, look(*arguments).encode() if self._comm.position == 0 else b""

        return self._comm.together(alone, context)[1][0].decode()

    def write_small_files(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the small files of the trainer's ``save_model`` during a save of this library; communicate nothing."""
        if self._comm.position == 0:
            write_small_files(self._trainer, Path(output_dir))

    @contextlib.contextmanager
    def _upstream_saving(self) -> Iterator[None]:
        """Keep the trainer's own ``_save_checkpoint`` from writing the optimizer, removing and signalling.

        The semi-automatic trainer ignores the flag, and writes from all ranks. So its arguments get another class in
        this context, by which only the coordinator saves, and no state of the model.
        """
        args = self._trainer.args
        ignored, signal, own = args.ignore_save_lr_and_optim, os.environ.pop(_SIGNAL, None), type(args)
        args.ignore_save_lr_and_optim, self._saving = True, True
        if is_semi_automatic(self._trainer):
            alone = {"should_save": self._comm.position == 0, "should_save_model_state": False}
            args.__class__ = type(own.__name__, (own,), alone)
        try:
            yield
        finally:
            args.__class__ = own
            args.ignore_save_lr_and_optim, self._saving = ignored, False
            if signal is not None:
                os.environ[_SIGNAL] = signal

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Fill model, optimizer, scheduler and scaler from a directory of :meth:`resolve`; they are wrapped by then.

        Raises:
            ValidationError: It does not fit; nothing was changed.
            CorruptCheckpointError: It is damaged; tensors may be partly overwritten.
        """
        args, options = self._trainer.args, self.options
        everything = not args.ignore_load_lr_and_optim
        candidate, data = os.fspath(path), self.sampler if options.data_position else None
        while True:
            try:
                with quiet_loads():  # _log() logs the report
                    self._restored = restore_from(self._trainer, candidate, everything, options, self._comm, data)
                break
            except CorruptCheckpointError as error:
                # All ranks have the same error, and so go the same way.
                earlier = self._earlier(candidate) if options.fallback else None
                if earlier is None:
                    raise
                logger.warning(f"{candidate} is damaged, and {earlier} is tried instead: {error}")
                candidate = earlier
        self._log(self._restored)

    def _earlier(self, path: str) -> str | None:
        """Return the complete checkpoint before one; None if there is none."""
        step = step_of(path)
        if step is None:
            return None
        look = TrainerDirectories(Path(path).parent).last
        return self._text_of_coordinator("cannot look for an earlier checkpoint", lambda: look(step) or "") or None

    @property
    def restored_averages(self) -> bool:
        """Return whether the restored checkpoint has moving averages that are read here; communicates nothing."""
        restored = self._restored
        return restored is not None and (restored.native or has_averages(restored.path))

    @property
    def restored_from(self) -> str | None:
        """Return the directory that was restored, perhaps by a fallback; communicates nothing."""
        return None if self._restored is None else self._restored.path

    def restore_random_state(self) -> bool:
        """Restore the random number generators if this has not been done; return whether the checkpoint has them.

        It communicates nothing.
        """
        restored = self._restored
        if restored is None or not restored.native:
            return False
        missing = restored.restore_random_state()
        if missing and self._comm.position == 0:
            for name, why in sorted(missing.items()):
                logger.warning(f"not restored: {name}: {why}")
        return True

    def load_model(self, path: str | os.PathLike[str]) -> None:
        """Fill the model alone, for the best checkpoint at the end and for evaluation; errors of :meth:`restore`."""
        restore_from(self._trainer, os.fspath(path), False, self.options, self._comm)

    def load_hugging_face(self, path: str | os.PathLike[str]) -> None:
        """Fill the model alone from Hugging Face weights, by the live model's statements; errors of :meth:`restore`."""
        model, library = self._trainer.model, library_of(self._trainer)
        given = self.options.aoa_config
        config = aoa_config_of(model, process_group=self._comm) if given is None else given
        transform, _ = self._comm.together(
            lambda: (dequant_transform(model, path, library), b""), f"cannot load {os.fspath(path)}"
        )
        options = dataclasses.replace(self.options, aoa_config=config, load_transform=transform)
        restore_from(self._trainer, os.fspath(path), False, options, self._comm)

    def save_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save the model alone, as a checkpoint in a directory of its own, for evaluation.

        Raises:
            ValidationError: It cannot be saved; an earlier checkpoint is unchanged.
            CheckpointError: A rank could not write; likewise.
        """
        path = Path(output_dir)
        context = f"cannot save the model to {path}"
        self._on_coordinator(context, mark_directory, path, int(self._trainer.state.global_step))
        shards, _ = self._comm.together(lambda: (dict(model_shards(self._trainer)), b""), context)
        self._write(shards, path)
        self._on_coordinator(context, write_small_files, self._trainer, path)

    def restore_average(self) -> None:
        """Fill the moving averages from the restored checkpoint, if trainer and checkpoint have them.

        Raises:
            ValidationError: They do not fit.
            CorruptCheckpointError: They are damaged.
        """
        restored, average = self._restored, self.average
        if restored is None or average is None or not self.restored_averages:
            return
        inside = os.path.join(restored.path, SUBDIRECTORY) if restored.native else restored.path
        prefix = EMA_PREFIX if restored.native else EMA_PREFIX_IN_DIRECTORY
        if average.restore(inside, prefix, lambda: collect_shards(self._trainer, True), self._comm, self.options):
            return
        if self._comm.position == 0:
            logger.warning("not restored: moving averages: the checkpoint has none; they start anew")

    def finish(self) -> None:
        """Wait for the saves in the background, and export, signal and rotate after them.

        Raises:
            CheckpointError: One of them has failed.
        """
        self._collect("cannot finish the saves of this training", wait_for="all")

    def _directories(self) -> TrainerDirectories:
        return TrainerDirectories(self._trainer.args.output_dir)

    def _log(self, restored: Restored) -> None:
        if self._comm.position != 0:
            return
        logger.info(f"resumed from {restored.path}: {restored.load.summary()}")
        for name, why in sorted(restored.not_restored.items()):
            logger.warning(f"not restored: {name}: {why}")


def _is_set(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "t", "yes", "y", "on")
