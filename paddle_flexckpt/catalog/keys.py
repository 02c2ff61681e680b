"""Keys with a meaning of their own. Tested in tests/catalog/test_table.py."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paddle_flexckpt.catalog.errors import Problem, ValidationError
from paddle_flexckpt.catalog.table import Catalog

# Keys with this prefix are a run's extra state (step, schedules, generators): part of a checkpoint, of no model.
EXTRA_STATE = "extra_state."
_OURS = re.compile(re.escape(EXTRA_STATE) + r"(?:common|manager|ema|(?:rng|dataloader)\.rank\d+)(?:\.|\Z)")


def check_extra_names(keys: Iterable[str]) -> None:
    """Refuse keys of a model's that look like a run's extra state: whoever loads the model would leave them out.

    Raises:
        ValidationError: There are some.
    """
    problems: list[Problem | str] = [
        Problem(
            f"names that begin with {EXTRA_STATE!r} are those of a run's extra state, which no model gets back",
            key=key,
            remedy="rename the layer or entry; values of the run go through collect_extra_state(name=value)",
        )
        for key in keys
        if key.startswith(EXTRA_STATE) and not _OURS.match(key)
    ]
    if problems:
        raise ValidationError(problems)


def without_extra_state(catalog: Catalog) -> Catalog:
    """Return the shards of a catalog that are no run's extra state."""
    extra = np.asarray([key.startswith(EXTRA_STATE) for key in catalog.keys], dtype=bool)
    return catalog.take(~extra[catalog.key]) if extra.any() else catalog
