"""Data files of lost nodes, rebuilt from parity before a load: ranks read for each other.

Tested in tests/saving/test_parity_saves.py.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.parity import parity_here, plan_rebuilding, write_rebuilt
from paddle_flexckpt.ranks.communicator import Communicator

logger = logging.getLogger("paddle_flexckpt")


class _Seen(Protocol):
    """A checkpoint, and what ranks see of it: see :class:`~paddle_flexckpt.loading.node_files.Found`."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def view(self) -> np.ndarray: ...
    @property
    def files(self) -> tuple[np.ndarray, ...]: ...
    @property
    def damaged(self) -> Mapping[int, frozenset[tuple[str, int]]]: ...
    @property
    def lost_files(self) -> list[str]: ...


def rebuild_files(
    comm: Communicator, backend: Backend, found: _Seen, context: str, dry_run: bool = False
) -> tuple[frozenset[str], dict[str, str]]:
    """Rebuild lost data files where parity allows it, each on a rank that sees others of its group.

    One collective, and two more if anything is rebuilt.

    Args:
        comm: The ranks; all call this with the same arguments, but for ``backend``.
        backend: This rank's directory.
        found: The checkpoint, and what ranks see of it.
        context: What is being done, for errors.
        dry_run: Only find out what can be rebuilt.

    Returns:
        The files that are rebuilt, or would be; and by name of another, the reason why it cannot be.

    Raises:
        CorruptCheckpointError: A rebuilt file is not what was saved.
        CheckpointError: A rank cannot read or write.
    """
    manifest = found.manifest
    _, answers = comm.together(lambda: (None, json.dumps(parity_here(backend, manifest)).encode()), context)
    parity = [json.loads(answer) for answer in answers]
    # By file, the views whose ranks see it, and those whose ranks can read it.
    seen: dict[str, list[int]] = {}
    for view, numbers in enumerate(found.files):
        for number in numbers.tolist():
            seen.setdefault(manifest.catalog.files[number], []).append(view)
    damaged = {(view, name) for view, each in found.damaged.items() for name, _ in each}
    readable = {name: able for name, each in seen.items() if (able := [v for v in each if (v, name) not in damaged])}

    def positions(views: Sequence[int]) -> list[int]:
        return np.flatnonzero(np.isin(found.view, views)).tolist()

    planned, reasons = plan_rebuilding(manifest, found.lost_files, readable, parity)
    sources = {name: {each.file for block in blocks for each in block.sources} for name, blocks in planned.items()}
    readers = {file: positions(readable.get(file, ())) for file in set().union(*sources.values())}
    for file in readers.keys() & manifest.parity_files:
        readers[file] = [position for position, each in enumerate(parity) if isinstance(each.get(file), list)]
    # Ranks that see the same files share a directory.
    places = [(view, *each) for view, each in zip(found.view.tolist(), parity)]
    makers = _choose_makers(sources, readers, {name: positions(seen.get(name, ())) for name in planned}, places)
    reasons |= dict.fromkeys(planned.keys() - makers.keys(), "parity can rebuild it only where it is damaged")
    makings = []
    for number, (name, maker) in enumerate(() if dry_run else makers.items()):
        if comm.position == 0:
            logger.warning(f"{name} of node {manifest.nodes_of(name)[0]} is lost: it is rebuilt from parity")
        chosen = {
            file: comm.ranks[maker if maker in readers[file] else readers[file][number % len(readers[file])]]
            for file in sources[name]
        }
        output = write_rebuilt(backend, manifest, name)
        makings.append(Making(comm.ranks[maker], planned[name], chosen, output))
    if makings:
        exchange_files(comm, makings, backend.open, context)
    return frozenset(makers), reasons


def _choose_makers(
    sources: Mapping[str, Collection[str]],
    readers: Mapping[str, Sequence[int]],
    seers: Mapping[str, Sequence[int]],
    places: Sequence[object],
) -> dict[str, int]:
    """Return, by name of a lost file, the position of the rank that rebuilds it: one that sees others of its group.

    Places and ranks take turns. A rank that sees the file damaged leaves it as it is; where all do, none rebuilds it.
    """
    taken: Counter[object] = Counter()
    makers = {}
    for name, files in sources.items():
        able = sorted({each for file in files for each in readers[file]} - {*seers[name]})
        if able:
            maker = makers[name] = min(able, key=lambda each: (taken[places[each]], taken[each], each))
            taken.update([places[maker], maker])
    return makers
