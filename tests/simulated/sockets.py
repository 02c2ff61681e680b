"""Simulated ``socket`` and ``selectors``, over the connections of a simulated network.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.simulated.locks import Waiters
from tests.simulated.network import BUFFER_BYTES, Listener, Network
from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import Description, Process
from tests.simulated.threads import Namespace


class Socket:
    """Imitate ``socket.socket``."""

    _network: Network

    def __init__(
        self, family: int = socket.AF_INET, type: int = socket.SOCK_STREAM, proto: int = 0, fileno: int | None = None
    ) -> None:
        self.family = family
        self._process = self._network.scheduler.process
        self._number: int = -1 if fileno is None else fileno
        self._timeout: float | None = None
        self._bound: Any = None
        if fileno is not None:
            self._process.lookup(fileno)

    @classmethod
    def _of(cls, description: Description, family: int = socket.AF_INET) -> Any:
        process = cls._network.scheduler.process
        return cls(family=family, fileno=process.install(description))

    @property
    def _scheduler(self) -> Scheduler:
        return self._network.scheduler

    def _description(self) -> Any:
        self._scheduler.check_alive()
        if self._number < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._process.lookup(self._number)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._number

    def detach(self) -> int:
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0 and number in self._process.descriptors:
            self._process.close(number)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            # The library asks for one thing by it: that closing is a reset.
            self._description().resets = True

    def getsockopt(self, *_: Any) -> int:
        return 0

    def getsockname(self) -> Any:
        description = self._description()
        return description.address if description.address is not None else (description.node.name, 0)

    def bind(self, address: Any) -> None:
        self._bound = address

    def listen(self, backlog: int = 128) -> None:
        node = self._process.node
        address = self._bound
        if isinstance(address, tuple):
            host, port = address[:2]
            address = (host, port or self._network.new_port())
        elif not address:
            address = f"\0{self._network.new_port():05x}".encode()
        listener = Listener(self._network, node, address, backlog)
        if listener.key in self._network.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._network.listeners[listener.key] = listener
        self._number = self._process.install(listener)

    def _wait(self, description: Any, is_ready: Callable[[], bool]) -> None:
        """Wait as the timeout says."""
        scheduler = self._scheduler
        end = None if self._timeout is None else scheduler.now + self._timeout
        while not is_ready():
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                raise socket.timeout("timed out")
            description.changed.wait(left)
            if self._number < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def accept(self) -> tuple[Any, Any]:
        listener = self._description()
        if not isinstance(listener, Listener):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._wait(listener, lambda: listener.can_read)
        if not listener.queue:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        end = listener.queue.pop(0)
        return type(self)._of(end, self.family), (end.other.node.name if end.other else "", 0)

    def connect(self, address: Any) -> None:
        """Connect; errors are those of TCP."""
        self._scheduler.check_alive()
        network, node = self._network, self._process.node
        is_inet = isinstance(address, tuple)
        target = network.nodes.get(address[0]) if is_inet else node
        if target is None:
            raise socket.gaierror(socket.EAI_NONAME, f"{address[0]}: name not known")
        if not network.is_reachable(node, target):
            self._scheduler.sleep(130.0 if self._timeout is None else self._timeout)
            if not network.is_reachable(node, target):
                raise socket.timeout("timed out")
        self._scheduler.sleep(network.latency(node, target))
        listener = network.listeners.get((target.name, address[1] if is_inet else address))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if len(listener.queue) > listener.backlog:
            self._scheduler.sleep(130.0 if self._timeout is None else self._timeout)
            raise socket.timeout("timed out")
        ours, theirs = network.pair(node, target)
        listener.queue.append(theirs)
        listener.tell()
        self._number = self._process.install(ours)

    def shutdown(self, how: int) -> None:
        end = self._description()
        if isinstance(end, Listener):
            end.is_shut = True
            end.tell()
            return
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            if end.is_reset:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            end.finish()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            end.is_finished = True
            end.tell()

    def send(self, data: Any, flags: int = 0) -> int:
        return self._send(memoryview(data).cast("B"), ())

    def _send(self, data: memoryview, descriptions: Sequence[Description]) -> int:
        end = self._description()
        if not len(data):
            return 0
        if not end.can_write:
            self._wait(end, lambda: end.can_write)
        return int(end.send(bytes(data[:BUFFER_BYTES]), descriptions))

    def sendall(self, data: Any, flags: int = 0) -> None:
        left = memoryview(data).cast("B")
        while len(left):
            left = left[self._send(left, ()) :]

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        return self._send(memoryview(b"".join(bytes(each) for each in buffers)), ())

    def _readable(self) -> Any:
        end = self._description()
        if not end.can_read:
            self._wait(end, lambda: end.can_read)
        if end.is_reset and not end.data:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return end

    def recv(self, count: int, flags: int = 0) -> bytes:
        data = self._readable().take(count)
        while flags & socket.MSG_WAITALL and data and len(data) < count:
            more = self._readable().take(count - len(data))
            if not more:
                break
            data += more
        return bytes(data)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def makefile(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("makefile of a simulated socket")


class Selector:
    """Imitate ``selectors.DefaultSelector``."""

    _network: Network

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self._waiters = Waiters(self._network.scheduler)
        self._process: Process = self._network.scheduler.process

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if fileobj in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._process.lookup(number).selectors.append(self._waiters)  # type: ignore[attr-defined]
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._keys.pop(fileobj)
        description = self._process.descriptors.get(key.fd)
        if description is not None:
            with contextlib.suppress(ValueError, AttributeError):
                description.selectors.remove(self._waiters)  # type: ignore[attr-defined]
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for key in self._keys.values():
            end: Any = self._process.descriptors.get(key.fd)
            if end is None:
                continue
            events = 0
            if key.events & selectors.EVENT_READ and end.can_read:
                events |= selectors.EVENT_READ
            if key.events & selectors.EVENT_WRITE and end.can_write:
                events |= selectors.EVENT_WRITE
            if events:
                found.append((key, events))
        return found

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        scheduler = self._network.scheduler
        scheduler.check_alive()
        end = None if timeout is None else scheduler.now + max(timeout, 0.0)
        while not (found := self._ready()):
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                break
            self._waiters.wait(left)
        return found

    def close(self) -> None:
        for fileobj in list(self._keys):
            self.unregister(fileobj)


class Sockets:
    """Hold the simulated modules for one network."""

    def __init__(self, network: Network) -> None:
        scheduler = network.scheduler
        bound = {"_network": network}
        made: Any = type("socket", (Socket,), bound)
        selector: Any = type("DefaultSelector", (Selector,), bound)

        def socketpair(family: int = socket.AF_UNIX, *_: Any) -> tuple[Any, Any]:
            scheduler.check_alive()
            node = scheduler.process.node
            one, other = network.pair(node, node)
            return made._of(one, family), made._of(other, family)

        def create_server(address: tuple[str, int], *, backlog: int = 128, **_: Any) -> Any:
            scheduler.check_alive()
            server = made()
            server.bind(address)
            server.listen(backlog)
            return server

        def create_connection(address: tuple[str, int], timeout: float | None = None, **_: Any) -> Any:
            connection = made()
            connection.settimeout(timeout)
            connection.connect(address)
            return connection

        def send_fds(connection: Any, buffers: Iterable[Any], numbers: Sequence[int], *_: Any) -> int:
            process = scheduler.process
            data = memoryview(b"".join(bytes(each) for each in buffers))
            return int(connection._send(data, [process.lookup(number) for number in numbers]))

        def recv_fds(connection: Any, count: int, most: int, flags: int = 0) -> tuple[bytes, list[int], int, None]:
            end = connection._readable()
            # What comes with descriptors is not read together with what comes before.
            if end.passed and end.passed[0][0] > end.taken:
                count = min(count, end.passed[0][0] - end.taken)
            data = end.take(count)
            process, numbers = scheduler.process, []
            for description in end.take_passed():
                numbers.append(process.install(description))
                description.release()
            return data, numbers, 0, None

        real = {name: value for name, value in vars(socket).items() if name.isupper()}
        self.socket = Namespace(
            __name__="socket",
            **real,
            socket=made,
            socketpair=socketpair,
            create_server=create_server,
            create_connection=create_connection,
            send_fds=send_fds,
            recv_fds=recv_fds,
            gethostname=lambda: scheduler.process.node.name,
            inet_pton=socket.inet_pton,
            inet_ntop=socket.inet_ntop,
            timeout=socket.timeout,
            gaierror=socket.gaierror,
            herror=socket.herror,
            error=OSError,
        )
        self.selectors = Namespace(
            __name__="selectors",
            DefaultSelector=selector,
            EVENT_READ=selectors.EVENT_READ,
            EVENT_WRITE=selectors.EVENT_WRITE,
            SelectorKey=selectors.SelectorKey,
        )
