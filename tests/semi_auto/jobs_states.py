"""Jobs of test_states: states of optimizers that have taken no step yet."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.shard_optimizer import create_states
from paddle_flexckpt.parallel.tensor_fusion import fused_pieces, trainable_parameters
from tests.semi_auto.training import build, gather


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
        found = fused_pieces(optimizer, trainable_parameters(optimizer._param_groups))
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
    return [text, [raw(parameter) for parameter in built.model.parameters()] == before]


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
            pieces = fused_pieces(built.optimizer, trainable_parameters(built.optimizer._param_groups))
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
