"""Options of a save.

Tested in tests/loading/test_options.py and tests/saving/test_nodes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.saving.replica_policies import CheckReplicas, ReplicaPolicies
from paddle_flexckpt.transfer.options import ProgressOptions, Storage, rule

if TYPE_CHECKING:
    from paddle_flexckpt.background.writer import BackgroundWriter

# A slice holds at least one element of any dtype, and is large enough to be worth a call.
_LEAST_SLICE = 4096
# The least memory for a copy in waves.
LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class SaveOptions(ProgressOptions):
    """The options of a save.

    Attributes:
        coordinator_rank: The rank, counted within the group, that chooses the id and commits.
        unique_id: The checkpoint's id. None takes the next free one. A checkpoint with the same id is replaced: it
            stays as it was until the new one is complete.
        overwrite: Whether an id that exists may be replaced. If not, the save is refused before anything is written.
        async_save: Return as soon as this rank's share is copied to memory that a writer process shares; that process
            does the rest. Tensors may be changed as soon as the call returns. True uses one writer for the whole
            process; or pass a BackgroundWriter. It needs Linux, and memory for the copy.
        save_replicas: Write every replica of every shard.
        step: Training step to record in the manifest.
        check_replicas: How replicas of one shard are compared: one policy for all keys, or a dict by glob or compiled
            regular expression, where the first match counts and ``"*"`` is the default (``"equal"`` without it).
            ``"equal"``, or True: the save fails unless their bytes are equal. The shard that is saved is compared on
            two ranks, another two with each plan, and 64 bytes of each replica on all ranks; a difference of a few
            bytes in a replica that is not saved may go unnoticed. ``"all"``: as ``"equal"``, but every rank reads and
            compares every byte that it holds. ``"close"``: where replicas differ, the values of one rank are saved,
            and the report and a warning have the distance; more than 1/16 of the largest value is an error, and so is
            any difference between values that are not floating point. ``"first"``: the values of one rank are saved,
            and the report has whether others differ. False: as ``"first"`` without comparing (with ``save_replicas``
            they are compared nonetheless). The one rank is the same for a whole layer and its states: the lowest that
            holds them. Running statistics of normalisation layers are ``"first"`` unless a pattern matches them.
        storage: ``"shared"``: all ranks see the same directory. ``"per_node"``: the ranks of each node see one of their
            own, under the same path or another; each gets the data of its ranks and a manifest of all, and the
            checkpoint exists on all of them or on none. Which ranks share a directory is found out. It is loaded with
            ``storage="per_node"``. With ``async_save`` the call writes this rank's data file, and the writer
            processes make copies and commit.
        node_copies: With ``storage="per_node"``: the number of nodes that store each data file. With 2, a checkpoint
            survives the loss of any one node.
        parity: With ``storage="per_node"``, in place of copies: the number of nodes of a group, 2 or more. Each node
            also stores parity of the others' data, ``1 / (parity - 1)`` of what it has itself, and a load rebuilds the
            data of one lost node of each group. The nodes are divided into as many groups as possible, as evenly as
            possible. All need the same number of ranks.
        staging_bytes: With ``async_save``: the most memory for the copy, 64 MiB at least. A larger share uses it in
            waves: the writer writes while the call copies, and the call returns after the last copy.
        slice_bytes: With ``async_save``: the most bytes to copy at a time. The call reads this rank's share, copies
            tensors of up to 64 KiB, and returns a SlicedSave. Call its ``stage_next()`` between micro-steps to copy
            at most so many bytes, and ``finish_staging()`` before ``optimizer.step()`` to copy the rest. The larger
            tensors must not change until then. Ranks may have slices of different sizes.
    """

    coordinator_rank: int = 0
    unique_id: int | None = None
    overwrite: bool = field(default=True, metadata=rule(choices=(True, False)))
    async_save: bool | BackgroundWriter = field(
        default=False, metadata=rule(compared=lambda writer: writer is not False)
    )
    save_replicas: bool = False
    step: int | None = None
    check_replicas: CheckReplicas = field(
        default=True, metadata=rule(compared=lambda value: ReplicaPolicies(value).agreed)
    )
    storage: Storage = field(default="shared", metadata=rule(choices=("shared", "per_node")))
    node_copies: int = 1
    parity: int | None = None
    staging_bytes: int | None = None
    slice_bytes: int | None = field(default=None, metadata=rule(compared=lambda nbytes: nbytes is not None))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have, or two do not go together."""
        super().check()
        if self.storage == "per_node" and (self.staging_bytes is not None or self.slice_bytes is not None):
            raise ValidationError(
                "staging_bytes and slice_bytes do not go with storage='per_node', where the call writes the data file "
                "itself and stages nothing. Remedy (FC101): leave them out"
            )
        if self.progress is not None and self.async_save is not False:
            raise ValidationError(
                "progress= works only with synchronous saves. Remedy (FC101): leave progress= out, and ask "
                "handle.progress"
            )
        if self.staging_bytes is not None and (
            self.async_save is False or self.slice_bytes is not None or self.staging_bytes < LEAST_BYTES
        ):
            raise ValidationError(
                f"staging_bytes={self.staging_bytes!r} needs async_save, no slice_bytes, and {LEAST_BYTES} bytes or "
                "more. Remedy (FC101): leave it out, or save synchronously, which takes less"
            )
        if self.slice_bytes is not None and (self.async_save is False or self.slice_bytes < _LEAST_SLICE):
            raise ValidationError(
                f"slice_bytes={self.slice_bytes!r} needs async_save, and at least {_LEAST_SLICE} bytes. "
                "Remedy (FC101): give both, or neither"
            )
        if self.storage == "shared" and self.node_copies != 1:
            raise ValidationError([f"node_copies={self.node_copies!r} needs storage='per_node'"])
        if self.parity is not None and (self.storage == "shared" or self.node_copies != 1):
            raise ValidationError([f"parity={self.parity!r} needs storage='per_node', and no node_copies"])
