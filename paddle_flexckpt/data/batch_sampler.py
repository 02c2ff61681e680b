"""A batch sampler whose position is one number, the same on every rank: the samples that the whole job has taken.

The order of all samples follows from the seed and the epoch alone. A global batch is the next ``batch_size x
num_replicas`` samples of that order, and each rank takes its part of it. So a run continues exactly where another one
stopped, with any number of ranks and any batch size.

Tested in tests/data/test_batch_sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import numpy as np

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.transfer.arguments import plain_arguments

Batch = TypeVar("Batch")

_VERSION = 1
# The fields of a state that belong to the order of samples, and the reason why it depends on them.
_ORDER = {
    "length": "the data has another number of samples",
    "seed": "the samples are shuffled with another seed",
    "shuffle": "the samples are shuffled in one run, and not in the other",
}
_LOOP = (
    "Remedy (FC101): after a restore, loop over range(sampler.epoch, epochs), and in each epoch over "
    "sampler.batches(loader) anew, which counts the batches"
)


class ElasticBatchSampler:
    """The batches of one rank, for the ``batch_sampler`` of ``paddle.io.DataLoader``.

    It has the interface of ``paddle.io.DistributedBatchSampler``, and a state. A loader alone draws batches ahead of
    the training, so iterate over :meth:`batches`, which counts what the loop has received. The manager saves and
    restores it as ``data=``: docs/manager.md has the loop.

    Every batch is full. The last batch of an epoch is filled with the first samples of the next epoch, which are not
    repeated there. With ``drop_last`` the samples that fill no batch are left out.

    Attributes:
        dataset: The data.
        batch_size: Samples of a batch on one rank.
        num_replicas: The number of ranks that divide a global batch.
        rank: The number of this one among them.
        shuffle: Whether each epoch has an order of its own.
        drop_last: Whether the rest of an epoch is left out.
        seed: The seed of the orders.
        position: The samples that all ranks have taken since the beginning of the first epoch.
    """

    @plain_arguments
    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        """Begin at the first sample.

        Args:
            dataset: Data with a length, the same on every rank.
            batch_size: Samples of a batch on one rank.
            num_replicas: The number of ranks that divide a global batch. None: the data parallel ranks times the
                sharding ranks of fleet's topology; without fleet, all ranks.
            rank: The number of this one among them; None: that of the topology.
            shuffle: Whether each epoch has an order of its own.
            drop_last: Whether to leave out the samples at the end of an epoch that fill no global batch.
            seed: The seed of the orders, from 0 to 2^32 - 1.

        Raises:
            ValidationError: An argument is invalid.
        """
        num_replicas, rank = data_ranks(num_replicas, rank)
        self.dataset, self.shuffle, self.drop_last = dataset, shuffle, drop_last
        self.batch_size, self.num_replicas, self.rank, self.seed = batch_size, num_replicas, rank, seed
        self._length = len(dataset)
        problems = [
            Problem(
                f"{name} has to be an integer from {least} to {most}", got=repr(value), code="FC101", remedy="give one"
            )
            for name, value, least, most in (
                ("batch_size", self.batch_size, 1, 2**31),
                ("num_replicas", self.num_replicas, 1, 2**31),
                ("rank", self.rank, 0, self.num_replicas - 1),
                ("seed", self.seed, 0, 2**32 - 1),
            )
            if not least <= value <= most
        ]
        if not problems and self._length < (self.global_batch_size if drop_last else 1):
            least = f"{self.global_batch_size} samples, one global batch" if drop_last else "a sample"
            problems.append(Problem("the data is too short", expected=least, got=f"{self._length} samples"))
        if problems:
            raise ValidationError(problems)
        self.position = 0
        # Whether batches were drawn by a loader that batches() does not iterate over.
        self._is_unfollowed = False
        # Position and samples of a global batch that a loader's next batch was drawn for; None: of no loader.
        self._drawn: tuple[int, int] | None = None
        self._restored_epoch = 0

    @property
    def global_batch_size(self) -> int:
        """Return the samples that all ranks take in one step."""
        return self.batch_size * self.num_replicas

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that the next batch belongs to, from 0."""
        return self.position // self._length

    @plain_arguments
    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; do nothing if the next batch belongs to it.

        Raises:
            ValidationError: It is before the epoch that was restored.
        """
        if epoch < self._restored_epoch:
            raise ValidationError(
                f"set_epoch({epoch}) would go back from sample {self.position} to {epoch * self._length}; this run "
                f"was restored in epoch {self._restored_epoch}. {_LOOP}"
            )
        if epoch != self.epoch:
            self.position = epoch * self._length

    def __len__(self) -> int:
        """Return the number of batches that are left of this epoch."""
        left = self._length - self.position % self._length
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's batches of the rest of the epoch, as lists of numbers of samples."""
        self._is_unfollowed, self._drawn = True, self._next()
        return self._draw(self.position, len(self))

    def _next(self) -> tuple[int, int]:
        return self.position, self.global_batch_size

    def _check(self, drawn: tuple[int, int] | None) -> None:
        if drawn not in (None, self._next()):
            raise ValidationError(
                f"the loader has drawn its batches for another position or batch size; expected {drawn}, as "
                f"(position, samples of a global batch); got {self._next()}. {_LOOP}"
            )

    def _draw(self, position: int, count: int) -> Iterator[list[int]]:
        epochs: dict[int, np.ndarray] = {}
        for begin in range(position, position + count * self.global_batch_size, self.global_batch_size):
            first = begin + self.rank * self.batch_size
            found = list[int]()
            while len(found) < self.batch_size:
                epoch, offset = divmod(first + len(found), self._length)
                if epoch not in epochs:
                    epochs = {epoch: self._order(epoch)}
                found += epochs[epoch][offset : offset + self.batch_size - len(found)].tolist()
            yield found

    def _order(self, epoch: int) -> np.ndarray:
        """Return int64 ``[samples]``, the order of an epoch. RandomState's numbers are those of every numpy release."""
        if not self.shuffle:
            return np.arange(self._length)
        return np.random.RandomState([self.seed, epoch]).permutation(self._length)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Return the batches of a loader for the rest of the epoch; each counts as taken once it is returned.

        Args:
            loader: A loader whose ``batch_sampler`` is this sampler.

        Raises:
            ValidationError: The loader has another batch sampler; or the position or the batch size has changed within
                the loop, by a restore for example.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise ValidationError(
                "the loader does not draw its batches from this sampler. Remedy (FC101): make the loader with "
                "batch_sampler= this sampler"
            )
        return self._follow(loader)

    def _follow(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        workers = getattr(loader, "_iterator", None)
        if workers is not None and workers._batches_outstanding:
            # Persistent ones, of a loop that was left. Paddle would go on with batches of that loop.
            workers._try_shutdown_all()
            loader._iterator = None  # type: ignore[attr-defined]
        drawn, expected = iter(loader), self._next()
        for batch in drawn:
            self._check(expected)
            self.advance()
            expected = self._next()
            yield batch
        self._is_unfollowed = False

    @plain_arguments
    def advance(self, batches: int = 1) -> None:
        """Count batches as taken, in a loop that does not iterate over :meth:`batches`.

        Raises:
            ValidationError: The loader's iterator is older than a restore.
        """
        self._check(self._drawn)
        self._is_unfollowed = False
        for _ in range(batches):
            self.position += self.global_batch_size
            self._leave_out()
        self._drawn = self._drawn and self._next()

    def _leave_out(self) -> None:
        """Go to the next epoch if what is left of this one fills no batch, and is to be left out."""
        left = self._length - self.position % self._length
        if self.drop_last and left < self.global_batch_size:
            self.position += left

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is bound to; the same on every rank.

        Raises:
            ValidationError: A loader has drawn batches, and nothing has counted those that were taken.
        """
        if self._is_unfollowed:
            raise ValidationError(
                f"a loader has drawn batches from this sampler, ahead of the training, and none was counted. {_LOOP}"
            )
        return {"version": _VERSION, "position": self.position, **self._order_of_all()}

    def _order_of_all(self) -> dict[str, int | bool]:
        return {"length": self._length, "seed": self.seed, "shuffle": bool(self.shuffle)}

    def refuse(self, state: Mapping[str, Any]) -> str | None:
        """Return why a state does not belong to this data, seed and kind of order; None if it does."""
        return refuse_state("ElasticBatchSampler", state, self._order_of_all(), _ORDER)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state, which may be that of a run with other ranks and batches.

        Raises:
            ValidationError: It does not belong to this data, seed and kind of order; nothing has changed.
        """
        why = self.refuse(state)
        if why is not None:
            raise ValidationError(
                f"the position in the data does not continue here: {why}. Remedy (FC904): make the sampler as in "
                "the run that saved it, or begin this data at its first sample"
            )
        self.position, self._is_unfollowed = int(state["position"]), False
        self._leave_out()
        self._restored_epoch = self.epoch


def refuse_state(kind: str, state: Any, own: Mapping[str, Any], reasons: Mapping[str, str], *more: str) -> str | None:
    """Return why a state does not belong to this object; None if it does."""
    fields = {"version", "position", *own, *more}
    if not isinstance(state, Mapping) or {*state} != fields or state["version"] != _VERSION:
        return f"this is no state of an {kind}: {str(state)[:200]}"
    problems = [
        f"{why}: {name} was {state[name]} when it was saved, and is {own[name]} here"
        for name, why in reasons.items()
        if state[name] != own[name]
    ]
    return "; ".join(problems) or None


def data_ranks(num_replicas: int | None, rank: int | None) -> tuple[Any, Any]:
    """Return how many ranks divide a global batch, and this rank's number among them: as given, or fleet's."""
    if num_replicas is not None and rank is not None:
        return num_replicas, rank
    found = _ranks_of_topology()
    return found[0] if num_replicas is None else num_replicas, found[1] if rank is None else rank


def _ranks_of_topology() -> tuple[int, int]:
    import paddle.distributed as dist
    from paddle.distributed.fleet.base import topology

    hcg = topology._HYBRID_PARALLEL_GROUP
    if hcg is None:
        return int(dist.get_world_size()), int(dist.get_rank())
    sharding = hcg.get_sharding_parallel_world_size()
    count = hcg.get_data_parallel_world_size() * sharding
    return int(count), int(hcg.get_data_parallel_rank() * sharding + hcg.get_sharding_parallel_rank())
