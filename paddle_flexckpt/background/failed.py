"""Failed saves that nobody has seen: how they are told."""

from __future__ import annotations

from paddle_flexckpt.background.handle import SaveHandle
from paddle_flexckpt.catalog.failures import Failure


def told(handle: SaveHandle) -> str:
    """What there is to say about a save that failed."""
    return f"the asynchronous save of id {handle.unique_id} to {handle.path!r} failed: {handle.error}"


def raise_failed(handles: list[SaveHandle]) -> None:
    """Raises the errors of failed saves as one, if there are any; of their class, if they have one in common.

    Raises:
        CheckpointError: There are.
    """
    errors = [handle.error for handle in handles if handle.error is not None]
    if not errors:
        return
    kinds = {Failure.of(error).kind for error in errors}
    raise Failure(kinds.pop() if len(kinds) == 1 else "CheckpointError", tuple(map(told, handles))).error()
