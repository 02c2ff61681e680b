"""Pipelines of 1, 2 and 4 stages, and of 4 with two chunks each, into one another and into a plain model.

A world of four ranks: two stages are two replicas, one stage and the plain model four, each trained on the same data.

The jobs: one description, trained under some numbers of stages and chunks and resumed under others.

The oracle knows nothing of the library: every layer carries the number that its place in the description has
(``place``), and a tensor's name is that number and its name in the layer.
"""

from __future__ import annotations

import importlib.util
import os
import zlib

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common
from tests.remedies.following import advised

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

VOCABULARY, HIDDEN, INNER, BLOCKS, LENGTH = 14, 6, 10, 8, 5
LAST = BLOCKS + 2  # an embedding and a function come before the last layer too
MICRO_BATCHES, MICRO_BATCH = 4, 2
BEFORE, AFTER = (0, 1), (2, 3)

#: Name of a layout to its stages and virtual stages. "dual" is DualPipeV; "stack" is no pipeline at all.
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 1), "pp4": (4, 1), "pp4xvpp2": (4, 2), "dual": (2, 1), "stack": (1, 1)}


def only(x):
    """The tensor of a list of one, which is what DualPipeV gives to layers and losses."""
    return x[0] if isinstance(x, (list, tuple)) else x


class Embedding(nn.Layer):
    """The tied weight; with ``positions`` also one that Paddle does not keep equal between the stages."""

    def __init__(self, place, positions=False):
        super().__init__()
        self.place = place
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        if positions:
            self.position = nn.Embedding(LENGTH, HIDDEN)

    @property
    def embedding_weight(self):
        return self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return x + self.position(paddle.arange(LENGTH)) if hasattr(self, "position") else x


