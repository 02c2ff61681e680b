"""Load the best model at the end of a training, from checkpoints of this library.

The trainer's own loop knows its own files alone, and warns where they are not there. So its flag is off between the
begin of the loop, where callbacks look at it, and its end, where the first callback loads the best model before the
others see the end of the training. Tested in tests/trainer/test_trainer.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paddle_flexckpt.trainer.checkpointer import TrainerCheckpointer


@contextlib.contextmanager
def keep_best_model(trainer: Any, flex: TrainerCheckpointer) -> Iterator[None]:
    """Load the best model at the end of the training in this context, if that is wanted."""
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


def _callback_class(trainer: Any) -> type:
    """Return the library's base class of callbacks, whose methods do nothing."""
    for callback in trainer.callback_handler.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ == "TrainerCallback":
                return cls
    raise TypeError(f"{type(trainer).__name__} has no callbacks derived from TrainerCallback")
