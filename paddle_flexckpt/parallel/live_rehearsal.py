"""Rehearse a load into a strategy, of which the model may be a live one that was built on one rank.

The model's description is its ``sharded_state_dict()``: names, shapes, and how rules would split each tensor.

Tested in tests/distributed/test_live_rehearsal.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.planning.job_layout import ADAMW, JobLayout, Model, ModelTensor
from paddle_flexckpt.planning.meshes import Mesh
from paddle_flexckpt.planning.strategy import Strategy
from paddle_flexckpt.tools import rehearsal
from paddle_flexckpt.tools.models import (
    expert_numbers,
    kept_states,
    lacking_states,
    layer_places,
    layout_of,
    noted_layout,
    read_strategy,
    state_dtype,
)
from paddle_flexckpt.tools.rehearsal_report import RehearsalReport
from paddle_flexckpt.transfer.arguments import plain_arguments
from paddle_flexckpt.transfer.options import LoadOptions

Cuts = Sequence[tuple[str, "int | None"]]
_HALF = ("float16", "bfloat16")


@plain_arguments
def rehearse(
    path: Location,
    layout: JobLayout | str,
    options: LoadOptions | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    states: bool = True,
    cuts: Cuts = (),
    variant: str = "plain",
    seg_method: str | None = None,
    cooperative: bool = False,
    by_source: bool = False,
    object_store: bool = False,
    bytes_per_second: float | None = None,
    request_seconds: float = 0.0,
    notes: Sequence[str] = (),
) -> RehearsalReport:
    """Return what loading a checkpoint into a layout would do, without the ranks of the job.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
        layout: The job's strategy, such as ``"tp=4,pp=2,sharding=v2:8"`` or ``"mesh=2x4:dp,mp"``, or the path of a JSON
            file with a mesh; or a layout. The arguments from ``model`` to ``seg_method`` are for a strategy only.
        options: Of the load.
        model: The job's model, if the checkpoint holds another: a ``paddle.nn.Layer`` that was built on one rank (then
            ``install()`` is in effect from then on), a checkpoint of it, or its ``config.json``.
        optimizer: The live model's optimizer, built on one rank too. None: AdamW, with master weights for half
            precision.
        states: Whether the job has an optimizer.
        cuts: Globs of names and the axis along which tensor parallelism cuts these, or None. The first match counts,
            and overrides the checkpoint and the model.
        variant: Of a ``config.json``: what the model fuses, ``"plain"`` or ``"fused"``.
        seg_method: Of a live PipelineLayer, which does not store it: ``"uniform"`` or ``"layer:Name"``. None divides
            the most numerous kind of layer evenly among the stages.
        cooperative: Whether to report also what ranks do if one of them reads for all.
        by_source: Whether to report also which rank has saved the data that each rank needs.
        object_store: Whether to count requests as if the checkpoint were in an object store; if it is, they are.
        bytes_per_second: Bytes that one rank reads while all do; by default no time is estimated.
        request_seconds: Seconds that each read adds, where several threads read.
        notes: The assumptions of the layout, for the report.

    Raises:
        ValidationError: There is no such checkpoint, strategy or model, or the strategy cannot cut the model.
        CorruptCheckpointError: A manifest is damaged.
    """
    if options is None and isinstance(layout, str) and not states:
        options = LoadOptions(optimizer_states="ignore")
    layout, found = _layout_for(path, layout, options, model, optimizer, states, cuts, variant, seg_method)
    return rehearsal.rehearse(
        path,
        layout,
        options,
        cooperative=cooperative,
        by_source=by_source,
        object_store=object_store,
        bytes_per_second=bytes_per_second,
        request_seconds=request_seconds,
        notes=[*notes, *found],
    )


def _layout_for(
    path: Location,
    layout: JobLayout | str,
    options: LoadOptions | None,
    model: Any,
    optimizer: Any,
    states: bool,
    cuts: Cuts,
    variant: str,
    seg_method: str | None,
) -> tuple[JobLayout, list[str]]:
    """Return the layout that the arguments of :func:`rehearse` describe, and the assumptions that it makes."""
    if not isinstance(layout, str):
        if model is not None or optimizer is not None:
            raise ValidationError(
                ["a layout has its own model. Remedy (FC101): give the strategy as a text beside model="]
            )
        return layout, []
    if hasattr(model, "sharded_state_dict") or hasattr(model, "state_dict"):
        return layout_of_model(model, layout, optimizer=optimizer, states=states, cuts=cuts, seg_method=seg_method)
    options = options or LoadOptions()
    return layout_of(
        path,
        layout,
        unique_id=options.unique_id,
        aoa_config=options.aoa_config,
        model=model,
        cuts=cuts,
        states=states,
        variant=variant,
    )


def layout_of_model(
    model: Any,
    strategy: str,
    *,
    optimizer: Any = None,
    states: bool = True,
    cuts: Cuts = (),
    seg_method: str | None = None,
) -> tuple[JobLayout, list[str]]:
    """Return the layout of a job that trains a live model under a strategy, and the assumptions that it makes.

    The arguments are those of :func:`rehearse`. ``rehearse_save`` takes the layout too. ``install()`` is in effect from
    then on.

    Raises:
        ValidationError: The model is part of a parallel job, it lacks information, or the strategy cannot cut it.
    """
    from paddle_flexckpt.parallel.install import install  # which imports Paddle

    install()
    parsed = read_strategy(strategy)
    described, notes = describe_model(model, optimizer, states=states, cuts=cuts, seg_method=seg_method)
    _check_known(model, parsed, described, cuts)
    _check_optimizer(optimizer, parsed)
    layout, more = noted_layout(parsed, described)
    # The live optimizer defines its order itself.
    return layout, [*notes, *(note for note in more if "order of the checkpoint" not in note)]


def describe_model(
    model: Any, optimizer: Any = None, *, states: bool = True, cuts: Cuts = (), seg_method: str | None = None
) -> tuple[Model, list[str]]:
    """Describe a live model that was built on one rank; return the description and its assumptions.

    Raises:
        ValidationError: It is part of a parallel job, or the optimizer cannot be described.
    """
    shards = _described(model)
    stored = {} if optimizer is None or not states else _states_of(optimizer, shards)
    infos = {key: TensorInfo(weight.global_shape, _dtype(weight)) for key, weight in {**shards, **stored}.items()}
    found: dict[str, dict[str, str]] = {}
    for key in stored:
        base, state = split_state(key, infos)
        found.setdefault(base, {})[state] = key
    notes, trained = [], set(found)
    if optimizer is None and states:
        notes.append("the job has AdamW, with master weights for half precision, in the order of the model")
        trained = _trainable(shards)
    places, layers, counted = _layers(model, shards, infos, seg_method)
    tensors, kept = [], kept_states(found, infos)
    for key in _in_order(optimizer, shards):
        weight = shards[key]
        given = [axis for glob, axis in cuts if fnmatchcase(key, glob)]
        axis = given[0] if given else _split_axis(weight)
        expert = getattr(weight, "expert", None)
        is_trained = key in trained if states else not weight.local_tensor.stop_gradient
        info, lacks = infos[key], lacking_states(found.get(key, {}), kept)
        tensors.append(ModelTensor(key, info.shape, info.dtype, axis, places.get(key, ()), is_trained, expert, lacks))
    dtype = state_dtype(found, infos)
    if optimizer is None and states:
        is_half = any(each.dtype in _HALF for each in tensors)
        kept = tuple(state for state in ADAMW if is_half or not state.is_master)
    fused = [key for key, weight in shards.items() if getattr(weight, "fused", None) is not None]
    if fused:
        notes.append(f"{listed(fused, 3)} are fused: what it takes to put their order right is not counted")
    return Model(tuple(tensors), layers, counted, kept, dtype), notes


def _described(model: Any) -> dict[str, Any]:
    """Return the model's shards, all of them whole."""
    shards: dict[str, Any] = dict(model.sharded_state_dict())
    parts = [
        key
        for key, weight in shards.items()
        if weight.is_flattened
        or tuple(weight.local_shape) != tuple(weight.global_shape)
        or getattr(weight, "dist_tensor", None) is not None
    ]
    if parts:
        raise ValidationError(
            [
                f"{len(parts)} tensors of the model are parts of a parallel job, such as {listed(parts, 3)}. "
                "Remedy (FC704): build the model in one process, without parallelism; the strategy says how it is cut"
            ]
        )
    return shards


