"""Name parameters of pipelines by their layer of the description, not by the stage that holds it.

A parameter's key is ``{index}.{name in the layer}``, where ``index`` counts the entries of the list of LayerDescs that
the PipelineLayer was given. So the same list gives the same keys with any number of stages and of virtual stages.

A layer under SharedLayerDesc is at several positions, and every stage that has one of them holds a copy. The tensor
that the copies share (``shared_weight_attr``) has one key, under the first position, with its names at the other
positions as aliases. It is saved once, and every copy is loaded from it. If the descs of one shared layer build layers
of different classes, the name in the layer is not known to every stage, and the key ends in the shared attribute
instead.

Tensors that Paddle does *not* keep equal between the copies (a position embedding beside a tied word embedding) are
parameters of their own on every stage: each is under the first position that its stage holds, and a stage without such
a key in the checkpoint uses the one of the position before.

For other names, a subclass overrides ``_get_pipeline_names``, or has ``_pp_to_single_mapping`` as PaddleNLP's
PipelinePretrainedModel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paddle_flexckpt.parallel.layers import describe_layer, link_tied_names, own_shards
from paddle_flexckpt.sharded_weight import ShardedStateDict

_REMEDY = (
    "Remedy (FC804): leave _layers_desc and run_function as PipelineLayer made them, or override sharded_state_dict() "
    "in the subclass that changes them"
)


class PipelineLayerMixin:
    """The description of a PipelineLayer."""

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Describe the parameters and persistable buffers of this stage, each layer by its own sharded_state_dict().

        Returns:
            Names, which do not depend on how the layers are spread over stages, to ShardedWeights.

        Raises:
            ValueError: The place of a layer in the description is not known, a parameter has no name in the subclass's
                mapping, or two parameters have the same name.
        """
        shards = list(_shards(self, structured_name_prefix))
        naming = _naming(self, PipelineLayerMixin.sharded_state_dict)
        sharded: ShardedStateDict = {}
        origins: dict[str, str] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        for shard in shards:
            name, others = naming(shard)
            key = structured_name_prefix + name
            if key not in sharded:
                sharded[key], origins[key] = shard.weight, shard.origin
            elif sharded[key].local_tensor is not shard.weight.local_tensor:
                raise ValueError(
                    f"key {key!r} would name two parameters: {origins[key]} of local shape "
                    f"{list(sharded[key].local_shape)} and {shard.origin} of local shape "
                    f"{list(shard.weight.local_shape)}. Remedy (FC804): give each a name of its own in "
                    "_get_pipeline_names() or _pp_to_single_mapping"
                )
            sharded[key].layers = tuple(sorted({*getattr(sharded[key], "layers", ()), *shard.layers}))
            aliases[key] = (*aliases.get(key, ()), *(structured_name_prefix + other for other in others))
        for key, weight in sharded.items():
            weight.key, weight.aliases = key, ()  # the layers' own aliases are among ours
        link_tied_names(sharded)
        for key, weight in sharded.items():
            weight.aliases = tuple(a for a in dict.fromkeys((*weight.aliases, *aliases[key])) if a != key)
        return sharded

    def _get_pipeline_names(self: Any) -> Mapping[str, str] | None:
        """Return names to use instead of the numbered ones, for a subclass to override."""
        return None


@dataclass(frozen=True)
class _Shard:
    """A described parameter that has no name yet."""

    weight: Any
    key: str  # the numbered one
    aliases: tuple[str, ...]  # numbered keys that the same tensor has or had at other positions, the likeliest first
    paddle_names: tuple[str, ...]  # in Paddle's state_dict()
    origin: str  # its description for errors
    layers: tuple[int, ...] = ()  # its positions in the description


def _shards(pipeline: Any, prefix: str) -> Iterator[_Shard]:
    """Return all parameters and persistable buffers of this stage; a shared layer is described once."""
    positions = _positions_of(pipeline)
    for position in positions:
        if position.shared is None:
            yield from _of_layer(position, prefix)
            continue
        here = [other for other in positions if other.shared == position.shared]
        if here[0] is position:
            descs = {i: desc for i, desc in enumerate(pipeline._layers_desc) if _shared_name(desc) == position.shared}
            yield from _of_shared(here, descs, prefix)
    # Every stage has a subclass's own parameters.
    for key, weight in own_shards(pipeline, prefix).items():
        yield _beside(pipeline, key[len(prefix) :], weight)
    for name, layer in _layers_beside(pipeline, positions):
        for key, weight in describe_layer(layer, f"{prefix}{name}.").items():
            yield _beside(pipeline, key[len(prefix) :], weight)


def _beside(pipeline: Any, name: str, weight: Any) -> _Shard:
    return _Shard(weight, name, (), (name,), f"{name} of {type(pipeline).__name__}")


