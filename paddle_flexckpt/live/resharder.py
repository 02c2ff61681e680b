"""reshard_sharded_state_dict: live shards into another layout, through the same steps as a load, without a file.

Tested in tests/live/test_reshard_files.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from paddle_flexckpt.catalog import Catalog, concat
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.engine.agreement import check_coordinator, check_heads
from paddle_flexckpt.engine.options import GROUP, SHARDS, UNUSED, takes
from paddle_flexckpt.engine.transfer import Transfer
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.peers import MemoryPeers, ReshardOptions
from paddle_flexckpt.live.sources import check_sources
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.live.targets import describe_targets
from paddle_flexckpt.live.virtual_files import gather_virtual_files, owned_tensors
from paddle_flexckpt.report import LoadReport

_CONTEXT = "cannot reshard"


def virtual_file(rank: int) -> str:
    """Return the name of the virtual file that stands for a rank's memory."""
    return f"vfile_{rank}"


@takes(ReshardOptions, src_sharded_state_dict=SHARDS, dst_sharded_state_dict=SHARDS, process_group=GROUP)
def reshard_sharded_state_dict(
    src_sharded_state_dict: Mapping[str, Any],
    dst_sharded_state_dict: Mapping[str, Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> LoadReport:
    """Move live state from one layout to another, in memory.

    Every rank of the group calls this with the shards that it holds and the shards that it wants. What a rank has
    itself it copies; it receives exactly the bytes that it lacks.

    Args:
        src_sharded_state_dict: Names to the shards (or plain, replicated tensors) that this rank holds. All ranks'
            together have to be whole tensors.
        dst_sharded_state_dict: Names to the shards to fill, in place. They may not share memory with a source, unless
            source and target are the very same shard.
        process_group: The ranks that take part; all ranks of the job by default.
        **options: Like all other arguments, of :class:`ReshardOptions`.

    Returns:
        What was done; ``bytes_received`` are the bytes that this rank lacked.

    Raises:
        ValidationError: The two sides do not fit (on every rank, with the same text); no target was changed.
        CheckpointError: A rank failed during the exchange (likewise); targets are partly overwritten.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, aoa_config=aoa_config, **options)
    comm = communicator_for(process_group)
    mine = virtual_file(comm.rank)

    def describe() -> tuple[LocalState, bytes]:
        check_coordinator(comm, coordinator_rank)
        state = open_state(src_sharded_state_dict, comm.rank, mine)
        return state, join((asked.encode("reshard_sharded_state_dict"), encode_catalog(state.catalog)))

    state, answers = comm.together(describe, _CONTEXT)
    source = concat([decode_catalog(catalog) for catalog in check_heads(answers, _CONTEXT, comm.ranks)[0]])
    tensors = {
        key: tensor if weight is None else weight
        for key, weight, tensor in zip(state.catalog.keys, state.weights, state.tensors)
    }
    return _reshard(comm, dst_sharded_state_dict, source, {mine: tensors}, asked)


@takes(
    ReshardOptions,
    target_state_dict=SHARDS,
    source_state_dict=SHARDS,
    metadata_list="the catalog of all sources is made from it, and every later step depends on that",
    process_group=GROUP,
    worker_groups=UNUSED,
    comm_method=UNUSED,
)
def _load_state_dict(
    target_state_dict: Mapping[str, Any],
    source_state_dict: Mapping[str, Mapping[str, Any]],
    metadata_list: Iterable[Any],
    process_group: Any = None,
    coordinator_rank: int = 0,
    offload: bool = False,
    worker_groups: Any = None,
    comm_method: str = "direct",
    **options: Any,
) -> LoadReport:
    """Fill targets from (virtual) files whose tensors are in the ranks' memory.

    Args:
        target_state_dict: Names to the shards to fill.
        source_state_dict: For every file that this rank holds, its tensors (or ShardedWeights) by name.
        metadata_list: What all files of all ranks hold, the same on every rank: catalogs, or ``Metadata`` objects (of
            this library or of Paddle). Global shapes that they leave out are those of the targets.
        process_group: The ranks that take part.
        worker_groups: Accepted for compatibility.
        comm_method: Accepted for compatibility: tensors go straight from holder to receiver.
        **options: Like all other arguments, of :class:`ReshardOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: The two sides do not fit; no target was changed.
        CheckpointError: A rank failed during the exchange.
    """
    asked = ReshardOptions(coordinator_rank=coordinator_rank, offload=offload, **options)
    comm = communicator_for(process_group)

    def targets() -> Catalog:
        return open_state(target_state_dict, comm.rank).catalog

    source = gather_virtual_files(comm, source_state_dict, metadata_list, targets, _CONTEXT)
    return _reshard(comm, target_state_dict, source, source_state_dict, asked)


def _reshard(
    comm: Communicator,
    targets: Mapping[str, Any],
    source: Catalog,
    source_state_dict: Mapping[str, Mapping[str, Any]],
    options: ReshardOptions,
) -> LoadReport:
    """Fill targets from what all ranks hold together; arguments as of :func:`_load_state_dict`."""
    described = owned_tensors(source, source_state_dict, comm.rank, _CONTEXT)
    owned = {row: getattr(value, "local_tensor", value) for row, value in described.items()}
    peers = MemoryPeers(comm, source, check_sources(comm, owned, source, _CONTEXT), described, options, _CONTEXT)
    return Transfer(
        comm, peers, lambda: describe_targets(targets, comm.rank), options, "_load_state_dict", _CONTEXT
    ).run()
