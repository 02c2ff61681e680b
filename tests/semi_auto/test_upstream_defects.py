"""Each defect of Paddle's own FlexCheckpoint in semi-automatic parallel, named: what this library does there.

The jobs: what Paddle's own FlexCheckpoint gets wrong in semi-automatic parallel.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.process_mesh import ProcessMesh

import paddle_flexckpt as fc
from tests.semi_auto.test_states import local, raw
from tests.semi_auto.training import build, gather

pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def numbers(*shape):
    return np.arange(int(np.prod(shape)), dtype="float32").reshape(shape) + 1


def mesh_of(*shape):
    size = dist.get_world_size()
    names = ["x", "y"][: len(shape) or 1]
    mesh = dist.ProcessMesh(np.arange(size).reshape(shape or (size,)), dim_names=names)
    dist.auto_parallel.set_mesh(mesh)
    return mesh


def linear(mesh, placement=None):
    """A linear layer of known numbers whose weight is cut, or not."""
    with paddle.utils.unique_name.guard():
        layer = paddle.nn.Linear(5, 3)
        layer.weight.set_value(numbers(5, 3))
        layer.bias.set_value(numbers(3))

        def place(_, sublayer, mesh):
            cut = [placement or dist.Replicate()] + [dist.Replicate()] * (mesh.ndim - 1)
            sublayer.weight = dist.shard_tensor(sublayer.weight, mesh, cut)
            sublayer.bias = dist.shard_tensor(sublayer.bias, mesh, [dist.Replicate()] * mesh.ndim)

        dist.shard_layer(layer, mesh, place)
    return layer


def described(state):
    """Offsets and shapes of what this rank holds."""
    return {key: [list(weight.global_offset), list(weight.local_shape)] for key, weight in state.items()}


def loaded(directory, **arrays):
    """Names of whole, dense tensors that a load does not fill with the given arrays."""
    targets = {key: paddle.full(array.shape, -1.0) for key, array in arrays.items()}
    fc.load_state_dict(targets, directory, strict=True)
    return [key for key, array in arrays.items() if not np.array_equal(targets[key].numpy(), array)]


def sharded_parameters(directory):
    """S1: a layer whose weight is cut."""
    fc.install()
    layer = linear(mesh_of(), dist.Shard(0))
    state = layer.sharded_state_dict()
    fc.save_state_dict(state, directory)
    return [described(state)["weight"], loaded(directory, weight=numbers(5, 3), bias=numbers(3))]


def moments_of_stage_1(directory):
    """S2: moments are cut whose parameter is whole."""
    fc.install()
    mesh = mesh_of()
    layer = linear(mesh)
    with paddle.utils.unique_name.guard():
        inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        optimizer = dist.shard_optimizer(inner, dist.ShardingStage1("x", mesh))
        state = optimizer.sharded_state_dict(layer.sharded_state_dict())
    moment = state["weight.moment1_0"]
    rows = slice(moment.global_offset[0], moment.global_offset[0] + moment.local_shape[0])
    with paddle.no_grad():
        moment.local_tensor.copy_(paddle.to_tensor(numbers(5, 3)[rows]), False)
    fc.save_state_dict(state, directory)
    target = {"weight.moment1_0": paddle.full([5, 3], -1.0)}
    fc.load_state_dict(target, directory)
    wrong = not np.array_equal(target["weight.moment1_0"].numpy(), numbers(5, 3))
    return [described(state)["weight.moment1_0"], wrong]


def asked_and_saved(directory):
    """S3: every way of asking a job for its state before it has stepped, and a load into it."""
    fc.install()
    wanted = build("dp2-stage1")
    wanted_losses = [wanted.step(i) for i in range(2)]
    wanted = gather(wanted)
    built = build("dp2-stage1")

    def held():
        return [raw(parameter) for parameter in built.model.parameters()]

    before = held()
    with paddle.utils.unique_name.guard(built._names):
        built.optimizer.state_dict()
        model = built.model.sharded_state_dict()
        state = {**model, **built.optimizer.sharded_state_dict(model)}
        fc.save_state_dict(state, directory)
        fc.load_state_dict(state, directory, strict=True)
    powers = {float(value.local_tensor.numpy().item()) for key, value in state.items() if "beta1_pow" in key}
    gradients = [p.name for p in built.model.parameters() if p._grad_ivar() is not None]
    same = held() == before
    losses = [built.step(i) for i in range(2)]
    got = gather(built)
    wrong = [key for key in wanted if not np.array_equal(wanted[key], got[key])]
    return {"same": same, "powers": sorted(powers), "gradients": gradients, "goes on": [losses == wanted_losses, wrong]}


def forget_buffers():
    """Ends the life of a model under ``fully_shard``: any optimizer of the process would go on to step its buffers."""
    from paddle.distributed.auto_parallel.fully_shard_fusion import register_fsdp_context

    register_fsdp_context(None)


def made_before(fused):
    """An optimizer that was made before ``fully_shard``, as in Paddle's documentation: its states, before and after."""
    from paddle.distributed.fsdp import fully_shard

    fc.install()
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)
    with paddle.utils.unique_name.guard():
        model = paddle.nn.Linear(6, 5)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        model = fully_shard(model, mesh=mesh, enable_tensor_fusion_and_overlap=fused)

        def state():
            described = optimizer.sharded_state_dict(model.sharded_state_dict())
            return {key: value.local_tensor for key, value in described.items()}

        before = state()
        x = dist.shard_tensor(paddle.ones([4, 6]), mesh, [dist.Shard(0)])
        model(x).square().mean().backward()
        optimizer.step()
        after = state()
    moved = [key for key, tensor in after.items() if float(tensor.abs().sum()) != 0 and "moment" in key]
    return [sorted(before), sorted(after), sorted(moved)]


