"""States of optimizers that have taken no step: created on asking, with nothing else changed.

Everything is compared bit for bit with a job that was not asked.

The jobs: states of optimizers that have taken no step yet.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.install import install, uninstall
from paddle_flexckpt.parallel.state_creation import create_states
from paddle_flexckpt.parallel.tensor_fusion import buffer_pieces, trainable_parameters
from tests.remedies.following import advised
from tests.semi_auto.strategies import BY_NAME
from tests.semi_auto.training import build, gather

pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def local(tensor):
    """This rank's part of a tensor, which shares its memory."""
    return tensor._local_value() if tensor.is_dist() else tensor


def raw(tensor):
    """The bytes of this rank's part."""
    tensor = local(tensor)
    return tensor.numpy().tobytes() if tensor._is_initialized() else b""


def parameters_of(built):
    """What holds the values of the parameters on this rank: they themselves, or the buffers of ``fully_shard``."""
    if built.strategy.fully_shard != "fused":
        return list(built.model.parameters())
    from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context

    return [group.params_buffer.data_buffer for group in get_fsdp_context().buffer_manager.buffer_groups]


def ask(built):
    """Has the states created; returns them by name, as Paddle gives them."""
    with paddle.utils.unique_name.guard(built._names):
        if built.optimizer is built.inner:
            create_states(built.optimizer)
        return built.optimizer.state_dict()


