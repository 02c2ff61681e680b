"""Remedies that name the AOA statement for a target that does not fit the source.

Tested in tests/engine/test_remedies.py and tests/live/test_masters_and_fused.py.
"""

from __future__ import annotations

import re

import numpy as np

from paddle_flexckpt.aoa import fused_statement
from paddle_flexckpt.aoa.states import split_state
from paddle_flexckpt.catalog import Catalog

# The layer in the names of embeddings, and of the heads that models tie to them.
_TIED = re.compile(r"(?:embed|wte|head|decoder)[^.]*\.[^.]+$", re.IGNORECASE)


def resized(target: Catalog, row: int, source: Catalog, source_row: int) -> str:
    """Return the statement that cuts or extends a source tensor, mostly for another vocabulary; "" for other axes."""
    old = source.unpadded(source_row, source.global_shape)
    new = target.unpadded(row, target.global_shape)
    if len(old) != len(new):
        return ""
    fill = ', fill="keep"' if any(wide > narrow for wide, narrow in zip(new, old)) else ""
    keys = (*source.keys, *target.keys)
    text = fused_statement(source.key_name(source_row), target.key_name(row), f'resize="auto"{fill}', keys)
    return f", or cut or extend it by the AOA statement '{text}'"


def untied(target: Catalog, row: int, source: Catalog) -> str:
    """Return the statement for a head or embedding that the saved model had tied to the other; "" for other targets."""
    keys = {*source.keys, *target.keys}
    key, shape = target.key_name(row), target.unpadded(row, target.global_shape)
    parameter = split_state(key, keys)[0]
    if len(shape) != 2 or _TIED.search(parameter) is None:
        return ""
    for number in np.unique(source.key):
        name = source.keys[number]
        if _TIED.search(name) is None or split_state(name, keys)[0] != name:
            continue
        first = int(np.argmax(source.key == number))
        stored = source.unpadded(first, source.global_shape)
        if shape in (stored, stored[::-1]):
            transposed = "^T" if shape != stored else ""
            text = f"{name}{transposed} -> {parameter}"
            return f"if the saved model tied it to {name!r}, add the AOA statement '{text}'; or "
    return ""
