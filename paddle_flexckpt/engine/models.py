"""Describe a model by what a checkpoint holds of it: the other half of a layout, beside the strategy.

Tested in tests/engine/test_models.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.aoa.sides import MASTER, split_state
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.planning.layouts import ADAMW, Model, ModelTensor, State

_PIPELINE, _LAYER = re.compile(r"(\d+)\."), re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
# What stands in front of the numbered layers; whatever else has no number stands behind them.
_IN_FRONT = re.compile(r"embed|wte|wpe|patch|stem", re.IGNORECASE)


def model_of(
    infos: Mapping[str, TensorInfo], stored: Catalog, cuts: Sequence[tuple[str, int | None]] = (), states: bool = True
) -> Model:
    """Describe the model whose tensors and optimizer states have these names.

    A tensor is cut by tensor parallelism as ``cuts`` say, else as it was where the checkpoint was saved, else not. Its
    layer is the first number in its name. Where all names begin with a number, as in a PipelineLayer, the layers that
    most are like are shared out; else all that have a number. An expert's number stands behind ``experts.``.

    Args:
        infos: Shape and dtype by key, in the order in which the optimizer has the parameters.
        stored: The shards of the checkpoint.
        cuts: Globs of names and the axis along which tensor parallelism cuts these; None for no axis. The first that
            fits counts.
        states: Whether the job has an optimizer.

    Raises:
        ValidationError: A tensor is stored in parts along several axes, and no cut is given.
    """
    keys = set(infos)
    split = {key: split_state(key, keys) for key in infos}
    names = [key for key, (_, state) in split.items() if not state]
    found: dict[str, dict[str, str]] = {}
    for key, (base, state) in split.items():
        if state:
            found.setdefault(base, {})[state] = key
    axes, layers, experts = _stored_cuts(stored), _layers(names, infos), _experts(names)
    problems: list[Problem | str] = []
    tensors = []
    for name in names:
        given = [axis for glob, axis in cuts if fnmatch.fnmatchcase(name, glob)]
        axis = given[0] if given else axes.get(name)
        if axis is not None and axis == _SEVERAL:
            remedy = f"say which one tensor parallelism cuts: --cut '{name}=AXIS', or ={name}=none"
            problems.append(Problem("a tensor is stored in parts along several axes", key=name, remedy=remedy))
            axis = None
        trained = not found or name in found
        info = infos[name]
        tensors.append(
            ModelTensor(name, info.shape, info.dtype, axis, layers[0].get(name, ()), trained, experts.get(name))
        )
    if problems:
        raise ValidationError(problems)
    kept = _states(found, infos) if states else ()
    kinds = [infos[key].dtype for each in found.values() for state, key in each.items() if state != MASTER]
    return Model(
        tuple(tensors), layers[1], layers[2], kept, Counter(kinds).most_common(1)[0][0] if kinds else "float32"
    )


_SEVERAL = 1 << 30


def _stored_cuts(stored: Catalog) -> dict[str, int]:
    """Return the axis along which the boxes of each key are parts of its tensor, for those that are cut."""
    is_cut = (stored.shape != stored.global_shape) & (stored.size > 0)[:, None]
    rows, axis = np.nonzero(is_cut)
    pairs = np.unique(np.stack([stored.key[rows], axis - (stored.width - stored.ndim[rows])], axis=1), axis=0)
    axes: dict[str, int] = {}
    for key, along in pairs.tolist():
        axes[stored.keys[key]] = _SEVERAL if stored.keys[key] in axes else along
    return axes


def _layers(
    names: Sequence[str], infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, tuple[int, ...]], int, frozenset[int] | None]:
    """Return the layers of each tensor, how many there are, and which of them stages share evenly."""
    numbers = {name: match for name in names if (match := _PIPELINE.match(name))}
    if names and len(numbers) == len(names):
        places = {name: int(match[1]) for name, match in numbers.items()}
        looks: dict[int, list[object]] = {}
        for name, place in places.items():
            looks.setdefault(place, []).append((name[numbers[name].end() :], infos[name].shape))
        alike = Counter(tuple(sorted(map(str, look))) for look in looks.values())
        usual = alike.most_common(1)[0][0]
        counted = frozenset(place for place, look in looks.items() if tuple(sorted(map(str, look))) == usual)
        return {name: (place,) for name, place in places.items()}, max(places.values()) + 1, counted
    numbered = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
    if not numbered:
        return {}, 1, None
    order = {number: place for place, number in enumerate(sorted(set(numbered.values())), 1)}
    last = len(order) + 1
    found = {
        name: (order[numbered[name]] if name in numbered else 0 if _IN_FRONT.search(name) else last,) for name in names
    }
    return found, last + 1, frozenset(order.values())


def _experts(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the number of each expert's tensor, and of the experts beside it."""
    matches = {name: match for name in names if (match := _EXPERT.fullmatch(name))}
    beside = Counter((match[1], match[3]) for match in matches.values())
    return {name: (int(match[2]), beside[match[1], match[3]]) for name, match in matches.items()}


def _states(found: Mapping[str, Mapping[str, str]], infos: Mapping[str, TensorInfo]) -> tuple[State, ...]:
    """Return the states that parameters have, those of AdamW in its own order."""
    usual = [state.suffix for state in ADAMW]
    suffixes = {suffix for each in found.values() for suffix in each}
    scalars = {
        suffix
        for suffix in suffixes
        if all(infos[each[suffix]].shape == (1,) for each in found.values() if suffix in each)
        and any(infos[base].shape != (1,) for base, each in found.items() if suffix in each and base in infos)
    }
    order = sorted(suffixes, key=lambda suffix: (usual.index(suffix) if suffix in usual else len(usual), suffix))
    return tuple(State(suffix, suffix in scalars, suffix == MASTER) for suffix in order)
