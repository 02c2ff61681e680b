"""Virtual files: tensors in the ranks' memory that stand for the files of a checkpoint.

Tested in tests/load/test_reshard_files.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Order, Problem, ValidationError, concat
from paddle_flexckpt.catalog.metadata import catalog_from_metadata, lacks_global_shapes
from paddle_flexckpt.memory.state_names import order_of, state_names
from paddle_flexckpt.memory.tensor_memory import dtype_name, element_count
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.sharded_weight import is_sharded_weight


def gather_virtual_files(
    comm: Communicator,
    source_state_dict: Mapping[str, Mapping[str, Any]],
    metadata_list: Iterable[Any],
    targets: Callable[[], Catalog],
    context: str,
) -> Catalog:
    """Return the catalog of all ranks' files, each row with the rank that holds its file.

    ``source_state_dict`` has this rank's files, each with its tensors by name; ``targets`` returns this rank's targets,
    which have the global shapes that the metadata leaves out.

    Raises:
        ValidationError: The metadata does not describe what the ranks hold; the same on every rank.
    """
    metadata = list(metadata_list)
    if all(isinstance(entry, Catalog) for entry in metadata):
        return concat(metadata)

    def own() -> tuple[None, bytes]:
        shapes = {}
        if lacks_global_shapes(metadata):
            catalog = targets()
            shapes = {catalog.key_name(i): catalog.unpadded(i, catalog.global_shape) for i in range(len(catalog))}
        orders = _orders(source_state_dict, comm.rank)
        state = {key: value for tensors in source_state_dict.values() for key, value in tensors.items()}
        named = state_names(state, comm.rank, are_placed=True)
        if named.problems:
            raise ValidationError([*named.problems])
        return None, json.dumps([sorted(source_state_dict), shapes, orders, named.names]).encode()

    _, answers = comm.together(own, context)
    told = [json.loads(answer) for answer in answers]
    holders = {file: rank for rank, (files, *_) in zip(comm.ranks, told) for file in files}
    global_shapes = {key: shape for _, shapes, *_ in told for key, shape in shapes.items()}

    def build() -> tuple[Catalog, bytes]:
        files = {file for entry in metadata for file in entry.storage_metadata.values()}
        lost = sorted(files - set(holders))
        if lost:
            raise ValidationError([Problem("no rank holds a file that the metadata names", file=file) for file in lost])
        source = catalog_from_metadata(metadata, holders.__getitem__, global_shapes)
        # Metadata has no place for orders and names of states; the shards that it describes do.
        said = [({key: Order.decode(order) for key, order in orders}, names) for *_, orders, names in told]
        nothing = np.zeros(0, dtype=np.int64)
        known = (replace(source.with_orders(orders), state_names=_tuples(names)) for orders, names in said)
        source = concat([source, *(each.take(nothing) for each in known)])
        owned_tensors(source, source_state_dict, comm.rank, context)  # an error here has to be every rank's error
        return source, b""

    return comm.together(build, context)[0]


def _tuples(names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(each) for key, each in names.items()}


def _orders(source_state_dict: Mapping[str, Mapping[str, Any]], rank: int) -> list[tuple[str, Any]]:
    """Return keys and orders of the elements, as defined by ShardedWeights.

    Raises:
        ValidationError: A FusedAxis does not fit its tensor.
    """
    owned = ((key, value) for tensors in source_state_dict.values() for key, value in tensors.items())
    orders = [(key, order_of(key, value, rank)) for key, value in owned if is_sharded_weight(value)]
    problems = [order for _, order in orders if isinstance(order, Problem)]
    if problems:
        raise ValidationError(problems)
    return [(key, order.encode()) for key, order in orders if isinstance(order, Order)]


def owned_tensors(
    source: Catalog, source_state_dict: Mapping[str, Mapping[str, Any]], rank: int, context: str
) -> dict[int, Any]:
    """Return this rank's source tensors or ShardedWeights by row of the source catalog."""
    owned = {}
    size = source.size
    for row in np.flatnonzero(source.rank == rank).tolist():
        file, key = source.file_name(row), source.key_name(row)
        value: Any = source_state_dict.get(file or "", {}).get(key)
        tensor = value.local_tensor if is_sharded_weight(value) else value
        problem = None
        if tensor is None:
            problem = Problem("the metadata names a tensor that is not there", key=key, rank=rank, file=file)
        elif element_count(tensor) != size[row] or dtype_name(tensor) != source.dtype_name(row):
            problem = Problem(
                "a tensor is not what the metadata says",
                key=key,
                rank=rank,
                file=file,
                expected=source.describe(row),
                got=f"{dtype_name(tensor)} {list(tensor.shape)}",
            )
        if problem is not None:
            raise ValidationError([problem], context)
        owned[row] = value
    return owned
