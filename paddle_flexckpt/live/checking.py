"""Find what a save would refuse, without saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddle_flexckpt.catalog import concat
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join
from paddle_flexckpt.engine.agreement import check_heads
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.sources import check_layout
from paddle_flexckpt.live.state import open_state


def check_state(describe: Callable[[], Mapping[str, Any]], comm: Communicator, context: str, head: bytes = b"") -> None:
    """Check that all ranks' shards can be saved. One collective; no value is read.

    Args:
        describe: Gives this rank's state, as for :func:`save_state_dict`.
        comm: The ranks.
        context: What is being done, for the error.
        head: What has to be the same on every rank.

    Raises:
        ValidationError: They cannot; the same on every rank, and in the words of the save.
        CheckpointError: ``describe`` has failed somewhere; likewise.
    """

    def own() -> tuple[None, bytes]:
        return None, join((head, encode_catalog(open_state(describe(), comm.rank).catalog)))

    _, answers = comm.together(own, context)
    check_layout(concat([decode_catalog(catalog) for catalog in check_heads(answers, context)[0]]), context)
