"""Muon in real processes: matrices whole on one rank, slices of buffers, experts in one parameter of three axes.

Muon and the optimizer that shards it are imitated (jobs_muon.py): the Paddle of these tests has neither. All else is
real: processes, collectives, buffers, sharding V1 and V2 of the same model. What is compared is everything that a job
holds, bit for bit, gathered by hand from Paddle's own tables.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

import paddle_flexckpt as fc
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.parallel.live_rehearsal import layout_of_model
from paddle_flexckpt.parallel.slices import shaped_view
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common
from tests.distributed.jobs_muon import Muon, MuonShardingOptimizer, paddle_with_muon
from tests.distributed.test_layouts import rows_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

INPUTS, WIDTH, ROWS, COLUMNS, EXPERTS, BATCH = 20, 77, 7, 11, 4, 8
BEFORE, AFTER = (0, 1), (2, 3)


class Half(nn.Linear):
    """A linear layer that computes in float32: the CPU has no half-precision matmul."""

    def forward(self, x):
        return paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")


class Experts(nn.Layer):
    """Experts in one parameter [E, H, I], described as [E * H, I] and by Paddle's class, as other libraries do."""

    def __init__(self, place, degree, view):
        super().__init__()
        self.weight = self.create_parameter([EXPERTS // degree, ROWS, COLUMNS])
        self.place, self.degree, self.view = place, degree, view

    def forward(self, x):
        return (x.reshape([-1, 1, ROWS, COLUMNS]) * self.weight.astype("float32")).sum(1).reshape([-1, WIDTH])

    def sharded_state_dict(self, structured_name_prefix=""):
        key, rows = f"{structured_name_prefix}weight", self.weight.shape[0] * ROWS
        flat = self.view(self.weight, [rows, COLUMNS])
        whole = (rows * self.degree, COLUMNS)
        return {key: ShardedWeight(key, flat, (rows, COLUMNS), whole, (rows * self.place, 0))}


def reshaped(parameter, shape):
    flat = parameter.reshape(shape)
    flat.name = parameter.name
    return flat


def shared(parameter, shape):
    return shaped_view("experts", parameter, shape)


def copied(parameter, shape):
    flat = paddle.to_tensor(parameter.numpy().reshape(shape))
    flat.name = parameter.name
    return flat


class Net(nn.Layer):
    def __init__(self, salt, dtype, place, degree, view):
        super().__init__()
        paddle.set_default_dtype(dtype)
        self.first = Half(INPUTS, WIDTH)
        self.experts = Experts(place, degree, view)
        self.table = nn.Embedding(5, WIDTH)  # two axes, and no matrix of Muon's
        self.second = Half(WIDTH, 3)
        self.frozen = Half(3, 1)
        paddle.set_default_dtype("float32")
        for parameter in self.frozen.parameters():
            parameter.stop_gradient, parameter.trainable = True, False
        for name, parameter in self.named_parameters():
            seed = sum(map(ord, name + salt)) + (place if name == "experts.weight" else 0)
            value = np.random.RandomState(seed).randn(*parameter.shape).astype("float32") * 0.2
            parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))

    def forward(self, x):
        hidden = self.experts(self.first(x)) + self.table.weight.astype("float32").sum(0)
        return self.frozen(F.relu(self.second(hidden)))


class Wrapper:
    """A wrapper that passes on what it does not have."""

    def __init__(self, optimizer):
        self._inner_opt = optimizer

    def __getattr__(self, name):
        return getattr(self._inner_opt, name)


