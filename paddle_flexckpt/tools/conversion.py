"""Convert a checkpoint of any format that can be read to any that can be written, in bounded memory.

Files are written one after the other, and each is noted when it is durable: an interrupted conversion goes on with the
first file that is not. The commit comes last. Tested in tests/tools/test_conversion.py and
tests/cli/test_convert.py.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt._version import __version__
from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import AoaConfig, TensorInfo, TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, NATURAL, Catalog, Order, ValidationError, dtype_of, may_be_fused
from paddle_flexckpt.catalog.dtypes import is_float
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Backend, Location, publish
from paddle_flexckpt.media.opening import open_destination
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.observers import observed
from paddle_flexckpt.optimizer_states import is_counter
from paddle_flexckpt.planning.meshes import Mesh
from paddle_flexckpt.progress import Meter
from paddle_flexckpt.report import Report, copied_files
from paddle_flexckpt.tools.companion_files import find_companions
from paddle_flexckpt.tools.conversion_content import Content, ConversionTarget, notes_of, read_config
from paddle_flexckpt.tools.conversion_notes import ConversionNotes
from paddle_flexckpt.tools.conversion_targets import TARGETS
from paddle_flexckpt.tools.models import read_strategy
from paddle_flexckpt.tools.tensor_files import choose_tensors
from paddle_flexckpt.tools.whole_tensors import AS_STORED, PartReader, WholeTensors, compare_head, split_box
from paddle_flexckpt.transfer.codes import Codes
from paddle_flexckpt.transfer.files import CONFIG_FILE, read_settings, settings_of
from paddle_flexckpt.transfer.names import is_state
from paddle_flexckpt.transfer.options import ALONE, FileOptions, OutputOptions, WholeOptions, takes
from paddle_flexckpt.transfer.targets import Targets

MEMORY_BYTES = 256 << 20
# The least memory: bands, and the rest for operands of a tile and buffers of reader and writer.
LEAST_MEMORY = 128 << 20
# A band takes a quarter of the memory: one is written while the next is read, and half is for tiles and buffers.
_BAND_SHARE = 4
# Options that are not in the digest, as they do not change the written files.
_NOT_IN_DIGEST = ("verify", "use_replicas", "memory_bytes", "restart", "unique_id", "config", "progress")


@dataclass(frozen=True)
class ConvertOptions(OutputOptions, WholeOptions):
    """The options of a conversion.

    Attributes:
        format: The format to write, a key of :data:`~paddle_flexckpt.tools.conversion_targets.TARGETS`.
        strategy: The layout, such as ``"tp=2,pp=2"``, or a mesh or its file, as of :func:`~.models.read_strategy`: the
            files are those that the ranks of that job would have saved. None: whole tensors.
        cuts: Globs of names and the axis along which tensor parallelism cuts these, or None; by default as they were
            cut at the save.
        states: Whether optimizer states and a run's extra state are written; None: if the format can hold them.
        dtype: New type of floating-point tensors, optimizer states excepted. None: all keep their types.
        config: Path of the model's configuration, which becomes ``config.json``; by default that of the source's
            directory, if there is one.
        save_replicas: In Paddle's format, whether each rank's file has all shards of the rank, replicas included: then
            Paddle's own loader sends nothing if the layout is the same.
        memory_bytes: The most memory to use, about.
        restart: Whether to remove the files of an earlier, unfinished conversion.
    """

    format: str = "native"
    strategy: str | None = None
    cuts: Sequence[tuple[str, int | None]] = ()
    states: bool | None = None
    dtype: str | None = None
    config: str | os.PathLike[str] | None = None
    save_replicas: bool = False
    memory_bytes: int = MEMORY_BYTES
    restart: bool = False

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        problems = []
        if self.format not in TARGETS:
            problems.append(f"format is one of {', '.join(TARGETS)}; got {self.format!r}")
        elif self.strategy is not None and not TARGETS[self.format].has_layout:
            cut = [name for name, target in TARGETS.items() if target.has_layout]
            problems.append(
                f"{self.format} has whole tensors, which no strategy cuts; got strategy={self.strategy!r}. "
                f"Remedy (FC101): leave it out, or write {' or '.join(cut)}"
            )
        elif self.save_replicas and not TARGETS[self.format].has_replicas:
            with_replicas = [name for name, target in TARGETS.items() if target.has_replicas]
            problems.append(f"save_replicas is for {' or '.join(with_replicas)}; got format={self.format!r}")
        elif self.save_replicas and self.strategy is None:
            problems.append(
                "whole tensors have no replicas; save_replicas needs a strategy. Remedy (FC101): leave it out"
            )
        if self.memory_bytes < LEAST_MEMORY:
            least = format_bytes(LEAST_MEMORY)
            problems.append(f"memory_bytes has to be an integer of at least {least}; got {self.memory_bytes!r}")
        if self.dtype is not None and not is_float(dtype_of(self.dtype).name):
            problems.append(f"dtype is a floating-point type, which floating-point tensors get; got {self.dtype!r}")
        if problems:
            raise ValidationError(problems)


@dataclass(frozen=True)
class ConvertReport(Report):
    """The report of a conversion.

    Attributes:
        source: The checkpoint that was read.
        origin: Its format: ``native``, or a key of :data:`~paddle_flexckpt.foreign.formats.FORMATS`.
        unique_id: Its id.
        output: The directory written to.
        format: The format written.
        strategy: The layout, or None.
        files: Names of the files of tensors.
        kept_files: Those that an earlier process had written.
        keys: Number of tensors written.
        left_out: Number of optimizer states and tensors of extra state that were left out.
        total_bytes: Bytes of tensors in the files.
        bytes_written: Bytes of these that this process has written.
        bytes_read: Bytes of tensors read.
        bytes_verified: Bytes of these whose checksums were compared.
        bytes_extra: Bytes of these that no tensor needed.
        cast: Number of tensors whose type was changed.
        maybe_fused: Keys that may be fused without a record of it in the source: written in their stored order.
        replicas_used: By key, the damage, and the rank and file of the replica that was read instead.
        copied: Names of the files beside the tensors that were copied, such as ``config.json`` and a tokenizer's.
        notes: Assumptions, and files that were not copied.
        seconds: Wall time; ``total`` is all of it.
    """

    source: str
    origin: str
    unique_id: int
    output: str
    format: str
    strategy: str | None
    files: list[str]
    kept_files: list[str]
    keys: int
    left_out: int
    total_bytes: int
    bytes_written: int
    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    cast: int = 0
    maybe_fused: list[str] = field(default_factory=list)
    replicas_used: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        layout = f" for {self.strategy}" if self.strategy else ""
        text = (
            f"converted {self.keys} tensors of {self.source} (id {self.unique_id}, {self.origin}) to {self.format}"
            f"{layout}: {files} in {self.output}, {format_bytes(self.total_bytes)}, {self.seconds['total']:.2f} s"
        )
        if self.kept_files:
            text += f"; {len(self.kept_files)} of the files had been written before"
        if self.left_out:
            text += f"; {self.left_out} states left out"
        if self.cast:
            text += f"; {self.cast} tensors cast"
        return text + copied_files(self.copied, self.notes)


@takes(ConvertOptions, path=ALONE, output=ALONE)
@observed("convert", "path")
def convert_checkpoint(
    path: Location, output: Location, aoa_config: AoaConfig | None = None, **options: Any
) -> ConvertReport:
    """Convert a checkpoint to another format or layout.

    ::

        fc.convert_checkpoint("run/shards", "converted", aoa_config=["weight^T -> w"], states=False)
        fc.convert_checkpoint("run/shards", "hf", format="huggingface", states=False)

    One process converts, without Paddle. An interrupted conversion leaves its files, and the same call goes on with it.
    The destination becomes a checkpoint only at the end.

    Fused parameters that statements do not touch get natural order.

    Args:
        path: The checkpoint: a path, a URL, or what ``open_storage`` gives; or a file that is one.
        output: The destination, likewise: a directory that is empty, is not there yet, or has the files of an earlier
            call with the same arguments.
        **options: Like ``aoa_config``, of :class:`ConvertOptions`.

    Returns:
        The report.

    Raises:
        ValidationError: There is no such checkpoint, the output is in use, the statements do not fit, or the format
            cannot hold a tensor; nothing was written.
        CorruptCheckpointError: The checkpoint is damaged.
        CheckpointError: Another process writes there.
        OSError: The file system refused.
    """
    begin = time.perf_counter()
    asked = ConvertOptions(aoa_config=aoa_config, **options)
    asked.check()
    sink, directory = open_destination(output), SourceDirectory(path)
    with LockedManifest(directory, asked.unique_id) as manifest:
        return _Conversion(directory, manifest, sink, asked).run(begin)


class _Conversion:
    """One conversion, planned and then run."""

    def __init__(self, directory: SourceDirectory, manifest: Manifest, sink: Backend, options: ConvertOptions) -> None:
        """Plan all of it; touch nothing."""
        strategy = None if options.strategy is None else read_strategy(options.strategy)
        if isinstance(strategy, Mesh):  # the contents of a file are part of the digest
            options = replace(options, strategy=str(strategy))
        self._directory, self._manifest, self._sink, self._options = directory, manifest, sink, options
        catalog, target = manifest.catalog, TARGETS[options.format]
        states = target.states if options.states is None else options.states
        self._config = read_config(options.config, directory)
        chosen = choose_tensors(
            catalog,
            compare_head(options.aoa_config, directory.backend, manifest),
            options.start,
            states,
            target.by_safetensors,
            settings=lambda: settings_of(self._config),
        )
        self._chosen, self._keys, self._mapping = chosen, chosen.keys, chosen.mapping
        codes = Codes(catalog, self._mapping, lambda: read_settings(directory))
        scales = {scale for key in chosen.keys.values() for scale in codes.scales(key)}
        uncast = {name for name, key in chosen.keys.items() if key in scales}
        self._infos = chosen.infos if options.dtype is None else _cast(chosen.infos, options.dtype, uncast)
        problems = [codes.problem(key, self._infos[name].dtype) for name, key in chosen.keys.items()]
        if any(problems):
            raise ValidationError([problem for problem in problems if problem is not None])
        self._companions = find_companions(directory.backend, catalog.files, not directory.is_file)
        self._digest = self._make_digest()
        content = Content(
            infos=self._infos,
            orders=_orders(self._keys, catalog, self._mapping, codes),
            stored=_stored(self._keys, catalog, self._mapping),
            token=self._digest,
            step=manifest.step,
            strategy=strategy,
            cuts=options.cuts,
            max_file_bytes=options.max_file_bytes,
            save_replicas=options.save_replicas,
        )
        self._target: ConversionTarget = target(sink, content)
        self._notes = notes_of(self._config, options.dtype, codes.are_dequantized, content)

    def _make_digest(self) -> str:
        """Return a digest of source, options and configuration."""
        backend, manifest = self._directory.backend, self._manifest
        agreed = {name: value for name, value in self._options.agreed().items() if name not in _NOT_IN_DIGEST}
        times = []
        if manifest.foreign and backend.has_path:  # whose files have no checksums
            times = [os.stat(backend.where(name)).st_mtime_ns for name in manifest.catalog.files]
        details = [__version__, agreed, xxhash.xxh3_128_hexdigest(manifest.encode()), times, self._companions.copied]
        text = json.dumps(details, sort_keys=True, default=repr).encode()
        return xxhash.xxh3_128_hexdigest(text + (self._config or b""))

    def run(self, begin: float) -> ConvertReport:
        """Write the missing files, then commit."""
        target, sink, notes = self._target, self._sink, ConversionNotes(self._sink, self._digest)
        sink.make_directory()
        with sink.locks.take():
            own = [CONFIG_FILE] if self._config is not None else []
            notes.begin([*target.names(), *own, *self._companions.copied], self._options.restart)
            files, done = target.files, dict[str, Any]()
            records: dict[int, bytes] = {}
            kept = [file.name for file in files]
            if not target.is_committed():
                if self._config is not None:
                    publish(sink, CONFIG_FILE, self._config)
                self._companions.copy(self._directory.backend, sink)
                target.begin()
                for number, file in enumerate(files):
                    record = notes.read(file.name)
                    if record is not None and target.holds(number, record):
                        records[number] = record
                kept = [files[number].name for number in records]
                done = self._write([number for number in range(len(files)) if number not in records], records, notes)
            target.commit([records[number] for number in sorted(records)])
            notes.end()
        total = sum(file.data_bytes for file in target.files)
        return ConvertReport(
            source=self._directory.path,
            origin=self._manifest.origin,
            unique_id=self._manifest.unique_id,
            output=sink.path,
            format=self._options.format,
            strategy=self._options.strategy,
            files=[file.name for file in target.files],
            kept_files=kept,
            keys=len(self._infos),
            left_out=self._chosen.left_out,
            total_bytes=total,
            bytes_written=total - sum(file.data_bytes for file in target.files if file.name in kept),
            cast=sum(info.dtype != self._chosen.infos[name].dtype for name, info in self._infos.items()),
            copied=[*own, *self._companions.copied],
            notes=[*target.notes, *self._notes, *self._companions.notes()],
            seconds={"total": time.perf_counter() - begin},
            **done,
        )

    def _write(self, numbers: Sequence[int], records: dict[int, bytes], notes: ConversionNotes) -> dict[str, Any]:
        """Write files, and note each; return the report's fields about reads."""
        files = [self._target.files[number] for number in numbers]
        meter = self._options.meter("write", sum(file.data_bytes for file in files), len(files))
        parts = [[(self._keys[name], band) for name, box in f.parts for band in self._bands(name, box)] for f in files]
        infos = {self._keys[name]: info for name, info in self._infos.items()}

        def describe(memory: WholeTensors) -> Targets:
            return memory.targets(infos, self._mapping, list(itertools.chain(*parts)), is_cut=True)

        options = FileOptions(**self._options.keywords(FileOptions))
        casting = replace(AS_STORED, dtype="raise" if self._options.dtype is None else "cast")
        with PartReader(self._directory.backend, self._manifest, options, describe, casting) as reader:
            arrays = reader.arrays()
            for number, file, its_parts in zip(numbers, files, parts):
                data = itertools.islice(arrays, len(its_parts))
                records[number] = self._target.write(number, _metered(data, meter))
                notes.note(file.name, records[number])
                meter.add(0, 1)
            next(arrays, None)  # the end of what fills them
            meter.finish()
        reader.warn()
        done = reader.report()
        del done["peak_scratch_bytes"]
        return done

    def _bands(self, name: str, box: Box) -> Iterator[Box]:
        """Yield the boxes of a part that are in memory at a time."""
        # The type that is read may be wider than the type that is written.
        itemsize = max(dtype_of(infos[name].dtype).itemsize for infos in (self._infos, self._chosen.infos))
        return split_box(box, itemsize, self._options.memory_bytes // _BAND_SHARE)


def _metered(arrays: Iterable[np.ndarray], meter: Meter) -> Iterator[np.ndarray]:
    """Yield arrays, and count each after it is written."""
    for array in arrays:
        nbytes = array.nbytes
        yield array
        del array
        meter.add(nbytes)


def _cast(infos: Mapping[str, TensorInfo], dtype: str, uncast: Collection[str]) -> dict[str, TensorInfo]:
    """Return the same with another type for floating-point weights, but not for states, counters and ``uncast``."""
    name, everything = dtype_of(dtype).name, set(infos)

    def is_cast(key: str) -> bool:
        return not (key in uncast or key.startswith(EXTRA_STATE) or is_counter(key) or is_state(key, everything))

    return {
        key: replace(info, dtype=name) if is_float(info.dtype) and is_cast(key) else info for key, info in infos.items()
    }


def _copied(keys: Mapping[str, str], mapping: TensorMapping | None) -> dict[str, str]:
    """Map each written name to the source key whose tensor it copies unchanged; leave out other names."""
    if mapping is None:
        return dict(keys)
    copied = mapping.copied_keys(keys.values())
    untouched = {key for key in keys.values() if key not in mapping.tensors}
    return {name: copied.get(key, key) for name, key in keys.items() if key in copied or key in untouched}


def _orders(keys: Mapping[str, str], source: Catalog, mapping: TensorMapping | None, codes: Codes) -> dict[str, Order]:
    """Return the order of elements of each written tensor, by name; tensors of unknown order are left out."""
    known = {key: source.order(number) for number, key in enumerate(source.keys)}
    uncertain = {source.keys[number] for number in np.flatnonzero(may_be_fused(source)).tolist()}
    copied, orders = _copied(keys, mapping), {}
    for name, key in keys.items():
        before = known.get(copied.get(name, key))
        if codes.are_foreign(key):
            continue
        if name not in copied:
            # Statements made it, or brought it into natural order.
            orders[name] = replace(before, parts=1) if before is not None and before.is_permuted else NATURAL
        elif before is not None:
            orders[name] = before
        elif copied[name] not in uncertain:
            orders[name] = NATURAL
    return orders


def _stored(keys: Mapping[str, str], source: Catalog, mapping: TensorMapping | None) -> Catalog:
    """Return the source's shards of tensors that are written unchanged, under their new names."""
    names = {key: name for name, key in _copied(keys, mapping).items()}
    chosen = np.asarray([key in names for key in source.keys], dtype=bool)
    unchanged = source.take(chosen[source.key]).compact()
    known = {names[key]: details for key, details in source.state_names.items() if key in names}
    return replace(unchanged, keys=tuple(names[key] for key in unchanged.keys), state_names=known)
