"""Flexible distributed checkpoints for PaddlePaddle: saved under one parallel layout, loaded under any other.

Importing this package imports neither Paddle nor numpy; each public name loads its module when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddle_flexckpt._version import __version__

if TYPE_CHECKING:
    from paddle_flexckpt.aoa.invert import invert
    from paddle_flexckpt.aoa.model_rules import model_rules
    from paddle_flexckpt.background.pending import SaveHandle
    from paddle_flexckpt.background.writer import BackgroundWriter
    from paddle_flexckpt.catalog import (
        CheckpointError,
        CorruptCheckpointError,
        EngineError,
        EngineLostError,
        LostRankError,
        UnreadableCheckpointError,
        ValidationError,
    )
    from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
    from paddle_flexckpt.data import ElasticBatchSampler, ElasticStream
    from paddle_flexckpt.dist_tensor import compute_local_shape_and_global_offset
    from paddle_flexckpt.loading.fastdeploy_snapshots import publish_fastdeploy
    from paddle_flexckpt.loading.full_param import full_param
    from paddle_flexckpt.loading.loader import load_state_dict
    from paddle_flexckpt.loading.merged import load_merged_state_dict, merge_sharded_state_dict
    from paddle_flexckpt.loading.publishing import publish
    from paddle_flexckpt.loading.resharder import _load_state_dict, plan_reshard, reshard_sharded_state_dict
    from paddle_flexckpt.loading.state_digests import digest
    from paddle_flexckpt.loading.weight_channel import WeightChannel
    from paddle_flexckpt.loading.weight_publisher import WeightPublisher
    from paddle_flexckpt.manager import (
        CheckpointManager,
        KeepBest,
        KeepEvery,
        KeepInterval,
        KeepLatest,
        MemoryTier,
        SaveEvery,
        SaveInterval,
        check,
    )
    from paddle_flexckpt.manager.whole_run import load, save
    from paddle_flexckpt.media.opening import open_storage
    from paddle_flexckpt.memory.state import flatten_state_dict, unflatten_state_dict
    from paddle_flexckpt.memory.state_statements import explain, plain_state_statements
    from paddle_flexckpt.memory.tensors import assign_sharded_slice
    from paddle_flexckpt.native.directory import latest, list_checkpoints
    from paddle_flexckpt.observers import observe
    from paddle_flexckpt.parallel.aoa_statements import gen_aoa_statements
    from paddle_flexckpt.parallel.experts import ExpertParallelMixin
    from paddle_flexckpt.parallel.install import (
        init_optimizer_state,
        install,
        optimizer_sharded_state_dict,
        uninstall,
    )
    from paddle_flexckpt.parallel.live_rehearsal import rehearse
    from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
    from paddle_flexckpt.saving.saver import save_state_dict
    from paddle_flexckpt.sharded_weight import (
        FusedAxis,
        ShardedStateDict,
        ShardedTensor,
        ShardedWeight,
        ShardedWeightDesc,
        build_shard_desc,
        build_sharded_state_dict,
        create_sharded_weight_with_new_local,
        is_sharded_state_dict,
        make_replicated_sharded_tensor,
        make_replicated_sharded_weight,
        make_tp_sharded_tensor_for_checkpoint,
        make_tp_sharded_weight_for_checkpoint,
        merge_shard_info_list,
        shard_weight,
    )
    from paddle_flexckpt.tools.comparison import diff
    from paddle_flexckpt.tools.conversion import convert_checkpoint
    from paddle_flexckpt.tools.export import export_safetensors
    from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint

# Public names by subject, and by the module that has them. ``dir()`` lists all but those of the last subject.
SUBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "The state of a run": {
        "manager.whole_run": ("load", "save"),
        "data": ("ElasticBatchSampler", "ElasticStream"),
        "manager": (
            "CheckpointManager",
            "KeepBest",
            "KeepEvery",
            "KeepInterval",
            "KeepLatest",
            "MemoryTier",
            "SaveEvery",
            "SaveInterval",
            "check",
        ),
        "run_state": ("collect_extra_state", "load_extra_state", "restore_extra_state"),
    },
    "Shards": {
        "saving.saver": ("save_state_dict",),
        "loading.loader": ("load_state_dict",),
        "loading.resharder": ("plan_reshard", "reshard_sharded_state_dict"),
        "background.pending": ("SaveHandle",),
        "background.writer": ("BackgroundWriter",),
        "parallel.experts": ("ExpertParallelMixin",),
        "parallel.install": ("init_optimizer_state", "install", "optimizer_sharded_state_dict", "uninstall"),
        "sharded_weight": ("FusedAxis", "ShardedWeight"),
    },
    "Whole tensors, for others": {
        "loading.fastdeploy_snapshots": ("publish_fastdeploy",),
        "loading.full_param": ("full_param",),
        "loading.merged": ("load_merged_state_dict", "merge_sharded_state_dict"),
        "loading.publishing": ("publish",),
        "loading.weight_channel": ("WeightChannel",),
        "loading.weight_publisher": ("WeightPublisher",),
        "tools.conversion": ("convert_checkpoint",),
        "tools.export": ("export_safetensors",),
    },
    "Statements": {
        "aoa.invert": ("invert",),
        "aoa.model_rules": ("model_rules",),
        "memory.state_statements": ("explain", "plain_state_statements"),
        "parallel.aoa_statements": ("gen_aoa_statements",),
    },
    "Checkpoints at hand": {
        "parallel.live_rehearsal": ("rehearse",),
        "loading.state_digests": ("digest",),
        "media.opening": ("open_storage",),
        "native.directory": ("latest", "list_checkpoints"),
        "observers": ("observe",),
        "tools.comparison": ("diff",),
        "tools.verification": ("repair_manifest", "verify_checkpoint"),
    },
    "Errors": {
        "catalog": (
            "CheckpointError",
            "CorruptCheckpointError",
            "EngineError",
            "EngineLostError",
            "LostRankError",
            "UnreadableCheckpointError",
            "ValidationError",
        ),
    },
    "Names that Paddle has too": {
        "catalog.metadata": ("LocalTensorIndex", "LocalTensorMetadata", "Metadata"),
        "dist_tensor": ("compute_local_shape_and_global_offset",),
        "loading.resharder": ("_load_state_dict",),
        "memory.state": ("flatten_state_dict", "unflatten_state_dict"),
        "memory.tensors": ("assign_sharded_slice",),
        "sharded_weight": (
            "ShardedStateDict",
            "ShardedTensor",
            "ShardedWeightDesc",
            "build_shard_desc",
            "build_sharded_state_dict",
            "create_sharded_weight_with_new_local",
            "is_sharded_state_dict",
            "make_replicated_sharded_tensor",
            "make_replicated_sharded_weight",
            "make_tp_sharded_tensor_for_checkpoint",
            "make_tp_sharded_weight_for_checkpoint",
            "merge_shard_info_list",
            "shard_weight",
        ),
    },
}
_OF_PADDLE = frozenset(name for names in SUBJECTS["Names that Paddle has too"].values() for name in names)
_HOME = {name: module for modules in SUBJECTS.values() for module, names in modules.items() for name in names}
# Names that were public here once, and where they are now.
_MOVED = {
    "algebra": (
        "balanced_split",
        "flat_range_in_min_slice",
        "get_overlap_region",
        "minimal_nd_slice",
        "ravel_index",
        "unravel_index",
    ),
    "aoa": ("AoaError",),
    "aoa.model_rules": ("rule_names",),
    "catalog": ("UnsafePickleError",),
    "manager": ("RestoreReport",),
    "native.directory": ("CheckpointInfo", "is_complete"),
    "parallel.install": ("is_installed",),
    "report": ("ExportReport", "LoadReport", "RepairReport", "SaveReport", "VerifyReport"),
    "run_state": ("ExtraStateReport",),
}

# Names of Paddle's own that have no function here, and what does their work.
_INSTEAD = {
    "AOAShardInfoContext": "explain() says which shards a program reads and makes",
    "_modify_mw_name_for_compatibility": "load_state_dict(mw_name_compatibility=True), the default, finds such keys",
    "check_dst_state_dict_validity": "load_state_dict() and reshard_sharded_state_dict() check their targets",
    "check_src_dst_state_dict_validity": "load_state_dict() and reshard_sharded_state_dict() compare both sides",
    "check_src_state_dict_validity": "save_state_dict() and reshard_sharded_state_dict() check their sources, "
    "and check() without saving",
    "get_rank_to_files": "load_state_dict(comm_method=..., storage=...) finds out which rank sees and reads what",
    "load_state_dict_metadata": "explain() and list_checkpoints() read what a checkpoint has, and Paddle's own "
    "function the .metadata file of a save",
}

__all__ = sorted(["__version__", *(_HOME.keys() - _OF_PADDLE)])


def __getattr__(name: str) -> Any:
    if name == "data":  # a room whose names users also write as fc.data.ElasticStream
        return importlib.import_module(f"{__name__}.data")
    if name not in _HOME:
        moved = [f"; it is in {__name__}.{module}" for module, names in _MOVED.items() if name in names]
        instead = [f": {_INSTEAD[name]}"] if name in _INSTEAD else []
        told = "".join([*moved, *instead]) or ("" if name.startswith("_") else _nearest(name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def _nearest(name: str) -> str:
    import difflib  # for messages alone

    return "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, __all__, 1))


def __dir__() -> list[str]:
    return __all__
