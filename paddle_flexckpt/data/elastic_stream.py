"""A stream of samples without an index, whose position continues under any number of ranks.

A stream is divided into *splits*. Sample k of the whole stream is the next one of split k mod S, where S is the number
of splits, so the splits alone decide the order of all samples. With d ranks, rank r reads the splits s with s mod d ==
r. A global batch is the next ``batch size x d`` samples, and each rank has as many of any such stretch, wherever it
begins: so a run continues at any position, with every number of ranks that divides S.

Tested in tests/data/test_elastic_stream.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import paddle

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.data.batch_sampler import data_ranks, refuse_state

_VERSION = 1
# The fields of a state that decide the order of samples, and the reason why it depends on them.
_ORDER = {"splits": "the stream has another number of splits", "name": "the data has another name"}
_METHODS = ("__iter__", "state_dict", "load_state_dict")


class ElasticStream(paddle.io.IterableDataset):  # type: ignore[misc]
    """The samples of one rank of an endless stream, which reads each split in an object of the user's.

    The manager saves and restores it as ``data=``: docs/manager.md has the loop. Each split's state is saved by the
    ranks that read the split, and read by those that read it then.

    A split that ends begins again, in a new object. So no rank runs out of samples before another one, and splits of
    different lengths are repeated at different positions.

    Attributes:
        splits: The number of splits.
        num_replicas: The number of ranks that divide a global batch.
        rank: The number of this one among them.
        name: The data's name.
        position: The samples that all ranks have taken.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        splits: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        name: str = "",
    ) -> None:
        """Begin at the first sample of each split.

        Args:
            make: Returns the object that reads a split, given its number: it has ``__iter__``, which goes on where the
                object stands, ``state_dict()`` and ``load_state_dict()``. A state is made of numbers, text, bytes,
                arrays, tensors, and lists, tuples and dicts of such values.
            splits: The number of splits, which stays the same for the whole run. Every number of ranks that divides it
                can continue the run: 48 serves 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48.
            num_replicas: As of :class:`~paddle_flexckpt.data.ElasticBatchSampler`; so is ``rank``.
            rank: The number of this one among them.
            name: What identifies the data, such as its version. A run continues with data of the same name only.

        Raises:
            ValidationError: An argument is invalid.
        """
        num_replicas, rank = data_ranks(num_replicas, rank)
        self.splits = _checked("splits", splits, 1, 2**20)
        self.num_replicas = _checked("num_replicas", num_replicas, 1, 2**31)
        self.rank = _checked("rank", rank, 0, self.num_replicas - 1)
        if self.splits % self.num_replicas:
            fitting = ", ".join(str(each) for each in range(1, self.splits + 1) if self.splits % each == 0)
            raise ValidationError(
                f"{self.splits} splits cannot be divided evenly among the ranks that share a batch; expected {fitting} "
                f"ranks (data parallelism times sharding); got {self.num_replicas}. Remedy (FC101): use one of these "
                "numbers of ranks; a new run may have another number of splits"
            )
        self.name, self.position = str(name), 0
        self._make = make
        # For each split that has been opened: its object, and the iterator over it.
        self._opened: dict[int, tuple[Any, Iterator[Any]]] = {}
        # Whether all splits stand at the position; not after an error within a batch.
        self._is_whole = True

    @property
    def own_splits(self) -> range:
        """Return the splits that this rank reads."""
        return range(self.rank, self.splits, self.num_replicas)

    def __iter__(self) -> NoReturn:
        """Refuse to be drawn from by a loader, which would draw ahead of the training."""
        raise ValidationError(
            "a loader draws ahead of the training, in a thread or in other processes, and the stream would not know "
            "what the training has taken. Remedy (FC101): iterate over stream.batches(batch_size), without a loader"
        )

    def batches(self, batch_size: int, collate: Callable[[list[Any]], Any] | None = None) -> Iterator[Any]:
        """Return this rank's batches from the position on, without end; each counts as taken once it is returned.

        All ranks have to take as many batches of the same size. The size may differ from call to call.

        Args:
            batch_size: Samples of a batch on one rank.
            collate: Makes a batch of a list of samples; None: a batch is the list.

        Raises:
            ValidationError: ``batch_size`` is not a positive integer.
        """
        return self._draw(_checked("batch_size", batch_size, 1, 2**31), collate or list)

    def _draw(self, size: int, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
        while True:
            self._check_whole()
            self._is_whole = False
            # The first sample at or after the position that is in a split of this rank.
            first = self.position + (self.rank - self.position) % self.num_replicas
            numbers = range(first, first + size * self.num_replicas, self.num_replicas)
            batch = collate([self._next(number % self.splits) for number in numbers])
            self.position += size * self.num_replicas
            self._is_whole = True
            yield batch

    def _next(self, split: int) -> Any:
        for _ in range(2):
            if split not in self._opened:
                self._opened[split] = self._open(split)
            try:
                return next(self._opened[split][1])
            except StopIteration:
                del self._opened[split]  # it begins again
        raise ValidationError(
            f"split {split} has no samples. Remedy (FC101): begin the run anew with fewer splits, so that each has a "
            "sample"
        )

    def _open(self, split: int, states: Mapping[int, Any] | None = None) -> tuple[Any, Iterator[Any]]:
        reader = self._make(split)
        missing = [name for name in _METHODS if not callable(getattr(reader, name, None))]
        if missing:
            raise ValidationError(
                f"make({split}) returned a {type(reader).__name__} without {', '.join(missing)}. Remedy (FC101): "
                "return an object that is iterable, and has state_dict() and load_state_dict()"
            )
        if states is not None:
            reader.load_state_dict(states[split])
        return reader, iter(reader)

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise ValidationError(
                "an error has interrupted a batch of this stream, and some of its samples were taken. Remedy (FC101): "
                "restore the last checkpoint, with data= this stream"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, what it is bound to, and under ``states`` the state of each split of this rank.

        Raises:
            ValidationError: An error has interrupted a batch.
        """
        self._check_whole()
        for split in self.own_splits:
            if split not in self._opened:
                self._opened[split] = self._open(split)
        states = {split: self._opened[split][0].state_dict() for split in self.own_splits}
        return {"version": _VERSION, "position": self.position, **self._own(), "states": states}

    def _own(self) -> dict[str, Any]:
        return {"splits": self.splits, "name": self.name}

    def refuse(self, state: Mapping[str, Any]) -> str | None:
        """Return why a state does not belong to this stream; None if it does."""
        why = refuse_state("ElasticStream", state, self._own(), _ORDER, "states")
        if why is None and any(split not in state["states"] for split in self.own_splits):
            missing = ", ".join(str(split) for split in self.own_splits if split not in state["states"])
            return f"the states of splits {missing} are not there"
        return why

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state, which may be that of a run with other ranks and batches.

        Raises:
            ValidationError: It does not belong to this stream; nothing has changed.
        """
        why = self.refuse(state)
        if why is not None:
            raise ValidationError(
                f"the stream does not continue here: {why}. Remedy (FC904): make the stream as in the run that saved "
                "it, or begin this data at its first sample"
            )
        self._opened = {split: self._open(split, state["states"]) for split in self.own_splits}
        self.position, self._is_whole = int(state["position"]), True


def _checked(name: str, value: Any, least: int, most: int) -> int:
    value = plain_integer(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        what = f"{name} has to be an integer from {least} to {most}"
        raise ValidationError(Problem(what, got=repr(value), code="FC101", remedy="give one"))
    return value
