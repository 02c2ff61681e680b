"""publish: live shards as Hugging Face files of whole tensors, written by all ranks at once, committed last.

Tested in tests/live/test_publishing.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import TensorInfo, TensorMapping
from paddle_flexckpt.catalog import Catalog, CheckpointError, LostRankError, ValidationError, dtype_of
from paddle_flexckpt.engine.agreement import check_coordinator
from paddle_flexckpt.engine.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.engine.options import GROUP, SHARDS, ProgressOptions, StatementOptions, rule, takes
from paddle_flexckpt.engine.plan import split_tiles
from paddle_flexckpt.engine.targets import Targets
from paddle_flexckpt.engine.tensor_files import TensorFile, choose_tensors, divide_evenly, index_file, make_index
from paddle_flexckpt.engine.transfer import quiet_loads
from paddle_flexckpt.engine.whole_tensors import WholeTensors
from paddle_flexckpt.foreign.formats import open_destination, shown
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from paddle_flexckpt.live.peers import ReshardOptions
from paddle_flexckpt.live.resharder import GatheredState
from paddle_flexckpt.media.backend import Backend, Location, OutputFile, exists
from paddle_flexckpt.media.backend import publish as publish_file
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

    def gather(said: Callable[[], tuple[bytes, ...]], context: str) -> _LiveModel:
        state = GatheredState(comm, lambda: describe() if callable(describe) else model, said, context)
        return _LiveModel(state, asked)

    with quiet_loads(), Publication(comm, output, asked, "publish") as publication:
        publication.agree(gather)
        publication.write()
        return publication.report(begin)


class ModelState(Protocol):
    """Say where the tensors of a model come from.

    Attributes:
        catalog: The shards of all sources.
        said: What ranks told each other when it was described.
    """

    catalog: Catalog
    said: list[tuple[bytes, ...]]

    def fill(self, describe: Callable[[], Targets], first: bool) -> int:
        """Fill targets of all ranks, for the first time or again; return the bytes that this rank lacked.

        Errors are the same on every rank.
        """
        ...


class _LiveModel:
    """Give tensors of all ranks' memory."""

    def __init__(self, state: GatheredState, options: PublishOptions) -> None:
        self._state, self._options = state, options
        self.catalog, self.said = state.catalog, state.said

    def fill(self, describe: Callable[[], Targets], first: bool) -> int:
        options = ReshardOptions(
            coordinator_rank=self._options.coordinator_rank,
            offload=self._options.offload,
            check_replicas=self._options.check_replicas and first,  # they are compared once
            optimizer_states="ignore",
        )
        return self._state.fill(describe, options, "publish").bytes_received


