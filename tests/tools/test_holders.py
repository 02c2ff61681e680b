"""Who holds what: parts as they were saved, and as the ranks of another job would need them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.texts import format_ranks
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.tools.holders import find_holders
from paddle_flexckpt.tools.models import layout_of
from tests.saved import data_file
from tests.tools.rehearsed import save
from tests.tools.test_models import decoder
from tests.transfer.samples import save as save_values

QKV, NORM = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.3.input_layernorm.weight"


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path, Layout(decoder(), parse_strategy("tp=2")))
    return str(tmp_path)


def test_parts_are_those_of_the_manifest(checkpoint):
    report = find_holders(checkpoint)
    catalog = CheckpointDirectory(checkpoint).read_manifest(None).catalog
    assert set(report.tensors) == set(catalog.keys)
    found = {
        (key, part.where(), part.ranks[0], part.files[0], part.bytes)
        for key, tensor in report.tensors.items()
        for part in tensor.stored
    }
    expected = set()
    for row in range(len(catalog)):
        text = catalog.describe(row).partition(" of ")[0].partition(" ")[2]
        if catalog.is_flattened[row]:
            text += f" flattened {catalog.flat_start[row]}:{catalog.flat_stop[row]}"
        nbytes = int(catalog.byte_length[row])
        expected.add((catalog.key_name(row), text, int(catalog.rank[row]), catalog.file_name(row), nbytes))
    assert found == expected
    assert report.stored_bytes == [int(catalog.byte_length[catalog.rank == rank].sum()) for rank in range(2)]
    assert (report.strategy, report.needed_bytes, report.world_size) == ("", [], 2)


@pytest.mark.parametrize("to", ["tp=4,pp=2,dp=2", "tp=2,sharding=v2:4", "sharding=stage3:4"])
def test_each_rank_of_the_job_needs_what_its_layout_says(checkpoint, to):
    layout, notes = layout_of(checkpoint, to)
    report = find_holders(checkpoint, layout=layout, notes=notes)
    expected: dict[int, set] = {}
    for rank in range(layout.strategy.ranks):
        catalog = layout.catalog(rank)
        assert report.needed_bytes[rank] == int(catalog.byte_length.sum())
        expected[rank] = {
            (
                catalog.key_name(row),
                catalog.unpadded(row, catalog.offset),
                catalog.unpadded(row, catalog.shape),
                (int(catalog.flat_start[row]), int(catalog.flat_stop[row])) if catalog.is_flattened[row] else None,
            )
            for row in range(len(catalog))
        }
    found: dict[int, set] = {rank: set() for rank in expected}
    for key, tensor in report.tensors.items():
        for part in tensor.needed:
            assert part.ranks == sorted(set(part.ranks)) and part.files == []
            flat = None if part.flattened_range is None else tuple(part.flattened_range)
            for rank in part.ranks:
                found[rank].add((key, tuple(part.global_offset), tuple(part.local_shape), flat))
    assert found == expected
    assert report.strategy == str(layout.strategy)


def test_keys_and_patterns_choose(checkpoint):
    report = find_holders(checkpoint, [QKV, "*.3.input_layernorm.weight"])
    assert list(report.tensors) == [QKV, NORM]
    assert [part.where() for part in report.tensors[QKV].stored] == ["[0:8, 0:12]", "[0:8, 12:24]"]
    assert sum(report.stored_bytes) == 8 * 24 * 2 + 8 * 2
    with pytest.raises(ValidationError, match=r"(?s)no such key \(key 'model.layers.9.\*'\).*no such key \(key 'lm'\)"):
        find_holders(checkpoint, ["model.layers.9.*", QKV, "lm"])


def test_of_the_largest_parameters_alone_the_parts_are_told_and_all_are_summed(checkpoint):
    layout, _ = layout_of(checkpoint, "tp=4")
    whole, few = find_holders(checkpoint, layout=layout), find_holders(checkpoint, layout=layout, largest=3)
    assert (few.stored_bytes, few.needed_bytes) == (whole.stored_bytes, whole.needed_bytes)
    shapes = [(each.dtype, sorted(each.shape)) for each in few.tensors.values()]
    # The embedding, the head, and of layers any, each with all its states.
    assert shapes.count(("bfloat16", [8, 32])) == 2 and shapes.count(("float32", [8, 32])) == 6
    assert len({split_state(key, whole.tensors)[0] for key in few.tensors}) == 3 and len(shapes) == 18
    assert few.tensors == {key: whole.tensors[key] for key in few.tensors}
    assert find_holders(checkpoint, largest=0).tensors == {}


def test_a_key_that_looks_like_a_pattern_is_that_key(tmp_path):
    save_values(tmp_path, {"w[0]*": np.ones(4, np.float32), "w0": np.ones(2, np.float32)}, world=1)
    assert list(find_holders(str(tmp_path), ["w[0]*"]).tensors) == ["w[0]*"]
    assert list(find_holders(str(tmp_path), ["w[0]"]).tensors) == ["w0"]


def test_replicas_in_files_are_one_part_of_several_ranks(tmp_path):
    save(tmp_path, Layout(decoder(), parse_strategy("tp=1,dp=2")), save_replicas=True)
    tensor = find_holders(str(tmp_path), [NORM]).tensors[NORM]
    assert [(part.ranks, part.files) for part in tensor.stored] == [
        ([0, 1], [data_file(tmp_path), data_file(tmp_path, 1)])
    ]


def test_the_report_is_portable(checkpoint):
    layout, _ = layout_of(checkpoint, "tp=4")
    report = find_holders(checkpoint, [NORM], layout=layout)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["tensors"][NORM]["needed"][0]["ranks"] == [0, 1, 2, 3]
    assert "1 tensor, 16 B saved by 2 ranks, at most 16 B, by rank" in report.summary()
    assert "under tp=4 64 B needed by 4 ranks, at most 16 B, by rank 0" in report.summary()


def test_ranks_are_written_as_ranges():
    assert format_ranks([]) == ""
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_ranks([0, 1, 2, 5, 7, 8], 1) == "0-2 and 3 more"
    assert format_ranks([3], 1) == "3"
