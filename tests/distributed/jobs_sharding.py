"""Jobs of test_sharding: sharding V1, V2, stage 2, stage 3 and fully_shard, each saved and loaded into the others.

The oracle gathers what every strategy holds by hand, from Paddle's own tables and with the library left out of it.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common

INPUTS, HIDDEN, ROWS = 40, 77, 8
BEFORE, AFTER = (0, 1, 2), (3, 4)
#: Parameters of more elements are sliced by stage 3.
SEGMENT = 64
#: Kinds of V1 that lay parameters into buffers, and what switches them on.
FUSED_V1 = {
    "v1fused": ("tensor_fusion",),
    "v1overlap": ("comm_overlap",),
    "v1fused+overlap": ("tensor_fusion", "comm_overlap"),
}
V2 = ("v2", "v2colors", "v2states")
FLEET = ("v1", *V2, *FUSED_V1)


class Cube(nn.Layer):
    """A parameter of three axes."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([3, 7, 11])

    def forward(self, x):
        return (x.reshape([-1, 1, 7, 11]) * self.weight.astype("float32")).sum(1).reshape([-1, HIDDEN])


class Frozen(nn.Layer):
    """A parameter that is not trained (of so many elements that stage 3 slices it), and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([7, 11])
        self.weight.stop_gradient = True
        self.weight.trainable = False
        self.register_buffer("seen", paddle.zeros([3]))

    def forward(self, x):
        return x + self.weight.astype("float32").reshape([HIDDEN]) + self.seen.astype("float32").sum()


class Half(nn.Linear):
    """A linear layer that computes in float32: the CPU has no half-precision matmul."""

    def forward(self, x):
        return paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")


class Net(nn.Layer):
    def __init__(self, salt, dtype, unused):
        super().__init__()
        paddle.set_default_dtype(dtype)
        self.first = Half(INPUTS, HIDDEN)
        self.cube = Cube()
        self.frozen = Frozen()
        self.second = Half(HIDDEN, 3)
        self.last = Half(3, 1)
        if unused:
            self.unused = Half(3, 4)
        paddle.set_default_dtype("float32")
        for name, parameter in self.named_parameters():
            seed = sum(map(ord, name + salt))
            value = np.random.RandomState(seed).randn(*parameter.shape).astype("float32") * 0.2
            parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))
        self.frozen.seen.set_value(paddle.to_tensor([1.0, 2.0, float(len(salt))]).astype(dtype))

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.frozen(self.cube(self.first(x)))))))


class Job:
    """A model and its optimizer under one strategy.

    Strategies: single, v1, those of FUSED_V1 (the last one has several buffers), v2, v2colors (several buffers, in two
    groups), v2states (whose states lie in one buffer), stage2, stage3, both with "+offload", fully.
    """

    def __init__(self, kind, salt="", dtype="float32", install=True, unused=True, multi_precision=None):
        if install:
            fc.install()
        self.kind, self.size = kind, dist.get_world_size()
        if kind in FLEET or kind == "fully":
            strategy = fleet.DistributedStrategy()
            options = ("enable_fuse_optimizer_states",) if kind == "v2states" else FUSED_V1.get(kind, ())
            for option in options:
                setattr(strategy.hybrid_configs["sharding_configs"], option, True)
            cpu_world.init_fleet(sharding=self.size, split_param=kind in V2, strategy=strategy)
        else:
            cpu_world.reset_fleet()
        with paddle.utils.unique_name.guard():
            self.net = Net(salt, dtype, unused)
        if kind == "v1fused+overlap":  # nothing is clipped, but it is a buffer of its own
            self.net.cube.weight.need_clip = False
        if kind == "v2colors":
            group = dist.new_group(list(range(self.size)))
            self.net.cube.weight.color = 1
            self.net.second.weight.color = {"color": "two", "group": group}
            self.net.second.bias.color = {"color": "two", "group": group}
        trainable = [p for p in self.net.parameters() if not p.stop_gradient]
        precise = dtype != "float32" if multi_precision is None else multi_precision
        self.inner = paddle.optimizer.AdamW(0.01, parameters=trainable, weight_decay=0.1, multi_precision=precise)
        self.model, self.optimizer = self.net, self.inner
        if kind in FLEET:
            self.model, self.optimizer = fleet.distributed_model(self.net), fleet.distributed_optimizer(self.inner)
        elif kind.startswith(("stage2", "stage3")):
            from paddle.distributed.sharding import group_sharded_parallel

            level = {"stage2": "os_g", "stage3": "p_g_os"}[kind[:6]]
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.net, self.inner, level, segment_size=SEGMENT, offload=kind.endswith("offload")
            )
        elif kind == "fully":
            from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_fully_shard import FullyShard

            self.model = FullyShard(MixPrecisionLayer(self.net, "bfloat16"), device="cpu", segment_size=SEGMENT)
            self.optimizer = MixPrecisionOptimizer(self.inner)

    def train(self, steps):
        if self.kind == "fully" and "update_slice" not in vars(self.optimizer):
            from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_fully_shard import FullyShardOptimizer

            # As the first step of a MixPrecisionOptimizer (and of no other) would, but for the size: that would be
            # 2**20 whatever the model's is, and what the model has sliced below it would never be trained.
            FullyShardOptimizer(self.optimizer, segment_size=SEGMENT)
        losses = []
        for step in steps:
            generator = np.random.RandomState(step)
            x, y = generator.randn(ROWS, INPUTS).astype("float32"), generator.randn(ROWS, 1).astype("float32")
            if self.kind != "single":
                part = ROWS // self.size
                rows = slice(part * dist.get_rank(), part * (dist.get_rank() + 1))
                x, y = x[rows], y[rows]
            loss = ((self.model(paddle.to_tensor(x)) - paddle.to_tensor(y)) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            with paddle.no_grad():
                mean = loss.detach().clone()
                dist.all_reduce(mean)
            losses.append(float(mean) / self.size)
        return losses

    def state(self):
        model = self.model.sharded_state_dict()
        return {**model, **fc.init_optimizer_state(self.optimizer, model)}

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def tables(self):
        """``{name of the state: {tensor name: tensor}}`` of the optimizer that steps, masters among them."""
        if self.kind == "stage2+offload":
            storage = self.optimizer.offload_params
            members = [(master.name, storage.param2align[master.name]) for master in storage._params]
            return self.tables_of_buffers([(storage.buffer, storage.buffer, members)])
        if "tensor_fusion" in FUSED_V1.get(self.kind, ()):
            return self.tables_of_buffers(self.fused_buffers())
        masters = dict(self.inner._master_weights)
        for parameter in self.net.parameters() if self.kind == "stage3+offload" else ():
            if getattr(parameter, "unslice", False) and "float16" in str(parameter.dtype):
                masters[parameter.name] = parameter.master_weight
        tables = {f"{name}_0": dict(tensors) for name, tensors in self.inner._accumulators.items()}
        of_master = {master.name: name for name, master in masters.items()}
        for table in tables.values():
            for name in list(table):
                table[of_master.get(name, name)] = table.pop(name)
        if masters:
            tables["w_0"] = masters
        return tables

    def fused_buffers(self):
        """As for :meth:`tables_of_buffers`. Memory is padded to 256 bytes; what is not clipped comes last."""
        fused, rank = self.optimizer._inner_opt, dist.get_rank()
        groups = {}
        for parameter in sorted(fused._rank2params[rank], key=lambda each: not each.need_clip):
            align = -int(np.prod(parameter.shape)) % (256 // parameter.element_size())
            groups.setdefault(parameter.need_clip, []).append((parameter.name, align))
        assert len(groups) == len(fused._rank2fused[rank])
        masters = self.inner._master_weights
        return [(b, masters.get(b.name), members) for b, members in zip(fused._rank2fused[rank], groups.values())]

    def tables_of_buffers(self, buffers):
        """The same, where the optimizer steps on buffers: each with its master, and names with padding behind."""
        tables, shapes = {}, {parameter.name: parameter.shape for parameter in self.net.parameters()}
        for buffer, master, members in buffers:
            stepped = buffer if master is None else master
            states = {f"{name}_0": table[stepped.name] for name, table in self.inner._accumulators.items()}
            for state, tensor in (states if master is None else {**states, "w_0": master}).items():
                array, begin = tensor.numpy(), 0
                for name, align in members:
                    size = int(np.prod(shapes[name]))
                    part = array if "pow_acc" in state else array[begin : begin + size].reshape(shapes[name])
                    tables.setdefault(state, {})[name] = paddle.to_tensor(part)
                    begin += size + align
                assert "pow_acc" in state or begin == len(array)
        return tables

    def place_of(self, name):
        """First element that this rank has of a parameter's states; None where they are not cut."""
        if self.kind in V2:
            for buffer in self.optimizer._inner_opt._comm_buffer_list:
                view = buffer._sharding_param_grad_view.get(name)
                if view is not None:
                    return view._param_begin - view._index
        for state, table in self.tables().items():
            if (
                self.kind in ("stage3", "stage3+offload", "fully")
                and f"slice@{name}" in table
                and "pow_acc" not in state
            ):
                return dist.get_rank() * int(table[f"slice@{name}"].shape[0])
        return None

    def truth(self):
        """Every parameter, buffer and state of the job as whole arrays, gathered over the ranks."""
        names = {parameter.name: (name, parameter) for name, parameter in self.net.named_parameters()}
        mine = {}
        for name, parameter in self.net.named_parameters():
            storage = getattr(parameter, "fw_storage", None)
            if storage is None:
                mine[name] = (None, parameter.numpy())
            else:
                mine[name] = (dist.get_rank() * int(storage.shape[0]), storage.numpy())
        mine["frozen.seen"] = (None, self.net.frozen.seen.numpy())
        for state, table in self.tables().items():
            for tensor_name, tensor in table.items():
                plain = tensor_name.replace("slice@", "")
                key = f"{names[plain][0]}.{state}"
                start = self.place_of(plain)
                if start is not None and start >= names[plain][1]._numel():
                    continue  # this rank has nothing but padding, or nothing at all
                mine[key] = (None if "pow_acc" in state else start, tensor.numpy())
        everybody = []
        dist.all_gather_object(everybody, mine)
        shapes = {name: list(parameter.shape) for name, parameter in self.net.named_parameters()}
        whole = {}
        for key in sorted(set().union(*everybody)):
            parts = [part[key] for part in everybody if key in part]
            if parts[0][0] is None:
                assert all(part.tobytes() == parts[0][1].tobytes() for _, part in parts), key
                whole[key] = parts[0][1]
                continue
            shape = shapes[key if key in shapes else key.rpartition(".")[0]]
            buffer = np.full(max(start + len(part) for start, part in parts), 251, parts[0][1].dtype)
            for start, part in parts:
                buffer[start : start + len(part)] = part
            whole[key] = buffer[: int(np.prod(shape))].reshape(shape)
        return whole


