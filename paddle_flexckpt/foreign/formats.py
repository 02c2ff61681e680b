"""Find out which program's checkpoint a directory holds, by its names, and open it for reading.

A manifest (``{id}.manifest``) is this library's, whatever else the directory has. Of other programs' checkpoints there
has to be only one. :data:`FORMATS` has a row for each format. A module of this package has the format's
:class:`Reader`, which knows the format's files. docs/format.md lists them.

Tested in tests/foreign/test_huggingface.py, tests/foreign/test_paddleformers_checkpoint.py and
tests/foreign/test_not_found.py.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Backend, Location, exists, map_files
from paddle_flexckpt.media.file_names import path_of
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory, lost_text
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import MANIFEST, lost_ids, marked_by, save_of

TENSOR_FILE, INDEX_FILE = ".safetensors", ".safetensors.index.json"
PARAMETERS_FILE, OPTIMIZER_FILE = ".pdparams", ".pdopt"
# PaddleFormers' names of the inner directories. Only the last of them has keys that another has.
STATE_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")


class Format(NamedTuple):
    """A row of :data:`FORMATS`.

    Attributes:
        title: The format's name in errors and reports.
        reader: The module of this package, and the name of the :class:`Reader` in it.
        marks: Endings of names of files. The reader is imported only where there is one: it takes milliseconds.
        directories: Names of inner directories, which are marks too.
        sources: Endings of names of files that are a checkpoint by themselves.
        hides: Formats to which files of this one look like theirs.
        alone: Whether the format is looked for only where there is no other.
    """

    title: str
    reader: str
    marks: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    alone: bool = False


_SAFETENSORS = (TENSOR_FILE, INDEX_FILE)
_PICKLES = (PARAMETERS_FILE, OPTIMIZER_FILE)
# Other programs' formats, by origin. A format that hides another comes before it.
FORMATS: Mapping[str, Format] = {
    "paddle": Format("a checkpoint of Paddle's own", "paddle_checkpoint:PADDLE", (".metadata",)),
    "megatron": Format(
        "a checkpoint of Megatron-Core",
        "megatron:MEGATRON",
        ("metadata.json", "latest_checkpointed_iteration.txt"),
        hides=("torch_dcp",),
    ),
    "torch_dcp": Format("a checkpoint of torch.distributed.checkpoint", "torch_dcp:TORCH_DCP", (".metadata",)),
    "deepspeed": Format(
        "a checkpoint of DeepSpeed", "deepspeed:DEEPSPEED", ("_states.pt", "latest", "latest_universal")
    ),
    "paddleformers": Format(
        "a FlexCheckpoint of PaddleFormers", "paddle_checkpoint:PADDLEFORMERS", directories=STATE_DIRECTORIES
    ),
    "unified_checkpoint": Format(
        "a unified checkpoint of PaddleNLP",
        "unified_checkpoint:UNIFIED_CHECKPOINT",
        _SAFETENSORS,
        hides=("huggingface",),
    ),
    "huggingface": Format("a Hugging Face directory", "huggingface:HUGGING_FACE", _SAFETENSORS, sources=_SAFETENSORS),
    "paddle_pickle": Format(
        "state dicts of paddle.save", "paddle_pickles:PADDLE_PICKLES", _PICKLES, sources=_PICKLES, alone=True
    ),
    "npz": Format("an npz archive of numpy", "npz:NPZ", (".npz",), sources=(".npz",), alone=True),
}
_ALONE = frozenset(origin for origin, row in FORMATS.items() if row.alone)
_SOURCES = tuple(ending for row in FORMATS.values() for ending in row.sources)
# Weights in pickles of tensors, which no reader here supports.
_TORCH_FILES = (".bin", ".pt", ".pth")
_ORBAX = re.compile(r"manifest\.ocdbt|_CHECKPOINT_METADATA")
_MOST_DIRECTORIES = 20
_MOST_ALIKE = 3
_VERSION = re.compile(r"weight_v\d{6,9}/?$", re.ASCII)


class Listing:
    """The names in a directory in which a checkpoint is looked for.

    Attributes:
        backend: The directory.
        file: The only file that counts, if the caller names one.
        names: Of the files.
    """

    def __init__(self, backend: Backend, file: str | None = None) -> None:
        """List the directory, unless there is a file. ValidationError if the file is missing."""
        self.backend, self.file = backend, file
        self.names: Sequence[str] = backend.names() if file is None else [file]
        # The reader of safetensors files reports one that is missing as damage.
        if file is not None and not file.endswith(_SAFETENSORS) and file not in backend.names():
            raise ValidationError(f"{backend.where(file)}: there is no such file. Remedy (FC301): correct the path")

    @cached_property
    def directories(self) -> Sequence[str]:
        """Return the names of the inner directories."""
        return self.backend.names("directories") if self.file is None else []

    @property
    def no_checkpoint(self) -> str:
        """Return the beginning of an error text."""
        return f"{self.backend.path} is not a checkpoint: there is no *.manifest file in it"

    @cached_property
    def has_manifest(self) -> bool:
        """Return whether there is a checkpoint of this library."""
        return any(map(MANIFEST.fullmatch, self.names))

    @property
    def has_other(self) -> bool:
        """Return whether there may be another program's checkpoint, of a format whose names nothing else has."""
        return any(self.has_mark(row) for row in FORMATS.values() if not row.alone)

    def has_mark(self, row: Format) -> bool:
        """Return whether there may be a checkpoint of a format."""
        if self.file is not None:
            return self.file.endswith(row.sources)
        if any(name.endswith(row.marks) for name in self.names):
            return True
        return bool(row.directories) and any(name in row.directories for name in self.directories)


