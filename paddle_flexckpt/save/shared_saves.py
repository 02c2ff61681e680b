"""Saves to a directory that all ranks share: written by the ranks themselves, or by their background writers.

Tested in tests/distributed/test_save_load.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.background import SaveHandle, SaveSlot, WriteJob
from paddle_flexckpt.background.staging import LockPages
from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.memory.device_bytes import lock_pages
from paddle_flexckpt.native.checksums import Checksums, hash_block
from paddle_flexckpt.native.group_save import GroupSave
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.save.partition_writers import PartitionWriter
from paddle_flexckpt.save.save_options import SaveOptions
from paddle_flexckpt.save.save_plan import Share, Written
from paddle_flexckpt.save.sliced_saves import SMALL_BYTES, Staging, blocks_of


class SharedSave:
    """One save to a directory that all ranks share. The coordinator commits it.

    Attributes:
        directory: The directory.
        names: The names of the save's files: the coordinator has them from :meth:`begin` on, all from :meth:`agree` on.
        lock: The coordinator's right to save here.
    """

    names: SaveNames

    def __init__(self, comm: Communicator, directory: SaveDirectory, options: SaveOptions, context: str) -> None:
        """Take the ranks, their directory, the options, and errors' context."""
        self.directory = directory
        self.lock: SaveLock | None = None
        self._comm, self._options, self._context = comm, options, context
        self._coordinator_rank = options.coordinator_rank
        # The files that the coordinator found here when it had the lock.
        self._before: list[str] = []
        # Whether this rank may remove files here: not from the commit on.
        self._is_removable = False
        self._is_committing = False
        self._partitions: PartitionWriter | None = None

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank commits."""
        return self._comm.position == self._coordinator_rank

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Lock the directory and mark the save as begun, on the coordinator; return its names there.

        The second result is this rank's message to the others.
        """
        if not self.is_coordinator:
            return None, b""
        self.lock, self._before, self.names = self.directory.begin_save(
            self._options.unique_id, self._comm.size, self._options.overwrite
        )
        self._is_removable = True
        return self.names, b""

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take what the ranks sent: the names of the save, their directories, and the results of :meth:`begin`.

        One collective if the directories are not known to be the same, so that each rank looks for the marker.

        Raises:
            ValidationError: A rank sees another directory.
        """
        if len(set(places)) > 1:
            self._comm.together(lambda: self._check_visible(names), "cannot save, and nothing was written")
        self.names, self._is_removable = names, True

    def _check_visible(self, names: SaveNames) -> tuple[None, bytes]:
        if not self.directory.sees(names):
            marker = self.directory.backend.where(names.marker_file)
            raise ValidationError(
                f"{marker} is not there, with which the coordinator has begun the save: ranks do not share one "
                "directory. Remedy: give all ranks the same path of storage that they share; or save with "
                "storage='per_node', to a directory on each node"
            )
        return None, b""

    def write(self, share: Share, hashed: np.ndarray) -> Written:
        """Write this rank's data file.

        Returns block checksums at least of the items ``hashed``, bool ``[n]``; and messages to others: the rows, to
        those who write partitions, or the part, to the coordinator.
        """
        save = self._save = GroupSave(self._comm, self.directory, self.names, self._coordinator_rank)
        with share.data() as data:
            part = save.write(share.items, data, before=self._before, **share.written())
        if not share.partitions:
            return Written(b"", part.checksums, save.send(part))
        self._partitions = PartitionWriter(self._comm, self.directory, self.names, share.partitions)
        told, rows = self._partitions.send(part)
        return Written(told, part.checksums, rows)

    def write_partitions(self, said: Sequence[bytes], received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Write this rank's partitions, if ranks write them; return its message to the coordinator, by position.

        Args:
            said: The message of each rank's :meth:`write` to all.
            received: The messages of others' :meth:`write` to this one alone, by position.
        """
        if self._partitions is None:
            return {}
        return {self._coordinator_rank: self._partitions.write(said, received)}

    def commit(self, parts: Sequence[bytes], received: Mapping[int, bytes], described: Mapping[int, bytes]) -> None:
        """Make the checkpoint exist. One collective.

        Args:
            parts: The message of each rank's :meth:`write` to all.
            received: The messages of others' :meth:`write` to this rank alone.
            described: The message of each rank's :meth:`write_partitions` to the coordinator.

        Raises:
            CheckpointError: The coordinator could not commit.
        """
        # Only the coordinator knows whether it has committed.
        self._is_removable, self._is_committing = False, True
        if self._partitions is None:
            self._save.commit(received, self._context)
        else:
            self._comm.lead(self._coordinator_rank, lambda: self._commit_partitions(described), self._context)

    def _commit_partitions(self, described: Mapping[int, bytes]) -> None:
        if self._partitions is not None:
            manifest = self._partitions.manifest([*described.values()])
            self.directory.commit_manifest(self.names, manifest, is_checked=True)

    def discard(self) -> None:
        """Remove what all ranks wrote, unless the save may exist. The coordinator, which has the lock, does this.

        If the commit failed because another save has the right to save by now, the marker is gone, and each rank has to
        remove its own files.
        """
        if self._is_committing:
            self.directory.discard_late(self.names, [self._comm.rank])
        elif self.is_coordinator and self.lock is not None:
            count = self._partitions.count if self._partitions else 0
            self.directory.discard(self.names, self._comm.ranks, count)

    def lose_rank(self, error: LostRankError) -> None:
        """Leave everything as it is, as the progress of other ranks is not known; or report that this rank is late."""
        self.directory.discard_late(self.names, [self._comm.rank])

    def release(self) -> None:
        """Release the right to save here."""
        if self.lock is not None:
            self.lock.release()


