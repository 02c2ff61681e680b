"""Counted reads are those that a reader makes: of parts of all shapes, cast, transposed, twice over, and in scratch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import concat
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.matching import ShardMatcher
from paddle_flexckpt.planning.strategy import Strategy, parse_strategy
from paddle_flexckpt.tools.rehearsal import rehearse
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.read_counts import count_reads
from tests.property import examples
from tests.tools.rehearsed import load, save

SHAPES = [
    (7, 4),
    (3, 2, 5),
    (11,),
    (),
    (700, 900),
    (600, 1024),
    (3, 130_000),
    (5, 4, 70_000),
    (3_500_000,),
    (40, 60, 300),
]


def layout(shapes, strategy=Strategy(), dtype="float32") -> Layout:  # noqa: B008
    tensors = tuple(ModelTensor(f"t{number}", shape, dtype) for number, shape in enumerate(shapes))
    return Layout(Model(tensors, states=(), segment_size=8), strategy)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("counted")
    save(path, layout(SHAPES, parse_strategy("sharding=stage3:3")))
    return path


def boxes_of(catalog, draw):
    """A part of each tensor, a box or a flattened range of one."""
    for row in range(len(catalog)):
        whole = catalog.unpadded(row, catalog.global_shape)
        low = [draw(st.integers(0, extent - 1)) for extent in whole]
        high = [
            draw(st.sampled_from(sorted({first + 1, (first + 1 + extent) // 2, extent})))
            for first, extent in zip(low, whole)
        ]
        pad = catalog.width - len(whole)
        catalog.offset[row, pad:] = low
        catalog.shape[row, pad:] = np.subtract(high, low)
        size = int(catalog.shape[row].prod())
        if draw(st.booleans()):
            catalog.flat_start[row] = begin = draw(st.integers(0, size - 1))
            catalog.flat_stop[row] = draw(st.integers(begin + 1, size))
    return catalog


@examples(60)
@given(st.data())
def test_parts_of_all_shapes(checkpoint, data):
    source = CheckpointDirectory(str(checkpoint)).read_manifest()
    targets = [boxes_of(layout(SHAPES).catalog(0), data.draw) for _ in range(2)]
    job = concat(targets)
    pieces = ShardMatcher(source.catalog).match(job)
    place = np.repeat([0, 1], len(targets[0]))
    counts = count_reads(pieces, source.catalog, job, place, 2, source.checksums.block_bytes)
    for rank, target in enumerate(targets):
        found, _ = load(checkpoint, target)
        said = (counts.bytes_needed[rank], counts.bytes_read[rank], counts.reads[rank])
        assert said == (found.bytes_needed, found.bytes_read, found.reads)


@pytest.mark.parametrize(
    "statements",
    [
        ["t4^T -> t4", "t6^T -> t6"],
        ["t5 -> t5", 't5 -> t9, dtype="float64"'],
        ["t4, t4 -> t4, axis=1", "t5, t5 -> t5, axis=0", "t8, t8 -> t8, axis=0"],
        ['t5 -> t5, dtype="bfloat16"'],
    ],
)
def test_what_statements_move_and_compute(checkpoint, statements):
    made = {"t5": "bfloat16"} if "bfloat16" in statements[0] else {}
    shapes = {f"t{number}": shape for number, shape in enumerate(SHAPES)}
    if "^T" in statements[0]:
        shapes.update(t4=(900, 700), t6=(130_000, 3))
    if "axis" in statements[0]:  # the same bytes into two places
        shapes.update(t4=(700, 1800), t5=(1200, 1024), t8=(7_000_000,))
    if len(statements) > 1 and "t9" in statements[1]:
        shapes.update(t9=shapes["t5"])
        made = {"t9": "float64"}
    tensors = tuple(ModelTensor(name, shape, made.get(name, "float32")) for name, shape in shapes.items())
    target = Layout(Model(tensors, states=(), segment_size=8), parse_strategy("sharding=stage3:2"))
    config = {"aoa_statements": statements}
    report = rehearse(str(checkpoint), target, LoadOptions(aoa_config=config))
    assert report.error == ""
    for each in report.ranks:
        for rank in each.ranks:
            found, _ = load(checkpoint, target.catalog(rank), rank, aoa_config=config)
            said = (each.bytes_needed, each.bytes_read, each.reads, each.scratch_bytes)
            assert said == (found.bytes_needed, found.bytes_read, found.reads, found.peak_scratch_bytes)


def test_values_that_are_cast_are_read_one_by_one(checkpoint):
    target = layout(SHAPES, parse_strategy("sharding=stage3:2"), "bfloat16")
    report = rehearse(str(checkpoint), target, LoadOptions(dtype="cast"))
    for each in report.ranks:
        for rank in each.ranks:
            found, _ = load(checkpoint, target.catalog(rank), rank, dtype="cast")
            assert (each.bytes_read, each.reads) == (found.bytes_read, found.reads)
    assert sorted(report.cast) == [f"t{number}" for number in range(len(SHAPES))]
