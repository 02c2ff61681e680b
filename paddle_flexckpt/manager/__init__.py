"""CheckpointManager: the checkpoints of a run, one directory for each step; when to save and what to keep."""

from paddle_flexckpt.manager.manager import CheckpointManager
from paddle_flexckpt.manager.memory_tier import MemoryTier
from paddle_flexckpt.manager.policies import (
    KeepBest,
    KeepEvery,
    KeepInterval,
    KeepLatest,
    KeepPolicy,
    SaveEvery,
    SaveInterval,
    SavePolicy,
    steps_to_remove,
)
from paddle_flexckpt.manager.restore import RestoreReport
from paddle_flexckpt.manager.step_contents import check
from paddle_flexckpt.tools.step_record import StepRecord

__all__ = [
    "CheckpointManager",
    "KeepBest",
    "KeepEvery",
    "KeepInterval",
    "KeepLatest",
    "KeepPolicy",
    "MemoryTier",
    "RestoreReport",
    "SaveEvery",
    "SaveInterval",
    "SavePolicy",
    "StepRecord",
    "check",
    "steps_to_remove",
]