def save(kind, directory, dtype="float32", unused=True, stride=True, multi_precision=None):
    """Trains, saves, and trains on. The truth goes beside the checkpoint."""
    job = Job(kind, dtype=dtype, unused=unused, multi_precision=multi_precision)
    job.train(BEFORE)
    paddle.set_flags({"FLAGS_use_stride_kernel": stride})
    try:
        state = job.state()
        fc.save_state_dict(state, os.path.join(directory, "checkpoint"))
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})
    truth = job.truth()
    if dist.get_rank() == 0:
        np.savez(os.path.join(directory, "truth.npz"), **truth)
    return {
        "keys": sorted(state),
        "fused": getattr(job.inner, "fused_states_buffer", None) is not None,
        "truth": sorted(truth),
        "stored": common.stored_bytes(os.path.join(directory, "checkpoint")),
        "exact": sum(array.nbytes for array in truth.values()),
        "ranges": {
            key: [int(weight.flattened_range.start), int(weight.flattened_range.stop)]
            for key, weight in state.items()
            if weight.is_flattened
        },
        "shapes": {key: list(weight.local_shape) for key, weight in state.items()},
        "losses": job.train(AFTER),
    }


def load(kind, directories, dtype="float32", unused=True, stride=True, multi_precision=None, cast="raise", **options):
    """Loads each checkpoint into a model and optimizer that never stepped, compares everything, and trains on."""
    results = {}
    paddle.set_flags({"FLAGS_use_stride_kernel": stride})
    try:
        for name, directory in directories.items():
            job = Job(kind, salt="other", dtype=dtype, unused=unused, multi_precision=multi_precision)
            state = job.state()
            path = os.path.join(directory, "checkpoint")
            report = fc.load_state_dict(state, path, strict=True, dtype=cast, **options)
            results[name] = {
                "wrong": wrong(job, directory),
                "read": report.bytes_read,
                "needed": report.bytes_needed,
                "losses": job.train(AFTER),
            }
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})
    return results


