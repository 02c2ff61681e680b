"""Leases: the save lock on media without locks.

A holder writes the file ``.lease`` and renews it while it lives. Another saver that finds one watches it: a lease that
changes has a living holder. A lease that stays the same for its whole time has expired, and is taken over. The watcher
measures this time itself, so clocks need not agree.

A holder that was suspended, or whose requests hung, for longer than that finds its lease taken, and must not commit:
:meth:`LeaseLock.check` is called right before every commit, and :meth:`LeaseLock.ensure_held` before each try of its
request. So the lease is certain for half of its time when the request is made. A request that takes effect later than
that is the remaining risk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.media.backend import Backend, Locks, SaveLock, write_file

logger = logging.getLogger("paddle_flexckpt")

LEASE_FILE = ".lease"
LEASE_SECONDS = 30.0
# A run holds its root by a lease of so many times this: its training may keep the interpreter from renewing it.
TIMES_OF_A_RUN = 4.0
# Renewals in the lease's time: some may be late.
_RENEWALS = 6
# Looks of a watcher in the lease's time.
_LOOKS = 30
# Where two claims at a time may both succeed at first, a claim counts after this part of the lease's time.
_SETTLING = 10
# The time after a renewal in which the lease is certain enough to continue.
_CERTAIN = 1 / 2
_CHECKS = 5
# On Linux only this clock counts the time that a machine is suspended, in which others may take its lease. A watcher of
# a lease counts only the time that it is awake.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# A read during a write of the file sees a part of it.
_READS = 10


@dataclass(frozen=True)
class Claim:
    """The contents of a lease's file: its holder, and a counter that rises with every renewal."""

    token: str
    host: str
    pid: int
    counter: int
    seconds: float

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Claim | None:
        """Read a file's bytes; None if they are not a whole claim."""
        try:
            read = json.loads(data or b"")
            return cls(
                str(read["token"]), str(read["host"]), int(read["pid"]), int(read["counter"]), float(read["seconds"])
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def check_lease_seconds(seconds: object) -> float:
    """Return a lease's time; ValidationError if it is invalid."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < 86400:
        raise ValidationError(f"lease_seconds has to be a number of seconds, at most a day; got {seconds!r}")
    return float(seconds)


class LeaseLock(SaveLock):
    """A lease on a directory, renewed by a thread of its own."""

    def __init__(self, backend: Backend, claim: Claim, renewed_at: float) -> None:
        """Hold a lease; ``renewed_at``: when its last write began, by this host's clock."""
        self._backend = backend
        self._claim = claim
        self._renewed_at = renewed_at
        # One renewal at a time: another's unfinished write would look like a lease of another holder.
        self._renewing = threading.Lock()
        self._failure: Exception | None = None
        # The time of the last successful check that the lease is still held.
        self._confirmed_at = -math.inf
        self._ended = threading.Event()
        close_in_forks(self, LeaseLock._leave_to_owner)
        self._thread = threading.Thread(target=self._renew, name="flexckpt-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(self._claim.seconds / _RENEWALS):
            try:
                self._keep()
            # Any error: the save fails with it.
            except Exception as error:
                self._failure = error
                return

    def _keep(self) -> None:
        """Renew the lease, if it is still held."""
        with self._renewing:
            self._raise_failure()
            looked = _now()
            self._check_file()
            begin = _now()
            self._claim = replace(self._claim, counter=self._claim.counter + 1)
            write_file(self._backend, LEASE_FILE, self._claim.encode())
            now, settling = _now(), _settling_seconds(self._claim.seconds)
            if now - self._renewed_at >= self._claim.seconds:
                # The lease may have expired. A process that took it over since the look finds this claim, if it is
                # recent.
                if now - looked >= settling:
                    raise CheckpointError(
                        "this save was stopped for so long that somebody may have taken over the right to save to "
                        f"{self._backend.path}. Remedy (FC403): save again; open_storage(path, lease_seconds=...) "
                        "allows longer pauses"
                    )
                time.sleep(settling)
                self._check_file()
            self._renewed_at = begin

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointError(
                f"the right to save to {self._backend.path} could not be kept: {self._failure}. Remedy (FC403): save "
                "again"
            ) from self._failure

    @property
    def _is_certain(self) -> bool:
        """Return whether the last renewal is so recent that nobody can have taken the lease, or will soon."""
        return _now() - self._renewed_at < self._claim.seconds * _CERTAIN

    def check(self) -> None:
        """Make sure that the lease is still held, and will be; do nothing after its release.

        Raises:
            CheckpointError: It could not be renewed, or another saver has it.
            OSError: The medium failed.
        """
        if self._ended.is_set():
            return
        # Not while this process renews it: on a slow medium the file is half written for long.
        with self._renewing:
            self._raise_failure()
            self._check_file()
        if not self._is_certain:
            self._keep()

    def ensure_held(self) -> None:
        """Check unless the last check is still valid; repeat until one is; errors as of :meth:`check`."""
        for _ in range(_CHECKS):
            if self._ended.is_set():
                return
            self._raise_failure()
            if self._is_certain:
                return
            self.check()
        raise CheckpointError(
            f"{self._backend.path} answers too slowly to keep the right to save there, which has to be renewed every "
            f"{self._claim.seconds * _CERTAIN:g} s. Remedy (FC403): save again, with a longer lease_seconds"
        )

    def _check_file(self) -> None:
        claim = None
        for _ in range(_READS):
            found = _read(self._backend)
            claim = Claim.decode(found)
            if claim is not None or found is None:
                break
            time.sleep(self._claim.seconds / _RENEWALS / _READS)
        if claim is None or claim.token != self._claim.token:
            by = "somebody" if claim is None else str(claim)
            raise CheckpointError(
                f"this save was stopped for so long that {by} has taken over the right to save to "
                f"{self._backend.path}. Remedy (FC403): save again; open_storage(path, lease_seconds=...) allows "
                "longer pauses"
            )

    def check_before_release(self) -> None:
        """Ask the store whether the lease is still held, and remember the answer for a release that follows soon."""
        now = _now()
        # The release makes the request if this one failed.
        with contextlib.suppress(OSError):
            self._confirmed_at = now if self._is_held() else -math.inf

    def _is_held(self) -> bool:
        claim = Claim.decode(_read(self._backend))
        return claim is not None and claim.token == self._claim.token

    def release(self) -> None:
        """Implement the base class."""
        if self._ended.is_set():
            return
        self.detach()
        try:
            age = _now() - self._confirmed_at
            if age < self._claim.seconds / _RENEWALS or self._is_held():
                self._backend.remove(LEASE_FILE)
        except OSError as error:
            # The save is complete, and the lease expires by itself.
            logger.warning(f"a lease could not be given back; the next save waits until it runs out: {error}")

    def handover(self) -> tuple[dict[str, Any], int | None]:
        """Implement the base class; there is no descriptor."""
        return {"kind": "lease", "claim": asdict(self._claim), "renewed_at": self._renewed_at}, None

    def _leave_to_owner(self) -> None:
        self._ended = threading.Event()  # another thread, which a fork does not have, may hold the inner lock
        self._ended.set()

    def detach(self) -> None:
        """Implement the base class."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            # A renewal that is on its way must not outlive this.
            self._thread.join()


@dataclass
class Conditions:
    """A store's support for conditional creates: whether, of two concurrent ones, one is certain to fail.

    Attributes:
        are_accepted: A call that returns whether the store accepts the condition that there be no such file.
        are_enforced: Whether it also enforces it, as some stores do not; None until a saver has tried.
    """

    are_accepted: Callable[[], bool]
    are_enforced: bool | None = None


class LeaseLocks(Locks):
    """Locks by a lease, which excludes savers of a directory from each other. Readers have no lock."""

    def __init__(self, backend: Backend, seconds: float, conditions: Conditions | None = None) -> None:
        """Take nothing yet; ``conditions`` is shared by the directories of one store."""
        self._backend = backend
        self._seconds, self._conditions = check_lease_seconds(seconds), conditions or Conditions(lambda: True)
        self._lease: LeaseLock | None = None
        # The time when the write of the last claim began.
        self._wrote_at = -math.inf

    @property
    def can_run_out(self) -> bool:
        """Implement the base class: a lease can, a lock of the kernel cannot."""
        return self._lease is not None

    def take(self, times: float = 1.0) -> SaveLock:
        """Take the save lock, once a lease that nobody renews has expired; errors as of the base class.

        Raises:
            OSError: The medium failed.
        """
        claim = Claim(os.urandom(16).hex(), socket.gethostname(), os.getpid(), 0, times * self._seconds)
        if not self._obtain(claim):
            time.sleep(_settling_seconds(claim.seconds))
            winner = Claim.decode(_read(self._backend))
            if winner is None or winner.token != claim.token:
                raise self._busy(winner)
        self._lease = LeaseLock(self._backend, claim, self._wrote_at)
        return self._lease

    def _obtain(self, claim: Claim) -> bool:
        """Write a lease; return whether it is certain that nobody else has done so at the same time."""
        found: bytes | None = None
        watched: bytes | None = None
        since = 0.0
        while True:
            # The first try is to create the lease without a look: if that is refused, there is one.
            if found is None and self._create(claim):
                return self._is_alone(claim)
            found = _read(self._backend)
            now = time.monotonic()
            if found is None:
                continue
            other = Claim.decode(found)
            if watched is None:
                watched, since = found, now
            elif found != watched:
                raise self._busy(other)
            elif now - since >= max(claim.seconds, other.seconds if other else 0.0):
                logger.warning(f"{self._backend.path}: a lease of {other} has run out and is taken over")
                self._wrote_at = _now()
                write_file(self._backend, LEASE_FILE, claim.encode())
                return False
            time.sleep(claim.seconds / _LOOKS)

    def _is_alone(self, claim: Claim) -> bool:
        """Return whether the store refuses to create a lease twice. The first saver of each store tries this out."""
        conditions = self._conditions
        if not conditions.are_accepted():
            return False
        if conditions.are_enforced is None:
            begin = self._wrote_at
            conditions.are_enforced = not self._create(claim)
            self._wrote_at = begin
        return conditions.are_enforced

    def _create(self, claim: Claim) -> bool:
        """Create the lease if there is none; return whether it was created."""
        self._wrote_at = _now()
        try:
            write_file(self._backend, LEASE_FILE, claim.encode(), "new")
        except FileExistsError:
            return False
        return True

    def _busy(self, other: Claim | None) -> CheckpointError:
        return TakenError.of(self._backend.path, other)

    def adopt(self, token: dict[str, Any], descriptor: int | None) -> SaveLock:
        """Renew the lease that another process holds and hands over, from now on also from here."""
        if token["kind"] != "lease":
            return super().adopt(token, descriptor)
        claim = Claim(**token["claim"])
        claim = replace(claim, host=socket.gethostname(), pid=os.getpid(), counter=claim.counter + 1)
        # The first request may take long, as it connects, so it is made before.
        with contextlib.suppress(OSError):
            _read(self._backend)
        # The previous holder, on the same host, may have renewed it since, or have died long ago.
        self._lease = LeaseLock(self._backend, claim, float(token["renewed_at"]))
        return self._lease

    def check(self) -> None:
        """Implement the base class."""
        if self._lease is not None:
            self._lease.check()

    def ensure_held(self) -> None:
        """Implement the base class."""
        if self._lease is not None:
            self._lease.ensure_held()

    def forget_lost(self) -> None:
        """Implement the base class."""
        try:
            self.ensure_held()
        except (OSError, CheckpointError):
            self._lease = None

    def check_before_release(self) -> None:
        """Implement the base class."""
        if self._lease is not None:
            self._lease.check_before_release()


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _settling_seconds(seconds: float) -> float:
    """Return the seconds before a claim counts, where it may not be the only one."""
    return min(seconds, LEASE_SECONDS) / _SETTLING


def _read(backend: Backend) -> bytes | None:
    for left in reversed(range(_READS)):
        try:
            return backend.read(LEASE_FILE)
        except FileNotFoundError:
            return None
        except CorruptCheckpointError:
            # Its holder may have been writing it.
            if not left:
                raise
    return None
