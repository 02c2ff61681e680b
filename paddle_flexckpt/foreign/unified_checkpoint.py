"""Read unified checkpoints: what PaddleNLP's Trainer writes with ``--unified_checkpoint 1``, under our names.

======================  =============================================  =======================================
what                    files                                          name in the catalog
======================  =============================================  =======================================
weights                 ``model-*`` or ``peft_model-*`` and index      as stored: the model's structured names
optimizer states        ``optimizer-*`` and index: ``{param}/{kind}``  ``{param}.{kind}``
master weights          ``master_weights-*`` and index: ``{param}``    ``{param}.w_0``
======================  =============================================  =======================================

Weights are always whole, and so are the others, whatever the strategy was. With ``ignore_merge_optimizer`` each rank
has written its own states instead, ``optimizer.tp00_pp00_shard00.safetensors``, cut by tensor parallelism; the place of
such a part follows from the shape of the whole parameter and from the file's name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError, group_replicas, validate_coverage
from paddle_flexckpt.foreign.formats import INDEX_FILE, ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.huggingface import (
    MODEL_FILE,
    StoredShard,
    TensorFile,
    TensorIndex,
    Weights,
    find_weights,
    manifest_of_files,
    read_tensor_file,
    read_tensor_index,
    read_weights,
)
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.native.manifest import Manifest

MODEL_INDEX, PEFT_INDEX = "model" + INDEX_FILE, "peft_model" + INDEX_FILE
OPTIMIZER, MASTERS = "optimizer", "master_weights"
_MASTER = ".w_0"
_MERGED = re.compile(r"(optimizer|master_weights|peft_model)-\d+-of-\d+\.safetensors", re.ASCII)
# A rank's own states: their kind, and the rank's place in the strategy.
_SPLIT = re.compile(r"(optimizer|master_weights)(?:\.((?:_?(?:tp|pp|shard|moe)\d+)+))?\.safetensors", re.ASCII)
_COORDINATE = re.compile(r"(tp|pp|shard|moe)(\d+)", re.ASCII)
# Parameters that PaddleNLP does not cut into consecutive parts: each rank has its part of the gate and of up, or of q,
# k and v, side by side. (In Bloom and ChatGLM the last two names are cut plainly; the name alone does not show it.)
_PERMUTED = re.compile(r"gate_up|up_gate|c_attn|query_key_value|h_to_4h", re.ASCII)
_RESUME = "resume once in PaddleNLP under the strategy it was saved under, and save"


class _RankFile(NamedTuple):
    """A file of a rank's states: the place (``tp``, ``pp``, ``shard``, ``moe``) in its name, its number."""

    file: TensorFile
    at: Mapping[str, int]
    rank: int


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    # Weights alone are found by the reader of Hugging Face's directories.
    indices = {OPTIMIZER + INDEX_FILE, MASTERS + INDEX_FILE, PEFT_INDEX}
    if any(name in indices or _MERGED.fullmatch(name) or _SPLIT.fullmatch(name) for name in listing.names):
        return ForeignCheckpoint("unified_checkpoint", partial(read_unified_manifest, listing.backend))
    return None