class ForeignCheckpoint(NamedTuple):
    """Another program's checkpoint in a directory, or several that differ in their ids.

    Attributes:
        origin: The checkpoint's format, a key of :data:`FORMATS`.
        read: Returns the manifest. If there are ids, it takes one: None stands for the highest.
        ids: The ids of the checkpoints in the directory; None if checkpoints of the format have no ids.
    """

    origin: str
    read: Callable[..., Manifest]
    ids: Collection[int] | None = None

    def read_manifest(self, path: str, unique_id: int | None) -> Manifest:
        """Return the manifest for an id; ValidationError if the format has none."""
        if self.ids is not None:
            return self.read(unique_id)
        if unique_id not in (None, 0):
            title = FORMATS[self.origin].title
            raise ValidationError(
                f"{path} is {title}, which has no ids. Remedy (FC101): leave unique_id={unique_id} out"
            )
        return self.read()


def _explain_nothing(listing: Listing) -> str:
    return ""


class Reader(NamedTuple):
    """The functions of a format, in its module.

    Attributes:
        detect: Returns the checkpoint of this format, if there is one. May raise the errors of a load.
        explain: Returns an error text with a remedy where files of the format are there without a checkpoint; or "".
    """

    detect: Callable[[Listing], ForeignCheckpoint | None]
    explain: Callable[[Listing], str] = _explain_nothing


def _reader_of(row: Format) -> Reader:
    module, _, name = row.reader.partition(":")
    reader: Reader = getattr(importlib.import_module(f"paddle_flexckpt.foreign.{module}"), name)
    return reader


class SourceDirectory(CheckpointDirectory):
    """A directory of checkpoints of any program, or one file that is a source by itself.

    Attributes:
        backend: Its files.
        path: What the caller calls it.
    """

    def __init__(self, location: Location) -> None:
        """Open nothing yet; a file that is a source is accepted too. ValidationError if it is not a location."""
        backend, self._file = _split_file(location)
        super().__init__(backend)
        self.path = backend.where(self._file) if self._file else backend.path

    @property
    def is_file(self) -> bool:
        """Return whether it is one file."""
        return bool(self._file)

    def list_ids(self, takes_last: bool = False) -> list[int]:
        """Return the ids of this library's own checkpoints, in rising order; errors as of the base class."""
        return [] if self._file else super().list_ids(takes_last)

    def read_manifest(self, unique_id: int | None = None, keys: Sequence[str] | None = None) -> Manifest:
        """Read the manifest of a checkpoint (None: the highest id), or make one for another program's checkpoint.

        ``keys`` is as for native ones; those of other programs have all rows.

        Raises:
            ValidationError: There is no such checkpoint; the text lists those that exist.
            CorruptCheckpointError: The manifest is damaged, or a file that it names is missing or of another size.
        """
        ids = self.list_ids()
        if ids and unique_id in (None, *ids):
            return super().read_manifest(unique_id, keys)
        # Beside a manifest there may be checkpoints of Paddle's own, which have ids too.
        found = self._find(["paddle"] if ids else FORMATS, ids, unique_id)
        if ids and unique_id not in (found.ids or ()):
            raise ValidationError(_explain_missing(Listing(self.backend), ids, unique_id))
        return found.read_manifest(self.backend.path, unique_id)

    def origin(self) -> str:
        """Return which program's checkpoint is here; errors of :func:`detect_format`."""
        return "native" if self.list_ids() else self._find(FORMATS).origin

    def _find(self, formats: Iterable[str], ids: Sequence[int] = (), unique_id: int | None = None) -> ForeignCheckpoint:
        listing = Listing(self.backend, self._file)
        found = _find_source(listing, formats)
        if found is None:
            raise ValidationError(_explain_missing(listing, ids, unique_id))
        return found


