"""One module per parallel API: the mixins that give it ``sharded_state_dict``, and ``install``."""

from paddle_flexckpt.parallel.aoa_statements import gen_aoa_statements
from paddle_flexckpt.parallel.experts import ExpertParallelMixin
from paddle_flexckpt.parallel.install import (
    init_optimizer_state,
    install,
    is_installed,
    optimizer_sharded_state_dict,
    uninstall,
)
from paddle_flexckpt.parallel.layers import ColumnParallelMixin, LayerMixin, RowParallelMixin, VocabParallelMixin
from paddle_flexckpt.parallel.optimizers import OptimizerMixin

__all__ = [
    "ColumnParallelMixin",
    "ExpertParallelMixin",
    "LayerMixin",
    "OptimizerMixin",
    "RowParallelMixin",
    "VocabParallelMixin",
    "gen_aoa_statements",
    "init_optimizer_state",
    "install",
    "is_installed",
    "optimizer_sharded_state_dict",
    "uninstall",
]