def wrong(job, directory):
    """Names of what is not bit-equal to what was saved."""
    truth, loaded = np.load(os.path.join(directory, "truth.npz")), job.truth()
    same = {key for key in truth if key in loaded and truth[key].tobytes() == loaded[key].tobytes()}
    return sorted((set(truth.files) | set(loaded)) - same)


def compare_with_single(kind):
    """The largest difference of anything from training in one process: the oracle's own check."""
    # Fleet knows one layout at a time: the first job has to be done before the second begins.
    ours = Job(kind, unused=False)
    ours.train(BEFORE)
    truth = ours.truth()
    single = Job("single", unused=False)
    single.train(BEFORE)
    expected = single.truth()
    return {
        "keys": sorted(truth) == sorted(expected),
        "worst": max(float(np.abs(truth[key] - expected[key]).max()) for key in expected),
    }


def gathered(directory):
    """Loads into a stage-3 model whose parameters are gathered, in each of the ways in which they can be."""
    results = {}
    for way in ("all", "copies", "ahead", "gathered later"):
        job = Job("stage3", salt="other")
        job.train((9,))
        flow = job.model._task_flow
        if way == "all":
            job.model.get_all_parameters()
        elif way == "copies":  # what convert2cpu=True leaves behind: on a CPU it would drop the storage itself
            for parameter in job.net.parameters():
                if hasattr(parameter, "fw_storage"):
                    paddle.zeros(parameter.shape, parameter.dtype)._share_buffer_to(parameter)
        elif way == "ahead":  # a forward of the first layers only gathers the next one, which then is not run
            with paddle.no_grad():
                job.net.first(paddle.zeros([1, INPUTS]))
        waiting = sorted(flow.full_param)
        state = job.state()
        flattened = sum(weight.is_flattened for key, weight in state.items() if "moment" not in key)
        fc.load_state_dict(state, os.path.join(directory, "checkpoint"), strict=True)
        truth = np.load(os.path.join(directory, "truth.npz"))
        wrong_slices = wrong(job, directory)
        if way == "gathered later":
            job.model.get_all_parameters()
        wrong_memory = sorted(
            name
            for name, parameter in job.net.named_parameters()
            if parameter._is_initialized() and parameter.numpy().tobytes() != truth[name].tobytes()
        )
        results[way] = {
            "waiting": waiting,
            "flattened": flattened,
            "with memory": sum(parameter._is_initialized() for parameter in job.net.parameters()),
            "wrong slices": wrong_slices,
            "wrong memory": wrong_memory,
            "losses": job.train(AFTER),
        }
    return results


