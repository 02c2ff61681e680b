"""Serve ``dist.shard_optimizer``: each state by placements of its own, or as a range of a fused buffer.

Tested in tests/semi_auto/test_states.py.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.parallel.fully_shard import fused_tables
from paddle_flexckpt.parallel.optimizers import OverInstance, describe_states, names_by_tensor, require_described
from paddle_flexckpt.parallel.state_creation import create_states
from paddle_flexckpt.parallel.tensor_fusion import fused_pieces, trainable_parameters, uses_tensor_fusion
from paddle_flexckpt.sharded_weight import ShardedStateDict


class ShardOptimizerMixin:
    """Describe the optimizer that ``dist.shard_optimizer`` returns."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Paddle's state dict, and asking for it changes nothing.

        States that do not exist yet are created as the first step would create them. States that ``set_state_dict``
        was given and no step has taken over yet are returned as they were given.

        Returns:
            Names as Paddle makes them (``linear_0.w_0.dist_moment1_0``) to the live tensors; ``master_weights`` and
            ``LR_Scheduler`` as in Paddle.
        """
        # What set_state_dict was given: Paddle would look there for every state that is created, and fail.
        if not self._accumulators_holder:
            create_states(self)
        return self._inner_opt.state_dict()  # type: ignore[no-any-return]

    @OverInstance
    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the optimizer's state as shards, and change nothing but that missing states are created.

        Every state stands where its own placements put it, which under stages 1 and 2 is not where its parameter is.
        With tensor fusion a rank describes its ranges of the flattened parameters: before the first step already, for
        the buffers that it will make.

        Args:
            model_sharded_state_dict: The model's ``sharded_state_dict()``.

        Raises:
            ValueError: The optimizer has a parameter that the model's dict has not, or what its states are of cannot
                be told.
        """
        names = names_by_tensor(model_sharded_state_dict)
        parameters = trainable_parameters(self._param_groups)
        require_described(parameters, names)
        create_states(self)
        tables = fused_tables(self)
        if tables is not None:
            return describe_states(tables, model_sharded_state_dict, names, tables.ranges)
        ranges = None
        if uses_tensor_fusion(self):
            pieces = fused_pieces(self, parameters)
            ranges = {**{p.name: slice(0, 0) for p in parameters}, **{p.parameter.name: p.flat_range for p in pieces}}
        return describe_states(self._inner_opt, model_sharded_state_dict, names, ranges)
