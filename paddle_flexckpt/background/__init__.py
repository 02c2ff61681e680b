"""Saving without stopping: a writer process that shares memory with its training process and does not import Paddle."""

from paddle_flexckpt.background.pending import SaveHandle, SaveSlot
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.writer import BackgroundWriter, await_earlier, shared_writer

__all__ = [
    "BackgroundWriter",
    "SaveHandle",
    "SaveSlot",
    "WriteJob",
    "await_earlier",
    "shared_writer",
]
