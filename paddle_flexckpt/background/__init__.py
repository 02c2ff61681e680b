"""Saving without stopping: a writer process that shares memory with its training process and does not import Paddle."""

from paddle_flexckpt.background.admission import Admission
from paddle_flexckpt.background.handle import SaveHandle
from paddle_flexckpt.background.job import WriteJob
from paddle_flexckpt.background.process_writers import await_earlier, shared_writer
from paddle_flexckpt.background.settlement import tell_writers
from paddle_flexckpt.background.writer import BackgroundWriter

__all__ = ["Admission", "BackgroundWriter", "SaveHandle", "WriteJob", "await_earlier", "shared_writer", "tell_writers"]
