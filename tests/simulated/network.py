"""Connections between processes of one or of several nodes: streams, what listens for them, and what is under way.

Bytes arrive in order, and after a while that the seed decides. A connection between nodes of which one is down, or that
are cut off from each other, carries nothing until it can again; nobody is told. A process that ends closes its sockets.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulated.locks import Waiters
from tests.simulated.scheduler import Node, Scheduler
from tests.simulated.tasks import Description

# What a connection takes before the other end reads.
BUFFER_BYTES = 256 << 10
_HERE_SECONDS, _THERE_SECONDS = 20e-6, 150e-6
_FIRST_PORT = 40000


class End(Description):
    """Hold one end of a stream: what has arrived, and what of the other end is known."""

    def __init__(self, network: Network, node: Node, address: Any = None) -> None:
        super().__init__()
        self.network, self.node, self.address = network, node, address
        self.other: End | None = None
        self.data = bytearray()
        # Descriptors that came with a byte: its place in the stream, and what they stand for.
        self.passed: list[tuple[int, list[Description]]] = []
        self.taken = 0
        self.arrived = 0
        self.sent = 0
        self.under_way = 0
        self.is_finished = False  # the other end says no more
        self.is_reset = False
        self.is_shut = False  # this end says no more
        self.is_open = True
        self.resets = False
        self.last_arrival = 0.0
        self.changed = Waiters(network.scheduler)
        self.selectors: list[Waiters] = []

    def tell(self) -> None:
        """Wake whoever waits for this end."""
        for waiters in (self.changed, *self.selectors):
            if waiters.tasks:
                waiters.wake()

    @property
    def can_read(self) -> bool:
        return bool(self.data) or self.is_finished or self.is_reset

    @property
    def room(self) -> int:
        other = self.other
        if other is None:
            return 0
        # What nobody will read takes no room: it is answered with a reset.
        return BUFFER_BYTES - (len(other.data) if other.is_open else 0) - self.under_way

    @property
    def can_write(self) -> bool:
        return self.is_reset or self.is_shut or self.room > 0 or self.other is None

    def send(self, data: bytes, descriptions: Sequence[Description] = ()) -> int:
        """Send what there is room for; OSError if nobody will read it."""
        if self.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if self.is_shut or self.other is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        data = data[: max(self.room, 0)]
        if not data:
            return 0
        other, place = self.other, self.sent
        self.sent += len(data)
        self.under_way += len(data)
        for description in descriptions:
            description.acquire()

        def arrive() -> None:
            self.under_way -= len(data)
            if other.is_open:
                if descriptions:
                    other.passed.append((place, list(descriptions)))
                other.data += data
                other.arrived += len(data)
                other.tell()
            else:
                for description in descriptions:
                    description.release()
                self._answer_with_reset()

        self.network.deliver(self, other, arrive)
        return len(data)

    def _answer_with_reset(self) -> None:
        """Answer for an end that is closed: whoever sends to it learns that from what comes back."""
        other = self.other
        if other is not None and self.is_open:

            def reset() -> None:
                self.is_reset = True
                self.tell()

            self.network.deliver(other, self, reset)

    def take(self, count: int) -> bytes:
        data = bytes(self.data[:count])
        del self.data[:count]
        self.taken += len(data)
        if self.other is not None:
            self.other.tell()
        return data

    def take_passed(self) -> list[Description]:
        found: list[Description] = []
        while self.passed and self.passed[0][0] < self.taken:
            found += self.passed.pop(0)[1]
        return found

    def finish(self) -> None:
        """Say no more."""
        if self.is_shut:
            return
        self.is_shut = True
        other = self.other
        if other is not None:

            def end() -> None:
                other.is_finished = True
                other.tell()

            self.network.deliver(self, other, end)

    def dispose(self) -> None:
        self.is_open = False
        for _, descriptions in self.passed:
            for description in descriptions:
                description.release()
        other = self.other
        if (self.data or self.resets) and other is not None and not self.is_shut:
            # As TCP and Unix sockets do when something was not read.
            def reset() -> None:
                other.is_reset = True
                other.tell()

            self.is_shut = True
            self.network.deliver(self, other, reset)
        self.finish()


class Listener(Description):
    """Stand for a socket that listens."""

    def __init__(self, network: Network, node: Node, address: Any, backlog: int) -> None:
        super().__init__()
        self.network, self.node, self.address, self.backlog = network, node, address, backlog
        # By what others find it: a port, or a name on the machine.
        self.key = node.name, address[1] if isinstance(address, tuple) else address
        self.is_shut = False
        self.queue: list[End] = []
        self.changed = Waiters(network.scheduler)
        self.selectors: list[Waiters] = []

    @property
    def can_read(self) -> bool:
        return bool(self.queue) or self.is_shut

    can_write = False

    def tell(self) -> None:
        self.changed.wake()
        for waiters in self.selectors:
            waiters.wake()

    def dispose(self) -> None:
        self.network.listeners.pop(self.key, None)
        for end in self.queue:
            end.acquire()
            end.release()


class Network:
    """Hold the connections between the processes of a world.

    Attributes:
        listeners: Sockets that listen, by node and address.
        cut: Pairs of names of nodes that cannot reach each other now.
        slowness: By how much more everything takes.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.nodes: dict[str, Node] = {}
        self.listeners: dict[tuple[str, Any], Listener] = {}
        self.cut: set[frozenset[str]] = set()
        self.slowness = 1.0
        self.messages = 0
        self._held: list[tuple[End, End, Callable[[], None]]] = []
        self._port = _FIRST_PORT

    def add(self, node: Node) -> Node:
        """Give a node an address; it is found by that and by its name."""
        node.address = f"10.0.0.{len(self.nodes) // 2 + 1}"
        self.nodes[node.name] = self.nodes[node.address] = node
        return node

    def is_reachable(self, one: Node, other: Node) -> bool:
        if not (one.is_up and other.is_up):
            return False
        return not self.cut or frozenset((one.name, other.name)) not in self.cut

    def latency(self, one: Node, other: Node) -> float:
        mean = _HERE_SECONDS if one is other else _THERE_SECONDS * self.slowness
        return mean * (0.5 + self.scheduler.random.expovariate(1.0))

    def deliver(self, source: End, target: End, arrive: Callable[[], None]) -> None:
        """Let something arrive at the other end, after all that was sent before."""
        self.messages += 1
        if not self.is_reachable(source.node, target.node):
            self._held.append((source, target, arrive))
            return
        when = max(target.last_arrival + 1e-9, self.scheduler.now + self.latency(source.node, target.node))
        target.last_arrival = when
        self.scheduler.after(when - self.scheduler.now, lambda: self._arrive(source, target, arrive))

    def _arrive(self, source: End, target: End, arrive: Callable[[], None]) -> None:
        # It was under way when the connection was cut; or something before it was.
        if not self.is_reachable(source.node, target.node) or (
            self._held and any(held[1] is target for held in self._held)
        ):
            self._held.append((source, target, arrive))
        else:
            arrive()

    def heal(self) -> None:
        """Deliver, in order, what can be delivered again."""
        held, self._held = self._held, []
        for source, target, arrive in held:
            self.deliver(source, target, arrive)

    def forget(self, node: Node) -> None:
        """Lose what was under way to or from a node that has lost power; nobody hears of that."""
        self._held = [each for each in self._held if node not in (each[0].node, each[1].node)]

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def pair(self, one: Node, other: Node) -> tuple[End, End]:
        """Return two ends that are connected."""
        ends = End(self, one), End(self, other)
        ends[0].other, ends[1].other = ends[1], ends[0]
        return ends
