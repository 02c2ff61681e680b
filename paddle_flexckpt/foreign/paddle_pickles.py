"""Read state dicts that ``paddle.save`` has written (``.pdparams``, ``.pdopt``): not unpickled, by byte ranges.

Pickles of protocol 3 and higher have the elements of an array in one stretch of bytes, which is found in a memory map
and never read as a whole. bfloat16 is uint16 in these files. Keys are those of the state dict; keys of inner dicts are
joined with dots. In a directory with both files, states have the structured names from the ``.pdparams``.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CorruptCheckpointError, Problem, ValidationError, concat
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import OPTIMIZER_FILE, PARAMETERS_FILE, ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.paddle_files import PARAMETER_NAMES
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.strided_boxes import MOST_BOXES, BoxBudget, boxes_of
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.native.manifest import Manifest

logger = logging.getLogger("paddle_flexckpt")

# PaddleNLP's names for files of numbers.
_PLAIN_FILES = ("scheduler.pdparams", "scaler.pdparams")
# An entry of protocols 2 and 3 about parameters of more than 2**30 bytes, which it cuts.
_CUT_PARAMETERS = "UnpackBigParamInfor@@"
# A file without a memory map is read as a whole, by every rank, to find out where its tensors are.
MOST_PICKLE_BYTES = 256 << 20
_MASTERS = "master_weights."
_MASTER_STATE = re.compile(r"_fp32_master_\d+")


class Stretch(NamedTuple):
    """A tensor's place in its file: its element type's name and shape there, first byte, and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]


class _StateFile(NamedTuple):
    """A file: its tensors by key, the parameters' names by structured name, its bytes, and a hash."""

    tensors: Mapping[str, Stretch]
    names: Mapping[str, str]
    size: int
    digest: bytes


def load_mapped(backend: Backend, name: str) -> tuple[Any, mmap.mmap | bytes]:
    """Read a pickle; return its data, whose arrays are views of the file, and the file's bytes, mapped if possible.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is damaged; UnsafePickleError if it is more than data.
        ValidationError: It would have to be read as a whole, and is too large for that.
    """
    path = backend.where(name)
    with backend.open(name) as file:
        if not file.size:
            raise CorruptCheckpointError(
                f"{path} is empty. Remedy (FC305): restore the file or load another checkpoint"
            )
        # The pages with elements are not touched.
        mapped: mmap.mmap | bytes | None = file.memory_map()
        if mapped is None:
            if file.size > MOST_PICKLE_BYTES:
                raise ValidationError(
                    f"{path} is a pickle of {file.size} bytes, which has to be in memory to be looked through; where "
                    f"it is not on a local disk it may have {MOST_PICKLE_BYTES}. Remedy (FC701): copy the checkpoint "
                    "to a local disk"
                )
            mapped = file.read(0, file.size)
        return load_pickle(memoryview(mapped), path), mapped


def locate(array: np.ndarray, mapped: mmap.mmap | bytes) -> Stretch | None:
    """Return the place of a pickle's array in its file; None if its elements are not one stretch there (protocol 2)."""
    base = np.frombuffer(mapped, dtype=np.uint8).__array_interface__["data"][0]
    begin = int(array.__array_interface__["data"][0]) - base if array.size else 0
    if not 0 <= begin <= len(mapped) - array.nbytes:
        return None
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Stretch(array.dtype.name, array.shape, begin, strides)


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    path = listing.backend.path
    found = [listing.file] if listing.file else []
    for ending in () if listing.file else (PARAMETERS_FILE, OPTIMIZER_FILE):
        files = sorted(name for name in listing.names if name.endswith(ending) and name not in _PLAIN_FILES)
        if len(files) > 1:
            raise ValidationError(
                f"{path} has several {ending} files: {listed(files)}. Where each of them belongs is not known. "
                f"Remedy (FC301): give the path of the one that is meant, such as {path}/{files[0]}; of ranks' parts, "
                "have their writer merge them"
            )
        found += files
    return ForeignCheckpoint("paddle_pickle", partial(read_pickles_manifest, listing.backend, found)) if found else None


