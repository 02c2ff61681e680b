"""Rounds: one rank's part of an exchange, in rounds of which each needs few source rows at a time.

Rows in the ranks' memory are exchanged in one round. Rows that ranks read for each other are read in rounds: each once,
however many ranks want it, and only a few rounds are held at a time.

Tested in tests/communication/test_rounds.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from paddle_flexckpt.catalog.errors import StoppedExchangeError
from paddle_flexckpt.planning.exchange_plan import ExchangePlan
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.ranks.transport import Streams
from paddle_flexckpt.transfer.copies import Storage, copy_pieces, pack, unpack

# Rounds whose rows are held: one is sent while the next is read.
ROUNDS_HELD = 2


class HeldRows:
    """The source rows of each round; here rows that are in memory all the time."""

    def __init__(self, storage: Storage) -> None:
        """Args: storage: gives the storage of a row."""
        self._storage = storage

    def storages(self, number: int) -> Storage:
        """Return the storages of a round's rows, as a function of the row; wait until the rows are there."""
        return self._storage

    def done(self, number: int) -> None:
        """Note that a round's rows have been sent, or copied; a round ends after both."""

    def stop(self) -> None:
        """Note that there will be no further rounds; a thread that waits for one gets an error."""

    def close(self) -> None:
        """Release the rows that are held."""


class RowsReadAhead(HeldRows):
    """The source rows of each round, read by a thread ahead of the thread that sends them and the one that copies."""

    def __init__(self, count: int, read: Callable[[int], Storage]) -> None:
        """Read nothing before the first round is requested: a rank first connects to those that wait for it."""
        self._count, self._read = count, read
        self._changed = threading.Condition()
        self._there: dict[int, Storage] = {}
        self._users: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def storages(self, number: int) -> Storage:
        """Implement :meth:`HeldRows.storages`.

        Raises:
            BaseException: What reading them raised.
            StoppedExchangeError: The exchange was stopped.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: number in self._there or self._failure is not None)
            if number not in self._there and self._failure is not None:
                raise self._failure
            return self._there[number]

    def done(self, number: int) -> None:
        """Implement :meth:`HeldRows.done`."""
        with self._changed:
            self._users[number] -= 1
            if not self._users[number]:
                del self._there[number], self._users[number]
            self._changed.notify_all()

    def stop(self) -> None:
        """Implement :meth:`HeldRows.stop`."""
        self._fail(StoppedExchangeError("the exchange of tensor data was stopped"))

    def close(self) -> None:
        """End the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _run(self) -> None:
        for number in range(self._count):
            with self._changed:
                self._changed.wait_for(lambda: len(self._there) < ROUNDS_HELD or self._failure is not None)
                if self._failure is not None:
                    return
            try:
                rows = self._read(number)
            except BaseException as error:  # raised by :meth:`storages`
                self._fail(error)
                return
            with self._changed:
                self._there[number], self._users[number] = rows, 2  # the thread that sends, and the one that copies
                self._changed.notify_all()


class _Cut:
    """Pieces for the host transport, cut into rounds, in each of which they keep their order."""

    def __init__(self, pieces: Pieces, round_of_row: np.ndarray) -> None:
        number = round_of_row[pieces.source]
        self._pieces, self._order = pieces, np.argsort(number, kind="stable")
        self.count = int(number.max(initial=-1)) + 1
        self._start = np.searchsorted(number[self._order], np.arange(self.count + 1))

    def pieces(self, number: int) -> Pieces:
        """Return the pieces of a round."""
        first, last = self._start[number : number + 2] if number < self.count else (0, 0)
        return self._pieces.take(self._order[first:last])


class Rounds:
    """One rank's part of an exchange, cut into rounds.

    Attributes:
        count: The number of rounds in which this rank needs rows of its own.
        peers: The ranks that it sends to, and those that it receives from.
        bytes_copied: The bytes that it has copied to its own targets.
    """

    def __init__(self, plan: ExchangePlan, round_of_row: np.ndarray) -> None:
        """Args: plan: the exchange. round_of_row: int64 per source row, the round in which its rank has it."""
        self._outgoing = {rank: _Cut(pieces, round_of_row) for rank, pieces in plan.outgoing.items()}
        self._incoming = {rank: _Cut(pieces, round_of_row) for rank, pieces in plan.incoming.items()}
        self._local = _Cut(plan.local, round_of_row)
        self.count = max([self._local.count, *(cut.count for cut in self._outgoing.values())])
        self.peers = (set(self._outgoing), set(self._incoming))
        self.bytes_copied = 0

    def used(self, number: int) -> list[Pieces]:
        """Return the pieces of a round that this rank needs of its own rows."""
        return [self._local.pieces(number), *(cut.pieces(number) for cut in self._outgoing.values())]

    def sending(self, rows: HeldRows) -> Iterator[Streams]:
        """Yield the data that this rank sends in each round."""
        for number in range(self.count):
            storage = rows.storages(number)
            parts = {rank: cut.pieces(number) for rank, cut in self._outgoing.items()}
            yield {rank: pack(pieces, storage) for rank, pieces in parts.items() if len(pieces)}
            rows.done(number)

    def receiving(self, rows: HeldRows, target: Storage, dtype: Callable[[int], np.dtype]) -> Iterator[Streams]:
        """Yield the memory for the data that this rank receives in each round; then copy what it needs of its own rows.

        Args:
            rows: This rank's own source rows.
            target: Gives the storage of a target row.
            dtype: Gives the type of a source row's elements.
        """
        for number in range(max([self.count, *(cut.count for cut in self._incoming.values())])):
            parts = {rank: cut.pieces(number) for rank, cut in self._incoming.items()}
            yield {rank: unpack(pieces, target, dtype) for rank, pieces in parts.items() if len(pieces)}
            if number < self.count:
                self.bytes_copied += copy_pieces(self._local.pieces(number), rows.storages(number), target)
                rows.done(number)