def detect_format(path: Location) -> str:
    """Return which program's checkpoint a directory holds.

    Args:
        path: The directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file or index, or a file of
            ``paddle.save`` or ``numpy.savez``.

    Returns:
        ``"native"``, or a key of :data:`FORMATS`.

    Raises:
        ValidationError: There is no checkpoint, or there are several of different programs.
        CorruptCheckpointError: Safetensors files, whose headers identify the program, are damaged.
    """
    return SourceDirectory(path).origin()


def _split_file(location: Location) -> tuple[Backend, str | None]:
    """Return the directory of a location, and the file in it that the location names, if that is a source."""
    if isinstance(location, Backend):
        return _resolved(location), None
    path = path_of(location)
    if path.endswith(_SOURCES) and not os.path.isdir(path):
        directory, _, name = path.rpartition("/")
        return open_backend(directory or ("/" if path.startswith("/") else ".")), name
    return _resolved(location), None


def _resolved(location: Location) -> Backend:
    """Return a directory; where it has a version of weights as a delta, the files that the version has in full."""
    path = location.path if isinstance(location, Backend) else path_of(location)
    if _VERSION.search(path if "://" in path else os.path.abspath(path)) is None:
        return open_backend(location)
    backend: Backend = importlib.import_module("paddle_flexckpt.foreign.resolved_weights").resolve_version(location)
    return backend


def _find_source(listing: Listing, formats: Iterable[str]) -> ForeignCheckpoint | None:
    """Find another program's checkpoint of one of some formats; None if there is none."""
    found: list[ForeignCheckpoint] = []
    hidden: set[str] = set()
    for origin in formats:
        row = FORMATS[origin]
        if origin in hidden or not listing.has_mark(row):
            continue
        source = _reader_of(row).detect(listing)
        if source is not None:
            found.append(source)
            hidden.update(row.hides if row.alone else (*row.hides, *_ALONE))
    if len(found) > 1:
        raise more_than_one(listing.backend.path, [FORMATS[source.origin].title for source in found])
    return found[0] if found else None


def more_than_one(path: str, candidates: Iterable[str]) -> ValidationError:
    """Return the error of a directory that has several checkpoints, given what each of them is called."""
    return ValidationError(
        f"{path} has more than one checkpoint: {' and '.join(candidates)}. Remedy (FC301): give the path of the "
        "directory in it, or of the file or index, that is meant; or move the others away"
    )


def explain_lacking(backend: Backend) -> str:
    """Return the text about a directory that is not there; or ""."""
    if exists(backend):
        return ""
    path = backend.path
    if backend.has_path and os.path.exists(path):
        return f"{path} is not a directory. Remedy (FC301): give the checkpoint's directory, not a file in it"
    return f"{path} does not exist. Remedy (FC301): correct the path{_beside(path) if backend.has_path else ''}"


def _beside(path: str) -> str:
    """Return the directories beside one that is not there, as the end of a text; or ""."""
    import difflib  # for messages alone

    above, name = os.path.split(path.rstrip("/"))
    try:
        there = sorted(each.name for each in os.scandir(above or ".") if each.is_dir() and each.name[0] != ".")
    except OSError:
        return ""
    alike = difflib.get_close_matches(name, there, _MOST_ALIKE) or there[:_MOST_ALIKE]
    return f"; {above or 'this directory'} has {', '.join(sorted(alike))}" if alike else ""


