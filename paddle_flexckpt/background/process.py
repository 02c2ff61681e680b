"""The writer process, seen from the training process: its start, the saves handed over, its answers, and its end.

Tested in tests/background/test_failures.py and tests/background/test_exit.py.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from paddle_flexckpt.background.protocol import Channel
from paddle_flexckpt.background.staging import Segment
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.lost_ranks import SECRET_BYTES, address_of, open_presence

# Signals that end a job are not for the writer: it ends when it has written. It finds modules as multiprocessing's
# processes do: where the parent does, whatever is in the working directory.
_BOOT = """
import json, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("path")
from paddle_flexckpt.background.worker import main
main(**options)
"""
# The writer hashes and writes; threads of numerical libraries would only take memory.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# The time for a process to end after it has closed its end of the connection: it has no work left then.
_END_SECONDS = 10.0
# The last bytes of the process's stderr that an error has.
_MAX_STDERR_BYTES = 4000


class WriterProcess:
    """A writer process, and a listener to it. It outlives this process while it has saves to write, then ends itself.

    Attributes:
        pid: Its process id.
        address: The address at which other ranks' writers reach it, and the secret by which it knows them.
        is_finishing: Whether it has been asked to end.
    """

    def __init__(
        self,
        nice: int,
        io_class: str,
        on_message: Callable[[int, dict[str, Any]], None],
        on_end: Callable[[WriterProcess, str], None],
    ) -> None:
        """Start the process; its imports go on in the background.

        The callbacks run in a thread of this object. ``on_message`` gets the number of a save and the process's message
        about it: that it has begun, its progress, or its outcome. ``on_end`` gets this object and the way the process
        ended, once.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Takes the process's stderr. It is a file without a name: an inherited pipe would stay open as long as the
        # process runs, for somebody who reads it to its end.
        self._stderr = os.memfd_create("paddle_flexckpt-stderr", os.MFD_CLOEXEC)
        close_in_forks(self, WriterProcess._close_stderr)
        options = {"path": list(map(str, sys.path)), "nice": nice, "io_class": io_class}
        try:
            with theirs, open_presence() as presence:
                secret = secrets.token_bytes(SECRET_BYTES)
                self.address = address_of(presence, secret)
                ours.sendall(secret)  # all users can read the arguments of a process
                descriptors = {"descriptor": theirs.fileno(), "presence": presence.fileno()}
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, json.dumps({**options, **descriptors})],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=tuple(descriptors.values()),
                    env={**os.environ, **_ONE_THREAD},
                    # Signals to the job's process group and terminal do not reach it.
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._close_stderr()
            raise CheckpointError(f"the background writer could not be started: {error}") from error
        self.pid = self._process.pid
        self.is_finishing = False
        self._channel = Channel(ours)
        self._known: set[int] = set()
        self._on_message, self._on_end = on_message, on_end
        self._listener = threading.Thread(target=self._listen, name="paddle_flexckpt-writer", daemon=True)
        self._listener.start()

    def submit(
        self,
        number: int,
        segment: Segment,
        lock: int | None,
        waves: int | None = None,
        source: tuple[int, int] | None = None,
        refusal: str = "",
    ) -> None:
        """Hand a save over. When this returns, the save no longer depends on this process.

        Args:
            number: The save's number.
            segment: The memory with the data, followed by the encoded job.
            lock: The descriptor of the save's lock, if any.
            waves: The descriptor of the connection by which the data comes, if it comes in waves.
            source: The descriptor of a file with the data, and the first byte there, if the segment has none.
            refusal: The reason for which this rank refuses the save; empty if it does not. The other writers get it.

        Raises:
            ConnectionError: The process has ended.
        """
        known = segment.number in self._known
        wanted = {"segment": None if known else segment.descriptor, "lock": lock, "waves": waves}
        wanted["source"] = None if source is None else source[0]
        descriptors = {name: each for name, each in wanted.items() if each is not None}
        begin, end = segment.text
        message = {
            "save": number,
            "segment": segment.number,
            "data_bytes": begin,
            "job_bytes": end - begin,
            "source_begin": 0 if source is None else source[1],
            "descriptors": list(descriptors),
            "refusal": refusal,
        }
        self._channel.send(message, list(descriptors.values()))
        self._known.add(segment.number)

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended; ``on_end`` is called in a moment, if it has not been."""
        return self._process.poll() is not None

    def finish(self) -> None:
        """Let the process end after all that was handed over, and wait for that; not from a callback."""
        self.is_finishing = True
        self._channel.end()
        self._listener.join()

    def _listen(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                message = received[0]
                self._on_message(int(message.pop("save")), message)
            ending = self._end()
        except Exception as error:  # after any error: callers that wait for this process need an answer
            ending = f"cannot be understood ({type(error).__name__}: {error})"
            self._process.kill()
            self._process.wait()
        self._on_end(self, f"the background writer (pid {self.pid}) {ending}")
        self._channel.close()
        self._close_stderr()

    def _close_stderr(self) -> None:
        descriptor, self._stderr = self._stderr, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _end(self) -> str:
        """Wait for the process to end; return the way it ended, as the end of a sentence about it."""
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        begin = max(0, os.fstat(self._stderr).st_size - _MAX_STDERR_BYTES)
        text = os.pread(self._stderr, _MAX_STDERR_BYTES, begin).decode(errors="replace").strip()
        ending = f"ended with status {status}"
        if status < 0:
            ending = f"was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"{ending}: {text}" if text else ending
