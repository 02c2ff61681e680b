"""The in-tree FlexCheckpoint's metadata classes, by name and field, and their way into a catalog.

They hold one Python object per shard, so this library does not use them itself; it accepts them where the in-tree
functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.catalog.builder import CatalogBuilder
from paddle_flexckpt.catalog.errors import ValidationError
from paddle_flexckpt.catalog.table import Catalog, concat


@dataclass(frozen=True)
class LocalTensorMetadata:
    """One distinct shard of a tensor."""

    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...] | None = None
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalTensorIndex:
    """The name of a shard in ``Metadata.storage_metadata``."""

    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None
    local_shape: tuple[int, ...] | None = None


@dataclass
class Metadata:
    """All shards of a state (``state_dict_metadata``) and the file of each (``storage_metadata``)."""

    state_dict_metadata: dict[str, list[LocalTensorMetadata]] = field(default_factory=dict)
    storage_metadata: dict[LocalTensorIndex, str] = field(default_factory=dict)
    flat_mapping: dict[str, tuple[str, ...]] | None = None


def _flat_range(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, slice):
        return int(value.start), int(value.stop)
    return int(value[0]), int(value[1])


def lacks_global_shapes(metadata_list: Iterable[Any]) -> bool:
    """Return whether some shard of ``Metadata`` objects has no global shape, which older callers leave out."""
    shards = (shard for metadata in metadata_list for each in metadata.state_dict_metadata.values() for shard in each)
    return any(getattr(shard, "global_shape", None) is None for shard in shards)


def catalog_from_metadata(
    metadata_list: Iterable[Any],
    rank_of_file: Callable[[str], int],
    global_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Catalog:
    """Build a catalog from ``Metadata`` objects (ours or the in-tree ones).

    Args:
        metadata_list: Objects with the fields of :class:`Metadata`.
        rank_of_file: Returns the rank that holds a file.
        global_shapes: Global shapes by key, for shards without one.

    Raises:
        ValidationError: An index has no matching shard, or a shard's global shape is not known.
    """
    known = global_shapes or {}
    builders: dict[str, CatalogBuilder] = {}
    problems: list[str] = []
    for metadata in metadata_list:
        shards_at: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        for key, shards in metadata.state_dict_metadata.items():
            for shard in shards:
                shards_at.setdefault((key, tuple(shard.global_offset)), []).append(shard)
        for index, file in metadata.storage_metadata.items():
            wanted = _flat_range(index.flattened_range)
            matches = [
                shard
                for shard in shards_at.get((index.tensor_key, tuple(index.global_offset)), [])
                # Older writers left local_shape and flattened_range out of the index: None matches any shard.
                if (index.local_shape is None or tuple(shard.local_shape) == tuple(index.local_shape))
                and (wanted is None or _flat_range(shard.flattened_range) == wanted)
            ]
            distinct = {(tuple(s.local_shape), _flat_range(s.flattened_range), str(s.dtype)) for s in matches}
            if len(distinct) != 1:
                problems.append(f"metadata of key {index.tensor_key!r} has {len(distinct)} shards for index {index}")
                continue
            shard = matches[0]
            global_shape = known.get(index.tensor_key) if shard.global_shape is None else shard.global_shape
            if global_shape is None:
                problems.append(
                    f"metadata of key {index.tensor_key!r} has no global shape, and no target of that key tells it. "
                    "Remedy (FC205): give LocalTensorMetadata its global_shape"
                )
                continue
            builder = builders.setdefault(file, CatalogBuilder(rank_of_file(file), file))
            builder.add(
                index.tensor_key,
                shard.dtype,
                global_shape,
                shard.global_offset,
                shard.local_shape,
                _flat_range(shard.flattened_range),
            )
    if problems:
        raise ValidationError(problems, "metadata is not usable")
    return concat([builder.build() for builder in builders.values()])
