"""Places of DistTensors' parts. Real meshes and placements; every rank's part is asked for in one process."""

from __future__ import annotations

import numpy as np
import paddle.distributed as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paddle_flexckpt as fc


class Bare:
    """What Paddle returns of mesh axes that split one tensor axis together: no accessor but these, and a text."""

    def __init__(self, axis: int, order: int) -> None:
        self._axis, self._order = axis, order

    def is_shard(self, axis: int | None = None) -> bool:
        return axis in (None, self._axis)

    def is_partial(self) -> bool:
        return False

    def is_replicated(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"Shard(dim={self._axis}, shard_order={self._order})"


def parts(shape, mesh, placements):
    ranks = mesh.process_ids
    return [fc.compute_local_shape_and_global_offset(shape, mesh, placements, rank) for rank in ranks]


def held(shape, mesh, placements):
    """What each rank holds of a tensor whose elements are counted through."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    return [
        whole[tuple(slice(o, o + n) for o, n in zip(offset, size))].tolist()
        for size, offset in parts(shape, mesh, placements)
    ]


def test_a_mesh_of_one_axis():
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    assert parts([7, 3], mesh, [dist.Shard(0)]) == [((4, 3), (0, 0)), ((3, 3), (4, 0))]
    assert parts([7, 3], mesh, [dist.Shard(1)]) == [((7, 2), (0, 0)), ((7, 1), (0, 2))]
    assert parts([7, 3], mesh, [dist.Replicate()]) == [((7, 3), (0, 0))] * 2


def test_more_ranks_than_rows_leave_some_without():
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
    assert parts([5], mesh, [dist.Shard(0)]) == [((2,), (0,)), ((2,), (2,)), ((1,), (4,)), ((0,), (5,))]


def test_two_mesh_axes_split_two_tensor_axes():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    expected = [((4, 3), (0, 0)), ((4, 2), (0, 3)), ((3, 3), (4, 0)), ((3, 2), (4, 3))]
    assert parts([7, 5], mesh, [dist.Shard(0), dist.Shard(1)]) == expected


def test_the_order_of_ranks_is_the_mesh_s():
    mesh = dist.ProcessMesh([[3, 1], [2, 0]], dim_names=["x", "y"])
    by_rank = [fc.compute_local_shape_and_global_offset([4], mesh, [dist.Shard(0)], rank)[1] for rank in range(4)]
    assert by_rank == [(2,), (0,), (2,), (0,)]


def test_a_rank_outside_of_the_mesh_holds_nothing():
    mesh = dist.ProcessMesh([1, 2], dim_names=["x"])
    assert fc.compute_local_shape_and_global_offset([4], mesh, [dist.Shard(0)], 0) == (None, None)
    assert fc.compute_local_shape_and_global_offset([4], mesh, [dist.Shard(0)], 2) == ((2,), (2,))


def test_two_mesh_axes_split_one_tensor_axis():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    assert held([7], mesh, [Bare(0, 0), Bare(0, 1)]) == [[0, 1], [2, 3], [4, 5], [6]]
    # The other axis first.
    assert held([7], mesh, [Bare(0, 1), Bare(0, 0)]) == [[0, 1], [4, 5], [2, 3], [6]]
    # As written, without an order: the first mesh axis splits first.
    assert held([7], mesh, [dist.Shard(0), dist.Shard(0)]) == [[0, 1], [2, 3], [4, 5], [6]]


def test_fewer_placements_than_mesh_axes():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    assert held([4], mesh, [dist.Shard(0)]) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_more_placements_than_mesh_axes_that_split_nothing():
    # What dist.shard_layer() gives a parameter of two axes on a mesh of one.
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    assert parts([4, 4], mesh, [dist.Replicate(), dist.Replicate()]) == [((4, 4), (0, 0))] * 2


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([dist.Partial()], "Partial over mesh axis 0.*Remedy .FC802.: save what dist.reshard"),
        ([dist.Shard(2)], "Shard.*splits no axis of a tensor of shape"),
        ([dist.Shard(0), dist.Shard(1)], "2 placements .* for a mesh of 1 axes"),
    ],
)
def test_what_has_no_place_is_refused(placements, message):
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    with pytest.raises(ValueError, match=message):
        fc.compute_local_shape_and_global_offset([4, 4], mesh, placements, 0)


def test_re_arranged_elements_are_refused():
    placement = dist.Shard(0)
    if not hasattr(placement, "set_split_factor"):
        pytest.skip("this Paddle does not re-arrange")
    placement.set_split_factor(2)
    with pytest.raises(ValueError, match="re-arranged over mesh axis 0 .*no box.*Remedy"):
        fc.compute_local_shape_and_global_offset([8], dist.ProcessMesh([0, 1], dim_names=["x"]), [placement], 0)


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    mesh=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_parts_cover_every_element_as_often_as_it_is_replicated(shape, mesh, data):
    axes = [data.draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    ranks = np.arange(np.prod(mesh)).reshape(mesh)
    placements = [dist.Replicate() if axis is None else dist.Shard(axis) for axis in axes]
    process_mesh = dist.ProcessMesh(ranks, dim_names=[f"x{i}" for i in range(len(mesh))])
    seen = np.zeros(shape, dtype=int)
    for size, offset in parts(shape, process_mesh, placements):
        seen[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
    copies = np.prod([extent for extent, axis in zip(mesh, axes) if axis is None])
    assert (seen == copies).all()