class Head(nn.Layer):
    """Ties its weight from another class, under another name, and has a bias of its own."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.weight = self.create_parameter([VOCABULARY, HIDDEN])
        self.bias = self.create_parameter([VOCABULARY], is_bias=True)

    @property
    def embedding_weight(self):
        return self.weight

    def forward(self, x):
        return paddle.matmul(only(x), self.weight, transpose_y=True) + self.bias


class Block(nn.Layer):
    def __init__(self, place, mp=1):
        super().__init__()
        self.place = place
        self.ln = nn.LayerNorm(HIDDEN)
        if mp > 1:
            column, row = fleet.meta_parallel.ColumnParallelLinear, fleet.meta_parallel.RowParallelLinear
            self.fc1 = column(HIDDEN, INNER, has_bias=True, gather_output=False)
            self.fc2 = row(INNER, HIDDEN, has_bias=True, input_is_parallel=True)
        else:
            self.fc1, self.fc2 = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        x = only(x)
        return x + self.fc2(F.relu(self.fc1(self.ln(x))))


class Loss(nn.Layer):
    def forward(self, logits, labels):
        return F.cross_entropy(only(logits), labels.unsqueeze(-1), reduction="none").mean()


def tied_head(layer, x):
    return paddle.matmul(x, layer.embedding_weight, transpose_y=True)


def double(x):
    return x * 2.0


def description(kind="tied", mp=1):
    """``kind``: "tied"; "positions": a parameter beside the tied one; "classes": tied between two classes; "untied"."""
    positions = {"positions": True} if kind == "positions" else {}
    attribute = "embedding_weight"
    first = SharedLayerDesc("emb", Embedding, None, attribute, 0, **positions)
    if kind == "classes":
        last = SharedLayerDesc("emb", Head, None, attribute, LAST)
    else:
        last = SharedLayerDesc("emb", Embedding, tied_head, attribute, 0, **positions)
    blocks = [LayerDesc(Block, i + 1 + (i >= 3), mp) for i in range(BLOCKS)]
    if kind == "untied":  # DualPipeV refuses SharedLayerDesc
        first, last = LayerDesc(Embedding, 0), LayerDesc(Head, LAST)
    return [first, *blocks[:3], double, *blocks[3:], last]


class Stack(nn.Layer):
    """The same model for one process, written by hand."""

    def __init__(self):
        super().__init__()
        self.add_sublayer("0", Embedding(0))
        for i in range(BLOCKS):
            place = i + 1 + (i >= 3)
            self.add_sublayer(str(place), Block(place))

    def forward(self, x):
        for place in range(LAST):
            x = double(x) if place == 4 else self._sub_layers[str(place)](x)
        return tied_head(self._sub_layers["0"], x)


class Job:
    """A model of a layout, its optimizer, and what trains them. Stages without parallelism beside are replicas."""

    def __init__(self, layout, kind="tied", salt="", mp=1, overlap=None):
        fc.install()
        stages, chunks = LAYOUTS[layout]
        batches = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": MICRO_BATCH}
        replicas = dist.get_world_size() // stages // mp
        if overlap is not None:  # sharding V2, whose buffers the pipeline may make and reduce while it computes
            hybrid = {"pp_configs": {"sharding_comm_overlap": overlap}}
            self.hcg = cpu_world.init_fleet(pp=stages, sharding=replicas, split_param=True, hybrid=hybrid, **batches)
        else:
            hybrid = {"pp_configs": {"use_dualpipev": True}} if layout == "dual" else None
            self.hcg = cpu_world.init_fleet(pp=stages, dp=replicas, mp=mp, hybrid=hybrid, **batches)
        if layout == "stack":
            self.model = Stack()
        else:
            virtual = {"num_virtual_pipeline_stages": chunks} if chunks > 1 else {}
            if layout == "dual":
                virtual["use_dualpipev"] = True
            self.model = PipelineLayer(
                description(kind, mp),
                num_stages=stages,
                topology=self.hcg.topology(),
                loss_fn=Loss(),
                seg_method="layer:Block",
                **virtual,
            )
        for name, parameter in self.parameters().items():
            generator = np.random.RandomState(zlib.crc32((name + salt).encode()) % 2**31)
            value = (generator.randn(*parameter.shape) * 0.3).astype("float32")
            parameter.set_value(value)
        # The embedding of every stage has the first one's values, as Paddle makes it.
        if layout != "stack":
            self.model._synchronize_shared_weights()
        self.inner = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters(), weight_decay=0.1)
        self.wrapper, self.optimizer = None, self.inner
        if stages > 1:
            self.wrapper = fleet.distributed_model(self.model)
            self.optimizer = fleet.distributed_optimizer(self.inner)

    def parameters(self):
        """Parameters by the oracle's names."""
        found = {}
        for layer in self.model.sublayers():
            if hasattr(layer, "place"):
                found.update({f"{layer.place}.{name}": p for name, p in layer.named_parameters()})
        return found

    def tensors(self):
        """Parameters and optimizer states by the oracle's names."""
        found = dict(self.parameters())
        for name, parameter in self.parameters().items():
            for accumulator, tensors in self.inner._accumulators.items():
                if parameter.name in tensors:
                    found[f"{name}.{accumulator}_0"] = tensors[parameter.name]
        return found

    def state(self):
        """What is saved, described by the wrapper and the optimizer that a user has in hand."""
        model = (self.wrapper or self.model).sharded_state_dict()
        return {**model, **fc.optimizer_sharded_state_dict(self.optimizer, model)}

    def train(self, steps):
        return [self.step(step) for step in steps]

    def step(self, step):
        generator = np.random.RandomState(step)
        size = (MICRO_BATCHES * MICRO_BATCH, LENGTH)
        tokens, labels = (paddle.to_tensor(generator.randint(0, VOCABULARY, size)) for _ in range(2))
        if self.wrapper is not None:
            return self.wrapper.train_batch([tokens, labels], self.optimizer).item()
        total = 0.0
        for i in range(MICRO_BATCHES):
            rows = slice(i * MICRO_BATCH, (i + 1) * MICRO_BATCH)
            loss = Loss()(self.model(tokens[rows]), labels[rows]) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        self.inner.step()
        self.inner.clear_grad()
        return total


def save_truth(directory, tensors):
    path = os.path.join(directory, f"truth_{dist.get_rank()}.npz")
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})


def load_truth(directory):
    """What was saved, put together; names of tensors whose copies differ."""
    truth, differing = {}, set()
    for name in sorted(os.listdir(directory)):
        if name.startswith("truth_"):
            with np.load(os.path.join(directory, name)) as file:
                for key in file.files:
                    array = truth.setdefault(key, file[key])
                    if array.tobytes() != file[key].tobytes():
                        differing.add(key)
    return truth, sorted(differing)


