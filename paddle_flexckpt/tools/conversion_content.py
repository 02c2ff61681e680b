"""The content of a conversion, for every format: tensors, their layout and files, and the base class of formats.

Tested in tests/tools/test_conversion.py.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import xxhash

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.algebra.flat import flat_range_to_boxes
from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import (
    EXTRA_STATE,
    Catalog,
    CatalogBuilder,
    CorruptCheckpointError,
    Order,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
)
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Backend, publish
from paddle_flexckpt.planning.meshes import Mesh
from paddle_flexckpt.planning.strategy import Strategy
from paddle_flexckpt.tools.companion_files import quantization_notes
from paddle_flexckpt.tools.models import layout_for, model_of, tensor_degree
from paddle_flexckpt.tools.tensor_files import group, write_arrays
from paddle_flexckpt.tools.whole_tensors import TensorBox
from paddle_flexckpt.transfer.files import CONFIG_FILE

# A header of 100 MB, the largest that safetensors allows, can hold more than twice as many.
MOST_TENSORS = 100_000
_READ_BYTES = 4 << 20
_KEY_OR_VALUE = re.compile(r"\.[kv]_proj\.")
_HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads", "n_head")


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a conversion, for every format.

    Attributes:
        infos: Shape and dtype of each tensor by its name.
        orders: The orders of tensors' elements, as far as they are known.
        stored: The source's shards of tensors that are written unchanged, by the same names.
        token: Hexadecimal digits that identify the conversion: its source, options and configuration.
        step: Training step, if it is known.
        strategy: The layout; None: whole tensors.
        cuts: The axes that tensor parallelism cuts, as in :func:`~paddle_flexckpt.tools.models.model_of`.
        max_file_bytes: Bytes of tensors in one file, where they are whole.
        save_replicas: Whether each rank's file has all shards of the rank; else each shard is in one file.
    """

    infos: Mapping[str, TensorInfo]
    orders: Mapping[str, Order]
    stored: Catalog
    token: str
    step: int | None = None
    strategy: Strategy | Mesh | None = None
    cuts: Sequence[tuple[str, int | None]] = ()
    max_file_bytes: int = 5 << 30
    save_replicas: bool = False


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A file of tensors.

    Attributes:
        name: Its name.
        parts: Name and box of each of its parts, in the order of its data.
        data_bytes: Bytes of these.
        nbytes: Bytes of the whole file, where they are known before it is written.
    """

    name: str
    parts: Sequence[TensorBox]
    data_bytes: int
    nbytes: int = 0


class ConversionTarget(ABC):
    """A format: it writes a checkpoint, file by file.

    Unless :meth:`is_committed`, the calls are :meth:`begin`, :meth:`write` for each file for which :meth:`holds` is
    false, and :meth:`commit`. If the process dies, another one makes the same calls with the same content.

    Attributes:
        by_safetensors: Whether its files can hold only what safetensors itself knows.
        states: Whether optimizer states and extra state are written by default.
        has_layout: Whether tensors may be cut.
        has_replicas: Whether it can be asked for replicas.
        files: The files to write.
        notes: Assumptions.
    """

    by_safetensors: ClassVar[bool] = True
    states: ClassVar[bool] = False
    has_layout: ClassVar[bool] = False
    has_replicas: ClassVar[bool] = False
    files: list[PlannedFile]

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan the files; touch nothing."""
        self.sink, self.content = sink, content
        self.notes: list[str] = []

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files that the conversion may write."""

    def begin(self) -> None:  # noqa: B027
        """Write the files that come before the first file of tensors; may be called again."""

    @abstractmethod
    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Write a file, durably, and return a record of it for :meth:`holds` and :meth:`commit`.

        Args:
            number: Which of ``files``.
            data: The elements of its parts in their order, in any number of arrays.
        """

    @abstractmethod
    def holds(self, number: int, record: bytes) -> bool:
        """Return whether a file is there, byte for byte as :meth:`write` wrote it."""

    @abstractmethod
    def is_committed(self) -> bool:
        """Return whether the checkpoint exists: then no file of it may be touched."""

    @abstractmethod
    def commit(self, records: Sequence[bytes]) -> None:
        """Commit the checkpoint, given the records of all files.

        A committed checkpoint gets the files that come after the commit.
        """


