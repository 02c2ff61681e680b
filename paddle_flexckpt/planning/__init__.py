"""Plans: which rank reads, writes or sends which pieces. Pure, deterministic functions from catalogs to columns.

Every rank that has the same catalogs computes the same plan, so a plan is never communicated.
"""

from paddle_flexckpt.planning.exchange_plan import ExchangePlan, ReadPlan, plan_exchange, plan_read
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher

__all__ = [
    "ExchangePlan",
    "Pieces",
    "ReadPlan",
    "ShardMatcher",
    "plan_exchange",
    "plan_read",
]
