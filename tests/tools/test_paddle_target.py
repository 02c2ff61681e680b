"""Conversions to Paddle's own format: who stores what, what each file has, and what is refused by name."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from paddle_flexckpt.catalog import NATURAL, Order, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import PARAMETER_NAMES
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.conversion_targets import _paddle_order_problems
from paddle_flexckpt.tools.models import layout_of
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.remedies.following import provoked
from tests.transfer.samples import Part, catalog, save, values_of

KINDS = {
    "embed": ("bfloat16", (16, 6)),
    "layers.0.w": ("bfloat16", (8, 12)),
    "layers.1.w": ("bfloat16", (8, 12)),
    "layers.0.norm": ("float32", (7,)),
    "none": ("float32", (0, 3)),
    "one": ("float64", ()),
}
for key in ("embed", "layers.0.w", "layers.1.w"):
    KINDS |= {f"{key}.moment1_0": ("float32", KINDS[key][1]), f"{key}.beta1_pow_acc_0": ("float32", (1,))}
CUTS = (("*.w", 1), ("embed", 0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("paddle") / "checkpoint"
    save(path, values_of(KINDS))
    return path


def states(path, world):
    """What Python's own unpickler finds in each rank's file."""
    found = [pickle.loads((path / f"{rank}_0.distcp").read_bytes()) for rank in range(world)]
    assert all(set(state.pop(PARAMETER_NAMES)) == set(state) for state in found)
    return found


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2,pp=2,dp=2", "sharding=v2:3", "tp=2,sharding=v1:2", "dp=3"])
@pytest.mark.parametrize("save_replicas", [False, True])
def test_for_a_strategy_each_rank_has_its_own_file(checkpoint, tmp_path, strategy, save_replicas):
    out = tmp_path / "out"
    report = convert_checkpoint(
        checkpoint, out, format="paddle", strategy=strategy, cuts=CUTS, save_replicas=save_replicas
    )
    layout, _ = layout_of(checkpoint, strategy, cuts=CUTS)
    world = layout.strategy.ranks
    assert sorted(path.name for path in out.iterdir()) == sorted([*report.files, "0.metadata"])
    assert report.files == [f"{rank}_0.distcp" for rank in range(world)]
    assert diff(checkpoint, out).equal
    assert verify_checkpoint(out).ok
    found, held, owned = states(out, world), set(), []
    for rank, state in enumerate(found):
        table = layout.catalog(rank)
        shapes = {
            table.key_name(row): (int(table.size[row]),)
            if table.is_flattened[row]
            else table.unpadded(row, table.shape)
            for row in range(len(table))
            if table.key_name(row) in KINDS
        }
        owned.append(sum(int(np.prod(shapes[key])) for key in shapes))
        assert all(state[key].shape == shapes[key] for key in state)
        assert state.keys() == shapes.keys() or not save_replicas
        held |= {(key, table.describe(row)) for row, key in enumerate(map(table.key_name, range(len(table))))}
    if not save_replicas:
        distinct = sum(len(state) for state in found)
        assert distinct == len(held & {(key, text) for key, text in held if key in KINDS})
        assert max(sum(array.nbytes for array in state.values()) for state in found) < report.total_bytes


def test_whole_tensors_are_divided_among_files(checkpoint, tmp_path):
    report = convert_checkpoint(checkpoint, tmp_path / "out", format="paddle", max_file_bytes=500)
    assert len(report.files) > 3
    assert diff(checkpoint, tmp_path / "out").equal
    manifest = SourceDirectory(tmp_path / "out").read_manifest()
    assert (manifest.catalog.shape == manifest.catalog.global_shape).all()
    assert (manifest.origin, manifest.unique_id) == ("paddle", 0)


def test_replicas_are_shared_out_by_bytes(tmp_path):
    save(tmp_path / "in", values_of({f"w{i}": ("float32", (64, 16)) for i in range(16)}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", format="paddle", strategy="dp=4")
    assert [len(state) for state in states(tmp_path / "out", 4)] == [4] * 4


REFUSED = {
    "a type": ({"w": ("float8_e5m2", (3,))}, {}, "Paddle does not read this dtype back .key 'w'.*float8_e5m2"),
    "a name": ({PARAMETER_NAMES: ("int8", (3,))}, {}, f"another use for this name .key '{PARAMETER_NAMES}'"),
    "a range": (
        {"w": ("float32", (3, 5, 7)), "w.moment1_0": ("float32", (3, 5, 7))},
        {"strategy": "sharding=v2:2"},
        "Paddle reads this wrong: a flattened range of a tensor with three or more axes begins or ends inside a row "
        ".key 'w.moment1_0'.*give save_replicas",
    ),
    "replicas of whole tensors": ({"w": ("int8", (3,))}, {"save_replicas": True}, "needs a strategy"),
    "replicas of others": (
        {"w": ("int8", (3,))},
        {"format": "native", "strategy": "dp=2", "save_replicas": True},
        "save_replicas is for paddle; got format='native'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_paddle_cannot_hold_is_refused_by_name(tmp_path, name):
    kinds, options, words = REFUSED[name]
    save(tmp_path / "in", values_of(kinds), world=1)
    with pytest.raises(ValidationError, match=words):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", **{"format": "paddle", **options})
    assert not (tmp_path / "out").exists()


def test_with_replicas_ranges_are_right_under_the_same_layout(tmp_path):
    kinds, options, _ = REFUSED["a range"]
    save(tmp_path / "in", values_of(kinds), world=1)
    with provoked(
        "tools/conversion_targets.py", "give save_replicas (--save-replicas), by which a rank's file has all"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", format="paddle", **options)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", format="paddle", save_replicas=True, **options)
    assert any("right under the same layout alone" in note for note in report.notes)
    convert_checkpoint(tmp_path / "in", tmp_path / "whole", format="paddle")
    convert_checkpoint(tmp_path / "in", tmp_path / "v1", format="paddle", strategy="sharding=v1:2")
    for each in ("out", "whole", "v1"):
        assert diff(tmp_path / "in", tmp_path / each).equal


def test_fused_parameters_that_paddle_would_take_for_others_are_refused():
    """In natural order they are those of one part; in the order of two ranks, those of two."""
    halves = [{"shape": (4, 6), "offset": (0, begin), "rank": rank} for rank, begin in enumerate((0, 6))]
    for order, fits in ((Order(2, 1, "fused_ffn"), True), (Order(1, 1, "fused_ffn"), False), (NATURAL, True)):
        table = catalog(*(Part("w", (4, 12), order=order, **half) for half in halves), Part("v", (4, 12)))
        problems = [str(problem) for problem in _paddle_order_problems(table)]
        assert fits == (not problems)
        assert fits or "another order than the ranks that load it expect" in problems[0]
    whole = catalog(Part("w", (4, 12), order=Order(1, 1, "fused_ffn")))
    assert not list(_paddle_order_problems(whole))