def _explain_missing(listing: Listing, ids: Sequence[int], unique_id: int | None) -> str:
    """Explain why a directory, with manifests of ``ids``, has no checkpoint of an id (None: any), and give a remedy."""
    backend, path = listing.backend, listing.backend.path
    lacking = explain_lacking(backend)
    if lacking:
        return lacking
    unfinished = _explain_unfinished(listing, ids, unique_id)
    if unfinished:
        return unfinished
    if ids:
        return f"{path} has no checkpoint with id {unique_id}; complete ids here: {ids}"
    names = sorted(listing.directories)[:_MOST_DIRECTORIES]
    below = dict(zip(names, map_files(backend, lambda name: Listing(backend.child(name)), names)))
    inside = [name for name, each in below.items() if each.has_manifest]
    marked = [] if inside else filter(listing.has_mark, FORMATS.values())
    explained = next(filter(None, (_reader_of(row).explain(listing) for row in marked)), "")
    if explained:
        return explained
    inside = inside or [name for name, each in below.items() if each.has_other]
    if inside:
        return f"{listing.no_checkpoint}, but in {', '.join(inside)}. Remedy (FC301): give the path of that directory"
    if any(map(_ORBAX.fullmatch, listing.names)):
        remedy = "restore it in JAX, and save the arrays by safetensors.flax.save_file or numpy.savez"
        return f"{path} is a checkpoint of Orbax, which is not read here. Remedy (FC701): {remedy}"
    pickles = sorted(name for name in listing.names if name.endswith(_TORCH_FILES))
    if pickles:
        return (
            f"{listing.no_checkpoint}, nor a safetensors file, but {', '.join(pickles[:3])}. Remedy (FC301): have "
            "their writer save safetensors files; if there is no model in them, correct the path"
        )
    return f"{listing.no_checkpoint}. Remedy (FC301): correct the path"


def _explain_unfinished(listing: Listing, ids: Sequence[int], unique_id: int | None) -> str:
    """Return the text about a save without a manifest, if there is one of the id; or ""."""
    path, complete = listing.backend.path, ids or "none"
    saves = {*map(save_of, listing.names), *map(marked_by, listing.names)}
    begun = sorted({save.unique_id for save in saves if save} - set(ids))
    wanted = begun if unique_id is None else [unique_id] if unique_id in begun else []
    lost = [each for each in lost_ids(listing.names) if each in wanted]
    if lost:
        return lost_text(listing.backend, lost, ids)
    if wanted:
        return (
            f"{path} has an unfinished save (id {', '.join(map(str, wanted))}): its manifest is missing, so it was "
            f"never committed. It is running, or it died (`flexckpt clean {path}`); complete ids here: {complete}. "
            "Remedy (FC303): load another checkpoint"
        )
    return ""


def not_empty(backend: Backend, place: str) -> ValidationError:
    """Return the error of a directory that is to be new and is not; ``place`` is what the caller calls it."""
    listing = Listing(backend)
    held = next((each for each in listing.directories if Listing(backend.child(each)).has_manifest), None)
    if held or listing.has_manifest or lost_ids(listing.names) or listing.has_other:
        where = f" (in {held})" if held else ""
        return ValidationError(
            [f"{backend.path} has a checkpoint{where}, so it is not empty. Remedy (FC405): give another {place}"]
        )
    return ValidationError([f"{backend.path} is not empty. Remedy (FC405): give another {place}, or empty it"])


@dataclass(frozen=True)
class OtherCheckpoint:
    """A directory with another program's checkpoint.

    Attributes:
        path: The directory.
        title: What it has in it: a title of :data:`FORMATS`, or the text of an error.
    """

    path: str
    title: str


def others_below(backend: Backend, depth: int = 2) -> Iterator[OtherCheckpoint]:
    """Yield the checkpoints of other programs in a directory and so many levels below it, but for those in others."""
    listing = Listing(backend)
    if not listing.has_manifest:
        try:
            found = _find_source(Listing(_resolved(backend)), FORMATS)
            title = FORMATS[found.origin].title if found else ""
        except (ValidationError, CorruptCheckpointError) as error:
            title = str(error)
        if title:
            yield OtherCheckpoint(backend.path, title)
            return
    if depth:
        for name in sorted(listing.directories):
            yield from others_below(backend.child(name), depth - 1)
