"""A world of simulated ranks: threads of one process, for property tests with many ranks and layouts.

The ranks run the library's real code, files and messages included; only the collectives and the transport are replaced
by queues. State dicts may hold numpy arrays, so neither Paddle nor a launcher is needed.
Tested in tests/property/test_whole_system.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.catalog.errors import StoppedExchangeError
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import Streams, Transport

# A simulated rank that waits this long waits for one that takes no part in the collective.
PATIENCE_SECONDS = 60.0


class SimulatedWorld:
    """A world of N ranks that run as threads."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, function: Callable[[Communicator], Any], ranks: tuple[int, ...] | None = None) -> list[Any]:
        """Run a function on every rank and return the results in rank order.

        Args:
            function: Called with the rank's communicator, which every public function takes as ``process_group``.
            ranks: Global numbers of the members; 0 to size - 1 by default.

        Raises:
            Exception: The first rank's error, if any rank failed.
        """
        outcomes = self.run_all(function, ranks)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def run_all(self, function: Callable[[Communicator], Any], ranks: tuple[int, ...] | None = None) -> list[Any]:
        """Run like :meth:`run`, but return the exception of a rank that failed in place of its result."""
        ranks = tuple(range(self.size)) if ranks is None else ranks
        shared = _Shared(self.size)
        communicators = [SimulatedCommunicator(shared, ranks, position) for position in range(self.size)]
        outcomes: list[Any] = [None] * self.size

        def work(position: int) -> None:
            try:
                outcomes[position] = function(communicators[position])
            except BaseException as error:  # returned as the rank's outcome
                outcomes[position] = error
            finally:
                shared.end(position)

        if importlib.util.find_spec("paddle") is not None:
            importlib.import_module("paddle")  # other threads than that of its import are in its static mode
        threads = [threading.Thread(target=work, args=(position,), daemon=True) for position in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A rank that was left waiting has no error of its own; the cause comes first.
        real = [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, LeftWaiting)]
        if real:
            outcomes = [real[0] if isinstance(o, LeftWaiting) else o for o in outcomes]
        return outcomes


class LeftWaiting(RuntimeError):
    """An error of a rank that waits in a collective for one that has ended, or takes too long."""


class _Shared:
    """The state that the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.ended: set[int] = set()
        self.lock = threading.Lock()
        self.streams: dict[tuple[bytes, int, int], queue.Queue[bytes | None]] = {}

    def gather(self, number: int, position: int, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks in one collective, in order of position."""
        with self.changed:
            answers = self.rounds.setdefault(number, {})
            answers[position] = payload
            if len(answers) == self.size:
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(answers) == self.size or self.ended - set(answers), PATIENCE_SECONDS)
            if len(answers) < self.size:
                raise LeftWaiting(f"collective {number}: only positions {sorted(answers)} take part")
            return [answers[other] for other in range(self.size)]

    def end(self, position: int) -> None:
        """Record that a rank takes part in no more collectives."""
        with self.changed:
            self.ended.add(position)
            self.changed.notify_all()

    def stream(self, exchange: bytes, source: int, target: int) -> queue.Queue[bytes | None]:
        """Return the queue of one stream of one exchange."""
        with self.lock:
            return self.streams.setdefault((exchange, source, target), queue.Queue())


class SimulatedCommunicator(Communicator):
    """The communicator of one simulated rank."""

    def __init__(self, shared: _Shared, ranks: tuple[int, ...], position: int) -> None:
        super().__init__(ranks, position)
        self._shared = shared
        self._exchanges = 0
        self._gathers = 0

    def _all_gather(self, payload: bytes) -> list[bytes]:
        self._gathers += 1
        return self._shared.gather(self._gathers, self.position, payload)

    def open_transport(self) -> Transport:
        """Return a transport over queues."""
        self._exchanges += 1
        return _QueueTransport(self._shared, self._exchanges, self.rank)


class _QueueTransport(Transport):
    def __init__(self, shared: _Shared, exchange: int, rank: int) -> None:
        self._shared, self._exchange, self._rank = shared, exchange, rank

    def address(self) -> bytes:
        return str(self._exchange).encode()

    def exchange_rounds(
        self,
        addresses: list[bytes],
        peers: tuple[Collection[int], Collection[int]],
        outgoing: Iterable[Streams],
        incoming: Iterable[Streams],
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        nothing: Streams = {}
        # Ranks may have opened different numbers of transports: their addresses together are of this exchange alone.
        exchange = b" ".join(addresses)
        try:
            for sent, received in itertools.zip_longest(outgoing, incoming, fillvalue=nothing):
                for rank, chunks in sent.items():
                    self._send(self._shared.stream(exchange, self._rank, rank), chunks)
                for rank, buffers in received.items():
                    self._receive(self._shared.stream(exchange, rank, self._rank), rank, buffers)
        except BaseException:
            stop()
            raise
        finally:
            # Ends the wait of ranks that expect more from this one.
            for rank in peers[0]:
                self._shared.stream(exchange, self._rank, rank).put(None)

    def _send(self, stream: queue.Queue[bytes | None], chunks: Iterator[np.ndarray]) -> None:
        for chunk in chunks:
            stream.put(chunk.tobytes())
        stream.put(None)

    def _receive(self, stream: queue.Queue[bytes | None], rank: int, buffers: Iterator[np.ndarray]) -> None:
        rest = b""
        for buffer in buffers:
            while len(rest) < buffer.nbytes:
                portion = stream.get(timeout=PATIENCE_SECONDS)
                if portion is None:
                    raise StoppedExchangeError(f"rank {rank} sent fewer bytes than were planned")
                rest += portion
            buffer[...] = np.frombuffer(rest[: buffer.nbytes], dtype=np.uint8)
            rest = rest[buffer.nbytes :]
        if rest or stream.get(timeout=PATIENCE_SECONDS) is not None:
            raise EOFError(f"rank {rank} sent more bytes than were planned")

    def close(self) -> None:
        pass
