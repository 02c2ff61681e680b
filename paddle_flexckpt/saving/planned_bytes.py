"""The bytes that a rank would write, before anything is written. Tested in tests/manager/test_memory_tier.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.memory.state import LocalState, open_state
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.planners import Planners, RankSummary
from paddle_flexckpt.saving.rank_inputs import RankInputs
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.transfer.agreement import check_heads


def plan_bytes(describe: Callable[[], Mapping[str, Any]], comm: Communicator, context: str) -> int:
    """Return the bytes of tensors that this rank would write of the shards that ``describe`` gives.

    No value is read. One collective; three more where planning is spread.

    Raises:
        ValidationError: The shards cannot be saved; the same on every rank, with the text of a save.
    """
    options = SaveOptions()

    def own() -> tuple[tuple[LocalState, RankInputs], bytes]:
        state = open_state(describe(), comm.rank)
        inputs = RankInputs(state, (), comm, options, options.encode("save_state_dict"), None, "", b"")
        return (state, inputs), inputs.full_message()

    (state, inputs), answers = comm.together(own, context)
    summaries = [RankSummary.decode(*each) for each in zip(*check_heads(answers, context, comm.ranks))]
    planners = Planners(comm, state.catalog, inputs.flags, summaries, context, "")
    planners.inspect()
    rows, policies = planners.rows, (planners.rows.flags >> 1).astype(np.uint8)
    replicas = Replicas(comm, {}, rows.catalog, planners.groups, policies, False, context)
    return planners.plan(replicas, None, False, 0).file.total_bytes
