"""A small S3 server behind a simulated link: latency, a capped rate, requests that fail by a seed, and a log.

It stands on the standard library alone and keeps objects in memory. ``tests/s3_server.py`` has a server of others that
is the authority on the protocol; this one is for what a link does. Run as a program it prints its port.

Benchmarks use it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

# A request that is about this path is one to the simulation itself.
CONTROL = "/_link"
# How much of the link's time may be saved up while nobody sends: what a late timer would lose otherwise.
BURST_SECONDS = 0.02
CHUNK_BYTES = 64 << 10
FAULTS = ("500", "503", "drop", "lost", "cut")
REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


@dataclass
class Link:
    """What the link does.

    Attributes:
        latency: Seconds from a request to the first byte of its answer.
        rate: Bytes a second of all connections together, each way; 0 for as many as can be.
        errors: Share of the requests for objects that fail, by ``seed``: the same requests, whatever their order.
        always: Text that makes a request fail each time, if it is in its method and URL, and the fault.
    """

    latency: float = 0.0
    rate: float = 0.0
    errors: float = 0.0
    seed: int = 0
    always: dict[str, str] = field(default_factory=dict)

    def fate(self, line: str, nth: int) -> str | None:
        """The fault of a request when it is made for the n-th time; None if it goes well."""
        for text, fault in self.always.items():
            if text in line:
                return fault
        dice = random.Random(f"{self.seed} {line} {nth}")
        return dice.choice(FAULTS) if dice.random() < self.errors else None


@dataclass
class Entry:
    """One request: its method, key and query; where its bytes begin, and how many; when it came, and when and how it
    ended, as numbers of all comings and endings.
    """

    method: str
    key: str
    query: dict[str, str]
    begin: int = 0
    length: int = 0
    status: int = 0
    fault: str | None = None
    came: int = 0
    ended: int = 0


@dataclass
class Log:
    """All requests for objects, and the most that were under way at a time, by number and by bytes."""

    entries: list[Entry] = field(default_factory=list)
    most_requests: int = 0
    most_bytes: int = 0
    open_requests: int = 0
    open_bytes: int = 0
    events: int = 0

    def rounds(self) -> list[Entry]:
        """The longest chain of requests of which each came when the one before had ended: what latency counts for."""
        chain: list[Entry] = []
        for each in sorted(self.entries, key=lambda entry: entry.ended):
            if not chain or each.came > chain[-1].ended:
                chain.append(each)
        return chain

    def of(self, method: str, name: str = "", query: str | None = None) -> list[Entry]:
        """Requests by a method for keys with a text in them, and with a parameter."""
        return [
            each
            for each in self.entries
            if each.method == method and name in each.key and (query is None or query in each.query)
        ]


class Line:
    """A line that all connections share: bytes leave it one after the other, at its rate."""

    def __init__(self) -> None:
        self.free_at = 0.0

    async def take(self, count: int, rate: float) -> None:
        """Wait until so many bytes have passed."""
        if not rate:
            return
        now = time.monotonic()
        self.free_at = max(self.free_at, now - BURST_SECONDS) + count / rate
        if self.free_at > now:
            await asyncio.sleep(self.free_at - now)


class Stored(NamedTuple):
    """An object: its parts, their bytes together, and its tag."""

    parts: list[bytes]
    size: int
    tag: str

    def slices(self, begin: int, end: int) -> Iterator[memoryview]:
        """Its bytes from one to another, in chunks."""
        start = 0
        for part in self.parts:
            first, last = max(begin, start), min(end, start + len(part))
            for at in range(first, last, CHUNK_BYTES):
                yield memoryview(part)[at - start : min(last, at + CHUNK_BYTES) - start]
            start += len(part)


class Answer(NamedTuple):
    """What is sent back; ``content`` is an object's range, or else the body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}
    content: tuple[Stored, int, int] | None = None


class Dropped(Exception):
    """The connection is closed without a further byte."""


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>simulated {status}</Message></Error>".encode())