def read_unified_manifest(backend: Backend) -> Manifest:
    """Read a unified checkpoint as a manifest without checksums.

    Raises:
        CorruptCheckpointError: A file is missing or damaged, or files contradict each other.
        ValidationError: It cannot be read as it is: its optimizer states are quantised, or they are ranks' parts that
            are not consecutive parts of their parameters. The text has a remedy.
    """
    names = set(backend.names())
    models = [read_weights(backend, source) for source in _model_sources(backend, names)]
    shapes = {tensor: _shape(weights, tensor) for weights in models for tensor in weights.file_of}
    optimizer = OPTIMIZER + INDEX_FILE
    index = read_tensor_index(backend, optimizer) if optimizer in names else TensorIndex(None, {}, b"")
    _check_quantisation(backend, index)
    shards = [shard for weights in models for shard in _whole(weights, "{}")]
    read: list[Weights] = list(models)
    ranks: list[_RankFile] = []
    for kind in (OPTIMIZER, MASTERS):
        source = kind + INDEX_FILE
        own = _rank_files(backend, names, kind)
        merged = source in names and (kind != OPTIMIZER or index.files is not None)
        if merged and own:
            raise ValidationError(
                f"{backend.path} has {kind} states of whole tensors ({source}) and of ranks ({own[0].file.name}). "
                "Remedy (FC304): move those away that are not meant"
            )
        if merged:
            weights = read_weights(backend, source)
            read.append(weights)
            shards += _whole(weights, "{}") if kind == OPTIMIZER else _masters(weights, models)
        elif own:
            ranks += own
            shards += _placed(backend, own, shapes, kind)
        elif any(match and match[1] == kind for match in map(_MERGED.fullmatch, names)):
            raise CorruptCheckpointError(f"{backend.where(source)} is missing. Remedy (FC304): restore it")
    if index.settings.get(MASTERS) is True and not any(shard.key.endswith(_MASTER) for shard in shards):
        shards += _masters_as_weights(backend, models)
    files = [*(file for weights in read for file in weights.files.values()), *(own.file for own in ranks)]
    size = max([len(weights.files) for weights in read] + [own.rank + 1 for own in ranks], default=1)
    digests = [index.digest, *(weights.digest for weights in read)]
    manifest = manifest_of_files(backend, shards, files, digests, "unified_checkpoint", size)
    if ranks:
        problems = validate_coverage(manifest.catalog, group_replicas(manifest.catalog)).problems
        if problems:
            text = f"{backend.path} lacks parts of tensors (files of some ranks are missing?)"
            raise CorruptCheckpointError(str(ValidationError(problems, text)))
    return manifest


def _model_sources(backend: Backend, names: set[str]) -> list[str]:
    sources = [name for name in (MODEL_INDEX, PEFT_INDEX) if name in names]
    if MODEL_FILE in names:
        # PaddleNLP refuses both together.
        sources += find_weights(backend.path, [name for name in (MODEL_INDEX, MODEL_FILE) if name in names])
    for index, start in ((MODEL_INDEX, "model-"), (PEFT_INDEX, "peft_model-")):
        if index not in names and any(name.startswith(start) and name.endswith(".safetensors") for name in names):
            raise CorruptCheckpointError(f"{backend.where(index)} is missing. Remedy (FC304): restore it")
    return sources


def _check_quantisation(backend: Backend, index: TensorIndex) -> None:
    stage = index.settings.get("ckpt_quant_stage", "O0")
    if stage != "O0":
        raise ValidationError(
            f"{backend.where(OPTIMIZER + INDEX_FILE)}: the optimizer states are quantised (ckpt_quant_stage "
            f"{stage!r}), which is not read here. Remedy (FC701): {_RESUME} with --ckpt_quant_stage O0"
        )


def _shape(weights: Weights, tensor: str) -> tuple[int, ...]:
    return weights.files[weights.file_of[tensor]].tensors[tensor].shape


def _whole(weights: Weights, name: str) -> Iterator[StoredShard]:
    """Yield whole tensors, each under a name derived from its own."""
    numbers = {file: number for number, file in enumerate(weights.files)}
    for tensor, file in weights.file_of.items():
        yield StoredShard(name.format(_key(tensor)), tensor, weights.files[file], rank=numbers[file])


def _key(tensor: str) -> str:
    """Return ``{param}.{kind}`` for ``{param}/{kind}``."""
    parameter, slash, kind = tensor.rpartition("/")
    return f"{parameter}.{kind}" if slash else tensor


def _masters(weights: Weights, models: Sequence[Weights]) -> Iterator[StoredShard]:
    """Yield master weights, except copies of parameters that have single precision themselves."""
    single = {
        tensor
        for model in models
        for tensor, file in model.file_of.items()
        if model.files[file].dtype(tensor) == "float32"
    }
    return (shard for shard in _whole(weights, "{}" + _MASTER) if shard.tensor not in single)


def _masters_as_weights(backend: Backend, models: Sequence[Weights]) -> list[StoredShard]:
    """Return weights as master weights too: with ``skip_save_model_weight`` these replace the weights."""
    found = [shard for weights in models for shard in _whole(weights, "{}" + _MASTER)]
    if not found or any(shard.file.dtype(shard.tensor) != "float32" for shard in found):
        raise CorruptCheckpointError(
            f"{backend.where(MASTERS + INDEX_FILE)} is missing: by {OPTIMIZER + INDEX_FILE} there are master weights, "
            "and those in place of weights would be float32. Remedy (FC304): restore it"
        )
    return found


