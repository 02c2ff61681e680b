"""PaddleFormersMixin: what the trainer of PaddleFormers calls besides, for its own flex checkpoints."""

from __future__ import annotations

import os
from typing import Any

from paddle_flexckpt.trainer.arguments import FLEX
from paddle_flexckpt.trainer.ema import average_state
from paddle_flexckpt.trainer.mixin import FlexTrainerMixin, checkpointer_of, upstream_of


class PaddleFormersMixin(FlexTrainerMixin):
    """As :class:`FlexTrainerMixin`, for ``class MyTrainer(PaddleFormersMixin, Trainer)`` with PaddleFormers' Trainer.

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
            "it is saved with the model, by all ranks. Remedy: call _save_checkpoint()"
        )

    def add_non_zcc_ema_callback(self: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """As the trainer's; the averages are a part of the checkpoint, not files beside it."""
        flex = checkpointer_of(self)
        upstream = upstream_of(self, "add_non_zcc_ema_callback")
        if self.args.save_checkpoint_format != FLEX:
            upstream(resume_from_checkpoint, *args, **kwargs)
            return
        # Files of the library's own format are left to it; a checkpoint of this library has none.
        upstream(None if flex.restored_native else resume_from_checkpoint, *args, **kwargs)
        flex.average = average_state(self)
        flex.restore_average()