class WholeFiles(ConversionTarget):
    """A format whose files are compared as a whole. One more file comes last, and makes them a checkpoint.

    Attributes:
        last: The name of that file.
    """

    last: str

    @abstractmethod
    def last_content(self) -> bytes:
        """Return the content of the last file."""

    @abstractmethod
    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Return all bytes of a file as arrays; arguments as of :meth:`write`."""

    def names(self) -> list[str]:
        """Implement the base class."""
        return [*(file.name for file in self.files), self.last]

    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Implement the base class."""
        file, digest = self.files[number], xxhash.xxh3_128()
        write_arrays(self.sink, file.name, file.nbytes, self.arrays(number, data), digest.update)
        return _record_of(file, digest.hexdigest())

    def holds(self, number: int, record: bytes) -> bool:
        """Implement the base class."""
        file, digest = self.files[number], xxhash.xxh3_128()
        try:
            with self.sink.open(file.name) as stored:
                if stored.size != file.nbytes:
                    return False
                for begin in range(0, file.nbytes, _READ_BYTES):
                    digest.update(stored.read(begin, _READ_BYTES))
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        return record == _record_of(file, digest.hexdigest())

    def is_committed(self) -> bool:
        """Implement the base class."""
        return self.last in self.sink.names()

    def commit(self, records: Sequence[bytes]) -> None:
        """Implement the base class."""
        if not self.is_committed():
            publish(self.sink, self.last, self.last_content())


def _record_of(file: PlannedFile, digest: str) -> bytes:
    """Return the record of a file: its bytes, and their XXH3-128 in hexadecimal."""
    return json.dumps({"bytes": file.nbytes, "xxh3_128": digest}).encode()


def shards_of_ranks(content: Content) -> tuple[Catalog, list[str]]:
    """Return the shards of each rank, replicas included, and notes on what was assumed.

    Without a strategy, each file of whole tensors has a rank of its own.

    Raises:
        ValidationError: The strategy does not fit the model.
    """
    if content.strategy is not None:
        return _cut_rows(content, content.strategy)
    tables = []
    for rank, names in enumerate(group(content.infos, content.max_file_bytes, MOST_TENSORS)):
        tables.append(_whole_rows(rank, {name: content.infos[name] for name in names}))
    return replace(concat(tables).with_orders(content.orders), state_names=content.stored.state_names), []


def _cut_rows(content: Content, strategy: Strategy | Mesh) -> tuple[Catalog, list[str]]:
    """Return the shards of all ranks of a strategy; rank 0 has the tensors that the strategy does not place."""
    infos = content.infos
    # In the order of the source: that of the optimizer's parameters, if ranks saved it.
    order = {name: number for number, name in enumerate(content.stored.keys)}
    names = sorted(infos, key=lambda name: order.get(name, len(order)))
    model = {name: infos[name] for name in names if not name.startswith(EXTRA_STATE)}
    layout, notes = layout_for(strategy, model, content.stored, content.cuts)
    notes = [*notes]
    table = layout.catalogs(range(strategy.ranks))
    first = dict(zip(*(column.tolist() for column in np.unique(table.key, return_index=True))))
    known = np.asarray(
        [
            number in first and name in infos and table.unpadded(first[number], table.global_shape) == infos[name].shape
            for number, name in enumerate(table.keys)
        ],
        dtype=bool,
    )
    table = table.take(known[table.key]).compact()
    dtypes = tuple(dict.fromkeys(info.dtype for info in infos.values()))
    numbers = np.asarray([dtypes.index(infos[name].dtype) for name in table.keys], dtype=np.int16)
    table = replace(table, dtypes=dtypes, dtype=numbers[table.key])
    problems = validate_coverage(table, group_replicas(table)).problems
    if problems:
        raise ValidationError(problems, f"{strategy} does not fit the model")
    rest = {name: infos[name] for name in infos.keys() - set(table.keys)}
    others = sorted(name for name in rest if not name.startswith(EXTRA_STATE))
    if others:
        notes.append(f"rank 0 stores all of {listed(others, 3)}, of which the strategy says nothing")
    tables = [table, _whole_rows(0, dict(sorted(rest.items())))] if rest else [table]
    return replace(concat(tables).with_orders(content.orders), state_names=content.stored.state_names), notes


