"""Lost data files of nodes, rebuilt from parity by one process that sees the nodes' directories.

Tested in tests/native/test_node_repair.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest, number_of
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.parity import parity_here, plan_rebuilding, write_rebuilt
from paddle_flexckpt.ranks.communicator import SoloCommunicator


class NodeRepair(NamedTuple):
    """The lost data files of a checkpoint.

    Attributes:
        unique_id: Its id.
        rebuilt: By name, the directory in which a file was rebuilt, or would be.
        reasons: By name of another, why it cannot be rebuilt.
    """

    unique_id: int
    rebuilt: dict[str, str]
    reasons: dict[str, str]


def rebuild_lost_files(paths: Sequence[Location], unique_id: int | None = None, dry_run: bool = False) -> NodeRepair:
    """Rebuild the data files that no directory has, in directories that have the manifest and the fewest files.

    Args:
        paths: The nodes' directories.
        unique_id: The checkpoint's id; None takes the highest that a node has.
        dry_run: Only find out what would be done.

    Raises:
        ValidationError: No node has such a checkpoint.
        CorruptCheckpointError: A manifest is damaged, or a rebuilt file is not what was saved.
        OSError: Storage failed.
    """
    directories = [CheckpointDirectory(path) for path in paths]
    ids = sorted({each for directory in directories for each in directory.list_ids()})
    chosen = unique_id if unique_id is not None else max(ids, default=None)
    if chosen not in ids:
        shown = ", ".join(directory.path for directory in directories)
        raise ValidationError(f"no manifest of id {chosen} is in {shown}; ids there: {ids or 'none'}")
    where: dict[str, Backend] = {}
    parity: list[dict[str, list[int] | str]] = []
    with contextlib.ExitStack() as locks:
        able = [each for each in directories if chosen in each.list_ids()]
        manifests = [locks.enter_context(LockedManifest(each, chosen)) for each in able]
        manifest = max(manifests, key=number_of)
        count = Counter({each: 0 for each, own in zip(able, manifests) if own.save_token == manifest.save_token})
        for directory in directories:
            usable, _ = directory.usable_files(manifest)
            here = [name for name, is_usable in zip(manifest.catalog.files, usable) if is_usable]
            parity.append(parity_here(directory.backend, manifest))
            here += [name for name, ranks in parity[-1].items() if not isinstance(ranks, str)]
            where.update(dict.fromkeys(here, directory.backend))
            count.update({directory: len(here)} if directory in count else {})
        lost = [name for name in manifest.catalog.files if name not in where]
        planned, reasons = plan_rebuilding(manifest, lost, where, parity)
        makings, rebuilt = [], {}
        for name, blocks in planned.items():
            target = min(count, key=count.__getitem__)
            count[target] += 1
            rebuilt[name] = target.path
            readers = {each.file: 0 for block in blocks for each in block.sources}
            makings.append(Making(0, blocks, readers, write_rebuilt(target.backend, manifest, name)))
        if makings and not dry_run:
            exchange_files(SoloCommunicator(), makings, lambda name: where[name].open(name), "cannot rebuild")
    return NodeRepair(chosen, rebuilt, reasons)
