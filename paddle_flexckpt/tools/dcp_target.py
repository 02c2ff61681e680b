"""Write a checkpoint of torch.distributed.checkpoint (DCP): ``__{rank}_{n}.distcp``, and ``.metadata`` last.

Each chunk is a box, in an archive as ``torch.save`` writes it. torch is not needed. Tested in
tests/tools/test_dcp_target.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.foreign.torch_dcp import DCP_METADATA_FILE
from paddle_flexckpt.foreign.torch_saving import (
    DcpChunk,
    DcpTensor,
    TensorArchive,
    encode_dcp_metadata,
    head_of,
    plan_archive,
    tail_of,
)
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.tools.conversion_content import Content, PlannedFile, WholeFiles, parts_of, rows_of

# Small pieces are written together.
_BUFFER_BYTES = 1 << 20


class TorchDcpTarget(WholeFiles):
    """A checkpoint of DCP: whole tensors, or the shards that each rank of a strategy would save, replicas once."""

    by_safetensors = False
    states = True
    has_layout = True
    last = DCP_METADATA_FILE

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan the archives of all chunks: their places, and all bytes but the elements."""
        super().__init__(sink, content)
        rows, self.notes = rows_of(content)
        items = plan_write(rows, str).catalog
        infos, chunks = content.infos, {name: list[DcpChunk]() for name in sorted(content.infos)}
        empty = [(name, Box((0,) * len(info.shape), info.shape)) for name, info in infos.items() if not info.nbytes]
        self.files: list[PlannedFile] = []
        self._archives: list[list[TensorArchive]] = []
        for number, rank in enumerate(np.unique(items.rank).tolist() or [0]):
            # Whole tensors belong to one rank, in several files.
            name = f"__{rank}_0.distcp" if content.strategy is not None else f"__0_{number}.distcp"
            parts = parts_of(items.take(items.rank == rank))
            archives, begin = list[TensorArchive](), 0
            # A tensor without elements has one archive too.
            for key, box in [*parts, *(empty if not number else ())]:
                archives.append(plan_archive(infos[key].dtype, box.shape))
                chunks[key].append(DcpChunk(box.offset, box.shape, name, begin, archives[-1].nbytes))
                begin += archives[-1].nbytes
            self.files.append(PlannedFile(name, parts, sum(archive.data_bytes for archive in archives), begin))
            self._archives.append(archives)
        self._tensors = [DcpTensor(key, infos[key].dtype, infos[key].shape, found) for key, found in chunks.items()]

    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Implement the base class."""
        return _with_archives(self._archives[number], data)

    def last_content(self) -> bytes:
        """Implement the base class."""
        return encode_dcp_metadata(self._tensors)


def _with_archives(archives: Iterable[TensorArchive], data: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of archives as arrays: small pieces joined, and large arrays unchanged.

    Raises:
        ValueError: The data are not the archives' elements.
    """
    arrays = iter(data)
    small = bytearray()
    for archive in archives:
        small += head_of(archive)
        checksum, left = 0, archive.data_bytes
        while left:
            part = next(arrays, None)
            if part is None or part.nbytes > left:
                raise ValueError(
                    f"the data does not end with a chunk: {left} of {archive.data_bytes} bytes are missing"
                )
            view = part.ravel().view(np.uint8)
            del part
            checksum = zlib.crc32(view, checksum)
            left -= view.nbytes
            if len(small) + view.nbytes <= _BUFFER_BYTES:
                small += memoryview(view)
                continue
            yield np.frombuffer(bytes(small), dtype=np.uint8)
            small.clear()
            yield view
            del view
        small += tail_of(archive, checksum)
        if len(small) >= _BUFFER_BYTES:
            yield np.frombuffer(bytes(small), dtype=np.uint8)
            small.clear()
    if small:
        yield np.frombuffer(bytes(small), dtype=np.uint8)
