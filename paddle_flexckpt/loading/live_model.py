"""Models whose tensors publishing writes: their sources, and the pieces that ranks write from their own memory.

A piece goes to its place in a file that ranks share. This sends nothing. It is for ranks of one machine, which all see
the current contents of a file, and for tensors whose pieces are few long runs in the file: it is cheaper to send many
short runs to one rank, which writes them at once.

Tested in tests/loading/test_owned_pieces.py and tests/loading/test_publishing.py.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps, StridedCopy
from paddle_flexckpt.aoa.placeholders import HEADS
from paddle_flexckpt.aoa.statements import FamilyRules
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.loading.model_files import ModelFiles
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.loading.resharder import GatheredState
from paddle_flexckpt.memory.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, concat_pieces
from paddle_flexckpt.progress import Meter
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.copies import CHUNK_BYTES, AnyStorage, pack_copy
from paddle_flexckpt.transfer.targets import Targets

# Ranks write a tensor themselves if its runs have RUN_BYTES on average, or if there are at most about FEW_RUNS.
RUN_BYTES, FEW_RUNS = 16 << 10, 256
# Another rank may write to a file after about so many bytes.
TURN_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class OwnedPieces:
    """The tensors that ranks write from their own memory, and the pieces of them that this rank writes.

    Attributes:
        targets: Whole tensors, file by file in the order of their bytes, each with the rank whose file has it.
        whole: bool per target, the same on every rank: whether ranks write it from their own memory.
        pieces: This rank's pieces, sorted by target and by place in it.
    """

    targets: Catalog
    whole: np.ndarray
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        """Return how many bytes this rank writes."""
        return int(self._lengths.sum())

    @property
    def tensors(self) -> int:
        """Return the number of tensors that it writes something of."""
        return len(np.unique(self.pieces.target))

    def write(self, storage: Callable[[int], AnyStorage], files: ModelFiles, rank: int, meter: Meter) -> None:
        """Write this rank's pieces, in turns: to its own files first, and then to others, if no other rank does.

        Args:
            storage: Gives this rank's memory of a source.
            files: The files.
            rank: This rank.
            meter: Counts what is written.

        Raises:
            OSError: The medium refused.
        """
        first = int((self.targets.rank < rank).sum())
        left: dict[str, list[int]] = {}
        for piece in np.argsort((self.pieces.target - first) % max(len(self.targets), 1), kind="stable").tolist():
            left.setdefault(files.files[files.names[self.pieces.target[piece]]].name, []).append(piece)
        for pieces in left.values():
            pieces.reverse()
        rows, sources, begins = (p.tolist() for p in (self.pieces.target, self.pieces.source, self.pieces.source_base))
        sizes, straight = self._lengths.tolist(), self.pieces.is_straight.tolist()
        places = (self.pieces.target_base * self.targets.itemsize[self.pieces.target]).tolist()
        while left:
            with files.turn(left) as file:
                nbytes, pieces = 0, left[file]
                while pieces and nbytes < TURN_BYTES:
                    piece = pieces.pop()
                    write, memory = files.writer(files.names[rows[piece]]), storage(sources[piece])
                    if straight[piece] and isinstance(memory, np.ndarray):
                        values = memory[begins[piece] :][: sizes[piece] // memory.itemsize].view(np.uint8)
                        write_runs([values], sizes[piece], [places[piece]], write, meter.add)
                    else:
                        write_piece(self.pieces.copy(piece), memory, write, meter.add)
                    nbytes += sizes[piece]
                    # A tensor's pieces follow each other.
                    meter.add(0, items=int(not pieces or rows[pieces[-1]] != rows[piece]))
            if not pieces:
                del left[file]
                files.flush_meanwhile(file)

    @property
    def _lengths(self) -> np.ndarray:
        """Return int64 per piece, its bytes."""
        return self.pieces.size * self.targets.itemsize[self.pieces.target]


def no_pieces(targets: Catalog) -> OwnedPieces:
    """Return the choice of no tensor."""
    return OwnedPieces(targets, np.zeros(len(targets), dtype=bool), concat_pieces([], targets.width))


def find_owned_pieces(
    matcher: ShardMatcher, targets: Catalog, maps: BoxMaps | None, machine: np.ndarray, rank: int
) -> OwnedPieces:
    """Choose the tensors, the same on every rank.

    Args:
        matcher: Finds the shards of all ranks.
        targets: As of :class:`OwnedPieces`.
        maps: Their sources.
        machine: int64 by rank, as of :func:`number_machines`.
        rank: This rank.
    """
    if (machine < 0).all():
        return no_pieces(targets)
    pieces, source = matcher.match(targets, maps=maps), matcher.source
    here, there = machine[targets.rank[pieces.target]], machine[source.rank[pieces.source]]
    number = np.asarray([targets.dtypes.index(d) if d in targets.dtypes else -1 for d in source.dtypes], dtype=np.int64)
    is_direct = (here == there) & (here >= 0) & (number[source.dtype[pieces.source]] == targets.dtype[pieces.target])
    filled, runs = np.zeros(len(targets), dtype=np.int64), np.zeros(len(targets), dtype=np.int64)
    np.add.at(filled, pieces.target[is_direct], pieces.size[is_direct])
    np.add.at(runs, pieces.target, pieces.target_runs)
    whole = (filled == targets.size) & (runs <= FEW_RUNS + targets.byte_length // RUN_BYTES)
    return OwnedPieces(targets, whole, pieces.take(whole[pieces.target] & (source.rank[pieces.source] == rank)))


def write_piece(
    copy: StridedCopy, storage: AnyStorage, write: Callable[[memoryview, int], None], done: Callable[[int], None]
) -> None:
    """Write one piece, at most a MiB at a time.

    Args:
        copy: From this rank's memory to a tensor.
        storage: That memory.
        write: Takes bytes, and the place of the first of them in the tensor.
        done: Called with how many bytes are written.
    """
    copy, itemsize = copy.in_target_order(), storage.dtype.itemsize
    length, starts = copy.target_runs()
    write_runs(pack_copy(copy, storage), length * itemsize, [start * itemsize for start in starts], write, done)


def write_runs(
    values: Iterable[np.ndarray],
    nbytes: int,
    starts: Sequence[int],
    write: Callable[[memoryview, int], None],
    done: Callable[[int], None],
) -> None:
    """Write runs of ``nbytes`` each to where they start; ``values`` are their bytes, the other arguments as above."""
    run, at = 0, 0
    for array in values:
        left = memoryview(array)
        while len(left):
            part = left[: min(nbytes - at, CHUNK_BYTES)]
            write(part, starts[run] + at)
            done(len(part))
            left, at = left[len(part) :], at + len(part)
            if at == nbytes:
                run, at = run + 1, 0


def number_machines(ranks: Sequence[int], places: Sequence[bytes]) -> np.ndarray:
    """Return int64 by global rank: the same number for ranks that share a file's contents, -1 for one that shares none.

    Args:
        ranks: Global numbers of the members.
        places: By rank, a text that identifies its directory, equal where ranks share the contents; empty: it shares
            none.
    """
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    machine = np.full(max(ranks) + 1, -1, dtype=np.int64)
    machine[list(ranks)] = [numbers[place] if place else -1 for place in places]
    return machine


class ModelState(ABC):
    """The tensors of a model, as publishing needs them. The defaults are those of tensors in files.

    Attributes:
        catalog: The shards of all sources.
        messages: The messages that ranks exchanged when it was described.
        is_compared: Whether replicas have been compared already; the same on every rank.
    """

    catalog: Catalog
    messages: list[tuple[bytes, ...]]
    is_compared = True

    def replica_digests(self) -> tuple[bytes, ...]:
        """Return the message by which the other ranks compare it."""
        return ()

    def compare(self, *answers: Sequence[bytes]) -> None:  # noqa: B027
        """Compare what :meth:`replica_digests` returned on every rank, by field; errors are the same on every rank."""

    def rules(self, aoa_config: Any) -> Any:
        """Return statements; the rules of a family know whether the head has the values of the embedding."""
        return aoa_config

    def owned_pieces(self, targets: Catalog, maps: BoxMaps | None, machine: np.ndarray) -> OwnedPieces:
        """Return the pieces that ranks write from their own memory, as of :func:`find_owned_pieces`."""
        return no_pieces(targets)

    def storage(self, row: int) -> AnyStorage:
        """Return this rank's memory of a row of the catalog."""
        raise RuntimeError("tensors in files are in no rank's memory")

    @abstractmethod
    def fill(self, describe: Callable[[], Targets]) -> int:
        """Fill targets of all ranks; return the bytes that this rank lacked. Errors are the same on every rank."""