def _states_of(optimizer: Any, shards: Mapping[str, Any]) -> dict[str, Any]:
    describe = getattr(optimizer, "sharded_state_dict", None)
    if not callable(describe):
        remedy = "give the run's optimizer of Paddle, or leave it out"
        raise ValidationError([f"a {type(optimizer).__name__} cannot be described. Remedy (FC805): {remedy}"])
    return dict(describe(shards))


def _dtype(weight: Any) -> str:
    return dtype_of(str(weight.local_tensor.dtype).split(".")[-1]).name


def _trainable(shards: Mapping[str, Any]) -> set[str]:
    """Return the names under which states are stored: the first one, sorted, of each parameter that is trained."""
    first: dict[int, str] = {}
    for key in sorted(shards):
        if not shards[key].local_tensor.stop_gradient:
            first.setdefault(id(shards[key].local_tensor), key)
    return set(first.values())


def _split_axis(weight: Any) -> int | None:
    """Return the axis along which tensor parallelism would split a tensor."""
    return getattr(weight, "split_axis", None) if getattr(weight, "split_by", "tensor") == "tensor" else None


def _parameters(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer was given, in its order."""
    entries = getattr(optimizer, "_parameter_list", None) or ()
    return [each for entry in entries for each in (entry["params"] if isinstance(entry, dict) else (entry,))]


def _in_order(optimizer: Any, shards: Mapping[str, Any]) -> list[str]:
    """Return all names in the order of the model, or of the optimizer where its order differs."""
    keys = list(shards)
    place = {parameter.name: number for number, parameter in enumerate(_parameters(optimizer))}
    known = {key for key in keys if shards[key].local_tensor.name in place}
    ordered = iter(sorted(filter(known.__contains__, keys), key=lambda key: place[shards[key].local_tensor.name]))
    return [next(ordered) if key in known else key for key in keys]


def _layers(
    model: Any, shards: Mapping[str, Any], infos: Mapping[str, TensorInfo], seg_method: str | None
) -> tuple[dict[str, tuple[int, ...]], int, frozenset[int] | None]:
    """Return the layers of each tensor, the number of layers, and those that are divided evenly among stages."""
    descs = _descriptions(model)
    if descs is None:
        if seg_method is not None:
            raise ValidationError([f"seg_method={seg_method!r} needs a PipelineLayer; got a {type(model).__name__}"])
        return layer_places(list(shards), infos)
    places = {key: tuple(getattr(weight, "layers", ())) for key, weight in shards.items()}
    names = [_class_name(desc) for desc in descs]
    if seg_method == "uniform":
        return places, len(descs), None
    if seg_method is None:
        used = {layer for layers in places.values() for layer in layers}
        kinds = [name for number, name in enumerate(names) if number in used]
        most = max(dict.fromkeys(kinds), key=kinds.count, default="")
        counted = frozenset(number for number, name in enumerate(names) if name == most and number in used)
    else:
        prefix, _, pattern = seg_method.partition(":")
        found = [number for number, name in enumerate(names) if re.search(pattern, name, re.IGNORECASE)]
        if prefix != "layer" or not pattern or not found:
            expected = f"'uniform' or 'layer:NAME' with one of {sorted(set(names))}"
            raise ValidationError([Problem("unknown seg_method", expected=expected, got=seg_method)])
        counted = frozenset(found)
    return places, len(descs), counted


def _descriptions(model: Any) -> list[Any] | None:
    """Return the list of LayerDescs of a PipelineLayer, also of a wrapped one; None if there is no pipeline."""
    descs = getattr(model, "_layers_desc", None)
    if descs is None:
        inside = getattr(model, "_layers", None)
        return None if inside is None or inside is model else _descriptions(inside)
    return list(descs)


def _class_name(desc: Any) -> str:
    """Return the name of the class that an entry of the description builds, as SegmentLayers sees it."""
    spec = (
        getattr(getattr(desc, "layer_spec", None), "layer", None) if getattr(desc, "using_layer_spec", False) else None
    )
    built = spec if spec is not None else getattr(desc, "layer_func", None)
    if built is None:
        built = desc if hasattr(desc, "__name__") else type(desc)
    return str(getattr(built, "__name__", built))


def _check_known(model: Any, strategy: Strategy | Mesh, described: Model, cuts: Cuts) -> None:
    """Check that the model's description has what the strategy needs."""
    if isinstance(strategy, Mesh):
        return
    shards = model.sharded_state_dict()
    problems: list[Problem | str] = []
    numbers = expert_numbers(list(shards))
    for each in described.tensors:
        weight = shards[each.name]
        given = any(fnmatchcase(each.name, glob) for glob, _ in cuts)
        if getattr(weight, "split_by", "tensor") == "own" and not given and strategy.tp * strategy.ep > 1:
            remedy = f"say what tensor parallelism does to it: cuts=[({each.name!r}, None)] leaves it whole"
            problems.append(
                Problem("a group of the layer's own splits a tensor", each.name, code="FC704", remedy=remedy)
            )
        if strategy.ep > 1 and each.name in numbers and each.expert is None:
            remedy = "let the layer adopt paddle_flexckpt.ExpertParallelMixin"
            problems.append(Problem("nothing says that these are experts", each.name, code="FC803", remedy=remedy))
        copies = getattr(weight, "aliases", ()) if getattr(weight, "layers", ()) else ()
        positions = {int(name.partition(".")[0]) for name in copies if name.partition(".")[0].isdigit()}
        if strategy.pp > 1 and positions - set(each.layers):
            what = "each stage has its own copy of a parameter in a shared layer"
            remedy = "move it out of the SharedLayerDesc"
            problems.append(Problem(what, each.name, got=f"layers {sorted(positions)}", code="FC704", remedy=remedy))
    if problems:
        raise ValidationError(problems, f"{strategy} does not fit the model")


def _check_optimizer(optimizer: Any, strategy: Strategy | Mesh) -> None:
    """Check that Paddle can shard an optimizer as a strategy says."""
    if isinstance(strategy, Mesh) or strategy.kind not in ("v1", "v2") or strategy.sharding == 1:
        return
    frozen = [parameter.name for parameter in _parameters(optimizer) if parameter.stop_gradient]
    if frozen:
        remedy = "give the optimizer the parameters without stop_gradient"
        what = (
            f"the optimizer has frozen parameters, such as {listed(frozen, 3)}, which sharding {strategy.kind} mixes up"
        )
        raise ValidationError([Problem(what, code="FC704", remedy=remedy)], f"{strategy} does not fit the model")
