"""Files of nodes that share no storage: which checkpoint to load, and which files each rank sees.

Tested in tests/saving/test_nodes.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    LostRankError,
    ReplicaGroups,
    ValidationError,
    group_replicas,
)
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest, number_of
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import save_of
from paddle_flexckpt.planning.sights import Sight, find_sight
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.agreement import check_coordinator, check_heads, check_same
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.plan_cache import gather_full

logger = logging.getLogger("paddle_flexckpt")

# By a number, of a rank in the group or of a view: file and first byte of the shards whose copies are damaged there.
DamagedCopies = Mapping[int, frozenset[tuple[str, int]]]


class Found(NamedTuple):
    """A checkpoint, and the files of it that each rank can read.

    Attributes:
        manifest: Of all nodes.
        view: int64 per rank, by position in the group: ranks that see the same have the same number.
        files: By view, the numbers of the data files that its ranks can read.
        wrong: By name, what is wrong with files that are there and cannot be read.
        everywhere: Whether every rank has the manifest and all files, so that it can load as from shared storage.
        damaged: The damage that an earlier try of this load has found, by view.
        not_rebuilt: By name, why parity cannot rebuild a lost file.
        can_rebuild: Lost files that parity can rebuild, where it was only looked.
    """

    manifest: Manifest
    view: np.ndarray
    files: tuple[np.ndarray, ...]
    wrong: dict[str, str]
    everywhere: bool
    damaged: DamagedCopies = MappingProxyType({})
    not_rebuilt: Mapping[str, str] = MappingProxyType({})
    can_rebuild: frozenset[str] = frozenset()

    def with_damage(self, damaged: DamagedCopies) -> Found:
        """Return the same with damage, by position in the group."""
        pairs = [(view, damaged.get(position, frozenset())) for position, view in enumerate(self.view.tolist())]
        number = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        return self._replace(
            view=np.asarray([number[pair] for pair in pairs]),
            files=tuple(self.files[view] for view, _ in number),
            everywhere=False,
            damaged={place: each for (_, each), place in number.items() if each},
        )

    def sight(self, groups: ReplicaGroups) -> Sight:
        """Return which replica groups of the catalog ranks can read, as far as is known."""
        damaged = {view: self._damaged_rows(view) for view in self.damaged}
        return find_sight(self.manifest.catalog, groups, self.view, self.files, damaged)

    def damaged_rows(self, position: int) -> list[int]:
        """Return the rows of which a rank sees damaged copies."""
        return self._damaged_rows(int(self.view[position]))

    def _damaged_rows(self, view: int) -> list[int]:
        catalog, rows = self.manifest.catalog, list[int]()
        for name, begin in sorted(self.damaged.get(view, ())):
            here = (catalog.file == catalog.files.index(name)) & (catalog.byte_offset == begin)
            rows += np.flatnonzero(here & (catalog.byte_length > 0)).tolist()
        return rows

    @property
    def lost(self) -> np.ndarray:
        """Return bool per row of the catalog: whether no rank can read it or a replica of it."""
        groups = group_replicas(self.manifest.catalog)
        lost = np.ones(len(groups), dtype=bool)
        lost[self.sight(groups).groups] = False
        return lost[groups.of_row]

    @property
    def lost_files(self) -> list[str]:
        """Return the files of the lost rows."""
        catalog = self.manifest.catalog
        return [catalog.files[file] for file in np.unique(catalog.file[self.lost]).tolist()]

    @property
    def is_whole(self) -> bool:
        """Return whether all data is here, or can be rebuilt."""
        return self.can_rebuild.issuperset(self.lost_files)


def find_checkpoint(
    comm: Communicator,
    open_directory: Callable[[], CheckpointDirectory],
    unique_id: int | None,
    head: Callable[[], bytes],
    locks: contextlib.ExitStack,
    context: str,
    rebuilds: bool = True,
) -> Found:
    """Agree on a checkpoint: the one with the highest id that a node has published.

    It takes one collective if all ranks have the same manifest, else two more for each save of that id. ``head``
    returns what ranks have to agree about, or raises; ``locks`` receives the manifest's lock where there is one. If a
    save died after some nodes had published it in place of an older one, the newer one is chosen if all of it is here,
    else the older. Parity, where there is some, rebuilds files that no rank sees: two more collectives, or three.
    Without ``rebuilds`` nothing is written: one more finds out which files it can rebuild.

    Raises:
        ValidationError: No rank sees such a checkpoint, or ranks disagree about what is to be loaded.
        CorruptCheckpointError: No rank can read its manifest, or one cannot that may have a newer one.
    """
    own_lock, rebuild = contextlib.ExitStack(), functools.partial(_rebuild, rebuilds=rebuilds)
    locks.push(own_lock)

    def look() -> tuple[Manifest | None, bytes]:
        own_head = head()
        directory = open_directory()
        ids = [each for each in directory.list_ids() if unique_id is None or each == unique_id]
        # Ranks with a lower id than another rank's highest are not considered, so only this id counts.
        manifest, description = _read(directory, max(ids), own_lock) if ids else (None, {})
        flags = (b"", b"{}") if manifest is None else _flags(directory, manifest, True)
        description["asked"] = unique_id
        return manifest, join((own_head, json.dumps(description).encode(), *flags))

    manifest, answers = comm.together(look, context)
    answers = gather_full(comm, answers, lambda: b"", context)  # others may load from a directory that all share
    directory = open_directory()
    texts, flags, wrongs = check_heads(answers, context, comm.ranks)
    descriptions = [json.loads(text) for text in texts]
    if not any("id" in each for each in descriptions):
        _raise_nothing_found(comm, directory, unique_id, context)
    chosen = _choose_id(descriptions, context)
    descriptions = [each if each.get("id") == chosen else {} for each in descriptions]
    if not descriptions[comm.position]:
        own_lock.close()
        manifest = None
    owners = _find_saves(descriptions, chosen, context, warns=comm.position == 0)
    if manifest is not None and len(owners) == 1 and all("save" in each for each in descriptions):
        return rebuild(comm, directory, _found(manifest, flags, wrongs), context)
    found = []
    for (_, token), owner in sorted(owners.items(), reverse=True):
        found.append(rebuild(comm, directory, _look(comm, directory, manifest, token, owner, context), context))
        # A file that exists and cannot be read is an error: an older save is not used instead.
        if found[-1].is_whole or found[-1].wrong:
            return found[-1]
    return found[0]


def _raise_nothing_found(
    comm: Communicator, directory: CheckpointDirectory, unique_id: int | None, context: str
) -> None:
    """Raise on all ranks that none sees such a checkpoint. One collective."""

    def fail() -> tuple[None, bytes]:
        directory.read_manifest(unique_id)  # the error lists the checkpoints that are there
        raise ValidationError([f"{directory.path} has no checkpoint that was saved with storage='per_node'"])

    comm.together(fail, context)


def _choose_id(descriptions: Sequence[Mapping[str, Any]], context: str) -> int:
    """Return the highest id that a rank sees; as on shared storage, ranks agree about it, named or found."""
    chosen = max(each["id"] for each in descriptions if "id" in each)
    requested = [chosen if each["asked"] is None else each["asked"] for each in descriptions]
    check_same([json.dumps({"checkpoint": f"id {each}"}).encode() for each in requested], context)
    return int(chosen)


def _find_saves(
    descriptions: Sequence[Mapping[str, Any]], unique_id: int, context: str, warns: bool
) -> dict[tuple[int, str], int]:
    """Return the saves of an id whose manifests ranks have read, each with the position of one of these ranks."""
    owners: dict[tuple[int, str], int] = {}
    for position, each in enumerate(descriptions):
        if "save" in each:
            number, token = each["save"]
            owners.setdefault((number, token), position)
    problems = sorted({each["problem"] for each in descriptions if "problem" in each})
    if not owners:
        raise CorruptCheckpointError(f"{context}: {'; '.join(problems)}")
    # A rank whose manifest cannot be read may have the newest save, so an older one is not used instead.
    unread = max((each["newest"] for each in descriptions if "problem" in each), default=0)
    if unread > max(owners)[0]:
        raise CorruptCheckpointError(
            f"{context}: it is not known which save of id {unique_id} is the newest: {'; '.join(problems)}. "
            "Remedy (FC504): look into the storage of that node, and load again; without that node an older one is "
            "loaded"
        )
    if problems and warns:
        text = "; ".join(problems)
        logger.warning(f"manifests of id {unique_id} that cannot be read, while others can: {text}")
    return owners


def _look(
    comm: Communicator, directory: CheckpointDirectory, own: Manifest | None, token: str, owner: int, context: str
) -> Found:
    """Send every rank the manifest of one save, and find out who can read which of its files."""
    has = own is not None and own.save_token == token

    def send() -> tuple[None, bytes]:
        return None, replace(own, partitions=()).encode() if own is not None and comm.position == owner else b""

    def look() -> tuple[None, bytes]:
        return None, join(_flags(directory, manifest, has))

    _, answers = comm.together(send, context)
    manifest = (
        own if has and own is not None else Manifest.decode(answers[owner], f"the manifest of rank {comm.ranks[owner]}")
    )
    _, answers = comm.together(look, context)
    return _found(manifest, *zip(*map(split, answers)))


def _rebuild(
    comm: Communicator, directory: CheckpointDirectory, found: Found, context: str, rebuilds: bool = True
) -> Found:
    """Rebuild lost files from parity, if there is some, or only look; return the files that each rank sees then."""
    if not found.manifest.parity_files or not found.lost_files:
        return found
    from paddle_flexckpt.loading.rebuilding import rebuild_files

    able, reasons = rebuild_files(comm, directory.backend, found, context, dry_run=not rebuilds)
    found = found._replace(not_rebuilt=reasons)
    if not rebuilds:
        return found._replace(can_rebuild=able)
    if not able:
        return found._replace(everywhere=False)
    _, answers = comm.together(lambda: (None, join(_flags(directory, found.manifest, False))), context)
    rebuilt = _found(found.manifest, *zip(*map(split, answers)))._replace(not_rebuilt=reasons, everywhere=False)
    if not found.damaged:
        return rebuilt
    return rebuilt.with_damage({place: found.damaged.get(view, frozenset()) for place, view in enumerate(found.view)})


def _read(
    directory: CheckpointDirectory, unique_id: int, held: contextlib.ExitStack
) -> tuple[Manifest | None, dict[str, Any]]:
    """Return the manifest of an id, whose lock ``held`` receives, and a message about it; None if it cannot be read."""
    try:
        manifest = held.enter_context(LockedManifest(directory, unique_id))
    except (CorruptCheckpointError, OSError) as error:
        saves = [save_of(name) for number, _, name in directory.data_files() if number == unique_id]
        newest = max((save.number for save in saves if save), default=0)
        return None, {"id": unique_id, "problem": str(error), "newest": newest}
    return manifest, {"id": unique_id, "save": [number_of(manifest), manifest.save_token]}


def _flags(directory: CheckpointDirectory, manifest: Manifest, has: bool) -> tuple[bytes, bytes]:
    """Return bits for whether this rank has the manifest and can read each of its files; by name, what is wrong."""
    usable, wrong = directory.usable_files(manifest)
    return np.packbits([has, *usable]).tobytes(), json.dumps(wrong).encode()


def _found(manifest: Manifest, flags: Sequence[bytes], wrongs: Sequence[bytes]) -> Found:
    """Return what ranks see of a manifest, by each rank's :func:`_flags`."""
    number: dict[bytes, int] = {}
    files, is_everywhere = list[np.ndarray](), True
    for each in flags:
        if each not in number:
            bits = np.unpackbits(np.frombuffer(each, dtype=np.uint8), count=1 + len(manifest.catalog.files))
            is_everywhere &= bool(bits.all())
            number[each] = len(files)
            files.append(np.flatnonzero(bits[1:]))
    wrong = {name: what for each in wrongs for name, what in json.loads(each).items()}
    return Found(manifest, np.asarray([number[each] for each in flags]), tuple(files), wrong, is_everywhere)


