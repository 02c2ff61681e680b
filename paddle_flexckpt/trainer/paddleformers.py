"""``import paddle_flexckpt.trainer.paddleformers`` at the top of a script: its trainer knows the flags."""

from paddle_flexckpt.trainer.installation import install

install("paddleformers")