def _of_layer(position: _Position, prefix: str) -> Iterator[_Shard]:
    index = position.index
    for local, weight, tied in _parameters_of(position, prefix):
        aliases = tuple(f"{index}.{other}" for other in tied)
        names = tuple(f"{path}{local}" for path in position.paddle_prefixes)
        yield _Shard(weight, f"{index}.{local}", aliases, names, _origin(position, local), (index,))


def _of_shared(here: list[_Position], descs: Mapping[int, Any], prefix: str) -> Iterator[_Shard]:
    """Return the parameters of a shared layer: ``here`` are this stage's positions, ``descs`` all of them by index."""
    first = min(descs)
    has_first = here[0].index == first
    one_class = all(_builds(desc) is _builds(descs[first]) for desc in descs.values())
    # Paddle keeps equal the tensors that this stage's positions request, always some of those of the first position.
    requested = {attribute for position in here for attribute in _attributes(position.desc)}
    shared = [name for name in _attributes(descs[first]) if has_first or name in requested]
    paths = tuple(dict.fromkeys(path for position in here for path in position.paddle_prefixes))
    for local, weight, tied in _parameters_of(here[0], prefix):
        attribute = next((a for a in shared if getattr(here[0].layer, a, None) is weight.local_tensor), None)
        index = first if attribute is not None else here[0].index
        before = [i for i in descs if i < index]
        others = (*reversed(before), *(i for i in descs if i > index))
        named = (local,) if attribute is None or one_class else (attribute, local)
        aliases = tuple(f"{i}.{name}" for i in (index, *others) for name in (*named, *tied))
        paddle_names = tuple(f"{path}{local}" for path in paths)
        layers = tuple(descs) if attribute is not None else (index,)
        yield _Shard(weight, f"{index}.{named[0]}", aliases, paddle_names, _origin(here[0], local), layers)