def counting(function, calls):
    def counted(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def asked(strategy, sizes, steps=2):
    """What asking changes: of the job itself, and of what becomes of it."""
    fc.install()
    wanted = build(strategy, sizes)
    wanted_losses = [wanted.step(i) for i in range(steps)]
    wanted_names = sorted(wanted.optimizer.state_dict())
    wanted = gather(wanted)

    built = build(strategy, sizes)
    before = [raw(parameter) for parameter in parameters_of(built)]
    calls = []
    kind = type(built.optimizer)
    native = kind.step
    kind.step = counting(native, calls)
    try:
        state = ask(built)
        again = ask(built)
    finally:
        kind.step = native
    after = [raw(parameter) for parameter in parameters_of(built)]
    powers = {local(tensor).numpy().item() for name, tensor in state.items() if "beta1_pow" in name}
    zeros = {float(local(tensor).abs().sum()) for name, tensor in state.items() if "moment" in name}
    gradients = [parameter.name for parameter in built.model.parameters() if parameter._grad_ivar() is not None]
    losses = [built.step(i) for i in range(steps)]
    got = gather(built)
    return {
        "steps": len(calls),
        "changed": sum(a != b for a, b in zip(before, after)),
        "gradients": gradients,
        "powers": sorted(powers),
        "moments": sorted(zeros),
        "same": all(again[name] is state[name] for name in state) and len(again) == len(state),
        "names": sorted(state) == wanted_names,
        "losses": losses == wanted_losses,
        "wrong": [key for key in wanted if not np.array_equal(got[key], wanted[key])],
        "keys": sorted(got) == sorted(wanted),
    }


def resumed(strategy, sizes, steps=2):
    """A fresh job takes over what another has come to, tensor by tensor, and goes on as that does."""
    fc.install()

    def tensors(built):
        state = {name: tensor for name, tensor in ask(built).items() if name != "LR_Scheduler"}
        return {**state, **{f"parameter {i}": tensor for i, tensor in enumerate(parameters_of(built))}}

    old = build(strategy, sizes)
    for i in range(steps):
        old.step(i)
    saved = {name: np.array(local(tensor).numpy()) for name, tensor in tensors(old).items()}
    losses = [old.step(i) for i in range(steps, 2 * steps)]
    wanted = gather(old)

    new = build(strategy, sizes)
    fresh = tensors(new)
    keys = sorted(fresh) == sorted(saved)
    with paddle.no_grad():
        for name, tensor in fresh.items():
            local(tensor).copy_(paddle.to_tensor(saved[name]), False)
    got_losses = [new.step(i) for i in range(steps, 2 * steps)]
    got = gather(new)
    return {
        "keys": keys,
        "losses": got_losses == losses,
        "wrong": [key for key in wanted if not np.array_equal(got[key], wanted[key])],
    }


def predicted(strategy, sizes, megabytes):
    """The parts of fused buffers that were told before the first step, and those that it made."""
    fc.install()
    built = build(strategy, sizes)
    optimizer = built.optimizer
    optimizer._strategy.sharding.comm_buffer_size_MB = megabytes

    def pieces():
        found = buffer_pieces(optimizer, trainable_parameters(optimizer._param_groups))
        return [[p.parameter.name, p.buffer, p.flat_range.start, p.flat_range.stop] for p in found]

    before = pieces()
    built.step(0)
    shapes = {name: list(local(tensor).shape) for name, tensor in built.inner._accumulators["moment1"].items()}
    return {"before": before, "after": pieces(), "shapes": shapes, "buffers": len(optimizer.param_storage)}


def other_fusion(case):
    """A first step that fuses other parts than states were created for: the error, and whether anything changed."""
    fc.install()
    built = build("dp2-fusion", "uneven")
    if case == "enabled late":
        built.optimizer.enable_tensor_fusion = False
        ask(built)
        built.optimizer.enable_tensor_fusion = True
    else:
        ask(built)
        built.model.norm.weight._register_backward_hook(lambda *_: setattr(built.model.norm.weight, "main_grad", None))
    before = [raw(parameter) for parameter in built.model.parameters()]
    text = None
    try:
        built.step(0)
    except ValueError as error:
        text = str(error)
    unchanged = [raw(parameter) for parameter in built.model.parameters()] == before
    again = build("dp2-fusion", "uneven")  # fused from the beginning, and with one parameter that is not trained
    again.model.norm.weight.stop_gradient = case != "enabled late"
    ask(again)
    again.step(0)
    return [text, unchanged, [raw(parameter) for parameter in again.model.parameters()] != before]


def odd_parameters(case):
    """Optimizers that are out of the ordinary: states that were asked for, and what becomes of the parameters.

    Returns:
        For states asked for before the first step, and not: names of states with their values after two steps, and
        the values of the parameters.
    """
    fc.install()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)
    results = []
    for early in (False, True):
        with paddle.utils.unique_name.guard():
            layers = [paddle.nn.Linear(6, 8), paddle.nn.Linear(6, 8)]
            for i, layer in enumerate(layers):
                layer.weight.set_value(np.random.RandomState(i).randn(6, 8).astype("float32"))
                if case == "master weights":
                    layer.to(dtype="bfloat16")
                dist.shard_layer(layer, mesh)
            optimizer, used = make_optimizer(case, layers, mesh)
            state = optimizer.state_dict() if early else None
            if early:
                again = optimizer.state_dict()
                assert all(
                    again[name] is state[name] for name in state if name not in ("master_weights", "LR_Scheduler")
                )
            names = sorted(state or ())
            for step in range(2):
                x = np.random.RandomState(10 + step).randn(4, 6).astype("float32")
                x = dist.shard_tensor(paddle.to_tensor(x), mesh, [dist.Shard(0)])
                loss = sum(
                    (paddle.matmul(x, layer.weight.astype("float32")) + layer.bias.astype("float32")).square().mean()
                    for layer in used
                )
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
            state = optimizer.state_dict()
            masters = state.pop("master_weights", {})
            state.pop("LR_Scheduler", None)
            values = {name: raw(tensor).hex() for name, tensor in {**state, **masters}.items()}
            values.update({p.name: raw(p).hex() for layer in layers for p in layer.parameters()})
            results.append([names, values])
    return results


def make_optimizer(case, layers, mesh):
    """The optimizer of a case, and the layers whose parameters get gradients."""
    parameters = [p for layer in layers for p in layer.parameters()]
    stage, named = dist.ShardingStage1("dp", mesh), {"weight_decay": 0.1}
    kind = paddle.optimizer.AdamW
    if case == "groups":
        stage = None
        parameters = [
            {"params": layers[0].parameters(), "beta1": 0.8, "beta2": 0.99},
            {"params": layers[1].parameters(), "beta1": 0.7},
        ]
    elif case == "frozen":
        layers[0].bias.stop_gradient = True
    elif case == "amsgrad":
        named["amsgrad"] = True
    elif case == "scheduler":
        named["learning_rate"] = paddle.optimizer.lr.StepDecay(0.1, 1)
    elif case == "sgd":
        kind = paddle.optimizer.SGD
    elif case == "master weights":
        named["multi_precision"] = True
    named.setdefault("learning_rate", 0.1)
    return dist.shard_optimizer(kind(parameters=parameters, **named), stage), layers[:1] if case == "unused" else layers


