"""Data files of lost nodes, rebuilt from parity before a load: ranks read for each other.

Tested in tests/saving/test_parity_saves.py.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.parity import Block, parity_here, plan_rebuilding, write_rebuilt
from paddle_flexckpt.ranks.communicator import Communicator

logger = logging.getLogger("paddle_flexckpt")


def rebuild_files(
    comm: Communicator,
    backend: Backend,
    manifest: Manifest,
    seen: np.ndarray,
    readable: np.ndarray,
    lost: Sequence[str],
    context: str,
    dry_run: bool = False,
) -> tuple[frozenset[str], dict[str, str]]:
    """Rebuild lost data files where parity allows it, each on a rank that sees others of its group.

    One collective, and two more if anything is rebuilt.

    Args:
        comm: The ranks; all call this with the same arguments, but for ``backend``.
        backend: This rank's directory.
        manifest: The checkpoint.
        seen: bool ``[ranks, files]``, the data files that ranks see.
        readable: The same without damaged ones.
        lost: The data files that no rank can read.
        context: What is being done, for errors.
        dry_run: Only find out what can be rebuilt.

    Returns:
        The files that are rebuilt, or would be; and by name of another, the reason why it cannot be.

    Raises:
        CorruptCheckpointError: A rebuilt file is not what was saved.
        CheckpointError: A rank cannot read or write.
    """
    _, answers = comm.together(lambda: (None, json.dumps(parity_here(backend, manifest)).encode()), context)
    parity = [json.loads(answer) for answer in answers]
    readers = {name: np.flatnonzero(each).tolist() for name, each in zip(manifest.catalog.files, readable.T)}
    planned, reasons = plan_rebuilding(manifest, lost, [name for name in readers if readers[name]], parity)
    for name in manifest.parity_files:
        readers[name] = [position for position, each in enumerate(parity) if isinstance(each.get(name), list)]
    # Ranks that see the same files share a directory.
    places = [(row.tobytes(), *each) for row, each in zip(seen, parity)]
    makers = _choose_makers(manifest, planned, readers, seen, places)
    reasons |= dict.fromkeys(planned.keys() - makers.keys(), "parity can rebuild it only where it is damaged")
    makings = []
    for number, (name, maker) in enumerate(() if dry_run else makers.items()):
        if comm.position == 0:
            logger.warning(f"{name} of node {manifest.nodes_of(name)[0]} is lost: it is rebuilt from parity")
        chosen = {
            file: comm.ranks[maker if maker in readers[file] else readers[file][number % len(readers[file])]]
            for file in _sources(planned[name])
        }
        output = write_rebuilt(backend, manifest, name)
        makings.append(Making(comm.ranks[maker], planned[name], chosen, output))
    if makings:
        exchange_files(comm, makings, backend.open, context)
    return frozenset(makers), reasons


def _choose_makers(
    manifest: Manifest,
    planned: Mapping[str, Sequence[Block]],
    readers: Mapping[str, Sequence[int]],
    seen: np.ndarray,
    places: Sequence[object],
) -> dict[str, int]:
    """Return, by name of a lost file, the position of the rank that rebuilds it: one that sees others of its group.

    Places and ranks take turns. A rank that sees the file damaged leaves it as it is; where all do, none rebuilds it.
    """
    taken: Counter[object] = Counter()
    makers = {}
    for name, blocks in planned.items():
        has = seen[:, manifest.catalog.files.index(name)]
        able = sorted({each for file in _sources(blocks) for each in readers[file] if not has[each]})
        if able:
            maker = makers[name] = min(able, key=lambda each: (taken[places[each]], taken[each], each))
            taken.update([places[maker], maker])
    return makers


def _sources(blocks: Sequence[Block]) -> set[str]:
    return {each.file for block in blocks for each in block.sources}
