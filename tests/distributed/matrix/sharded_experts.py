"""A mixture of experts whose optimizer is sharded: made, described, saved and loaded, not trained.

Groups are made by hand from where ranks stand, or are those of Paddle's own topology for experts.
"""

from __future__ import annotations

import numpy as np
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.sharding import group_sharded_parallel

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import test_experts as experts
from tests.distributed.matrix.strategies import BY_NAME, Strategy

# Paddle's order of axes where it has groups for experts; the others in the order that they have without.
_ORDER = ("pp", "moe_sharding", "sharding", "ep", "dp", "sep", "cp", "mp")


class ShardedExperts:
    """One strategy's model and optimizer."""

    def __init__(self, name: str, salt: str) -> None:
        fc.install()
        strategy = BY_NAME[name]
        group, alike = groups_of(strategy)
        hcg = fleet.get_hybrid_communicate_group()
        # Experts over all ranks of tensor parallelism are whole.
        degree = 1 if strategy.over == "tp" else strategy.mp
        self.net = experts.Net(group, salt, hcg.get_model_parallel_rank() if degree > 1 else 0, degree)
        for parameter in self.net.moe.experts.parameters():
            parameter.no_sync = True
            if strategy.split and alike is not None:
                parameter.color = {"color": "moe_expert", "group": alike}
        self.optimizer = experts.adamw(self.net)
        if strategy.level is None:
            self.optimizer = fleet.distributed_optimizer(self.optimizer)
        else:
            group = hcg.get_sharding_parallel_group()
            self.net, self.optimizer, _ = group_sharded_parallel(
                self.net, self.optimizer, strategy.level, group=group, segment_size=experts.SEGMENT
            )

    def state(self):
        """Model and optimizer as the library describes them."""
        model = self.net.sharded_state_dict()
        return {**model, **self.optimizer.sharded_state_dict(model)}

    def shards(self):
        """What to look at for the values of the state."""
        return self.state()

    def steps(self, first, last):
        raise NotImplementedError("sharded experts are only described here")


def groups_of(strategy: Strategy):
    """Initialise fleet; return the group that experts are spread over, and that of this rank's experts' color."""
    degrees = {"dp": strategy.dp, "pp": strategy.pp, "mp": strategy.mp, "sep": strategy.sep}
    degrees["sharding"] = strategy.sharding
    if strategy.over == "tp":
        sharing = strategy.world // strategy.experts
        own = {"ep_degree": strategy.experts, "moe_sharding_degree": sharing, "order": list(_ORDER)}
        hcg = cpu_world.init_fleet(**degrees, split_param=strategy.split, hybrid=own)
        return hcg.get_expert_parallel_group(), hcg.get_moe_sharding_parallel_group()
    cpu_world.init_fleet(**degrees, split_param=strategy.split)
    if strategy.experts == 1:
        return None, None
    axes = (strategy.dp, strategy.pp, strategy.sharding, strategy.sep, strategy.mp)
    dp, pp, sharding, sep, mp = np.unravel_index(np.arange(strategy.world), axes)
    line = dp if strategy.over == "dp" else dp * strategy.sharding + sharding
    others = [pp, sep, mp, *([sharding] if strategy.over == "dp" else [])]
    spread = _group_by([*others, line // strategy.experts])
    if strategy.over == "dp":
        return spread, None
    return spread, _group_by([pp, sep, mp, dp, line % strategy.experts])


def _group_by(columns: list[np.ndarray]):
    """Return this rank's group among ranks that are the same in these columns; all ranks make all groups."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, values in enumerate(zip(*(column.tolist() for column in columns))):
        members.setdefault(values, []).append(rank)
    made = [dist.new_group(ranks) for ranks in members.values()]
    return next(group for group, ranks in zip(made, members.values()) if dist.get_rank() in ranks)