class Job:
    """A model and its optimizer. Kinds: single, v1, v2 and muon, each also with "adamw " in front but for the last.

    "muon colors": the experts have a group of their own. "muon ep": each rank of a group of 2 has other experts.
    """

    def __init__(self, kind, salt="", dtype="float32", view=reshaped):
        size, rank = dist.get_world_size(), dist.get_rank()
        self.kind, self.size = kind, size
        self.adamw, sharding = kind.startswith("adamw "), kind.split()[-1]
        degree = 2 if sharding == "ep" else 1
        self.place = rank % degree
        if sharding == "single":
            cpu_world.reset_fleet()
            hcg = None
        else:
            hcg = cpu_world.init_fleet(sharding=size, split_param=sharding == "v2")
        with paddle.utils.unique_name.guard():
            self.net = Net(salt, dtype, self.place, degree, view)
        if sharding in ("colors", "ep"):
            groups = [dist.new_group(list(range(each, size, degree))) for each in range(degree)]
            self.net.experts.weight.color = {"color": "moe_expert", "group": groups[self.place]}
        trained = [p for p in self.net.parameters() if not p.stop_gradient]
        if self.adamw:
            self.inner = paddle.optimizer.AdamW(0.01, parameters=trained, multi_precision=dtype != "float32")
        else:
            matrices = {layer.weight.name for layer in (self.net.first, self.net.experts, self.net.second)}
            self.inner = Muon(0.01, trained, matrices, multi_precision=dtype != "float32")
        self.model, self.optimizer = self.net, self.inner
        if kind.startswith("muon"):
            self.optimizer = MuonShardingOptimizer(self.inner, hcg)
            if sharding == "colors":  # as in fleet's wrapper
                self.optimizer = Wrapper(self.optimizer)
        elif hcg is not None:
            self.model, self.optimizer = fleet.distributed_model(self.net), fleet.distributed_optimizer(self.inner)

    def train(self, steps):
        losses = []
        for step in steps:
            generator = np.random.RandomState(step)
            x, y = generator.randn(BATCH, INPUTS).astype("float32"), generator.randn(BATCH, 1).astype("float32")
            if not self.kind.endswith("single"):
                part = BATCH // self.size
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
        return {**model, **fc.optimizer_sharded_state_dict(self.optimizer, model)}

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def first_element(self, parameter):
        """First element that this rank has of a parameter's states: of what is sliced, not the first of all."""
        buffers = getattr(getattr(self.optimizer, "_inner_opt", None), "_comm_buffer_list", None)
        for buffer in getattr(self.optimizer, "_comm_buffer_list", buffers) or ():
            view = buffer._sharding_param_grad_view.get(parameter.name)
            if view is not None:
                return max(view._param_begin - view._index, 0)
        return 0

    def truth(self):
        """Every parameter and state of the job as whole flat arrays, gathered over the ranks."""
        mine, names = {}, {p.name: (name, p) for name, p in self.net.named_parameters()}
        for name, p in names.values():
            mine[name] = self.placed(p, 0, p)
        tables = {f"{name}_0": table for name, table in self.inner._accumulators.items()}
        tables["w_0"] = self.inner._master_weights
        of_master = {master.name: name for name, master in self.inner._master_weights.items()}
        for state, table in tables.items():
            for key, tensor in table.items():
                name, p = names[of_master.get(key, key)]
                if self.first_element(p) >= p.size:
                    continue  # this rank has nothing but padding
                if "pow_acc" in state:
                    mine[f"{name}.{state}"] = (0, 1, tensor.numpy())
                else:
                    mine[f"{name}.{state}"] = self.placed(p, self.first_element(p), tensor)
        everybody = []
        dist.all_gather_object(everybody, mine)
        whole = {}
        for key in sorted(set().union(*everybody)):
            parts = [part[key] for part in everybody if key in part]
            array, seen = np.empty(parts[0][1], parts[0][2].dtype), np.zeros(parts[0][1], bool)
            for start, _, values in parts:
                range_of = slice(start, start + len(values))
                array[range_of] = np.where(seen[range_of], array[range_of], values)
                assert array[range_of].tobytes() == values.tobytes(), f"{key} differs between ranks"
                seen[range_of] = True
            assert seen.all(), f"{key} is not all there"
            whole[key] = array
        return whole

    def placed(self, parameter, start, tensor):
        """First element in the whole tensor, size of the whole, and values without padding."""
        size, degree = math.prod(parameter.shape), 1
        if parameter is self.net.experts.weight:
            degree = self.net.experts.degree
        values = tensor.numpy().reshape(-1)[: max(size - start, 0)]
        return (size * self.place if degree > 1 else 0) + start, size * degree, values


def save(kind, directory, dtype="float32", stride=True):
    """Trains, saves, and trains on; the truth goes beside the checkpoint."""
    with paddle_with_muon(), flag(stride):
        job = Job(kind, dtype=dtype, view=reshaped if stride else shared)
        train = trains(kind)
        if train:
            job.train(BEFORE)
        else:
            fill(job)
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
            "losses": job.train(AFTER) if train else None,
        }


def trains(kind):
    """Whether a job trains as one process does: not without a dispatch to experts, nor on parts of matrices."""
    return kind not in ("muon ep", "v2")


def fill(job):
    """Fills every state, and each the same on all ranks that have it."""
    with paddle.no_grad():
        for key, weight in job.state().items():
            elements = 31 * sum(weight.global_offset) + (weight.flattened_range.start if weight.is_flattened else 0)
            values = np.arange(elements, elements + weight.local_tensor.size) % 4093 + len(key)
            tensor = weight.local_tensor.detach()
            tensor.copy_(paddle.to_tensor(values.reshape(tensor.shape)).astype(tensor.dtype), True)


