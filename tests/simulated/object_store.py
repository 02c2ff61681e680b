"""A simulated object store: objects in memory, behind requests that take time, fail, and arrive when nobody waits.

This is the server's side. ``object_store_clients.py`` has the file systems by which the library reaches it.

Tested in tests/simulation/test_object_store.py.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from tests.simulated.scheduler import Scheduler
    from tests.simulated.tasks import Process

# What becomes of a request that is made on the condition that there be no such object:
#   kept      As S3, GCS and Azure have it.
#   ignored   It is carried out as if there were no condition.
#   refused   The server says that it does not know such requests.
#   unknown   The client does not know them.
ConditionsOf = Literal["kept", "ignored", "refused", "unknown"]

# What can happen to a request:
#   refused   The server says that it is busy, or has failed; nothing was done.
#   reset     The connection ends before the request has arrived.
#   lost      It is carried out, and the connection ends before the answer.
#   cut       Half of an object arrives; as "lost" if none was asked for.
#   hung      It never arrives, and nobody says so.
#   late      Its client gives up; then it arrives, and is carried out.
Fate = Literal["done", "refused", "reset", "lost", "cut", "hung", "late"]

_REFUSALS = (
    (500, "InternalError"),
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (429, "TooManyRequests"),
    (409, "OperationAborted"),
)


@dataclass(frozen=True)
class Conduct:
    """Describe what a store promises, and how it fails.

    Attributes:
        latency: Least and most seconds of a request and its answer, without their bytes.
        rate: Bytes per second of one request.
        timeout: Seconds after which a client gives up.
        shares: Which share of the requests has another fate than "done".
        late_seconds: How long after its client has given up a late request may arrive.
        overtakes: Whether a late request replaces what a later one has set. S3 goes by when a request was begun.
        stale_lists: For how many seconds a listing may not know of a change.
        stale_reads: For how many seconds a read may not know of a change.
        conditions: What becomes of conditions.
        page: How many entries a listing has at most before its next page.
    """

    latency: tuple[float, float] = (0.005, 0.08)
    rate: float = 100e6
    timeout: float = 60.0
    shares: dict[Fate, float] = field(default_factory=dict)
    late_seconds: float = 60.0
    overtakes: bool = False
    stale_lists: float = 0.0
    stale_reads: float = 0.0
    conditions: ConditionsOf = "kept"
    page: int = 1000


class Stored(NamedTuple):
    """Describe an object."""

    data: bytes
    tag: str

    @classmethod
    def of(cls, data: bytes) -> Stored:
        """Return an object of these bytes."""
        return cls(data, hashlib.md5(data, usedforsecurity=False).hexdigest())


class Effect(NamedTuple):
    """Describe a change of one object.

    It tells what it was ("put", "delete", "copy"), the bytes from now on, and who asked for it.
    """

    kind: str
    key: str
    data: bytes | None
    process: Process


class ServerError(Exception):
    """Signal what a server answers instead of a result."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{code} (simulated)")
        self.status, self.code = status, code


