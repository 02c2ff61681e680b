"""A live model's weights as the bytes of a segment: planned once, then written as often as their values change.

Every rank writes the parts that it holds straight to their places, in this machine's memory or through a connection to
the receiver on another one. Nothing goes from rank to rank, but what statements compute: those tensors are made in
bands, as for a publication.

Tested in tests/rollout/test_channel.py and tests/distributed/test_weight_channel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import ravel_index
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, dtype_of
from paddle_flexckpt.catalog.dtypes import assign
from paddle_flexckpt.catalog.errors import OverflowingCastError
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.loading.live_model import LiveModel, without_tied_head
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.loading.publishing import batches_of
from paddle_flexckpt.memory.state import state_fingerprint
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.rollout.segment import LocalSink, Region, Sink, bytes_region
from paddle_flexckpt.tools.tensor_files import Chosen, TensorFile, choose_tensors, one_file
from paddle_flexckpt.tools.whole_tensors import TensorBox, WholeTensors
from paddle_flexckpt.transfer.copies import copy_pieces, read_values
from paddle_flexckpt.transfer.targets import Targets

# The bytes of a part that is sent, or whose digest is made, at a time.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Part:
    """A part of a tensor, as the segment has it.

    Attributes:
        name: The tensor's name there.
        base: Where it begins in the tensor, in elements.
        extents: Elements along each axis.
        strides: From one element to the next along each axis, in elements of the whole tensor.
        values: The elements, C-contiguous.
    """

    name: str
    base: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    values: np.ndarray


class PushedWeights:
    """The weights of one live model under the names of an engine, and what this rank writes of them.

    Attributes:
        file: The segment, complete but for its data.
        keys: The number of its tensors.
        left_out: States that are not pushed.
        messages: The messages that ranks exchanged when the model was described.
    """

    def __init__(
        self,
        comm: Communicator,
        state_dict: Mapping[str, Any],
        describe_call: Callable[[], tuple[bytes, ...]],
        context: str,
        options: ReshardOptions,
        aoa_config: Any,
    ) -> None:
        """Describe the model on all ranks, and compare replicas. One collective, or two; errors as of a reshard."""
        self._comm, self._context = comm, context
        self._aoa_config = aoa_config
        self._live = LiveModel(comm, lambda: without_tied_head(state_dict, aoa_config), describe_call, context, options)
        self._layout = state_fingerprint(state_dict, same_tensors=False)
        if not self._live.is_compared:
            _, answers = comm.together(lambda: (None, join(self._live.replica_digests())), context)
            self._live.compare(*zip(*map(split, answers)))
        self.messages = self._live.messages

    def plan(self, prefix: str | None, writers: Sequence[int]) -> None:
        """Choose the tensors as ``publish`` does, and find out which parts this rank writes; all choose the same.

        ``writers``: the ranks that share the work where several could do it, which are on the engine's machine.
        ValidationError: the statements do not fit, or a segment cannot hold a tensor.
        """
        start = f"{prefix}." if prefix else ""
        self._chosen: Chosen = choose_tensors(self._live.catalog, self._aoa_config, start, False)
        infos = self._chosen.infos
        self.file: TensorFile = one_file(infos)
        self.keys, self.left_out = len(infos), self._chosen.left_out
        sizes = np.asarray([infos[name].nbytes for name in self.file.names], dtype=np.int64)
        self._begins = len(self.file.header) + np.cumsum(sizes) - sizes
        middle = np.cumsum(sizes) - sizes // 2
        turn = np.minimum(middle * len(writers) // max(int(sizes.sum()), 1), len(writers) - 1)
        targets = self._targets(np.asarray(writers, dtype=np.int32)[turn])
        maps = None if self._chosen.mapping is None else self._chosen.mapping.maps
        matcher = self._live.matcher()
        pieces = matcher.match(targets, maps=maps)
        filled = np.zeros(len(targets), dtype=np.int64)
        np.add.at(filled, pieces.target, pieces.size)
        whole = filled == targets.size
        mine = matcher.source.rank[pieces.source] == self._comm.rank
        self._pieces: Pieces = pieces.take(whole[pieces.target] & mine & (pieces.size > 0))
        self._rows = {name: row for row, name in enumerate(self.file.names)}
        self._dtypes = [dtype_of(infos[name].dtype).numpy for name in self.file.names]
        # By rank, the bands of computed tensors that it makes at a time.
        left = {rank: np.flatnonzero(~whole & (targets.rank == rank)).tolist() for rank in writers}
        names = self.file.names
        computed = {rank: list(batches_of([names[row] for row in rows], infos)) for rank, rows in left.items()}
        self._batches = computed.get(self._comm.rank, [])
        self._steps = max(map(len, computed.values()))

    def _targets(self, rank: np.ndarray) -> Catalog:
        """Return all tensors, in the order of the file, each with a rank."""
        builder = CatalogBuilder(0)
        for name in self.file.names:
            info = self._chosen.infos[name]
            builder.add(self._chosen.keys[name], info.dtype, info.shape, (0,) * len(info.shape), info.shape)
        return replace(builder.build(), rank=rank)

    def is_unchanged(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether a model is made of the same tensors in the same memory. This rank alone looks."""
        return self._layout == state_fingerprint(state_dict, same_tensors=False)

    def renew(self) -> bool:
        """Prepare to read new values; return whether the plan still holds. One collective, if there are replicas."""
        return self._live.renew()

    def write(self, sink: Sink, leads: bool) -> int:
        """Write all parts, and finish; return the bytes that this rank wrote; one leads, and writes the header.

        Collective: CheckpointError on every rank if one could not write.
        """

        def first() -> tuple[int, bytes]:
            if leads:
                sink.write(bytes_region(0, len(self.file.header)), np.frombuffer(self.file.header, np.uint8))
            try:
                written = self._write_pieces(sink)
            except OverflowingCastError as error:
                raise error.of_key(self.file.names[error.row]) from None
            if not self._steps:
                sink.finish()
            return written, b""

        written, _ = self._comm.together(first, self._context)
        for step, parts in enumerate(self._computed(), 1):
            send = functools.partial(self._send_all, sink, parts, step == self._steps)
            written += self._comm.together(send, self._context)[0]
        return written

    def parts(self) -> Iterator[Iterable[Part]]:
        """Yield this rank's parts, some at a time. Collective, even if a rank has none."""
        self._live.read_again()
        yield self._parts_of_pieces()
        yield from self._computed()

    def _write_pieces(self, sink: Sink) -> int:
        if not isinstance(sink, LocalSink):
            return self._send(sink, self._parts_of_pieces())
        memory = {row: self._tensor(sink.memory, row) for row in np.unique(self._pieces.target).tolist()}
        copy_pieces(self._pieces, self._live.storage, memory.__getitem__)
        return int((self._pieces.size * self._itemsizes[self._pieces.target]).sum())

    @property
    def _itemsizes(self) -> np.ndarray:
        return np.asarray([dtype.itemsize for dtype in self._dtypes], dtype=np.int64)

    def _tensor(self, memory: np.ndarray, row: int) -> np.ndarray:
        """Return the elements of a tensor in a segment's bytes, flat."""
        begin = int(self._begins[row])
        return memory[begin : begin + self._chosen.infos[self.file.names[row]].nbytes].view(self._dtypes[row])

    def _send_all(self, sink: Sink, parts: Iterable[Part], is_last: bool) -> tuple[int, bytes]:
        written = self._send(sink, parts)
        if is_last:
            sink.finish()
        return written, b""

    def _send(self, sink: Sink, parts: Iterable[Part]) -> int:
        """Write parts one by one; return their bytes."""
        written = 0
        for part in parts:
            row, itemsize = self._rows[part.name], part.values.itemsize
            base, strides = int(self._begins[row]) + part.base * itemsize, tuple(s * itemsize for s in part.strides)
            sink.write(Region(base, part.extents, strides, itemsize), part.values)
            written += part.values.nbytes
        return written

    def _parts_of_pieces(self) -> Iterator[Part]:
        """Yield the parts that this rank has in its memory, at most ``PART_BYTES`` at a time."""
        for piece, row in enumerate(self._pieces.target.tolist()):
            storage, dtype = self._live.storage(int(self._pieces.source[piece])), self._dtypes[row]
            copy, step = self._pieces.copy(piece).in_target_order(), PART_BYTES // dtype.itemsize
            for start in range(0, copy.size, step):
                for part in copy.part(start, min(start + step, copy.size)):
                    values = read_values(storage, part).reshape(part.extents)
                    if values.dtype != dtype or not values.flags.c_contiguous:
                        read, values = values, np.empty(part.extents, dtype=dtype)
                        assign(values, read, row)
                    yield Part(self.file.names[row], part.target_base, part.extents, part.target_strides, values)

    def _computed(self) -> Iterator[Iterable[Part]]:
        """Yield this rank's bands of what statements compute, batch by batch. Collective."""
        for step in range(self._steps):
            batch = self._batches[step] if step < len(self._batches) else []
            memory = WholeTensors(rank=self._comm.rank)
            self._live.fill(functools.partial(self._describe, memory, batch))
            yield map(functools.partial(self._band, memory), range(len(batch)), batch)

    def _describe(self, memory: WholeTensors, batch: list[TensorBox]) -> Targets:
        keys, infos = self._chosen.keys, self._chosen.infos
        wanted = {keys[name]: infos[name] for name, _ in batch}
        return memory.targets(wanted, self._chosen.mapping, [(keys[name], box) for name, box in batch])

    def _band(self, memory: WholeTensors, row: int, band: TensorBox) -> Part:
        name, box = band
        values = memory.take(row)[1].ravel()
        return Part(name, ravel_index(box.offset, self._chosen.infos[name].shape), values.shape, (1,), values)
