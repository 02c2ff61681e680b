"""Write the manifest of a save in partitions, each by one rank, so that no rank has the rows of all ranks.

A rank knows the rows that it has written, and their checksums. It sends each row to the rank that writes the partition
of the row's key. That rank sends the coordinator the partition's name, digest and size, which are all that a manifest
has of a partition (docs/format.md, "Partitions").
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.key_rows import decode_rows, encode_rows
from paddle_flexckpt.catalog.wire import join, pack_by_position, split, unpack_by_position
from paddle_flexckpt.media.backend import map_files
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.partitions import Partition, partition_of
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator

# Number, digest (upper half, lower half), bytes, rows, keys, bytes of data.
_DESCRIPTION = struct.Struct("<IQQ4q")
_LOW = (1 << 64) - 1


def encode_part(part: Manifest, count: int) -> dict[int, bytes]:
    """Encode the rows that a rank has written, for the ranks that write them in ``count`` partitions.

    Returns:
        By number of the partition, its rows and their checksums.
    """
    catalog = part.catalog
    number = partition_of(catalog.keys, count)
    # The column for flags carries the byte offsets.
    messages = encode_rows(catalog, catalog.byte_offset, number)
    of_row = number[catalog.key]
    order = np.argsort(of_row, kind="stable")
    sums = part.checksums.take(order)
    edges = sums.first[np.searchsorted(of_row[order], [*messages, count])].tolist()
    return {
        each: join((message, sums.values[begin:end].astype("<u8").tobytes()))
        for (each, message), begin, end in zip(messages.items(), edges, edges[1:])
    }


def decode_parts(
    messages: Mapping[int, bytes],
    ranks: Sequence[int],
    before: np.ndarray,
    info: SaveInfo,
    file_of: Callable[[int], str],
) -> Manifest:
    """Return the rows of a partition from the messages of the ranks.

    Args:
        messages: By position of the rank in the group, rising.
        ranks: The ranks' numbers, by position.
        before: int64 ``[number of ranks]``, the number of rows that all ranks before each have written.
        info: The save.
        file_of: Gives the name of a rank's data file.

    Raises:
        ValidationError: Ranks contradict each other about the order of a tensor's elements.
        ValueError: There are not as many checksums as blocks.
    """
    parts = {place: split(message) for place, message in messages.items()}
    rows = decode_rows({place: part[0] for place, part in parts.items()}, ranks, before)
    if rows.contradictions:
        raise ValidationError([problem for _, problem in rows.contradictions if isinstance(problem, Problem)])
    # Rows are in the order of ranks and of each rank's file, as the checksums are.
    sums = np.frombuffer(b"".join(part[1] for part in parts.values()), dtype="<u8")
    writers, file = np.unique(rows.catalog.rank, return_inverse=True)
    files = tuple(map(file_of, writers.tolist()))
    catalog = replace(rows.catalog, files=files, file=file.astype(np.int32), byte_offset=rows.flags).compact()
    # The size of a file is in the manifest.
    return Manifest.of_save(info, catalog, sums, dict.fromkeys(files, 0))


class PartitionWriter:
    """One rank's share of the partitions of a save's manifest. Every rank makes the same calls, in this order.

    1. :meth:`send`: when its data file is durable, a rank sends its rows to the writers of partitions.
    2. :meth:`write`: when all data files are durable, it writes its partitions and sends the coordinator a description.
    3. :meth:`manifest`: the coordinator puts the descriptions together.

    Attributes:
        count: The number of partitions.
    """

    def __init__(self, comm: Communicator, directory: SaveDirectory, names: SaveNames, count: int) -> None:
        """Take the ranks, the save's directory and names, and the number of partitions."""
        self._comm, self._directory, self._names, self.count = comm, directory, names, count
        # Of all ranks: the bytes of the data file, its rows, and the bytes of the rows' data.
        self._written = np.zeros((0, 3), dtype=np.int64)

    def send(self, part: Manifest) -> tuple[bytes, dict[int, bytes]]:
        """Return this rank's message to all ranks, and by position of a rank the rows that it is to write."""
        self._info = part.info
        sizes = np.asarray([part.file_bytes.sum(), len(part.catalog), part.data_bytes], dtype="<i8")
        messages: dict[int, dict[int, bytes]] = {}
        for number, message in encode_part(part, self.count).items():
            messages.setdefault(number % self._comm.size, {})[number] = message
        return sizes.tobytes(), {place: join(pack_by_position(each)) for place, each in messages.items()}

    def write(self, payloads: Sequence[bytes], received: Mapping[int, bytes]) -> bytes:
        """Write this rank's partitions, each durably; return a description of them for the coordinator.

        Args:
            payloads: Each rank's message to all.
            received: The messages of ranks to this one, by position.

        Raises:
            CheckpointError: A data file has been changed meanwhile.
            OSError: The file system refused.
        """
        comm = self._comm
        self._written = np.frombuffer(b"".join(payloads), dtype="<i8").reshape(-1, 3)
        self._look_at((comm.position - 1) % comm.size)
        rows = self._written[:, 1]
        before = np.cumsum(rows) - rows
        messages: dict[int, dict[int, bytes]] = {}
        for place, message in received.items():
            for number, part in unpack_by_position(split(message)).items():
                messages.setdefault(number, {})[place] = part

        def write(number: int) -> bytes:
            parts = messages.get(number, {})
            part = decode_parts(parts, comm.ranks, before, self._info, self._names.data_file)
            written = self._directory.write_partition(self._names, number, self.count, part)
            counts = written.nbytes, written.rows, written.keys, written.data_bytes
            return _DESCRIPTION.pack(number, written.digest >> 64, written.digest & _LOW, *counts)

        return b"".join(map_files(self._directory.backend, write, range(comm.position, self.count, comm.size)))

    def _look_at(self, place: int) -> None:
        """Check another rank's data file, as a reader would see it: each is checked by one rank."""
        sizes = self._sizes([place])
        self._directory.check_untouched(Manifest.of_partitions(self._info, sizes, ()))

    def _sizes(self, places: Sequence[int]) -> dict[str, int]:
        sizes = self._written[places, 0].tolist()
        return {self._names.data_file(self._comm.ranks[place]): size for place, size in zip(places, sizes) if size}

    def manifest(self, described: Sequence[bytes]) -> Manifest:
        """Return the manifest, from what ranks have :meth:`written <write>`.

        Raises:
            CheckpointError: The partitions differ from what ranks have written.
        """
        found: list[Partition] = []
        for number, high, low, *counts in sorted(_DESCRIPTION.iter_unpack(b"".join(described))):
            found.append(Partition(self._names.partition_file(number), high << 64 | low, *counts))
        manifest = Manifest.of_partitions(self._info, self._sizes([*range(self._comm.size)]), found)
        _, rows, data_bytes = self._written.sum(axis=0).tolist()
        if (len(found), manifest.rows, manifest.data_bytes) != (self.count, rows, data_bytes):
            raise CheckpointError(
                f"nothing was committed, as {len(found)} partitions of the manifest have {manifest.rows} rows of "
                f"{manifest.data_bytes} bytes; ranks wrote {rows} of {data_bytes}, for {self.count} partitions. "
                "Remedy (FC403): save again; if it stays so, report it as a defect of paddle_flexckpt"
            )
        return manifest
