"""Every reshard that the CPU world has to offer, in all dtypes, against slices cut by hand.

The jobs: every change of placements against slices cut by hand.
"""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.base import framework
from paddle.distributed.auto_parallel import fully_shard_fusion

from paddle_flexckpt.testing import cpu_world
from tests.semi_auto import training

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.semi_auto.test_reshard"


#: (7, 11) is uneven everywhere; over 4 ranks, (6, 5) is cut into 2 2 2 0 and 2 2 1 0.
SHAPES = ((8, 12), (7, 11), (6, 5))
CASES = [(mesh, shape, "float32") for mesh in ((2,), (4,), (2, 2)) for shape in SHAPES]
CASES += [
    (mesh, shape, dtype) for dtype in ("float16", "bfloat16") for mesh, shape in (((4,), (6, 5)), ((2, 2), (7, 11)))
]

# -- what each rank runs -----------------------------------------------------------------------------------------------

PLACEMENTS = {"R": dist.Replicate(), "S0": dist.Shard(0), "S1": dist.Shard(1), "P": dist.Partial()}


def every_reshard(dtype, shape, mesh):
    """Reshards from all placements to all but partial ones; returns the names of those that came out wrong."""
    processes = np.arange(np.prod(mesh)).reshape(mesh)
    process_mesh = dist.ProcessMesh(processes, dim_names=["x", "y"][: len(mesh)])
    place = [int(index[0]) for index in np.nonzero(processes == dist.get_rank())]
    values = (np.arange(np.prod(shape)).reshape(shape) % 13).astype("float32")
    wrong = []
    for before in combinations("R S0 S1 P".split(), len(mesh)):
        for after in combinations("R S0 S1".split(), len(mesh)):
            source, factor = distributed(values, dtype, process_mesh, place, before)
            moved = dist.reshard(source, process_mesh, [PLACEMENTS[name] for name in after])
            wanted = cut(values * factor, mesh, place, after)
            got = array(moved)
            if str(moved.dtype) != f"paddle.{dtype}" or got.shape != wanted.shape or not np.array_equal(got, wanted):
                wrong.append(f"{before} -> {after}: {got.tolist()}, not {wanted.tolist()}")
    return wrong


def combinations(names, axes):
    """Placements for every axis of the mesh, no axis of a tensor cut twice."""
    every = itertools.product(names, repeat=axes)
    return [some for some in every if all(some.count(cut) < 2 for cut in ("S0", "S1"))]


def distributed(values, dtype, mesh, place, placements):
    """A tensor of these placements, and what its values are multiplied with (partial ones add up)."""
    named = [PLACEMENTS[name] for name in placements]
    if "P" not in placements:
        return dist.shard_tensor(paddle.to_tensor(values).astype(dtype), mesh, named), 1
    part = cut(values, mesh.shape, place, placements)
    factor = 1
    for axis, name in enumerate(placements):
        if name == "P":
            part = part * (place[axis] + 1)
            factor *= mesh.shape[axis] * (mesh.shape[axis] + 1) // 2
    local = paddle.to_tensor(part).astype(dtype)
    return paddle.Tensor(
        local, dims=list(values.shape), process_mesh=mesh, placements=named, place=paddle.CPUPlace()
    ), factor