def without_tied_head(state: Any, aoa_config: Any) -> Any:
    """Return a state without heads that are another of its tensors, for the rules of a family of tied models."""
    if not (isinstance(aoa_config, FamilyRules) and aoa_config.parameters.get("tied") and isinstance(state, Mapping)):
        return state
    heads = {key for key in state if key.endswith(HEADS)}
    tensors = {id(getattr(state[key], "local_tensor", state[key])) for key in state.keys() - heads}
    tied = {key for key in heads if id(getattr(state[key], "local_tensor", state[key])) in tensors}
    tied |= {key for key in heads if not state.keys().isdisjoint(getattr(state[key], "aliases", ()))}
    return {key: weight for key, weight in state.items() if key not in tied}


class LiveModel(ModelState):
    """A model's tensors in the memory of all ranks."""

    def __init__(
        self,
        comm: Communicator,
        describe: Callable[[], Mapping[str, Any]],
        describe_call: Callable[[], tuple[bytes, ...]],
        context: str,
        options: ReshardOptions,
    ) -> None:
        """Describe the model on all ranks. One collective; arguments and errors as of :class:`GatheredState`."""
        self._rank, self._options = comm.rank, options
        self._state = GatheredState(comm, describe, describe_call, context)
        self.is_compared = not (self._state.checked.groups.count > 1).any()
        self._peers = self._state.peers(options, self._state.checked if self.is_compared else None)
        wait_for_devices(devices_of(self._peers.owned.values()))
        self.catalog, self.messages = self._state.catalog, self._state.messages
        self._storage = functools.cache(self._peers.storage)

    def replica_digests(self) -> tuple[bytes, ...]:
        """Return the digests of this rank's replicas, and how they are to be compared."""
        return self._peers.describe_replicas()

    def compare(self, *answers: Sequence[bytes]) -> None:
        """Compare the replicas; errors as of :meth:`MemoryPeers.compare_replicas`."""
        self._peers.compare_replicas(*answers)

    def storage(self, row: int) -> AnyStorage:
        """Implement :meth:`ModelState.storage`."""
        return self._storage(row)

    def owned_pieces(self, targets: Catalog, maps: BoxMaps | None, machine: np.ndarray) -> OwnedPieces:
        """Implement :meth:`ModelState.owned_pieces`."""
        return find_owned_pieces(self._peers.matcher(), targets, maps, machine, self._rank)

    def fill(self, describe: Callable[[], Targets]) -> int:
        """Implement :meth:`ModelState.fill`."""
        return self._state.fill(describe, self._options, "publish", self._peers.readable).bytes_received

    def matcher(self) -> ShardMatcher:
        """Return the matcher of all ranks' shards; replicas have been compared."""
        return self._peers.matcher()

    def renew(self) -> bool:
        """Prepare to read new values of the same tensors; return whether the same shards may be read as before.

        One collective if there are replicas; errors as of :meth:`compare`.
        """
        self.read_again()
        return self.is_compared or self._peers.set_addresses([])

    def read_again(self) -> None:
        """Forget host copies of strided tensors, which have old values, and wait for devices."""
        self._storage = functools.cache(self._peers.storage)
        wait_for_devices(devices_of(self._peers.owned.values()))