def save(directory, layout, kind="tied"):
    """Trains, saves, and goes on training."""
    job = Job(layout, kind)
    before = job.train(BEFORE)
    state = job.state()
    report = fc.save_state_dict(state, directory)
    save_truth(directory, job.tensors())
    dist.barrier()
    truth, differing = load_truth(directory)
    return {
        "keys": sorted(state),
        "oracle": sorted(job.tensors()),
        "all": sorted(truth),
        "differing": differing,
        "unique": sum(array.nbytes for array in truth.values()),
        "total": report.total_bytes,
        "stored": common.stored_bytes(directory),
        "held": report.held_bytes,
        "powers": sorted({t.item() for name, t in job.tensors().items() if name.endswith("beta1_pow_acc_0")}),
        "before": before,
        "after": job.train(AFTER),
    }


def load(directory, layout, kind="tied"):
    """Loads into a model with other values and a fresh optimizer, compares with what was saved, and trains on."""
    job = Job(layout, kind, salt="other")
    state = job.state()
    truth, _ = load_truth(directory)
    unequal = wrong(job, truth)
    report = fc.load_state_dict(state, directory)
    return {
        "unequal_before": len(unequal),
        "tensors": len(job.tensors()),
        "wrong": wrong(job, truth),
        "lost": sorted(set(job.tensors()) - set(truth)),
        "missing": report.missing,
        "unexpected": report.unexpected,
        "aliases": report.aliases,
        "needed": report.bytes_needed,
        "read": report.bytes_read,
        "local": common.local_bytes(state),
        "after": job.train(AFTER),
    }


def wrong(job, truth):
    return sorted(name for name, tensor in job.tensors().items() if not common.same_bytes(tensor, truth[name]))


def reshard(source, target):
    """From one layout to another in memory; then trains on."""
    first = Job(source)
    first.train(BEFORE)
    values = {name: tensor.numpy() for name, tensor in first.tensors().items()}
    gathered = []
    dist.all_gather_object(gathered, {name: array.tobytes() for name, array in values.items()})
    truth = {name: data for part in gathered for name, data in part.items()}
    held = first.state()
    second = Job(target, salt="other")
    fc.reshard_sharded_state_dict(held, second.state())
    return {
        "wrong": sorted(name for name, tensor in second.tensors().items() if common.raw(tensor) != truth[name]),
        "after": second.train(AFTER),
    }


def no_communication():
    """Describes a tied model on one rank only: that would hang if it asked the others for anything."""
    job = Job("pp4xvpp2")
    if dist.get_rank() != 2:
        return None
    return len(job.state())


def with_tensor_parallelism(directory):
    """Boxes of the tensor-parallel layers inside of stages; what is saved has to load into whole layers."""
    job = Job("pp2", mp=2)
    state = job.state()
    boxes = {
        key: [list(weight.local_shape), list(weight.global_shape), list(weight.global_offset)]
        for key, weight in state.items()
    }
    fc.save_state_dict(state, directory)
    whole = Job("pp1", salt="other")
    fc.load_state_dict(whole.model.sharded_state_dict(), directory, optimizer_states="ignore")
    wholes = {name: tensor.numpy() for name, tensor in whole.parameters().items()}
    wrong_names = []
    for name, weight in state.items():
        if name in wholes:
            box = tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape))
            if not common.same_bytes(weight.local_tensor, wholes[name][box]):
                wrong_names.append(name)
    return {"boxes": boxes, "wrong": wrong_names, "place": job.hcg.get_model_parallel_rank()}


def tied_under_v2(directory, overlap):
    """What a save says of virtual stages with a tied weight under sharding V2 after two steps."""
    job = Job("pp4xvpp2", overlap=overlap)
    job.train(range(2))
    try:
        fc.save_state_dict(job.state(), f"{directory}/{overlap}")
    except fc.ValidationError as error:
        return str(error)
    return None


def overlap(directory):
    """Sharding V2 under a pipeline with sharding_comm_overlap: saved, and loaded by a job that has not stepped."""
    job = Job("pp2", overlap=True)
    job.train(BEFORE)
    fc.save_state_dict(job.state(), directory)
    losses = job.train(AFTER)
    fresh = Job("pp2", salt="other", overlap=True)
    try:
        fresh.optimizer.sharded_state_dict(fresh.model.sharded_state_dict())
        refused = None
    except ValueError as error:
        refused = str(error)
    fc.load_state_dict(fresh.state(), directory, strict=True)
    resumed = fresh.train(AFTER)
    other = Job("pp2", salt="other")
    fc.load_state_dict(other.state(), directory, strict=True)
    return {"losses": losses, "refused": refused, "resumed": resumed, "other": other.train(AFTER)}


