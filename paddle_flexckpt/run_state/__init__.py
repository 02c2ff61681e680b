"""Save and restore what a run has besides tensors: step, schedule, random numbers, extra values."""
