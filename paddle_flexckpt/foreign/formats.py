"""Find out which program's checkpoint a directory holds, by its names, and open it for reading or saving.

In this order: a manifest (``{id}.manifest``) is this library's, whatever else the directory has. Of the others there
has to be only one: ``{id}.metadata`` is Paddle's own; ``.metadata`` is that of torch.distributed.checkpoint, or with
``metadata.json`` of Megatron-Core, as are safetensors files ``shard-{n}-model-*``; ``mp_rank_00_model_states.pt`` and
the like are of DeepSpeed; the directories ``model_state``, ``optimizer_state`` and ``master_weight`` with files of
Paddle's in them are a FlexCheckpoint of PaddleFormers; safetensors files of optimizer states, master weights or
adapters are a unified checkpoint of PaddleNLP, and so are weights alone whose files say ``format: np``; other
safetensors files are a Hugging Face directory. Where there is none of these, ``.pdparams`` and ``.pdopt`` are state
dicts of ``paddle.save``, and ``.npz`` is an archive of numpy's.

Tested in tests/foreign/test_huggingface.py and tests/foreign/test_paddleformers_checkpoint.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.marks import (
    INDEX_FILE,
    NPZ_FILE,
    OPTIMIZER_FILE,
    PARAMETERS_FILE,
    TENSOR_FILE,
    has_mark,
    paddle_ids,
)
from paddle_flexckpt.media.backend import Backend, Location, exists, map_files
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.urls import path_of, redacted
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import MANIFEST, lost_ids, save_of

if TYPE_CHECKING:
    from paddle_flexckpt.native.node_directory import NodeDirectory

Origin = Literal[
    "native",
    "paddle",
    "paddleformers",
    "unified_checkpoint",
    "huggingface",
    "paddle_pickle",
    "npz",
    "torch_dcp",
    "megatron",
    "deepspeed",
]
# Their names in errors and reports.
ORIGINS: Mapping[str, str] = MappingProxyType(
    {
        "native": "a checkpoint of this library's",
        "paddle": "a checkpoint of Paddle's own",
        "paddleformers": "a FlexCheckpoint of PaddleFormers",
        "unified_checkpoint": "a unified checkpoint of PaddleNLP",
        "huggingface": "a Hugging Face directory",
        "paddle_pickle": "state dicts of paddle.save",
        "npz": "an npz archive of numpy",
        "torch_dcp": "a checkpoint of torch.distributed.checkpoint",
        "megatron": "a checkpoint of Megatron-Core",
        "deepspeed": "a checkpoint of DeepSpeed",
    }
)
# No save makes a directory of such a name: a load treats such a path as a file.
_FILE_NAMES = (TENSOR_FILE, ".index.json")
# Files that are a source by themselves.
_SOURCES = (TENSOR_FILE, INDEX_FILE, PARAMETERS_FILE, OPTIMIZER_FILE, NPZ_FILE)
# Weights in pickles of tensors, which no reader here supports.
_PICKLES = (".bin", ".pt", ".pth")
# Programs whose checkpoints are not read, names of files by which they are known, and remedies.
_UNREAD = (
    (
        "Orbax",
        re.compile(r"manifest\.ocdbt|_CHECKPOINT_METADATA"),
        "restore it in JAX, and save the arrays by safetensors.flax.save_file or numpy.savez",
    ),
)
_MOST_DIRECTORIES = 20


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

    def list_ids(self) -> list[int]:
        """Return the ids of this library's own checkpoints, in rising order."""
        return [] if self._file else super().list_ids()

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
        # With a manifest here, an id that it lacks can only be one of Paddle's.
        of_paddle = paddle_ids(self.backend)
        found = find_foreign(self.backend, self._file) if not ids or of_paddle else None
        if found is not None and (unique_id is None or found.origin != "paddle" or unique_id in of_paddle):
            return found.read(unique_id)
        raise ValidationError(explain_missing(self.backend, ids, unique_id))

    def origin(self) -> Origin:
        """Return which program's checkpoint is here; errors of :func:`detect_format`."""
        if self.list_ids():
            return "native"
        found = find_foreign(self.backend, self._file)
        if found is None:
            raise ValidationError(explain_missing(self.backend, [], None))
        return found.origin


