"""Parity of data files: the files of any one node of a group can be rebuilt from those of the others.

The ranks with the same index within the nodes of a group form a *stripe*: k data files on k nodes. Each file is cut
into k - 1 blocks. A parity file has a header, the exclusive-or of one block of each other member, and a checksum of
both. So each block is in one parity file, on another node. Shorter blocks count as if zeros followed.

Tested in tests/native/test_parity.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.checksums import hash_block
from paddle_flexckpt.native.data_file import encode_header, order_in_file
from paddle_flexckpt.native.manifest import DECODING_ERRORS, Manifest
from paddle_flexckpt.native.safetensors_header import header_bytes
from paddle_flexckpt.native.save_names import SaveNames, parity_of, rank_of

# The most bytes that are combined at a time.
CHUNK_BYTES = 4 << 20
_FORMAT = {"format": "flexckpt-parity", "version": 1}
# A group of so many nodes, or fewer than twice as many, fits in a header of so many bytes.
_MAX_PARITY = 128
_MAX_HEADER_BYTES = 1 << 15

Write = Callable[[np.ndarray], None]


class Range(NamedTuple):
    """A range of a file's bytes."""

    file: str
    begin: int
    length: int


class Block(NamedTuple):
    """Bytes that are the exclusive-or of ranges of files, none of them longer; zeros follow those that are shorter."""

    length: int
    sources: tuple[Range, ...]

    def chunks(self) -> Iterator[Block]:
        """Yield the block in parts of at most :data:`CHUNK_BYTES`."""
        for start in range(0, self.length, CHUNK_BYTES):
            most = min(CHUNK_BYTES, self.length - start)
            left = [each._replace(begin=each.begin + start, length=each.length - start) for each in self.sources]
            yield Block(most, tuple(each._replace(length=min(each.length, most)) for each in left if each.length > 0))