def _whole_rows(rank: int, infos: Mapping[str, TensorInfo]) -> Catalog:
    builder = CatalogBuilder(rank)
    for name, info in infos.items():
        builder.add(name, info.dtype, info.shape, (0,) * len(info.shape), info.shape)
    return builder.build()


def parts_of(items: Catalog) -> list[TensorBox]:
    """Return name and boxes of items, in the order of their data, without those without elements."""
    parts: list[TensorBox] = []
    lengths = items.byte_length
    for row in range(len(items)):
        name, offset, shape = items.key_name(row), items.unpadded(row, items.offset), items.unpadded(row, items.shape)
        if not lengths[row]:
            continue
        if items.flat_start[row] == NOT_FLATTENED:
            parts.append((name, Box(offset, shape)))
            continue
        boxes = flat_range_to_boxes(shape, int(items.flat_start[row]), int(items.flat_stop[row]))
        parts += [(name, Box(tuple(map(sum, zip(offset, box.offset))), box.shape)) for box in boxes]
    return parts


def read_config(given: str | os.PathLike[str] | None, directory: SourceDirectory) -> bytes | None:
    """Return the text of a model's configuration; None if there is none.

    Args:
        given: The path of a file; None: that in the checkpoint's directory, if there is one.
        directory: The checkpoint's directory.

    Raises:
        ValidationError: It cannot be read, or is no JSON object.
    """
    try:
        if given is not None:
            with open(given, "rb") as file:
                text = file.read()
        elif CONFIG_FILE in directory.backend.names():
            text = directory.backend.read(CONFIG_FILE)
        else:
            return None
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is not a JSON object")
        return text
    except (OSError, ValueError) as error:
        where = given or directory.backend.where(CONFIG_FILE)
        raise ValidationError(
            f"{where} cannot be read as a model's configuration: {error}. Remedy (FC704): correct it, or give another "
            "(config)"
        ) from error


def notes_of(config: bytes | None, dtype: str | None, dequantizes: bool, content: Content) -> list[str]:
    """Return notes on differences between a configuration and the tensors."""
    known: dict[str, Any] = json.loads(config) if config is not None else {}
    return [*_of_dtype(known, dtype), *_of_heads(known, content), *quantization_notes(known, dequantizes)]


def _of_dtype(known: dict[str, Any], dtype: str | None) -> Iterator[str]:
    named = [str(known[name]) for name in ("torch_dtype", "dtype") if name in known]
    if dtype is not None and any(name.rpartition(".")[2] != dtype for name in named):
        yield f"{CONFIG_FILE} was copied as it is, and says {named[0]}; the tensors are {dtype}"


def _of_heads(known: dict[str, Any], content: Content) -> Iterator[str]:
    """Yield a warning where tensor parallelism cuts inside of key and value heads, or of other heads."""
    ranks = 1 if content.strategy is None else tensor_degree(content.strategy)
    name = next((name for name in _HEAD_COUNTS if type(known.get(name)) is int), None)
    if name is None or not known[name] % ranks:
        return
    grouped = [each for each in content.infos if _KEY_OR_VALUE.search(each)]
    cut = sorted(_cut_names(content).intersection(grouped))
    if grouped and not cut:
        return
    warning = (
        f"tp={ranks} cuts inside of heads: {CONFIG_FILE} has {name}={known[name]}, which that does not divide. A load "
        "puts any parts together again; the model's ranks have to hold the same parts, or repeat whole heads"
    )
    if cut:
        warning += (
            f". This cuts {listed(cut, 2)}. Remedy (FC704): where each rank of the model has all key and value heads, "
            "as those of PaddleNLP's Llama, give first --cut '*.k_proj.*=none' --cut '*.v_proj.*=none' (cuts= in "
            "Python); or a degree that divides their number"
        )
    yield warning


def _cut_names(content: Content) -> set[str]:
    """Return the names of the tensors that tensor parallelism cuts; all where a mesh places them one by one."""
    if isinstance(content.strategy, Mesh) and content.strategy.placements:
        return set(content.infos)
    infos = {name: info for name, info in content.infos.items() if not name.startswith(EXTRA_STATE)}
    return {each.name for each in model_of(infos, content.stored, content.cuts).tensors if each.tp_axis is not None}
