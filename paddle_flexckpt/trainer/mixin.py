"""The methods of a trainer that save and resume: mixins for the trainers of each library.

Tested in tests/trainer/test_installation.py and tests/paddlefleet/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.trainer.checkpointer import TrainerCheckpointer
from paddle_flexckpt.trainer.contents import average_state, is_semi_automatic
from paddle_flexckpt.trainer.directories import is_flex
from paddle_flexckpt.trainer.flags import FLEX
from paddle_flexckpt.trainer.train_sampler import TrainSampler

# The prefix under which install() keeps the trainer's own methods.
UPSTREAM = "_flexckpt_upstream_"


class FlexTrainerMixin:
    """A mixin by which a trainer saves and resumes through FlexCheckpoint if the flags are set, else as without it.

    ``class MyTrainer(FlexTrainerMixin, Trainer)``, or ``install()``, which gives the same methods to Trainer itself.
    """

    # Made when it is first needed: there is no distributed environment before.
    _flex_instance: TrainerCheckpointer | None = None
    # The directory that train() resumes from, between its begin and its end.
    _flex_resuming: str | None = None
    _flex_steps_per_epoch: int = 1

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, after choosing the checkpoint to resume from, and finish saves in the background.

        Args:
            resume_from_checkpoint: A directory; True for the latest that is complete; None or False.
            *args: Of the trainer's own.
            **kwargs: Likewise.

        Raises:
            ValidationError: There is no such checkpoint, or it does not fit.
            CorruptCheckpointError: It is damaged or not complete.
            CheckpointError: A save failed.
        """
        flex = checkpointer_of(self)
        upstream = upstream_of(self, "train")
        if not (flex.options.save or flex.options.load):
            return upstream(resume_from_checkpoint, *args, **kwargs)
        flex.check_options()
        if flex.options.save:
            flex.check_export()
        if flex.options.load:
            resume_from_checkpoint = flex.resolve(resume_from_checkpoint)
        self._flex_resuming = resume_from_checkpoint if flex.options.load else None
        try:
            with keep_best_model(self, flex), stage_between_steps(self, flex), count_samples(self, flex):
                result = upstream(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._flex_resuming = None
        flex.finish()
        return result

    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        upstream, flex = upstream_of(self, "_inner_training_loop"), checkpointer_of(self)
        bound = inspect.signature(upstream).bind(*args, **kwargs)
        flex.follow(bound.arguments.get("train_dataloader"))
        if flex.options.save and not is_semi_automatic(self):
            flex.check()  # model and optimizer are wrapped by now
        if self._flex_resuming is None:
            return upstream(*args, **kwargs)
        if is_semi_automatic(self):
            self._flex_steps_per_epoch = bound.arguments["num_update_steps_per_epoch"]
        else:
            # A fallback may have restored another checkpoint, whose trainer state is needed.
            bound.arguments["resume_from_checkpoint"] = flex.restored_from
        return upstream(*bound.args, **bound.kwargs)

    def _get_train_sampler(self: Any) -> Any:
        if not (checkpointer_of(self).options.data_position and hasattr(self.train_dataset, "__len__")):
            return upstream_of(self, "_get_train_sampler")()
        return TrainSampler(self, getattr(self.args, "dataloader_shuffle", True))

    def get_train_dataloader(self: Any) -> Any:
        """Return the trainer's loader; with ``--flex_data_position`` its sampler has a position."""
        loader = upstream_of(self, "get_train_dataloader")()
        checkpointer_of(self).follow(loader)
        return loader

    def save_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model as the trainer does; within a save of this library, the small files alone."""
        flex = checkpointer_of(self)
        if not flex.saving:
            return upstream_of(self, "save_model")(*args, **kwargs)
        output_dir = args[0] if args else kwargs["output_dir"]
        return flex.write_small_files(output_dir)

    def _save_checkpoint(self: Any, model: Any, metrics: Any = None, **kwargs: Any) -> Any:
        flex = checkpointer_of(self)
        upstream = upstream_of(self, "_save_checkpoint")
        if not flex.options.save:
            return upstream(model, metrics, **kwargs)
        return flex.save(lambda *arguments: upstream(*arguments, **kwargs), model, metrics)

    def _rotate_checkpoints(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Within a save of this library it is too early: nothing is removed before the new checkpoint exists.
        if not checkpointer_of(self).saving:
            return upstream_of(self, "_rotate_checkpoints")(*args, **kwargs)
        return None

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: Any = None) -> Any:
        flex = checkpointer_of(self)
        if not flex.options.load or not resume_from_checkpoint:
            return upstream_of(self, "_load_from_checkpoint")(resume_from_checkpoint)
        if self._flex_resuming is None:  # not within train(): for evaluation
            path = flex.resolve(resume_from_checkpoint)
            if path is not None:
                flex.load_model(path)
        elif is_semi_automatic(self):  # its loop calls this when it has wrapped model and optimizer
            flex.restore(resume_from_checkpoint)
            # The loop restores the generators after it has skipped samples; if it skips none, it never does.
            if self.state.global_step % self._flex_steps_per_epoch == 0:
                flex.restore_random_state()
        return None  # _load_optimizer_and_scheduler() restores both, once model and optimizer are wrapped

    def _wrap_for_auto(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the state when the semi-automatic trainer has wrapped model and optimizer, within its loop."""
        wrapped = upstream_of(self, "_wrap_for_auto")(*args, **kwargs)
        flex = checkpointer_of(self)
        if flex.options.save:
            flex.check()
        return wrapped

    def _wrap_for_dist_loader(self: Any, train_dataloader: Any) -> Any:
        """Resume with the shuffle of the right epoch: the semi-automatic trainer uses that of the first."""
        import paddle

        loader = upstream_of(self, "_wrap_for_dist_loader")(train_dataloader)
        sampler = loader.batch_sampler
        # A sampler of a script's own class has its own position.
        if self._flex_resuming is not None and type(sampler) is paddle.io.DistributedBatchSampler:
            sampler.set_epoch(self.state.global_step // self._flex_steps_per_epoch)
        return loader

    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> Any:
        flex = checkpointer_of(self)
        if not flex.options.load or not checkpoint:
            return upstream_of(self, "_load_optimizer_and_scheduler")(checkpoint)
        flex.restore(checkpoint)
        return None

    def _load_rng_state(self: Any, checkpoint: Any) -> Any:
        flex = checkpointer_of(self)
        if flex.options.load and checkpoint and (flex.restore_random_state() or is_flex(checkpoint)):
            return None
        return upstream_of(self, "_load_rng_state")(checkpoint)

    def _load_best_model_from_peft_checkpoint(self: Any) -> Any:
        best = self.state.best_model_checkpoint
        if checkpointer_of(self).options.save and best is not None and is_flex(best):
            return None  # keep_best_model() does
        return upstream_of(self, "_load_best_model_from_peft_checkpoint")()


class PaddleFormersMixin(FlexTrainerMixin):
    """The same mixin for PaddleFormers: ``class MyTrainer(PaddleFormersMixin, Trainer)`` with its Trainer.

    Its ``train()`` does not call ``_load_from_checkpoint`` under its own flag of the same name, but
    ``_load_flex_checkpoint``, once model and optimizer are wrapped; and its ``save_model()`` ends in
    ``_save_flex_model_state``. Its ``_save_flex_optimizer_state`` is not reached: only the ranks that it chooses would
    come there, and a save needs all of them.
    """

    def _load_flex_checkpoint(self: Any, resume_from_checkpoint: Any) -> None:
        flex = checkpointer_of(self)
        if getattr(self.args, "load_from_hf", False):
            flex.load_hugging_face(resume_from_checkpoint)
            if hasattr(self.model, "_synchronize_shared_weights"):
                self.model._synchronize_shared_weights()
            return
        flex.restore(resume_from_checkpoint)

    def _save_flex_model_state(self: Any, output_dir: str | os.PathLike[str]) -> None:
        checkpointer_of(self).save_model(output_dir)

    def _save_flex_optimizer_state(self: Any, output_dir: str | os.PathLike[str]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} saves its optimizer on its own, for {os.fspath(output_dir)}: with paddle_flexckpt "
            "it is saved with the model, by all ranks. Remedy (FC905): call _save_checkpoint()"
        )

    def add_non_zcc_ema_callback(self: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """Add the trainer's callback; the averages become a part of the checkpoint, not files beside it."""
        flex = checkpointer_of(self)
        upstream = upstream_of(self, "add_non_zcc_ema_callback")
        if self.args.save_checkpoint_format != FLEX:
            upstream(resume_from_checkpoint, *args, **kwargs)
            return
        # Averages without metadata are left to the library: only it knows which rank has which part.
        upstream(None if flex.restored_averages else resume_from_checkpoint, *args, **kwargs)
        flex.average = average_state(self)
        flex.restore_average()


class PaddleFleetMixin(PaddleFormersMixin):
    """The same mixin for PaddleFleet: ``class MyTrainer(PaddleFleetMixin, Trainer)`` with its Trainer.

    Its flag of a save in the background is this library's; its own writer, which ``save_model()`` outside of a save
    would start, stays idle.
    """

    def save_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model as the trainer does, by all ranks and not in the background; errors of the trainer's own."""
        arguments = self.args
        asked = getattr(arguments, "use_flex_async_save", False)
        if not (asked and checkpointer_of(self).options.save):
            return FlexTrainerMixin.save_model(self, *args, **kwargs)
        arguments.use_flex_async_save = False
        try:
            return FlexTrainerMixin.save_model(self, *args, **kwargs)
        finally:
            arguments.use_flex_async_save = asked


def checkpointer_of(trainer: Any) -> TrainerCheckpointer:
    """Return the checkpointer of a trainer; the first call makes it."""
    if trainer._flex_instance is None:
        trainer._flex_instance = TrainerCheckpointer(trainer)
    found: TrainerCheckpointer = trainer._flex_instance
    return found


def upstream_of(trainer: Any, name: str) -> Callable[..., Any]:
    """Return the trainer's own method.

    ``install()`` copies the methods of the mixin to the trainer's class, and keeps the class's own under a prefix. In a
    class of a user's own, derived from the mixin, it is the method of the class behind the mixin.
    """
    own = getattr(trainer, UPSTREAM + name, None)
    found: Callable[..., Any] = own if own is not None else getattr(super(FlexTrainerMixin, trainer), name)
    return found


@contextlib.contextmanager
def keep_best_model(trainer: Any, flex: TrainerCheckpointer) -> Iterator[None]:
    """Load the best model at the end of the training in this context, if the flag is set.

    The trainer's own loop knows only its own files, and warns if they are missing. So its flag is off between the begin
    of the loop, where callbacks read it, and its end, where the first callback loads the best model before the other
    callbacks are called.
    """
    args, callbacks = trainer.args, trainer.callback_handler.callbacks
    if not (flex.options.save and args.load_best_model_at_end):
        yield
        return
    first, last = _callbacks(trainer, flex)
    callbacks.insert(0, first)
    callbacks.append(last)
    try:
        yield
    finally:
        callbacks.remove(first)
        callbacks.remove(last)
        args.load_best_model_at_end = True


def _callbacks(trainer: Any, flex: TrainerCheckpointer) -> tuple[Any, Any]:
    """Return the first and the last of the trainer's callbacks."""
    base = _callback_class(trainer)

    class First(base):  # type: ignore[misc, valid-type]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.load_best_model_at_end = True
            best = state.best_model_checkpoint
            if best is not None:
                flex.finish()  # it may be the one that is being written
                flex.load_model(best)

    class Last(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.load_best_model_at_end = False

    return First(), Last()


@contextlib.contextmanager
def stage_between_steps(trainer: Any, flex: TrainerCheckpointer) -> Iterator[None]:
    """Copy saves with ``slice_bytes`` between micro-steps, and the rest before the optimizer's step, in this context.

    The trainer may call ``_step()`` of a hybrid optimizer and move offloaded states before, so its callbacks are used,
    not the optimizer.
    """
    if not flex.options.save or flex.options.slice_bytes is None:
        yield
        return

    class Slices(_callback_class(trainer)):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            flex.stage_next()

        def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            flex.finish_staging()

    slices, callbacks = Slices(), trainer.callback_handler.callbacks
    callbacks.insert(0, slices)
    try:
        yield
    finally:
        callbacks.remove(slices)


@contextlib.contextmanager
def count_samples(trainer: Any, flex: TrainerCheckpointer) -> Iterator[None]:
    """Count the batches that the trainer's loop takes, in this context, if the position in the data is saved.

    The loop skips nothing when it resumes, and so does not restore the generators, which is done with the first batch.
    """
    args = trainer.args
    if not flex.options.data_position:
        yield
        return
    if getattr(args, "ignore_data_skip", False):
        raise ValidationError(
            "--ignore_data_skip begins the data anew, and --flex_data_position continues it. Remedy (FC905): leave "
            "--ignore_data_skip out"
        )

    class Count(_callback_class(trainer)):  # type: ignore[misc]
        def on_load_data_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            flex.restore_random_state()
            flex.sampler.advance()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.epoch = flex.sampler.position / len(trainer.train_dataset)

    count, callbacks = Count(), trainer.callback_handler.callbacks
    callbacks.insert(0, count)
    args.ignore_data_skip = True
    try:
        yield
    finally:
        callbacks.remove(count)
        args.ignore_data_skip = False


def _callback_class(trainer: Any) -> Any:
    """Return the class that the trainer's callbacks are derived from."""
    kinds = [cls for callback in trainer.callback_handler.callbacks for cls in type(callback).__mro__]
    base = next((cls for cls in kinds if cls.__name__ == "TrainerCallback"), None)
    if base is None:
        raise TypeError(f"{type(trainer).__name__} has no callbacks derived from TrainerCallback")
    return base
