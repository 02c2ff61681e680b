"""Replicas that disagree: ranks that should hold the same shard and do not.

That happens when ranks have run out of step, or when two different tensors (the experts of two ranks) go by one name.
Saving one replica, or a part of each, would then lose something without a word. So every rank takes a digest of the
replicated shards that it holds, which costs a few percent of copying them, and the ranks compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, Problem, ReplicaGroups
from paddle_flexckpt.runtime.tensors import HostTensor

_DIGEST = np.dtype([("row", "<i8"), ("digest", "<u8")])
MAX_LISTED = 50


def replica_digests(held: Mapping[int, Any], groups: ReplicaGroups) -> bytes:
    """Digests of this rank's replicated shards, for the other ranks.

    Args:
        held: This rank's tensors by row of the catalog.
        groups: The catalog's replica groups.
    """
    count = np.zeros(len(groups.order), dtype=np.int64)
    count[groups.order] = np.repeat(groups.count, groups.count)
    digests = [
        (row, xxhash.xxh3_64_intdigest(HostTensor(tensor).array.view(np.uint8)))
        for row, tensor in held.items()
        if count[row] > 1
    ]
    return np.asarray(digests, dtype=_DIGEST).tobytes()


def differing_replicas(answers: Sequence[bytes], catalog: Catalog, groups: ReplicaGroups) -> list[Problem]:
    """Replicas that differ from the first of their group, from what every rank's :func:`replica_digests` gave."""
    told = np.concatenate([np.frombuffer(answer, dtype=_DIGEST) for answer in answers])
    digest = np.zeros(len(catalog), dtype=np.uint64)
    digest[told["row"]] = told["digest"]
    first = np.zeros(len(catalog), dtype=np.int64)
    first[groups.order] = np.repeat(groups.first, groups.count)
    problems = []
    for row in np.flatnonzero(digest != digest[first])[:MAX_LISTED].tolist():
        problems.append(
            Problem(
                "replicas of one shard differ",
                key=catalog.key_name(row),
                rank=int(catalog.rank[row]),
                expected=f"the values of {catalog.describe(row)} on rank {catalog.rank[first[row]]}",
                got="others",
                remedy="give different tensors (such as the experts of different ranks) different names, or bring the "
                "ranks in step; if one rank's values will do (such as unsynchronised running statistics), pass "
                "check_replicas=False",
            )
        )
    return problems
