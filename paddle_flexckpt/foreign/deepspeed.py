"""Read checkpoints of DeepSpeed: ZeRO 1 to 3 as its ranks have saved it, and universal ones; nothing is unpickled.

Ranks of ZeRO save slices of flat buffers. Files of stages 1 and 2 have the parameter of each slice
(``param_slice_mappings``); in stage 3 each parameter is cut into as many equal slices as there are ranks, the last of
them padded. Both are flattened ranges of the parameter. A universal checkpoint has a directory for each parameter.

A parameter ``w`` has the keys ``w``, ``w.w_0`` (its fp32 master weight), ``w.moment1_0`` and ``w.moment2_0``. If there
is no other copy (stage 3, universal), ``w`` is the fp32 one too.

Tested in tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import xxhash

from paddle_flexckpt.catalog import (
    CatalogBuilder,
    CorruptCheckpointError,
    Problem,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.deepspeed_file import DeepSpeedFile, Fragment, Progress, load_deepspeed_file
from paddle_flexckpt.foreign.formats import ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.pickle_values import is_integer
from paddle_flexckpt.foreign.strided_boxes import MOST_BOXES, BoxBudget, boxes_of, row_major
from paddle_flexckpt.foreign.torch_archive import SavedTensor
from paddle_flexckpt.media.backend import Backend, inner, map_files
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.optimizer_states import MASTER, OF_TORCH

logger = logging.getLogger("paddle_flexckpt")

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,5})(_\d+)?_optim_states\.pt", re.ASCII)
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,5})(_\d+)?_model_states\.pt", re.ASCII)
_UNIVERSAL = "zero"
# A file in the directory above: it has the name of the last checkpoint's directory.
LATEST_FILES = ("latest", "latest_universal")
_FP32 = "fp32"
_CONVERT = "convert it in DeepSpeed (python -m deepspeed.checkpoint.ds_to_universal), and give the new directory"


class _FlatRange(NamedTuple):
    """A range of a parameter's elements, and its place in a flat buffer.

    Attributes:
        in_parameter: The range's first element in the flattened parameter.
        in_buffer: Its first element in the buffer.
        length: The number of its elements.
    """

    in_parameter: int
    in_buffer: int
    length: int


class _Row(NamedTuple):
    """A shard.

    Attributes:
        file: The shard's file.
        key: Its key.
        dtype: The name of its element type.
        whole: The shape of the whole tensor.
        offset: The first element of the shard's box in the whole.
        shape: The shape of the box.
        flat: The range of the shard in the flattened box, if it has not all of the box.
        begin: The shard's first byte in the file.
        progress: The optimizer's progress, of moments.
    """

    file: DeepSpeedFile
    key: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    begin: int
    progress: Progress | None = None


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    if any(_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) for name in listing.names):
        return ForeignCheckpoint("deepspeed", partial(read_deepspeed_manifest, listing.backend))
    return None


def _explain(listing: Listing) -> str:
    latest = [name for name in LATEST_FILES if name in listing.names]
    if not latest or (latest == ["latest"] and "zero_to_fp32.py" not in listing.names):
        return ""
    steps = listed(sorted(listing.directories))
    return (
        f"{listing.no_checkpoint}, but {latest[0]} of DeepSpeed, and {steps}. Remedy (FC301): give the path of one of "
        "them"
    )


def read_deepspeed_manifest(backend: Backend) -> Manifest:
    """Read one step as a manifest without checksums, with the tensors of parameters and buffers only.

    Raises:
        CorruptCheckpointError: A file is damaged, missing, or contradicts another; UnsafePickleError where a pickle is
            more than data.
        ValidationError: It was saved under tensor or pipeline parallelism, and does not record how parts belong
            together; or its states are stored in another way. The text has a remedy.
    """
    names = backend.names()
    matches = [
        match for name in sorted(names) for match in [_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)] if match
    ]
    if _UNIVERSAL in backend.names("directories"):
        rows = list(_universal(backend, [match[0] for match in matches if match.re is _MODEL]))
    else:
        cut = [match[0] for match in matches if int(match[2]) or match[3]]
        if cut:
            raise ValidationError(
                f"{backend.where(cut[0])} is of a model that is cut among ranks (tensor or pipeline parallelism), and "
                f"the files do not record how. Remedy (FC701): {_CONVERT}"
            )
        chosen = [match[0] for match in matches]
        files = dict(zip(chosen, map_files(backend, lambda name: _load(backend, name), chosen)))
        models = [files[name] for name in chosen if _MODEL.fullmatch(name)]
        optimizers = [files[name] for name in chosen if _OPTIMIZER.fullmatch(name)]
        rows = list(_of_ranks(backend, models, sorted(optimizers, key=lambda file: file.rank)))
    return _manifest(backend, rows)


def _manifest(backend: Backend, rows: Sequence[_Row]) -> Manifest:
    if not rows:
        raise ValidationError(f"{backend.path} has no tensors in it. Remedy (FC301): correct the path")
    builders: dict[str, CatalogBuilder] = {}
    for row in rows:
        builder = builders.setdefault(row.file.name, CatalogBuilder(row.file.rank, row.file.name))
        builder.add(row.key, row.dtype, row.whole, row.offset, row.shape, row.flat, row.begin)
    catalog = concat([builder.build() for builder in builders.values()])
    problems = validate_shards(catalog) or validate_coverage(catalog, group_replicas(catalog)).problems
    if problems:
        error = ValidationError(problems, f"{backend.path} contradicts itself or lacks files of ranks")
        raise CorruptCheckpointError(f"{error}. Remedy (FC304): restore the files of one save")
    sizes = {row.file.name: row.file.size for row in rows}
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(repr((row[1:], row.file.name, row.file.size)).encode())
    size = 1 + max(row.file.rank for row in rows)
    manifest = Manifest.of_foreign("deepspeed", catalog, sizes, digest.hexdigest(), 0, size)
    return replace(manifest, progress={row.key: row.progress for row in rows if row.progress is not None})


def _load(backend: Backend, name: str) -> DeepSpeedFile:
    match = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
    return load_deepspeed_file(backend, name, int(match[1] or 0) if match else 0)


def _of_ranks(backend: Backend, models: Sequence[DeepSpeedFile], optimizers: Sequence[DeepSpeedFile]) -> Iterator[_Row]:
    """Yield the shards that ranks have saved."""
    states = [_field(backend, file, file.value, "optimizer_state_dict", dict) for file in optimizers]
    if not models:
        raise CorruptCheckpointError(
            f"{backend.path} lacks mp_rank_00_model_states.pt beside {optimizers[0].name}. Remedy (FC304): restore it"
        )
    model = min(models, key=lambda file: file.rank)
    budget = BoxBudget()
    module = _field(backend, model, model.value, "module", dict)
    if not states:
        logger.info("%s: no file of ZeRO; of the model's the weights are read", backend.path)
        yield from _tensors(backend, model, module, budget)
        return
    count = states[0].get("partition_count")
    count = max(count, default=0) if type(count) is list and all(map(is_integer, count)) else count
    if [file.rank for file in optimizers] != list(range(count if is_integer(count) else -1)):
        got = listed([file.name for file in optimizers])
        raise CorruptCheckpointError(
            f"{backend.path}: {count} ranks have saved their parts (partition_count), and there are {got}. "
            "Remedy (FC304): restore the files of one save"
        )
    groups = _field(backend, model, model.value, "param_shapes", list)
    shapes = {name: shape for group in groups if type(group) is dict for name, shape in group.items()}
    if not all(type(name) is str and type(shape) is tuple for name, shape in shapes.items()):
        raise _contradiction(backend, model, "param_shapes are no shapes")
    if states[0].get("zero_stage") == 3:
        buffers = {name: tensor for name, tensor in module.items() if name not in shapes and _is_full(tensor)}
        yield from _tensors(backend, model, buffers, budget)
        for rank, (file, state) in enumerate(zip(optimizers, states)):
            yield from _third_stage(backend, file, state, shapes, rank, len(optimizers))
        yield from _frozen(backend, models, len(optimizers))
    else:
        yield from _tensors(backend, model, module, budget)
        yield from _first_stages(backend, optimizers, states, shapes)


def _is_full(tensor: Any) -> bool:
    return type(tensor) is SavedTensor and 0 not in tensor.size


def _first_stages(
    backend: Backend,
    files: Sequence[DeepSpeedFile],
    states: Sequence[Mapping[Any, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[_Row]:
    """Yield the slices of stages 1 and 2: those of a parameter follow each other in the order of ranks."""
    done: dict[str, int] = {}
    for file, state in zip(files, states):
        flats = _field(backend, file, state, "single_partition_of_fp32_groups", list)
        if type(state.get("param_slice_mappings")) is not list:
            raise ValidationError(
                f"{backend.where(file.name)} does not have the parameters of its slices (param_slice_mappings), "
                f"as older releases do not. Remedy (FC701): {_CONVERT}"
            )
        base = _field(backend, file, state, "base_optimizer_state", dict)
        for number, (flat, slices) in enumerate(zip(flats, state["param_slice_mappings"])):
            columns = _columns(backend, file, flat, _state(base, number))
            progress = file.progress(base, number)
            if type(slices) is not dict:
                raise _contradiction(backend, file, "param_slice_mappings is not a list of dicts")
            for name, fragment in slices.items():
                if name not in shapes or type(fragment) is not Fragment:
                    raise _contradiction(backend, file, f"a slice of {str(name)[:80]!r}, which has no shape")
                begin = done.get(name, 0)
                done[name] = begin + fragment.numel
                part = _FlatRange(begin, fragment.start, fragment.numel)
                for suffix, tensor in columns.items():
                    rows = _slice(backend, file, f"{name}.{suffix}", shapes[name], tensor, part)
                    yield from _with_progress(progress, suffix, rows)


def _third_stage(
    backend: Backend,
    file: DeepSpeedFile,
    state: Mapping[Any, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    count: int,
) -> Iterator[_Row]:
    """Yield the slices of stage 3: a rank has one of each parameter, one after the other through all buffers."""
    flats = _field(backend, file, state, "fp32_flat_groups", list)
    base = _field(backend, file, state, "optimizer_state_dict", dict)
    buffers = []
    begin = 0
    for number, flat in enumerate(flats):
        columns = _columns(backend, file, flat, _state(base, number))
        length = columns[MASTER].size[0]
        buffers.append((begin, begin + length, columns, file.progress(base, number)))
        begin += length
    # All buffers of the rank count as one, in which a parameter's slice begins at ``at``.
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        length = -(-size // count)
        first, last = min(rank * length, size), min((rank + 1) * length, size)
        for buffer_start, buffer_stop, columns, progress in buffers:
            start, stop = max(at, buffer_start), min(at + last - first, buffer_stop)
            if start >= stop:
                continue
            part = _FlatRange(first + start - at, start - buffer_start, stop - start)
            for suffix, tensor in columns.items():
                keys = [name, f"{name}.{suffix}"] if suffix == MASTER else [f"{name}.{suffix}"]
                for key in keys:
                    yield from _with_progress(progress, suffix, _slice(backend, file, key, shape, tensor, part))
        at += length
    if at != begin:
        raise _contradiction(backend, file, f"parameters of {at} elements a rank in buffers of {begin}")


def _frozen(backend: Backend, models: Sequence[DeepSpeedFile], count: int) -> Iterator[_Row]:
    """Yield the parameters of stage 3 that are not trained: each rank's file has its slices."""
    for file in models:
        shapes, parts = (file.value.get(name) or {} for name in ("frozen_param_shapes", "frozen_param_fragments"))
        if type(shapes) is not dict or type(parts) is not dict:
            raise _contradiction(backend, file, "its frozen parameters are not dicts")
        for name, shape in shapes.items():
            tensor = parts.get(name)
            if type(name) is not str or type(shape) is not tuple or type(tensor) is not SavedTensor:
                raise _contradiction(backend, file, f"the frozen parameter {str(name)[:80]!r} is not a tensor")
            size = math.prod(shape)
            length = -(-size // count)
            first, last = min(file.rank * length, size), min((file.rank + 1) * length, size)
            yield from _slice(backend, file, name, shape, tensor, _FlatRange(first, 0, last - first))


def _universal(backend: Backend, models: Sequence[str]) -> Iterator[_Row]:
    """Yield the tensors of a universal checkpoint: ``zero/{parameter}/fp32.pt`` and those of its states.

    Converted from stage 3 they are flat: the model's file has their shapes. It has the buffers, too.
    """
    folder = inner(backend, _UNIVERSAL)
    parameters = sorted(folder.names("directories"))
    listing = dict(zip(parameters, map_files(backend, lambda name: sorted(inner(folder, name).names()), parameters)))
    wanted = [(name, file[: -len(".pt")]) for name, files in listing.items() for file in files if file.endswith(".pt")]
    lacking = [name for name in parameters if (name, _FP32) not in wanted]
    if lacking:
        raise CorruptCheckpointError(
            f"{folder.path} lacks {_FP32}.pt of {listed(lacking)}. Remedy (FC304): restore it, or convert the "
            "checkpoint anew"
        )
    loaded = map_files(backend, lambda each: _load(backend, f"{_UNIVERSAL}/{each[0]}/{each[1]}.pt"), wanted)
    steps = {name: file for (name, state), file in zip(wanted, loaded) if state == "step"}
    progress: Progress | None = None
    budget = BoxBudget()
    shapes: dict[Any, Any] = {}
    # For a model that is cut among ranks these are the shapes of parts, and buffers may be parts.
    if models and all(
        int(match[2]) == 0 and not match[3] for name in models for match in [_MODEL.fullmatch(name)] if match
    ):
        model = min((_load(backend, name) for name in models), key=lambda file: file.rank)
        groups = _field(backend, model, model.value, "param_shapes", list)
        shapes = {name: shape for group in groups if type(group) is dict for name, shape in group.items()}
        module, progress = _field(backend, model, model.value, "module", dict), model.progress_of_model()
        buffers = {k: v for k, v in module.items() if k not in shapes and k not in listing and _is_full(v)}
        yield from _tensors(backend, model, buffers, budget)
    for (name, state), file in zip(wanted, loaded):
        tensor = file.value.get("param")
        if state == "step" or type(tensor) is not SavedTensor:
            continue
        keys = [f"{name}.{OF_TORCH.get(state, f'{state}_0')}"]
        if state == _FP32:
            # A buffer has no states and no master weight.
            keys = [name, f"{name}.{MASTER}"] if len(listing[name]) > 1 else [name]
        shape = shapes.get(name)
        if type(shape) is tuple and len(tensor.size) == 1 and tensor.size != shape:
            part = _FlatRange(0, 0, tensor.size[0])
            found = (row for key in keys for row in _slice(backend, file, key, shape, tensor, part))
        else:
            found = (row for key in keys for row in _tensors(backend, file, {key: tensor}, budget))
        count = steps[name].number(steps[name].value.get("param")) if name in steps else None
        yield from _with_progress(progress if count is None else Progress(count), OF_TORCH.get(state, ""), found)


def _columns(backend: Backend, file: DeepSpeedFile, flat: Any, states: Mapping[Any, Any]) -> dict[str, SavedTensor]:
    """Return a flat buffer of master weights, and the buffers of states of the same length."""
    if type(flat) is not SavedTensor or len(flat.size) != 1:
        raise _contradiction(backend, file, "a group's fp32 weights are no flat tensor")
    columns = {MASTER: flat}
    for name, tensor in states.items():
        if type(name) is str and type(tensor) is SavedTensor and tensor.size == flat.size:
            columns[OF_TORCH.get(name, f"{name}_0")] = tensor
    return columns


def _state(base: Mapping[Any, Any], number: int) -> Mapping[Any, Any]:
    """Return the states of a group as the inner optimizer has saved them."""
    states = base.get("state")
    found = states.get(number) if type(states) is dict else None
    return found if type(found) is dict else {}


def _with_progress(progress: Progress | None, suffix: str, rows: Iterator[_Row]) -> Iterator[_Row]:
    """Add the number of steps to rows of moments; yield other rows unchanged."""
    return (row._replace(progress=progress) for row in rows) if suffix in OF_TORCH.values() else rows


def _slice(
    backend: Backend,
    file: DeepSpeedFile,
    key: str,
    whole: tuple[int, ...],
    tensor: SavedTensor,
    part: _FlatRange,
) -> Iterator[_Row]:
    """Yield the row of a range of a parameter, unless it is empty; ``tensor`` is the flat buffer."""
    place = file.places.get(tensor)
    if place is None or tensor.stride not in ((1,), ()) or len(tensor.size) != 1:
        raise _contradiction(backend, file, f"the tensor of {key[:80]!r} is not flat, or not in one piece")
    begin, start, length = part
    if start + length > tensor.size[0] or begin + length > math.prod(whole):
        what = f"{length} elements of {key[:80]!r} from {begin}, in a buffer of {tensor.size[0]} from {start}"
        raise _contradiction(backend, file, what)
    if length:
        offset = (0,) * len(whole)
        at = place + start * DTYPES[tensor.dtype].itemsize
        yield _Row(file, key, tensor.dtype, whole, offset, whole, (begin, begin + length) if whole else None, at)


def _tensors(backend: Backend, file: DeepSpeedFile, tensors: Mapping[Any, Any], budget: BoxBudget) -> Iterator[_Row]:
    """Yield whole tensors; other values are left out."""
    for key, tensor in tensors.items():
        if type(tensor) is not SavedTensor or type(key) is not str:
            continue
        place, where = file.places.get(tensor), backend.where(file.name)
        if place is None:
            what, remedy = "an element type is not supported", "cast the tensor, and save it anew"
            raise ValidationError(Problem(what, key, file=where, got=tensor.dtype, code="FC701", remedy=remedy))
        strides = row_major(tensor.size) if 0 in tensor.size else tensor.stride
        if not budget.allows(tensor.size, strides):
            what = f"tensors not in row-major order of more than {MOST_BOXES} pieces in all are not read"
            raise ValidationError(
                Problem(what, key, file=where, got=list(strides), code="FC701", remedy="make it contiguous")
            )
        for box in boxes_of(tensor.size, strides):
            begin = place + box.begin * DTYPES[tensor.dtype].itemsize
            yield _Row(file, key, tensor.dtype, tensor.size, box.offset, box.shape, None, begin)


def _field(backend: Backend, file: DeepSpeedFile, value: Mapping[Any, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    if type(found) is not kind:
        raise _contradiction(backend, file, f"it has no {name} of DeepSpeed's")
    return found


def _contradiction(backend: Backend, file: DeepSpeedFile, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{backend.where(file.name)} is not as DeepSpeed writes it: {what}. Remedy (FC305): restore it, or {_CONVERT}"
    )


DEEPSPEED = Reader(_detect, _explain)
