"""What the examples of ``docs/aoa.md`` call: arrays that are easy to recognise, and loads that print what they made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import Catalog, CheckpointError
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.aoa.layouts import catalog_of
from tests.aoa.small import shards_of
from tests.aoa.whole_system import quiet, states_of
from tests.ramdisk import memory_directory

Arrays = Mapping[str, np.ndarray]
# Axis and number of equal tensor-parallel parts, by key; other keys are whole.
Cuts = Mapping[str, "tuple[int, int]"]


def numbers(*shape: int, start: int = 0, dtype: str = "float32") -> np.ndarray:
    """The numbers from ``start`` on, in this shape."""
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(np.dtype(dtype))


def catalog(arrays: Arrays, cut: Cuts | None = None) -> Catalog:
    """A description of arrays, as ``fc.explain`` takes it."""
    return catalog_of(shards_of(arrays, cut or {}))


def apply(
    source: Arrays,
    *statements: str,
    to: Arrays | None = None,
    source_cut: Cuts | None = None,
    to_cut: Cuts | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Saves arrays, loads them with statements, and prints what was loaded, or the error.

    Args:
        source: Arrays by key.
        statements: The program.
        to: What the targets hold before the load; None takes what the statements make and leave of the source.
        source_cut: How source keys are cut.
        to_cut: How targets are cut.
        config: The whole ``aoa_config`` in place of statements.
        options: Further arguments of ``fc.load_state_dict``.
    """
    try:
        _, found = load(source, *statements, to=to, source_cut=source_cut, to_cut=to_cut, config=config, **options)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}")
        return
    for key in sorted(found):
        print(f"{key} = {written(found[key])}")


def load(
    source: Arrays,
    *statements: str,
    to: Arrays | None = None,
    source_cut: Cuts | None = None,
    to_cut: Cuts | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[LoadReport, dict[str, np.ndarray]]:
    """As :func:`apply`, but returns rank 0's report and the arrays."""
    config = config or {"aoa_statements": list(statements)}
    held = shards_of(source, source_cut or {})
    if to is None:
        mapping = compile_program(config, catalog_of(held), None)
        to = {key: np.zeros(mapping.tensors[key].shape, mapping.tensors[key].dtype) for key in mapping.outputs}
    wanted = shards_of(to, to_cut or {})
    with quiet(), memory_directory() as path:
        saved = states_of(held, [shard.of(source[shard.key]) for shard in held], 1 + max(s.rank for s in held))
        loaded = states_of(wanted, [shard.of(to[shard.key]) for shard in wanted], 1 + max(s.rank for s in wanted))
        try:
            SimulatedWorld(len(saved)).run(lambda comm: fc.save_state_dict(saved[comm.position], path, comm))
            reports = SimulatedWorld(len(loaded)).run(
                lambda comm: fc.load_state_dict(loaded[comm.position], path, comm, aoa_config=config, **options)
            )
        except CheckpointError as error:
            # Where examples save is nobody's business, and another place each time.
            error.args = (str(error).replace(str(path), "checkpoint"),)
            raise
    found = {key: array.copy() for key, array in to.items()}
    for shard in wanted:
        box = tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.shape))
        found[shard.key][box] = loaded[shard.rank][shard.key].local_tensor.reshape(shard.shape)
    return reports[0], found


def written(array: np.ndarray) -> str:
    """An array as a list, whole numbers without a point; its dtype is named if it is not float32."""
    values = array.astype(np.float64) if array.dtype.kind not in "biuc" else array
    text = str(_short(values.tolist())).replace("'", "")
    return text if array.dtype == np.float32 else f"{text} {array.dtype.name}"


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return int(value) if value == int(value) else float(f"{value:.6g}")
    return value
