"""Communicators of Paddle's process groups, and the transports and cached plans that belong to a group.

Ranks exchange messages through host channels (docs/design.md, "How ranks agree"). Paddle's groups belong to the
training: a call that one rank makes alone must not answer a collective that the others make there. A device's backend
would also send all messages through device memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.overlaps import finish_steps
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.transfer.plan_cache import PlanCache

# A process without others needs none of these.
if TYPE_CHECKING:
    from paddle_flexckpt.ranks.host_channel import HostChannel

# Backends of Paddle whose collectives work on device memory.
DEVICE_BACKENDS = frozenset(("nccl", "bkcl", "xccl", "flagcx"))


class PaddleCommunicator(Communicator):
    """A connection of the members of a Paddle process group.

    Attributes:
        group: The group, of paddle.distributed.
    """

    def __init__(self, group: Any) -> None:
        """Args: group: a paddle.distributed Group that this rank is in."""
        import paddle.distributed as dist

        # Not from group.rank: Paddle gives -1 for a group of one, member or not.
        ranks, rank = tuple(int(rank) for rank in group.ranks), int(dist.get_rank())
        if rank not in ranks:
            raise ValidationError([f"rank {rank} is not a member of the process group of ranks {list(ranks)}"])
        super().__init__(ranks, ranks.index(rank))
        self.group = group
        self._channel: HostChannel
        store = default_store()
        if store is not None:
            from paddle_flexckpt.ranks.lost_ranks import announce, describe_lost_ranks

            try:
                announce(store, rank)
            except Exception as error:
                raise LostRankError(describe_lost_ranks(None, error)) from error
        if self.size > 1:
            if store is None:
                raise ValidationError(
                    f"ranks {list(ranks)} cannot agree on anything: the job has no key-value store through which their "
                    "hosts could meet. Remedy (FC503): start it with paddle.distributed.launch, and call "
                    "paddle.distributed.init_parallel_env() or fleet.init() first"
                )
            self._channel = open_channel(group, ranks, self.position)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._channel.all_gather(payload)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self._channel.all_to_all(note, payloads)


def announce_rank() -> None:
    """Tell the job's other ranks, if there are any yet, that this one is here: they notice then if it dies."""
    import paddle.distributed as dist

    from paddle_flexckpt.ranks.lost_ranks import announce

    store = default_store() if dist.is_initialized() else None
    if store is not None:
        with contextlib.suppress(Exception):  # its first call with others says why
            announce(store, int(dist.get_rank()))


def device_group(comm: Communicator) -> Any:
    """Return Paddle's group of the members if its collectives work on device memory, or None."""
    if isinstance(comm, PaddleCommunicator) and _backend(comm.group) in DEVICE_BACKENDS:
        return comm.group
    return None


def plans_of(comm: Communicator) -> PlanCache:
    """Return the plans that a communicator's ranks have cached."""
    if not isinstance(comm.plans, PlanCache):
        comm.plans = PlanCache()
    return comm.plans


def default_store() -> Any:
    """Return the job's key-value store; None if the job was not started with one."""
    from paddle.distributed import collective

    return getattr(collective, "_default_store", None)


def _backend(group: Any) -> str:
    return str(getattr(group, "backend", "") or "").lower()


def _global_group() -> Any:
    from paddle.distributed.communication.group import _get_global_group

    return _get_global_group()


def open_channel(group: Any, ranks: tuple[int, ...], position: int) -> HostChannel:
    """Return the channel of a group. Its members connect once and stay connected as long as they live."""
    return _host_channel(int(group.id), ranks, position)


@functools.cache
def _host_channel(group_id: int, ranks: tuple[int, ...], position: int) -> HostChannel:
    from paddle_flexckpt.ranks.host_channel import HostChannel

    name = hashlib.sha256(repr((group_id, ranks)).encode()).hexdigest()[:16]
    return HostChannel(default_store(), name, ranks, position)


@functools.cache
def _group_plans(ranks: tuple[int, ...]) -> PlanCache:
    """Return the plans of these ranks' calls: they outlast a communicator, which serves one call."""
    return PlanCache()


def communicator_for(process_group: Any = None) -> Communicator:
    """Finish what the last training step has left unfinished, and return the communicator of a call.

    Args:
        process_group: None for all ranks of the job (or the one process there is), ``"self"`` for this rank alone, a
            Paddle group, or a Communicator. Any other value is refused in the first collective of the call,
            which all ranks of the job are expected to join.

    Raises:
        ValidationError: The launcher has started other ranks too, and the job is not initialised.
    """
    if isinstance(process_group, Communicator):
        finish_steps(process_group.ranks)
        return process_group
    import paddle.distributed as dist

    is_known = process_group is None or process_group == "self" or hasattr(process_group, "ranks")
    if not dist.is_initialized():
        if process_group != "self":
            _check_alone()
        comm: Communicator = SoloCommunicator()
    elif process_group == "self":
        comm = SoloCommunicator(int(dist.get_rank()))
    else:
        comm = PaddleCommunicator(process_group if is_known and process_group is not None else _global_group())
    comm.plans = _group_plans(comm.ranks)
    if not is_known:
        comm.refusal = ValidationError(
            "process_group has to be a group of paddle.distributed, 'self' or None; got "
            f"{process_group!r} ({type(process_group).__name__})"
        )
    finish_steps(comm.ranks)
    return comm


def _check_alone() -> None:
    """Raise ValidationError where the launcher's environment says that a process without groups is one of several."""
    ranks, rank = os.environ.get("PADDLE_TRAINERS_NUM", "1"), os.environ.get("PADDLE_TRAINER_ID", "0")
    if ranks.isdecimal() and int(ranks) > 1:
        raise ValidationError(
            f"this process is rank {rank} of {ranks} that paddle.distributed.launch has started (PADDLE_TRAINERS_NUM), "
            "but the job is not initialised, so each rank would work as if it were alone. Remedy (FC503): call "
            "fleet.init() or paddle.distributed.init_parallel_env() first, on every rank"
        )
