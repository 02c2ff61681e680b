"""Find which layers of a pipeline's description a stage holds, and where each of them stands in it.

Tested in tests/parallel/test_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

_REMEDY = (
    "Remedy: leave _layers_desc and run_function as PipelineLayer made them, or override sharded_state_dict() in the "
    "subclass that changes them"
)


@dataclass(frozen=True)
class Position:
    """A layer of this stage and where it stands in the description.

    Attributes:
        index: Its number in the list of LayerDescs.
        layer: The layer.
        desc: Its entry in the list.
        shared: The name of the SharedLayerDesc, or None.
        paddle_prefixes: What Paddle's state_dict() puts in front of its parameters' names.
    """

    index: int
    layer: Any
    desc: Any
    shared: str | None
    paddle_prefixes: tuple[str, ...]


def shared_name(desc: Any) -> str | None:
    """Return the name under which an entry of the description is shared between stages, if it is."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SharedLayerDesc

    return desc.layer_name if isinstance(desc, SharedLayerDesc) else None


def positions_of(pipeline: Any) -> list[Position]:
    """Return the layers of this stage in the order of the description; functions in it have no parameters.

    Raises:
        ValueError: ``run_function`` is not what the description says.
    """
    positions = []
    for start, functions, chunked in _segments(pipeline):
        for local, function in enumerate(functions):
            index = start + local
            desc = pipeline._layers_desc[index]
            # With a forward_func, Paddle keeps partial(forward_func, layer).
            is_partial = isinstance(function, partial) and hasattr(desc, "forward_func") and function.args
            layer = function.args[0] if is_partial else function
            paths = (f"{start}.{local}." if chunked else f"{index}.",)
            name = shared_name(desc)
            if name is not None:
                if name not in pipeline.shared_layers or pipeline.shared_layers[name] is not layer:
                    raise ValueError(
                        f"layer {index} of {type(pipeline).__name__}: expected the shared layer {name!r} in "
                        f"run_function; got {function!r}. {_REMEDY}"
                    )
                paths = (f"shared_layers.{name}.", *((*paths, f"{start}.{name}.") if chunked else ()))
            if hasattr(layer, "sharded_state_dict"):
                positions.append(Position(index, layer, desc, name, paths))
    return positions


def layers_beside(pipeline: Any, positions: Iterable[Position]) -> Iterator[tuple[str, Any]]:
    """Return the sub-layers, with their names, that a subclass has besides the layers of the description.

    Raises:
        ValueError: A sub-layer that looks like one of the description is not in ``run_function``.
    """
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
    """Return the layers in a CUDAGraphedLayer, into which Paddle puts neighbours; none if it is something else."""
    group = getattr(getattr(function, "context", None), "layer", None)
    return list(getattr(group, "run_function", ()))
