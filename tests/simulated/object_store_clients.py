"""The file systems of fsspec by which the library reaches a simulated object store, with the errors of real ones.

``s3://`` stands for s3fs: the operations of botocore that ``media/s3.py`` asks for, and the errors of both. The others
are file systems of fsspec's own interface. ``gs://`` creates objects on condition, ``oss://`` knows no conditions, and
``sftp://`` has files that grow and are renamed.

Tested in tests/simulation/test_object_store.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import fsspec.asyn
from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError, ResponseStreamingError
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from s3fs.errors import translate_boto_error

from paddle_flexckpt.undo import Undo
from tests.simulated.object_store import ObjectStore, ServerError, Stored, Unanswered

_ENDPOINT = "https://store.simulated"
# What stands for the event loop that s3fs has in a thread of its own.
_LOOP = object()


class _Body:
    """Hold the body of an answer: its bytes have arrived, or half of them."""

    def __init__(self, data: bytes, is_cut: bool) -> None:
        self._data, self._is_cut = data, is_cut

    async def read(self) -> bytes:
        if self._is_cut:
            raise ResponseStreamingError(error="the connection was closed in the middle of the body (simulated)")
        return self._data

    def close(self) -> None:
        pass


class S3(AbstractFileSystem):
    """Take the place of s3fs."""

    protocol = ("s3", "s3a")
    cachable = False
    async_impl = True
    store: ObjectStore
    loop = _LOOP
    retries = 5

    @property
    def s3(self) -> Any:
        """Return what tells which parameters the client knows."""
        known = {"Body"} if self.store.conduct.conditions == "unknown" else {"Body", "IfNoneMatch", "IfMatch"}
        shape = SimpleNamespace(input_shape=SimpleNamespace(members=known))
        model = SimpleNamespace(operation_model=lambda operation: shape)
        return SimpleNamespace(meta=SimpleNamespace(service_model=model))

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = self._strip_protocol(path).partition("/")
        return bucket, key, None

    def call_s3(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make one request, by botocore's name of its operation."""
        try:
            answer: dict[str, Any] = getattr(self, f"_{operation}")(**parameters)
            return answer
        except ServerError as error:
            answer = {
                "Error": {"Code": error.code, "Message": str(error)},
                "ResponseMetadata": {"HTTPStatusCode": error.status},
            }
            # Its cause is the ClientError, which the library asks for the status.
            raise translate_boto_error(ClientError(answer, operation))  # noqa: B904
        except Unanswered as error:
            if error.kind == "timeout":
                raise ReadTimeoutError(endpoint_url=_ENDPOINT) from None
            raise ConnectionClosedError(endpoint_url=_ENDPOINT) from None

    def _put_object(
        self, Bucket: str, Key: str, Body: Any, IfNoneMatch: str | None = None, IfMatch: str | None = None
    ) -> dict[str, Any]:
        key, data = f"{Bucket}/{Key}", bytes(Body)

        def put() -> Stored:
            return self.store.put(key, data, IfNoneMatch == "*", tag=IfMatch)

        return {"ETag": self.store.request("put", key, put, len(data)).tag}

    def _get_object(self, Bucket: str, Key: str, Range: str = "") -> dict[str, Any]:
        key = f"{Bucket}/{Key}"

        def get() -> tuple[bytes, str, int]:
            stored = self.store.get(key)
            if not Range:
                return stored.data, stored.tag, len(stored.data)
            first, _, last = Range.partition("=")[2].partition("-")
            if int(first) >= len(stored.data):
                raise ServerError(416, "InvalidRange")
            part = stored.data[int(first) : int(last) + 1 if last else None]
            return part, stored.tag, len(stored.data)

        is_cut = False
        try:
            data, tag, total = self.store.request("get", key, get, size=lambda found: len(found[0]))
        except Unanswered as error:
            if error.kind != "cut":
                raise
            data, tag, total, is_cut = b"", "", 0, True
        answer = {"Body": _Body(data, is_cut), "ContentLength": len(data), "ETag": tag}
        if Range:
            begin = int(Range.partition("=")[2].partition("-")[0])
            answer["ContentRange"] = f"bytes {begin}-{begin + len(data) - 1}/{total}"
        return answer

    def _head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        key = f"{Bucket}/{Key}"
        stored = self.store.request("head", key, lambda: self.store.get(key))
        return {"ContentLength": len(stored.data), "ETag": stored.tag}

    def _delete_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        key = f"{Bucket}/{Key}"
        self.store.request("delete", key, lambda: self.store.delete(key))
        return {}

    def _list_objects_v2(
        self, Bucket: str, Prefix: str, Delimiter: str = "", ContinuationToken: str = ""
    ) -> dict[str, Any]:
        start, cut = f"{Bucket}/{Prefix}", len(Bucket) + 1
        page = self.store.request("list", start, lambda: self.store.list_page(start, Delimiter, ContinuationToken))
        return {
            "Contents": [{"Key": key[cut:], "Size": size} for key, size in page.objects],
            "CommonPrefixes": [{"Prefix": folder[cut:]} for folder in page.folders],
            "IsTruncated": page.is_cut,
            "NextContinuationToken": page.last,
        }

    def _create_multipart_upload(self, Bucket: str, Key: str) -> dict[str, Any]:
        key = f"{Bucket}/{Key}"
        return {"UploadId": self.store.request("begin upload", key, lambda: self.store.begin_upload(key))}

    def _upload_part(self, Bucket: str, Key: str, UploadId: str, PartNumber: int, Body: Any) -> dict[str, Any]:
        data = bytes(Body)

        def put() -> str:
            return self.store.put_part(UploadId, PartNumber, data)

        return {"ETag": self.store.request("part", f"{Bucket}/{Key}", put, len(data))}

    def _complete_multipart_upload(
        self, Bucket: str, Key: str, UploadId: str, MultipartUpload: dict[str, Any], IfNoneMatch: str | None = None
    ) -> dict[str, Any]:
        numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]

        def complete() -> str:
            return self.store.complete_upload(UploadId, numbers, IfNoneMatch == "*").tag

        return {"ETag": self.store.request("end upload", f"{Bucket}/{Key}", complete)}

    def _abort_multipart_upload(self, Bucket: str, Key: str, UploadId: str) -> dict[str, Any]:
        self.store.request("abort upload", f"{Bucket}/{Key}", lambda: self.store.abort_upload(UploadId))
        return {}

    def _list_multipart_uploads(self, Bucket: str, Prefix: str = "") -> dict[str, Any]:
        start, cut = f"{Bucket}/{Prefix}", len(Bucket) + 1
        found = self.store.request("list uploads", start, lambda: self.store.list_uploads(start))
        return {"Uploads": [{"Key": key[cut:], "UploadId": name} for key, name in found], "IsTruncated": False}