class Publication:
    """Write a model's files by all ranks. Leaving the context by an error removes what this rank has written.

    But where the model may be there, and this rank cannot know that it is not, its files stay: they may be part of it.
    """

    _sink: Backend
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
        self._comm, self._output, self._options, self._call = comm, output, options, call
        self._file_prefix, self._skips = file_prefix, skips
        self._context = f"{call} cannot write to {shown(output)}"
        self._leads = comm.position == options.coordinator_rank
        self._written: list[str] = []
        self._stream: OutputFile | None = None
        self._made = False
        self._received = 0

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            return
        # What all ranks were told of is known; that a rank has gone, or a signal, tells nothing of what was written.
        is_known = isinstance(error, CheckpointError) and not isinstance(error, LostRankError)
        if self._may_be_there and not is_known:
            return
        if self._stream is not None:
            self._stream.abort()
        with contextlib.suppress(OSError):
            for name in reversed(self._written):
                self._sink.remove(name)
            if self._made:
                self._sink.remove_directory()  # the last rank finds it empty

    def agree(self, gather: Callable[[Callable[[], tuple[bytes, ...]], str], ModelState]) -> None:
        """Describe the sources, check them and the output, and divide the tensors among files. Two collectives."""
        comm, options = self._comm, self._options

        def said() -> tuple[bytes, ...]:
            check_coordinator(comm, options.coordinator_rank)
            self._sink = open_destination(self._output)
            if self._sink.names() or self._sink.names("directories"):
                raise ValidationError([f"{self._sink.path} is not empty. Remedy: give another output, or empty it"])
            self._config = options.config_text() if self._leads else None
            return options.encode(self._call), b"" if exists(self._sink) else b"made"

        self._state = gather(said, self._context)
        self._made = self._state.said[0][options.coordinator_rank] == b"made"
        comm.together(self._divide, self._context)

    def _divide(self) -> tuple[None, bytes]:
        """Choose tensors and divide them among files: the same on every rank, as all know all sources."""
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
        self._own = [file for i, file in enumerate(self._files) if i * size // len(self._files) == self._comm.position]
        self._batches = list(self._batches_of(self._own))
        if self._leads:
            self._sink.make_directory()
            if self._config is not None:
                self._write(CONFIG_FILE, self._config)
        return None, b""

    def _batches_of(self, files: list[TensorFile]) -> Iterator[list[tuple[TensorFile, str, Box]]]:
        """Yield what this rank receives and writes at a time, in the order in which it stands in the files."""
        batch: list[tuple[TensorFile, str, Box]] = []
        left = BATCH_BYTES
        for file in files:
            for name in file.names:
                for box, count in _bands(self._infos[name]):
                    if batch and (count > left or batch[-1][1] == name):
                        yield batch
                        batch, left = [], BATCH_BYTES
                    batch.append((file, name, box))
                    left -= count
        if batch:
            yield batch

    def write(self) -> None:
        """Move and write batch by batch, then make the index. As many steps on every rank."""

        def begin() -> tuple[None, bytes]:
            own = self._own
            nbytes, items = sum(file.data_bytes for file in own), sum(len(file.names) for file in own)
            self._meter = self._options.meter("write", nbytes, items)
            return None, str(len(self._batches)).encode()

        _, answers = self._comm.together(begin, self._context)
        for step in range(max(map(int, answers))):
            batch = self._batches[step] if step < len(self._batches) else []
            memory = WholeTensors(rank=self._comm.rank)
            self._move(memory, batch, first=step == 0)
            self._may_be_there = len(self._files) == 1  # which needs no index
            self._on_all(functools.partial(self._store, memory, batch))
        self._on_all(self._sink.sync)
        self._on_all(self._meter.finish)
        self._may_be_there = True
        self._on_all(self._commit)

    def _on_all(self, work: Callable[[], None]) -> None:
        def step() -> tuple[None, bytes]:
            work()
            return None, b""

        self._comm.together(step, self._context)

    def _move(self, memory: WholeTensors, batch: list[tuple[TensorFile, str, Box]], first: bool) -> None:
        key_of = self._keys

        def describe() -> Targets:
            infos = {key_of[name]: self._infos[name] for _, name, _ in batch}
            return memory.targets(infos, self._mapping, {key_of[name]: box for _, name, box in batch})

        self._received += self._state.fill(describe, first)

    def _store(self, memory: WholeTensors, batch: list[tuple[TensorFile, str, Box]]) -> None:
        """Write what a batch has received behind what there is."""
        for row, (file, name, box) in enumerate(batch):
            stream = self._stream or self._begin(file)
            data = memoryview(memory.take(row)[1].ravel().view(np.uint8))
            stream.write(data)
            ends = _ends(box, self._infos[name])
            self._meter.add(data.nbytes, items=int(ends))
            del data  # before the next one is taken
            if name == file.names[-1] and ends:
                stream.finish()
                self._stream = None

    def _begin(self, file: TensorFile) -> OutputFile:
        self._written.append(file.name)
        self._stream = stream = self._sink.create(file.name, "replace", size=file.nbytes)
        stream.write(file.header)
        return stream

    def _commit(self) -> None:
        if not self._leads or len(self._files) == 1:
            return
        index = index_file(self._file_prefix)
        try:
            self._write(index, make_index(self._files))
            self._sink.sync()
        except OSError:
            # Before the other ranks hear of it, and remove what it names.
            self._sink.remove(index)
            raise

    def _write(self, name: str, data: bytes) -> None:
        self._written.append(name)
        publish_file(self._sink, name, data)

    def report(self, begin: float) -> PublishReport:
        """Return what was done."""
        return PublishReport(
            output=self._sink.path,
            files=[file.name for file in self._files],
            keys=len(self._keys),
            left_out=self._left_out,
            total_bytes=sum(file.data_bytes for file in self._files),
            bytes_written=sum(file.data_bytes for file in self._own),
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