class BackgroundSave(SharedSave):
    """One save that is staged in memory and handed over to this rank's background writer.

    The writers of all ranks carry it out as a group (``background/outcome.py``).
    """

    def __init__(self, slot: SaveSlot, *arguments: Any) -> None:
        """Take room with the writer, and the arguments of :class:`SharedSave`."""
        super().__init__(*arguments)
        self._slot = slot
        self._addresses: tuple[str, ...] = ()
        self._staging: Staging | None = None
        # For a save in slices: its memory, the items' digests at the call, and the error of a slice.
        self._space: np.ndarray = np.empty(0, dtype=np.uint8)
        self._then: np.ndarray = self._space
        self._small = min(SMALL_BYTES, self._options.slice_bytes or 0)
        self._failure: Exception | None = None

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Implement :meth:`SharedSave.begin`. The other writers need the address of this rank's writer."""
        names, _ = super().begin()
        return names, self._slot.address.encode()

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Implement :meth:`SharedSave.agree`."""
        super().agree(names, places, messages)
        self._addresses = tuple(message.decode() for message in messages)

    def _job(self, share: Share) -> WriteJob:
        return WriteJob(
            path=self.directory.path,
            storage=self.directory.backend.reopen_token(),
            lock=None if self.lock is None else self.lock.handover()[0],
            names=self.names,
            items=share.items,
            rank=self._comm.rank,
            ranks=self._comm.ranks,
            coordinator=self._comm.ranks[self._coordinator_rank],
            step=share.step,
            timeout=self._slot.timeout,
            addresses=self._addresses,
        )

    def _open_staging(self, share: Share) -> Staging:
        """Allocate memory for this rank's data that the writer shares; nothing is copied yet."""
        self._space = self._slot.stage(self._job(share), _page_lock(share))
        # Memory that an earlier save had locked for a device may serve one whose tensors are all on the host.
        device = share.devices[0] if share.devices and self._slot.is_locked else None
        return Staging(share.sources(), self._space, device)

    def begin_slices(self, share: Share) -> np.ndarray:
        """Allocate memory for this rank's data, copy small items, and return a digest of each item as it is now."""
        self._staging = self._open_staging(share)
        self._staging.begin(share.sources(), self._small)
        self._then = share.digests()
        digests: np.ndarray = self._then["digest"]
        return digests

    def keep(self, handle: SaveHandle) -> None:
        """Register the handle of a save in slices with the writer, so that a save whose handle was dropped is known."""
        self._slot.sliced = handle

    def stage_slice(self, nbytes: int) -> bool:
        """Copy the next slice of this rank's data; return whether there is more. :meth:`write` raises its errors."""
        if self._staging is None or self._failure is not None:
            return False
        try:
            self._staging.advance(nbytes)
        except Exception as error:  # the other ranks are not waiting here: they learn of it in the next exchange
            self._failure = error
        return self._failure is None and not self._staging.is_done

    def write(self, share: Share, hashed: np.ndarray) -> Written:
        """Copy this rank's data, or what slices have left of it, to memory that the writer shares.

        Raises:
            ValidationError: It has changed since the first slice.
        """
        if self._failure is not None:
            raise self._failure
        lengths = share.items.byte_length
        ends = lengths.cumsum()
        spans = zip((ends - lengths)[hashed].tolist(), ends[hashed].tolist())
        if self._options.staging_bytes is not None and lengths.sum() > self._options.staging_bytes:
            checksums = self._write_in_waves(share, self._options.staging_bytes, spans)
        else:
            checksums = (self._staging or self._open_staging(share)).finish(spans)
        if self._staging is not None:
            changed = np.flatnonzero((self._then != share.digests(self._space)) & (lengths > self._small))
            if len(changed):
                rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise ValidationError(
                    f"{share.items.key_name(changed[0])!r}{rest} changed while the save was staged in slices. Remedy: "
                    "call finish_staging() before optimizer.step(), or have finish_before(optimizer) do so; where "
                    "something else changes it, as the forward pass a buffer, save without slice_bytes"
                )
        sums = np.asarray(checksums, dtype=np.uint64)
        return Written(b"", Checksums.of_items(sums, np.where(hashed, lengths, 0)))

    def _write_in_waves(self, share: Share, nbytes: int, hashed: Iterable[tuple[int, int]]) -> list[int]:
        """Have the writer write while this rank's data is copied, through so much memory; wait for the last copy.

        Returns the block checksums of ``hashed``, as :meth:`Staging.finish` does: a bucket has whole blocks.
        """
        job = self._job(share)
        lock, self.lock = self.lock, None
        self._is_removable = False  # the files belong to the writer
        waves = self._slot.stage_in_waves(job, nbytes, _page_lock(share), lock)
        staging, left = Staging(share.sources(), np.empty(0, dtype=np.uint8), None), job.data_bytes
        blocks, checksums, begin = blocks_of(hashed), [], 0
        block = next(blocks, None)
        while left:
            bucket = waves.bucket()
            count = staging.fill(bucket)
            while block is not None and block[0] < begin + count:
                checksums.append(hash_block(bucket[block[0] - begin : block[1] - begin]))
                block = next(blocks, None)
            waves.send(count)
            left -= count
            begin += count
        return checksums

    def hand_over(self, report: SaveReport, begin: float, handle: SaveHandle | None = None) -> SaveHandle:
        """Hand the save over, and the lock with it. From now on a failure is its outcome: ranks do not meet again."""
        lock, self.lock = self.lock, None
        return self._slot.hand_over(report, begin, lock, handle)

    def lose_rank(self, error: LostRankError) -> None:
        """Tell the other ranks' writers, as those ranks may not have noticed, and have handed their shares over."""
        self._slot.refuse(error)


def _page_lock(share: Share) -> LockPages | None:
    """Return a function that page-locks memory for the device of a share."""
    return functools.partial(lock_pages, device=share.devices[0]) if share.devices else None
