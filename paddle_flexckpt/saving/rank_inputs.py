"""One rank's contribution to the plan of a save: its shards, and its first message to the other ranks.

Tested in tests/saving/test_saver.py and tests/saving/test_plan_cache.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import xxhash

from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.memory.state import LocalState
from paddle_flexckpt.memory.state_names import indivisible_rows
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.planners import RankSummary, encode_shards
from paddle_flexckpt.saving.replica_policies import ReplicaPolicies
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.transfer.agreement import BRIEF_SAVE
from paddle_flexckpt.transfer.plan_cache import encode_short, fingerprint

# A rank's part of a short message: a digest of its directory's place, and the names of the save, if it knows them.
_SHORT = struct.Struct("<8sQ16s?")
_NO_NAMES = SaveNames(0, bytes(16).hex())


class RankInputs:
    """One rank's inputs to the plan of a save.

    Attributes:
        flags: int64 ``[n]``, for each shard its policy, shifted by one; bit 0: one rank has to write it whole.
        fingerprint: A fingerprint of all inputs on this rank.
    """

    def __init__(
        self,
        state: LocalState,
        devices: Sequence[str],
        comm: Communicator,
        options: SaveOptions,
        head: bytes,
        names: SaveNames | None,
        place: str,
        message: bytes,
    ) -> None:
        """Describe this rank's shards."""
        weights, self._catalog = state.weights, state.catalog
        self._size, self._head, self._names = comm.size, head, names
        whole = indivisible_rows(self._catalog, [getattr(weight, "fused", None) for weight in weights])
        policies = ReplicaPolicies(options.check_replicas).of(self._catalog.keys, weights)
        self.flags = whole | policies.astype(np.int64) << 1
        # These options do not affect a plan.
        lasting = replace(options, step=None, unique_id=None, overwrite=True).encode("save_state_dict")
        layout = message, self.flags.tobytes(), bytes([bool(devices)]), encode_catalog(self._catalog)
        self.fingerprint = fingerprint((lasting, repr(comm.ranks).encode(), *layout))
        self._summary = RankSummary(
            own=self.fingerprint,
            names=json.dumps(names and asdict(names)).encode(),
            place=place.encode(),
            message=message,
            rows=len(self._catalog),
            policies=int(np.bitwise_or.reduce(1 << policies.astype(np.int64))),
            any_device=bool(devices),
        )

    def full_message(self) -> bytes:
        """Return this rank's first message where not all ranks have a cached plan."""
        shards = encode_shards(self._catalog, self.flags, self._size)
        return self._summary._replace(shards=shards).encode(self._head)

    def short_message(self, plan: bytes) -> bytes:
        """Return this rank's message about a cached plan, by its fingerprint; empty if the names do not fit."""
        names = self._names or _NO_NAMES
        if names.unique_id >= 1 << 64 or len(names.token) != len(_NO_NAMES.token):
            return b""
        place = xxhash.xxh3_64_digest(self._summary.place)
        own = _SHORT.pack(place, names.unique_id, bytes.fromhex(names.token), names.replaces)
        return encode_short(BRIEF_SAVE, fingerprint((plan, self._head)), own)


def decode_short(payload: bytes) -> tuple[bytes, SaveNames]:
    """Return a digest of the place of a rank's directory and the save's names, from its part of a short message."""
    place, unique_id, token, replaces = _SHORT.unpack(payload)
    return place, SaveNames(unique_id, token.hex(), replaces)
