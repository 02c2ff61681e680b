"""The restore of a step from the memory of the nodes. Tested in tests/manager/test_memory_tier.py."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.node_files import Found, find_checkpoint
from paddle_flexckpt.manager.anchor import start_of
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.restore import (
    Held,
    LostNodesError,
    RestoreOptions,
    RestoreReport,
    fill_run,
    token_now,
)
from paddle_flexckpt.manager.restore_targets import RestoreTargets
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.tools.step_record import RECORD, read_record


def restore_from_memory(
    directory: Backend, wanted: tuple[int, int], comm: Communicator, targets: RestoreTargets, options: RestoreOptions
) -> RestoreReport:
    """Restore the step whose directory on this rank's node this is; every rank sees what its node has.

    ``wanted`` is the step, and the start that has saved it.

    Raises:
        LostNodesError: Too many nodes are lost.
        CheckpointError: As of :func:`fill_run`.
    """
    step, _ = wanted
    context = f"cannot restore step {step} from the memory of the nodes"
    with _hold_on_nodes(directory, wanted, comm, context) as (held, here):
        load, extra = fill_run(directory, contextlib.nullcontext(held), comm, targets, options, context)
    nodes = here, len(held.manifest.nodes)
    return RestoreReport(step, directory.path, load, extra, tier="memory", nodes=nodes)


@contextlib.contextmanager
def _hold_on_nodes(
    directory: Backend, wanted: tuple[int, int], comm: Communicator, context: str
) -> Iterator[tuple[Held, int]]:
    """Hold the lock on the step's checkpoint on all nodes; yield it, and the number of nodes that have it."""
    step, start = wanted
    with contextlib.ExitStack() as locks:
        try:
            found = find_checkpoint(comm, lambda: SourceDirectory(directory), UNIQUE_ID, lambda: b"{}", locks, context)
        except (LostRankError, ValidationError):
            raise
        except CheckpointError as error:  # nothing was changed
            raise LostNodesError(f"step {step} is not whole in memory: {error}") from None
        if start_of(found.manifest) < start:
            raise LostNodesError(
                f"step {step} is not whole in memory: what is whole is of an earlier start, and of before the run went "
                "back"
            )
        own = token_now(directory)
        here, missing = _find_nodes(directory, found.manifest, own, comm, context)
        if found.lost.any():
            raise LostNodesError(
                f"step {step} is not whole in memory, as {here} of {len(found.manifest.nodes)} nodes have it; missing: "
                f"{', '.join(missing) or 'none'}{_unreadable(found)}. Remedy (FC507): start the job with these nodes "
                "again; or, if they are gone, restore() without a step, which takes the newest that is whole"
            )
        yield Held(found.manifest, own, "per_node"), here


def _find_nodes(
    directory: Backend, manifest: Manifest, own: str, comm: Communicator, context: str
) -> tuple[int, list[str]]:
    """Return how many nodes have this checkpoint, and the names of those that have saved it and do not."""
    place = f"({socket.gethostname()}:{directory.path})" if own == manifest.save_token else ""
    _, answers = comm.together(lambda: (None, place.encode()), context)
    places = {answer.decode() for answer in answers if answer}
    return len(places), [name for name in manifest.nodes if name.partition(" ")[2] not in places]


def _unreadable(found: Found) -> str:
    return "".join(f"; {text}" for text in found.wrong.values())


def time_of(directory: Backend) -> float | None:
    """Return when the step in a directory was saved; None if this rank cannot read it there."""
    checkpoint = SourceDirectory(directory)
    with contextlib.suppress(CheckpointError, OSError), LockedManifest(checkpoint, UNIQUE_ID, [RECORD]) as manifest:
        record = read_record(directory, manifest)
        return None if record is None else record.time
    return None
