"""A local server that speaks S3, and requests to it that are counted, or fail.

Import this only after ``pytest.importorskip("moto")`` and ``pytest.importorskip("s3fs")``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import aiobotocore.httpsession
import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError

from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.media.opening import open_storage

BUCKET = "bucket"
SECRET = "s3-secret-of-tests"
# Parts may be small here, so that tests of uploads in parts need not be large.
LEAST_PART_BYTES = 1024
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_numbers = itertools.count()


class S3Server:
    """A running server with one bucket.

    Attributes:
        options: fsspec's storage options for it.
        environment: Variables that say the same.
    """

    def __init__(self, port: int) -> None:
        """Args: port: where it listens on this machine."""
        self.options = {
            "key": "tests",
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }
        self.environment = {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def storage(self, url: str, **options) -> Backend:
        """An open storage on it."""
        return open_storage(url, **{**self.options, **options})

    def new_url(self) -> str:
        """A directory that no test has used."""
        return f"s3://{BUCKET}/runs/{next(_numbers)}"

    def client(self):
        """An s3fs file system of its own."""
        import s3fs

        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **self.options)

    def objects(self, url: str = f"s3://{BUCKET}") -> dict[str, bytes]:
        """All objects under a URL, by key."""
        client = self.client()
        return {path: client.cat_file(path) for path in client.find(url)}

    def uploads(self) -> list[str]:
        """Keys of uploads in parts that have been begun and neither finished nor given up."""
        found = self.client().call_s3("list_multipart_uploads", Bucket=BUCKET)
        return [each["Key"] for each in found.get("Uploads", ())]


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    """A server in a process of its own, for as long as the context lasts."""
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(LEAST_PART_BYTES)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        server = S3Server(int(process.stdout.readline()))
        server.client().call_s3("create_bucket", Bucket=BUCKET)
        yield server
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


Answer = Callable[[int, str, str], "str | int | None"]


class Requests:
    """Counts the HTTP requests of this process to S3, and makes some of them fail.

    Attributes:
        seen: ``(method, last part of the URL)`` of every request so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer | None = None) -> None:
        """Watches all sessions.

        Args:
            monkeypatch: Undoes it.
            answer: Gets number, method and end of the URL of a request. What it gives: None, and the request goes its
                way; ``"lost"``: it does, and its answer is lost; ``"refused"``: it is not sent; a status: the server's
                answer to it, instead of sending it.
        """
        self.seen: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        real = aiobotocore.httpsession.AIOHTTPSession.send

        async def send(session, request):
            name = unquote(request.url.split(f"/{BUCKET}")[-1].split("/")[-1])
            with self._lock:
                number = len(self.seen)
                self.seen.append((request.method, name))
            fate = answer(number, request.method, name) if answer else None
            if fate is None:
                return await real(session, request)
            if isinstance(fate, int):
                return Refusal(request.url, fate)
            if fate == "lost":
                await (await real(session, request)).content
            raise ConnectionClosedError(endpoint_url=request.url)

        monkeypatch.setattr(aiobotocore.httpsession.AIOHTTPSession, "send", send)

    def of(self, method: str, name: str = "") -> list[str]:
        """Ends of the URLs of requests by a method, with a text in them."""
        return [each for kind, each in self.seen if kind == method and name in each]


class Refusal(AWSResponse):
    """An error as the server would send it."""

    _CODES = {
        400: "InvalidArgument",
        403: "AccessDenied",
        404: "NoSuchKey",
        412: "PreconditionFailed",
        500: "InternalError",
        501: "NotImplemented",
        503: "SlowDown",
    }

    def __init__(self, url: str, status: int) -> None:
        super().__init__(url, status, {"Content-Type": "application/xml"}, None)
        self._body = f"<Error><Code>{self._CODES[status]}</Code><Message>injected {status}</Message></Error>".encode()

    @property
    def content(self):
        async def get() -> bytes:
            return self._body

        return get()
