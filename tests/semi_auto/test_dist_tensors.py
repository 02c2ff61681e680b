"""States of DistTensors: saved, loaded and resharded from every layout to every other, through real processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto import jobs_dist_tensors as jobs
from tests.semi_auto.matrix import LOSS  # measured here too: 2.4e-7

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_to_every_layout(world, ranks, tmp_path):
    reports = world(ranks).run(jobs.every_pair, directory=str(tmp_path / "c"))
    assert reports == [{"wrong": [], "pairs": len(jobs.LAYOUTS[ranks]) ** 2}] * ranks


@pytest.mark.parametrize(
    ("case", "words", "where"),
    [
        ("partial", "the tensor is Partial over mesh axis 0", [0, 1]),
        ("partial on rank 1", "the tensor is Partial over mesh axis 0", [1]),
        ("split factor", "re-arranged over mesh axis 0 (Shard(dim=0, split_factor=2))", [0, 1]),
        ("slice", "is one rank's range of a fused buffer, of unknown place", [0, 1]),
    ],
)
def test_a_tensor_of_unknown_place_is_refused(world2, tmp_path, case, words, where):
    first, second = world2.run(jobs.refused, directory=str(tmp_path / "c"), case=case)
    assert first["texts"] == second["texts"]
    key = "model.slice@bad" if case == "slice" else "model.bad"
    for text in first["texts"].values():
        assert text.count(words) == len(where)
        assert all(f"(key {key!r}, rank {rank})" in text for rank in where)
        assert "Remedy" in text
    assert first["untouched"] == second["untouched"] == [True] * 4
    assert first["files"] == []


def test_descriptions_by_hand(world2):
    for rank, told in enumerate(world2.run(jobs.described)):
        mine = [[[4, 3], [3, 3]][rank], [7, 3], [[0, 0], [4, 0]][rank], True, False]
        assert [told.pop(name) for name in ("replicated", "as whole", "as a part", "another tensor")] == [mine] * 4
        assert told.pop("in another cut") == [[[7, 2], [7, 1]][rank], [7, 3], [[0, 0], [0, 2]][rank], True, False]
        assert told.pop("of another shape") == (
            "Shape mismatch: 'w' has global shape (7, 2); expected (7, 3) as 'like' has"
        )
        holds = f"of which this rank holds shape {tuple(mine[0])} at {tuple(mine[2])}. Remedy: make_replicated"
        assert sorted(told) == ["flattened", "wrong global shape", "wrong local shape", "wrong offset"]
        for text in told.values():
            assert text.startswith("key 'w': global_shape (7, ")
            assert holds in text


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_asynchronous_save_has_what_there_was(world, ranks, tmp_path):
    assert world(ranks).run(jobs.saved_while_changing, directory=str(tmp_path / "c")) == [[]] * ranks


@pytest.mark.parametrize(
    ("source", "target"),
    [("dp2-mp2-stage1", "dp2-stage3"), ("dp2-stage3", "dp2-mp2-stage2"), ("dp2-fusion", "dp4-fully-shard-fused")],
)
def test_a_run_goes_on_under_another_strategy_with_the_manager(world, source, target, tmp_path):
    arguments = {"directory": str(tmp_path), "steps": 2, "last": 4}
    before = world(jobs.ranks_of(source)).run(jobs.managed, strategy=source, **arguments)[0]
    assert before["restored"] is None
    for report in world(jobs.ranks_of(target)).run(jobs.managed, strategy=target, **arguments):
        assert report["restored"] == 2
        assert report["differs"] == []
        assert sorted(report["losses"]) == ["3", "4"]
        assert max(np.abs(before["losses"][step] - loss) for step, loss in report["losses"].items()) <= LOSS
