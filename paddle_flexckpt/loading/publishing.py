"""publish: live shards as Hugging Face files of whole tensors, written by all ranks at once, committed last.

Tested in tests/loading/test_publishing.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box, ravel_index
from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CheckpointError, LostRankError, ValidationError, dtype_of
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.live_model import LiveModel, ModelState, number_machines, without_tied_head
from paddle_flexckpt.loading.model_files import ModelFiles
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.media.backend import Location, exists
from paddle_flexckpt.media.opening import open_destination, place_of, shown
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import PublishReport
from paddle_flexckpt.tools.tensor_files import (
    Chosen,
    OutputDirectory,
    TensorFile,
    choose_tensors,
    divide_evenly,
    index_file,
    make_index,
)
from paddle_flexckpt.tools.whole_tensors import TensorBox, WholeTensors, split_box, whole_box
from paddle_flexckpt.transfer.agreement import check_coordinator
from paddle_flexckpt.transfer.files import settings_of
from paddle_flexckpt.transfer.options import (
    GROUP,
    SHARDS,
    OutputOptions,
    ProgressOptions,
    StatementOptions,
    rule,
    takes,
)
from paddle_flexckpt.transfer.targets import Targets
from paddle_flexckpt.transfer.transfer import quiet_loads

CONFIG_FILE = "config.json"
# The bytes that a rank receives at a time, while it writes as much that it has received before.
BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelOptions(OutputOptions, ProgressOptions, StatementOptions):
    """The options of calls by which all ranks write a model's files.

    Attributes:
        coordinator_rank: The rank, counted within the group, that writes index and configuration.
        config: The contents of ``config.json``, or the path of such a file on the coordinator's machine; None writes
            none.
        prefix: Write only keys that start with this and a dot, which are removed; applied after the statements.
    """

    coordinator_rank: int = 0
    config: Mapping[str, Any] | str | os.PathLike[str] | None = field(
        default=None, metadata=rule(may_differ="the coordinator alone writes it")
    )
    prefix: str | None = None

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
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
    """The options of publishing.

    Attributes:
        offload: As in ``reshard_sharded_state_dict``.
        check_replicas: Whether replicas of one shard are compared; if not, one of them is written.
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

    ::

        fc.publish(model, "published")  # model.safetensors, for Hugging Face's libraries

    Every rank of the group calls this, and sees the directory. Ranks of one machine write their shards straight into
    each other's files. Data from elsewhere, or with many short runs in a file, is sent to the rank that owns the file.
    Files are about equally large, and a rank holds at most 128 MiB of the data that it receives. The index comes last
    (of a single file, the file): until then no reader finds a model there. Optimizer and extra states are left out.

    Args:
        model: A layer with ``sharded_state_dict()``, or names to shards (or plain, replicated tensors).
        output: The directory for the files, which is empty or does not exist yet: a path, a URL, or the result of
            ``open_storage``.
        process_group: The ranks that take part; all ranks of the job by default.
        **options: Like all other arguments, of :class:`PublishOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: The state is not whole, the output is in use, the statements do not fit, or safetensors cannot
            hold a tensor (on every rank, with the same text); nothing was written.
        CheckpointError: A rank could not write (on every rank, with the same text); what was written is removed.
        LostRankError: A rank has died. Files of an incomplete model may be left, or the whole model.
    """
    asked = PublishOptions(coordinator_rank=coordinator_rank, aoa_config=aoa_config, **options)
    return publish_as(Publication, model, output, process_group, asked, "publish")


def publish_as(
    kind: Callable[..., Publication], model: Any, output: Location, process_group: Any, asked: PublishOptions, call: str
) -> PublishReport:
    """Publish a live model by a kind of publication; arguments and errors as of :func:`publish`."""
    begin = time.perf_counter()
    describe = getattr(model, "sharded_state_dict", None)
    comm = communicator_for(process_group)
    reads = ReshardOptions(
        coordinator_rank=asked.coordinator_rank,
        offload=asked.offload,
        check_replicas=asked.check_replicas,
        optimizer_states="ignore",
    )

    def gather(describe_call: Callable[[], tuple[bytes, ...]], context: str) -> LiveModel:
        def state() -> Any:
            return without_tied_head(describe() if callable(describe) else model, asked.aoa_config)

        return LiveModel(comm, state, describe_call, context, reads)

    with quiet_loads(), kind(comm, output, asked, call) as publication:
        publication.agree(gather)
        publication.write()
        return publication.report(begin)


class Publication:
    """A write of a model's files by all ranks, as a context manager.

    An error in the context removes what this rank has written, unless the model may have been published.
    """

    # Whether ranks write pieces to their places in files that they share.
    writes_in_place = True
    _output: OutputDirectory
    _files: ModelFiles
    # Whether the model may have been published. The coordinator knows; the others do not, when they have written all.
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
        """Take the ranks, the directory, the options of the call and its name."""
        self._comm, self._location, self._options, self._call = comm, output, options, call
        self._file_prefix, self._skips = file_prefix, skips
        self._context = f"{call} cannot write to {shown(output)}"
        self._undo: Callable[[], None] = lambda: None
        self._leads = comm.position == options.coordinator_rank
        self._closing = contextlib.ExitStack()
        self._received = 0

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()
        if kind is None:
            return
        # An agreed failure shows what was written; the loss of a rank, or a signal, does not.
        is_known = isinstance(error, CheckpointError) and not isinstance(error, LostRankError)
        if is_known or not self._may_be_there:
            self._undo()

    def agree(self, gather: Callable[[Callable[[], tuple[bytes, ...]], str], ModelState]) -> None:
        """Describe the sources, and check them and the output. One collective."""
        comm, options = self._comm, self._options

        def describe_call() -> tuple[bytes, ...]:
            check_coordinator(comm, options.coordinator_rank)
            self._output = OutputDirectory(open_destination(self._location))
            self._undo = self._output.undo
            self._output.check_unused()
            self._config = options.config_text() if self._leads else None
            backend = self._output.backend
            place = place_of(backend).encode() if backend.has_path and self.writes_in_place else b""
            return options.encode(self._call), b"" if exists(backend) else b"made", place, os.urandom(8)

        self._state = gather(describe_call, self._context)
        made, self._places, drawn = self._state.messages
        self._output.is_made = made[options.coordinator_rank] == b"made"
        self._token = drawn[options.coordinator_rank].hex()

    def write(self) -> None:
        """Write what ranks have themselves; move and write the rest, batch by batch; let the model appear.

        Two collectives, one more where replicas are compared, and four for each batch.
        """
        comm, state = self._comm, self._state
        if not state.is_compared:
            _, answers = comm.together(self._begin_compared, self._context)
            state.compare(*zip(*map(split, answers)))
        _, answers = comm.together(self._write_owned, self._context)
        steps = max(map(int, answers))
        for step in range(steps):
            batch = self._batches[step] if step < len(self._batches) else []
            memory = WholeTensors(rank=comm.rank)
            self._move(memory, batch)
            # A file with one writer appears when that has written it; a single one needs no index.
            self._may_be_there |= len(self._all_files) == 1 and not self._files.is_shared
            self._on_all(functools.partial(self._store, memory, batch, is_last=step == steps - 1))
        self._look_back()
        self._may_be_there = True
        self._on_all(self._commit)

    def _begin_compared(self) -> tuple[None, bytes]:
        self._begin()
        return None, join(self._state.replica_digests())

    def _begin(self) -> None:
        """Choose tensors, divide them among files, and begin this rank's own files.

        The choice is the same on every rank, as all know all sources.
        """
        comm = self._comm
        self._chosen = self._choose()
        self._keys, self._infos = self._chosen.keys, self._chosen.infos
        all_files = self._all_files = self._divide()
        self._owners = [i * comm.size // len(all_files) for i in range(len(all_files))]
        self._own = [file for file, owner in zip(all_files, self._owners) if owner == comm.position]
        self._files = self._open_files()

    def _open_files(self) -> ModelFiles:
        """Begin this rank's files; ValidationError if the model cannot be written so."""
        if len({bool(place) for place in self._places}) > 1:
            raise ValidationError(
                "some ranks reach the output by a path, and others do not. Remedy (FC502): give the same output on "
                "every rank"
            )
        is_shared = bool(self._places[self._comm.position])
        files = ModelFiles(self._output, self._all_files, self._infos, self._token, is_shared)
        self._closing.callback(files.close)
        if self._leads or is_shared:
            self._output.backend.make_directory()
        if self._leads and self._config is not None:
            self._output.publish(CONFIG_FILE, self._config)
        files.begin(self._own, removes_all=self._leads)
        return files

    def _choose(self) -> Chosen:
        """Return the tensors to write; errors as of :meth:`_begin`."""
        options, has_states = self._options, self._skips is not None
        # The coordinator alone has the configuration; its error is raised on every rank.
        settings = settings_of(self._config)
        start, skips = f"{options.prefix}." if options.prefix else "", self._skips or ()
        rules = self._state.rules(options.aoa_config)
        return choose_tensors(
            self._state.catalog, rules, start, has_states, True, skips, not has_states, lambda: settings
        )

    def _divide(self) -> list[TensorFile]:
        """Return the files for them; the ranks own equal numbers of files, in this order."""
        return divide_evenly(self._infos, self._options.max_file_bytes, self._comm.size, self._file_prefix)

    def _index(self) -> tuple[str, bytes]:
        """Return name and contents of the file that appears last; no name: there is none."""
        if len(self._all_files) == 1:
            return "", b""
        return index_file(self._file_prefix), make_index(self._all_files)

    def _look_back(self) -> None:
        """Look at what all ranks have written, before the model appears. Any number of collectives."""

    def _write_owned(self) -> tuple[None, bytes]:
        """Write this rank's part of the tensors that ranks write from memory; return the number of following steps."""
        if self._state.is_compared:
            self._begin()
        targets, comm, files = self._targets(), self._comm, self._files
        machine = number_machines(comm.ranks, self._places)
        maps = None if self._chosen.mapping is None else self._chosen.mapping.maps
        owned = self._state.owned_pieces(targets, maps, machine)
        rest = {name for name, is_owned in zip(files.names, owned.whole.tolist()) if not is_owned}
        received = [name for file in self._own for name in file.names if name in rest]
        own = [self._infos[name].nbytes for name in received]
        self._batches = list(batches_of(received, self._infos))
        self._bytes_written = owned.nbytes + sum(own)
        self._meter = self._options.meter("write", self._bytes_written, owned.tensors + len(own))
        owned.write(self._state.storage, files, comm.rank, self._meter)
        if not rest:
            self._end_writing()
        return None, str(len(self._batches)).encode()

    def _targets(self) -> Catalog:
        """Return all tensors in the order in which they stand in the files, each with the rank that owns its file."""
        builder, ranks = CatalogBuilder(0), list[int]()
        for file, owner in zip(self._all_files, self._owners):
            ranks += [self._comm.ranks[owner]] * len(file.names)
            for name in file.names:
                info = self._infos[name]
                builder.add(self._keys[name], info.dtype, info.shape, (0,) * len(info.shape), info.shape)
        return replace(builder.build(), rank=np.asarray(ranks, dtype=np.int32))

    def _on_all(self, work: Callable[[], None]) -> None:
        def step() -> tuple[None, bytes]:
            work()
            return None, b""

        self._comm.together(step, self._context)

    def _move(self, memory: WholeTensors, batch: list[TensorBox]) -> None:
        key_of = self._keys

        def describe() -> Targets:
            infos = {key_of[name]: self._infos[name] for name, _ in batch}
            return memory.targets(infos, self._chosen.mapping, [(key_of[name], box) for name, box in batch])

        self._received += self._state.fill(describe)

    def _store(self, memory: WholeTensors, batch: list[TensorBox], is_last: bool) -> None:
        """Have a thread write a received batch while the next one is moved; wait for the one before."""
        files = self._files
        files.wait()
        files.meanwhile(functools.partial(self._write_batch, memory, batch))
        if is_last:
            self._end_writing()

    def _write_batch(self, memory: WholeTensors, batch: list[TensorBox]) -> None:
        for row, (name, box) in enumerate(batch):
            data = memoryview(memory.take(row)[1].ravel().view(np.uint8))
            info = self._infos[name]
            begin = ravel_index(box.offset, info.shape) * dtype_of(info.dtype).itemsize
            self._files.writer(name)(data, begin)
            self._meter.add(data.nbytes, items=int(begin + data.nbytes == info.nbytes))
            del data  # before the next one is received
        self._files.flush()

    def _end_writing(self) -> None:
        """Make durable what this rank has written. From here on the coordinator alone knows if the model appeared."""
        self._files.make_durable()
        self._meter.finish()
        self._may_be_there = self._may_be_there or not self._leads

    def _commit(self) -> None:
        if self._leads:
            self._files.commit(*self._index())

    def report(self, begin: float) -> PublishReport:
        """Return the report."""
        return PublishReport(
            output=self._output.backend.path,
            files=[file.name for file in self._all_files],
            keys=len(self._keys),
            left_out=self._chosen.left_out,
            total_bytes=sum(file.data_bytes for file in self._all_files),
            bytes_written=self._bytes_written,
            bytes_received=self._received,
            seconds={"total": time.perf_counter() - begin},
        )


def batches_of(names: Iterable[str], infos: Mapping[str, TensorInfo]) -> Iterator[list[TensorBox]]:
    """Yield the parts of some tensors that a rank receives at a time, in their order; none has two of one tensor."""
    batch: list[TensorBox] = []
    left = BATCH_BYTES
    for name in names:
        for box, count in _bands(infos[name]):
            if batch and (count > left or batch[-1][0] == name):
                yield batch
                batch, left = [], BATCH_BYTES
            batch.append((name, box))
            left -= count
    if batch:
        yield batch


def _bands(info: TensorInfo) -> Iterator[tuple[Box, int]]:
    """Yield the boxes in which a tensor is received, in the order of its elements, with their bytes."""
    itemsize = dtype_of(info.dtype).itemsize
    for box in split_box(whole_box(info), itemsize, BATCH_BYTES):
        yield box, box.size * itemsize
