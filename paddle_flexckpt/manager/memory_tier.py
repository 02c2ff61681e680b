"""The memory tier: where the nodes of a run keep its newest steps in memory, and when.

Tested in tests/manager/test_memory_tier.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.manager.policies import SavePolicy, check_policies
from paddle_flexckpt.media.backend import exists
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import is_remote, open_destination

_ANOTHER = "give one below /dev/shm that is not there yet"


@dataclass(frozen=True)
class MemoryTier:
    """A tier of steps in the memory of the nodes, between those in the root of a :class:`CheckpointManager`.

    A restart under any layout takes the newest step that is whole, in memory or in the root. A step in memory survives
    the end of all processes, and the loss of as many nodes as there are ``copies`` but one, or with ``parity`` of one
    node of each group; it does not survive that the power of all nodes fails.

    Attributes:
        path: A directory of each node in a file system that lies in memory, such as one below ``/dev/shm``. Ranks may
            have another one.
        save_when: The policies of steps in memory, as those of the manager.
        copies: The number of nodes that have each data file, unless there is ``parity``. On fewer nodes each has one,
            with a warning.
        parity: In place of copies: the number of nodes of a group, 2 or more. As in :func:`save_state_dict`, each node
            also has ``1 / (parity - 1)`` of the bytes of its own data.
        keep: The number of steps in memory. An older one goes when a newer one is whole on all nodes, so there has to
            be room for one more; with the manager's ``async_save`` for another, which a save to the root reads.
        limit: The most bytes in a node's directory; None: what its file system has free. Ranks may have another one.
            It is checked before the first save, and in the constructor of a manager that is given the model.
    """

    path: str | os.PathLike[str]
    save_when: SavePolicy | Sequence[SavePolicy]
    copies: int = 2
    parity: int | None = None
    keep: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        # Without a docstring, as the reference shows the methods that have one.
        problems: list[str] = []
        if is_remote(self.path):
            problems.append(
                f"path is a directory in the memory of a node; got {self.path!r}. Remedy (FC507): {_ANOTHER}"
            )
        for name, least in {"copies": 1, "parity": 2, "keep": 1, "limit": 1}.items():
            value = plain_integer(getattr(self, name))
            object.__setattr__(self, name, value)
            if (type(value) is not int or value < least) and not (name in ("parity", "limit") and value is None):
                problems.append(
                    f"{name} has to be an integer >= {least}; got {value!r}. Remedy (FC507): correct {name}"
                )
        try:
            object.__setattr__(self, "save_when", check_policies("save_when", self.save_when, SavePolicy))
        except ValidationError as error:
            problems += error.lines
        if self.save_when == ():
            problems.append("save_when has no policy, so nothing is saved. Remedy (FC507): give SaveEvery(20), say")
        if problems:
            raise ValidationError(problems, "cannot make a MemoryTier")
        object.__setattr__(self, "path", os.path.abspath(open_destination(self.path).path))


def own_directory(tier: MemoryTier, run: str = "") -> LocalBackend:
    """Return a tier's directory, or that of a run there; ValidationError if others could have put steps into it.

    The tier's, and not the run's, may be one that all share, as /dev/shm is.
    """
    above, user = LocalBackend(str(tier.path)), os.geteuid()
    directory = above.child(run) if run else above
    for each in filter(exists, (above, directory)):
        found, owners = os.stat(each.path), {os.lstat(each.path).st_uid, os.stat(each.path).st_uid}
        is_shared = each is above and found.st_mode & stat.S_ISVTX and owners <= {0, user}
        if not is_shared and (owners != {user} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise ValidationError(
                f"others than user {user} could have put steps into {each.path}: its owner is user {found.st_uid}, its "
                f"mode {stat.S_IMODE(found.st_mode):o}. Remedy (FC507): `chmod go-w {each.path}`, if it is this user's "
                f"and nobody else writes there; else {_ANOTHER}"
            )
    return directory


def stored_by(tier: MemoryTier, shares: Sequence[int], node: int) -> int:
    """Return the bytes that a node stores of a step of which the nodes write these shares."""
    copies, parity = copies_on(tier, len(shares))
    if parity is not None:
        return shares[node] + -(-max(shares) // (parity - 1))
    return sum(shares[node - copy] for copy in range(copies))


def copies_on(tier: MemoryTier, nodes: int) -> tuple[int, int | None]:
    """Return copies and parity of saves to so many nodes: no more than there are."""
    if tier.parity is not None:
        return 1, min(tier.parity, nodes) if nodes > 1 else None
    return min(tier.copies, nodes), None


def few_nodes(tier: MemoryTier, nodes: int) -> str:
    """Return the warning about a job of fewer nodes than a tier is for; "" if there are enough."""
    wanted = tier.parity or tier.copies
    if nodes >= wanted:
        return ""
    return (
        f"the memory tier is for {wanted} nodes or more, and the job has {nodes}: a step in memory has no more copies "
        f"than that{', and does not survive the loss of the node' * (nodes == 1)}"
    )


def compared(tier: object) -> object:
    """Return what ranks compare of a tier."""
    return repr(replace(tier, path="/", limit=None)) if isinstance(tier, MemoryTier) else tier
