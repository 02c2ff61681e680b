"""The files of one model in a directory, written by ranks together: at any place, or each its own from end to end.

Where ranks reach the directory by a path, a file has a temporary name until all of it is durable, and any rank of the
machine may write parts of it. On other media a file has one writer, and appears when all of it is written.

Tested in tests/loading/test_publishing.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.media.local import OutputParts
from paddle_flexckpt.tools.tensor_files import OutputDirectory, TensorFile

# The most files that a rank opens at a time to find one that no other rank writes to.
LOOKED_AT = 8


class ModelFiles:
    """One rank's parts of a model's files. A thread flushes a file, or writes received bytes, beside other writes.

    Attributes:
        names: All tensors, in the order in which they stand in the files.
        files: By tensor, the file that has it.
        is_shared: Whether several ranks write one file.
    """

    def __init__(
        self,
        output: OutputDirectory,
        files: Sequence[TensorFile],
        infos: Mapping[str, TensorInfo],
        token: str,
        is_shared: bool,
    ) -> None:
        """Touch nothing yet; ``token``, the same on all ranks and new for each call, marks unfinished files."""
        self._output, self._all, self._token, self.is_shared = output, files, token, is_shared
        self.names = [name for file in files for name in file.names]
        self.files = {name: file for file in files for name in file.names}
        self._begin: dict[str, int] = {}
        for file in files:
            end = len(file.header)
            for name in file.names:
                self._begin[name], end = end, end + infos[name].nbytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flexckpt")
        self._futures: list[Future[None]] = []
        self._open: dict[str, OutputParts] = {}

    def begin(self, own: Sequence[TensorFile], removes_all: bool) -> None:
        """Create the shared files that this rank owns; it removes all if the call fails, or these alone."""
        if not self.is_shared:
            return
        for file in self._all if removes_all else own:
            self._output.will_write(file.name, self._unfinished(file.name))
        for file in own:
            self._parts(file.name).write_at(file.header, 0)

    def writer(self, name: str) -> Callable[[memoryview, int], None]:
        """Return a function that writes bytes of a tensor, beginning at one of them; errors as of the backend.

        A file that is not shared is written in order, and appears with its last byte.
        """
        file, begin = self.files[name], self._begin[name]
        if self.is_shared:
            parts = self._parts(file.name)
            return lambda data, offset: parts.write_at(data, begin + offset)

        def append(data: memoryview, offset: int) -> None:
            self._output.open(file).write(data)
            if name == file.names[-1] and begin + offset + len(data) == file.nbytes:
                self._output.finish()

        return append

    def _unfinished(self, file: str) -> str:
        return f"{file}.{self._token}.tmp"

    def _parts(self, file: str) -> OutputParts:
        """Return a shared file to write parts to."""
        if file not in self._open:
            self._open[file] = OutputParts(self._output.backend.where(self._unfinished(file)))
        return self._open[file]

    @contextlib.contextmanager
    def turn(self, files: Iterable[str]) -> Iterator[str]:
        """Take a turn at writing to one of some shared files: the first that no other rank is writing to."""
        some = list(itertools.islice(files, LOOKED_AT))
        file = next((file for file in some if self._parts(file).take_turn(wait=False)), None)
        if file is None:
            file = some[0]
            self._parts(file).take_turn(wait=True)
        try:
            yield file
        finally:
            self._parts(file).end_turn()

    def flush(self) -> None:
        """Make durable what this rank has written to shared files."""
        for parts in self._open.values():
            parts.make_durable()

    def flush_meanwhile(self, file: str) -> None:
        """Have the thread make durable what this rank has written to a shared file, to which it writes nothing more."""
        if file in self._open:
            self.meanwhile(functools.partial(_flush, self._open.pop(file)))

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Do something in the thread, after the tasks that it was given before."""
        self._futures.append(self._thread.submit(work))

    def wait(self) -> None:
        """Wait until the thread has done all its tasks; raise what failed."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def make_durable(self) -> None:
        """Make durable what this rank has written; raise what failed in the thread, too."""
        self.wait()
        for file in [*self._open]:
            self.flush_meanwhile(file)
        self.wait()

    def path(self, file: str) -> str:
        """Return where a file is before the commit."""
        return self._output.backend.where(self._unfinished(file) if self.is_shared else file)

    def commit(self, index: str, contents: bytes) -> None:
        """Make all files appear, then their index, if they need one. One rank does this, when all data is durable."""
        backend = self._output.backend
        if self.is_shared:
            for file in self._all:
                os.rename(backend.where(self._unfinished(file.name)), backend.where(file.name))
        if not index:
            backend.sync()
            return
        try:
            self._output.publish(index, contents)
        except OSError:
            # Before the other ranks learn of it and remove the files that it names.
            backend.remove(index)
            raise

    def close(self) -> None:
        """End the thread, and close what is open."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for parts in self._open.values():
            parts.close()


def _flush(parts: OutputParts) -> None:
    with parts:
        parts.make_durable()
