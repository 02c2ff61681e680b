"""S3 and compatible stores: conditional writes, and uploads in chunks each of which can be repeated."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from paddle_flexckpt.media.medium import Listing, Medium, Upload
from paddle_flexckpt.media.retrying import is_unanswered, status_of

logger = logging.getLogger("paddle_flexckpt")

# S3's limits.
LEAST_PART_BYTES = 5 << 20
MOST_PARTS = 10_000
# The most tries of a commit where the object is another one each time.
_TRIES = 5
# Connections that are cached; botocore's own bound is less than the requests that may be under way.
CONNECTIONS = 64


class S3Upload(Upload):
    """An object that is sent in chunks, which S3 calls parts. It appears when they are put together."""

    def __init__(self, medium: S3Medium, name: str, exclusive: bool) -> None:
        """Begin an upload."""
        self._s3, self._name, self._exclusive = medium, name, exclusive
        self._parts: list[dict[str, Any]] = []
        self._size = self._sent = 0
        self._pool = ThreadPoolExecutor(medium.budget.requests, thread_name_prefix="flexckpt-s3")
        self._stop = threading.Event()
        # The oldest first.
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._lengths: deque[int] = deque()
        before = self._pool.submit(medium.etag, name)
        if medium.budget.requests < 2:
            wait([before])
        try:
            self._id = self._begin()
        except BaseException:
            self._pool.shutdown()
            raise
        try:
            self._before = before.result()
            if exclusive and self._before is not None:
                raise FileExistsError(errno.EEXIST, "exists", medium.where(name))
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> str:
        """Request an upload, and abort those whose answer was lost."""
        answers: list[str] = []
        tries = 0

        def request() -> str:
            nonlocal tries
            tries += 1
            return str(self._s3.request("create_multipart_upload", self._name)["UploadId"])

        try:
            answers.append(self._s3.ask(self._name, request))
        finally:
            if tries > len(answers):
                self._abandon_others(answers)
        return answers[0]

    def _abandon_others(self, own: list[str]) -> None:
        """Abort other uploads to this name, as far as the store allows it: only its bill depends on it."""
        try:
            for name, upload in self._s3.unfinished(self._name):
                if name == self._name and upload not in own:
                    self._s3.abandon(name, upload)
        except OSError as error:
            logger.warning(f"an upload may have been left behind: {error}")

    def send(self, chunk: bytearray) -> None:
        """Send a chunk; wait while enough others are under way."""
        self._sent += 1
        if self._sent > MOST_PARTS:
            raise OSError(
                errno.EFBIG,
                f"S3 takes {MOST_PARTS} parts, here of {self._size // MOST_PARTS} bytes each. Remedy (FC406): "
                "open_storage(url, part_bytes=...) with a larger number",
                self._s3.where(self._name),
            )
        budget = self._s3.budget
        while self._under_way and (
            len(self._under_way) >= budget.requests or sum(self._lengths) + len(chunk) > budget.bytes
        ):
            self._collect()
        self._under_way.append(self._pool.submit(self._send, self._sent, chunk))
        self._lengths.append(len(chunk))
        self._size += len(chunk)

    def _send(self, number: int, data: bytearray) -> dict[str, Any]:
        parameters: dict[str, Any] = {"UploadId": self._id, "PartNumber": number, "Body": data}
        answer = self._s3.call("upload_part", self._name, stop=self._stop, **parameters)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _collect(self) -> None:
        self._parts.append(self._under_way.popleft().result())
        self._lengths.popleft()

    def finish(self) -> None:
        """Put the parts together; the object exists, whole, when this returns."""
        while self._under_way:
            self._collect()
        self._pool.shutdown()
        parts: dict[str, Any] = {"UploadId": self._id, "MultipartUpload": {"Parts": self._parts}}
        self._s3.conditional(self._exclusive, "complete_multipart_upload", self._name, recover=self._is_done, **parts)

    def _is_done(self, error: Exception) -> dict[str, Any] | None:
        """Return the object's tag if an earlier try has joined the parts, so that there is a new object of its size."""
        etag = self._s3.etag(self._name)
        if etag is None or etag == self._before or self._s3.size(self._name) != self._size:
            return None
        return {"ETag": etag}

    def abort(self) -> None:
        """Remove the upload and its parts."""
        self._stop.set()
        for future in self._under_way:
            future.cancel()
        # A part that arrives after the end of its upload would stay, and cost money.
        self._pool.shutdown(wait=True)
        with contextlib.suppress(OSError):
            self._s3.abandon(self._name, self._id)


