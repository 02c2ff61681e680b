"""FlexCheckpoint in the trainers of PaddleNLP and PaddleFormers: one flag to save, one to resume.

Ways in, from the least to the most explicit:

* ``python -m paddle_flexckpt.trainer.run script.py ...`` (``python -m paddle_flexckpt.trainer.launch`` for many ranks);
* ``import paddle_flexckpt.trainer.paddlenlp`` at the top of a script;
* ``paddle_flexckpt.trainer.install()``;
* ``class MyTrainer(FlexTrainerMixin, Trainer)`` with ``class MyArguments(FlexTrainingArguments, TrainingArguments)``
  (PaddleFormersMixin with PaddleFormers).

Apart from these, ``replace_in_tree()`` puts this library behind the functions of Paddle that PaddleFormers calls.
"""

from paddle_flexckpt.trainer.arguments import FlexTrainingArguments, TrainerOptions, options_of
from paddle_flexckpt.trainer.directories import TrainerDirectories, latest_checkpoint
from paddle_flexckpt.trainer.in_tree import is_in_tree_replaced, replace_in_tree, restore_in_tree
from paddle_flexckpt.trainer.installation import install, is_installed, uninstall
from paddle_flexckpt.trainer.mixin import FlexTrainerMixin
from paddle_flexckpt.trainer.paddleformers_mixin import PaddleFormersMixin

__all__ = [
    "FlexTrainerMixin",
    "FlexTrainingArguments",
    "PaddleFormersMixin",
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
