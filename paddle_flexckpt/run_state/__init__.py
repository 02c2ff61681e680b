"""Saving and restoring the state of a run besides tensors: step, schedule, random numbers, extra values."""

from paddle_flexckpt.run_state.extra_state import (
    ExtraStateReport,
    collect_extra_state,
    load_extra_state,
    restore_extra_state,
)

__all__ = ["ExtraStateReport", "collect_extra_state", "load_extra_state", "restore_extra_state"]
