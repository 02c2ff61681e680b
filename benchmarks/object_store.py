"""Save and load over a simulated object store, against the cap of its link and against plain parallel requests.

A server on this machine answers each request after a latency, lets no more than so many bytes a second through, and
fails a share of the requests by a seed. Subjects take turns (A B A B ...): this library, and threads that send or get
the same bytes in parts with nothing but ``http.client``. ``of the cap`` is bytes / (cap x seconds).

    python -m benchmarks.object_store                     # 256 MiB, 64 MiB/s, 50 ms, no errors and 1 % errors
    python -m benchmarks.object_store --mib 64 --rate 32 --pairs 1 --json result.json

Requests in flight, parts and retries are counted by the server.
"""

from __future__ import annotations

import http.client
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.harness import MIB, Row, arguments, finish, random_tensors, ratios, row
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.media.read_ahead import Budget
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from tests.object_store import ObjectStore, running_store

PLAIN_PART = 8 * MIB
State = dict[str, np.ndarray]


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 1024], help="tensors in the state")
    parser.add_argument("--rate", type=float, default=64, help="MiB/s that the link lets through; 0: all that come")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds from a request to its answer")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0, 0.01], help="shares of requests that fail")
    options = parser.parse_args(argv)
    cases: dict[str, Any] = {}
    rows: list[Row] = []
    with running_store() as store:
        for tensors in options.tensors:
            state = dict(random_tensors(tensors, (options.mib * MIB // 4 // tensors,)))
            for errors in options.errors:
                link = {"latency": options.latency, "rate": options.rate * MIB, "errors": errors}
                case = measure(store, state, link, options.pairs)
                name = f"{tensors} tensors, {errors:.0%} errors"
                cases[name] = case
                rows += rows_of(f"{options.mib} MiB, {name}", case)
                print(report(name, case), flush=True)
    finish(options, rows, cases=cases, budget={"requests": Budget.requests, "bytes": Budget.bytes})
    return 0 if all(case["equal"] for case in cases.values()) else 1


def rows_of(name: str, case: dict[str, Any]) -> list[Row]:
    """Compare with the cap of the link, where it has one, and with plain requests."""
    rows = []
    for call in ("save", "load"):
        seconds, note = case[call]["seconds"], "simulated link"
        if case["rate"]:
            of_cap = [case["bytes"] / case["rate"] / each for each in seconds["ours"]]
            rows.append(row(f"object store, {call} / cap of the link: {name}", of_cap, ">= 0.9", note=note))
        rows.append(
            row(f"object store, {call} / plain requests: {name}", ratios(seconds["plain"], seconds["ours"]), note=note)
        )
    return rows


class Plain:
    """Parts of one object, sent and got by threads, as many at a time as the library may have under way."""

    def __init__(self, store: ObjectStore, size: int) -> None:
        self._port, self._own = store.port, threading.local()
        self._data = memoryview(np.random.default_rng(1).bytes(size))
        self._got = memoryview(bytearray(size))
        self._at_once = min(Budget.requests, Budget.bytes // PLAIN_PART)

    def _ask(self, method: str, query: str, body: Any = None, span: str | None = None, into: Any = None) -> bytes:
        """One request, again until it goes well."""
        while True:
            try:
                if not hasattr(self._own, "connection"):
                    self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port)
                headers = {} if span is None else {"Range": f"bytes={span}"}
                self._own.connection.request(method, f"/bucket/plain{query}", body, headers)
                answer = self._own.connection.getresponse()
                if answer.status >= 500:
                    answer.read()
                    continue
                count = 0
                while into is not None and count < len(into):
                    got = answer.readinto(into[count:])
                    if not got:
                        raise http.client.IncompleteRead(b"")
                    count += got
                return answer.read()
            except (ConnectionError, http.client.HTTPException):
                self._own.connection.close()
                del self._own.connection

    def save(self) -> None:
        upload = self._ask("POST", "?uploads").decode().partition("<UploadId>")[2].partition("<")[0]

        def send(number: int) -> None:
            begin = (number - 1) * PLAIN_PART
            self._ask("PUT", f"?partNumber={number}&uploadId={upload}", self._data[begin : begin + PLAIN_PART])

        self._all(send, range(1, -(-len(self._data) // PLAIN_PART) + 1))
        self._ask("POST", f"?uploadId={upload}")

    def load(self) -> None:
        def get(begin: int) -> None:
            into = self._got[begin : begin + PLAIN_PART]
            self._ask("GET", "", span=f"{begin}-{begin + len(into) - 1}", into=into)

        self._all(get, range(0, len(self._data), PLAIN_PART))

    def _all(self, function: Callable[[int], None], numbers: range) -> None:
        with ThreadPoolExecutor(self._at_once) as pool:
            list(pool.map(function, numbers))


class Ours:
    """The state in a checkpoint."""

    def __init__(self, store: ObjectStore, state: State) -> None:
        options = {"key": "tests", "secret": "no secret", "endpoint_url": f"http://127.0.0.1:{store.port}"}
        self._storage = open_storage("s3://bucket/run", client_kwargs={"region_name": "us-east-1"}, **options)
        self._state, self._comm = state, SoloCommunicator()
        self._target = {name: np.zeros_like(value) for name, value in state.items()}

    def save(self) -> None:
        save_state_dict(self._state, self._storage, self._comm, unique_id=0)

    def load(self) -> None:
        load_state_dict(self._target, self._storage, self._comm)

    def equal(self) -> bool:
        """Whether the last load brought what was saved; what it brought is forgotten."""
        pairs = [(self._target[name], value) for name, value in self._state.items()]
        found = all(np.array_equal(got.view(np.uint8), value.view(np.uint8)) for got, value in pairs)
        for got, _ in pairs:
            got[...] = 0
        return found


def measure(store: ObjectStore, state: State, link: dict[str, float], pairs: int) -> dict[str, Any]:
    """Turns of both subjects; the first one of each warms up, and does not count."""
    size = sum(value.nbytes for value in state.values())
    store.set()
    subjects: dict[str, Any] = {"plain": Plain(store, size), "ours": Ours(store, state)}
    case: dict[str, Any] = {"bytes": size, "equal": True, **link}
    for call in ("save", "load"):
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        processor: list[float] = []
        counts: dict[str, Any] = {}
        for turn in range(pairs + 1):
            for name, subject in subjects.items():
                store.set(**({**link, "seed": turn} if turn else {}))
                begin, used = time.perf_counter(), time.process_time()
                getattr(subject, call)()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
                if name == "ours" and turn:
                    processor.append(time.process_time() - used)
                    counts = counts_of(store)
            if call == "load":
                case["equal"] = case["equal"] and subjects["ours"].equal()
        case[call] = {
            "seconds": seconds,
            "processor_seconds": statistics.median(processor),
            **counts,
        }
    case["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return case


def counts_of(store: ObjectStore) -> dict[str, int]:
    log = store.log
    return {
        "requests": len(log.entries),
        "failed": sum(each.fault is not None for each in log.entries),
        "most_requests": log.most_requests,
        "most_bytes": log.most_bytes,
    }


def report(name: str, case: dict[str, Any]) -> str:
    lines = [name if case["equal"] else f"{name}: OTHER BYTES"]
    for call in ("save", "load"):
        told = case[call]
        lines.append(
            f"  {call}: {statistics.median(told['seconds']['ours']):.2f} s, {told['processor_seconds']:.2f} s of a "
            f"processor; {told['requests']} requests ({told['failed']} failed), at most {told['most_requests']} and "
            f"{told['most_bytes'] / MIB:.1f} MiB at a time"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
