"""Jobs of test_sharding: sharding V1, V2, stage 2, stage 3 and fully_shard, each saved and loaded into the others.

The oracle gathers what every strategy holds by hand, from Paddle's own tables and with the library left out of it.
"""

from __future__ import annotations

import os

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common

INPUTS, HIDDEN, ROWS = 40, 77, 8
BEFORE, AFTER = (0, 1, 2), (3, 4)
#: Parameters of more elements are sliced by stage 3.
SEGMENT = 64


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
        return x + self.weight.astype("float32").reshape([HIDDEN]) + self.seen.sum()


class Half(nn.Linear):
    """A linear layer that computes in float32: the CPU has no half-precision matmul."""

    def forward(self, x):
        return paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")


class Net(nn.Layer):
    def __init__(self, salt, dtype):
        super().__init__()
        paddle.set_default_dtype(dtype)
        self.first = Half(INPUTS, HIDDEN)
        self.cube = Cube()
        self.frozen = Frozen()
        self.second = Half(HIDDEN, 3)
        self.last = Half(3, 1)
        self.unused = Half(3, 4)
        paddle.set_default_dtype("float32")
        for name, parameter in self.named_parameters():
            seed = sum(map(ord, name + salt))
            value = np.random.RandomState(seed).randn(*parameter.shape).astype("float32") * 0.2
            parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))
        self.frozen.seen.set_value(paddle.to_tensor([1.0, 2.0, float(len(salt))]))

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.frozen(self.cube(self.first(x)))))))


class Job:
    """A model and its optimizer under one strategy.

    Strategies: single, v1, v2, v2colors (several buffers, in two groups), stage2, stage3, fully.
    """

    def __init__(self, kind, salt="", dtype="float32", install=True):
        if install:
            fc.install()
        self.kind, self.size = kind, dist.get_world_size()
        degree = self.size if kind in ("v1", "v2", "v2colors", "fully") else 1
        hcg = cpu_world.init_fleet(
            dp=self.size // degree, sharding=degree, split_param=kind in ("v2", "v2colors")
        )
        with paddle.utils.unique_name.guard():
            self.net = Net(salt, dtype)
        if kind == "v2colors":
            group = dist.new_group(list(range(self.size)))
            self.net.cube.weight.color = 1
            self.net.second.weight.color = {"color": "two", "group": group}
            self.net.second.bias.color = {"color": "two", "group": group}
        trainable = [p for p in self.net.parameters() if not p.stop_gradient]
        self.inner = paddle.optimizer.AdamW(
            0.01, parameters=trainable, weight_decay=0.1, multi_precision=dtype != "float32"
        )
        self.model, self.optimizer = self.net, self.inner
        if kind in ("v1", "v2", "v2colors"):
            self.model, self.optimizer = fleet.distributed_model(self.net), fleet.distributed_optimizer(self.inner)
        elif kind in ("stage2", "stage3"):
            from paddle.distributed.sharding import group_sharded_parallel

            level = {"stage2": "os_g", "stage3": "p_g_os"}[kind]
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.net, self.inner, level, segment_size=SEGMENT
            )
        elif kind == "fully":
            from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_fully_shard import FullyShard

            self.model = FullyShard(self.net, device="cpu", segment_size=SEGMENT)
        del hcg

    def train(self, steps):
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
        masters = dict(self.inner._master_weights)
        tables = {f"{name}_0": dict(tensors) for name, tensors in self.inner._accumulators.items()}
        of_master = {master.name: name for name, master in masters.items()}
        for table in tables.values():
            for name in list(table):
                table[of_master.get(name, name)] = table.pop(name)
        if masters:
            tables["w_0"] = masters
        return tables

    def place_of(self, name):
        """First element that this rank has of a parameter's states, for strategies that cut them."""
        for buffer in self.optimizer._inner_opt._comm_buffer_list:
            view = buffer._sharding_param_grad_view.get(name)
            if view is not None:
                return view._param_begin - view._index
        raise KeyError(name)

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
                if "pow_acc" in state or self.kind in ("single", "v1", "stage2"):
                    start = None
                elif self.kind in ("v2", "v2colors"):
                    start = self.place_of(plain)
                else:
                    cut = tensor_name.startswith("slice@")
                    start = dist.get_rank() * int(tensor.shape[0]) if cut else None
                mine[key] = (start, tensor.numpy())
        everybody = []
        dist.all_gather_object(everybody, mine)
        shapes = {name: list(parameter.shape) for name, parameter in self.net.named_parameters()}
        whole = {}
        for key in sorted(set().union(*everybody)):
            parts = [part[key] for part in everybody if key in part]
            if parts[0][0] is None:
                # Scalars of a rank that has nothing but padding are not those of the parameter.
                assert all(part.tobytes() == parts[0][1].tobytes() for _, part in parts), key
                whole[key] = parts[0][1]
                continue
            shape = shapes[key if key in shapes else key.rpartition(".")[0]]
            buffer = np.full(max(start + len(part) for start, part in parts), 251, parts[0][1].dtype)
            for start, part in parts:
                buffer[start : start + len(part)] = part
            whole[key] = buffer[: int(np.prod(shape))].reshape(shape)
        return whole


def save(kind, directory, dtype="float32"):
    """Trains, saves, and trains on. The truth goes beside the checkpoint."""
    job = Job(kind, dtype=dtype)
    job.train(BEFORE)
    state = job.state()
    fc.save_state_dict(state, os.path.join(directory, "checkpoint"))
    truth = job.truth()
    if dist.get_rank() == 0:
        np.savez(os.path.join(directory, "truth.npz"), **truth)
    return {
        "keys": sorted(state),
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


def load(kind, directories, dtype="float32", stride=True):
    """Loads each checkpoint into a model and optimizer that never stepped, compares everything, and trains on."""
    results = {}
    paddle.set_flags({"FLAGS_use_stride_kernel": stride})
    try:
        for name, directory in directories.items():
            job = Job(kind, salt="other", dtype=dtype)
            state = job.state()
            report = fc.load_state_dict(state, os.path.join(directory, "checkpoint"), strict=True)
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


def compare_with_single(kind, steps=BEFORE):
    """The largest difference of any parameter or state from training in one process, by key."""
    ours, single = Job(kind), Job("single")
    worst = {}
    # Fleet knows one layout at a time: the first job has to be done before the second begins.
    ours = Job(kind)
    losses = ours.train(steps)
    truth = ours.truth()
    single = Job("single")
    expected_losses = single.train(steps)
    expected = single.truth()
    for key in expected:
        worst[key] = float(np.abs(truth[key] - expected[key]).max())
    return {"worst": worst, "losses": losses, "expected": expected_losses, "missing": sorted(set(expected) ^ set(truth))}
