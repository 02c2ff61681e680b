"""Files that ranks make of each other's files: copies, parity, and data files that were lost.

Tested in tests/native/test_parity.py and tests/saving/test_parity_saves.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.backend import InputFile, fill
from paddle_flexckpt.native.parity import CHUNK_BYTES, Block, Range, Write
from paddle_flexckpt.progress import SILENT, Meter
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import Streams, open_transport

OpenFile = Callable[[str], InputFile]


@dataclass(frozen=True)
class Making:
    """A file that a rank makes.

    Attributes:
        maker: The rank.
        blocks: Its bytes, in order.
        readers: By file, the rank that reads it for this one.
        output: Opens the file.
    """

    maker: int
    blocks: Sequence[Block]
    readers: Mapping[str, int]
    output: AbstractContextManager[Write]


def exchange_files(
    comm: Communicator, makings: Sequence[Making], open_file: OpenFile, context: str, meter: Meter = SILENT
) -> None:
    """Make files, in chunks. All ranks call this. Two collectives.

    Args:
        comm: The ranks.
        makings: The files that this rank makes, or reads for; in the same order on all ranks.
        open_file: Opens a file that this rank reads.
        context: What is being done, for errors.
        meter: Counts the bytes that this rank writes.

    Raises:
        CheckpointError: A file became shorter, what was made is not what it should be, or storage or a rank failed.
    """
    blocks = ((making, block) for making in makings for block in making.blocks)
    pairs = {(making.readers[each.file], making.maker) for making, block in blocks for each in block.sources}
    receivers = {maker for reader, maker in pairs if reader == comm.rank != maker}
    senders = {reader for reader, maker in pairs if maker == comm.rank != reader}
    transport = open_transport(comm)

    def make() -> tuple[None, bytes]:
        with contextlib.closing(_received(makings, comm.rank, open_file, meter)) as received:
            sent = _sent(makings, comm.rank, open_file)
            transport.exchange_rounds(addresses, (receivers, senders), sent, received)
        return None, b""

    try:
        _, addresses = comm.together(lambda: (None, transport.address()), context)
        comm.together(make, context)
    finally:
        transport.close()


def _rounds(makings: Sequence[Making]) -> Iterator[list[tuple[Making, Block]]]:
    """Yield the chunks of each round: the next of each file, so that all ranks send and receive at the same time."""
    chunks = (itertools.chain.from_iterable(block.chunks() for block in making.blocks) for making in makings)
    for each in itertools.zip_longest(*chunks):
        yield [(making, chunk) for making, chunk in zip(makings, each) if chunk is not None]


def _sent(makings: Sequence[Making], rank: int, open_file: OpenFile) -> Iterator[Streams]:
    for chunks in _rounds(makings):
        ranges: dict[int, list[Range]] = {}
        for making, source in ((making, source) for making, chunk in chunks for source in chunk.sources):
            if making.readers[source.file] == rank != making.maker:
                ranges.setdefault(making.maker, []).append(source)
        yield {maker: _read(open_file, each) for maker, each in ranges.items()}


def _received(
    makings: Sequence[Making], rank: int, open_file: OpenFile, meter: Meter
) -> Generator[Streams, None, None]:
    scratch = np.empty(CHUNK_BYTES, dtype=np.uint8)
    own = [making for making in makings if making.maker == rank]
    with contextlib.ExitStack() as outputs:
        write = {id(making): outputs.enter_context(making.output) for making in own}
        for chunks in _rounds(own):
            totals = [np.zeros(chunk.length, dtype=np.uint8) for _, chunk in chunks]
            parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
            for (making, chunk), total in zip(chunks, totals):
                for source in chunk.sources:
                    part = total[: source.length]
                    if making.readers[source.file] != rank:
                        buffer = part if len(chunk.sources) == 1 else scratch[: len(part)]
                        parts.setdefault(making.readers[source.file], []).append((part, buffer))
                        continue
                    for data in _read(open_file, [source]):
                        np.bitwise_xor(part, data, out=part)
            yield {reader: _combine(each) for reader, each in parts.items()}
            for (making, _), total in zip(chunks, totals):
                write[id(making)](total)
                meter.add(len(total))


def _combine(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield buffers to be filled, and combine each with its part, unless it is that, when the next is requested."""
    for part, buffer in parts:
        yield buffer
        if buffer is not part:
            np.bitwise_xor(part, buffer, out=part)


def _read(open_file: OpenFile, ranges: Sequence[Range]) -> Iterator[np.ndarray]:
    """Yield the bytes of ranges of files."""
    for source in ranges:
        data = np.empty(source.length, dtype=np.uint8)
        with open_file(source.file) as file:
            if fill(file, memoryview(data), source.begin) < source.length:
                raise CheckpointError(f"{source.file} became shorter while it was read for another node")
        yield data
