"""check: say before the training starts what its saves would refuse. Tested in tests/manager/test_check.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_flexckpt.engine.options import GROUP, SHARDS, encode_options, same_on_all_ranks
from paddle_flexckpt.live.communicator import communicator_for
from paddle_flexckpt.live.sources import check_state
from paddle_flexckpt.manager.contents import collect_shards
from paddle_flexckpt.parallel.state_creation import no_new_states
from paddle_flexckpt.run_state.extra_state import collect_extra_state

OWN_OBJECTS = {
    **dict.fromkeys(("model", "optimizer", "state"), SHARDS),
    **dict.fromkeys(("lr_scheduler", "scaler"), "every rank has its own; whether there is one is compared"),
}


def given(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return what is compared of a rank's schedule and scaler: a rank without one would save or restore none."""
    return {name: options[name] is not None for name in ("lr_scheduler", "scaler")}


@same_on_all_ranks(**OWN_OBJECTS, process_group=GROUP)
def check(
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> None:
    """Raise what a save of all this would raise: call it before the training starts.

    Everything is described once, and the ranks compare the descriptions in one collective. No tensor is read or moved,
    and no state of the optimizer is created: states that only the first step creates are not looked at.

    Args:
        model: As in :meth:`CheckpointManager.save`; so are ``optimizer``, ``lr_scheduler``, ``scaler`` and ``state``.
        optimizer: Wrapped as for the training.
        lr_scheduler: If there is one.
        scaler: If there is one.
        state: Shards or tensors besides, or instead of, those of model and optimizer.
        process_group: The ranks that take part, as in :func:`save_state_dict`.

    Raises:
        ValidationError: It cannot be saved; on every rank, with the text of the save.
        CheckpointError: Likewise, where a description fails in another way.
    """
    options = locals()

    def describe() -> dict[str, Any]:
        with no_new_states():
            shards = collect_shards(model, optimizer, state)
        return {**shards, **collect_extra_state(lr_scheduler, scaler)}

    head = encode_options(check, options, **given(options))
    check_state(describe, communicator_for(process_group), "cannot save", head)
