"""Data files: one safetensors file per rank, streamed.

The header is complete before the first byte of data is written, because the write plan knows all sizes; the data then
goes from the tensors' own memory to the file. Large items are hashed by a thread while they are written, small ones
block by block right after it, while they are in cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError
from paddle_flexckpt.media.backend import Backend, InputFile, Location, open_member
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.blocks import HashThread
from paddle_flexckpt.native.checksums import BLOCK_BYTES, Checksums, hash_block
from paddle_flexckpt.native.header import DataFileHeader
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES

# Items of at most so many blocks are hashed by the thread that writes them: asking another costs about one block.
HASHED_INLINE = 4
# The save token stands within the first bytes of the file, so that a reader can check it with one small read.
TOKEN_WINDOW = 256


class DataFileWriter:
    """Writes one rank's data file and describes it."""

    def __init__(
        self,
        directory: Location,
        items: Catalog,
        *,
        save_token: str,
        unique_id: int,
        world_size: int,
        step: int | None = None,
    ) -> None:
        """Prepares the header.

        Args:
            directory: Where the file goes.
            items: This rank's rows of the write plan, in the order of their byte offsets (which count from the start
                of the data here). All are in one file.
            save_token: Random text of this save.
            unique_id: The checkpoint's id.
            world_size: Ranks that take part in the save.
            step: Training step, if known.
        """
        self._items = items
        self._token, self._id, self._world, self._step = save_token, unique_id, world_size, step
        self._name = (items.file_name(0) if len(items) else None) or ""
        self._backend = open_backend(directory)
        self.path = self._backend.where(self._name) if self._name else None
        self._header = self._build_header()

    def _build_header(self) -> bytes:
        header = DataFileHeader.of_items(
            self._items, save_token=self._token, unique_id=self._id, world_size=self._world, step=self._step
        )
        data = header.encode()
        if len(data) - 8 > MAX_HEADER_BYTES:
            raise ValueError(
                f"the header of {self.path} would have {len(data) - 8} bytes; safetensors allows {MAX_HEADER_BYTES}. "
                "Remedy: save fewer tensors per rank"
            )
        return data

    def write(self, data: Iterable[np.ndarray]) -> Manifest:
        """Writes the file and makes it durable.

        Args:
            data: The items' bytes in order: contiguous uint8 arrays, each used before the next is asked for. An item
                may come in several arrays; all but its last are of whole blocks.

        Returns:
            This rank's part of the manifest.

        Raises:
            OSError: The file system refused.
            ValueError: The data is not of the planned length.
        """
        if self.path is None:
            return self._part([], 0)
        lengths = self._items.byte_length
        checksums: list[int] = []
        file_bytes = len(self._header) + int(lengths.sum())
        with contextlib.closing(HashThread()) as hashing, self._backend.create(self._name, size=file_bytes) as file:
            file.write(self._header)
            count = done = 0
            for part in data:
                planned = int(lengths[count]) if count < len(lengths) else -1
                done += part.nbytes
                if done > planned or (done < planned and part.nbytes % BLOCK_BYTES):
                    raise ValueError(f"item {count} of {self.path} has {done} bytes, which were not planned")
                blocks = [part[start : start + BLOCK_BYTES] for start in range(0, part.nbytes, BLOCK_BYTES)]
                beside = hashing.hash(count, 0, blocks).hashes if len(blocks) > HASHED_INLINE else None
                for block in blocks:
                    file.write(memoryview(block))
                    if beside is None:
                        checksums.append(hash_block(block))
                checksums += [] if beside is None else beside.result()
                if done == planned:
                    count, done = count + 1, 0
            if count != len(lengths):
                raise ValueError(f"{self.path} got {count} items of the {len(lengths)} that were planned")
        return self._part(checksums, file_bytes)

    def _part(self, checksums: list[int], file_bytes: int) -> Manifest:
        used = (self._name,) if self._name else ()
        items = replace(
            self._items,
            files=used,
            file=np.zeros(len(self._items), dtype=np.int32),
            byte_offset=self._items.byte_offset + len(self._header),
        )
        values = np.asarray(checksums, dtype=np.uint64)
        return Manifest(
            catalog=items,
            checksums=Checksums.of_items(values, items.byte_length),
            file_bytes=np.asarray([file_bytes] if used else [], dtype=np.int64),
            save_token=self._token,
            unique_id=self._id,
            world_size=self._world,
            step=self._step,
        )


def check_data_file(backend: Backend, manifest: Manifest, name: str, size: int) -> InputFile:
    """Opens a data file that has the size and the save token that the manifest says.

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