class Store:
    """Objects and uploads of all buckets, by the operations of S3 that are needed."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self._numbers = itertools.count(1)

    def _put(self, key: str, parts: list[bytes], headers: dict[str, str]) -> Answer:
        if headers.get("if-none-match") == "*" and key in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[key] = Stored(parts, sum(map(len, parts)), f'"{next(self._numbers):032x}"')
        return Answer(200, headers={"ETag": self.objects[key].tag})

    def answer(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        if "uploadId" in query:
            return self._of_upload(method, key, query, headers, body)
        if method == "POST" and "uploads" in query:
            name = f"upload-{next(self._numbers)}"
            self.uploads[name] = (key, {})
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, text.encode())
        if "/" not in key:
            return self._of_bucket(method, key, query)
        if method == "PUT":
            return self._put(key, [body], headers)
        if method == "DELETE":
            self.objects.pop(key, None)
            return Answer(204)
        return self._get(method, key, headers)

    def _get(self, method: str, key: str, headers: dict[str, str]) -> Answer:
        found = self.objects.get(key)
        if found is None:
            return error(404, "NoSuchKey")
        begin, end, status, more = (
            0,
            found.size,
            200,
            {"ETag": found.tag, "Last-Modified": "Thu, 01 Jan 1970 00:00:00 GMT"},
        )
        if "range" in headers:
            first, _, last = headers["range"].partition("=")[2].partition("-")
            begin, end = int(first), min(found.size, int(last) + 1 if last else found.size)
            if begin >= found.size:
                return error(416, "InvalidRange")
            status, more["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{found.size}"
        return Answer(status, headers=more, content=(found, begin, end))

    def _of_bucket(self, method: str, bucket: str, query: dict[str, str]) -> Answer:
        if method == "PUT":
            return Answer(200)
        start = f"{bucket}/{query.get('prefix', '')}"
        cut = len(bucket) + 1
        if "uploads" in query:
            text = "".join(
                f"<Upload><Key>{escape(key[cut:])}</Key><UploadId>{name}</UploadId></Upload>"
                for name, (key, _) in self.uploads.items()
                if key.startswith(start)
            )
            return Answer(200, f"<ListMultipartUploadsResult>{text}</ListMultipartUploadsResult>".encode())
        files, folders = [], set()
        for key in sorted(each for each in self.objects if each.startswith(start)):
            rest, delimiter, _ = key[len(start) :].partition(query.get("delimiter") or "\0")
            if delimiter:
                folders.add(start[cut:] + rest + delimiter)
            else:
                files.append(
                    f"<Contents><Key>{escape(key[cut:])}</Key><Size>{self.objects[key].size}</Size></Contents>"
                )
        text = "".join(files) + "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        )
        return Answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>".encode())

    def _of_upload(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        name = query["uploadId"]
        if name not in self.uploads:
            return error(404, "NoSuchUpload")
        parts = self.uploads[name][1]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return Answer(200, headers={"ETag": f'"{query["partNumber"]}"'})
        if method == "DELETE":
            del self.uploads[name]
            return Answer(204)
        done = self._put(key, [parts[number] for number in sorted(parts)], headers)
        if done.status != 200:
            return done
        del self.uploads[name]
        tag = escape(done.headers["ETag"])
        return Answer(
            200, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode()
        )


class Server:
    """Answers the connections of one port."""

    def __init__(self) -> None:
        self.link, self.log, self.store = Link(), Log(), Store()
        self._up, self._down = Line(), Line()
        self._seen: dict[str, int] = {}

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request after the other."""
        with contextlib.suppress(Dropped, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                url = urlsplit(target)
                query = dict(parse_qsl(url.query, keep_blank_values=True))
                if url.path == CONTROL:
                    body = await reader.readexactly(int(headers.get("content-length", 0)))
                    await self._send(writer, method, self._control(method, body))
                    continue
                await self._request(reader, writer, method, unquote(url.path).strip("/"), query, headers)
        writer.close()

    def _control(self, method: str, body: bytes) -> Answer:
        """Set the link and begin a new log, or tell the log."""
        if method == "POST":
            self.link, self.log, self._seen = Link(**json.loads(body)), Log(), {}
            return Answer(200)
        return Answer(200, json.dumps(asdict(self.log)).encode())

    async def _request(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
    ) -> None:
        log, length = self.log, int(headers.get("content-length", 0))
        entry = Entry(method, key, query, length=length)
        if "range" in headers:
            first, _, last = headers["range"].partition("=")[2].partition("-")
            entry.begin, entry.length = int(first), int(last or first) + 1 - int(first)
        log.entries.append(entry)
        log.events += 1
        entry.came = log.events
        log.open_requests += 1
        log.open_bytes += entry.length
        log.most_requests = max(log.most_requests, log.open_requests)
        log.most_bytes = max(log.most_bytes, log.open_bytes)
        line = f"{method} {key} {sorted(pair for pair in query.items() if pair[0] != 'uploadId')} {entry.begin}"
        self._seen[line] = self._seen.get(line, 0) + 1
        entry.fault = self.link.fate(line, self._seen[line])
        try:
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await self._body(reader, length)
            await asyncio.sleep(self.link.latency)
            if entry.fault == "drop":
                raise Dropped
            if entry.fault in ("500", "503"):
                answer = error(int(entry.fault), "InternalError" if entry.fault == "500" else "SlowDown")
            else:
                answer = self.store.answer(method, key, query, headers, body)
            entry.status = answer.status
            if entry.fault == "lost" or (entry.fault == "cut" and answer.content is None):
                raise Dropped
            await self._send(writer, method, answer, entry.fault == "cut")
        finally:
            log.events += 1
            entry.ended = log.events
            log.open_requests -= 1
            log.open_bytes -= entry.length

    async def _body(self, reader: asyncio.StreamReader, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            chunk = await reader.read(min(length - len(body), CHUNK_BYTES))
            if not chunk:
                raise Dropped
            body += chunk
            await self._up.take(len(chunk), self.link.rate)
        return bytes(body)

    async def _send(self, writer: asyncio.StreamWriter, method: str, answer: Answer, cut: bool = False) -> None:
        if answer.content is None:
            size, chunks = len(answer.body), iter([memoryview(answer.body)])
        else:
            found, begin, end = answer.content
            size, chunks = end - begin, found.slices(begin, end)
        headers = {"Content-Length": str(size), **answer.headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Error')}\r\n{text}\r\n".encode())
        sent = 0
        for chunk in chunks if method != "HEAD" else ():
            if cut and sent >= size // 2:
                await writer.drain()
                raise Dropped
            if answer.content is not None:
                await self._down.take(len(chunk), self.link.rate)
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
        await writer.drain()
        if cut:
            raise Dropped


async def serve() -> None:
    """Answer until the standard input ends."""
    server = Server()
    listening = await asyncio.start_server(server.connection, "127.0.0.1", 0, limit=4 * CHUNK_BYTES)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    listening.close()


class ObjectStore:
    """A running server; its link can be set, and its log read."""

    def __init__(self, port: int) -> None:
        self.port = port

    def _control(self, method: str, body: str = "") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, CONTROL, body)
            return connection.getresponse().read()
        finally:
            connection.close()

    def set(self, **link: object) -> None:
        """Give the link other properties, those of :class:`Link`, and begin a new log."""
        self._control("POST", json.dumps(asdict(Link(**link))))

    @property
    def log(self) -> Log:
        """What has been asked for since."""
        told = json.loads(self._control("GET"))
        return Log(**{**told, "entries": [Entry(**each) for each in told["entries"]]})


@contextlib.contextmanager
def running_store() -> Iterator[ObjectStore]:
    """A server in a process of its own, for as long as the context lasts."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield ObjectStore(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve())