def find_damaged_copies(comm: Communicator, files: Files, context: str) -> DamagedCopies:
    """Return the damage that each rank sees in those files in which any rank has found damage.

    Two collectives, after a load that has failed on all ranks. Each rank verifies its own copy, as it is not known
    which ranks share a directory.
    """
    _, answers = comm.together(lambda: (None, json.dumps(files.damaged_files()).encode()), context)
    names = {name for answer in answers for name in json.loads(answer)}
    _, answers = comm.together(lambda: (None, json.dumps(files.damaged_shards(names)).encode()), context)
    found = [frozenset((name, begin) for name, begin in json.loads(answer)) for answer in answers]
    return {position: damaged for position, damaged in enumerate(found) if damaged}


def find_nodes(
    comm: Communicator, path: Location, options: LoadOptions, call: str, context: str, damaged: DamagedCopies
) -> tuple[Found, contextlib.ExitStack]:
    """Agree on a checkpoint as :func:`find_checkpoint` does; return what was found, and the manifest's lock.

    Copies that are known to be ``damaged`` are not read.

    Raises:
        ValidationError: No rank sees such a checkpoint, or ranks disagree about what is to be loaded.
        CorruptCheckpointError: No rank can read its manifest.
    """

    @functools.cache
    def directory() -> SourceDirectory:
        return SourceDirectory(path)

    def head() -> bytes:
        check_coordinator(comm, options.coordinator_rank)
        return options.encode(call, context=context)

    with contextlib.ExitStack() as locks:
        found = find_checkpoint(comm, directory, options.unique_id, head, locks, context)
        if damaged:
            found = found.with_damage(damaged)
            try:
                found = _rebuild(comm, directory(), found, context)
            except LostRankError:
                raise
            except CheckpointError as error:  # the damage is the error
                found = found._replace(not_rebuilt=dict.fromkeys(found.lost_files, str(error)))
        return found, locks.pop_all()
