"""Finishing the collectives that an optimizer's last step has left under way.

With an overlap switched on, Paddle sends the parameters around while the next forward runs. When ``step()`` returns, a
rank has new values of the parameters that it steps itself, and old values of the others. So :func:`finish_steps` is
called before parameters are described, read or loaded. After ``install()``, an optimizer is noted when its overlap is
switched on.
Tested in tests/distributed/test_overlaps.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

# In the order in which they were noted, which is the same on all ranks.
_noted: list[weakref.ref[Any]] = []


@dataclass(frozen=True)
class Gathering:
    """A collective that brings one buffer of stale parameters up to date.

    Attributes:
        ranks: The ranks that have to launch it together; empty if all of them have launched it already.
        parameters: The parameters that it brings up to date.
        launch: Begins the collective, if it has not begun; returns a function that waits for its end.
    """

    ranks: tuple[int, ...]
    parameters: list[Any]
    launch: Callable[[], Callable[[], None]]


def note_overlap(optimizer: Any) -> None:
    """Remember an optimizer whose steps may leave parameters stale."""
    others = [each for each in _noted if each() is not None and each() is not optimizer]
    _noted[:] = [*others, weakref.ref(optimizer)]


def forget_overlaps() -> None:
    """Forget all optimizers, of a job that is over."""
    _noted.clear()


def finish_steps(ranks: Collection[int] | None = None) -> None:
    """Launch what gathers stale parameters, and wait until they are new.

    All ranks that shard the same parameters call this at the same place. Where nothing is under way, it does nothing.

    Args:
        ranks: The ranks that make this call. A buffer that needs other ranks too is left as it is. None: all ranks
            that are needed make the call.
    """
    if _noted:
        wanted = [each for each in _unfinished() if ranks is None or set(each.ranks) <= set(ranks)]
        for wait in [each.launch() for each in wanted]:
            wait()


def stale_parameters() -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield parameters that are stale, and the ranks that have to gather them."""
    for gathering in _unfinished() if _noted else ():
        yield from ((parameter, gathering.ranks) for parameter in gathering.parameters)


def _unfinished() -> Iterator[Gathering]:
    for optimizer in filter(None, [reference() for reference in _noted]):
        yield from _buckets(optimizer)
        yield from _hooks(optimizer)
        yield from _storages(optimizer)


def _buckets(optimizer: Any) -> Iterator[Gathering]:
    """Yield the buffers of sharding V2 that are not gathered."""
    for bucket in getattr(optimizer, "_comm_buffer_list", ()):
        status = getattr(bucket, "status", None)
        states: Any = type(status)
        if status is None or status is states.READY:
            continue

        def launch(bucket: Any = bucket, states: Any = states) -> Callable[[], None]:
            if bucket.status is states.SHARDED:
                optimizer._try_start_bucket_param_sync([bucket])

            def wait() -> None:
                if bucket.sync_param_task is not None:  # of frozen parameters there is nothing to gather
                    bucket.sync_param_task.wait()
                bucket.status = states.READY

            return wait

        needed = tuple(bucket._comm_group.ranks) if status is states.SHARDED else ()
        yield Gathering(needed, bucket._params, launch)


def _hooks(optimizer: Any) -> Iterator[Gathering]:
    """Yield the broadcasts, already begun, for which hooks of the next forward wait: sharding V1 and stage 2."""
    helpers = getattr(optimizer, "_forward_pre_hook_remove_helper", ())

    def wait() -> None:
        for helper in helpers:
            hook = (helper._hooks_ref() or {}).get(helper._hook_id)
            if hook is not None:
                hook(None, None)
            helper.remove()
        optimizer._forward_pre_hook_remove_helper = []

    if helpers:
        yield Gathering((), [], lambda: wait)


def _storages(optimizer: Any) -> Iterator[Gathering]:
    """Yield the fused buffers of semi-automatic sharding that are not gathered."""
    if not getattr(optimizer, "enable_sharding_overlap", False):
        return  # step() gathers them itself
    for storage, views in zip(optimizer.param_storage, optimizer.fuse_param_view):
        if getattr(storage, "is_sync", True):
            continue

        def launch(storage: Any = storage) -> Callable[[], None]:
            group = optimizer._sharding_group
            size = int(storage._numel()) // group.nranks
            begin = size * max(group.rank, 0)
            task = group.process_group.all_gather(storage._slice(begin, begin + size), storage)
            storage.is_sync = True
            return lambda: task.wait() and None

        needed = tuple(optimizer._sharding_group.ranks)
        yield Gathering(needed, [view["param"] for view in views.values()], launch)