def fused_states(directory, strategy, others):
    """S4, S5: states in fused buffers are saved, and loaded into the same layout and into others, which go on."""
    fc.install()

    def state_of(built):
        with paddle.utils.unique_name.guard(built._names):
            model = built.model.sharded_state_dict()
            return {**model, **built.optimizer.sharded_state_dict(model)}

    built = build(strategy)
    for i in range(2):
        built.step(i)
    fc.save_state_dict(state_of(built), directory)
    wanted = gather(built)
    results = {}
    for other in others:
        forget_buffers()
        built = build(other)
        fc.load_state_dict(state_of(built), directory, strict=True)
        # Paddle knows of fused buffers from the first step on; the oracle needs them.
        got = gather(built) if not built.strategy.fusion else None
        if got is None:
            loss = built.step(2)
            results[other] = ["loss", loss]
            continue
        results[other] = [key for key in wanted if not np.array_equal(wanted[key], got[key])]
    return results


def losses_after(strategy, steps):
    """The last loss of a job that is not interrupted."""
    built = build(strategy)
    return [built.step(i) for i in range(steps)][-1]


def two_axes_cut_one(directory):
    """S6: two mesh axes cut one tensor axis; saved, and loaded whole and in the same cut."""
    fc.install()
    mesh = mesh_of(2, 2)
    cut = [dist.Shard(0), dist.Shard(0)]
    source = {"c": dist.shard_tensor(paddle.to_tensor(numbers(16, 3)), mesh, cut)}
    fc.save_state_dict(source, directory)
    target = {"c": dist.shard_tensor(paddle.full([16, 3], -1.0), mesh, cut)}
    fc.load_state_dict(target, directory, strict=True)
    return [raw(target["c"]) == raw(source["c"]), loaded(directory, c=numbers(16, 3))]


def nested(directory):
    """S7: a nested state dict of DistTensors, saved and loaded."""
    fc.install()
    mesh = mesh_of()

    def state(array):
        whole = dist.shard_tensor(paddle.to_tensor(array), mesh, [dist.Replicate()])
        return {"model": {"w": dist.shard_tensor(paddle.to_tensor(array), mesh, [dist.Shard(0)])}, "o": {"m": whole}}

    source, target = state(numbers(5, 3)), state(-numbers(5, 3))
    fc.save_state_dict(source, directory)
    fc.load_state_dict(target, directory, strict=True)
    return [raw(target["model"]["w"]) == raw(source["model"]["w"]), raw(target["o"]["m"]) == raw(source["o"]["m"])]


def failed_load(directory):
    """S8: what one rank asks for cannot be loaded: the error of each rank, and whether targets are as they were."""
    fc.install()
    mesh = mesh_of()

    def refuse(*args, **kwargs):
        raise AssertionError("Tensor.cuda() was called")

    source = {"w": dist.shard_tensor(paddle.to_tensor(numbers(6, 3)), mesh, [dist.Shard(0)])}
    fc.save_state_dict(source, directory)
    target = {"w": dist.shard_tensor(paddle.full([6, 3], -1.0), mesh, [dist.Shard(1)])}
    if dist.get_rank() == 1:
        target["v"] = paddle.full([2], -1.0)
    before = {key: raw(tensor) for key, tensor in target.items()}
    text = None
    native = paddle.Tensor.cuda
    paddle.Tensor.cuda = refuse
    try:
        try:
            fc.load_state_dict(target, directory)
        except fc.ValidationError as error:
            text = str(error)
        unchanged = {key: raw(tensor) for key, tensor in target.items()} == before
        target.pop("v", None)
        fc.load_state_dict(target, directory)
    finally:
        paddle.Tensor.cuda = native
    columns = numbers(6, 3)[:, :2] if dist.get_rank() == 0 else numbers(6, 3)[:, 2:]
    return [text, unchanged, np.array_equal(local(target["w"]).numpy(), columns)]


def without_rank_by_dim(directory):
    """S9: ``get_rank_by_dim_and_process_id`` cannot be called under NumPy 2.4, and is not."""
    fc.install()
    native = ProcessMesh.get_rank_by_dim_and_process_id

    def refuse(*args, **kwargs):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    mesh = mesh_of(2, 2)
    ProcessMesh.get_rank_by_dim_and_process_id = refuse
    try:
        source = {"w": dist.shard_tensor(paddle.to_tensor(numbers(4, 6)), mesh, [dist.Shard(1), dist.Shard(0)])}
        fc.save_state_dict(source, directory)
        return loaded(directory, w=numbers(4, 6))
    finally:
        ProcessMesh.get_rank_by_dim_and_process_id = native