class flag:
    """FLAGS_use_stride_kernel, for a while."""

    def __init__(self, stride):
        self.stride = stride

    def __enter__(self):
        paddle.set_flags({"FLAGS_use_stride_kernel": self.stride})

    def __exit__(self, *_):
        paddle.set_flags({"FLAGS_use_stride_kernel": True})


def load(kind, directories, dtype="float32", stride=True):
    """Loads each checkpoint into a job that never stepped, compares everything, and trains on."""
    results = {}
    with paddle_with_muon(), flag(stride):
        for name, directory in directories.items():
            job = Job(kind, salt="other", dtype=dtype, view=reshaped if stride else shared)
            report = fc.load_state_dict(job.state(), os.path.join(directory, "checkpoint"), strict=True)
            results[name] = {
                "wrong": wrong(job.truth(), directory),
                "read": report.bytes_read,
                "losses": job.train(AFTER) if trains(kind) else None,
            }
    return results


def wrong(loaded, directory, common_only=False):
    """Names of what is not bit-equal to what was saved."""
    truth = np.load(os.path.join(directory, "truth.npz"))
    same = {key for key in truth if key in loaded and truth[key].tobytes() == loaded[key].tobytes()}
    return sorted((set(truth.files) & set(loaded) if common_only else set(truth.files) | set(loaded)) - same)


def load_from_another_optimizer(kind, directory, **options):
    """The error of a load; and what a load that is told to do without left wrong and missing."""
    with paddle_with_muon():
        job, path = Job(kind, salt="other"), os.path.join(directory, "checkpoint")
        state, before = job.state(), job.truth()
        error = common.outcome(lambda: fc.load_state_dict(state, path))
        untouched = {key: array.tobytes() for key, array in before.items()} == {
            key: array.tobytes() for key, array in job.truth().items()
        }
        report = fc.load_state_dict(state, path, **options)
        wrong_keys = wrong(job.truth(), directory, common_only=True)
        return {"error": error, "untouched": untouched, "wrong": wrong_keys, "missing": sorted(report.missing)}


def reshard(source, target):
    """Moves a trained job's state into a fresh one of another kind, in memory."""
    with paddle_with_muon():
        old = Job(source)
        old.train(BEFORE)
        truth, state = old.truth(), old.state()
        new = Job(target, salt="other")
        fc.reshard_sharded_state_dict(state, new.state(), dist.get_group(0))
        loaded = new.truth()
    return sorted(key for key in set(truth) | set(loaded) if truth.get(key, b"").tobytes() != loaded[key].tobytes())


def copies():
    """What is said of a layer that describes a copy of its parameter."""
    with paddle_with_muon():
        job = Job("muon", view=copied)
        try:
            job.net.sharded_state_dict()
        except ValueError as error:
            return str(error)
    return None


# -- what is asserted --------------------------------------------------------------------------------------------------

#: Summing gradients over ranks in another order rounds otherwise.
ROUNDING = 1e-6
KINDS = ("single", "v1", "v2", "muon", "muon colors", "muon ep")


def save_all(world, root, kinds, **named):
    found = {}
    for kind in kinds:
        directory = root / kind
        directory.mkdir()
        found[kind] = (str(directory), world.run(save, kind=kind, directory=str(directory), **named))
    return found


def check_loads(world, kind, saved, **named):
    directories = {source: directory for source, (directory, _) in saved.items()}
    for report in world.run(load, kind=kind, directories=directories, **named):
        assert sorted(report) == sorted(saved)
        for source, result in report.items():
            assert result["wrong"] == [], (source, kind)
            expected = saved[source][1][0]["losses"]
            # Sums of halves over another number of ranks say nothing to compare.
            if result["losses"] is not None and expected is not None and "dtype" not in named:
                assert all(abs(a - b) <= ROUNDING for a, b in zip(result["losses"], expected)), (source, kind)


def check_saved(saved):
    for kind, (_, reports) in saved.items():
        assert sorted(set().union(*(report["keys"] for report in reports))) == reports[0]["truth"], kind
        assert all(report["stored"] == report["exact"] for report in reports), kind


def test_muon_loads_from_and_into_other_layouts(world2, tmp_path):
    saved = save_all(world2, tmp_path, ("single", "muon"))
    check_saved(saved)
    reports = saved["muon"][1]
    matrices = ("first.weight", "experts.weight", "second.weight")
    for matrix in matrices:
        assert sum(f"{matrix}.moment1_0" in report["keys"] for report in reports) == 1
        assert not any(f"{matrix}.moment2_0" in report["keys"] for report in reports)
    assert {key for report in reports for key in report["ranges"]} >= {"first.bias.moment1_0", "table.weight.moment2_0"}
    assert not any(key.startswith(matrices) for report in reports for key in report["ranges"])
    for kind in ("single", "muon", "v2"):
        check_loads(world2, kind, saved)