def _parameters_of(position: _Position, prefix: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Return ``(name, shard, other names)`` of the layer's parameters; names are as in the layer."""
    path = f"{prefix}{position.index}."
    for key, weight in describe_layer(position.layer, path).items():
        if not key.startswith(path):
            raise ValueError(
                f"layer {position.index} ({type(position.layer).__name__}) gives the name {key!r}; expected one that "
                f"begins with the prefix {path!r} that it was asked for"
            )
        tied = tuple(other[len(path) :] for other in getattr(weight, "aliases", ()) if other.startswith(path))
        yield key[len(path) :], weight, tied


def _origin(position: _Position, local: str) -> str:
    return f"{local} of layer {position.index} ({type(position.layer).__name__})"


def _builds(desc: Any) -> Any:
    """Return the class from which a desc builds its layer, or the one in its LayerSpec."""
    return desc.layer_spec.layer if getattr(desc, "using_layer_spec", False) else desc.layer_func


def _attributes(desc: Any) -> list[str]:
    names = desc.shared_weight_attr
    return [names] if isinstance(names, str) else list(names)  # a string in Paddle 3.0


def _naming(pipeline: Any, method: Any) -> Callable[[_Shard], tuple[str, tuple[str, ...]]]:
    """Return the function that names a shard and its aliases: by the subclass's mapping, if it has one."""
    names = pipeline._get_pipeline_names()
    if names is not None:
        return partial(_by_number, names)
    if not hasattr(pipeline, "_pp_to_single_mapping"):
        return lambda shard: (shard.key, shard.aliases)
    mapping = pipeline._pp_to_single_mapping
    if mapping is None and hasattr(pipeline, "_set_pipeline_name_mapping"):
        pipeline._set_pipeline_name_mapping()  # PaddleNLP makes the mapping when it is first needed
        mapping = pipeline._pp_to_single_mapping
    mapping = mapping() if callable(mapping) else mapping
    if mapping is None:
        return lambda shard: (shard.key, shard.aliases)
    # A subclass that has its own sharded_state_dict beside the mapping applies it there (PaddleFormers' models do) to
    # Paddle's names, and has to get these.
    return partial(_by_paddle_name, mapping, type(pipeline).sharded_state_dict is not method)


def _by_number(names: Mapping[str, str], shard: _Shard) -> tuple[str, tuple[str, ...]]:
    if shard.key not in names:
        raise ValueError(f"_get_pipeline_names() has no name for {shard.key!r} ({shard.origin})")
    return names[shard.key], tuple(names[alias] for alias in shard.aliases if alias in names)


def _by_paddle_name(mapping: Mapping[str, str], applied_later: bool, shard: _Shard) -> tuple[str, tuple[str, ...]]:
    known = [name for name in shard.paddle_names if name in mapping]
    if not known and not applied_later:
        raise ValueError(f"_pp_to_single_mapping has no name for {' or '.join(shard.paddle_names)} ({shard.origin})")
    aliases = tuple(mapping[name] for name in known[1:])
    if applied_later:
        return (known or shard.paddle_names)[0], aliases
    return mapping[known[0]], aliases


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """A layer of this stage and its position in the pipeline's description."""

    index: int  # in the list of LayerDescs
    layer: Any
    desc: Any  # its entry in the list
    shared: str | None  # the name of the SharedLayerDesc
    paddle_prefixes: tuple[str, ...]  # the prefix of its parameters' names in Paddle's state_dict()


def _shared_name(desc: Any) -> str | None:
    """Return the name under which an entry of the description is shared between stages, if it is."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SharedLayerDesc

    return desc.layer_name if isinstance(desc, SharedLayerDesc) else None


def _positions_of(pipeline: Any) -> list[_Position]:
    """Return the layers of this stage in the order of the description; functions in it have no parameters."""
    positions = []
    for start, functions, chunked in _segments(pipeline):
        for local, function in enumerate(functions):
            index = start + local
            desc = pipeline._layers_desc[index]
            # With a forward_func, Paddle keeps partial(forward_func, layer).
            is_partial = isinstance(function, partial) and hasattr(desc, "forward_func") and function.args
            layer = function.args[0] if is_partial else function
            paths = (f"{start}.{local}." if chunked else f"{index}.",)
            name = _shared_name(desc)
            if name is not None:
                if name not in pipeline.shared_layers or pipeline.shared_layers[name] is not layer:
                    raise ValueError(
                        f"layer {index} of {type(pipeline).__name__}: expected the shared layer {name!r} in "
                        f"run_function; got {function!r}. {_REMEDY}"
                    )
                paths = (f"shared_layers.{name}.", *((*paths, f"{start}.{name}.") if chunked else ()))
            if hasattr(layer, "sharded_state_dict"):
                positions.append(_Position(index, layer, desc, name, paths))
    return positions


def _layers_beside(pipeline: Any, positions: Iterable[_Position]) -> Iterator[tuple[str, Any]]:
    """Return the sub-layers, with their names, that a subclass has besides the layers of the description."""
    kind = type(pipeline).__name__
    known = {id(position.layer) for position in positions}
    chunks = list(getattr(pipeline, "_model_chunks", ()))
    for chunk in chunks:
        known.update(id(function) for function in chunk.run_function if _grouped(function))
        lost = [name for name, layer in chunk._sub_layers.items() if id(layer) not in known]
        if lost:
            raise ValueError(f"sub-layers {lost} of a chunk of {kind} are not in its run_function. {_REMEDY}")
    containers = (pipeline.shared_layers, getattr(pipeline, "local_shared_layers", None))  # the latter from Paddle 3.1
    known.update(id(container) for container in (*chunks, *containers))
    for name, layer in pipeline._sub_layers.items():
        if layer is None or id(layer) in known:
            continue
        if name.isdigit():
            raise ValueError(f"sub-layer {name!r} of {kind} is not in its run_function. {_REMEDY}")
        yield name, layer


def _segments(pipeline: Any) -> Iterator[tuple[int, list[Any], bool]]:
    """Return ``(index of the first, functions, whether it is a chunk)`` of each part of the description held here."""
    kind = type(pipeline).__name__
    chunked = hasattr(pipeline, "_start_poss")  # virtual stages, or DualPipeV
    if chunked:
        runs = [chunk.run_function for chunk in pipeline._model_chunks]
        bounds = list(zip(pipeline._start_poss, pipeline._end_poss))
    elif hasattr(pipeline, "_start_pos"):
        runs, bounds = [pipeline.run_function], [(pipeline._start_pos, pipeline._end_pos)]
    else:
        raise ValueError(f"{kind} does not say which layers of its description it holds. {_REMEDY}")
    if len(runs) != len(bounds):
        raise ValueError(f"{kind} has {len(runs)} chunks for {len(bounds)} parts of its description. {_REMEDY}")
    for (start, end), run in zip(bounds, runs):
        functions = [each for function in run for each in (_grouped(function) or [function])]
        if len(functions) != end - start:
            raise ValueError(
                f"{kind} holds the layers from {start} to before {end} of its description: expected {end - start} "
                f"functions in run_function; got {len(functions)}. {_REMEDY}"
            )
        yield start, functions, chunked


def _grouped(function: Any) -> list[Any]:
    """Return the layers in a CUDAGraphedLayer, which Paddle makes of neighbours; none if it is another function."""
    group = getattr(getattr(function, "context", None), "layer", None)
    return list(getattr(group, "run_function", ()))
