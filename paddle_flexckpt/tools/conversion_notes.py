"""Notes of a conversion: its finished files, in a hidden directory of its destination, until it ends.

The directory's name has a digest of the conversion, so that only the same conversion goes on with it.
Tested in tests/tools/test_conversion.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import not_empty
from paddle_flexckpt.media.backend import Backend, write_file
from paddle_flexckpt.media.removals import leads_elsewhere

_FOLDER = re.compile(r"\.convert-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{32}\.tmp")
# The files that the conversion may have written: a restart removes these alone.
_PLAN = "plan.json"
_RECORD = ".done"


class ConversionNotes:
    """The notes of one conversion. The caller holds the lock of the destination."""

    def __init__(self, sink: Backend, digest: str) -> None:
        """Touch nothing yet; ``digest``: 32 hexadecimal digits, which identify the conversion into the ``sink``."""
        self._sink, self._name = sink, f".convert-{digest}"
        self._folder = sink.child(self._name)

    def begin(self, names: Iterable[str], restart: bool) -> None:
        """Begin a conversion that may write these files, or go on with it; ``restart``: remove what is written first.

        Raises:
            ValidationError: The destination is in use, or has another, unfinished conversion.
        """
        sink = self._sink
        found = [name for name in sink.names("directories") if _FOLDER.fullmatch(name)]
        if any([leads_elsewhere(sink.child(name)) for name in found]):
            raise not_empty(sink, "destination")
        if restart:
            for name in found:
                self._undo(name)
        elif set(found) - {self._name}:
            raise ValidationError(
                f"{sink.path} has the begun conversion of another checkpoint, of one that has changed since, or with "
                "other options. Remedy (FC405): repeat the command that began it; or begin anew with --restart "
                "(restart=True), which removes what has been written; or give another destination"
            )
        elif found:
            self._remove_temporaries(sink, [*names])
            self._remove_temporaries(self._folder)
        if self._name not in sink.names("directories"):
            others = [*sink.names(), *sink.names("directories")]
            if others:
                raise not_empty(sink, "destination")
            self._folder.make_directory()
        self._write(_PLAN, json.dumps(sorted(names)).encode())

    def _undo(self, name: str) -> None:
        """Remove the files that a conversion wrote, and its notes."""
        folder = self._sink.child(name)
        files: list[str] = json.loads(folder.read(_PLAN)) if _PLAN in folder.names() else []
        for file in files:
            self._sink.remove(file)
        self._remove_temporaries(self._sink, files)
        self._sink.sync()
        self._clear(folder)

    @staticmethod
    def _remove_temporaries(backend: Backend, names: Iterable[str] | None = None) -> None:
        """Remove temporary files, for these names (None: any), of a process that died."""
        known = None if names is None else set(names)
        for name in backend.names():
            match = _TEMPORARY.fullmatch(name)
            if match and (known is None or match[1] in known):
                backend.remove(name)

    def _write(self, name: str, data: bytes) -> None:
        write_file(self._folder, name, data, "replace")
        self._folder.sync()

    def read(self, file: str) -> bytes | None:
        """Return the record of a file; None if it is not done."""
        try:
            return self._folder.read(f"{file}{_RECORD}")
        except FileNotFoundError:
            return None

    def note(self, file: str, record: bytes) -> None:
        """Note a file as done, after making its name durable."""
        self._sink.sync()
        self._write(f"{file}{_RECORD}", record)

    def end(self) -> None:
        """Remove the notes, after the commit."""
        self._clear(self._folder)

    def _clear(self, folder: Backend) -> None:
        # The plan last: with it the next process recognizes the directory.
        for name in sorted(folder.names(), key=lambda name: name == _PLAN):
            folder.remove(name)
        folder.remove_directory()
        self._sink.sync()