def describe(dtype):
    """What this rank describes of a job that Muon trains."""
    with paddle_with_muon():
        return rows_of(open_state(Job("muon", dtype=dtype).state(), dist.get_rank()).catalog)


def describe_live(dtype):
    """What the layout of a live model and its Muon, built on one rank, says of each rank."""
    with paddle_with_muon():
        job = Job("single", dtype=dtype)
        layout, _ = layout_of_model(job.net, "sharding=muon:2", optimizer=job.inner)
        return [rows_of(layout.catalog(rank)) for rank in range(2)]


LACKS = ("moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layout_equals_what_ranks_describe(world2, dtype):
    """Matrices whole on the rank that has least so far, the largest first; all else in buffers, as under V2."""
    tensors = [
        ModelTensor("first.weight", (INPUTS, WIDTH), dtype, lacks=LACKS),
        ModelTensor("first.bias", (WIDTH,), dtype),
        ModelTensor("experts.weight", (EXPERTS * ROWS, COLUMNS), dtype, lacks=LACKS),
        ModelTensor("table.weight", (5, WIDTH), dtype),
        ModelTensor("second.weight", (WIDTH, 3), dtype, lacks=LACKS),
        ModelTensor("second.bias", (3,), dtype),
        ModelTensor("frozen.weight", (3, 1), dtype, is_trained=False),
        ModelTensor("frozen.bias", (1,), dtype, is_trained=False),
    ]
    layout = Layout(Model(tuple(tensors)), parse_strategy("sharding=muon:2"))
    live = world2.run(describe_live, dtype=dtype)[0]
    for rank, real in enumerate(world2.run(describe, dtype=dtype)):
        said = rows_of(layout.catalog(rank))
        assert said == real
        assert [*said] == [*real]
        assert live[rank] == real


def test_half_precision_on_two_and_four_ranks(world2, world4, tmp_path):
    saved = save_all(world2, tmp_path, ("muon ep", "v1"), dtype="bfloat16")
    check_saved(saved)
    assert any("experts.weight.w_0" in report["keys"] for report in saved["v1"][1])
    for kind in ("muon", "muon ep"):
        check_loads(world4, kind, saved, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stride", [True, False])
def test_every_layout_loads_every_other(world2, world4, tmp_path, dtype, stride):
    saved = {}
    for name, world in (("two", world2), ("four", world4)):
        (tmp_path / name).mkdir()
        kinds = [kind for kind in KINDS if (name, kind) != ("four", "single")]
        made = save_all(world, tmp_path / name, kinds, dtype=dtype, stride=stride)
        check_saved(made)
        saved.update({f"{kind} of {name}": each for kind, each in made.items()})
    for world in (world2, world4):
        for kind in KINDS:
            check_loads(world, kind, saved, dtype=dtype, stride=stride)


def test_without_stride_kernels(world2, tmp_path):
    saved = save_all(world2, tmp_path, ("muon",), stride=False)
    check_loads(world2, "muon", saved, stride=False)


def test_adamw_and_muon_load_what_both_have(world2, tmp_path):
    saved = save_all(world2, tmp_path, ("adamw v2", "muon"))
    lacking = {
        f"{matrix}.weight.{state}_0"
        for matrix in ("first", "experts", "second")
        for state in ("moment2", "beta1_pow_acc", "beta2_pow_acc")
    }
    directory = saved["muon"][0]
    for found in world2.run(load_from_another_optimizer, kind="adamw v2", directory=directory, strict=False):
        assert found["untouched"] and "experts.weight.moment2_0" in found["error"][1]
        assert set(found["missing"]) <= lacking and found["wrong"] == []
    directory = saved["adamw v2"][0]
    options = {"kind": "muon", "directory": directory, "optimizer_states": "ignore"}
    for found in world2.run(load_from_another_optimizer, **options):
        assert found["untouched"] and f"no rank asks for {len(lacking)} optimizer states" in found["error"][1]
        assert found["missing"] == found["wrong"] == []


@pytest.mark.parametrize(
    ("source", "target"),
    [("muon", "muon ep"), pytest.param("v2", "muon", marks=pytest.mark.slow), ("muon colors", "single")],
)
def test_reshard_in_memory(world2, source, target):
    assert world2.run(reshard, source=source, target=target) == [[], []]


def test_a_layer_that_describes_a_copy_is_refused(world2):
    for text in world2.run(copies):
        assert "describes a copy of its parameter" in text and "shaped_view()" in text