class HttpError(OSError):
    """Signal the answer of a server that has no exception of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Plain(AbstractFileSystem):
    """Imitate a file system of fsspec's interface: an object store whose objects appear whole."""

    protocol: Any = ("oss",)
    cachable = False
    store: ObjectStore

    def ask(self, operation: str, path: str, action: Callable[[], Any], sent: int = 0, size: Any = lambda _: 0) -> Any:
        """Make one request, with the errors that such file systems raise."""
        try:
            return self.store.request(operation, path, action, sent, size)
        except ServerError as error:
            _raise_plain(error, path)
        except Unanswered as error:
            if error.kind == "timeout":
                raise TimeoutError(f"{path}: no answer (simulated)") from None
            raise ConnectionResetError(f"{path}: the connection was reset (simulated)") from None

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self.ask("list", path, partial(self.store.list_page, f"{path}/", "/", after))
            entries += [{"name": name, "size": size, "type": "file"} for name, size in page.objects]
            entries += [{"name": name.rstrip("/"), "size": 0, "type": "directory"} for name in page.folders]
            after = page.last
            if not page.is_cut:
                break
        if not entries:
            raise FileNotFoundError(path)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)

        def describe() -> dict[str, Any]:
            try:
                return {"name": path, "size": len(self.store.get(path).data), "type": "file"}
            except ServerError:
                page = self.store.list_page(f"{path}/", "/")
                if not page.objects and not page.folders:
                    raise
                return {"name": path, "size": 0, "type": "directory"}

        answer: dict[str, Any] = self.ask("head", path, describe)
        return answer

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        data: bytes = self.ask("get", path, lambda: self.store.get(path).data[start:end], size=len)
        return data

    def pipe_file(self, path: str, value: Any, **_: Any) -> None:
        self.put(path, bytes(value), False)

    def put(self, path: str, data: bytes, new: bool) -> None:
        path = self._strip_protocol(path)
        self.ask("put", path, lambda: self.store.put(path, data, new), len(data))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if not self.ask("delete", path, lambda: self.store.delete(path)):
            raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> PlainFile:
        return PlainFile(self, self._strip_protocol(path), mode, block_size or "default", **options)