class Unanswered(Exception):
    """Signal that there is no answer, or half of one; ``kind`` is "reset", "timeout" or "cut"."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Listing(NamedTuple):
    """Describe one page: objects with their sizes, what they share up to a delimiter, and whether more follows."""

    objects: list[tuple[str, int]]
    folders: list[str]
    is_cut: bool

    @property
    def last(self) -> str:
        """Return after what the next page begins."""
        return max([name for name, _ in self.objects[-1:]] + self.folders[-1:], default="")


class ObjectStore:
    """Hold the objects of all buckets, and how they are reached.

    Attributes:
        conduct: How it behaves from now on.
        objects: What is there, by key: bucket, slash, name.
        uploads: Uploads in parts that have been begun: key, and parts by number.
        watchers: Called with each change when it takes effect.
        listeners: Called with each request, its key and its process before it is made.
        counts: How many requests there were, by operation and fate.
        unreachable: Names of nodes whose requests do not arrive.
        is_read_only: Whether the credentials allow no change.
        script: Decides the fate of requests in place of the dice, by operation, key and process.
    """

    def __init__(self, scheduler: Scheduler, conduct: Conduct = Conduct()) -> None:
        self.scheduler, self.conduct = scheduler, conduct
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.watchers: list[Callable[[Effect], None]] = []
        self.listeners: list[Callable[[str, str, Process], None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unreachable: set[str] = set()
        self.is_read_only = False
        self.script: Callable[[str, str, Process], Fate] | None = None
        self._numbers = itertools.count(1)
        self._down_until = 0.0
        # Of late changes, by key: when each was made, and the object before it.
        self._before: dict[str, list[tuple[float, Stored | None]]] = {}
        # Of the request that is carried out: whose it is, and when it was begun.
        self._asker: Process | None = None
        self._began = 0.0
        # By key, when the request was begun that has set or removed it.
        self._changed: dict[str, float] = {}

    # Faults.

    def fail(self, seconds: float) -> None:
        """Begin an outage."""
        self._down_until = max(self._down_until, self.scheduler.now + seconds)
        self.scheduler.note(f"the object store is down for {seconds:.0f} s")

    def behave(self, **conduct: Any) -> None:
        """Change how the store behaves from now on."""
        self.conduct = replace(self.conduct, **conduct)

    def _fate(self, operation: str, key: str, process: Process) -> Fate:
        dice = self.scheduler.random
        if self.script is not None:
            return self.script(operation, key, process)
        if process.node.name in self.unreachable:
            return dice.choice(("reset", "hung"))
        if self.scheduler.now < self._down_until:
            return dice.choice(("refused", "refused", "reset", "hung"))
        point = dice.random()
        for fate, share in self.conduct.shares.items():
            point -= share
            if point < 0:
                return fate
        return "done"

    # Requests.

    def request(
        self,
        operation: str,
        key: str,
        action: Callable[[], Any],
        sent: int = 0,
        size: Callable[[Any], int] = lambda _: 0,
    ) -> Any:
        """Make a request for the process that runs, and wait for its answer.

        A process that dies while it sends has asked for nothing. Once all is sent, the server may or may not do it.

        Args:
            operation: Its name, for the count and the story.
            key: What it is about.
            action: What the server does.
            sent: Bytes of its body.
            size: Tells the bytes of an answer's body.

        Raises:
            ServerError: The server's answer is an error.
            Unanswered: There is none, or half of one.
        """
        scheduler, conduct, dice = self.scheduler, self.conduct, self.scheduler.random
        scheduler.check_alive()
        me, process = scheduler.current, scheduler.process
        for listener in self.listeners:
            listener(operation, key, process)
        fate = self._fate(operation, key, process)
        self.counts[operation, fate] += 1
        if fate != "done":
            scheduler.note(f"{operation} {key}: {fate}")
        if sent:
            scheduler.sleep(sent / conduct.rate)
        latency, began = dice.uniform(*conduct.latency), scheduler.now
        answers: list[tuple[Any, Exception | None]] = []

        def answer(result: Any, error: Exception | None) -> None:
            answers.append((result, error))
            scheduler.wake(me)

        def arrive() -> None:
            # With its process its connection has ended, perhaps before the server has read all that was sent.
            if not process.alive and dice.random() < 0.5:
                return
            result, error = self._carry_out(action, process, began)
            if fate in ("lost", "late"):
                result, error = None, Unanswered("reset")
            elif fate == "cut" and error is None:
                error = Unanswered("cut")
            length = 0 if error is not None else size(result)
            scheduler.after(latency / 2 + length / conduct.rate, lambda: answer(result, error))

        if fate == "refused":
            refusal = ServerError(*dice.choice(_REFUSALS))
            scheduler.after(latency, lambda: answer(None, refusal))
        elif fate == "reset":
            scheduler.after(latency / 2, lambda: answer(None, Unanswered("reset")))
        elif fate == "late":
            scheduler.after(conduct.timeout + dice.uniform(0, conduct.late_seconds), arrive)
        elif fate != "hung":
            scheduler.after(latency / 2, arrive)
        deadline = scheduler.now + conduct.timeout
        while not answers:
            if scheduler.now >= deadline:
                raise Unanswered("timeout")
            scheduler.park(deadline - scheduler.now)
        result, error = answers[0]
        if error is not None:
            raise error
        return result

    def _carry_out(self, action: Callable[[], Any], process: Process, began: float) -> tuple[Any, Exception | None]:
        self._asker, self._began = process, began
        try:
            return action(), None
        except ServerError as error:
            return None, error
        finally:
            self._asker = None

    # What the server does; raises ServerError.

    def get(self, key: str) -> Stored:
        """Return an object."""
        found = self._seen(key, self.conduct.stale_reads)
        if found is None:
            raise ServerError(404, "NoSuchKey")
        return found

    def put(self, key: str, data: bytes, new: bool = False, kind: str = "put", tag: str | None = None) -> Stored:
        """Set an object; ``new`` is the condition that there be none, ``tag`` that there be one with this tag."""
        self._check_writable()
        has_condition = new or tag is not None
        if has_condition and self.conduct.conditions == "refused":
            raise ServerError(501, "NotImplemented")
        if has_condition and self.conduct.conditions == "kept":
            there = self.objects.get(key)
            if tag is not None and there is None:
                raise ServerError(404, "NoSuchKey")
            if there is not None and there.tag != tag:
                raise ServerError(412, "PreconditionFailed")
            if self._is_overtaken(key):
                raise ServerError(409, "ConditionalRequestConflict")  # as S3 answers where a removal has come between
        stored = Stored.of(data)
        self._set(kind, key, stored)
        return stored

    def delete(self, key: str) -> bool:
        """Remove an object; return whether there was one."""
        self._check_writable()
        if key not in self.objects:
            return False
        self._set("delete", key, None)
        return True

    def rename(self, source: str, target: str, replaces: bool = True) -> None:
        """Give an object another key, at once."""
        self._check_writable()
        if source not in self.objects:
            raise ServerError(404, "NoSuchKey")
        if target in self.objects and not replaces:
            raise ServerError(412, "PreconditionFailed")
        self.put(target, self.objects[source].data, kind="copy")
        self.delete(source)

    def list_page(self, prefix: str, delimiter: str = "", after: str = "") -> Listing:
        """List what begins with a prefix, from a certain entry on."""
        found: dict[str, int | None] = {}
        keys = {key for key in (*self.objects, *self._before) if key.startswith(prefix)}
        for key in sorted(keys):
            seen = self._seen(key, self.conduct.stale_lists)
            if seen is not None:
                folder, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                found[prefix + folder + cut if cut else key] = None if cut else len(seen.data)
        rest = sorted(name for name in found if name > after)
        page = rest[: self.conduct.page]
        return Listing(
            [(name, size) for name in page if (size := found[name]) is not None],
            [name for name in page if found[name] is None],
            len(rest) > len(page),
        )

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts, and return its name."""
        self._check_writable()
        name = f"upload-{next(self._numbers)}"
        self.uploads[name] = (key, {})
        return name

    def put_part(self, upload: str, number: int, data: bytes) -> str:
        """Set a part of an upload, and return its tag."""
        self._check_writable()
        self._parts(upload)[number] = data
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def complete_upload(self, upload: str, numbers: list[int], new: bool = False) -> Stored:
        """Put parts together."""
        parts = self._parts(upload)
        if not set(numbers) <= set(parts) or numbers != sorted(numbers):
            raise ServerError(400, "InvalidPart")
        stored = self.put(self.uploads[upload][0], b"".join(parts[number] for number in numbers), new)
        del self.uploads[upload]
        return stored

    def abort_upload(self, upload: str) -> None:
        """Give up an upload."""
        self._check_writable()
        self._parts(upload)
        del self.uploads[upload]

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return key and name of uploads that have been begun."""
        return sorted((key, name) for name, (key, _) in self.uploads.items() if key.startswith(prefix))

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise ServerError(404, "NoSuchUpload")
        return self.uploads[upload][1]

    def _check_writable(self) -> None:
        if self.is_read_only:
            raise ServerError(403, "AccessDenied")

    def _set(self, kind: str, key: str, stored: Stored | None) -> None:
        asker, memory = self._asker, max(self.conduct.stale_lists, self.conduct.stale_reads)
        if asker is None:
            raise RuntimeError("objects change by requests only")
        if self._is_overtaken(key):
            return
        self._changed[key] = self._began
        if memory:
            now = self.scheduler.now
            kept = [each for each in self._before.get(key, ()) if each[0] >= now - memory]
            self._before[key] = [*kept, (now, self.objects.get(key))]
        if stored is None:
            del self.objects[key]
        else:
            self.objects[key] = stored
        for watcher in self.watchers:
            watcher(Effect(kind, key, None if stored is None else stored.data, asker))

    def _is_overtaken(self, key: str) -> bool:
        """Return whether a request that began later has changed an object, and this one has no effect any more."""
        return self._began < self._changed.get(key, 0.0) and not self.conduct.overtakes

    def _seen(self, key: str, seconds: float) -> Stored | None:
        """Return an object as a request finds it that may be so many seconds behind."""
        if seconds and key in self._before:
            then = self.scheduler.now - self.scheduler.random.uniform(0, seconds)
            for when, before in self._before[key]:
                if when > then:
                    return before
        return self.objects.get(key)
