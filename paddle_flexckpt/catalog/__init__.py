"""Catalogs: the shards of a state and their places, as numpy columns.

A catalog is the only description of a state that planning uses. A directory of files has one (its manifest), and so
has the memory of a running job.
"""

from paddle_flexckpt.catalog.builder import CatalogBuilder
from paddle_flexckpt.catalog.dtypes import DType, dtype_of
from paddle_flexckpt.catalog.errors import (
    AoaError,
    CheckpointError,
    CorruptCheckpointError,
    EngineError,
    EngineLostError,
    LostRankError,
    NotDurableError,
    Problem,
    UnreadableCheckpointError,
    UnsafePickleError,
    ValidationError,
)
from paddle_flexckpt.catalog.orders import CUT, NATURAL, Order
from paddle_flexckpt.catalog.table import (
    EXTRA_STATE,
    Catalog,
    check_extra_names,
    concat,
    may_be_fused,
    sound_fused,
    without_extra_state,
)
from paddle_flexckpt.catalog.validate import ReplicaGroups, group_replicas, validate_coverage, validate_shards

__all__ = [
    "CUT",
    "EXTRA_STATE",
    "NATURAL",
    "AoaError",
    "Catalog",
    "CatalogBuilder",
    "CheckpointError",
    "CorruptCheckpointError",
    "DType",
    "EngineError",
    "EngineLostError",
    "Order",
    "Problem",
    "ReplicaGroups",
    "LostRankError",
    "NotDurableError",
    "UnreadableCheckpointError",
    "UnsafePickleError",
    "ValidationError",
    "check_extra_names",
    "concat",
    "dtype_of",
    "group_replicas",
    "may_be_fused",
    "sound_fused",
    "validate_coverage",
    "validate_shards",
    "without_extra_state",
]
