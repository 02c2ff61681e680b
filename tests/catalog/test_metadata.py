"""The in-tree metadata classes and their way into a catalog."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
from hypothesis import given

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.metadata import (
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
    catalog_from_metadata,
    lacks_global_shapes,
)
from tests.property import examples
from tests.property.layouts import layouts, shard_of_row


def rank_of(file):
    return int(file.split("_")[0])


def metadata_of(shards, as_slice=False):
    """What a rank's in-tree metadata says of its shards."""
    result = Metadata()
    for s in shards:
        flat = slice(*s.flat) if as_slice and s.flat is not None else s.flat
        meta = LocalTensorMetadata(s.offset, s.shape, s.dtype, s.global_shape, s.flat is not None, flat)
        index = LocalTensorIndex(s.key, s.offset, s.flat is not None, s.flat, None, s.shape)
        result.state_dict_metadata.setdefault(s.key, []).append(meta)
        result.storage_metadata[index] = f"{s.rank}_0.distcp"
    return result


@examples(60)
@given(layouts(max_tensors=3))
def test_metadata_of_each_rank_becomes_a_catalog(shards):
    # A box and its flattened parts under one index would be ambiguous in this format: the layouts here never mix them.
    ranks = sorted({s.rank for s in shards})
    parts = [metadata_of([s for s in shards if s.rank == rank], as_slice=rank % 2 == 1) for rank in ranks]
    catalog = catalog_from_metadata(parts, rank_of)
    assert [shard_of_row(catalog, row) for row in range(len(catalog))] == shards
    assert [catalog.file_name(row) for row in range(len(catalog))] == [f"{s.rank}_0.distcp" for s in shards]


def test_fields_are_named_as_in_tree():
    assert [f.name for f in fields(LocalTensorMetadata)] == [
        "global_offset",
        "local_shape",
        "dtype",
        "global_shape",
        "is_flattened",
        "flattened_range",
    ]
    assert [f.name for f in fields(LocalTensorIndex)] == [
        "tensor_key",
        "global_offset",
        "is_flattened",
        "flattened_range",
        "replica_id",
        "local_shape",
    ]
    assert [f.name for f in fields(Metadata)] == ["state_dict_metadata", "storage_metadata", "flat_mapping"]


def test_other_objects_with_these_fields_will_do():
    meta = LocalTensorMetadata((0,), (4,), "paddle.int8", (4,))
    foreign = SimpleNamespace(
        state_dict_metadata={"a": [SimpleNamespace(**meta.__dict__)]},
        storage_metadata={LocalTensorIndex("a", (0,), local_shape=(4,)): "2_0.distcp"},
    )
    catalog = catalog_from_metadata([foreign], rank_of)
    assert (catalog.describe(0), int(catalog.rank[0])) == ("int8 [0:4] of [4]", 2)


def test_an_index_of_an_older_writer_has_neither_shape_nor_range():
    meta = LocalTensorMetadata((2,), (2,), "int8", (4,), True, (0, 1))
    old = Metadata({"a": [meta]}, {LocalTensorIndex("a", (2,)): "0_0.distcp"})
    assert catalog_from_metadata([old], rank_of).describe(0) == "int8 [2:4] of [4], flattened range [0, 1)"


def test_replicas_in_one_metadata_are_one_shard():
    meta = LocalTensorMetadata((0,), (4,), "int8", (4,))
    both = Metadata(
        {"a": [meta, meta]},
        {LocalTensorIndex("a", (0,), replica_id=r, local_shape=(4,)): f"{r}_0.distcp" for r in (0, 1)},
    )
    assert catalog_from_metadata([both], rank_of).rank.tolist() == [0, 1]


def test_an_index_without_a_shard_is_an_error():
    bad = Metadata({}, {LocalTensorIndex("a", (0,), local_shape=(4,)): "0_0.distcp"})
    with pytest.raises(ValidationError, match="'a' has 0 shards"):
        catalog_from_metadata([bad], rank_of)


def test_an_index_of_two_different_shards_is_an_error():
    metas = [LocalTensorMetadata((0,), (4,), "int8", (4,), True, flat) for flat in ((0, 2), (2, 4))]
    bad = Metadata({"a": metas}, {LocalTensorIndex("a", (0,)): "0_0.distcp"})
    with pytest.raises(ValidationError, match="'a' has 2 shards"):
        catalog_from_metadata([bad], rank_of)


def test_an_index_of_two_dtypes_is_an_error():
    """Which of the two the bytes are, nobody can tell."""
    metas = [LocalTensorMetadata((0,), (4,), dtype, (4,)) for dtype in ("float32", "int32")]
    bad = Metadata({"a": metas}, {LocalTensorIndex("a", (0,), local_shape=(4,)): "0_0.distcp"})
    with pytest.raises(ValidationError, match="'a' has 2 shards"):
        catalog_from_metadata([bad], rank_of)


def test_a_shard_without_a_global_shape_is_an_error():
    bad = Metadata({"a": [LocalTensorMetadata((0,), (4,), "int8")]}, {LocalTensorIndex("a", (0,)): "0_0.distcp"})
    with pytest.raises(
        ValidationError, match="'a' has no global shape.*Remedy .FC205.: give LocalTensorMetadata its global"
    ):
        catalog_from_metadata([bad], rank_of)
    assert len(catalog_from_metadata([bad], rank_of, {"a": (4,)})) == 1


def test_all_problems_are_in_one_error():
    shards = {"b": [LocalTensorMetadata((0,), (4,), "int8")], "d": [LocalTensorMetadata((0,), (4,), "int8")]}
    bad = Metadata(shards, {LocalTensorIndex(key, (0,)): "0_0.distcp" for key in "abcd"})
    with pytest.raises(ValidationError, match="^metadata is not usable: 4 problems") as caught:
        catalog_from_metadata([bad], rank_of)
    assert [problem.split("'")[1] for problem in caught.value.problems] == ["a", "b", "c", "d"]


def test_global_shapes_that_are_left_out_are_noticed():
    with_shape, without = LocalTensorMetadata((0,), (4,), "int8", (4,)), LocalTensorMetadata((0,), (4,), "int8")
    foreign = SimpleNamespace(global_offset=(0,), local_shape=(4,), dtype="int8")
    assert not lacks_global_shapes([])
    assert not lacks_global_shapes([Metadata(), Metadata({"a": [with_shape, with_shape], "b": []})])
    for lacking in (without, foreign):
        assert lacks_global_shapes([Metadata({"a": [with_shape]}), Metadata({"b": [with_shape, lacking]})])


def test_no_metadata_no_rows():
    assert len(catalog_from_metadata([], rank_of)) == 0
    assert len(catalog_from_metadata([Metadata()], rank_of)) == 0
