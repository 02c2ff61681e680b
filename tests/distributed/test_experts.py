"""Mixtures of experts: every expert is saved, whichever rank has it, and loaded wherever its number is wanted.

The jobs: mixtures of experts under expert (and tensor) parallelism, and in one process.
"""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.incubate.distributed.models.moe import MoELayer

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.experts import ExpertParallelMixin
from paddle_flexckpt.testing import World, cpu_world
from tests.distributed import jobs_common as common
from tests.remedies.following import advised

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

#: (ranks, expert parallelism, tensor parallelism)
LAYOUTS = {
    "single": (1, 1, 1),
    "dp2": (2, 1, 1),
    "ep2": (2, 2, 1),
    "ep4": (4, 4, 1),
    "tp2": (2, 1, 2),
    "ep2 x tp2": (4, 2, 2),
}
PAIRS = [
    *itertools.product(("single", "ep2"), ("single", "ep2")),
    ("ep2", "ep4"),
    ("ep4", "ep2"),
    ("ep2", "ep2 x tp2"),
    ("ep2 x tp2", "single"),
    ("ep2 x tp2", "ep4"),
    ("ep2 x tp2", "ep2 x tp2"),
    ("tp2", "ep2"),
    ("single", "tp2"),
    ("ep2", "dp2"),
    ("dp2", "ep4"),
]

# -- what each rank runs -----------------------------------------------------------------------------------------------

WIDTH, INNER, EXPERTS, TOP = 6, 10, 4, 2
BEFORE, AFTER = (0, 1), (2, 3)
#: Stage 3 cuts parameters of more elements.
SEGMENT = 16
#: Cut axes of what is inside a tensor-parallel expert.
AXES = {"up.weight": 1, "up.bias": 0, "down.weight": 0}
SHAPES = {"up.weight": (WIDTH, INNER), "up.bias": (INNER,), "down.weight": (INNER, WIDTH), "down.bias": (WIDTH,)}


def value(name, shape, salt=""):
    generator = np.random.RandomState(zlib.crc32((name + salt).encode()) % 2**31)
    return (generator.randn(*shape) * 0.3).astype("float32")


class Expert(nn.Layer):
    """An expert with or without tensor parallelism inside; its number in the whole layer decides its values."""

    def __init__(self, number, salt, place, degree):
        super().__init__()
        if degree > 1:
            self.up = fleet.meta_parallel.ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = fleet.meta_parallel.RowParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        for name, parameter in self.named_parameters():
            array = value(f"expert{number}.{name}", SHAPES[name], salt)
            parameter.set_value(common.cut(array, AXES.get(name), place, degree))

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Net(nn.Layer):
    """A linear and a MoELayer; experts spread over ``group``."""

    def __init__(self, group=None, salt="", place=0, degree=1, experts=EXPERTS):
        super().__init__()
        self.group, self.degree, self.salt = group, degree, salt
        rank, size = (0, 1) if group is None else (group.rank, group.nranks)
        local = experts // size
        self.numbers = range(rank * local, (rank + 1) * local)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(
            d_model=WIDTH,
            experts=nn.LayerList([Expert(number, salt, place, degree) for number in self.numbers]),
            gate={"type": "naive", "top_k": TOP},
            moe_group=group,
            mp_group=None,
        )
        for name, parameter in self.named_parameters():
            if ".experts." not in name:
                parameter.set_value(value(name, tuple(parameter.shape), salt))

    def forward(self, x):
        return self.moe(self.inp(x))