def install_orders():
    """install() before and after stage 3 wraps the optimizer, and uninstall()."""
    results = {}
    for order in ("before", "after"):
        fc.uninstall()
        job = Job("stage3", install=order == "before")
        fc.install()
        state = job.state()
        mine = type(next(iter(state.values()))).__module__
        base = job.net.sharded_state_dict()
        fc.uninstall()
        theirs = getattr(job.optimizer, "sharded_state_dict", None)
        results[order] = [
            mine,
            len(state),
            sorted(base) == sorted(key for key in state if key in base),
            getattr(theirs, "__module__", None),
        ]
    job.optimizer.sharded_state_dict = dict  # a user's own
    fc.install()
    results["user"] = job.optimizer.sharded_state_dict is dict
    return results


def tied_stage3(directory):
    """One parameter in two layers, which stage 3 can run: one state, under the first name, with the other as alias."""
    from paddle.distributed.sharding import group_sharded_parallel

    fc.install()
    with paddle.utils.unique_name.guard():
        net = nn.Sequential(Half(9, 9), Half(9, 9))
    net[1].weight = net[0].weight
    optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    model, optimizer, _ = group_sharded_parallel(net, optimizer, "p_g_os", segment_size=SEGMENT)
    for step in range(2):
        x = np.random.RandomState(step).randn(2, 9).astype("float32")
        (model(paddle.to_tensor(x)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    weights = model.sharded_state_dict()
    states = optimizer.sharded_state_dict(weights)
    path = os.path.join(directory, "tied")
    fc.save_state_dict({**weights, **states}, path)
    before = common.snapshot({**weights, **states})
    with paddle.no_grad():
        for weight in (*weights.values(), *states.values()):
            weight.local_tensor.zero_()
    fc.load_state_dict({**weights, **states}, path, strict=True)
    return {
        "restored": before == common.snapshot({**weights, **states}),
        "aliases": {key: list(weight.aliases) for key, weight in {**weights, **states}.items() if weight.aliases},
        "keys": sorted(key for key in {**weights, **states} if "weight" in key),
    }


def tensor_parallel_stage3(directory, degree):
    """Tensor parallelism of degree 2 inside stage 3 of degree 2, or neither; the flattened box is that of the rank."""
    from paddle.distributed.sharding import group_sharded_parallel

    fc.install()
    world = dist.get_world_size()
    hcg = cpu_world.init_fleet(mp=degree, sharding=2 if degree == 2 else 1, dp=1 if degree == 2 else world)
    place, _ = common.place_in(hcg)
    with paddle.utils.unique_name.guard():
        net = common.Net(("col", "row"), True, degree, salt="" if degree == 2 else "other", place=place)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    model = net
    if degree == 2:
        model, optimizer, _ = group_sharded_parallel(
            net, optimizer, "p_g_os", group=hcg.get_sharding_parallel_group(), segment_size=SEGMENT
        )
    losses = []
    weights = model.sharded_state_dict()
    state = {**weights, **optimizer.sharded_state_dict(weights)}
    path = os.path.join(directory, "checkpoint")
    if degree == 1:
        fc.load_state_dict(state, path, strict=True)
        found = {name: common.same_bytes(p, common.whole(name)) for name, p in net.named_parameters()}
    else:
        fc.save_state_dict(state, path)
        found = {key: weight.is_flattened for key, weight in weights.items()}
    for step in range(2):
        loss = (model(common.inputs_of(net.kinds, step)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return {"found": found, "losses": losses}


def missing_rank(kind, directory):
    """One rank leaves its part out: nobody may believe that the checkpoint is whole."""
    job = Job(kind)
    job.train((0,))
    state = job.state()
    if dist.get_rank() == 1:
        state = {key: weight for key, weight in state.items() if not weight.is_flattened}
    return common.outcome(lambda: fc.save_state_dict(state, os.path.join(directory, kind)))


def strays_of_stage2():
    """Ranks of stage 2 that step on parameters of others: what each describes, and what its tables have."""
    job = Job("stage2")  # with an unused parameter, which makes Paddle do so
    job.train(BEFORE)
    model = job.model.sharded_state_dict()
    described = {key.rpartition(".")[0] for key in job.optimizer.sharded_state_dict(model)}
    names = {parameter.name: name for name, parameter in job.net.named_parameters()}
    return {
        "owned": sorted(names[p.name] for p in job.optimizer._segment_params()[dist.get_rank()]),
        "described": sorted(described),
        "kept": sorted(names[name] for name in job.inner._accumulators["moment1"]),
    }


def bfloat16_offload_of_stage2():
    """What Paddle says of it."""
    try:
        Job("stage2+offload", dtype="bfloat16")
    except AssertionError as error:
        return str(error)
    return None


def refused(kind):
    """Errors for what cannot be described."""
    fc.install()
    if kind == "groups":
        job = Job("stage2+offload", dtype="float16", unused=False)
        net, optimizer = job.model, job.optimizer
        job.inner._param_groups = [{"params": job.inner._param_groups}]
    elif kind == "fused v1":
        job = Job("v1fused", unused=False)
        net, optimizer = job.model, job.optimizer
        for parameter in job.net.parameters():
            paddle.assign(parameter)._share_buffer_to(parameter)
    else:
        job = Job("stage3+offload")
        net, optimizer = job.model, job.optimizer
        ((job.net(paddle.zeros([1, INPUTS]))) ** 2).mean().backward()
        optimizer.step()
    try:
        optimizer.sharded_state_dict(net.sharded_state_dict())
    except ValueError as error:
        return str(error)
    return None


def reshard(source, target):
    """Moves a trained job's state into a fresh one of another strategy, in memory."""
    old = Job(source)
    old.train(BEFORE)
    truth, losses = old.truth(), old.train(AFTER)
    old = Job(source)
    old.train(BEFORE)
    state = old.state()
    new = Job(target, salt="other")
    wanted = new.state()
    fc.reshard_sharded_state_dict(state, wanted, dist.get_group(0))
    loaded = new.truth()
    same = {key for key in truth if key in loaded and truth[key].tobytes() == loaded[key].tobytes()}
    return {"wrong": sorted(set(truth) ^ same), "losses": losses, "new": new.train(AFTER)}


def data_parallel_beside_v2(directory):
    """What a save says of a job of dp2 x sharding V2, before any step and after one."""
    fc.install()
    cpu_world.init_fleet(dp=2, sharding=2, split_param=True)
    with paddle.utils.unique_name.guard():
        net = Net("", "float32", False)
    inner = paddle.optimizer.AdamW(0.01, parameters=[p for p in net.parameters() if not p.stop_gradient])
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(inner)
    texts = []
    for _ in range(2):
        shards = model.sharded_state_dict()
        try:
            fc.save_state_dict({**shards, **fc.optimizer_sharded_state_dict(optimizer, shards)}, directory)
            texts.append(None)
        except fc.ValidationError as error:
            texts.append(str(error))
        x = np.random.RandomState(dist.get_rank()).randn(2, INPUTS).astype("float32")
        (model(paddle.to_tensor(x)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return texts


def weights_alone(directory):
    """Weights alone are loaded beside an optimizer that has stepped, under each way to shard its masters.

    Returns:
        By strategy, whether the masters are the loaded parameters' values, and what was warned of.
    """
    found = {}
    for kind in ("v1", "v2", "v1fused+overlap", "stage2", "stage3"):
        job = Job(kind, dtype="float16", unused=False)
        job.train(range(1))
        path = f"{directory}/{kind}"
        fc.save_state_dict(job.model.sharded_state_dict(), path)
        job.train(range(1, 4))
        handler, texts = logging.Handler(logging.WARNING), []
        handler.emit = lambda record, texts=texts: texts.append(record.getMessage())
        logger = logging.getLogger("paddle_flexckpt")
        logger.addHandler(handler)
        fc.load_state_dict(job.model.sharded_state_dict(), path)
        logger.removeHandler(handler)
        parameters = {parameter.name: parameter for parameter in job.net.parameters()}
        renewed = [
            common.same_bytes(master, parameters[name].astype("float32").numpy())
            for name, master in job.inner._master_weights.items()
            if name in parameters and list(master.shape) == list(parameters[name].shape)
        ]
        found[kind] = all(renewed), [text for text in texts if "float32 masters" in text]
        del job
    return found