def cut(values, mesh, place, placements):
    """A rank's part: the quotient rounded up for each, the last ones get what is left."""
    for axis, name in enumerate(placements):
        if name.startswith("S"):
            dimension = int(name[1:])
            share = -(-values.shape[dimension] // mesh[axis])
            values = np.take(values, range(values.shape[dimension])[share * place[axis] :][:share], dimension)
    return values


def array(tensor):
    """A tensor's local values."""
    local = tensor._local_value()
    return local.astype("float32").numpy() if local._is_initialized() else np.zeros(tensor._local_shape, "float32")


def gradients(rows, dtype):
    """Takes gradients through reshards; returns what came out wrong."""
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
    values = (np.arange(rows * 6).reshape(rows, 6) % 13).astype("float32")
    wrong = []
    for before, after in itertools.product("R S0 S1".split(), repeat=2):
        source, _ = distributed(values, dtype, mesh, [dist.get_rank()], [before])
        source.stop_gradient = False
        moved = dist.reshard(source, mesh, [PLACEMENTS[after]])
        # The gradient of each element is its number.
        whole = dist.shard_tensor(paddle.to_tensor(values).astype(dtype), mesh, [PLACEMENTS[after]])
        moved.backward(whole)
        wanted = cut(values, mesh.shape, [dist.get_rank()], [before])
        got = array(source.grad)
        if got.shape != wanted.shape or not np.array_equal(got, wanted):
            wrong.append(f"{before} -> {after}: {got.tolist()}, not {wanted.tolist()}")
    return wrong


def cut_parameter(dtype):
    """Cuts a parameter of five rows over four ranks."""
    parameter = paddle.create_parameter([5, 3], dtype, "kept", default_initializer=paddle.nn.initializer.Constant(0.0))
    parameter.set_value(paddle.arange(15, dtype="float32").reshape([5, 3]).astype(dtype))
    parameter.stop_gradient = True
    parameter.trainable = False
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
    out = dist.shard_tensor(parameter, mesh, [dist.Shard(0)])
    return [out._local_shape, array(out).reshape(-1), out.name, out.trainable]


def on_some_ranks(dtype, rows):
    """What each rank has of a tensor on ranks 2 and 1; the others have nothing to reshard."""
    mesh = dist.ProcessMesh([2, 1], dim_names=["x"])
    values = paddle.arange(rows * 2, dtype="float32").reshape([rows, 2]).astype(dtype)
    out = dist.shard_tensor(values, mesh, [dist.Shard(0)])
    on_mesh = dist.get_rank() in mesh.process_ids
    return [out.shape, str(out.dtype), array(out).reshape(-1) if on_mesh else out._is_initialized()]


def ranks_on_axes():
    """Where each process is on a mesh; the last one is not on it."""
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    return [[mesh.get_rank_by_dim_and_process_id(axis, process) for axis in ("x", 1)] for process in range(5)]


def lacking():
    """What a CPU cannot do without the CPU world, and that it can do it again after."""
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    tensor = paddle.ones([4, 4])
    partial = dist.shard_tensor(tensor, mesh, [dist.Partial()])
    rows = dist.shard_tensor(tensor, mesh, [dist.Shard(0)])
    attempts = {
        "partial to shard": lambda: dist.reshard(partial, mesh, [dist.Shard(0)]),
        "shard to shard": lambda: dist.reshard(rows, mesh, [dist.Shard(1)]),
        "half precision": lambda: dist.shard_tensor(tensor.astype("bfloat16"), mesh, [dist.Shard(0)]),
    }
    out = {}
    cpu_world.uninstall()
    try:
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception as error:  # upstream raises what it likes; the text is compared
                out[name] = str(error)
    finally:
        cpu_world.install(timeout=None, close_at_exit=False)
    for attempt in attempts.values():
        attempt()
    out["again"] = "it works"
    return out


def left_behind():
    """What jobs leave in Paddle's globals, before a reset and after."""
    built = training.build("dp2-fully-shard-fused")
    training.build("dp2-stage3")
    training.build("dp2-fusion")
    built.step(0)
    before = _globals()
    cpu_world.reset_semi_auto()
    return before, _globals()


def _globals():
    return {
        "mesh": dist.auto_parallel.get_mesh() is not None,
        "buffers": fully_shard_fusion.get_fsdp_context() is not None,
        "stage 3": "skip_sharding3_output_reshard" in os.environ,
        "fusion": "FLAGS_enable_tensor_fusion" in os.environ,
        "any": framework.global_var._in_auto_parallel_,
    }


# -- what is asserted -------------------------------------------------------------------------------------------------


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
