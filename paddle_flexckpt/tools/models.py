"""Describe a model by a checkpoint of it, and with a strategy the layout of a job.

Tested in tests/tools/test_models.py.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt.algebra.rows import group_rows
from paddle_flexckpt.aoa import AoaConfig, TensorInfo
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Problem, ValidationError, without_extra_state
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.optimizer_states import MASTER, split_state
from paddle_flexckpt.planning.job_layout import ADAMW, JobLayout, Model, ModelTensor, State
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.mesh_layouts import TENSOR_AXES, MeshLayout
from paddle_flexckpt.planning.meshes import Mesh, is_mesh, mesh_of, parse_mesh
from paddle_flexckpt.planning.strategy import Strategy, parse_strategy
from paddle_flexckpt.tools.config_models import ConfigModel, is_config, read_config_model
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping

_PIPELINE, _LAYER = re.compile(r"(\d+)\."), re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
# In place of an axis, if no single axis explains the stored parts of a tensor.
_SEVERAL, _UNEVEN = 1 << 30, 1 << 31
_UNCLEAR = {
    _SEVERAL: "a tensor is stored in parts along several axes",
    _UNEVEN: "a tensor is stored in parts of different sizes, as a save splits what several ranks hold",
}
# Tensors before the numbered layers; all others without a number come after these.
_IN_FRONT = re.compile(r"embed|wte|wpe|patch|stem", re.IGNORECASE)


def layout_of(
    path: Location,
    strategy: str,
    *,
    unique_id: int | None = None,
    aoa_config: AoaConfig | None = None,
    model: Location | None = None,
    cuts: Sequence[tuple[str, int | None]] = (),
    states: bool = True,
    variant: str = "plain",
) -> tuple[JobLayout, list[str]]:
    """Return the layout of a job that loads a checkpoint, and its assumptions.

    Args:
        path: The checkpoint.
        strategy: The job's, as :func:`read_strategy` reads it.
        unique_id: The checkpoint's id; None takes the highest.
        aoa_config: AOA statements; the job has the resulting tensors.
        model: A checkpoint of the job's model, or its ``config.json``, if ``path`` has another model.
        cuts: As of :func:`model_of`.
        states: Whether the job has an optimizer.
        variant: The variant of the model of a ``config.json`` (:func:`~.config_models.read_config_model`).

    Raises:
        ValidationError: There is no such checkpoint or configuration, or the strategy cannot cut the model.
        CorruptCheckpointError: A manifest is damaged.
    """
    parsed = read_strategy(strategy)
    if is_config(model):
        content = read_config_model(str(model), variant)
        layout, notes = noted_layout(parsed, _of_config(content, cuts, states))
        return layout, [content.note, *notes]
    chosen = (path, unique_id) if model is None else (model, None)
    stored = without_extra_state(SourceDirectory(chosen[0]).read_manifest(chosen[1]).catalog)
    mapping = whole_mapping(aoa_config, stored) if model is None and aoa_config is not None else None
    infos = tensor_infos(stored, mapping)
    if mapping is not None:  # the cut of a tensor that statements make does not follow from its operands
        stored = stored.take(~np.asarray([key in mapping.tensors for key in stored.keys], dtype=bool)[stored.key])
    return layout_for(parsed, infos, stored, cuts, states)


def read_strategy(text: str) -> Strategy | Mesh:
    """Return the strategy of a text: degrees, a mesh, or the path of a JSON or YAML file with a mesh.

    Raises:
        ValidationError: The text is something else, or the file cannot be read.
    """
    if text.endswith((".json", ".yaml", ".yml")):
        return mesh_of(_read_file(text))
    return parse_mesh(text) if is_mesh(text) else parse_strategy(text)


def _read_file(path: str) -> dict[str, Any]:
    """Return the contents of a JSON or YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            content = json.loads(text)
        else:
            import yaml

            content = yaml.safe_load(text)
    except ModuleNotFoundError as error:
        raise ValidationError(
            [f"reading {path!r} needs PyYAML. Remedy (FC901): pip install pyyaml, or use JSON"]
        ) from error
    except (OSError, ValueError) as error:
        raise ValidationError([f"cannot read the mesh {path!r}: {error}"]) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ValidationError([f"{path!r} is not valid YAML: {error}"]) from error
    if not isinstance(content, dict):
        raise ValidationError([f"the mesh {path!r} is no mapping: expected mesh, sharding and placements"])
    return content


