"""Keys with a meaning of their own."""

from __future__ import annotations

# Keys with this prefix are a run's extra state (step, schedules, generators): part of a checkpoint, of no model.
EXTRA_STATE = "extra_state."