def dual(directory):
    """DualPipeV: saved, and loaded by a job that has not stepped and by a pipeline; and the other way round."""
    results = {}
    for source, target in (("dual", "pp2"), ("pp2", "dual")):
        path = os.path.join(directory, source)
        job = Job(source, "untied")
        job.train(BEFORE)
        fc.save_state_dict(job.state(), path)
        losses = {"losses": job.train(AFTER)}
        for layout in (source, target):
            fresh = Job(layout, "untied", salt="other")
            fc.load_state_dict(fresh.state(), path, strict=True)
            losses[layout] = fresh.train(AFTER)
        results[source] = losses
    return {"kind": type(job.wrapper).__name__, "keys": sorted(fresh.state()), **results}


# -- what is asserted -------------------------------------------------------------------------------------------------

HAS_DUALPIPEV = importlib.util.find_spec("paddle.distributed.fleet.meta_parallel.dualpipev") is not None


SOURCES = ("pp1", "pp2", "pp4", "pp4xvpp2")
IN_STAGES = ("pp2", "pp4", "pp4xvpp2")
#: In `make test` each is loaded into the next one and into the stack; the matrix of strategies has pipelines too.
PAIRS = [
    pytest.param(source, target, marks=() if target in ("stack", follower) else pytest.mark.slow)
    for source, follower in zip(SOURCES, (*SOURCES[1:], SOURCES[0]))
    for target in (*SOURCES, "stack")
]
BLOCKS_OF_ONE_PROCESS = (1, 2, 3, 5, 6, 7, 8, 9)  # 4 is a function
IN_A_BLOCK = [f"{layer}.{name}" for layer in ("ln", "fc1", "fc2") for name in ("weight", "bias")]
STATES = ("", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
PARAMETERS = ["0.embedding.weight", *(f"{i}.{name}" for i in BLOCKS_OF_ONE_PROCESS for name in IN_A_BLOCK)]
#: Of losses (relative) between a pipeline and one process, which adds the losses of micro batches in double precision,
#: and the tied gradients in another order. Two units of the last place of float32. Measured: 4.2e-8.
SUMMATION = 2.4e-7


def with_states(names):
    return sorted(f"{name}{suffix}" for name in names for suffix in STATES)


@pytest.fixture(scope="module")
def saved(world4, tmp_path_factory):
    root, done = tmp_path_factory.mktemp("pipelines"), {}

    def once(layout, kind="tied"):
        if (layout, kind) not in done:
            path = root / f"{layout}_{kind}"
            path.mkdir()
            done[layout, kind] = str(path), world4.run(save, directory=str(path), layout=layout, kind=kind)
        return done[layout, kind]

    return once


@pytest.mark.parametrize("layout", SOURCES)
def test_names_are_the_same_for_every_number_of_stages(saved, layout):
    reports = saved(layout)[1]
    assert set().union(*(report["keys"] for report in reports)) == set(with_states(PARAMETERS))
    for report in reports:
        assert report["keys"] == report["oracle"]
        assert report["all"] == with_states(PARAMETERS)
        assert report["powers"] == pytest.approx([0.9**3], rel=1e-6)  # two steps have been taken


@pytest.mark.parametrize("layout", SOURCES)
def test_each_tensor_is_written_once(saved, layout):
    for report in saved(layout)[1]:
        assert report["differing"] == []  # the copies of the tied weight and their states are equal
        assert report["total"] == report["stored"] == report["unique"] < report["held"] * 4
    # The first and the last stage hold the tied weight; with fewer than four stages, in several replicas.
    assert sum("0.embedding.weight" in report["keys"] for report in saved(layout)[1]) == (
        2 if layout in ("pp4", "pp4xvpp2") else 4
    )


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_loads_into_every_layout(world4, saved, source, target):
    path, before = saved(source)
    for result in world4.run(load, directory=path, layout=target):
        assert result["unequal_before"] == result["tensors"]
        assert result["wrong"] == result["lost"] == []
        assert result["missing"] == result["unexpected"] == []
        assert result["aliases"] == {}
        assert result["read"] == result["needed"] == result["local"]
        if (source in IN_STAGES) == (target in IN_STAGES):
            assert result["after"] == before[0]["after"]
        else:
            assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4xvpp2"), ("pp4xvpp2", "pp1"), ("pp4", "pp2")])
def test_in_memory(world4, saved, source, target):
    for result in world4.run(reshard, source=source, target=target):
        assert result["wrong"] == []
        assert result["after"] == pytest.approx(saved(source)[1][0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4xvpp2"), ("pp4", "pp1"), ("pp1", "pp4"), ("pp4", "pp2")])
def test_a_parameter_beside_the_tied_one(world4, saved, source, target):
    """The last stage's position embedding is never used or trained, and must not become the first stage's."""
    path, before = saved(source, "positions")
    names = {*with_states(PARAMETERS), *with_states(["0.position.weight"])}
    unused = set(with_states([f"{LAST}.position.weight"]))
    everything = set().union(*(report["keys"] for report in before))
    assert everything == (names if source == "pp1" else names | unused)
    for rank, result in enumerate(world4.run(load, directory=path, layout=target, kind="positions")):
        # The oracle has one name for the copies of all stages, and takes the first stage's for the truth.
        assert [name for name in result["wrong"] if rank == 0 or "position" not in name] == []
        assert result["missing"] == []
        assert set(result["unexpected"]) == (unused if target == "pp1" else set())
        assert set(result["aliases"]) <= unused
        assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp4"), ("pp4", "pp4xvpp2")])
def test_tied_between_two_classes(world4, saved, source, target):
    path, before = saved(source, "classes")
    everything = set().union(*(report["keys"] for report in before))
    blocks = PARAMETERS[1:]
    assert everything == set(with_states(["0.embedding_weight", f"{LAST}.bias", *blocks]))
    for result in world4.run(load, directory=path, layout=target, kind="classes"):
        assert result["wrong"] == result["missing"] == result["unexpected"] == []
        assert result["after"] == pytest.approx(before[0]["after"], rel=SUMMATION)


def test_describing_communicates_nothing(world4):
    results = world4.run(no_communication)
    assert [result is None for result in results] == [True, True, False, True]


def test_tensor_parallel_layers_stay_cut(world4, tmp_path):
    for result in world4.run(with_tensor_parallelism, directory=str(tmp_path)):
        assert result["wrong"] == []
        cut = {key: box for key, box in result["boxes"].items() if key.endswith("fc1.weight")}
        assert len(cut) == len(BLOCKS_OF_ONE_PROCESS) / 2
        half = INNER // 2
        wanted = [[HIDDEN, half], [HIDDEN, INNER], [0, half * result["place"]]]
        assert list(cut.values()) == [wanted] * len(cut)


@pytest.mark.slow
def test_copies_of_a_tied_weight_that_paddle_lets_drift_are_told_so(world, tmp_path):
    eight = world(8)
    for text in eight.run(tied_under_v2, directory=str(tmp_path), overlap=True):
        advised("saving/replica_remedies.py", "without sharding_comm_overlap", text)
        assert "'first'" not in text and text.count("Remedy") == 1
    assert eight.run(tied_under_v2, directory=str(tmp_path), overlap=False) == [None] * 8


def test_a_fresh_job_with_sharding_comm_overlap_resumes(world4, tmp_path):
    for report in world4.run(overlap, directory=str(tmp_path)):
        assert report["resumed"] == report["losses"]
        assert report["other"] == pytest.approx(report["losses"], rel=1e-6)
        advised("parallel/sharding.py", "take the model's sharded_state_dict() from what fleet", report["refused"])


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this Paddle has no DualPipeV (it came with 3.1)")
def test_dual_pipe_v_and_a_pipeline_load_each_other(world4, tmp_path):
    reports = world4.run(dual, directory=str(tmp_path))
    for report in reports:
        for source in ("dual", "pp2"):
            found = report[source]
            assert found[source] == found["losses"]
            assert found["dual"] == pytest.approx(found["pp2"], rel=1e-6)
    # A stage has one part from the front and one from the back.
    places = [{int(key.split(".")[0]) for key in report["keys"]} for report in reports]
    assert any({0, LAST} <= stage for stage in places)
    assert set().union(*places) == {*range(LAST + 1)} - {4}