def detect_format(path: Location) -> Origin:
    """Return which program's checkpoint a directory holds.

    Args:
        path: The directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file or index, or a file of
            ``paddle.save`` or ``numpy.savez``.

    Returns:
        A key of :data:`ORIGINS`.

    Raises:
        ValidationError: There is no checkpoint, or there are several of different programs.
        CorruptCheckpointError: Safetensors files, whose headers identify the program, are damaged.
    """
    return SourceDirectory(path).origin()


def _split_file(location: Location) -> tuple[Backend, str | None]:
    """Return the directory of a location, and the file in it that the location names, if that is a source.

    Raises:
        ValidationError: It is not a location.
    """
    if isinstance(location, Backend):
        return location, None
    path = path_of(location)
    if path.endswith(_SOURCES) and not os.path.isdir(path):
        directory, _, name = path.rpartition("/")
        return open_backend(directory or ("/" if path.startswith("/") else ".")), name
    return open_backend(location), None


def shown(location: object) -> str:
    """Return the text for a location in errors, valid or not: as the caller names it, without secrets."""
    if isinstance(location, Backend):
        return repr(location.path)
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    return repr(redacted(text) if isinstance(text, str) else text)


def open_to_save(location: Location) -> NodeDirectory:
    """Open a directory to save to, with the file for Paddle's own loader; errors of :func:`open_destination`."""
    from paddle_flexckpt.foreign.paddle_metadata import PaddleMetadata
    from paddle_flexckpt.native.node_directory import NodeDirectory

    return NodeDirectory(open_destination(location), PaddleMetadata())


def open_destination(location: Location) -> Backend:
    """Return the directory of a location that is to be written to.

    Raises:
        ValidationError: It is not a location, or has the name of a file and is not a directory.
    """
    backend = open_backend(location)
    if backend.path.rstrip("/").endswith(_FILE_NAMES) and not os.path.isdir(backend.path):
        raise ValidationError(
            f"{backend.path} names a file, and a checkpoint is a directory. Remedy: give the path of a directory"
        )
    return backend


class ForeignSource(NamedTuple):
    """The program that wrote a checkpoint, and the reader of its manifest for an id (None takes the highest)."""

    origin: Origin
    read: Callable[[int | None], Manifest]


def find_foreign(backend: Backend, file: str | None = None) -> ForeignSource | None:
    """Find another program's checkpoint in a directory; None if there is none.

    If a ``file`` is given, everything else is ignored.

    Raises:
        ValidationError: There is more than one candidate; the text has the way to choose.
        CorruptCheckpointError: Safetensors files are damaged.
    """
    if file is not None:
        return _source_of_file(backend, file)
    names = backend.names()
    sources = [
        *_source_of_paddle(backend),
        *_source_of_torch(backend, names),
        *_source_of_deepspeed(backend, names),
        *_source_of_paddleformers(backend),
    ]
    weights: list[str] = []
    if has_mark("safetensors", names):
        from paddle_flexckpt.foreign.dcp_safetensors import find_shard_files, read_shards_manifest
        from paddle_flexckpt.foreign.huggingface import find_weights
        from paddle_flexckpt.foreign.unified_checkpoint import is_unified_checkpoint, read_unified_manifest

        if is_unified_checkpoint(names):
            sources.append(_source_without_ids(backend, "unified_checkpoint", partial(read_unified_manifest, backend)))
        else:
            shards = find_shard_files(names)
            if shards:
                read = partial(read_shards_manifest, backend, shards)
                sources.append(_source_without_ids(backend, "torch_dcp", read))
            # Beside them there may be a consolidated copy of them.
            weights = find_weights(backend.path, sorted(set(names) - set(shards)))
    origins: list[Origin] = [source.origin for source in sources] + (["huggingface"] if weights else [])
    if len(origins) > 1:
        listed = " and ".join(ORIGINS[origin] for origin in origins)
        raise ValidationError(
            f"{backend.path} has more than one checkpoint: {listed}. Remedy: give the path of the directory in it, "
            "or of the safetensors file or index, that is meant; or move the others away"
        )
    if weights:
        return _source_of_weights(backend, *weights)
    return sources[0] if sources else _source_of_arrays(backend, names)