def layout(experts, tensor):
    """The groups of a world in which replicas of data are ranks of expert parallelism.

    Returns:
        Expert-parallel group or None, place and degree in tensor parallelism.
    """
    size = dist.get_world_size()
    if size == 1:
        return None, 0, 1
    hcg = cpu_world.init_fleet(dp=size // tensor, mp=tensor)
    group = None
    if experts > 1:
        # Fleet's own groups of data parallelism are those that hold different experts here.
        group = hcg.get_data_parallel_group()
        if group.nranks != experts:
            raise ValueError(f"the world of {size} does not give expert parallelism of {experts}")
    return group, hcg.get_model_parallel_rank() if tensor > 1 else 0, tensor


def train(net, optimizer, steps):
    """Trains on the same global batches in every layout; returns the losses over the whole batch."""
    losses, group = [], net.group
    for step in steps:
        x = np.random.RandomState(step).randn(4, 3, WIDTH).astype("float32")
        if group is not None:
            x = np.split(x, group.nranks)[group.rank]
        out = net(paddle.to_tensor(x))
        loss = (out * out).mean()
        loss.backward()
        if group is not None:
            with paddle.no_grad():
                for name, parameter in net.named_parameters():
                    if parameter.grad is not None:
                        if ".experts." not in name:
                            dist.all_reduce(parameter.grad, group=group)
                        parameter.grad.scale_(1.0 / group.nranks)
                total = loss.detach().clone()
                dist.all_reduce(total, group=group)
                loss = total / group.nranks
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def adamw(net):
    return paddle.optimizer.AdamW(0.01, parameters=net.parameters(), weight_decay=0.1)


def numbered(net):
    """``{name in the whole layer: (name here, parameter, cut axis)}``, worked out by hand."""
    found = {}
    for name, parameter in net.named_parameters():
        before, inside, after = name.partition(".experts.")
        if inside:
            index, _, rest = after.partition(".")
            axis = AXES.get(rest) if net.degree > 1 else None
            found[f"{before}.experts.{net.numbers[int(index)]}.{rest}"] = (parameter, axis)
        else:
            found[name] = (parameter, None)
    return found


def arrays_of(net, optimizer):
    """All tensors of model and optimizer by the names that a checkpoint should have, with their cut axes."""
    found = {}
    for name, (parameter, axis) in numbered(net).items():
        found[name] = (parameter, axis)
        for accumulator, tensors in optimizer._accumulators.items():
            of_parameter = accumulator.startswith("moment")
            found[f"{name}.{accumulator}_0"] = (tensors[parameter.name], axis if of_parameter else None)
    return found


def state_of(net, optimizer):
    model = net.sharded_state_dict()
    return {**model, **optimizer.sharded_state_dict(model)}


def save(directory, experts, tensor=1):
    fc.install()
    group, place, degree = layout(experts, tensor)
    net = Net(group, "", place, degree)
    optimizer = adamw(net)
    train(net, optimizer, BEFORE)
    state = state_of(net, optimizer)
    report = fc.save_state_dict(state, directory)
    arrays = arrays_of(net, optimizer)
    np.savez(
        f"{directory}/truth_{dist.get_rank()}.npz", **{name: tensor.numpy() for name, (tensor, _) in arrays.items()}
    )
    return {
        "names": sorted(state),
        "expected": sorted(arrays),
        "keys": report.keys,
        "losses": train(net, optimizer, AFTER),
    }


def truth_of(directory, world, experts, tensor, name, axis):
    """What a whole tensor has to be, put together by hand from what the saving ranks had."""
    parts = {}
    for rank in range(world):
        file = np.load(f"{directory}/truth_{rank}.npz")
        if name in file:
            parts.setdefault(rank % tensor, file[name])  # fleet counts tensor parallelism fastest
    ordered = [parts[place] for place in sorted(parts)]
    return ordered[0] if axis is None or tensor == 1 else np.concatenate(ordered, axis)


def load(directory, source, experts, tensor=1):
    """Loads into other values, compares bit for bit, and trains on; ``source`` is (world, experts, tensor)."""
    fc.install()
    group, place, degree = layout(experts, tensor)
    net = Net(group, "other", place, degree)
    optimizer = adamw(net)
    state = state_of(net, optimizer)
    report = fc.load_state_dict(state, directory, strict=True)
    wrong = []
    for name, (tensor_here, _) in arrays_of(net, optimizer).items():
        rest = name.partition(".experts.")[2].partition(".")[2]
        base = rest.partition(".moment")[0].partition(".beta")[0]
        axis = AXES.get(base) if ".beta" not in name else None
        whole = truth_of(directory, *source, name, axis)
        if not common.same_bytes(tensor_here, common.cut(whole, axis, place, degree)):
            wrong.append(name)
    return {"names": sorted(state), "wrong": wrong, "missing": report.missing, "losses": train(net, optimizer, AFTER)}


def different_experts(directory):
    """U8: every rank's experts hold their number; after save, overwrite and load they still do."""
    fc.install()
    group, _, _ = layout(dist.get_world_size(), 1)
    net = Net(group)
    for number, expert in zip(net.numbers, net.moe.experts):
        for parameter in expert.parameters():
            parameter.set_value(paddle.full(parameter.shape, float(number)))
    fc.save_state_dict(net.sharded_state_dict(), directory)
    for parameter in net.moe.experts.parameters():
        parameter.set_value(paddle.full(parameter.shape, -1.0))
    fc.load_state_dict(net.sharded_state_dict(), directory)
    return {
        "wanted": [float(number) for number in net.numbers],
        "got": [sorted({float(x) for p in e.parameters() for x in p.numpy().ravel()}) for e in net.moe.experts],
    }


class Statics(nn.Layer):
    def __init__(self, experts):
        super().__init__()
        self.e_score_correction_bias = self.create_parameter([1, experts], is_bias=True)
        self.e_score_correction_bias.is_distributed = True  # as model libraries mark it
        self.e_score_correction_bias.stop_gradient = True


class OwnMoE(ExpertParallelMixin, nn.Layer):
    """A user's layer: marks on its experts, a correction bias, a shared expert; ``slots`` pads the list with None."""

    def __init__(self, group, slots=False, marks=("expert", "no_sync", "is_distributed")):
        super().__init__()
        self.moe_group, self.num_experts = group, EXPERTS
        rank, local = group.rank, EXPERTS // group.nranks
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.moe_statics = Statics(EXPERTS)
        self.shared_experts = Expert("shared", "", 0, 1)
        mine = {number: Expert(number, "", 0, 1) for number in range(rank * local, (rank + 1) * local)}
        self.experts = nn.LayerList()
        for number in range(EXPERTS):
            if slots or number in mine:
                self.experts.append(mine.get(number))
        for expert in mine.values():
            for parameter in expert.parameters():
                for mark in marks:
                    setattr(parameter, mark, True)


def own_layers(directory):
    """Experts over the world, with every mark; over fleet's model-parallel group; with a list that has None in it."""
    fc.install()
    results = {}
    world = list(range(dist.get_world_size()))
    for case, mp, slots in (("dp", 1, False), ("mp", len(world), False), ("slots", 1, True)):
        hcg = cpu_world.init_fleet(dp=len(world) // mp, mp=mp)
        group = hcg.get_model_parallel_group() if mp > 1 else hcg.get_data_parallel_group()
        paddle.seed(3)
        net = nn.Sequential(("moe", OwnMoE(group, slots)))
        before = {name: getattr(p, "is_distributed", False) for name, p in net.named_parameters()}
        state = net.sharded_state_dict()
        fc.save_state_dict(state, f"{directory}/{case}")
        after = {name: getattr(p, "is_distributed", False) for name, p in net.named_parameters()}
        merged = fc.load_merged_state_dict(f"{directory}/{case}")
        wrong = [
            name
            for name in merged
            if ".experts." in name
            and not common.same_bytes(
                merged[name],
                value(f"expert{name.split('.')[2]}.{name.split('.', 3)[3]}", SHAPES[name.split(".", 3)[3]]),
            )
        ]
        results[case] = {
            "keys": sorted(merged),
            "local": sum(".experts." in name for name in state),
            "wrong": wrong,
            "marks_kept": before == after and sum(before.values()) > 1,
            "own_keys": all(weight.key == key for key, weight in state.items()),
        }
    return results


def ambiguous_marks():
    """An expert that is marked is_distributed, where it may as well be cut over the model-parallel group."""
    fc.install()
    group, _, _ = layout(2, 2)
    net = OwnMoE(group, marks=("is_distributed",))
    refused = error_of(net.sharded_state_dict)
    for parameter in net.experts.parameters():
        parameter.mp_moe = True
    return {"refused": refused, "declared": error_of(net.sharded_state_dict)}


def uneven(directory):
    """Lists of different length: each rank may be content, the save is not."""
    fc.install()
    group, _, _ = layout(dist.get_world_size(), 1)
    rank = dist.get_rank()
    experts = nn.LayerList([Expert(i, "", 0, 1) for i in range(3 if rank == 0 else 2)])
    moe = MoELayer(d_model=WIDTH, experts=experts, gate={"type": "naive"}, moe_group=group)
    return error_of(lambda: fc.save_state_dict(moe.sharded_state_dict(), directory))


def without_the_mixin(directory):
    """A user's layer that has not adopted the mixin: its experts have the same names on every rank."""
    fc.install()
    group, _, _ = layout(dist.get_world_size(), 1)
    net = nn.Layer()
    net.experts = nn.LayerList([Expert(group.rank, "", 0, 1)])
    return error_of(lambda: fc.save_state_dict(net.sharded_state_dict(), directory))


def error_of(call):
    try:
        call()
    except (ValueError, fc.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def experts_among_sharding_ranks(directory):
    """Experts spread over the ranks that shard the optimizer, without a group of their own: what each version says."""
    from paddle.distributed.sharding import group_sharded_parallel

    fc.install()
    found = {}
    for version in ("V1", "V2", "os_g", "p_g_os"):
        hcg = cpu_world.init_fleet(sharding=dist.get_world_size(), split_param=version == "V2")
        group = hcg.get_sharding_parallel_group()
        with paddle.utils.unique_name.guard():
            model = Net(group)
        optimizer = adamw(model)
        if version.startswith("V"):
            optimizer = fleet.distributed_optimizer(optimizer)
        else:
            model, optimizer, _ = group_sharded_parallel(model, optimizer, version, group=group, segment_size=SEGMENT)
        shards = model.sharded_state_dict()
        found[version] = error_of(lambda: fc.check(model, optimizer))  # noqa: B023
        told = error_of(lambda: optimizer.sharded_state_dict(shards)).partition(": ")[2]  # noqa: B023
        # A remedy of all ranks stands once, at the end.
        assert all(part in found[version] for part in told.partition(". Remedy ("))
        if version != "p_g_os":
            report = fc.save_state_dict(shards, f"{directory}/{version}")
        else:
            sliced = error_of(lambda: fc.save_state_dict(shards, f"{directory}/{version}"))  # noqa: B023
    return found, report.keys, sliced


class Layer(Net):
    """A layer of a pipeline with experts of its own; ``salt`` has its place in the description."""

    def __init__(self, *args):
        super().__init__(*args)
        for parameter in self.moe.experts.parameters():
            parameter.no_sync = True  # Paddle makes all others equal over the ranks that shard
            parameter.color = {"color": "experts", "group": alone()}

    def forward(self, x):
        return x + self.moe(self.inp(x))


class Square(nn.Layer):
    def forward(self, out, _):
        return (out * out).mean()


def alone():
    """The group of this rank only; every rank makes all of them, once per fleet."""
    if alone.of is not fleet.get_hybrid_communicate_group():
        alone.of = fleet.get_hybrid_communicate_group()
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        alone.group = groups[dist.get_rank()]
    return alone.group


alone.of = None


class Pipeline:
    """Stages of one or two chunks, times experts over the two ranks that shard the optimizer by V2."""

    def __init__(self, chunks, salt=""):
        fc.install()
        self.stages = dist.get_world_size() // 2
        batches = {"accumulate_steps": 2 * self.stages, "micro_batch_size": 1}
        self.hcg = cpu_world.init_fleet(pp=self.stages, sharding=2, split_param=True, **batches)
        group = self.hcg.get_sharding_parallel_group()
        descs = [LayerDesc(Layer, group, f"{place}{salt}") for place in range(2 * self.stages)]
        virtual = {"num_virtual_pipeline_stages": chunks} if chunks > 1 else {}
        self.net = PipelineLayer(
            descs,
            num_stages=self.stages,
            topology=self.hcg.topology(),
            loss_fn=Square(),
            seg_method="layer:Layer",
            **virtual,
        )
        self.inner = adamw(self.net)
        self.model = fleet.distributed_model(self.net)
        self.optimizer = fleet.distributed_optimizer(self.inner)

    def train(self, steps):
        losses = []
        for step in steps:
            x = np.random.RandomState(step).randn(4 * self.stages, 3, WIDTH).astype("float32")
            x = paddle.to_tensor(np.split(x, 2)[self.hcg.get_sharding_parallel_rank()])
            losses.append(self.model.train_batch([x, x], self.optimizer).item())
        return losses

    def state(self):
        model = self.model.sharded_state_dict()
        return {**model, **fc.optimizer_sharded_state_dict(self.optimizer, model)}

    def experts(self):
        """Values of this rank's experts, by layer, number and name."""
        found = {}
        for layer in (layer for layer in self.net.sublayers() if isinstance(layer, Layer)):
            for number, expert in zip(layer.numbers, layer.moe.experts):
                for name, parameter in expert.named_parameters():
                    found[f"{layer.salt}.moe.experts.{number}.{name}"] = parameter.numpy()
        return found


def experts_in_virtual_stages(directory):
    """Saved with two chunks per stage; loaded with two and with one, by jobs that have not stepped."""
    job = Pipeline(2)
    job.train(BEFORE)
    state = job.state()
    fc.save_state_dict(state, directory)
    truth = job.experts()
    results = {"keys": sorted(state), "truth": sorted(truth), "losses": job.train(AFTER)}
    merged = fc.load_merged_state_dict(directory)
    results["wrong"] = sorted(name for name, array in truth.items() if not common.same_bytes(merged[name], array))
    results["saved"] = sorted(merged)
    for chunks in (2, 1):
        fresh = Pipeline(chunks, "other")
        state = fresh.state()
        fc.load_state_dict(state, directory, strict=True)
        differing = []
        for name, weight in state.items():
            whole = merged[name].flatten()[weight.flattened_range] if weight.is_flattened else merged[name]
            if not common.same_bytes(weight.local_tensor, whole):
                differing.append(name)
        results[f"wrong in {chunks}"] = differing
        results[f"chunks {chunks}"] = fresh.train(AFTER)
    return results


# -- what is asserted -------------------------------------------------------------------------------------------------

#: Relative difference of losses between layouts: they sum the same products in another order. Measured: 2e-7.
SUMMATION = 1e-6


@pytest.fixture(scope="module")
def run(world):
    """Runs a job on so many ranks; a world of one is this process."""

    def on(ranks, job, **arguments):
        if ranks > 1:
            return world(ranks).run(job, **arguments)
        cpu_world.install()  # for the kernels of the gate, which the CPU build lacks
        try:
            with paddle.utils.unique_name.guard():
                return [job(**arguments)]
        finally:
            fc.uninstall()
            cpu_world.uninstall()

    return on


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    results = {}

    def once(name):
        if name not in results:
            ranks, experts, tensor = LAYOUTS[name]
            path = root / name.replace(" ", "")
            path.mkdir()
            job = run(ranks, save, directory=str(path), experts=experts, tensor=tensor)
            results[name] = str(path), job
        return results[name]

    return once


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_are_those_of_the_whole_layer(saved, name):
    _, results = saved(name)
    for result in results:
        assert result["names"] == result["expected"]
        assert result["keys"] == (4 + 4 * EXPERTS) * 5  # parameter, two moments, two powers
    numbers = {n.split(".")[2] for result in results for n in result["names"] if ".experts." in n}
    assert numbers == {str(i) for i in range(EXPERTS)}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_training_resumes(run, saved, source, target):
    path, before = saved(source)
    ranks, experts, tensor = LAYOUTS[target]
    job = run(ranks, load, directory=path, source=LAYOUTS[source], experts=experts, tensor=tensor)
    for result in job:
        assert result["wrong"] == result["missing"] == []
        if source == target:
            assert result["losses"] == before[0]["losses"]
        else:
            assert result["losses"] == pytest.approx(before[0]["losses"], rel=SUMMATION)


def test_experts_of_different_ranks_are_not_replicas(world2, tmp_path):
    """U8: Paddle gives different experts the same key, and its save keeps those of one rank."""
    results = world2.run(different_experts, directory=str(tmp_path))
    assert [result["wanted"] for result in results] == [[0.0, 1.0], [2.0, 3.0]]
    for result in results:
        assert result["got"] == [[number] for number in result["wanted"]]


def test_a_layer_of_ones_own(world2, tmp_path):
    tensors = (*SHAPES,)
    names = [f"moe.experts.{i}.{name}" for i in range(EXPERTS) for name in tensors]
    names += [f"moe.shared_experts.{name}" for name in tensors]
    names += ["moe.gate.weight", "moe.gate.bias", "moe.moe_statics.e_score_correction_bias"]
    for result in world2.run(own_layers, directory=str(tmp_path)):
        for case in result.values():
            assert case["keys"] == sorted(names)
            assert case["local"] == len(tensors) * EXPERTS // 2
            assert case["wrong"] == []
            assert case["marks_kept"]
            assert case["own_keys"]


def test_a_mark_that_may_mean_a_cut_is_refused(world4):
    for result in world4.run(ambiguous_marks):
        assert "is marked is_distributed, but no rule" in result["refused"]
        assert "experts.0.up.weight" in result["refused"]
        advised("parallel/experts.py", "set parameter.mp_moe = True", result["refused"])
        assert result["declared"] is None


def test_lists_of_different_lengths_are_an_error_on_every_rank(world2, tmp_path):
    errors = world2.run(uneven, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "gate.gate.weight" in errors[0]


def test_experts_without_the_mixin_are_not_lost_silently(world2, tmp_path):
    errors = world2.run(without_the_mixin, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "experts.0.up.weight" in errors[0]


def test_experts_among_sharding_ranks_are_refused_by_key(world2, tmp_path):
    for errors, keys, sliced in world2.run(experts_among_sharding_ranks, directory=str(tmp_path)):
        assert list(errors) == ["V1", "V2", "os_g", "p_g_os"]
        for error in errors.values():
            assert "8 parameters of experts, such as " in error
            assert "'moe.experts.0.up.weight'" in error or "'moe.experts.2.up.weight'" in error
            assert "Remedy (FC807): use sharding V2" in error and "save the model without its optimizer" in error
        assert keys == 4 + 4 * EXPERTS
        # Of an expert that is cut among ranks with other experts, no rank has the rest.
        assert "moe.experts.0.up.weight" in sliced


@pytest.mark.slow
def test_experts_in_virtual_pipeline_stages(tmp_path):
    with World(6) as world:  # Paddle refuses chunks where there are two stages
        reports = world.run(experts_in_virtual_stages, directory=str(tmp_path))
    for report in reports:
        assert report["wrong"] == report["wrong in 2"] == report["wrong in 1"] == []
        assert len(report["truth"]) == 2 * 2 * 4  # layers, experts, parameters
        assert report["chunks 2"] == report["losses"]
        assert report["chunks 1"] == pytest.approx(report["losses"], rel=SUMMATION)
    names = {name for report in reports for name in report["truth"]}
    assert len(names) == 6 * EXPERTS * 4
    assert {f"{name}.moment1_0" for name in names} | names <= set(reports[0]["saved"])