class Conditional(Plain):
    """Imitate one that creates objects on condition, and works for several threads at a time."""

    protocol = ("gs", "gcs")
    async_impl = True

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        self.put(path, bytes(value), mode == "create")


class Renaming(Plain):
    """Imitate one whose files are seen to grow, and are renamed at once."""

    protocol = ("sftp", "ssh")

    def pipe_file(self, path: str, value: Any, **_: Any) -> None:
        data = bytes(value)
        self.put(path, b"", False)
        self.put(path, data, False)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self.ask("rename", target, lambda: self.store.rename(source, target))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.ask("make directory", path, lambda: None)

    def rmdir(self, path: str) -> None:
        self.ask("remove directory", path, lambda: None)


class PlainFile(AbstractBufferedFile):
    """Imitate a file that is sent in parts."""

    fs: Plain
    _upload = ""
    _count = 0

    def _initiate_upload(self) -> None:
        self._upload = self.fs.ask("begin upload", self.path, lambda: self.fs.store.begin_upload(self.path))

    def _upload_chunk(self, final: bool = False) -> bool:
        data, store = self.buffer.getvalue(), self.fs.store
        self._count += 1
        number = self._count

        def send() -> None:
            store.put_part(self._upload, number, data)
            if isinstance(self.fs, Renaming):
                store.put(self.path, b"".join(part for _, part in sorted(store.uploads[self._upload][1].items())))
            if final:
                store.complete_upload(self._upload, list(range(1, number + 1)))

        self.fs.ask("part", self.path, send, len(data))
        return True

    def discard(self) -> None:
        if self._upload:
            self.fs.ask("abort upload", self.path, lambda: self.fs.store.abort_upload(self._upload))

    def __del__(self) -> None:
        """Send nothing: fsspec's would finish the file, also for a process that is dead."""


def _raise_plain(error: ServerError, path: str) -> NoReturn:
    kinds: dict[int, type[OSError]] = {404: FileNotFoundError, 403: PermissionError, 412: FileExistsError}
    if error.status in kinds:
        raise kinds[error.status](f"{path}: {error}") from None
    raise HttpError(error.status, f"{path}: {error}") from None


_KINDS = (S3, Plain, Conditional, Renaming)


def install(store: ObjectStore, undo: Undo) -> None:
    """Let the library reach a store by the URLs of all protocols that are here, until it is taken back."""
    before = dict(_registry)

    def put_back() -> None:
        _registry.clear()
        _registry.update(before)

    undo.call(put_back)
    for kind in _KINDS:
        undo.set(kind, "store", store)
        _registry.update(dict.fromkeys(kind.protocol, kind))
    real = fsspec.asyn.sync

    def sync(loop: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a coroutine that waits for nothing but simulated requests."""
        if loop is not _LOOP:
            return real(loop, function, *arguments, **keywords)
        coroutine = function(*arguments, **keywords)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise asyncio.InvalidStateError("a simulated request waits for an event loop")

    undo.set(fsspec.asyn, "sync", sync)
