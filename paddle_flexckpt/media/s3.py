"""S3 and stores that speak like it: conditional writes, and uploads in parts of which each can be sent again."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from paddle_flexckpt.media.medium import Listing, Medium, Upload
from paddle_flexckpt.media.retrying import status_of

logger = logging.getLogger("paddle_flexckpt")

# S3's limits.
LEAST_PART_BYTES = 5 << 20
MOST_PARTS = 10_000
# Parts that are under way at a time: one connection does not fill a line. Bounds memory to one part more.
PARTS_UNDER_WAY = 4


def s3_options(options: dict[str, Any]) -> dict[str, Any]:
    """s3fs's options, with its caches of listings and botocore's own retries off: both are this library's."""
    config = dict(options.get("config_kwargs") or {})
    config.setdefault("retries", {"total_max_attempts": 1})
    return {"use_listings_cache": False, **options, "config_kwargs": config}


class S3Upload(Upload):
    """An object that is sent in parts and appears when they are put together."""

    def __init__(self, medium: S3Medium, path: str, exclusive: bool) -> None:
        """Begins an upload."""
        self._s3 = medium
        self._path, self._exclusive = path, exclusive
        self._before = medium.etag(path)
        if exclusive and self._before is not None:
            raise FileExistsError(errno.EEXIST, "exists", medium.where(path))
        self._id = self._begin()
        self._parts: list[dict[str, Any]] = []
        self._size = 0
        self._sent = 0
        self._pool = ThreadPoolExecutor(PARTS_UNDER_WAY, thread_name_prefix="flexckpt-s3")
        self._under_way: deque[Future[dict[str, Any]]] = deque()

    def _begin(self) -> str:
        """Asks for an upload, and gives up those of which it got no answer."""
        answers: list[str] = []
        tries = 0

        def ask() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            return self._s3.request("create_multipart_upload", self._path)

        try:
            answers.append(self._s3.retrier(self._s3.where(self._path), ask)["UploadId"])
        finally:
            if tries > len(answers):
                self._s3.abandon_all(self._path, but=answers)
        return answers[0]

    def part(self, data: bytearray) -> None:
        """As in the base class; waits while enough parts are under way."""
        self._sent += 1
        if self._sent > MOST_PARTS:
            raise OSError(
                errno.EFBIG,
                f"S3 takes {MOST_PARTS} parts, here of {self._size // MOST_PARTS} bytes each. Remedy: "
                "open_storage(url, part_bytes=...) with a larger number",
                self._s3.where(self._path),
            )
        while len(self._under_way) >= PARTS_UNDER_WAY:
            self._collect()
        self._under_way.append(self._pool.submit(self._send, self._sent, data))
        self._size += len(data)

    def _send(self, number: int, data: bytearray) -> dict[str, Any]:
        answer = self._s3.call("upload_part", self._path, UploadId=self._id, PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _collect(self) -> None:
        self._parts.append(self._under_way.popleft().result())

    def finish(self) -> None:
        """As in the base class."""
        while self._under_way:
            self._collect()
        self._pool.shutdown()
        self._s3.conditional(
            self._exclusive,
            "complete_multipart_upload",
            self._path,
            UploadId=self._id,
            MultipartUpload={"Parts": self._parts},
            again=self._is_done,
        )

    def _is_done(self, error: Exception) -> dict[str, Any] | None:
        """An earlier try may have put the parts together: then the upload is gone, and an object of its size new."""
        etag = self._s3.etag(self._path)
        if etag is None or etag == self._before or self._s3.size(self._path) != self._size:
            return None
        return {"ETag": etag}

    def abort(self) -> None:
        """As in the base class: nothing is left of the upload."""
        for future in self._under_way:
            future.cancel()
        # A part that arrives after the end of its upload would stay, and be paid for.
        self._pool.shutdown(wait=True)
        with contextlib.suppress(OSError):
            self._s3.abandon(self._path, self._id)


class S3Medium(Medium):
    """The objects of an S3 store."""

    def __init__(self, *arguments: Any) -> None:
        """As in the base class."""
        super().__init__(*arguments)
        # Retries are this library's: those inside s3fs would multiply with them.
        self.file_system.retries = 1
        self._takes_conditions: bool | None = None

    @property
    def exclusive(self) -> bool:
        """As in the base class; some stores take conditions and do not keep them."""
        if self._takes_conditions is None:
            model = self.file_system.s3.meta.service_model.operation_model("PutObject")
            self._takes_conditions = "IfNoneMatch" in model.input_shape.members
        return self._takes_conditions

    def request(self, operation: str, path: str, **parameters: Any) -> dict[str, Any]:
        """One try of a request about an object, by botocore's name of it; errors are s3fs's."""
        bucket, key = self._address(path)
        answer: dict[str, Any] = self.file_system.call_s3(operation, Bucket=bucket, Key=key, **parameters)
        return answer

    def call(self, operation: str, path: str, *, again: Any = None, **parameters: Any) -> dict[str, Any]:
        """The same with retries.

        Raises:
            OSError: As :class:`Retrier` does.
        """
        return self.retrier(self.where(path), self.request, operation, path, again=again, **parameters)

    def conditional(self, exclusive: bool, operation: str, path: str, **parameters: Any) -> None:
        """The same; with ``exclusive`` it fails if there is an object, unless the store knows no conditions.

        Raises:
            FileExistsError: There is one.
        """
        if exclusive and self.exclusive:
            try:
                self.call(operation, path, IfNoneMatch="*", **parameters)
                return
            except OSError as error:
                if error.errno != errno.ENOSYS and status_of(error) != 501:
                    raise
                self._takes_conditions = False
        if exclusive and self.exists(path):
            raise FileExistsError(errno.EEXIST, "exists", self.where(path))
        self.call(operation, path, **parameters)

    def _address(self, path: str) -> tuple[str, str]:
        bucket, key = self.file_system.split_path(path)[:2]
        return bucket, key

    def entries(self, path: str) -> Listing:
        """As in the base class."""
        bucket, key = self._address(path)
        start = f"{key}/" if key else ""
        found = Listing([], [])
        more: dict[str, Any] = {}
        while True:
            page = self.retrier(
                self.where(path),
                self.file_system.call_s3,
                "list_objects_v2",
                Bucket=bucket,
                Prefix=start,
                Delimiter="/",
                **more,
            )
            found.directories.extend(each["Prefix"][len(start) : -1] for each in page.get("CommonPrefixes", ()))
            # A console's marker of a directory has no name of its own.
            found.files.extend(each["Key"][len(start) :] for each in page.get("Contents", ()) if each["Key"] != start)
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def info(self, path: str) -> dict[str, Any]:
        """As in the base class; for objects alone, as there are no directories."""
        answer = self.call("head_object", path)
        return {"type": "file", "size": answer["ContentLength"], "etag": answer.get("ETag")}

    def etag(self, path: str) -> str | None:
        """What tells an object from its predecessors; None if there is none."""
        try:
            return str(self.info(path)["etag"])
        except FileNotFoundError:
            return None

    def head(self, path: str, length: int) -> tuple[int, bytes]:
        """As in the base class, in one request."""
        try:
            answer, data = self._get(path, Range=f"bytes=0-{length - 1}")
        except OSError as error:
            if status_of(error) != 416:
                raise
            # An object without bytes has no range either.
            return self.size(path), b""
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return (int(total) if total.isdigit() else self.size(path)), data

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """As in the base class, in one request."""
        if end is None and not begin:
            return self._get(path)[1]
        return self._get(path, Range=f"bytes={begin}-{'' if end is None else end - 1}")[1]

    def _get(self, path: str, **parameters: Any) -> tuple[dict[str, Any], bytes]:
        from fsspec.asyn import sync

        bucket, key = self._address(path)

        def get() -> tuple[dict[str, Any], bytes]:
            answer = self.file_system.call_s3("get_object", Bucket=bucket, Key=key, **parameters)
            body = answer["Body"]
            try:
                data = sync(self.file_system.loop, body.read)
            finally:
                body.close()
            if len(data) != answer["ContentLength"]:
                raise ConnectionError(f"{len(data)} of {answer['ContentLength']} bytes arrived")
            return answer, data

        return self.retrier(self.where(path), get)

    def put(self, path: str, data: bytes | bytearray, exclusive: bool = False) -> None:
        """As in the base class."""

        def is_ours(error: Exception) -> dict[str, Any] | None:
            """An earlier try may have created the object that is in the way now."""
            return {} if exclusive and status_of(error) == 412 and self.read(path) == data else None

        self.conditional(exclusive, "put_object", path, Body=data, again=is_ours)

    def upload(self, path: str, part_bytes: int, exclusive: bool) -> Upload:
        """As in the base class."""
        return S3Upload(self, path, exclusive)

    def remove(self, path: str) -> None:
        """As in the base class."""
        self.call("delete_object", path)

    def unfinished(self, path: str) -> list[tuple[str, str]]:
        """As in the base class."""
        bucket, key = self._address(path)
        found = self._uploads(path, bucket, f"{key}/" if key else "")
        return [(name, upload) for name, upload in found if "/" not in name]

    def _uploads(self, path: str, bucket: str, key: str) -> list[tuple[str, str]]:
        """Uploads to keys that begin like one: the rest of the key, and the id."""
        found: list[tuple[str, str]] = []
        more: dict[str, Any] = {}
        while True:
            page = self.retrier(
                self.where(path),
                self.file_system.call_s3,
                "list_multipart_uploads",
                Bucket=bucket,
                Prefix=key,
                **more,
            )
            found.extend((each["Key"][len(key) :], each["UploadId"]) for each in page.get("Uploads", ()))
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abandon(self, path: str, upload: str) -> None:
        """As in the base class."""
        with contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", path, UploadId=upload)

    def abandon_all(self, path: str, but: Collection[str]) -> None:
        """Gives up all uploads to a path but some, as far as the store lets us: only its bill depends on it."""
        try:
            for rest, upload in self._uploads(path, *self._address(path)):
                if not rest and upload not in but:
                    self.abandon(path, upload)
        except OSError as error:
            logger.warning(f"an upload may have been left behind: {error}")

    def make_directory(self, path: str) -> None:
        """Nothing: a key needs no directory."""

    def remove_directory(self, path: str) -> None:
        """Nothing: a directory goes with its last object."""
