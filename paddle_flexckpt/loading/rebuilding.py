"""Data files of lost nodes, rebuilt from parity before a load: ranks read for each other.

Tested in tests/saving/test_parity_saves.py.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.parity import parity_here, plan_rebuilding, write_rebuilt
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
) -> dict[str, str]:
    """Rebuild lost data files where parity allows it, each on a rank that sees others of its group.

    One collective, and two more if anything can be rebuilt.

    Args:
        comm: The ranks; all call this with the same arguments, but for ``backend``.
        backend: This rank's directory.
        manifest: The checkpoint.
        seen: bool ``[ranks, files]``, the data files that ranks see.
        readable: The same without damaged ones.
        lost: The data files that no rank can read.
        context: What is being done, for errors.

    Returns:
        By name of a file that cannot be rebuilt: the reason.

    Raises:
        CorruptCheckpointError: A rebuilt file is not what was saved.
        CheckpointError: A rank cannot read or write.
    """
    _, answers = comm.together(lambda: (None, json.dumps(parity_here(backend, manifest)).encode()), context)
    here = [json.loads(answer) for answer in answers]
    wrong = {name: what for each in here for name, what in each.items() if isinstance(what, str)}
    readers = dict(zip(manifest.catalog.files, (np.flatnonzero(each).tolist() for each in readable.T)))
    for name in manifest.parity_files - wrong.keys():
        readers[name] = [position for position, each in enumerate(here) if name in each]
    stripes = {tuple(what) for each in here for what in each.values() if not isinstance(what, str)}
    planned, reasons = plan_rebuilding(manifest, lost, [name for name in readers if readers[name]], stripes, wrong)
    # Ranks that see the same files share a directory.
    places = [(*row.tolist(), *each) for row, each in zip(seen, here)]
    taken: Counter[object] = Counter()
    makings = []
    for number, (name, blocks) in enumerate(planned.items()):
        sources = {each.file for block in blocks for each in block.sources}
        has = seen[:, manifest.catalog.files.index(name)]  # a damaged file is left as it is, and rebuilt elsewhere
        able = sorted({each for file in sources for each in readers[file] if not has[each]})
        if not able:
            reasons[name] = "parity can rebuild it only where it is damaged"
            continue
        maker = min(able, key=lambda each: (taken[places[each]], taken[each], each))
        taken.update([places[maker], maker])
        chosen = {
            file: comm.ranks[maker if maker in readers[file] else readers[file][number % len(readers[file])]]
            for file in sources
        }
        makings.append(Making(comm.ranks[maker], blocks, chosen, write_rebuilt(backend, manifest, name)))
        if comm.position == 0:
            logger.warning(f"{name} of node {manifest.nodes_of(name)[0]} is lost: it is rebuilt from parity")
    if makings:
        exchange_files(comm, makings, backend.open, context)
    return reasons