def _source_of_paddle(backend: Backend) -> Iterator[ForeignSource]:
    if paddle_ids(backend):
        from paddle_flexckpt.foreign.paddle_checkpoint import read_paddle_manifest

        yield ForeignSource("paddle", partial(read_paddle_manifest, backend))


def _source_of_torch(backend: Backend, names: Sequence[str]) -> Iterator[ForeignSource]:
    if has_mark("megatron", names):
        from paddle_flexckpt.foreign.megatron import is_megatron, read_megatron_manifest

        if is_megatron(backend, names):
            yield _source_without_ids(backend, "megatron", partial(read_megatron_manifest, backend))
            return
    if has_mark("torch_dcp", names):
        from paddle_flexckpt.foreign.torch_dcp import DCP_METADATA_FILE, read_dcp_manifest

        if DCP_METADATA_FILE in names:
            yield _source_without_ids(backend, "torch_dcp", partial(read_dcp_manifest, backend))


def _source_of_deepspeed(backend: Backend, names: Sequence[str]) -> Iterator[ForeignSource]:
    if has_mark("deepspeed", names):
        from paddle_flexckpt.foreign.deepspeed import is_deepspeed, read_deepspeed_manifest

        if is_deepspeed(names):
            yield _source_without_ids(backend, "deepspeed", partial(read_deepspeed_manifest, backend))


def _source_of_paddleformers(backend: Backend) -> Iterator[ForeignSource]:
    inside = backend.names("directories")
    if has_mark("paddleformers", inside):
        from paddle_flexckpt.foreign.paddle_checkpoint import paddleformers_directories, read_paddleformers_manifest

        directories = paddleformers_directories(backend, inside)
        if directories:
            yield ForeignSource("paddleformers", partial(read_paddleformers_manifest, backend, directories))


def _source_of_file(backend: Backend, file: str) -> ForeignSource:
    if not file.endswith((TENSOR_FILE, INDEX_FILE)) and file not in backend.names():
        raise ValidationError(f"{backend.where(file)}: there is no such file. Remedy: correct the path")
    if file.endswith((PARAMETERS_FILE, OPTIMIZER_FILE)):
        from paddle_flexckpt.foreign.paddle_pickles import read_pickles_manifest

        return _source_without_ids(backend, "paddle_pickle", partial(read_pickles_manifest, backend, [file]))
    if file.endswith(NPZ_FILE):
        from paddle_flexckpt.foreign.npz import read_npz_manifest

        return _source_without_ids(backend, "npz", partial(read_npz_manifest, backend, file))
    return _source_of_weights(backend, file)


def _source_of_arrays(backend: Backend, names: Sequence[str]) -> ForeignSource | None:
    """Return the source where there is no checkpoint: files of ``paddle.save`` or of ``numpy.savez``."""
    pickles: list[str] = []
    if has_mark("paddle_pickle", names):
        from paddle_flexckpt.foreign.paddle_pickles import find_paddle_pickles, read_pickles_manifest

        pickles = find_paddle_pickles(backend.path, names)
    archives = sorted(name for name in names if name.endswith(NPZ_FILE))
    if len(archives) > 1 or (archives and pickles):
        found = [*pickles, *archives]
        raise ValidationError(
            f"{backend.path} has several files of arrays: {listed(found)}. Remedy: give the path of the one that is "
            f"meant, such as {backend.path}/{found[0]}"
        )
    if pickles:
        return _source_without_ids(backend, "paddle_pickle", partial(read_pickles_manifest, backend, pickles))
    return _source_of_file(backend, archives[0]) if archives else None


def _source_of_weights(backend: Backend, *sources: str) -> ForeignSource:
    from paddle_flexckpt.foreign.huggingface import manifest_of_weights, read_weights

    weights = read_weights(backend, *sources)
    of_paddle = any(file.is_of_paddle for file in weights.files.values())
    origin: Origin = "unified_checkpoint" if of_paddle else "huggingface"
    return _source_without_ids(backend, origin, partial(manifest_of_weights, backend, weights, origin))


