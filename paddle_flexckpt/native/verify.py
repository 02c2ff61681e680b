"""Verify every byte of a checkpoint's data files against its manifest; find all problems, not only the first.

Each file is read once, block by block, in the order of its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.media.backend import InputFile, Location, fill
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.read_ahead import Wanted
from paddle_flexckpt.native.checksums import hash_block
from paddle_flexckpt.native.data_file import (
    TOKEN_WINDOW,
    DataFileHeader,
    encode_header,
    order_in_file,
    read_header_bytes,
)
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.replica_items import StoredReplicas, remedy_of_copies
from paddle_flexckpt.progress import SILENT, Meter

_MAX_NAMED = 3
_OTHER_TOKEN = "the header has another save_token: another save's file"
TOO_SHORT = "a file is shorter than it was"
FILE_ENDS = "are not there: the file ends before"
REMEDY = "restore the file from a copy, or load another checkpoint"


@dataclass
class Verification:
    """The result of a verification.

    Attributes:
        problems: All of them, in the order of the files.
        bytes_read: Bytes read, headers included.
        bytes_verified: Bytes of tensors that have their checksum.
        missing: Names of the files that are missing.
        tokens: Save tokens, by name, of files that seem to be of another save.
        lost_files: Files that a load refuses as a whole, by number.
        lost_blocks: By row, the item's blocks that differ from their checksums.
        recoverable: Whether a load can read everything nonetheless, from replicas.
    """

    problems: list[Problem] = field(default_factory=list)
    bytes_read: int = 0
    bytes_verified: int = 0
    missing: list[str] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    lost_files: set[int] = field(default_factory=set)
    lost_blocks: dict[int, set[int]] = field(default_factory=dict)
    recoverable: bool = True


def verify_files(
    directory: Location, manifest: Manifest, meter: Meter = SILENT, names: Collection[str] | None = None
) -> Verification:
    """Read data files of a checkpoint (None: all) once and compare them with its manifest.

    It compares sizes, save tokens, headers (with the bytes that follow from the manifest) and the checksum of every
    block, and checks that items follow each other without gaps. One block is in memory at a time. ``meter`` counts the
    bytes of tensors.
    """
    found = Verification()
    findings: list[_Finding] = []
    catalog = manifest.catalog
    # Rows in the order of files and bytes, empty ones before the one at their place.
    order = np.lexsort((catalog.byte_length, catalog.byte_offset, catalog.file))
    edges = np.searchsorted(catalog.file[order], np.arange(len(catalog.files) + 1))
    for file, name in enumerate(catalog.files):
        if names is not None and name not in names:
            continue
        rows = order[edges[file] : edges[file + 1]]
        findings += _FileVerifier(directory, manifest, file, rows, found, meter).verify()
        meter.add(0, items=1)
    replicas = StoredReplicas(manifest)
    for finding in findings:
        files: set[int] | None = set()
        for row in finding.rows:
            serving = _serving_files(manifest, found, replicas, row, finding.blocks)
            files = None if files is None or serving is None else files | serving
        found.recoverable = found.recoverable and files is not None
        problem = finding.problem
        if files:
            names = listed([catalog.files[file] for file in sorted(files)], _MAX_NAMED)
            remedy = f"{problem.remedy}; until then, a load reads the intact replica in {names}"
            code = problem.code
            problem = replace(problem, code=code, remedy=remedy)
        found.problems.append(problem)
    return found


def _serving_files(
    manifest: Manifest, found: Verification, replicas: StoredReplicas, row: int, blocks: range | None
) -> set[int] | None:
    """Return the files from which a load can read blocks of an item; None if it cannot. No blocks stand for all."""
    file_of = manifest.catalog.file
    others = [other for other in replicas.others(row) if int(file_of[other]) not in found.lost_files]
    for other in others:
        if other not in found.lost_blocks:
            return {int(file_of[other])}
    files = set()
    for block in range(len(manifest.checksums.of_item(row))) if blocks is None else blocks:
        other = next((other for other in others if block not in found.lost_blocks[other]), -1)
        if other < 0:
            return None
        files.add(int(file_of[other]))
    return files


class _Finding(NamedTuple):
    """A problem, the items that a load misses bytes of, and their blocks; no blocks stand for all."""

    problem: Problem
    rows: list[int]
    blocks: range | None


@dataclass
class _Stretch:
    """Blocks of one item with the same fault: its first byte, the first beyond, and what the first block is."""

    what: str
    first: int
    last: int
    expected: str | None
    got: str | None


class _FileVerifier:
    """A comparison of one data file with the manifest."""

    def __init__(
        self,
        directory: Location,
        manifest: Manifest,
        file: int,
        rows: np.ndarray,
        found: Verification,
        meter: Meter,
    ) -> None:
        self._manifest, self._meter = manifest, meter
        self._block_bytes = manifest.checksums.block_bytes
        self._file = file
        self._rows = rows
        self._found = found
        self._findings: list[_Finding] = []
        self._backend = open_backend(directory)
        self._name = manifest.catalog.files[file]
        self._path = self._backend.where(self._name)
        self._rank = int(manifest.catalog.rank[rows[0]]) if len(rows) else None

    def _problem(
        self,
        what: str,
        row: int | None = None,
        stretch: tuple[int | None, int | None] = (None, None),
        expected: object = None,
        got: object = None,
        blocks: range | None = None,
        code: str = "FC305",
    ) -> None:
        """Note a problem of the file or of an item: damaged bytes of the file, and blocks of the item."""
        catalog = self._manifest.catalog
        problem = Problem(
            what,
            key=None if row is None else catalog.key_name(row),
            rank=self._rank if row is None else int(catalog.rank[row]),
            file=self._path,
            expected=expected,
            got=got,
            code=code,
            remedy=remedy_of_copies(self._manifest, self._name) or REMEDY,
            offset=stretch[0],
            end=stretch[1],
        )
        self._findings.append(_Finding(problem, self._all_rows if row is None else [row], blocks))

    @cached_property
    def _all_rows(self) -> list[int]:
        return self._rows.tolist()  # type: ignore[no-any-return]

    def verify(self) -> list[_Finding]:
        """Find all problems of the file."""
        usable = self._verify()
        if not usable:
            # A load misses all bytes of the file.
            self._found.lost_files.add(self._file)
            return [each._replace(blocks=None) for each in self._findings]
        return [each if each.blocks is not None else each._replace(rows=[]) for each in self._findings]

    def _verify(self) -> bool:
        """Find all problems; return whether a load accepts the file as the one that was written."""
        try:
            opened = self._backend.open(self._name)
        except FileNotFoundError:
            nodes = self._manifest.nodes_of(self._name)
            got = f"nothing here; it was saved on node {' and '.join(nodes)}" if nodes else None
            what = "a file that the manifest names is missing"
            self._problem(what, None, expected=f"{len(self._rows)} shards", got=got, code="FC304")
            self._found.missing.append(self._name)
            return False
        except OSError as error:
            self._problem("a file cannot be opened", got=error.strerror)
            return False
        except CorruptCheckpointError as error:
            self._problem("what has the name of a file is not that file", got=str(error))
            return False
        with opened:
            opened.read_ahead([opened], Wanted(*np.array([[0], [0], [opened.size]])))
            size, expected = opened.size, int(self._manifest.file_bytes[self._file])
            if size != expected:
                what = TOO_SHORT if size < expected else "a file is longer than it was"
                stretch = (min(size, expected), max(size, expected))
                self._problem(what, None, stretch, f"{expected} bytes", f"{size} bytes")
            self._check_layout(expected)
            before = len(self._findings)
            other = self._check_header(opened)
            verified = self._found.bytes_verified
            self._check_items(opened)
            if other is not None and verified == self._found.bytes_verified:
                # Another step and blocks that all differ are one problem.
                del self._findings[before:]
                self._problem(_OTHER_TOKEN, None, (0, max(size, expected)), self._manifest.save_token, other)
                self._found.tokens[self._name] = other
            return size == expected and self._has_token(opened)

    def _has_token(self, file: InputFile) -> bool:
        try:
            return self._manifest.save_token.encode() in file.read(0, TOKEN_WINDOW)
        except OSError as error:
            if not self._findings:  # it could be read a moment ago
                self._problem("the header cannot be read", None, (0, TOKEN_WINDOW), None, error.strerror)
            return False

    def _check_layout(self, file_bytes: int) -> None:
        """Check that items follow each other, from the header to the end: other bytes have no checksum."""
        catalog = self._manifest.catalog
        lengths = catalog.byte_length[self._rows]
        begins = catalog.byte_offset[self._rows]
        ends = begins + lengths
        for i in np.flatnonzero(begins[1:] != ends[:-1]).tolist():
            what = "bytes between two shards that belong to none" if begins[i + 1] > ends[i] else "shards overlap"
            stretch = (int(ends[i]), max(int(begins[i + 1]), int(ends[i])))
            self._problem(what, int(self._rows[i + 1]), stretch, f"byte {ends[i]}", f"byte {begins[i + 1]}")
        if len(ends) and ends[-1] != file_bytes:
            self._problem(
                "the last shard does not end where its file ends",
                int(self._rows[-1]),
                (int(ends[-1]), max(file_bytes, int(ends[-1]))),
                f"byte {file_bytes}",
                f"byte {ends[-1]}",
            )

    def _check_header(self, file: InputFile) -> str | None:
        """Compare the header with the manifest; return its save token if that differs."""
        manifest = self._manifest
        items = manifest.catalog.take(self._rows)
        begin = int(items.byte_offset.min(initial=manifest.file_bytes[self._file]))
        items = replace(items, byte_offset=items.byte_offset - begin)
        expected, stored = encode_header(items, manifest.info), self._rows
        try:
            # The header's length may be the damaged part, so the token is looked for at its expected place.
            start = file.read(0, len(expected))
            self._found.bytes_read += len(start)
            if start != expected:
                order = order_in_file(items, start)
                expected, stored = encode_header(items.take(order), manifest.info), stored[order]
            if start == expected and len(start) == begin:
                return None
            data = read_header_bytes(file)
            wanted, header = DataFileHeader.decode(expected), DataFileHeader.decode(data)
        except ValueError as error:
            self._problem("the header is damaged", None, (_first_difference(start, expected), begin), None, str(error))
            return None
        except OSError as error:
            self._problem("the header cannot be read", None, (0, begin), None, error.strerror)
            return None
        where = (_first_difference(data, expected), max(begin, len(data)))
        before = len(self._findings)
        if len(data) != begin:
            self._problem("the header has another length", None, (0, where[1]), f"{begin} bytes", f"{len(data)} bytes")
        for name in sorted(wanted.info.keys() | header.info.keys()):
            if wanted.info.get(name) != header.info.get(name):
                what = _OTHER_TOKEN if name == "save_token" else f"the header has another {name}"
                self._problem(what, None, where, wanted.info.get(name), header.info.get(name, "nothing"))
        rows = dict(zip(wanted.entries, stored.tolist()))
        for name in [*rows, *sorted((header.entries.keys() | header.shards.keys()) - rows.keys())]:
            for fields, theirs in ((wanted.entries, header.entries), (wanted.shards, header.shards)):
                if fields.get(name) != theirs.get(name):
                    what = f"the header describes {name!r} otherwise than the manifest"
                    self._problem(what, rows.get(name), where, fields.get(name, "nothing"), theirs.get(name, "nothing"))
        if len(self._findings) == before:
            self._problem("the header says the same in other bytes", None, where)
        token = header.info.get("save_token", "")
        return None if token == manifest.save_token else token

    def _check_items(self, file: InputFile) -> None:
        buffer = np.empty(self._block_bytes, dtype=np.uint8)
        lengths = self._manifest.catalog.byte_length[self._rows]
        for row, length in zip(self._rows.tolist(), lengths.tolist()):
            begin = int(self._manifest.catalog.byte_offset[row])
            for fault in self._faults(file, row, begin, length, buffer):
                what = f"bytes {fault.first} to {fault.last} of the shard {fault.what}"
                stretch = (begin + fault.first, begin + fault.last)
                blocks = range(fault.first // self._block_bytes, -(-fault.last // self._block_bytes))
                self._problem(what, row, stretch, fault.expected, fault.got, blocks)
                self._found.lost_blocks.setdefault(row, set()).update(blocks)

    def _faults(self, file: InputFile, row: int, begin: int, length: int, buffer: np.ndarray) -> list[_Stretch]:
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
                count = fill(file, memoryview(view), begin + first)
            except OSError as error:
                note("cannot be read", first, last, got=error.strerror)
                continue
            self._found.bytes_read += count
            self._meter.add(count)
            if count < len(view):
                note(FILE_ENDS, first + count, length)
                break
            expected, got = checksums.of_block(row, block), hash_block(view)
            if expected == got:
                self._found.bytes_verified += len(view)
            else:
                note("are damaged", first, last, f"xxh3 {expected:016x}", f"xxh3 {got:016x}")
        return faults


def _first_difference(data: bytes, expected: bytes) -> int:
    """Return the index of the first byte that is not as expected."""
    length = min(len(data), len(expected))
    a, b = np.frombuffer(data, np.uint8, length), np.frombuffer(expected, np.uint8, length)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length
