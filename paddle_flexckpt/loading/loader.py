"""load_state_dict: a checkpoint directory into live shards, whatever the two layouts are.

Tested in tests/loading/test_loader.py and tests/loading/test_policies.py.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.direct_files import DirectFiles
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import is_remote, shown
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.options import GROUP, PATH, SHARDS, UNUSED, CommMethod, LoadOptions, takes
from paddle_flexckpt.transfer.source import Source
from paddle_flexckpt.transfer.transfer import Transfer

_CALL = "load_state_dict"


@takes(
    LoadOptions,
    state_dict=SHARDS,
    path=PATH,
    process_group=GROUP,
    offload=UNUSED,
    safetensors=UNUSED,
    worker_groups=UNUSED,
    num_workers=UNUSED,
)
@observed("load", "path")
def load_state_dict(
    state_dict: Mapping[str, Any],
    path: Location,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    worker_groups: Any = None,
    comm_method: CommMethod = "auto",
    load_transform: Any = None,
    num_workers: int = 1,
    **options: Any,
) -> LoadReport:
    """Fill live shards, in place, from a checkpoint that was saved under this or any other layout.

    ::

        state = {"weight": paddle.zeros([4, 2])}  # any part of the checkpoint, under any layout
        fc.load_state_dict(state, "run/shards", optimizer_states="ignore")
        turned = {"w": paddle.zeros([2, 4])}
        fc.load_state_dict(turned, "run/shards", aoa_config=["weight^T -> w"], optimizer_states="ignore")

    Every rank of the group calls this with its own targets. Everything is checked on all ranks before the first
    target is changed. Each rank then reads just the bytes that its targets need, each once; or the ranks read together
    (``comm_method``), so that storage is read once for all of them.

    Args:
        state_dict: Names to ShardedWeights (of this library or of Paddle) or tensors (taken as replicated), possibly
            nested. Their memory is written.
        path: The directory: a path, a URL, or what ``open_storage`` gives; of this library, Paddle's own,
            PaddleFormers, PaddleNLP (unified checkpoint) or Hugging Face. Or a safetensors file or index of these.
        process_group: The ranks that take part; all ranks of the job by default. ``"self"``: this rank alone, which has
            to hold everything (pure data parallelism, where one rank may save for all).
        offload: Accepted for compatibility: reading always goes through host memory, one tensor at a time.
        safetensors: Accepted for compatibility: data files are always safetensors files.
        worker_groups: Accepted for compatibility: the needs of the ranks decide which rank sends what.
        num_workers: Accepted for compatibility: the number of threads is chosen automatically.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.transfer.options.LoadOptions`.

    Returns:
        A report of the load.

    Raises:
        ValidationError: Path, keys, shapes or dtypes do not fit (on every rank, with the same text); no target was
            changed.
        CorruptCheckpointError: The checkpoint is damaged (on every rank, with the same text). Damage that only reading
            can find may leave targets partly overwritten; the text says so.
        UnreadableCheckpointError: The storage refused or failed; targets may be partly overwritten.
    """
    asked = LoadOptions(
        coordinator_rank=coordinator_rank,
        unique_id=unique_id,
        mw_name_compatibility=mw_name_compatibility,
        aoa_config=aoa_config,
        comm_method=comm_method,
        load_transform=load_transform,
        **options,
    )
    return _load(state_dict, path, process_group, asked)


def _load(state_dict: Mapping[str, Any], path: Location, process_group: Any, options: LoadOptions) -> LoadReport:
    """Load from files that all ranks see, or from those of nodes."""
    begin = time.perf_counter()
    comm = communicator_for(process_group)
    context = f"cannot load from {shown(path)}"
    if options.storage == "per_node":
        context = "cannot load from the nodes' directories"
    if options.load_transform is not None:
        from paddle_flexckpt.loading.dequant_transforms import with_statements

        options = with_statements(options, path, comm, context)
    describe = functools.partial(describe_targets, state_dict, comm.rank)

    def load_from(source: Source) -> LoadReport:
        return Transfer(comm, source, describe, options, _CALL, context, begin).run()

    if options.storage == "per_node" and options.load_transform is None:
        return _load_from_nodes(comm, path, options, context, load_from)
    return load_from(_shared_source(comm, path, options, context))


def _shared_source(comm: Communicator, path: Location, options: LoadOptions, context: str) -> Source:
    """Return the files of a checkpoint that all ranks see, as the source that the options ask for."""
    if options.load_transform is not None:
        from paddle_flexckpt.loading.transforms import TransformedFiles

        return TransformedFiles(path, options)
    if comm.size == 1:
        return DirectFiles(comm, path, options, context, "there is one rank")
    if options.reads == "direct":
        return DirectFiles(comm, path, options, context, "asked for")
    if options.reads == "auto" and not is_remote(path):
        reason = "auto: the host keeps what one rank has read of its file systems for the others"
        return DirectFiles(comm, path, options, context, reason)
    from paddle_flexckpt.loading.file_peers import FilePeers

    return FilePeers(comm, Files(path, options), options, context)


def _load_from_nodes(
    comm: Communicator, path: Location, options: LoadOptions, context: str, load_from: Callable[[Source], LoadReport]
) -> LoadReport:
    """Load from nodes that share no storage; where copies are damaged, try again with those of other nodes."""
    from paddle_flexckpt.loading.file_peers import FilePeers
    from paddle_flexckpt.loading.node_files import DamagedCopies, find_damaged_copies, find_nodes

    damaged: DamagedCopies = {}
    while True:
        found, locks = find_nodes(comm, path, options, _CALL, context, damaged)
        if found.everywhere:
            locks.close()
            source = _shared_source(comm, path, replace(options, unique_id=found.manifest.unique_id), context)
        else:
            source = FilePeers(comm, Files(path, options, found.manifest), options, context, found)
            source.closing.push(locks)
        try:
            return load_from(source)
        except (CorruptCheckpointError, UnreadableCheckpointError):
            # Every rank has the same error. If another node has an undamaged copy, the next try reads that.
            files = source.files if isinstance(source, FilePeers) else source
            if not options.use_replicas or not isinstance(files, Files):
                raise
            known, new = damaged, find_damaged_copies(comm, files, context)
            damaged = {place: known.get(place, frozenset()) | new.get(place, frozenset()) for place in {*known, *new}}
            if damaged == known:
                raise
