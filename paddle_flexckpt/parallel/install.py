"""Give Paddle's classes the methods of the mixins, and remove them again.

Optimizers whose overlap is switched on are registered: their steps leave parameters stale until the next forward.

Tested in tests/parallel/test_install.py and tests/distributed/test_overlaps.py.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from paddle_flexckpt.communication.group_communicators import announce_rank
from paddle_flexckpt.overlaps import note_overlap
from paddle_flexckpt.parallel.experts import ExpertParallelMixin, MoELayerMixin
from paddle_flexckpt.parallel.layers import (
    ColumnParallelMixin,
    LayerMixin,
    RowParallelMixin,
    Stage3OffloadMixin,
    VocabParallelMixin,
    WrapperMixin,
)
from paddle_flexckpt.parallel.optimizers import (
    LBFGSMixin,
    LookAheadMixin,
    MixPrecisionMixin,
    OptimizerMixin,
    OverInstance,
    describe_optimizer,
)
from paddle_flexckpt.parallel.pipeline import PipelineLayerMixin
from paddle_flexckpt.parallel.semi_auto import (
    DistModelMixin,
    ScalerMixin,
    ShardOptimizerMixin,
    unscales_missing_gradients,
)
from paddle_flexckpt.parallel.sharding import (
    MuonShardingMixin,
    ShardingStage2Mixin,
    ShardingV1Mixin,
    ShardingV2Mixin,
)
from paddle_flexckpt.parallel.tensor_fusion import TensorFusionMixin
from paddle_flexckpt.sharded_weight import ShardedStateDict
from paddle_flexckpt.undo import Undo


class GatherOverlapMixin:
    """Registration of a sharding V2 optimizer, when Paddle lets it gather its buffers during the next forward."""

    def _set_all_gather_overlap_forward(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__set_all_gather_overlap_forward(*arguments, **named)


class BroadcastOverlapMixin:
    """Registration of a sharding V1 or stage 2 optimizer, when Paddle lets it broadcast during the next forward."""

    def _set_broadcast_overlap(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__set_broadcast_overlap(*arguments, **named)


class StorageOverlapMixin:
    """Registration of a semi-automatic optimizer with tensor fusion, when Paddle switches on its overlap."""

    def _enable_sharding_overlap(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__enable_sharding_overlap(*arguments, **named)


def overlap_mixins(owner: type) -> tuple[type, ...]:
    """Return the mixins for the overlaps of a class of Paddle's, in this version of Paddle."""
    kinds = (GatherOverlapMixin, BroadcastOverlapMixin, StorageOverlapMixin)
    return tuple(kind for kind in kinds if any(name in vars(owner) for name in vars(kind) if not name.startswith("__")))


def register_earlier(owners: list[type]) -> None:
    """Register the optimizers of these classes that were made before ``install()``."""
    found = [each for each in gc.get_referrers(*owners) if type(each) in owners]
    for optimizer in sorted(found, key=_first_name):  # in the same order on all ranks
        note_overlap(optimizer)


def _first_name(optimizer: Any) -> str:
    names = [getattr(entry, "name", None) for entry in vars(optimizer).get("_parameter_list", ())]
    return min(filter(None, names), default="")


# A class's own method stays reachable under this prefix of its whole name: ``_x`` becomes ``_paddle__x``.
_PADDLES = "_paddle_"
_changes = Undo()


def _assignments() -> list[tuple[type, tuple[type, ...]]]:
    """Return Paddle's classes and the mixins that each of them gets."""
    import paddle
    from paddle.distributed.auto_parallel import api as semi_auto
    from paddle.distributed.fleet.layers.mpu import mp_layers
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer as sharding_v1_v2
    from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import PipelineLayer
    from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2 as stage2
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
    from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence_parallel
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
    from paddle.incubate import optimizer as incubate
    from paddle.incubate.distributed.models.moe import MoELayer

    # The method came with Paddle 3.1.
    fusion = (TensorFusionMixin,) if hasattr(semi_auto._ShardOptimizer, "_tensor_fusion") else ()
    return [
        (paddle.nn.Layer, (LayerMixin,)),
        # These have a sharded_state_dict of their own in some versions of Paddle: it gets Layer's, with rules.
        (mp_layers.VocabParallelEmbedding, (LayerMixin, VocabParallelMixin)),
        (mp_layers.ColumnParallelLinear, (LayerMixin, ColumnParallelMixin)),
        (mp_layers.RowParallelLinear, (LayerMixin, RowParallelMixin)),
        (sequence_parallel.ColumnSequenceParallelLinear, (LayerMixin, ColumnParallelMixin)),
        (sequence_parallel.RowSequenceParallelLinear, (LayerMixin, RowParallelMixin)),
        (PipelineLayer, (PipelineLayerMixin,)),
        (MoELayer, (ExpertParallelMixin, MoELayerMixin)),
        *((wrapper, (WrapperMixin,)) for wrapper in (MetaParallelBase, paddle.DataParallel, MixPrecisionLayer)),
        *((wrapper, (WrapperMixin,)) for wrapper in (GroupShardedStage2, *_fully_shard())),
        (GroupShardedStage3, (WrapperMixin, Stage3OffloadMixin)),
        (MixPrecisionOptimizer, (MixPrecisionMixin,)),
        (paddle.optimizer.Optimizer, (OptimizerMixin,)),
        # In some versions of Paddle these have a method of their own, which would override Optimizer's.
        (paddle.optimizer.AdamW, (OptimizerMixin,)),
        (paddle.optimizer.LBFGS, (LBFGSMixin,)),
        # Deprecated: the public name is a function that warns.
        (inspect.unwrap(incubate.LBFGS), (LBFGSMixin,)),  # type: ignore[list-item]
        (incubate.LookAhead, (LookAheadMixin,)),
        (sharding_v1_v2.DygraphShardingOptimizer, (ShardingV1Mixin,)),
        (sharding_v1_v2.DygraphShardingOptimizerV2, (ShardingV2Mixin,)),
        (stage2.GroupShardedOptimizerStage2, (ShardingStage2Mixin,)),
        *_muon(),
        (semi_auto._ShardOptimizer, (ShardOptimizerMixin, *fusion)),
        (semi_auto.DistModel, (DistModelMixin,)),
        *(((paddle.amp.AmpScaler, (ScalerMixin,)),) if unscales_missing_gradients(paddle.__version__) else ()),
    ]