def _rank_files(backend: Backend, names: set[str], kind: str) -> list[_RankFile]:
    """Read the files of ranks' own states; check that all files that the places in their names imply exist."""
    matches = {name: match for name, match in ((n, _SPLIT.fullmatch(n)) for n in sorted(names)) if match}
    own = {name: match[2] or "" for name, match in matches.items() if match[1] == kind}
    places = {name: {axis: int(at) for axis, at in _COORDINATE.findall(text)} for name, text in own.items()}
    if not places:
        return []
    axes = list(next(iter(places.values())))
    if any(list(place) != axes for place in places.values()):
        raise ValidationError(
            f"{backend.path} has {kind} states of several strategies: {', '.join(places)}. Remedy (FC304): move those "
            "away that are not meant"
        )
    degrees = [max(place[axis] for place in places.values()) + 1 for axis in axes]
    there = {tuple(place.values()) for place in places.values()}
    if len(there) != len(places) or any(degree > len(places) for degree in degrees):
        raise CorruptCheckpointError(f"{backend.path}: files of ranks are missing or doubled: {', '.join(places)}")
    for at in itertools.product(*map(range, degrees)):
        if at not in there:
            suffix = "_".join(f"{axis}{number:02d}" for axis, number in zip(axes, at))
            raise CorruptCheckpointError(
                f"{backend.where(f'{kind}.{suffix}.safetensors')} is missing, by the names of the others. "
                "Remedy (FC304): restore the file or load another checkpoint"
            )
    files = map_files(backend, lambda name: read_tensor_file(backend, name), places)
    return [_RankFile(file, places[file.name], number) for number, file in enumerate(files)]


def _placed(
    backend: Backend, own: Sequence[_RankFile], shapes: Mapping[str, tuple[int, ...]], kind: str
) -> list[StoredShard]:
    """Return the parts of ranks, each with its place in the whole tensor."""
    degree = max(each.at.get("tp", 0) for each in own) + 1
    shards: list[StoredShard] = []
    problems: list[Problem | str] = []
    held: dict[str, int] = {}
    for each in own:
        for tensor, stored in each.file.tensors.items():
            parameter = tensor.rpartition("/")[0] if kind == OPTIMIZER else tensor
            problem = partial(Problem, key=tensor, file=backend.where(each.file.name))
            if "moe" in each.at and held.setdefault(tensor, each.at["moe"]) != each.at["moe"]:
                problems.append(
                    problem(
                        "several ranks of expert parallelism have a state of this name", code="FC701", remedy=_RESUME
                    )
                )
                continue
            key = _key(tensor) if kind == OPTIMIZER else tensor + _MASTER
            whole = shapes.get(parameter)
            # Powers of beta have one element, whatever the parameter has.
            is_number = stored.shape in ((), (1,))
            if stored.shape == whole or "tp" not in each.at or (kind == OPTIMIZER and is_number):
                if whole is not None and stored.shape != whole and not is_number:
                    problems.append(_misfit(problem, whole, stored.shape, degree))
                shards.append(StoredShard(key, tensor, each.file, rank=each.rank))
                continue
            if whole is None:
                what = "the model's weights, which would tell the shape of the whole, lack the parameter"
                problems.append(problem(what, code="FC701", remedy=_RESUME + " without ignore_merge_optimizer"))
                continue
            axes = [axis for axis, (part, all_of_it) in enumerate(zip(stored.shape, whole)) if part != all_of_it]
            consecutive = len(whole) == len(stored.shape) and len(axes) == 1
            if not consecutive or stored.shape[axes[0]] * degree != whole[axes[0]]:
                problems.append(_misfit(problem, whole, stored.shape, degree))
            elif _PERMUTED.search(parameter):
                what = "ranks' parts of a fused parameter are not consecutive parts of the whole"
                problems.append(problem(what, code="FC701", remedy=_RESUME + " without ignore_merge_optimizer"))
            else:
                offset = [0] * len(whole)
                offset[axes[0]] = each.at["tp"] * stored.shape[axes[0]]
                shards.append(StoredShard(key, tensor, each.file, whole, offset, each.rank))
    if problems:
        raise ValidationError(problems, f"{backend.path}: the place of ranks' states is not known")
    return shards


def _misfit(problem: Callable[..., Problem], whole: Sequence[int], part: Sequence[int], degree: int) -> Problem:
    expected = f"one of {degree} equal parts of {list(whole)}" if degree > 1 else list(whole)
    return problem("a rank's state does not fit its parameter", expected=expected, got=list(part))


UNIFIED_CHECKPOINT = Reader(_detect)
