"""Copy what two shards share between tensors of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box, StridedCopy, row_major_strides
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.copies import copy_values
from paddle_flexckpt.live.tensor_memory import device_of, dtype_name
from paddle_flexckpt.live.tensors import HostTensor, open_storage


def assign_sharded_slice(
    src_desc: Any,
    src_shard: Any,
    dst_desc: Any,
    dst_shard: Any,
    postprocess_list: Sequence[Callable[[Any], Any]] | None = None,
) -> None:
    """Copy the part of ``src_shard`` inside ``src_desc`` to the part of ``dst_shard`` inside ``dst_desc``.

    Args:
        src_desc: Box (``global_offset``, ``local_shape``) in the source's coordinates.
        src_shard: The source shard, not flattened.
        dst_desc: Box in the target's coordinates.
        dst_shard: The target shard, not flattened; its tensor is written in place.
        postprocess_list: Not available; transformations are AOA's business.

    Raises:
        ValidationError: A box does not overlap its shard, the two overlaps differ in shape, the dtypes differ, or a
            shard is flattened.
    """
    if postprocess_list:
        raise ValidationError(["postprocess_list is not available in this version"])
    overlaps = []
    for side, desc, shard in (("source", src_desc, src_shard), ("target", dst_desc, dst_shard)):
        if getattr(shard, "is_flattened", False):
            raise ValidationError([f"the {side} shard {shard.key!r} is flattened; a slice of it is not one box"])
        box = Box(tuple(shard.global_offset), tuple(shard.local_shape))
        common = box.intersect(Box(tuple(desc.global_offset), tuple(desc.local_shape)))
        if common is None:
            raise ValidationError([f"the {side} shard {shard.key!r} {box} has no overlap with its description"])
        overlaps.append((box, common))
    (src_box, src_part), (dst_box, dst_part) = overlaps
    if src_part.shape != dst_part.shape:
        raise ValidationError(
            [f"overlap shape mismatch between {src_shard.key!r} {src_part} and {dst_shard.key!r} {dst_part}"]
        )
    if dtype_name(src_shard.local_tensor) != dtype_name(dst_shard.local_tensor):
        raise ValidationError(
            [
                f"dtype of {src_shard.key!r} is {dtype_name(src_shard.local_tensor)}, "
                f"that of {dst_shard.key!r} is {dtype_name(dst_shard.local_tensor)}"
            ]
        )
    copy = StridedCopy(src_part.shape, *_place(src_box, src_part), *_place(dst_box, dst_part))
    source = open_storage(src_shard.local_tensor)
    if device_of(dst_shard.local_tensor) is not None:
        copy_values(copy, source, open_storage(dst_shard.local_tensor))
        return
    target = HostTensor(dst_shard.local_tensor)
    copy_values(copy, source, target.array)
    target.store()


def _place(box: Box, part: Box) -> tuple[int, tuple[int, ...]]:
    """Return the position of a part's first element in the storage of a box, and that storage's strides."""
    strides = row_major_strides(np.asarray([box.shape], dtype=np.int64).reshape(1, -1))[0].tolist()
    return sum((p - b) * s for p, b, s in zip(part.offset, box.offset, strides)), tuple(strides)