def fully_sharded_model(directory):
    """S10: a model whose parameters have no memory of their own: what a save of it holds, and of its plain state."""
    fc.install()
    built = build("dp2-fully-shard-fused")
    built.step(0)
    fc.save_state_dict(built.model.sharded_state_dict(), f"{directory}/sharded")
    wanted = {key: array for key, array in gather(built).items() if key in dict(built.model.named_parameters())}
    wrong = loaded(f"{directory}/sharded", **wanted)
    text = None
    try:
        fc.save_state_dict(built.model.state_dict(), f"{directory}/plain")
    except (ValueError, fc.CheckpointError) as error:
        text = str(error)
        return [len(wanted), wrong, text, None]
    return [len(wanted), wrong, text, loaded(f"{directory}/plain", **wanted)]


# -- what is asserted -------------------------------------------------------------------------------------------------


def test_s1_offsets_of_sharded_parameters(world2, tmp_path):
    """Upstream: offset 0 on every rank; all shards but one are lost."""
    first, second = world2.run(sharded_parameters, directory=str(tmp_path / "c"))
    assert first == [[[0, 0], [3, 3]], []]
    assert second == [[[3, 0], [2, 3]], []]


def test_s2_offsets_of_moments_whose_parameter_is_whole(world2, tmp_path):
    """Upstream: the parameter's offset, 0, for every rank's part of a moment."""
    first, second = world2.run(moments_of_stage_1, directory=str(tmp_path / "c"))
    assert first == [[[0, 0], [3, 3]], False]
    assert second == [[[3, 0], [2, 3]], False]


def test_s3_asking_for_state_takes_no_step(world2, tmp_path):
    """Upstream: weight decay is applied, the beta powers are one step ahead, gradients are defined without memory."""
    for report in world2.run(asked_and_saved, directory=str(tmp_path / "c")):
        assert report == {"same": True, "powers": [0.8999999761581421], "gradients": [], "goes on": [True, []]}


def test_s4_states_of_tensor_fusion_are_ranges(world2, tmp_path):
    """Upstream: every rank's part of a moment is saved as the whole of it."""
    others = ["dp2-fusion", "dp2-stage1", "dp2-stage0", "single"]
    expected = world2.run(losses_after, strategy="dp2-fusion", steps=3)
    reports = world2.run(fused_states, directory=str(tmp_path / "c"), strategy="dp2-fusion", others=others)
    for report, loss in zip(reports, expected):
        assert report == {**{other: [] for other in others[1:]}, "dp2-fusion": ["loss", loss]}


def test_s5_states_of_fused_fully_shard_are_of_their_rank(world2, tmp_path):
    """Upstream: ranks' different parts have one key, and are taken for copies."""
    others = ["dp2-fully-shard-fused", "dp2-fully-shard", "dp2-stage3", "single"]
    arguments = {"directory": str(tmp_path / "c"), "strategy": others[0], "others": others}
    for report in world2.run(fused_states, **arguments):
        assert report == {other: [] for other in others}


@pytest.mark.parametrize("fused", [False, True])
def test_s5_optimizers_that_were_made_before_fully_shard(world2, fused):
    """As Paddle's documentation makes them: with parameters that are no longer the model's."""
    for before, after, moved in world2.run(made_before, fused=fused):
        assert before == after
        assert moved == [key for key in after if "moment" in key]
        assert len(moved) >= 2


def test_s6_two_mesh_axes_cut_one_tensor_axis(world4, tmp_path):
    """Upstream: ``AttributeError: get_dim`` at save and load."""
    assert world4.run(two_axes_cut_one, directory=str(tmp_path / "c")) == [[True, []]] * 4


def test_s7_nested_state_is_loaded_as_it_was_saved(world2, tmp_path):
    """Upstream: saved, and refused by load."""
    assert world2.run(nested, directory=str(tmp_path / "c")) == [[True, True]] * 2


def test_s8_a_failed_load_leaves_targets_as_they_were(world2, tmp_path):
    """Upstream: no way from rank to rank without CUDA, which is found out when targets are half overwritten."""
    for text, unchanged, right in world2.run(failed_load, directory=str(tmp_path / "c")):
        assert "no such key (key 'v'" in text
        assert "rank 1" in text
        assert unchanged
        assert right


def test_s9_meshes_of_two_axes_under_numpy_2_4(world4, tmp_path):
    """Upstream: ``only 0-dimensional arrays can be converted to Python scalars``."""
    assert world4.run(without_rank_by_dim, directory=str(tmp_path / "c")) == [[]] * 4


def test_s10_a_fused_fully_shard_model_is_saved(world2, tmp_path):
    """Upstream: an empty checkpoint, and no error."""
    for count, wrong, text, plain in world2.run(fully_sharded_model, directory=str(tmp_path)):
        assert count == 7
        assert wrong == []
        assert (text is None and plain == []) or ("Remedy" in text and not os.path.exists(tmp_path / "plain"))
