"""publish: live shards as Hugging Face files of whole tensors, written by all ranks at once, committed last.

Tested in tests/live/test_publishing.py.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box, ravel_index
from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CheckpointError, LostRankError, ValidationError, dtype_of
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.engine.agreement import check_coordinator
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import GROUP, SHARDS, ProgressOptions, StatementOptions, rule, takes
from paddle_flexckpt.engine.plan import split_tiles
from paddle_flexckpt.engine.targets import Targets
from paddle_flexckpt.engine.tensor_files import (
    OutputDirectory,
    TensorFile,
    choose_tensors,
    divide_evenly,
    index_file,
    make_index,
)
from paddle_flexckpt.engine.transfer import quiet_loads
from paddle_flexckpt.engine.whole_tensors import WholeTensors
from paddle_flexckpt.foreign.formats import open_destination, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.live_model import LiveModel, ModelState
from paddle_flexckpt.live.owned_pieces import number_machines
from paddle_flexckpt.live.peers import ReshardOptions
from paddle_flexckpt.media.backend import Location, exists, place_of
from paddle_flexckpt.observers import observed
from paddle_flexckpt.report import PublishReport

CONFIG_FILE = "config.json"
_ONE_WRITES_IT = "the coordinator alone writes it"
# What a rank has received and not yet written: as much as an export's band.
BATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class ModelOptions(ProgressOptions, StatementOptions):
    """Hold the options of calls by which all ranks write a model's files.

    Attributes:
        coordinator_rank: The rank, counted within the group, that writes index and configuration.
        config: What ``config.json`` is to hold, or the path of such a file, on the coordinator's machine; None writes
            none.
        prefix: Only keys that start with this and a dot, which are taken off; after the statements.
        max_file_bytes: Bytes of tensors in one file, about; a larger tensor has a file for itself.
    """

    coordinator_rank: int = 0
    config: Mapping[str, Any] | str | os.PathLike[str] | None = field(
        default=None, metadata=rule(own="the coordinator alone writes it")
    )
    prefix: str | None = None
    max_file_bytes: int = 5 << 30

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        if type(self.max_file_bytes) is not int or self.max_file_bytes < 1:
            raise ValidationError([f"max_file_bytes has to be a positive integer; got {self.max_file_bytes!r}"])
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise ValidationError([f"prefix has to be text or None; got {self.prefix!r}"])

    def config_text(self) -> bytes | None:
        """Return the text of ``config.json``.

        Raises:
            ValidationError: There is no such file, or it is not a JSON object.
        """
        if self.config is None:
            return None
        try:
            if isinstance(self.config, Mapping):
                return (json.dumps(dict(self.config), ensure_ascii=False, indent=2) + "\n").encode()
            with open(self.config, "rb") as file:
                text = file.read()
            if not isinstance(json.loads(text), dict):
                raise ValueError("it is not a JSON object")
            return text
        except (OSError, TypeError, ValueError) as error:
            raise ValidationError([f"config cannot be read or written as JSON: {error}"]) from error


@dataclass(frozen=True)
class PublishOptions(ModelOptions):
    """Hold the options of publishing.

    Attributes:
        offload: As in ``reshard_sharded_state_dict``.
        check_replicas: Whether replicas of one shard are compared; without that, one of them is written.
    """

    offload: bool = False
    check_replicas: bool = field(default=True, metadata=rule(choices=(True, False)))


@takes(PublishOptions, model=SHARDS, output="what is compared is the directory that it stands for", process_group=GROUP)
@observed("publish", "output")
def publish(
    model: Any,
    output: Location,
    process_group: Any = None,
    coordinator_rank: int = 0,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> PublishReport:
    """Write a live model as safetensors files of whole tensors, as Hugging Face's libraries read them.

    Every rank of the group calls this. Each writes about as many bytes as any other, and holds at most 128 MiB of them.
    The index comes last (of a single file, the file): until then no reader finds a model there. All ranks have to see
    the directory. Optimizer states and extra state are left out.

    Args:
        model: A layer with ``sharded_state_dict()``, or names to shards (or plain, replicated tensors).
        output: Where the files go, a path, a URL, or what ``open_storage`` gives: a directory that is empty or is not
            there yet.
        process_group: The ranks that take part; all ranks of the job by default.
        **options: Like all other arguments, of :class:`PublishOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: The state is not whole, the output is in use, the statements do not fit, or safetensors cannot
            hold a tensor (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (likewise); what was written is removed.
    """
    begin = time.perf_counter()
    asked = PublishOptions(coordinator_rank=coordinator_rank, aoa_config=aoa_config, **options)
    describe = getattr(model, "sharded_state_dict", None)
    comm = communicator_for(process_group)
    reads = ReshardOptions(
        coordinator_rank=coordinator_rank,
        offload=asked.offload,
        check_replicas=asked.check_replicas,
        optimizer_states="ignore",
    )

    def gather(said: Callable[[], tuple[bytes, ...]], context: str) -> LiveModel:
        return LiveModel(comm, lambda: describe() if callable(describe) else model, said, context, reads)

    with quiet_loads(), Publication(comm, output, asked, "publish") as publication:
        publication.agree(gather)
        publication.write()
        return publication.report(begin)


class Publication:
    """Write a model's files by all ranks. Leaving the context by an error removes what this rank has written.

    But where the model may be there, and this rank cannot know that it is not, its files stay: they may be part of it.
    """

    _output: OutputDirectory
    _may_be_there = False

    def __init__(
        self,
        comm: Communicator,
        output: Location,
        options: ModelOptions,
        call: str,
        *,
        file_prefix: str = "model",
        skips: Sequence[str] | None = None,
    ) -> None:
        """Take the ranks, the directory, the options of the call and its name.

        Args:
            comm: The ranks.
            output: The directory.
            options: Those of the call.
            call: Its name.
            file_prefix: What the names of files start with.
            skips: Leave out keys that end so, and optimizer states only if they do; None: all optimizer states.
        """
        self._comm, self._location, self._options, self._call = comm, output, options, call
        self._file_prefix, self._skips = file_prefix, skips
        self._context = f"{call} cannot write to {shown(output)}"
        self._undo: Callable[[], None] = lambda: None
        self._leads = comm.position == options.coordinator_rank
        self._received = 0
        # The first byte of each tensor in its file.
        self._begin: dict[str, int] = {}

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            return
        # What all ranks were told of is known; that a rank has gone, or a signal, tells nothing of what was written.
        is_known = isinstance(error, CheckpointError) and not isinstance(error, LostRankError)
        if is_known or not self._may_be_there:
            self._undo()

    def agree(self, gather: Callable[[Callable[[], tuple[bytes, ...]], str], ModelState]) -> None:
        """Describe the sources, check them and the output, and divide the tensors among files. Two collectives."""
        comm, options = self._comm, self._options

        def said() -> tuple[bytes, ...]:
            check_coordinator(comm, options.coordinator_rank)
            self._output = OutputDirectory(open_destination(self._location))
            self._undo = self._output.undo
            self._output.check_unused()
            self._config = options.config_text() if self._leads else None
            backend = self._output.backend
            place = place_of(backend).encode() if backend.has_path else b""
            return options.encode(self._call), b"" if exists(backend) else b"made", place

        self._state = gather(said, self._context)
        made, self._places = self._state.said
        self._output.is_made = made[options.coordinator_rank] == b"made"
        _, answers = comm.together(self._divide, self._context)
        names, *told = zip(*map(split, answers))
        unfinished = (name for each in names for name in json.loads(each))
        self._unfinished = dict(zip((file.name for file in self._files), unfinished))
        self._state.compare(*told)

    def _divide(self) -> tuple[None, bytes]:
        """Choose tensors and divide them among files: the same on every rank, as all know all sources. Begin own files.

        Returns:
            The names of this rank's files until they are finished, for ranks of its machine, and of the sources what
            the others have to know.
        """
        catalog, options = self._state.catalog, self._options
        self._mapping: TensorMapping | None = whole_mapping(options.aoa_config, catalog)
        infos = tensor_infos(catalog, self._mapping, extra_state=self._skips is None)
        start = f"{options.prefix}." if options.prefix else ""
        skipped = [key for key in infos if key.endswith(tuple(self._skips or ()))]
        chosen = {key: info for key, info in infos.items() if key not in set(skipped)}
        self._keys, self._left_out = choose_tensors(chosen, start, states=self._skips is not None)
        self._left_out += len(skipped)
        self._infos = {name: infos[key] for name, key in self._keys.items()}
        size = self._comm.size
        self._files = divide_evenly(self._infos, options.max_file_bytes, size, self._file_prefix)
        self._owner = {file.name: i * size // len(self._files) for i, file in enumerate(self._files)}
        self._own = [file for file in self._files if self._owner[file.name] == self._comm.position]
        if self._leads or self._is_shared:
            self._output.backend.make_directory()
        if self._leads and self._config is not None:
            self._output.publish(CONFIG_FILE, self._config)
        names = self._output.begin(self._own) if self._is_shared else [file.name for file in self._own]
        return None, join((json.dumps(names).encode(), *self._state.describe()))

    @property
    def _is_shared(self) -> bool:
        """Return whether this rank's files are such that other ranks of its machine can write parts of them."""
        return bool(self._places[self._comm.position])

    def _batches_of(self, files: list[TensorFile]) -> Iterator[list[tuple[TensorFile, str, Box]]]:
        """Yield what this rank receives and writes at a time, in the order in which it stands in the files."""
        batch: list[tuple[TensorFile, str, Box]] = []
        left = BATCH_BYTES
        for file in files:
            for name in file.names:
                if self._is_owned(name):
                    continue
                for box, count in _bands(self._infos[name]):
                    if batch and (count > left or batch[-1][1] == name):
                        yield batch
                        batch, left = [], BATCH_BYTES
                    batch.append((file, name, box))
                    left -= count
        if batch:
            yield batch

    def write(self) -> None:
        """Write what ranks have themselves, move and write the rest batch by batch, then make the index.

        As many steps on every rank.
        """
        _, answers = self._comm.together(self._write_owned, self._context)
        for step in range(max(map(int, answers))):
            batch = self._batches[step] if step < len(self._batches) else []
            memory = WholeTensors(rank=self._comm.rank)
            self._move(memory, batch)
            # A file that is not shared appears when it is full; a single one needs no index.
            self._may_be_there = len(self._files) == 1 and not all(self._places)
            self._on_all(functools.partial(self._store, memory, batch))
        self._may_be_there = len(self._files) == 1
        self._on_all(self._finish)
        self._may_be_there = True
        self._on_all(self._commit)

    def _write_owned(self) -> tuple[None, bytes]:
        """Write what this rank has of tensors that ranks write from their own memory; return the steps that follow."""
        targets, places = self._locate()
        machine = number_machines(self._comm.ranks, self._places)
        maps = None if self._mapping is None else self._mapping.maps
        owned = self._state.owned_pieces(targets, maps, machine)
        self._written_by_owners = {targets.key_name(row) for row in np.flatnonzero(owned.whole).tolist()}
        self._batches = list(self._batches_of(self._own))
        rest = [self._infos[name] for file in self._own for name in file.names if not self._is_owned(name)]
        self._bytes_written = owned.nbytes + sum(info.nbytes for info in rest)
        self._meter = self._options.meter("write", self._bytes_written, owned.tensors + len(rest))
        owned.write(self._state.storage, places, self._output.backend, self._comm.rank, self._meter)
        return None, str(len(self._batches)).encode()

    def _is_owned(self, name: str) -> bool:
        """Return whether the ranks that have a tensor write it, each what it has."""
        return self._keys[name] in self._written_by_owners

    def _locate(self) -> tuple[Catalog, list[tuple[str, int]]]:
        """Return all tensors in the order in which they stand in the files, and the place of each.

        That is its file's name until it is finished, and its first byte there.
        """
        builder, places, ranks = CatalogBuilder(0), list[tuple[str, int]](), list[int]()
        for file in self._files:
            begin = len(file.header)
            for name in file.names:
                info = self._infos[name]
                builder.add(self._keys[name], info.dtype, info.shape, (0,) * len(info.shape), info.shape)
                places.append((self._unfinished[file.name], begin))
                ranks.append(self._comm.ranks[self._owner[file.name]])
                self._begin[name] = begin
                begin += info.nbytes
        return replace(builder.build(), rank=np.asarray(ranks, dtype=np.int32)), places

    def _on_all(self, work: Callable[[], None]) -> None:
        def step() -> tuple[None, bytes]:
            work()
            return None, b""

        self._comm.together(step, self._context)

    def _move(self, memory: WholeTensors, batch: list[tuple[TensorFile, str, Box]]) -> None:
        key_of = self._keys

        def describe() -> Targets:
            infos = {key_of[name]: self._infos[name] for _, name, _ in batch}
            return memory.targets(infos, self._mapping, {key_of[name]: box for _, name, box in batch})

        self._received += self._state.fill(describe)

    def _store(self, memory: WholeTensors, batch: list[tuple[TensorFile, str, Box]]) -> None:
        """Write what a batch has received: at its place, or in a file that is not shared behind what there is."""
        for row, (file, name, box) in enumerate(batch):
            data = memoryview(memory.take(row)[1].ravel().view(np.uint8))
            info, ends = self._infos[name], _ends(box, self._infos[name])
            if self._is_shared:
                before = ravel_index(box.offset, info.shape) * dtype_of(info.dtype).itemsize
                with self._output.backend.open_parts(self._unfinished[file.name]) as parts:
                    parts.write_at(data, self._begin[name] + before)
            else:
                self._output.open(file).write(data)
            self._meter.add(data.nbytes, items=int(ends))
            del data  # before the next one is taken
            if name == file.names[-1] and ends:
                self._output.finish()

    def _finish(self) -> None:
        """Make this rank's files durable, and let those appear that were shared."""
        self._output.finish_all()
        self._output.backend.sync()
        self._meter.finish()

    def _commit(self) -> None:
        if not self._leads or len(self._files) == 1:
            return
        index = index_file(self._file_prefix)
        try:
            self._output.publish(index, make_index(self._files))
            self._output.backend.sync()
        except OSError:
            # Before the other ranks hear of it, and remove what it names.
            self._output.backend.remove(index)
            raise

    def report(self, begin: float) -> PublishReport:
        """Return what was done."""
        return PublishReport(
            output=self._output.backend.path,
            files=[file.name for file in self._files],
            keys=len(self._keys),
            left_out=self._left_out,
            total_bytes=sum(file.data_bytes for file in self._files),
            bytes_written=self._bytes_written,
            bytes_received=self._received,
            seconds={"total": time.perf_counter() - begin},
        )


def _bands(info: TensorInfo) -> Iterator[tuple[Box, int]]:
    """Yield the boxes in which a tensor is received, in the order of its elements, with their bytes."""
    whole, itemsize = Box((0,) * len(info.shape), info.shape), dtype_of(info.dtype).itemsize
    for box in split_tiles(whole, max(BATCH_BYTES // itemsize, 1)) if whole.size else (whole,):
        yield box, box.size * itemsize


def _ends(box: Box, info: TensorInfo) -> bool:
    """Return whether a box holds the last element of its tensor."""
    return all(offset + size == whole for offset, size, whole in zip(box.offset, box.shape, info.shape))