@dataclass(frozen=True)
class Stripe:
    """The data files of ranks of different nodes that protect each other.

    Attributes:
        token: The save token.
        files: The members' data files, in order; also of a rank that has written none.
        sizes: Their bytes; 0 where there is no file.
    """

    token: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]

    def source(self, member: int, holder: int) -> Range:
        """Return the bytes of a member's data file that are in another member's parity file; they may be none."""
        size, number = self.sizes[member], (holder - member - 1) % len(self.files)
        length = -(-size // (len(self.files) - 1))
        begin = min(number * length, size)
        return Range(self.files[member], begin, min(length, size - begin))

    def parity(self, member: int) -> Block:
        """Return the exclusive-or that a member's parity file has."""
        others = [self.source(other, member) for other in range(len(self.files)) if other != member]
        return Block(max(each.length for each in others), tuple(each for each in others if each.length))

    def data(self, member: int) -> list[Block]:
        """Return the blocks of a member's data file, by the other members' files."""
        blocks, count = [], len(self.files)
        for holder in [(member + step) % count for step in range(1, count)]:
            length = self.source(member, holder).length
            own = Range(parity_of(self.files[holder]), len(self.header(holder)), length)
            others = [each for each in self.parity(holder).sources if each.file != self.files[member]]
            blocks.append(Block(length, (own, *(each._replace(length=min(each.length, length)) for each in others))))
        return [block for block in blocks if block.length]

    def header(self, member: int) -> bytes:
        """Return the header of a member's parity file."""
        fields = {**_FORMAT, "save_token": self.token, "member": member, "files": [*zip(self.files, self.sizes)]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text

    def parity_bytes(self, member: int) -> int:
        """Return the size of a member's parity file, which ends with a checksum of all before."""
        return len(self.header(member)) + self.parity(member).length + 8


def group_nodes(count: int, parity: int) -> list[range]:
    """Return the nodes of each group: ``parity`` or more, as even as possible.

    Neighbours are in different groups if there are several, as they are lost together more often.
    """
    groups = count // parity
    return [range(group, count, groups) for group in range(groups)]


def check_parity(parity: object, nodes: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Raise ValidationError unless nodes, by name and with their ranks, can protect each other."""
    which = f"the nodes are {', '.join(names)}"
    if type(parity) is not int or not 2 <= parity <= min(len(nodes), _MAX_PARITY):
        raise ValidationError(
            f"parity has to be None, or 2 to {_MAX_PARITY} and no more than there are nodes; got {parity!r}; {which}. "
            "Remedy (FC504): lower it, or run on more nodes; one node alone cannot be protected"
        )
    if len({len(members) for members in nodes}) > 1:
        raise ValidationError(
            f"parity={parity} needs as many ranks on each node; got {', '.join(str(len(each)) for each in nodes)}; "
            f"{which}. Remedy (FC504): node_copies=2 works with any"
        )


def stripe_of(manifest: Manifest, ranks: Sequence[int]) -> Stripe:
    """Return the stripe of some ranks' data files; the manifest knows those that there are."""
    names, sizes = SaveNames(manifest.unique_id, manifest.save_token), manifest.sizes
    files = [names.data_file(rank) for rank in ranks]
    return Stripe(manifest.save_token, tuple(files), tuple(sizes.get(file, 0) for file in files))


def read_stripe(backend: Backend, name: str, manifest: Manifest) -> Stripe:
    """Return the stripe of a parity file, by its header, if it is one of this checkpoint and has its length.

    Raises:
        CorruptCheckpointError: It is not, or has not.
        OSError: It cannot be read.
    """
    where = backend.where(name)
    with backend.open(name) as file:
        length = header_bytes(file.read(0, 8), file.size, where, _MAX_HEADER_BYTES)
        data = file.read(0, 8 + length)
        try:
            ranks = [rank_of(each) for each, _ in json.loads(data[8:])["files"]]
            if not 2 <= len({*ranks}) == len(ranks) <= len(manifest.nodes):
                raise ValueError(f"its files are those of ranks {ranks}")
            stripe, member = stripe_of(manifest, ranks), ranks.index(rank_of(name))
            # If these are the bytes that follow from the manifest, then names, sizes, token and format are right.
            if data != stripe.header(member):
                raise ValueError(f"its header is not that of a parity file of save {manifest.save_token}")
        except DECODING_ERRORS as error:
            raise CorruptCheckpointError(f"{where} is damaged, or not of this checkpoint: {error!r:.200}") from error
        if file.size != (expected := stripe.parity_bytes(member)):
            raise CorruptCheckpointError(f"{where} has {file.size} bytes; expected {expected}")
    return stripe


def parity_here(backend: Backend, manifest: Manifest) -> dict[str, list[int] | str]:
    """Return, by parity file that is here, the ranks of its stripe, or what is wrong with it."""
    here: dict[str, list[int] | str] = {}
    for name in sorted(manifest.parity_files.intersection(backend.names())):
        try:
            here[name] = [*map(rank_of, read_stripe(backend, name, manifest).files)]
        except (CorruptCheckpointError, OSError) as error:
            here[name] = str(error)
    return here


def check_checksum(backend: Backend, name: str) -> None:
    """Raise CorruptCheckpointError if a parity file, which has its length, is not as it was written."""
    hasher = xxhash.xxh3_64()
    with backend.open(name) as file:
        for start in range(0, file.size - 8, CHUNK_BYTES):
            hasher.update(file.read(start, min(CHUNK_BYTES, file.size - 8 - start)))
        if file.read(file.size - 8, 8) != hasher.digest():
            raise CorruptCheckpointError(f"{backend.where(name)} is damaged: its checksum is another")


@contextlib.contextmanager
def write_copy(backend: Backend, name: str, size: int) -> Iterator[Write]:
    """Write a copy of a file durably: yield a function that takes its bytes."""
    with backend.create(name, size=size) as file:
        yield lambda part: file.write(memoryview(part))


@contextlib.contextmanager
def write_parity(backend: Backend, stripe: Stripe, member: int) -> Iterator[Write]:
    """Write a parity file durably: yield a function that takes the exclusive-or, chunk by chunk."""
    hasher = xxhash.xxh3_64()
    with backend.create(parity_of(stripe.files[member]), size=stripe.parity_bytes(member)) as file:

        def write(part: bytes | np.ndarray) -> None:
            hasher.update(part)
            file.write(memoryview(part))

        write(stripe.header(member))
        yield write
        file.write(hasher.digest())


@contextlib.contextmanager
def write_rebuilt(backend: Backend, manifest: Manifest, name: str) -> Iterator[Write]:
    """Write a lost data file durably: yield a function that takes its bytes, and compares each block with the manifest.

    Raises:
        CorruptCheckpointError: It is not what was saved: nothing has its name.
        OSError: The directory cannot be written to; the text says so.
    """
    where, size = backend.where(name), manifest.sizes[name]
    rows, items = _items_of(manifest, name)
    left = [*_blocks_of(manifest, rows, items)][::-1]
    if sum(block.length for block in left) != size:
        raise CorruptCheckpointError(
            f"{where} cannot be compared: its blocks in the manifest have not its {size} bytes"
        )
    rest = np.empty(0, dtype=np.uint8)

    def write(part: np.ndarray) -> None:
        nonlocal rest
        rest = np.concatenate([rest, part])
        with _explain_not_rebuilt(where):
            file.write(memoryview(part))
        while left and left[-1].length <= len(rest):
            block = left.pop()
            data, expected = rest[: block.length], block.checksum
            if expected is None:
                expected = hash_block(encode_header(items.take(order_in_file(items, data.tobytes())), manifest.info))
            if (got := hash_block(data)) != expected:
                raise CorruptCheckpointError(
                    f"{where}, rebuilt by parity, is not what was saved: {block.what}: expected xxh3 "
                    f"{expected:016x}, got {got:016x}. It is not used. Remedy (FC305): a file from which it "
                    "was rebuilt is damaged, which `flexckpt verify` of each node's directory finds; load another "
                    "checkpoint"
                )
            rest = rest[block.length :]

    with contextlib.ExitStack() as output:
        with _explain_not_rebuilt(where):
            file = output.enter_context(backend.create(name, "replace", size))
        yield write
        with _explain_not_rebuilt(where):
            output.close()
            backend.sync()


@contextlib.contextmanager
def _explain_not_rebuilt(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{where} is lost, and cannot be rebuilt there: {error.strerror}"
        if "Remedy (" not in text:
            text += ". Remedy (FC504): make the directory writable, or rebuild it by `flexckpt repair --nodes`"
        raise OSError(error.errno, text) from error


class _SavedBlock(NamedTuple):
    """A block of a data file: its bytes, its name, and its checksum; None for the header."""

    length: int
    what: str
    checksum: int | None


def _items_of(manifest: Manifest, name: str) -> tuple[np.ndarray, Catalog]:
    """Return the rows of a data file by byte offset, and the same with offsets from the start of the data."""
    catalog = manifest.catalog
    rows = np.flatnonzero(catalog.file == catalog.files.index(name))
    rows = rows[order_in_file(catalog.take(rows))]
    items = catalog.take(rows)
    begin = int(items.byte_offset.min(initial=manifest.sizes[name]))
    return rows, replace(items, byte_offset=items.byte_offset - begin)


def _blocks_of(manifest: Manifest, rows: np.ndarray, items: Catalog) -> Iterator[_SavedBlock]:
    """Yield the blocks of a data file, the header first."""
    size = manifest.checksums.block_bytes
    yield _SavedBlock(len(encode_header(items, manifest.info)), "its header", None)
    for row, length in zip(rows.tolist(), items.byte_length.tolist()):
        for block, start in enumerate(range(0, length, size)):
            what = f"block {block} of {manifest.catalog.key_name(row)!r}"
            yield _SavedBlock(min(size, length - start), what, manifest.checksums.of_block(row, block))


def plan_rebuilding(
    manifest: Manifest,
    lost: Sequence[str],
    readable: Collection[str],
    parity: Sequence[Mapping[str, list[int] | str]],
) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Return the blocks of lost data files that can be rebuilt; and by name of others, the reason.

    Args:
        manifest: The checkpoint.
        lost: The lost data files.
        readable: The data files that can be read.
        parity: Of each place from which files are read, its :func:`parity_here`.
    """
    stripes = {name: what for each in parity for name, what in each.items() if not isinstance(what, str)}
    wrong = {name: what for each in parity for name, what in each.items() if isinstance(what, str)}
    wrong = {name: wrong[name] for name in wrong.keys() - stripes.keys()}
    usable = {*readable, *stripes}
    planned, reasons = {}, {}
    for name in lost:
        ranks = next((each for each in stripes.values() if rank_of(name) in each), None)
        if ranks is None:
            reasons[name] = "; ".join(["no parity file of its group can be read", *sorted(wrong.values())])
            continue
        blocks = stripe_of(manifest, ranks).data(ranks.index(rank_of(name)))
        missing = sorted({each.file for block in blocks for each in block.sources} - usable)
        if not missing:
            planned[name] = blocks
            continue
        nodes = sorted({node for file in missing for node in manifest.nodes_of(file)})
        files = listed([wrong.get(file, file) for file in missing])
        reasons[name] = f"parity cannot rebuild it without {files} of node {' and '.join(nodes)}"
    return planned, reasons
