"""Digest live states, to compare a trainer, a checkpoint and an inference engine.

Tested in tests/loading/test_state_digests.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import AoaConfig, TensorInfo
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, concat
from paddle_flexckpt.catalog.validate import row_boxes
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.memory.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.memory.sources import check_layout
from paddle_flexckpt.memory.state import LocalState, open_state
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.tools.digests import box_sums, digest_checkpoint, digest_of
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.options import GROUP, SHARDS, same_on_all_ranks

_CONTEXT = "cannot digest the state"
_ONE_READS = "it is of a checkpoint, which one process reads alone"


@same_on_all_ranks(source=SHARDS, process_group=GROUP, unique_id=_ONE_READS, aoa_config=_ONE_READS)
def digest(
    source: Location | Mapping[str, Any],
    process_group: Any = None,
    *,
    unique_id: int | None = None,
    aoa_config: AoaConfig | None = None,
) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint or of live state, the same in every layout and format.

    This process alone reads a checkpoint (:func:`~paddle_flexckpt.tools.digests.digest_checkpoint`). Every rank of the
    group calls this with its own shards of a live state (:func:`digest_state_dict`).

    Args:
        source: A checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file. Or names
            to shards, as of :func:`~paddle_flexckpt.saving.saver.save_state_dict`.
        process_group: Of live state: the ranks that take part; all ranks of the job by default.
        unique_id: Of a checkpoint: its id there; None takes the highest.
        aoa_config: Of a checkpoint: AOA statements; the digests are then of the tensors that they make or leave
            unchanged.

    Returns:
        32 hexadecimal digits by key.

    Raises:
        ValidationError: There is no such checkpoint, the statements do not fit, the shards do not make whole tensors,
            or an argument does not go with the source.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    of_files, of_state = {"unique_id": unique_id, "aoa_config": aoa_config}, {"process_group": process_group}
    live = isinstance(source, Mapping)
    wrong = [name for name, value in (of_files if live else of_state).items() if value is not None]
    if wrong:
        raise ValidationError(
            [f"digest takes no {' and no '.join(wrong)} of {'live state' if live else 'a checkpoint'}"]
        )
    if isinstance(source, Mapping):
        return digest_state_dict(source, process_group)
    return digest_checkpoint(source, unique_id, aoa_config)


def digest_state_dict(state_dict: Mapping[str, Any], process_group: Any = None) -> dict[str, str]:
    """Return a digest of each tensor of a distributed state, which does not depend on how it is cut.

    Every rank of the group calls this with its own shards. The digests equal those of
    :func:`~paddle_flexckpt.tools.digests.digest_checkpoint` for a checkpoint of the state. Each rank reads, one at a
    time, the shards of which it is the first to hold a replica; two collectives.

    Args:
        state_dict: As of :func:`~paddle_flexckpt.saving.saver.save_state_dict`.
        process_group: The ranks that take part; all ranks of the job by default.

    Returns:
        32 hexadecimal digits by key; the same on every rank. Replicas are not compared.

    Raises:
        ValidationError: The shards do not make whole tensors, overlap without being replicas, or are fused and not in
            natural order (on every rank, with the same text).
    """
    comm = communicator_for(process_group)

    def describe() -> tuple[LocalState, bytes]:
        state = open_state(state_dict, comm.rank)
        wait_for_devices(devices_of(state.tensors))
        return state, join((json.dumps({"call": "digest_state_dict"}).encode(), encode_catalog(state.catalog)))

    state, answers = comm.together(describe, _CONTEXT)
    catalog = concat([decode_catalog(each) for each in check_heads(answers, _CONTEXT, comm.ranks)[0]])
    checked = check_layout(catalog, _CONTEXT)
    _check_digestible(catalog, checked.coverage.overlaps)
    first = checked.groups.first
    owned = first[(catalog.rank[first] == comm.rank) & (catalog.size[first] > 0)]
    begin = int(np.argmax(catalog.rank == comm.rank)) if len(state.tensors) else 0

    def add_up() -> tuple[None, bytes]:
        sums = np.zeros((len(catalog.keys), 2), dtype=np.uint64)
        part, offset, shape = row_boxes(catalog, owned)
        order = np.argsort(part, kind="stable")
        # Laid end to end, the boxes of a shard are its elements in order.
        of_row = np.split(order, np.searchsorted(part[order], np.arange(1, len(owned)))) if len(owned) else []
        for row, boxes in zip(owned.tolist(), of_row):
            array, done = HostTensor(state.tensors[row - begin]).array, 0
            whole = tuple(catalog.global_shape[row].tolist())
            for low, extents in zip(offset[boxes].tolist(), shape[boxes].tolist()):
                size = math.prod(extents)
                values = array[done : done + size]
                sums[catalog.key[row]] += box_sums(values, tuple(low), tuple(extents), whole)
                done += size
        return None, sums.tobytes()

    _, answers = comm.together(add_up, _CONTEXT)
    sums = np.add.reduce([np.frombuffer(each, dtype=np.uint64).reshape(-1, 2) for each in answers])
    keys, rows = np.unique(catalog.key, return_index=True)
    return {
        catalog.keys[key]: digest_of(
            TensorInfo(catalog.unpadded(row, catalog.global_shape), catalog.dtype_name(row)), sums[key]
        )
        for key, row in sorted(zip(keys.tolist(), rows.tolist()), key=lambda pair: catalog.keys[pair[0]])
    }


def _check_digestible(catalog: Catalog, overlaps: list[tuple[int, int]]) -> None:
    """Raise ValidationError where elements would count twice, or lie in another order than in a checkpoint."""
    problems = [
        Problem(
            "shards overlap without being replicas",
            key=catalog.key_name(one),
            rank=int(catalog.rank[other]),
            got=f"{catalog.describe(one)} and {catalog.describe(other)}",
            code="FC105",
            remedy="save the state, and digest the checkpoint",
        )
        for one, other in overlaps
    ]
    for number, key in enumerate(catalog.keys):
        order = catalog.order(number)
        if order is not None and order.is_permuted:
            problems.append(
                Problem(
                    "a fused parameter is not in natural order",
                    key=key,
                    got=order.describe(),
                    code="FC207",
                    remedy="save the state, and digest the checkpoint",
                )
            )
    if problems:
        raise ValidationError(problems, _CONTEXT)
