"""Remedies that name the AOA statement for a target that does not fit the source.

Tested in tests/transfer/test_remedies.py and tests/load/test_masters_and_fused.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.optimizer_states import MASTER, split_state
from paddle_flexckpt.transfer.names import bare, split_raw

# The layer in the names of embeddings, and of the heads that models tie to them.
_TIED = re.compile(r"(?:embed|wte|head|decoder)[^.]*\.[^.]+$", re.IGNORECASE)

# The products of NAdam and RAdam begin with 1; Adam's powers begin with beta itself.
_FROM_ONE = re.compile(r"(?:beta[12]_pow|mu_product|momentum_decay_pow|rho)_\d+$")


def reshaped(target: Catalog, row: int, source: Catalog, source_row: int, keys: set[str]) -> str:
    """Return the remedy for a target of another shape, with the statement if there is only one candidate; else "".

    ``keys`` are those of both sides.
    """
    old = source.unpadded(source_row, source.global_shape)
    new = target.unpadded(row, target.global_shape)
    found, wanted = map(quoted, _moved_names(target, row, source, source_row, keys))
    size = "load into a model of the saved size, or leave this key out"
    if len(old) == len(new):
        differ = [(narrow, wide) for narrow, wide in zip(old, new) if narrow != wide]
        if len(differ) == 1:
            ((narrow, wide),) = differ
            text = f'{found} -> {wanted}, resize="auto"' + (', fill="keep"' if wide > narrow else "")
            return (
                f"{size}, or, if elements were added or removed at the end, as in a vocabulary, cut or extend it by "
                f"the AOA statement '{text}'"
            )
        # Axes of equal size cannot be distinguished.
        if sorted(old) == sorted(new) and len({*old}) == len(old):
            axes = [old.index(extent) for extent in new]
            text = f"{found}^T -> {wanted}" if len(axes) == 2 else f'{found} -> {wanted}, permute="{axes}"'
            return (
                f"if the source has its axes in another order (torch's Linear is transposed), add the AOA statement "
                f"'{text}'; also square tensors, whose shapes do not tell, need such a statement"
            )
        return ""
    # The order is row-major if axes were only joined or split, or have one element.
    edges = [{math.prod(shape[:axis]) for axis in range(len(shape) + 1)} for shape in (old, new)]
    if math.prod(old) == math.prod(new) > 0 and (edges[0] <= edges[1] or edges[1] <= edges[0]):
        text = f'{found} -> {wanted}, reshape="auto"'
        return f"if the values are the same in row-major order, add the AOA statement '{text}'; or {size}"
    return ""


def _moved_names(target: Catalog, row: int, source: Catalog, source_row: int, keys: set[str]) -> tuple[str, str]:
    """Return the names for a statement: of parameters, whose states follow, or of states of another shape."""
    names = source.key_name(source_row), target.key_name(row)
    parameters = split_state(names[0], keys)[0], split_state(names[1], keys)[0]
    for catalog, own, name, parameter in zip((source, target), (source_row, row), names, parameters):
        if parameter != name and parameter in catalog.keys:
            first = int(np.argmax(catalog.key == catalog.keys.index(parameter)))
            if catalog.unpadded(first, catalog.global_shape) != catalog.unpadded(own, catalog.global_shape):
                return names
    return parameters


def renamed(keys: Sequence[str], names: Collection[str]) -> str:
    """Return the statements for targets that the source has, all of them, under a prefix or without theirs; else ""."""
    key = next((key for key in keys if key not in names), "")
    longer = [name[: -len(key)] for name in names if key and name.endswith(f".{key}")]
    longer = [prefix for prefix in longer if all(prefix + each in names for each in keys)]
    shorter = [key[: found.end()] for found in re.finditer(r"\.", key)]
    shorter = [p for p in shorter if all(each.startswith(p) and each[len(p) :] in names for each in keys)]
    if len(longer) + len(shorter) != 1:
        return ""
    side, (prefix,) = ("the source's", longer) if longer else ("only the targets'", shorter)
    pair = f'"{prefix}{{key}}" -> "{{key}}"' if longer else f'"{{key[{len(prefix)}:]}}" -> "{{key}}"'
    return f"as {side} keys begin with {prefix!r}, give the AOA statements [f'{pair}' for key in state_dict]; or "


def first_value(key: str) -> str:
    """Return the remedy by which a state that the source lacks gets its value before the first step.

    A master starts as its parameter: zeros in it would become the parameter's at the next step.
    """
    raw, (parameter, _, state) = split_raw(bare(key)), key.rpartition(".")
    if MASTER in (state, raw and raw.state):
        way = f"'PARAMETER -> {quoted(parameter)}' and master_weights='convert'"
        if raw is not None:
            way = f"'PARAMETER -> {quoted(key)}, dtype=\"float32\"'"
        return (
            "; or start it from its parameter, whose name in the source is to stand for PARAMETER, by the AOA "
            f"statement {way}"
        )
    power = re.search(r"beta([12])_pow_acc_\d+$", key)
    value, of = (f"BETA{power[1]}", f", with the optimizer's beta{power[1]}") if power else ("0", "")
    if _FROM_ONE.search(key):
        value = "1"
    if re.search(r"learning_rates_\d+$", key):
        value, of = "LEARNING_RATE", ", with the optimizer's learning rate"
    return (
        "; or, if it was not trained when the source was saved, give it the value that an optimizer begins with by "
        f"the AOA statement '_ -> {quoted(key)}, fill={value}'{of}; with strict=False it would stay what steps have "
        "made of it"
    )


def untied(target: Catalog, row: int, source: Catalog) -> str:
    """Return the statement for a head or embedding that the saved model tied to the other; "" for other targets."""
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
