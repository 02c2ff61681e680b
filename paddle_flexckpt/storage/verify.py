"""Verification: every byte of a checkpoint's data files against its manifest; all that is wrong, not the first only.

Each file is read once, block by block, in the order of its bytes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace

import numpy as np

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.storage.checksums import hash_block
from paddle_flexckpt.storage.header import DataFileHeader, read_header
from paddle_flexckpt.storage.manifest import Manifest

REMEDY = "restore the file from a copy, or load another checkpoint"


@dataclass
class Verification:
    """What was found.

    Attributes:
        problems: All of them, in the order of the files.
        bytes_read: Bytes read, headers included.
        bytes_verified: Bytes of tensors that have their checksum.
    """

    problems: list[Problem] = field(default_factory=list)
    bytes_read: int = 0
    bytes_verified: int = 0


def verify_files(directory: str, manifest: Manifest) -> Verification:
    """Reads all data files of a checkpoint once and compares them with its manifest.

    Compared are sizes, save tokens, headers (by their meaning: names, shapes, offsets, ids), the checksum of every
    block, and whether items follow each other without gaps. One block is in memory at a time.

    Args:
        directory: Where the files are.
        manifest: What they hold.
    """
    found = Verification()
    catalog = manifest.catalog
    # Rows in the order of files and bytes; the sort is stable, so empty items stay where they were written.
    order = np.lexsort((catalog.byte_offset, catalog.file))
    edges = np.searchsorted(catalog.file[order], np.arange(len(catalog.files) + 1))
    for file in range(len(catalog.files)):
        _FileVerifier(directory, manifest, file, order[edges[file] : edges[file + 1]], found).verify()
    return found


@dataclass
class _Stretch:
    """Blocks of one item that follow each other and have the same fault.

    Attributes:
        what: The fault.
        first: First byte, counted from the item's start.
        last: First byte beyond.
        expected: What the first block should be.
        got: What the first block is.
    """

    what: str
    first: int
    last: int
    expected: str | None
    got: str | None


class _FileVerifier:
    """Compares one data file with the manifest."""

    def __init__(self, directory: str, manifest: Manifest, file: int, rows: np.ndarray, found: Verification) -> None:
        self._manifest = manifest
        self._file = file
        self._rows = rows
        self._found = found
        self._path = os.path.join(directory, manifest.catalog.files[file])
        self._rank = int(manifest.catalog.rank[rows[0]]) if len(rows) else None

    def _problem(
        self,
        what: str,
        row: int | None = None,
        offset: int | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        catalog = self._manifest.catalog
        self._found.problems.append(
            Problem(
                what,
                key=None if row is None else catalog.key_name(row),
                rank=self._rank if row is None else int(catalog.rank[row]),
                file=self._path,
                expected=expected,
                got=got,
                remedy=REMEDY,
                offset=offset,
            )
        )

    def verify(self) -> None:
        """Finds all that is wrong with the file."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._problem("a file that the manifest names is missing", expected=f"{len(self._rows)} shards")
            return
        except OSError as error:
            self._problem("a file cannot be opened", got=error.strerror)
            return
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            size, expected = os.fstat(descriptor).st_size, int(self._manifest.file_bytes[self._file])
            if size != expected:
                what = "a file is shorter than it was" if size < expected else "a file is longer than it was"
                self._problem(what, offset=min(size, expected), expected=f"{expected} bytes", got=f"{size} bytes")
            self._check_layout(expected)
            foreign = self._check_header(descriptor)
            before = len(self._found.problems)
            verified = self._found.bytes_verified
            self._check_items(descriptor)
            if foreign and verified == self._found.bytes_verified:
                # Another save's file: that none of its blocks fits is one problem, which has been told.
                del self._found.problems[before:]

    def _check_layout(self, file_bytes: int) -> None:
        """Items have to follow each other, from the header to the end: other bytes have no checksum."""
        catalog = self._manifest.catalog
        lengths = catalog.byte_length[self._rows]
        begins = catalog.byte_offset[self._rows]
        ends = begins + lengths
        for i in np.flatnonzero(begins[1:] != ends[:-1]).tolist():
            what = "bytes between two shards that belong to none" if begins[i + 1] > ends[i] else "shards overlap"
            self._problem(what, int(self._rows[i + 1]), int(ends[i]), f"byte {ends[i]}", f"byte {begins[i + 1]}")
        if len(ends) and ends[-1] != file_bytes:
            self._problem(
                "the last shard does not end where its file ends",
                int(self._rows[-1]),
                int(ends[-1]),
                f"byte {file_bytes}",
                f"byte {ends[-1]}",
            )

    def _check_header(self, descriptor: int) -> bool:
        """Compares the header with the manifest; returns whether the file seems to be of another save."""
        manifest = self._manifest
        items = manifest.catalog.take(self._rows)
        begin = int(items.byte_offset.min(initial=manifest.file_bytes[self._file]))
        wanted = DataFileHeader.of_items(
            replace(items, byte_offset=items.byte_offset - begin),
            save_token=manifest.save_token,
            unique_id=manifest.unique_id,
            world_size=manifest.world_size,
            step=manifest.step,
        )
        expected = wanted.encode()
        try:
            data = read_header(descriptor)
            self._found.bytes_read += len(data)
            if data == expected and len(data) == begin:
                return False
            header = DataFileHeader.decode(data)
        except ValueError as error:
            # Its length may be what is damaged: compare where it should stand.
            data = os.pread(descriptor, len(expected), 0)
            self._problem("the header is damaged", offset=_first_difference(data, expected), got=str(error))
            return False
        except OSError as error:
            self._problem("the header cannot be read", offset=0, got=error.strerror)
            return False
        where = _first_difference(data, expected)
        if len(data) != begin:
            self._problem("the header has another length", None, 0, f"{begin} bytes", f"{len(data)} bytes")
        for name in sorted(wanted.info.keys() | header.info.keys()):
            if wanted.info.get(name) != header.info.get(name):
                what = f"the header has another {name}" + (": another save's file" if name == "save_token" else "")
                self._problem(what, None, where, wanted.info.get(name), header.info.get(name, "nothing"))
        rows = dict(zip(wanted.entries, self._rows.tolist()))
        for name in [*rows, *sorted((header.entries.keys() | header.shards.keys()) - rows.keys())]:
            for fields, theirs in ((wanted.entries, header.entries), (wanted.shards, header.shards)):
                if fields.get(name) != theirs.get(name):
                    what = f"the header describes {name!r} otherwise than the manifest"
                    self._problem(what, rows.get(name), where, fields.get(name, "nothing"), theirs.get(name, "nothing"))
        return header.info.get("save_token") != manifest.save_token

    def _check_items(self, descriptor: int) -> None:
        buffer = np.empty(self._manifest.checksums.block_bytes, dtype=np.uint8)
        lengths = self._manifest.catalog.byte_length[self._rows]
        for row, length in zip(self._rows.tolist(), lengths.tolist()):
            begin = int(self._manifest.catalog.byte_offset[row])
            for fault in self._faults(descriptor, row, begin, length, buffer):
                what = f"bytes {fault.first} to {fault.last} of the shard {fault.what}"
                self._problem(what, row, begin + fault.first, fault.expected, fault.got)

    def _faults(self, descriptor: int, row: int, begin: int, length: int, buffer: np.ndarray) -> list[_Stretch]:
        checksums = self._manifest.checksums
        faults: list[_Stretch] = []

        def note(what: str, first: int, last: int, expected: str | None = None, got: str | None = None) -> None:
            if faults and (faults[-1].what, faults[-1].last) == (what, first):
                faults[-1].last = last
            else:
                faults.append(_Stretch(what, first, last, expected, got))

        for block, first in enumerate(range(0, length, checksums.block_bytes)):
            last = min(first + checksums.block_bytes, length)
            view = buffer[: last - first]
            try:
                count = _fill(descriptor, begin + first, view)
            except OSError as error:
                note("cannot be read", first, last, got=error.strerror)
                continue
            self._found.bytes_read += count
            if count < len(view):
                note("are not there: the file ends before", first + count, length)
                break
            expected, got = checksums.of_block(row, block), hash_block(view)
            if expected == got:
                self._found.bytes_verified += len(view)
            else:
                note("are damaged", first, last, f"xxh3 {expected:016x}", f"xxh3 {got:016x}")
        return faults


def _fill(descriptor: int, offset: int, buffer: np.ndarray) -> int:
    """Reads into a buffer; returns how many bytes there were."""
    count = 0
    while count < len(buffer):
        got = os.preadv(descriptor, [memoryview(buffer)[count:]], offset + count)
        if got == 0:
            break
        count += got
    return count


def _first_difference(data: bytes, expected: bytes) -> int:
    """Index of the first byte that is not as expected."""
    length = min(len(data), len(expected))
    a, b = np.frombuffer(data, np.uint8, length), np.frombuffer(expected, np.uint8, length)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length
