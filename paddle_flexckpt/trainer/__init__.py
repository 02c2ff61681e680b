"""FlexCheckpoint in the trainers of PaddleNLP and PaddleFormers: one flag to save, one to resume.

Ways in, from the least to the most explicit:

* ``python -m paddle_flexckpt.trainer.run script.py ...`` (``python -m paddle_flexckpt.trainer.launch`` for many ranks);
* ``import paddle_flexckpt.trainer.paddlenlp`` at the top of a script;
* ``paddle_flexckpt.trainer.install()``;
* ``class MyTrainer(FlexTrainerMixin, Trainer)`` with ``class MyArguments(FlexTrainingArguments, TrainingArguments)``.
"""

from paddle_flexckpt.trainer.arguments import FlexTrainingArguments, TrainerOptions, options_of
from paddle_flexckpt.trainer.directories import TrainerDirectories, latest_checkpoint
from paddle_flexckpt.trainer.installation import install, is_installed, uninstall
from paddle_flexckpt.trainer.mixin import FlexTrainerMixin

__all__ = [
    "FlexTrainerMixin",
    "FlexTrainingArguments",
    "TrainerDirectories",
    "TrainerOptions",
    "install",
    "is_installed",
    "latest_checkpoint",
    "options_of",
    "uninstall",
]
