"""FlexCheckpoint in the trainers of PaddleNLP, PaddleFormers and PaddleFleet: one flag to save, one to resume.

Two ways in:

* for scripts as they are, the launcher: ``python -m paddle_flexckpt.trainer.launch ... script.py`` for many ranks,
  ``python -m paddle_flexckpt.trainer.run script.py`` for one. It calls ``install()``, as a script itself may;
* for classes of one's own, the mixin: ``class MyTrainer(FlexTrainerMixin, Trainer)`` with
  ``class MyArguments(FlexTrainingArguments, TrainingArguments)`` (PaddleFormersMixin with PaddleFormers,
  PaddleFleetMixin with PaddleFleet).

``replace_in_tree()`` is no way into a trainer: it puts this library behind Paddle's own functions.
"""

from paddle_flexckpt.trainer.directories import TrainerDirectories, latest_checkpoint
from paddle_flexckpt.trainer.flags import FlexTrainingArguments, TrainerOptions, options_of
from paddle_flexckpt.trainer.in_tree import is_in_tree_replaced, replace_in_tree, restore_in_tree
from paddle_flexckpt.trainer.installation import install, is_installed, uninstall
from paddle_flexckpt.trainer.mixin import FlexTrainerMixin, PaddleFleetMixin, PaddleFormersMixin
from paddle_flexckpt.trainer.train_sampler import TrainSampler

__all__ = [
    "FlexTrainerMixin",
    "FlexTrainingArguments",
    "PaddleFleetMixin",
    "PaddleFormersMixin",
    "TrainSampler",
    "TrainerDirectories",
    "TrainerOptions",
    "install",
    "is_in_tree_replaced",
    "is_installed",
    "latest_checkpoint",
    "options_of",
    "replace_in_tree",
    "restore_in_tree",
    "uninstall",
]