class S3Medium(Medium):
    """The objects of one directory of an S3 store."""

    takes_password = False

    @classmethod
    def options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Turn off s3fs's caches of listings and botocore's own retries, which this library replaces.

        Allow the connections of a budget.
        """
        config = dict(options.get("config_kwargs") or {})
        config.setdefault("max_pool_connections", CONNECTIONS)
        config.setdefault("retries", {"total_max_attempts": 1})
        return {"use_listings_cache": False, **options, "config_kwargs": config}

    def __init__(self, *arguments: Any) -> None:
        """Wrap s3fs."""
        super().__init__(*arguments)
        # Retries are this library's: those inside s3fs would multiply with them.
        self.file_system.retries = 1
        self._bucket, key = self.file_system.split_path(self._root)[:2]
        self._start = f"{key}/" if key else ""
        self._conditions: frozenset[str] | None = None

    @property
    def exclusive(self) -> bool:
        """Return whether the store enforces conditions; some accept and ignore them."""
        return self._takes("IfNoneMatch")

    def _takes(self, condition: str) -> bool:
        """Return whether the client knows a condition, and the store has not refused one."""
        if self._conditions is None:
            model = self.file_system.s3.meta.service_model.operation_model("PutObject")
            self._conditions = frozenset({"IfNoneMatch", "IfMatch"} & set(model.input_shape.members))
        return condition in self._conditions

    def request(self, operation: str, name: str, **parameters: Any) -> dict[str, Any]:
        """Make one try of a request about an object, by botocore's name of it; errors are s3fs's."""
        bucket, key = self.file_system.split_path(self.path(name))[:2]
        answer: dict[str, Any] = self.file_system.call_s3(operation, Bucket=bucket, Key=key, **parameters)
        return answer

    def call(
        self, operation: str, name: str, before: Callable[[], None] = lambda: None, **parameters: Any
    ) -> dict[str, Any]:
        """Make the same request, with retries; errors as of :meth:`ask`.

        ``before`` is called before each try; what it raises ends them.
        """

        def send(**parameters: Any) -> dict[str, Any]:
            before()
            return self.request(operation, name, **parameters)

        answer: dict[str, Any] = self.ask(name, send, **parameters)
        return answer

    def conditional(self, exclusive: bool, operation: str, name: str, **parameters: Any) -> None:
        """Make a request that, if ``exclusive``, fails if there is an object, unless the store knows no conditions.

        Raises:
            FileExistsError: There is one.
        """
        if exclusive and self.exclusive and self._tried(operation, name, IfNoneMatch="*", **parameters):
            return
        if exclusive:
            self.check_new(name)
        self.call(operation, name, **parameters)

    def _tried(self, operation: str, name: str, **parameters: Any) -> bool:
        """Make a request with a condition; return whether the store knows it, and use none any more if it does not."""
        try:
            self.call(operation, name, **parameters)
        except OSError as error:
            if error.errno != errno.ENOSYS and status_of(error) != 501:
                raise
            self._conditions = frozenset()
            return False
        return True

    def _pages(self, operation: str, following: dict[str, str], **parameters: Any) -> Iterator[dict[str, Any]]:
        """List something of the bucket page by page; ``following`` returns the arguments for the next page."""
        more: dict[str, Any] = {}
        while True:
            page = self.ask("", self.file_system.call_s3, operation, Bucket=self._bucket, **parameters, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {parameter: page[field] for parameter, field in following.items()}

    def entries(self) -> Listing:
        """List the objects of the directory, and the directories that other objects are in."""
        start, found = self._start, Listing([], [])
        following = {"ContinuationToken": "NextContinuationToken"}
        for page in self._pages("list_objects_v2", following, Prefix=start, Delimiter="/"):
            found.directories.extend(each["Prefix"][len(start) : -1] for each in page.get("CommonPrefixes", ()))
            # A console's marker of the directory has an empty name.
            found.files.extend(each["Key"][len(start) :] for each in page.get("Contents", ()) if each["Key"] != start)
        return found

    def unfinished(self, start: str = "") -> list[tuple[str, str]]:
        """Implement the base class."""
        found: list[tuple[str, str]] = []
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", following, Prefix=self._start + start):
            found += [(each["Key"][len(self._start) :], each["UploadId"]) for each in page.get("Uploads", ())]
        return [(name, upload) for name, upload in found if "/" not in name]

    def abandon(self, name: str, upload: str) -> None:
        """Implement the base class."""
        with contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", name, UploadId=upload)

    def info(self, name: str) -> dict[str, Any]:
        """Describe an object; there are no directories."""
        answer = self.call("head_object", name)
        return {"type": "file", "size": answer["ContentLength"], "etag": answer.get("ETag")}

    def etag(self, name: str) -> str | None:
        """Return the tag that differs between versions of an object; None if there is no object."""
        try:
            return str(self.info(name)["etag"])
        except FileNotFoundError:
            return None

    def head(self, name: str, length: int) -> tuple[int, bytes]:
        """Return size and first bytes in one request."""
        try:
            answer, data = self._get(name, Range=f"bytes=0-{length - 1}")
        except OSError as error:
            if status_of(error) != 416:
                raise
            # An object without bytes has no range either.
            return self.size(name), b""
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return (int(total) if total.isdigit() else self.size(name)), data

    def read(self, name: str, begin: int = 0, end: int | None = None, stop: threading.Event | None = None) -> bytes:
        """Return bytes in one request."""
        if end is None and not begin:
            return self._get(name, stop)[1]
        return self._get(name, stop, Range=f"bytes={begin}-{'' if end is None else end - 1}")[1]

    def _get(self, name: str, stop: threading.Event | None = None, **parameters: Any) -> tuple[dict[str, Any], bytes]:
        from fsspec.asyn import sync

        def get() -> tuple[dict[str, Any], bytes]:
            answer = self.request("get_object", name, **parameters)
            body = answer["Body"]
            try:
                data = sync(self.file_system.loop, body.read)
            finally:
                body.close()
            if len(data) != answer["ContentLength"]:
                raise ConnectionError(f"{len(data)} of {answer['ContentLength']} bytes arrived")
            return answer, data

        answer, data = self.ask(name, get, stop=stop)
        return answer, data

    def put(
        self, name: str, data: bytes | bytearray, exclusive: bool = False, before: Callable[[], None] = lambda: None
    ) -> None:
        """Write a whole object as the base class does."""
        self.conditional(exclusive, "put_object", name, before=before, recover=self._is_put(name, data), Body=data)

    def _is_put(self, name: str, data: bytes | bytearray) -> Callable[[Exception], dict[str, Any] | None]:
        """Return the check whether an earlier try has written the object that fails a condition."""
        return lambda error: {} if status_of(error) == 412 and self.read(name) == data else None

    def version_of(self, name: str) -> str:
        """Implement the base class."""
        return (self.etag(name) or "") if self._takes("IfMatch") else ""

    def publish(self, name: str, data: bytes | bytearray, replaced: str, before: Callable[[], None]) -> None:
        """Implement the base class."""
        if not self._takes("IfMatch"):
            super().publish(name, data, replaced, before)
            return
        parameters: dict[str, Any] = {"before": before, "recover": self._is_put(name, data), "Body": data}
        for left in reversed(range(_TRIES)):
            condition: dict[str, Any] = {"IfMatch": replaced} if replaced else {"IfNoneMatch": "*"}
            try:
                if not self._tried("put_object", name, **condition, **parameters):
                    break
                return
            except (FileExistsError, FileNotFoundError) as error:  # it is another one, or gone
                # An earlier try may have written it, and another save have replaced it since.
                if not left or is_unanswered(error):
                    raise
                now = self.version_of(name)
                if now == replaced and (now or self.exists(name)):
                    break  # a store that refuses all such conditions, or an object without a tag
                replaced = now
            except OSError as error:
                if not (replaced and status_of(error) == 400):
                    raise
                break  # a store that does not know such a condition; the next request shows any other error
        self.put(name, data, before=before)

    def upload(self, name: str, part_bytes: int, exclusive: bool) -> Upload:
        """Implement the base class."""
        return S3Upload(self, name, exclusive)

    def remove(self, name: str, before: Callable[[], None] = lambda: None) -> None:
        """Implement the base class."""
        self.call("delete_object", name, before=before)

    def make_directory(self) -> None:
        """Do nothing: a key needs no directory."""

    def remove_directory(self) -> None:
        """Do nothing: a directory goes with its last object."""
