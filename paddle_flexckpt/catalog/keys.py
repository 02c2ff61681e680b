"""Keys with a meaning of their own."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog.table import Catalog

# Keys with this prefix are a run's extra state (step, schedules, generators): part of a checkpoint, of no model.
EXTRA_STATE = "extra_state."


def without_extra_state(catalog: Catalog) -> Catalog:
    """The shards of a catalog that are no run's extra state."""
    extra = np.asarray([key.startswith(EXTRA_STATE) for key in catalog.keys], dtype=bool)
    return catalog.take(~extra[catalog.key]) if extra.any() else catalog
