"""Digests of tensors that do not depend on the layout: a tensor's sums are the sums of its parts.

Every 32-bit word of a tensor is multiplied by an odd 64-bit number that follows from the word's place in the whole
tensor, and the products are added up modulo 2**64, twice with different numbers (multilinear hashing; Lemire and Kaser,
"Strongly universal string hashing is fast", 2014). So neither whole tensors nor an order are needed. A digest
reveals drift and damage, not forgery: the numbers are known.

Tested in tests/tools/test_digests.py and tests/loading/test_state_digests.py.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import xxhash

from paddle_flexckpt.algebra import strides_of_shape
from paddle_flexckpt.aoa import AoaConfig, TensorInfo
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.tools.whole_tensors import compare_head, iterate_bands
from paddle_flexckpt.transfer.files import read_settings
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping

# Elements to add up at once: bounds the memory of intermediate results.
SUMMED_AT_ONCE = 1 << 18
# From this number of neighbouring words on, their places need not be computed one by one.
SHORT_RUN = 512
_TABLE_BITS = 16
_LANES = 2


def digest_checkpoint(
    path: Location,
    unique_id: int | None = None,
    aoa_config: AoaConfig | None = None,
    *,
    extra_state: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint, which does not depend on how it was cut.

    One process reads all data, at most 64 MiB of a tensor at a time; blocks are verified.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
        unique_id: Its id there; None takes the highest.
        aoa_config: AOA statements; the digests are then those of the resulting tensors.
        extra_state: Whether a run's extra state is digested too.
        progress: Called with a :class:`~paddle_flexckpt.progress.Progress` as tensors are digested.

    Returns:
        32 hexadecimal digits by key.

    Raises:
        ValidationError: There is no such checkpoint, or the statements do not fit.
        CorruptCheckpointError: It is damaged.
    """
    directory, sums = SourceDirectory(path), dict[str, np.ndarray]()
    with LockedManifest(directory, unique_id) as manifest:
        rules = compare_head(aoa_config, directory.backend, manifest)
        mapping = whole_mapping(rules, manifest.catalog, settings=lambda: read_settings(directory))
        infos = tensor_infos(manifest.catalog, mapping, extra_state)
        meter = Meter(progress, "digest", sum(info.nbytes for info in infos.values()), len(infos))
        for key, box, array in iterate_bands(directory.backend, manifest, mapping, sorted(infos)):
            band = box_sums(array.ravel(), box.offset, box.shape, infos[key].shape)
            meter.add(array.nbytes, items=key not in sums)
            sums[key] = sums[key] + band if key in sums else band
            del array
        meter.finish()
    return {key: digest_of(infos[key], total) for key, total in sums.items()}


def digest_of(info: TensorInfo, sums: np.ndarray) -> str:
    """Return a tensor's digest from the sums of all its parts, uint64 ``[2]``."""
    head = json.dumps([info.dtype, list(info.shape)]).encode()
    return xxhash.xxh3_128_hexdigest(head + sums.astype("<u8").tobytes())


def box_sums(
    values: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...], global_shape: tuple[int, ...]
) -> np.ndarray:
    """Return the sums of a box, which are added to the tensor's, uint64 ``[2]``.

    Args:
        values: The box's elements in row-major order, 1-D and contiguous.
        offset: The box's first element in the tensor.
        shape: The box.
        global_shape: The tensor.
    """
    words = _words(values)
    if not len(words):
        return np.zeros(_LANES, dtype=np.uint64)
    # The words of an element are one more axis.
    per_element = len(words) // len(values)
    axes = _merged((*offset, 0), (*shape, per_element), (*global_shape, per_element))
    sums = np.zeros(_LANES, dtype=np.uint64)
    run = axes[-1][1]
    if run < SHORT_RUN:
        for begin in range(0, len(words), SUMMED_AT_ONCE):
            part = words[begin : begin + SUMMED_AT_ONCE]
            sums += _sums(part, _places(axes, np.arange(begin, begin + len(part), dtype=np.int64)))
        return sums
    for begin in range(0, len(words), run):
        sums += _run_sums(words[begin : begin + run], int(_places(axes, np.asarray([begin]))[0]))
    return sums


def _places(axes: list[tuple[int, int, int]], index: np.ndarray) -> np.ndarray:
    """Return the places in the tensor of words of a box, by their numbers in the box."""
    place = np.zeros_like(index)
    for number, (low, extent, stride) in enumerate(reversed(axes), 1):
        along = index
        if number < len(axes):
            index, along = np.divmod(index, extent)
        place += (low + along) * stride
    return place


def _run_sums(words: np.ndarray, place: int) -> np.ndarray:
    """Return the sums of neighbouring words of the tensor, from the place of the first."""
    sums, done = np.zeros(_LANES, dtype=np.uint64), 0
    while done < len(words):
        upper, low = divmod(place + done, 1 << _TABLE_BITS)
        wide = words[done : done + (1 << _TABLE_BITS) - low].astype(np.uint64)
        for lane in range(_LANES):
            total = np.dot(_table(lane)[low : low + len(wide)], wide)
            sums[lane : lane + 1] += total * _mixed(np.asarray([upper + ((lane + 1) << 48)], dtype=np.uint64))
        done += len(wide)
    return sums


def _merged(
    offset: tuple[int, ...], shape: tuple[int, ...], global_shape: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Return first index, extent and stride of a box's axes; an axis that is whole is merged with the one before."""
    axes: list[tuple[int, int, int]] = []
    for low, extent, whole, stride in zip(offset, shape, global_shape, strides_of_shape(global_shape)):
        if axes and extent == whole:
            axes[-1] = (axes[-1][0] * extent, axes[-1][1] * extent, stride)
        else:
            axes.append((low, extent, stride))
    return axes


def _words(values: np.ndarray) -> np.ndarray:
    """Return elements as unsigned words of at most 32 bits, several words for a wide element."""
    size = values.dtype.itemsize
    return values.view(f"<u{size}" if size < 4 else "<u4")


def _sums(words: np.ndarray, place: np.ndarray) -> np.ndarray:
    low, high = place & ((1 << _TABLE_BITS) - 1), place >> _TABLE_BITS
    # Places near each other share their upper bits.
    first, last = int(high.min()), int(high.max())
    few = last - first < len(high)
    uppers = np.arange(first, last + 1) if few else high
    wide, found = words.astype(np.uint64), []
    for lane in range(_LANES):
        upper = _mixed(uppers.astype(np.uint64) + np.uint64((lane + 1) << 48))
        factor = _table(lane)[low]
        factor *= upper[high - first] if few else upper
        factor *= wide
        found.append(factor.sum(dtype=np.uint64))
    return np.asarray(found, dtype=np.uint64)


@functools.cache
def _table(lane: int) -> np.ndarray:
    numbers = np.arange(1 << _TABLE_BITS, dtype=np.uint64) + np.uint64((lane + 1) << 32)
    return _mixed(numbers)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return odd numbers that look random: SplitMix64 (Steele, Lea and Flood, 2014) with the last bit set."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
