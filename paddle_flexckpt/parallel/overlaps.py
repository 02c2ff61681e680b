"""Register optimizers whose overlap is switched on: their steps leave parameters stale until the next forward.

Tested in tests/distributed/test_overlaps.py.
"""

from __future__ import annotations

import gc
from typing import Any

from paddle_flexckpt.overlaps import note_overlap


class GatherOverlapMixin:
    """The overlap of sharding V2, which gathers its buffers while the next forward runs."""

    def _set_all_gather_overlap_forward(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__set_all_gather_overlap_forward(*arguments, **named)


class BroadcastOverlapMixin:
    """The overlap of sharding V1 and stage 2, which broadcast parameters while the next forward runs."""

    def _set_broadcast_overlap(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__set_broadcast_overlap(*arguments, **named)


class StorageOverlapMixin:
    """The overlap of semi-automatic sharding with tensor fusion, which gathers its buffers during the next forward."""

    def _enable_sharding_overlap(self: Any, *arguments: Any, **named: Any) -> None:
        note_overlap(self)
        self._paddle__enable_sharding_overlap(*arguments, **named)


def overlap_mixins(owner: type) -> tuple[type, ...]:
    """Return the mixins for the overlaps of a class of Paddle's, in this version of Paddle."""
    kinds = (GatherOverlapMixin, BroadcastOverlapMixin, StorageOverlapMixin)
    return tuple(kind for kind in kinds if any(name in vars(owner) for name in vars(kind) if not name.startswith("__")))


def note_earlier(owners: list[type]) -> None:
    """Register optimizers of these classes that existed before their classes had the mixins."""
    found = [each for each in gc.get_referrers(*owners) if type(each) in owners]
    for optimizer in sorted(found, key=_first_name):  # in the same order on all ranks
        note_overlap(optimizer)


def _first_name(optimizer: Any) -> str:
    names = [getattr(entry, "name", None) for entry in vars(optimizer).get("_parameter_list", ())]
    return min(filter(None, names), default="")