def _source_without_ids(backend: Backend, origin: Origin, read: Callable[[], Manifest]) -> ForeignSource:
    def checked(unique_id: int | None) -> Manifest:
        if unique_id not in (None, 0):
            raise ValidationError(
                f"{backend.path} is {ORIGINS[origin]}, which has no ids. Remedy: leave unique_id={unique_id} out"
            )
        return read()

    return ForeignSource(origin, checked)


def explain_missing(backend: Backend, ids: Sequence[int], unique_id: int | None) -> str:
    """Explain why a directory, with manifests of ``ids``, has no checkpoint of an id (None: any), and give a remedy."""
    from paddle_flexckpt.foreign.deepspeed import LATEST_FILES
    from paddle_flexckpt.foreign.megatron import LATEST_FILE
    from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA

    path = backend.path
    if not exists(backend):
        if backend.has_path and os.path.exists(path):
            return f"{path} is not a directory. Remedy: give the checkpoint's directory, not a file in it"
        return f"{path} does not exist. Remedy: correct the path"
    names = backend.names()
    begun = sorted({save.unique_id for save in map(save_of, names) if save} - set(ids))
    wanted = begun if unique_id is None else [unique_id] if unique_id in begun else []
    lost = [each for each in lost_ids(names) if each in wanted]
    if lost:
        return (
            f"{path} has the data files of a save (id {', '.join(map(str, lost))}), and neither its manifest nor the "
            f"marker of an unfinished save: it was committed, and its manifest has been lost; complete ids here: "
            f"{ids or 'none'}. Remedy: restore {backend.where(f'{lost[0]}.manifest')} from a copy, or rebuild it: "
            f"flexckpt repair {path} --id {lost[0]}"
        )
    if wanted:
        return (
            f"{path} has an unfinished save (id {', '.join(map(str, wanted))}): its manifest is missing, so it was "
            f"never committed; complete ids here: {ids or 'none'}. Remedy: load another checkpoint"
        )
    if ids:
        return f"{path} has no checkpoint with id {unique_id}; complete ids here: {ids}"
    if any(name.endswith(".metadata") and name != PADDLE_METADATA for name in names):
        return (
            f"{path} is no checkpoint of Paddle's own save_state_dict that can be read: its .metadata files have the "
            f"ids {paddle_ids(backend) or 'none'}. Remedy: give the path and id of a complete save"
        )
    start = f"{path} is not a checkpoint: there is no *.manifest file in it"
    inside = _directories_with_manifests(backend)
    if inside:
        return f"{start}, but in {', '.join(inside)}. Remedy: give the path of that directory"
    if LATEST_FILE in names:
        steps = sorted(name for name in backend.names("directories") if name.startswith("iter_"))
        return f"{start}, but those of Megatron in {listed(steps) or 'none'}. Remedy: give the path of one of them"
    latest = [name for name in LATEST_FILES if name in names]
    if (latest and "zero_to_fp32.py" in names) or "latest_universal" in names:
        steps = sorted(backend.names("directories"))
        return f"{start}, but {latest[0]} of DeepSpeed, and {listed(steps)}. Remedy: give the path of one of them"
    for program, mark, remedy in _UNREAD:
        if any(map(mark.fullmatch, names)):
            return f"{path} is a checkpoint of {program}, which is not read here. Remedy: {remedy}"
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return (
            f"{start}, nor a safetensors file, but {', '.join(pickles[:3])}. Remedy: have their writer save "
            "safetensors files; if there is no model in them, correct the path"
        )
    return f"{start}. Remedy: correct the path"


def _directories_with_manifests(backend: Backend) -> list[str]:
    names = sorted(backend.names("directories"))[:_MOST_DIRECTORIES]
    found = map_files(backend, lambda name: any(map(MANIFEST.fullmatch, backend.child(name).names())), names)
    return [name for name, has in zip(names, found) if has]