def _fully_shard() -> tuple[type, ...]:
    """Return the wrapper of ``fully_shard`` without a process mesh, which came with Paddle 3.3."""
    try:
        from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_fully_shard import FullyShard
    except ImportError:
        return ()
    return (FullyShard,)


def _muon() -> list[tuple[type, tuple[type, ...]]]:
    """Return Muon and the optimizer that shards it, which came after Paddle 3.3; both have a method of their own."""
    try:
        from paddle.distributed.fleet.meta_optimizers.muon_sharding_optimizer import MuonShardingOptimizer
        from paddle.optimizer.muon import Muon
    except ImportError:
        return []
    return [(Muon, (OptimizerMixin,)), (MuonShardingOptimizer, (MuonShardingMixin,))]


def install() -> None:
    """Give ``sharded_state_dict`` to Paddle's layers and optimizers; other ranks notice from now on if this one dies.

    Calling it again does nothing. A method that Paddle has already stays reachable with ``_paddle_`` in front, e.g.
    ``layer._paddle_sharded_state_dict()``; :func:`uninstall` puts it back.
    """
    announce_rank()
    if is_installed():
        return
    overlapping = []
    for owner, mixins in _assignments():
        overlaps = overlap_mixins(owner)
        overlapping += [owner] if overlaps else []
        mixins += overlaps
        members = {name: member for mixin in mixins for name, member in vars(mixin).items()}
        for name, member in members.items():
            if isinstance(member, (FunctionType, OverInstance)):
                if name in vars(owner):
                    _changes.set(owner, _PADDLES + name, vars(owner)[name])
                _changes.set(owner, name, member)
    register_earlier(overlapping)


def uninstall() -> None:
    """Undo :func:`install`; Paddle is as before."""
    _changes.put_back()


def is_installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return bool(_changes)


def optimizer_sharded_state_dict(optimizer: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Describe the state of an optimizer, whatever wraps it; ``install()`` is in effect from then on.

    Args:
        optimizer: An optimizer, or a wrapper that forwards its attributes or has the optimizer under a usual name.
        model_sharded_state_dict: The model's ``sharded_state_dict()``.

    Raises:
        ValueError: No optimizer is found, or it cannot be described. Or it is a class of Paddle's that
            ``install()`` does not know, with a method of its own.
    """
    install()
    return describe_optimizer(optimizer, model_sharded_state_dict)


def init_optimizer_state(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict, catalog: Any = None
) -> ShardedStateDict:
    """Create the state that the first step would create, so that a fresh job can load all of it.

    ``optimizer.sharded_state_dict()`` does this too; with a catalog the result has only a checkpoint's states.

    Args:
        optimizer: An optimizer of any kind that ``install()`` serves; it is in effect from then on.
        model_sharded_state_dict: The model's ``sharded_state_dict()``.
        catalog: The names that a checkpoint has: its catalog, a dict by name, or any collection of names. States of a
            parameter of which it has no state at all (frozen or unused when it was saved) are left out of the result;
            if it has some, the result has all of them, so that a load reports the missing ones.

    Returns:
        The optimizer's state, to be loaded.

    Raises:
        ValueError: As :func:`optimizer_sharded_state_dict`.
    """
    state = optimizer_sharded_state_dict(optimizer, model_sharded_state_dict)
    if catalog is None:
        return state
    names = catalog if isinstance(catalog, Mapping) else getattr(catalog, "keys", catalog)
    parameters = {name.rpartition(".")[0] for name in names}
    return {
        key: weight
        for key, weight in state.items()
        if any(name.rpartition(".")[0] in parameters for name in (key, *weight.aliases))
    }
