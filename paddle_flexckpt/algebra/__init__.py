"""Geometry of shards: boxes, flattened ranges, box maps, strided copies and the base of tables of columns.

Pure numpy. All that a checkpoint does to data without changing it (cut, join, transpose, flatten) becomes a strided
copy here, between two pieces of memory or files.
"""

from paddle_flexckpt.algebra.box_maps import BoxMaps
from paddle_flexckpt.algebra.boxes import (
    Box,
    balanced_split,
    get_overlap_region,
    intersect_boxes,
    nested_piece,
    subtract_boxes,
)
from paddle_flexckpt.algebra.columns import Columns
from paddle_flexckpt.algebra.flat import (
    flat_range_in_min_slice,
    flat_range_to_boxes,
    flat_ranges_to_boxes,
    minimal_nd_slice,
    ravel_index,
    row_major_strides,
    strides_of_shape,
    unravel_index,
)
from paddle_flexckpt.algebra.strided import StridedCopy, array_axes

__all__ = [
    "Box",
    "BoxMaps",
    "Columns",
    "StridedCopy",
    "array_axes",
    "balanced_split",
    "flat_range_in_min_slice",
    "flat_range_to_boxes",
    "flat_ranges_to_boxes",
    "get_overlap_region",
    "intersect_boxes",
    "minimal_nd_slice",
    "nested_piece",
    "ravel_index",
    "row_major_strides",
    "strides_of_shape",
    "subtract_boxes",
    "unravel_index",
]