def layout_for(
    strategy: Strategy | Mesh,
    infos: Mapping[str, TensorInfo],
    stored: Catalog,
    cuts: Sequence[tuple[str, int | None]] = (),
    states: bool = True,
) -> tuple[JobLayout, list[str]]:
    """Return the layout of a job with these tensors, and its assumptions; other arguments as of :func:`model_of`.

    Raises:
        ValidationError: The strategy cannot cut the model.
    """
    model = model_of(infos, stored, cuts, states, tensor_degree(strategy) > 1)
    layout, notes = noted_layout(strategy, model)
    maybe = _maybe_tied(model) if not isinstance(strategy, Mesh) and strategy.pp > 1 else []
    if maybe:
        notes.append(
            f"a checkpoint has tied parameters once: if the last stage has a copy of {listed(maybe, 3)} "
            "(SharedLayerDesc), its bytes are not counted; fc.rehearse(..., model=) with the live model counts them"
        )
    return layout, notes


def _maybe_tied(model: Model) -> list[str]:
    """Return the matrices of the first layer that the last one may use too, as no later one has their shape."""
    ends = [each for each in model.tensors if len(each.shape) == 2 and each.layers and each.is_trained]
    middle = model.counted or frozenset()
    first = [each for each in ends if each.layers[0] == 0 and 0 not in middle]
    later = {tuple(sorted(each.shape)) for each in ends if each.layers[0] and each.layers[0] not in middle}
    return [each.name for each in first if tuple(sorted(each.shape)) not in later]


def noted_layout(strategy: Strategy | Mesh, described: Model) -> tuple[JobLayout, list[str]]:
    """Return the layout of a model, and its assumptions."""
    if isinstance(strategy, Mesh):
        notes = [] if strategy.placements else _check_cuts(strategy, described)
        return MeshLayout(described, strategy), notes
    notes = _check_cuts(strategy, described)
    if strategy.kind != "none" and described.states:
        notes.append("the optimizer has the parameters in the order of the checkpoint, layer by layer")
    if strategy.kind == "v2" and strategy.ep > 1 and strategy.experts != "dp" and described.states:
        notes.append("experts' parameters have a color of their own, of the ranks that share them and the optimizer")
    return Layout(described, strategy), notes


def _check_cuts(strategy: Strategy | Mesh, described: Model) -> list[str]:
    """Return a note on the tensors that tensor parallelism does not cut."""
    if tensor_degree(strategy) == 1:
        return []
    whole = [each.name for each in described.tensors if each.tp_axis is None and len(each.shape) > 1]
    if all(each.tp_axis is None for each in described.tensors):
        raise ValidationError(
            "nothing says how tensor parallelism cuts the model: no tensor is stored in parts. Remedy (FC704): give "
            f"axes by names, --cut '*.q_proj.weight=1' or cuts= in Python, for each of {listed(whole, 3)} that is cut"
        )
    return [f"each rank of tensor parallelism has all of {listed(whole, 3)} (--cut says otherwise)"] if whole else []


def tensor_degree(strategy: Strategy | Mesh) -> int:
    """Return the number of ranks among which tensor parallelism cuts a tensor."""
    if isinstance(strategy, Mesh):
        return max((extent for extent, axis in zip(strategy.shape, strategy.axes) if axis in TENSOR_AXES), default=1)
    return strategy.tp


def _of_config(content: ConfigModel, cuts: Sequence[tuple[str, int | None]], states: bool) -> Model:
    """Return the model of a configuration, with AdamW as its optimizer and master weights for half precision."""
    model = model_of(content.infos, CatalogBuilder(0).build(), [*cuts, *content.cuts], states)
    first, last = (0,), model.layers - 1
    tensors = [
        replace(
            each,
            layers=(0, last) if content.is_tied and each.layers == first else each.layers,
            is_trained="e_score_correction_bias" not in each.name,
        )
        for each in model.tensors
    ]
    kept = tuple(state for state in ADAMW if content.is_half or not state.is_master) if states else ()
    return replace(model, tensors=tuple(tensors), states=kept)


def model_of(
    infos: Mapping[str, TensorInfo],
    stored: Catalog,
    cuts: Sequence[tuple[str, int | None]] = (),
    states: bool = True,
    cuts_tensors: bool = True,
) -> Model:
    """Describe the model whose tensors and optimizer states have these names.

    Tensor parallelism cuts a tensor by ``cuts``, else as at the save, else not at all. A tensor's layer is the first
    number in its name. If all names begin with a number, as in a PipelineLayer, stages share out the layers of the most
    common kind; else all numbered layers. An expert's number comes after ``experts.``.

    Args:
        infos: Shape and dtype by key, in the order in which the optimizer has the parameters.
        stored: The shards of the checkpoint.
        cuts: Globs of names and the axis along which tensor parallelism cuts these; None for no axis. The first that
            fits counts.
        states: Whether the job has an optimizer.
        cuts_tensors: Whether the job has tensor parallelism: without it, cuts need not be known.

    Raises:
        ValidationError: The cut of a tensor does not follow from its stored parts, and is not given.
    """
    keys = set(infos)
    split = {key: split_state(key, keys) for key in infos}
    names = [key for key, (_, state) in split.items() if not state]
    found: dict[str, dict[str, str]] = {}
    for key, (base, state) in split.items():
        if state:
            found.setdefault(base, {})[state] = key
    axes, layers, experts = _stored_cuts(stored), layer_places(names, infos), expert_numbers(names)
    kept = kept_states(found, infos)
    problems: list[Problem | str] = []
    tensors = []
    for name in names:
        given = [axis for glob, axis in cuts if fnmatch.fnmatchcase(name, glob)]
        axis = given[0] if given else axes.get(name)
        if axis in _UNCLEAR and axis is not None:
            if cuts_tensors:
                remedy = f"say along which axis tensor parallelism cuts it: --cut '{name}=AXIS', or '{name}=none'"
                problems.append(Problem(_UNCLEAR[axis], key=name, code="FC704", remedy=remedy))
            axis = None
        trained = not found or name in found
        info, lacks = infos[name], lacking_states(found.get(name, {}), kept)
        tensors.append(
            ModelTensor(name, info.shape, info.dtype, axis, layers[0].get(name, ()), trained, experts.get(name), lacks)
        )
    if problems:
        raise ValidationError(problems)
    tensors.sort(key=lambda tensor: tensor.layers[:1] or (-1,))
    return Model(tuple(tensors), layers[1], layers[2], kept if states else (), state_dtype(found, infos))


