"""Removal of files that no checkpoint needs.

A file is removed if its save has died, if a later save of its id has replaced it, if it is a message between ranks of
an ended save, or if it is a manifest or companion that was never put in place. A save has died if its marker is here
and another save has the save lock. Other files that no manifest names stay: their manifest may be lost.

The holder of the save lock lists the directory, checks that it still has the lock, and then removes files of that
listing. No later save has these names, so it does no harm if the right is lost in between.

Tested in tests/native/test_cleaner.py and tests/native/test_directory.py.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import map_files, run_beside
from paddle_flexckpt.native.companion import CompanionFile
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import SaveId, SaveNames, is_message, marked_by, save_of

logger = logging.getLogger("paddle_flexckpt")


class BegunSave(NamedTuple):
    """A save that has begun, as its marker describes it.

    Attributes:
        marker: The marker's name.
        save: The identity that its files' names have.
        token: Its save token.
        nodes: The number of nodes' directories that it goes to.
        prepared: Files which record that it is complete here and perhaps published elsewhere; none once it is here.
    """

    marker: str
    save: SaveId
    token: str
    nodes: int
    prepared: list[str]


def find_begun(directory: CheckpointDirectory, names: Sequence[str] | None = None) -> Iterator[BegunSave]:
    """Yield the saves whose markers are here."""
    names = directory.backend.names() if names is None else names
    for marker in sorted(names):
        save = marked_by(marker)
        if save is None:
            continue
        token, nodes = save.token, 1
        try:
            content = json.loads(directory.backend.read(marker))
            token, nodes = str(content["token"]), int(content.get("nodes", 1))
        except FileNotFoundError:
            continue  # a rank of a save that has just failed has removed it, after that save's files
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # the save died before the marker was complete, so before any other file
        prepared = [name for name in names if name.endswith(".prepared") and save_of(name) == save]
        if prepared and directory.save_token(save.unique_id) == token:
            prepared = []
        yield BegunSave(marker, save, token, nodes, prepared)


class Cleaner:
    """A cleaner of one directory: it removes what saves have left. The caller holds the save lock there."""

    def __init__(self, directory: CheckpointDirectory, companion: CompanionFile) -> None:
        """Take the directory, which need not exist, and its companion."""
        self._directory, self._backend, self._companion = directory, directory.backend, companion
        self._temporary = re.compile(rf"(?:\d+\.manifest|{re.escape(companion.name)})\.[0-9a-f]{{32}}\.tmp", re.ASCII)

    def remove_dead_saves(
        self, own: SaveNames | None = None, aborted: Collection[str] = (), names: Sequence[str] | None = None
    ) -> list[str]:
        """Remove the files of saves that died; return the names of the files removed.

        Prepared saves stay: another node may have published its part of the save. Where the save lock can expire, a
        save that counts as dead may be suspended right before its commit. So its files stay until the commit of
        ``own``, the save that is being made, which it cannot replace any more.

        Args:
            own: The save that is being made, if any.
            aborted: Tokens of prepared saves that no node has published.
            names: The directory's files as the caller has listed them since it has the save lock. None lists them.
        """
        names = self._backend.names() if names is None else names
        useless = list(filter(self._temporary.fullmatch, names))
        dead: list[BegunSave] = []
        if own is None or not self._backend.locks.can_run_out:
            useless += filter(is_message, names)
            useless += self._unnamed_partitions(names)
            dead = [each for each in self._others(own, names) if not each.prepared or each.token in aborted]
        return self._remove(useless, dead, names)

    def remove_replaced(self, own: SaveNames, manifest: Manifest, names: Sequence[str], being_read: bool) -> None:
        """Remove files that a just committed save does not need, and those that others left; its own marker is last.

        ``names`` were listed since the commit. Files of a replaced checkpoint that is ``being_read`` stay for the next
        save of its id, or its removal.
        """
        named = {*manifest.files}
        useless = [*filter(self._temporary.fullmatch, names), *filter(is_message, names)]
        saves = [(name, save) for name in names if (save := save_of(name)) is not None and name not in named]
        useless += [name for name, save in saves if save == own.save_id]
        if not being_read:
            begun = {*map(marked_by, names)}
            # Without a checkpoint to replace, data files of no unfinished save are those of a lost manifest.
            useless += [
                name
                for name, save in saves
                if save.unique_id == own.unique_id
                and save != own.save_id
                and (own.replaces or save in begun or not save.token or not name.endswith(".safetensors"))
            ]
        others = self._others(own, names)
        dead = [each for each in others if each.save.unique_id == own.unique_id or not each.prepared]
        self._remove(useless, dead, names)
        self._companion.remove_refusal(own.marker_file)
        remove_marker = partial(self._backend.remove, own.marker_file)
        run_beside(self._backend, remove_marker, self._backend.locks.check_before_release)

    def remove_save(self, save: SaveNames, also: Iterable[str] = ()) -> None:
        """Remove a save that can no longer be committed, and its marker.

        None of its ranks writes any more. ``also`` has names of its files that a listing may not show yet.
        """
        files = {*also, *filter(save.owns, self._backend.names())}
        self._remove_unfinished({save.save_id})
        self._remove_files(sorted(files))
        self._companion.remove_refusal(save.marker_file)
        self._backend.remove(save.marker_file)

    def _others(self, own: SaveNames | None, names: Sequence[str]) -> list[BegunSave]:
        """Return the saves whose markers are here, except the own one, whose marker need not be read."""
        return list(find_begun(self._directory, [name for name in names if own is None or name != own.marker_file]))

    def _remove(self, useless: Sequence[str], dead: Sequence[BegunSave], names: Sequence[str]) -> list[str]:
        """Remove useless files, and the files of dead saves that no manifest names; return what was removed."""
        named_by_id = {each.save.unique_id: self._named(each.save.unique_id) for each in dead}
        # If a manifest is damaged, it cannot be known whose files these are.
        dead = [each for each in dead if named_by_id[each.save.unique_id] is not None]
        named = {each.save: named_by_id[each.save.unique_id] or set() for each in dead}
        # Saves that died after their commit. They may not yet have removed the files of what they replaced.
        committed = {save.unique_id: files for save, files in named.items() if save in map(save_of, files)}
        begun = {*map(marked_by, names)}

        def left(names: Iterable[str]) -> list[str]:
            return [name for name in names if (save := save_of(name)) in named and name not in named[save]]

        def is_replaced(name: str) -> bool:
            save = save_of(name)
            replacing = committed.get(save.unique_id) if save is not None and save not in begun else None
            return replacing is not None and name not in replacing

        files = sorted({*useless, *left(names), *filter(is_replaced, names)})
        markers = [each.marker for each in dead]
        if not files and not markers:
            return []
        # A save that has taken the save lock over meanwhile has a marker here too.
        self._backend.locks.ensure_held()
        if dead:
            self._remove_unfinished(named.keys())
        if committed:
            self._companion.update()
        self._remove_files(files)
        if markers:
            map_files(self._backend, self._backend.remove, markers)
            # Ranks of a dead save may live. A rank that still saw the marker leaves its files to this clean-up.
            late = left(self._backend.names())
            self._remove_files(late)
            self._companion.remove_refusal()
            files += late
        return [*files, *markers]

    def _named(self, unique_id: int) -> set[str] | None:
        """Return the files that the manifest of an id names; none if there is none, None if it cannot be read."""
        try:
            return {*self._directory.read_committed(unique_id, ()).files}
        except FileNotFoundError:
            return set()
        except (CorruptCheckpointError, ValidationError):
            return None

    def _unnamed_partitions(self, names: Sequence[str]) -> list[str]:
        """Return the partitions of manifests in place that a repaired manifest does not have."""

        def find(unique_id: int) -> list[str]:
            named = self._named(unique_id) or set()
            committed = {*map(save_of, named)}
            return [name for name in partitions if save_of(name) in committed and name not in named]

        partitions = [name for name in names if name.endswith(".partition")]
        ids = sorted({save.unique_id for save in map(save_of, partitions) if save})
        return [name for found in map_files(self._backend, find, ids) for name in found]

    def _remove_files(self, names: Sequence[str]) -> None:
        map_files(self._backend, self._backend.remove, names)
        if names:
            self._backend.sync()  # nobody would look for a file that a loss of power brought back

    def _remove_unfinished(self, saves: Collection[SaveId]) -> None:
        """Remove the unfinished uploads of saves to a remote store."""
        try:
            self._backend.remove_unfinished(lambda name: save_of(name) in saves)
        except OSError as error:
            # Not every store lets everybody list them; leaving them only costs storage.
            logger.warning(f"unfinished uploads of dead saves could not be looked for: {error}")