def half_precision(strategy):
    """Master weights that exist before the first step: whether they are the parameters' values, cut as moments are."""
    fc.install()
    built = build(strategy, "even")
    with paddle.no_grad():
        for parameter in built.model.parameters():
            half = parameter._local_value().astype("bfloat16")
            dtype = dist.auto_parallel.api.dtensor_from_local(half, parameter.process_mesh, parameter.placements)
            parameter.get_tensor()._share_data_with(dtype.get_tensor())
    built.inner._multi_precision = True
    state = ask(built)
    masters = state["master_weights"]
    right = []
    for parameter in built.model.parameters():
        if parameter.name not in masters:
            right.append(None)
            continue
        master = local(masters[parameter.name])
        moment = local(built.inner._accumulators["moment1"][masters[parameter.name].name])
        whole = parameter._local_value().astype("float32").numpy()
        if built.strategy.fusion:
            pieces = buffer_pieces(built.optimizer, trainable_parameters(built.optimizer._param_groups))
            whole = whole.reshape(-1)[next(p.flat_range for p in pieces if p.parameter is parameter)]
        elif built.strategy.stage == 1:
            whole = np.array_split(whole, dist.get_world_size())[dist.get_rank()]
        right.append(np.array_equal(master.numpy(), whole) and list(moment.shape) == list(master.shape))
    return right


def on_other_ranks():
    """A parameter per rank, each on a mesh of that rank alone, as pipeline stages are: whose states a rank gets."""
    fc.install()
    with paddle.utils.unique_name.guard():
        layers = [paddle.nn.Linear(4, 3) for _ in range(dist.get_world_size())]
        for rank, layer in enumerate(layers):
            dist.shard_layer(layer, dist.ProcessMesh([rank], dim_names=["dp"]))
        parameters = [p for layer in layers for p in layer.parameters()]
        optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(parameters=parameters, weight_decay=0.5))
        mine = layers[dist.get_rank()]
        before = raw(mine.weight)
        names = sorted(optimizer.state_dict())
    return [names, raw(mine.weight) == before, [p.name for p in mine.parameters()]]


def handed_over():
    """State that ``set_state_dict`` was given before the first step: whether it is returned, described and stepped."""
    fc.install()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)
    finals = []
    for way in ("uninterrupted", "handed over", "described"):
        with paddle.utils.unique_name.guard():
            layer = paddle.nn.Linear(6, 8)
            layer.weight.set_value(np.random.RandomState(0).randn(6, 8).astype("float32"))
            dist.shard_layer(layer, mesh)

        def step(optimizer):
            x = dist.shard_tensor(paddle.ones([4, 6]), mesh, [dist.Shard(0)])
            layer(x).square().mean().backward()  # noqa: B023
            optimizer.step()
            optimizer.clear_grad()

        def make():
            inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())  # noqa: B023
            return dist.shard_optimizer(inner)

        with paddle.utils.unique_name.guard():
            optimizer = make()
            step(optimizer)
        if way != "uninterrupted":
            given = {name: paddle.to_tensor(local(tensor).numpy()) for name, tensor in optimizer.state_dict().items()}
            with paddle.utils.unique_name.guard():
                optimizer = make()
                optimizer.set_state_dict(given)
                if way == "handed over":
                    asked_for = optimizer.state_dict()
                    same = all(asked_for[name] is given[name] for name in given) and len(asked_for) == len(given)
                else:
                    moment = optimizer.sharded_state_dict(layer.sharded_state_dict())["weight.moment1_0"]
                    same = same and raw(moment.local_tensor) == raw(given["linear_0.w_0.dist_moment1_0"])
                step(optimizer)
        else:
            step(optimizer)
        finals.append([raw(p).hex() for p in layer.parameters()])
    return [same, finals[0] == finals[1] == finals[2]]


# -- what is asserted -------------------------------------------------------------------------------------------------

TWO = ("single", "mp2", *(f"dp2-stage{stage}" for stage in range(4)), "dp2-fusion")
FOUR = ("dp2-mp2-stage1", "dp2-mp2-stage3", "dp2-mp2-fusion", "dp4-fusion", "dp4-fully-shard-fused")
FULLY = ("dp2-fully-shard", "dp2-fully-shard-fused")
# Paddle's float32 number nearest to 0.9, AdamW's beta1.
BETA1 = 0.8999999761581421


def run(world, job, strategy, **named):
    """Runs a job on as many ranks as a strategy needs; a dense one runs on each of two."""
    return world(max(BY_NAME[strategy].ranks, 2)).run(job, strategy=strategy, **named)


