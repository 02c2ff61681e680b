"""Every reshard that the CPU world has to offer, in all dtypes, against slices cut by hand."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.semi_auto.jobs_reshard"


#: (7, 11) is uneven everywhere; over 4 ranks, (6, 5) is cut into 2 2 2 0 and 2 2 1 0.
SHAPES = ((8, 12), (7, 11), (6, 5))
CASES = [(mesh, shape, "float32") for mesh in ((2,), (4,), (2, 2)) for shape in SHAPES]
CASES += [
    (mesh, shape, dtype) for dtype in ("float16", "bfloat16") for mesh, shape in (((4,), (6, 5)), ((2, 2), (7, 11)))
]


@pytest.mark.parametrize(("mesh", "shape", "dtype"), CASES)
def test_every_change_of_placements(world, mesh, shape, dtype):
    ranks = math.prod(mesh)
    assert world(ranks).run(f"{JOBS}:every_reshard", dtype=dtype, shape=shape, mesh=mesh) == [[]] * ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [8, 5])
def test_gradients_flow_back_through_a_reshard(world4, rows, dtype):
    assert world4.run(f"{JOBS}:gradients", rows=rows, dtype=dtype) == [[]] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_keeps_its_attributes_when_it_is_cut(world4, dtype):
    for rank, (shape, values, name, trainable) in enumerate(world4.run(f"{JOBS}:cut_parameter", dtype=dtype)):
        assert shape == [[2, 3], [2, 3], [1, 3], [0, 3]][rank]
        assert values == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14], []][rank]
        assert (name, trainable) == ("kept.dist", False)


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 3), ("float32", 1)])
def test_ranks_outside_of_the_mesh_cut_nothing(world4, dtype, rows):
    first, second = {3: ([0, 1, 2, 3], [4, 5]), 1: ([0, 1], [])}[rows]
    told = [[[rows, 2], f"paddle.{dtype}", part] for part in (False, second, first, False)]
    assert world4.run(f"{JOBS}:on_some_ranks", dtype=dtype, rows=rows) == told


def test_the_rank_on_an_axis(world4):
    assert world4.run(f"{JOBS}:ranks_on_axes") == [[[0, 0], [0, 1], [1, 0], [1, 1], [-1, -1]]] * 4


def test_without_the_cpu_world_paddle_lacks_all_of_it(world2):
    for lacks in world2.run(f"{JOBS}:lacking"):
        assert "Unimplemented cpu kernel for CReduceScatterOp" in lacks["partial to shard"]
        assert "Unimplemented cpu kernel for all_to_all" in lacks["shard to shard"]
        assert "not implemented for data type" in lacks["half precision"]
        assert lacks["again"] == "it works"


def test_a_job_leaves_nothing_behind(world2):
    for before, after in world2.run(f"{JOBS}:left_behind"):
        assert before == {"mesh": True, "buffers": True, "stage 3": True, "fusion": True, "any": True}
        assert after == {name: False for name in before}