def read_pickles_manifest(backend: Backend, files: Sequence[str]) -> Manifest:
    """Read state dicts as a manifest without checksums: a file's under its own names, or those of a model's two files.

    Other values than tensors are left out; the log has their names.

    Raises:
        CorruptCheckpointError: A file is damaged; UnsafePickleError if it is more than data.
        ValidationError: It has no tensors, or its tensors' elements are not in one stretch; the text has a remedy.
    """
    states = map_files(backend, lambda name: _read_state(backend, name), files)
    structured = {raw: name for state in states for name, raw in sorted(state.names.items(), reverse=True)}
    catalogs: list[Catalog] = []
    problems: list[Problem | str] = []
    seen: dict[str, str] = {}
    for number, (name, state) in enumerate(zip(files, states)):
        builder, budget = CatalogBuilder(number, name), BoxBudget()
        for stored, stretch in state.tensors.items():
            is_state = len(files) > 1 and name.endswith(OPTIMIZER_FILE)
            key = _structured_key(stored, structured) if is_state else stored
            where = backend.where(name)
            if seen.setdefault(key, stored) is not stored:
                remedy = "give the path of one of the files"
                problems.append(
                    Problem("two entries have the same key", key, file=where, got=stored, code="FC301", remedy=remedy)
                )
            dtype = "bfloat16" if stretch.dtype == "uint16" else stretch.dtype
            if not budget.allows(stretch.shape, stretch.strides):
                what = f"arrays in column-major order with more than {MOST_BOXES} columns in all are not read"
                remedy = "save it in row-major order"
                problems.append(Problem(what, key, file=where, got=list(stretch.shape), code="FC701", remedy=remedy))
                continue
            itemsize = np.dtype(stretch.dtype).itemsize
            for box in boxes_of(stretch.shape, stretch.strides):
                begin = stretch.begin + box.begin * itemsize
                builder.add(key, dtype, stretch.shape, box.offset, box.shape, byte_offset=begin)
        catalogs.append(builder.build())
    if problems:
        raise ValidationError(problems, f"{backend.path} cannot be read")
    digest = xxhash.xxh3_128_hexdigest(b"".join(state.digest for state in states))
    sizes = {name: state.size for name, state in zip(files, states)}
    return Manifest.of_foreign("paddle_pickle", concat(catalogs), sizes, digest, 0, 1)


def _read_state(backend: Backend, name: str) -> _StateFile:
    where = backend.where(name)
    data, mapped = load_mapped(backend, name)
    names = data.pop(PARAMETER_NAMES, {}) if type(data) is dict else {}
    if type(data) is not dict or type(names) is not dict or any(type(raw) is not str for raw in names.values()):
        raise CorruptCheckpointError(f"{where} is no state dict that paddle.save writes. Remedy (FC305): restore it")
    if _CUT_PARAMETERS in data:
        raise ValidationError(
            f"{where} has parameters that paddle.save has cut, as it does under protocol 2 and 3. Remedy (FC701): in "
            "Paddle, paddle.save(paddle.load(old), new, protocol=4)"
        )
    tensors: dict[str, Stretch] = {}
    others: list[str] = []
    for key, value in _entries(data):
        if type(value) is not np.ndarray:
            others.append(key)
            continue
        stretch = locate(value, mapped)
        if stretch is None:
            raise ValidationError(
                f"{where}: the elements of {key[:80]!r} are not stored as they are, as in pickles of protocol 2. "
                "Remedy (FC701): in Paddle, paddle.save(paddle.load(old), new, protocol=4)"
            )
        if key in tensors:
            raise CorruptCheckpointError(
                f"{where} has two tensors under the key {key[:80]!r}. Remedy (FC305): restore it"
            )
        tensors[key] = stretch
    if not tensors:
        raise ValidationError(f"{where} has no tensors in it. Remedy (FC301): correct the path")
    if others:
        logger.info("%s: left out, as they are no tensors: %s", where, listed(others))
    digest = xxhash.xxh3_128_digest(repr((tensors, len(mapped))).encode())
    return _StateFile(tensors, names, len(mapped), digest)


def _entries(data: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values in a state dict, and in its dicts and lists, by keys joined with dots."""
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        key, value = stack.pop()
        if type(value) is tuple and len(value) == 2 and type(value[1]) is np.ndarray:
            value = value[1]  # a tensor inside a dict or list, with its name
        if type(value) is dict or type(value) in (list, tuple):
            entries = value.items() if type(value) is dict else enumerate(value)
            start = f"{key}." if key else ""
            stack += reversed([(f"{start}{name}", each) for name, each in entries if name != PARAMETER_NAMES])
        else:
            yield key, value


def _structured_key(key: str, structured: Mapping[str, str]) -> str:
    """Return ``{parameter}.{state}`` for the name of a state, which begins with the parameter's name in Paddle."""
    if key.startswith(_MASTERS) and key[len(_MASTERS) :] in structured:
        return structured[key[len(_MASTERS) :]] + ".w_0"
    end = len(key)
    while end > 0:
        raw = key[:end]
        if raw in structured and raw != key:
            state = _MASTER_STATE.sub("", key[end:], 1) if _MASTER_STATE.match(key, end) else key[end:]
            return f"{structured[raw]}.{state[1:]}"
        end = key.rfind("_", 0, end)
    return key


PADDLE_PICKLES = Reader(_detect)
