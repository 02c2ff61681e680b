"""Write and open data files: one safetensors file per rank, streamed.

The header is complete before the first byte of data is written, because the write plan knows all sizes. The data then
goes from the tensors' own memory to the file, many neighbours in one call. A thread hashes it meanwhile; a small amount
is hashed right after the write, while it is in cache.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.media.backend import Backend, InputFile, Location, open_member
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.checksums import BLOCK_BYTES, HashThread, hash_block
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.progress import SILENT, Meter

# The most bytes written to the file in one call, as blocks of large items and of many small ones: several calls cost
# more, and a device waits for no more than this. The most blocks likewise.
BATCH_BYTES = 8 << 20
BATCH_BLOCKS = 1024
# Up to so many bytes are hashed by the thread that writes them: handing them to another costs about one block.
HASHED_INLINE = 4 << 20
# The save token is within the first bytes of the file, so that a reader can check it with one small read.
TOKEN_WINDOW = 256


def write_data_file(
    directory: Location, items: Catalog, data: Iterable[np.ndarray], save: SaveInfo, meter: Meter = SILENT
) -> Manifest:
    """Write one rank's data file, make it durable, and return this rank's part of the manifest.

    Args:
        directory: The directory of the file.
        items: This rank's rows of the write plan, in the order of their byte offsets (which count from the start of
            the data here). All are in one file.
        data: The items' bytes in order: contiguous uint8 arrays, of which up to ``BATCH_BYTES`` are kept until they are
            written. An item may come in several arrays; all but its last are of whole blocks.
        save: The save of the file.
        meter: Counts the bytes that are written.

    Raises:
        OSError: The file system refused.
        ValueError: The data has not the planned length, or the header is too long.
    """
    if not len(items):
        return Manifest.of_save(save, replace(items, files=()), (), {})
    backend, name = open_backend(directory), items.file_name(0) or ""
    path = backend.where(name)
    from paddle_flexckpt.native.header import encode_header  # readers do not need it

    header = encode_header(items, save)
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {path} would have {len(header) - 8} bytes; safetensors allows {MAX_HEADER_BYTES}. "
            "Remedy: save with more ranks, or parts of the state dict in directories of their own"
        )
    lengths = items.byte_length.tolist()
    checksums: list[int] = []
    file_bytes = len(header) + sum(lengths)
    ends, written = list(itertools.accumulate(lengths)) if meter.is_heard else [], 0
    told, thread = _telling_how_full(path, file_bytes), contextlib.closing(HashThread())
    with told, thread as hashing, backend.create(name, size=file_bytes) as file:
        file.write(header)
        for blocks in _batches(path, lengths, data):
            beside = hashing.hash(blocks) if sum([block.nbytes for block in blocks]) > HASHED_INLINE else None
            file.write_many([memoryview(block) for block in blocks])
            if meter.is_heard:
                written += sum([block.nbytes for block in blocks])
                meter.reach(written, bisect.bisect_right(ends, written))
            checksums += map(hash_block, blocks) if beside is None else beside.result()
    stored = replace(
        items, files=(name,), file=np.zeros(len(items), dtype=np.int32), byte_offset=items.byte_offset + len(header)
    )
    return Manifest.of_save(save, stored, checksums, {name: file_bytes})


@contextlib.contextmanager
def _telling_how_full(path: str, nbytes: int) -> Iterator[None]:
    """Add the bytes needed and the bytes free to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        room = ""
        with contextlib.suppress(OSError):
            room = f", and {format_bytes(shutil.disk_usage(os.path.dirname(path)).free)} are free there now"
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {path} has {format_bytes(nbytes)}{room}. Remedy: make room on that storage "
            "for what all its ranks write, and save again, which removes what this save has left",
        ) from error


def _batches(path: str, lengths: Sequence[int], data: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield the blocks of the items, neighbours together; every array is released before the next list is requested.

    Raises:
        ValueError: The data has not the planned lengths.
    """
    blocks: list[np.ndarray] = []
    count = done = held = 0
    for part in data:
        nbytes, planned = part.nbytes, lengths[count] if count < len(lengths) else -1
        done += nbytes
        if done > planned or (done < planned and nbytes % BLOCK_BYTES):
            raise ValueError(f"item {count} of {path} has {done} bytes, which were not planned")
        if done == planned:
            count, done = count + 1, 0
        for start in range(0, nbytes, BLOCK_BYTES):
            block = part[start : start + BLOCK_BYTES]
            blocks.append(block)
            held += block.nbytes
            if held >= BATCH_BYTES or len(blocks) >= BATCH_BLOCKS:
                yield blocks
                blocks, held = [], 0
    if count != len(lengths):
        raise ValueError(f"{path} got {count} items of the {len(lengths)} that were planned")
    if blocks:
        yield blocks


def check_data_file(backend: Backend, manifest: Manifest, name: str, size: int) -> InputFile:
    """Open a data file that has the size and the save token in the manifest.

    Raises:
        CorruptCheckpointError: It is missing, of another size, or of another save.
    """
    path = backend.where(name)
    remedy = "Remedy: restore the file or load another checkpoint"
    try:
        file = open_member(backend, name) if manifest.foreign else backend.open(name)
    except FileNotFoundError as error:
        nodes = manifest.nodes_of(name)
        if nodes:
            raise CorruptCheckpointError(
                f"{path} is missing: the checkpoint was saved with storage='per_node', and the file is on node "
                f"{' and '.join(nodes)}. Remedy: load with storage='per_node' where a rank sees that directory, or "
                "copy the nodes' directories into one"
            ) from error
        raise CorruptCheckpointError(f"{path} is missing; the manifest names it. {remedy}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        if file.size != size:
            raise CorruptCheckpointError(f"{path} has {file.size} bytes; expected {size} (truncated?). {remedy}")
        if not manifest.foreign and manifest.save_token.encode() not in file.read(0, TOKEN_WINDOW):
            raise CorruptCheckpointError(
                f"{path} belongs to another save: its save token is not the manifest's. {remedy}"
            )
        stack.pop_all()
    return file