@pytest.mark.parametrize("strategy", [*TWO, *FULLY, *FOUR])
def test_asking_changes_nothing(world, strategy):
    for report in run(world, asked, strategy, sizes="uneven"):
        assert report["steps"] == 0
        assert report["changed"] == 0
        assert report["gradients"] == []
        assert report["powers"] == [BETA1]
        assert report["moments"] == [0.0]
        assert report["same"]  # asking again gives the same tensors
        assert report["names"]  # which are named as the first step names them
        assert report["keys"]
        assert report["losses"]
        assert report["wrong"] == []


@pytest.mark.parametrize("strategy", [*TWO[2:], *FULLY, "dp2-mp2-fusion"])
def test_a_fresh_job_that_is_given_another_ones_state_goes_on_as_that(world, strategy):
    for report in run(world, resumed, strategy, sizes="uneven"):
        assert report == {"keys": True, "losses": True, "wrong": []}


@pytest.mark.parametrize("strategy", ["dp2-fusion", "dp2-mp2-fusion", "dp4-fusion"])
@pytest.mark.parametrize("megabytes", [256, 0])
def test_what_the_first_step_fuses_is_told_before(world, strategy, megabytes):
    """With a limit of 0 every parameter has a buffer of its own."""
    for report in run(world, predicted, strategy, sizes="uneven", megabytes=megabytes):
        assert report["before"] == report["after"]
        assert report["shapes"] == {name: [stop - start] for name, _, start, stop in report["before"]}
        assert report["buffers"] == (1 if megabytes else 7)


def test_fusing_other_parameters_than_the_states_are_of_is_an_error(world2):
    for rank, (text, unchanged, trained) in enumerate(world2.run(other_fusion, case="unused")):
        assert unchanged and trained
        assert text.startswith(f"rank {rank}: the first step fuses other parameters")
        assert "without a gradient: ['layer_norm_0.w_0.dist']" in text
        advised("parallel/tensor_fusion.py", "set stop_gradient on parameters that are not trained, before", text)


def test_enabling_fusion_after_states_of_whole_parameters_is_an_error(world2):
    for rank, (text, unchanged, trained) in enumerate(world2.run(other_fusion, case="enabled late")):
        assert unchanged and trained
        assert text.startswith(f"rank {rank}: the optimizer has states of whole parameters")
        advised("parallel/tensor_fusion.py", "enable tensor fusion before the optimizer is asked for its state", text)


@pytest.mark.parametrize(
    ("case", "states"),
    [
        ("groups", 16),  # with betas of their own
        ("frozen", 12),
        ("amsgrad", 20),
        ("scheduler", 17),
        ("sgd", 0),
        ("master weights", 17),
        ("unused", 16),
    ],
)
def test_optimizers_out_of_the_ordinary(world2, case, states):
    for late, early in world2.run(odd_parameters, case=case):
        assert len(early[0]) == states
        assert early[1] == late[1]


@pytest.mark.parametrize("strategy", ["dp2-stage0", "dp2-stage1", "dp2-fusion"])
def test_master_weights_are_the_parameters_and_cut_as_their_moments(world2, strategy):
    reports = world2.run(half_precision, strategy=strategy)
    found = {found for report in reports for found in report}
    assert found == ({True, None} if "fusion" in strategy else {True})
    assert all(any(report[i] for report in reports) for i in range(7))


def test_parameters_of_other_ranks_have_no_states_here(world2):
    for names, unchanged, mine in world2.run(on_other_ranks):
        assert unchanged
        states = ("beta1_pow_acc_0", "beta2_pow_acc_0", "moment1_0", "moment2_0")
        assert names == sorted(f"{parameter}_{state}" for parameter in mine for state in states)


def test_state_that_was_set_before_the_first_step_is_kept_for_it(world2):
    assert world2.run(handed_over) == [[True, True]] * 2


def test_paddles_own_method_stays_reachable_and_comes_back():
    from paddle.distributed.auto_parallel.api import _ShardOptimizer

    uninstall()
    native = vars(_ShardOptimizer)["state_dict"], vars(_ShardOptimizer)["_tensor_fusion"]
    install()
    try:
        assert vars(_ShardOptimizer)["_paddle_state_dict"] is native[0]
        assert _ShardOptimizer.state_dict is not native[0]
    finally:
        uninstall()
    assert (vars(_ShardOptimizer)["state_dict"], vars(_ShardOptimizer)["_tensor_fusion"]) == native
    assert not hasattr(_ShardOptimizer, "_paddle_state_dict")