def _stored_cuts(stored: Catalog) -> dict[str, int]:
    """Return the axis along which the boxes of each key cut its tensor, for keys that are cut.

    Tensor parallelism and meshes cut evenly, so that only the last part may be smaller. A save cuts shards of several
    ranks wherever each has its share (``planning.write_plan``), mostly elsewhere.
    """
    is_cut = (stored.shape != stored.global_shape) & (stored.size > 0)[:, None]
    rows, axis = np.nonzero(is_cut)
    pairs = np.unique(np.stack([stored.key[rows], axis - (stored.width - stored.ndim[rows])], axis=1), axis=0)
    axes: dict[str, int] = {}
    for key, along in pairs.tolist():
        axes[stored.keys[key]] = _SEVERAL if stored.keys[key] in axes else along
    once = [(key, along) for key, along in pairs.tolist() if axes[stored.keys[key]] != _SEVERAL]
    for key in _uneven(stored, dict(once)):
        axes[stored.keys[key]] = _UNEVEN
    return axes


def _uneven(stored: Catalog, axes: Mapping[int, int]) -> list[int]:
    """Return the keys whose parts along an axis, given by key, are not those of an even cut."""
    axis_of = np.full(len(stored.keys), -1, dtype=np.int64)
    axis_of[list(axes)] = list(axes.values())
    rows = np.flatnonzero((axis_of[stored.key] >= 0) & (stored.size > 0))
    key = stored.key[rows]
    axis = axis_of[key] + stored.width - stored.ndim[rows]
    begin, size, whole = (table[rows, axis] for table in (stored.offset, stored.shape, stored.global_shape))
    order, start = group_rows([key, begin, size], len(rows))
    key, begin, size, whole = (column[order[start[:-1]]] for column in (key, begin, size, whole))
    _, first, count = np.unique(key, return_index=True, return_counts=True)
    each = -(-whole // np.repeat(count, count))
    place = np.arange(len(key)) - np.repeat(first, count)
    even = (begin == place * each) & (size == np.minimum(each, whole - begin))
    return np.unique(key[~even]).tolist()


def layer_places(
    names: Sequence[str], infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, tuple[int, ...]], int, frozenset[int] | None]:
    """Return the layers of each tensor, their number, and the layers that stages share evenly."""
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
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        found[name] = (order[numbered[name]] if name in numbered else 0 if _IN_FRONT.search(name) else last,)
    return found, last + 1, frozenset(order.values())


def expert_numbers(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the expert's number of each tensor of an expert, and the number of experts of its layer."""
    matches = {name: match for name in names if (match := _EXPERT.fullmatch(name))}
    beside = Counter((match[1], match[3]) for match in matches.values())
    return {name: (int(match[2]), beside[match[1], match[3]]) for name, match in matches.items()}


def kept_states(found: Mapping[str, Mapping[str, str]], infos: Mapping[str, TensorInfo]) -> tuple[State, ...]:
    """Return the states of parameters, those of AdamW in its own order."""
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


def lacking_states(own: Collection[str], kept: Sequence[State]) -> tuple[str, ...]:
    """Return the states that other parameters have and this one lacks, except master weights.

    A parameter without any state lacks none.
    """
    return tuple(state.suffix for state in kept if state.suffix not in own and not state.is_master) if own else ()


def state_dtype(found: Mapping[str, Mapping[str, str]], infos: Mapping[str, TensorInfo]) -> str:
    """Return the element type of most states, without master weights."""
    kinds = [infos[key].dtype for each in found.values() for state, key in each.items() if state != MASTER]
    return Counter(kinds).most_common(1)[0][0] if kinds else "float32"
