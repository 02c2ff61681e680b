"""Static graphs (``dist.to_static``) and ``dist.parallelize``: states in and out of checkpoints, and training goes on.

With tensor fusion a static graph's state can be described, saved and loaded here, but no CPU runs it.

The jobs: static graphs' states in and out of checkpoints, and those of ``dist.parallelize``.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator

import paddle_flexckpt as fc
from tests.remedies.following import advised
from tests.semi_auto import matrix, strategies, training
from tests.semi_auto.test_dist_tensors import spoil, text_of
from tests.semi_auto.test_static import Batches, structured
from tests.semi_auto.test_training import LOSS, shapes_of  # measured here too: 2.4e-7, and 0 with parallelize
from tests.semi_auto.test_upstream_defects import forget_buffers

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

#: Paddle's static graphs of stages 1 and 3 cut nothing that the degree does not divide.
SIZES = "even"
STEPS = training.STEPS


class Static:
    """A static graph of the network under a strategy.

    Attributes:
        model: the ``DistModel``, in mode "train".
    """

    def __init__(self, strategy, fused=False, sizes=SIZES):
        self.built = training.build(strategy, sizes)
        config = dist.Strategy()
        if fused:
            config.sharding.enable, config.sharding.stage = True, 1
            config.sharding.degree = dist.get_world_size()
            config.sharding.enable_tensor_fusion = config.sharding.save_unbalanced_param = True
        with paddle.utils.unique_name.guard(self.built._names):
            loader = paddle.io.DataLoader(Batches(self.built.sizes), batch_size=training.ROWS)
            cut = "dp" if "dp" in self.built.strategy.axes else None
            self._loader = dist.shard_dataloader(loader, meshes=[self.built.mesh], shard_dims=cut)
            self.model = dist.to_static(
                self.built.model, self._loader, nn.CrossEntropyLoss(), self.built.optimizer, strategy=config
            )
            self.model.train()

    def run(self):
        """Trains on all batches; returns the losses, of the rows of all ranks."""
        with paddle.utils.unique_name.guard(self.built._names):
            losses = [float(np.array(self.model(x, y)).reshape(-1)[0]) for x, y in self._loader]
        return np.mean(training.everyones(losses), axis=0).tolist()

    def state(self):
        return self.model.sharded_state_dict()


def trained(directory, sizes):
    """One process's state after some steps, in a checkpoint; its arrays, and the losses of the steps that follow."""
    single = training.build("single", sizes)
    for i in range(STEPS):
        single.step(i)
    fc.save_state_dict(matrix.state(single), directory)
    return training.gather(single), [single.step(i) for i in range(STEPS)]


def arrays_of(directory, wanted):
    """What a checkpoint holds, as arrays, filled by a load."""
    arrays = {key: np.full(array.shape, -1, array.dtype) for key, array in wanted.items()}
    fc.load_state_dict(arrays, directory, strict=True)
    return arrays


def differing(arrays, wanted):
    return sorted(key for key in wanted if not matrix.same(arrays[key], wanted[key]))


def in_and_out(directory, strategy, sizes, fused=False):
    """Loads one process's checkpoint into a static graph, saves that, and trains on.

    Returns:
        ``keys`` that are too many or missing; ``loaded`` amiss; ``differs`` of
        what was saved again; the ``ranges`` of fused states; ``losses``, and what ``alone`` has.
    """
    fc.install()
    wanted, alone = trained(f"{directory}/dense", sizes)
    with paddle.static.scope_guard(paddle.static.Scope()):
        static = Static(strategy, fused, sizes)
        state = static.state()
        keys = set().union(*training.everyones(sorted(state)))
        fc.load_state_dict(state, f"{directory}/dense", strict=True)
        fc.save_state_dict(static.state(), f"{directory}/static")
        told = {
            "keys": sorted(keys ^ set(wanted)),
            "loaded": [] if fused else differing(whole_state(static), wanted),
            "differs": differing(arrays_of(f"{directory}/static", wanted), wanted),
            "ranges": sorted(key for key, weight in state.items() if weight.is_flattened),
        }
        if not fused:  # of which no graph runs on a CPU
            told.update(losses=static.run(), alone=alone)
    return told


class FeedForward(nn.Layer):
    """What Paddle's pass for feed-forward layers looks for; it takes a mesh of two axes for granted."""

    def __init__(self, mesh):
        super().__init__()
        for name, shape, axis in (("gate", (4, 6), 1), ("up", (4, 6), 1), ("down", (6, 3), 0)):
            layer = nn.Linear(*shape, bias_attr=False)
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Replicate(), dist.Shard(axis)])
            setattr(self, name, layer)

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        return self.down(nn.functional.swiglu(gate, up))


def fused_by_a_pass(directory):
    """A static graph of which a pass has fused parameters.

    Returns:
        Whether it has; whether Paddle's state dict has the live values; what a description and a check are refused
        with; after a save of that dict, which tensors of a model without the flag are not as saved, and how many are
        not zero.
    """
    fc.install()
    mesh = dist.ProcessMesh([list(range(dist.get_world_size()))], dim_names=["dp", "mp"])

    def made():
        with paddle.utils.unique_name.guard():
            net = FeedForward(mesh)
            optimizer = paddle.optimizer.AdamW(0.1, parameters=net.parameters())
            data = paddle.io.TensorDataset([paddle.ones([4, 4]), paddle.ones([4, 3])])
            loader = dist.shard_dataloader(paddle.io.DataLoader(data, batch_size=2), meshes=[mesh])
            model = dist.to_static(net, loader, nn.MSELoss(), optimizer)
            model.train()
        return model, loader

    with pytest.MonkeyPatch.context() as patch, paddle.static.scope_guard(paddle.static.Scope()):
        patch.setenv("FLAGS_enable_fused_ffn_qkv_pass", "1")
        model, loader = made()
        for x, y in loader:
            model(x, y)
        fc.save_state_dict(model.state_dict(), directory)
        # The last number is a counter, of which a load makes nothing.
        saved = {key.rpartition("_")[0] or key: t._local_value().numpy() for key, t in model.state_dict().items()}
        name = "gate.weight"
        with paddle.no_grad():
            model.state_dict()[name]._local_value().fill_(7.0)
        alive = bool((model.state_dict()[name]._local_value() == 7.0).all())
        texts = []
        for call in (model.sharded_state_dict, lambda: fc.check(model)):
            try:
                call()
            except (ValueError, fc.CheckpointError) as error:
                texts.append(str(error))
        fused = bool(model._engine.fused_ffn_qkv["ffn"])
    with paddle.static.scope_guard(paddle.static.Scope()):
        model, _ = made()  # without the flag
        fc.load_state_dict(model.sharded_state_dict(), directory)
        live = model.state_dict().items()
        state = {key: tensor._local_value().numpy() for key, tensor in live if "learning_rate" not in key}
        wrong = [
            key for key, values in state.items() if not np.array_equal(saved.get(key.rpartition("_")[0] or key), values)
        ]
        trained = sum(bool(values.any()) for values in state.values())
    return fused, alive, texts, wrong, trained


def fused_plain(directory, strategy):
    """What a fused static graph's plain state dict is refused with, and its keys of slices."""
    fc.install()
    with paddle.static.scope_guard(paddle.static.Scope()):
        static = Static(strategy, fused=True)
        sharded = static.state()
        fc.save_state_dict(sharded, f"{directory}/sharded")
        state = static.model.state_dict()
        return {
            "save": text_of(fc.save_state_dict, state, f"{directory}/plain"),
            "load": text_of(fc.load_state_dict, state, f"{directory}/sharded"),
            "reshard": text_of(fc.reshard_sharded_state_dict, state, state),
            "slices": sorted(f"{key} {value.shape}" for key, value in state.items() if "slice@" in key),
            "loaded": fc.load_state_dict(sharded, f"{directory}/sharded", strict=True).keys == len(sharded),
        }


def plain(directory, strategy, other):
    """Saves a trained static graph's plain state dict, trains on, and goes back by ``set_state_dict``.

    Returns:
        ``differs`` from what was saved, here and in a new static graph; ``losses`` before going back, and ``again``
        after it; ``structured``, what differs in a new static graph, and a dynamic job of another strategy, that load
        it under structured names; ``missing``, the learning rate's key in the new graph, and the error for it.
    """
    fc.install()
    with paddle.static.scope_guard(paddle.static.Scope()):
        static = Static(strategy)
        static.run()
        state = static.model.state_dict()
        fc.save_state_dict(state, directory)
        wanted = whole_state(static)
        losses = static.run()
        state = static.model.state_dict()
        spoil(state)
        fc.load_state_dict(state, directory, strict=True)
        static.model.set_state_dict(state)
        told = {"differs": differing(whole_state(static), wanted), "losses": losses, "again": static.run()}
    with paddle.static.scope_guard(paddle.static.Scope()):
        static = Static(strategy)  # whose states have other numbers at the end of their names
        fc.load_state_dict(static.state(), directory)
        told["structured"] = differing(whole_state(static), wanted)
        state = static.model.state_dict()
        spoil(state)
        rate = [key for key in state if key.startswith("learning_rate")]
        told["missing"] = [rate, text_of(fc.load_state_dict, state, directory)]
        del state[rate[0]]
        fc.load_state_dict(state, directory)
        told["differs"] += differing(whole_state(static), wanted)
    built = training.build(other, SIZES)
    fc.load_state_dict(matrix.state(built), directory)
    told["structured"] += differing(training.gather(built), wanted)
    return told


def whole_state(static):
    """All that a static graph holds as arrays, gathered apart from the library. Collective."""
    tensors = structured(static.built, static.model.state_dict())
    return {key: training.whole(tensor) for key, tensor in tensors.items() if "learning_rate" not in key}


def between(directory, strategy, others):
    """Trains a static graph and moves its state to dynamic strategies, and from each of these to a new static graph.

    Returns:
        For each of the others ``differs``, of what it got and of what it gave back, and ``losses`` of it, and of the
        static graph that goes on from there; beside these ``alone``, the losses of the static graph itself.
    """
    fc.install()
    with paddle.static.scope_guard(paddle.static.Scope()):
        static = Static(strategy)
        static.run()
        fc.save_state_dict(static.state(), f"{directory}/static")
        wanted = whole_state(static)
        alone = [static.run() for _ in range(2)]
    told = {"alone": alone}
    for other in others:
        built = training.build(other, SIZES)
        fc.load_state_dict(matrix.state(built), f"{directory}/static", strict=True)
        # Before its first step tensor fusion has no buffers, from which the oracle could tell what the states are of.
        differs = [] if built.strategy.fusion else differing(training.gather(built), wanted)
        losses = [built.step(i) for i in range(STEPS)]
        fc.save_state_dict(matrix.state(built), f"{directory}/{other}")
        given = training.gather(built)
        forget_buffers()
        with paddle.static.scope_guard(paddle.static.Scope()):
            static = Static(strategy)
            fc.load_state_dict(static.state(), f"{directory}/{other}", strict=True)
            differs += differing(whole_state(static), given)
            told[other] = {"differs": differs, "losses": losses, "back": static.run()}
    return told


# -- dist.parallelize --------------------------------------------------------------------------------------------------


class Parallelized:
    """The network and its optimizer under ``dist.parallelize`` on a mesh of 2 x 2, or as they are without a level."""

    def __init__(self, level):
        self._names = UniqueNameGenerator()
        self._level = level
        with paddle.utils.unique_name.guard(self._names):
            self.model = training.Net(strategies.SIZES[SIZES])
            for key, parameter in self.model.named_parameters():
                parameter.set_value(training.initial(key, parameter.shape))
            self.optimizer = paddle.optimizer.AdamW(
                training.LEARNING_RATE, parameters=self.model.parameters(), weight_decay=training.WEIGHT_DECAY
            )
            if level is None:
                return
            self.mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
            dist.auto_parallel.set_mesh(self.mesh)
            plan = {"a": dist.ColWiseParallel(), "b": dist.RowWiseParallel()}
            config = {"dp_config": {"sharding_level": level}, "mp_config": {"parallelize_plan": plan}}
            self.model, self.optimizer = dist.parallelize(self.model, self.optimizer, self.mesh, config=config)

    def step(self, i):
        with paddle.utils.unique_name.guard(self._names):
            x, y = (paddle.to_tensor(array) for array in training.batch(i, strategies.SIZES[SIZES]))
            if self._level is not None:
                cut = [dist.Shard(0), dist.Replicate()]
                x, y = dist.shard_tensor(x, self.mesh, cut), dist.shard_tensor(y, self.mesh, cut)
            return training.train_step(self.model, self.optimizer, x, y)

    def held(self):
        """All parameters and moments, whole, by key, gathered apart from the library. Collective."""
        inner = getattr(self.optimizer, "_inner_opt", self.optimizer)
        tensors = dict(self.model.named_parameters())
        keys = {parameter.name: key for key, parameter in tensors.items()}
        for accumulator, table in inner._accumulators.items():
            tensors.update({f"{keys[name]}.{accumulator}_0": tensor for name, tensor in table.items()})
        return {key: training.whole(tensor) for key, tensor in tensors.items()}


def parallelized(directory):
    """Saves each level of ``dist.parallelize``, loads it under the next one and without any, and goes on.

    Returns:
        ``differs`` of what was loaded; ``losses`` by name, each from step STEPS on.
    """
    fc.install()
    alone = Parallelized(None)
    told = {"differs": [], "losses": {"alone": [alone.step(i) for i in range(STEPS + 2)][STEPS:]}}
    after = (STEPS, STEPS + 1)
    for level in range(4):
        run = Parallelized(level)
        for i in range(STEPS):
            run.step(i)
        fc.save_state_dict(matrix.state(run), f"{directory}/{level}")
        wanted = run.held()
        told["losses"][str(level)] = [run.step(i) for i in after]
        for other in ((level + 1) % 4, None):
            run = Parallelized(other)
            fc.load_state_dict(matrix.state(run), f"{directory}/{level}", strict=True)
            told["differs"] += [[level, other, key] for key in differing(run.held(), wanted)]
            told["losses"][f"{level} to {other}"] = [run.step(i) for i in after]
    return told


# -- what is asserted -------------------------------------------------------------------------------------------------


def difference(losses, others):
    return float(np.abs(np.array(losses) - np.array(others)).max())


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("mp2", "uneven"), ("dp2-stage0", "uneven"), ("dp2-stage1", "even"), ("dp2-stage3", "even")]
)
def test_one_process_to_a_static_graph_and_back(world2, strategy, sizes, tmp_path):
    for told in world2.run(in_and_out, directory=str(tmp_path), strategy=strategy, sizes=sizes):
        assert difference(told.pop("losses"), told.pop("alone")) <= LOSS
        assert told == {"keys": [], "loaded": [], "differs": [], "ranges": []}


@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_one_process_to_a_static_graph_with_tensor_fusion_and_back(world2, sizes, tmp_path):
    reports = world2.run(in_and_out, directory=str(tmp_path), strategy="dp2-stage1", sizes=sizes, fused=True)
    for told in reports:
        assert told["keys"] == told["differs"] == []
    ranges = [set(told["ranges"]) for told in reports]
    assert ranges[0] | ranges[1] == {f"{key}.moment{i}_0" for key in shapes_of(strategies.SIZES[sizes]) for i in (1, 2)}
    assert len(ranges[0] & ranges[1]) == 2  # one parameter straddles the two halves of the buffer


@pytest.mark.parametrize(
    ("strategy", "others"),
    [
        ("mp2", ["dp2-stage3", "dp2-fully-shard-fused"]),
        ("dp2-stage1", ["mp2", "dp2-stage1"]),
        ("dp2-stage3", ["dp2-fusion", "single"]),
    ],
)
def test_static_graphs_and_dynamic_training_go_on_from_each_other(world2, strategy, others, tmp_path):
    for told in world2.run(between, directory=str(tmp_path), strategy=strategy, others=others):
        first, second = told.pop("alone")
        assert sorted(told) == sorted(others)
        for report in told.values():
            assert report["differs"] == []
            assert difference(report["losses"], first) <= LOSS
            assert difference(report["back"], second) <= LOSS


def test_a_plain_state_dict_out_and_in(world2, tmp_path):
    for told in world2.run(plain, directory=str(tmp_path / "c"), strategy="dp2-stage1", other="dp2-stage3"):
        assert told["differs"] == told["structured"] == []
        assert told["again"] == told["losses"]
        [rate], text = told["missing"]
        assert f"[ranks 0-1] the source has no such key (key {rate!r}" in text


def test_a_plain_state_dict_with_fused_slices_is_refused(world2, tmp_path):
    first, second = world2.run(fused_plain, directory=str(tmp_path), strategy="dp2-stage1")
    for name in ("save", "load", "reshard"):
        assert first[name] == second[name]
        assert "a plain tensor whose name has slice@ is one rank's range of a fused buffer" in first[name]
        advised("memory/state.py", "save and load dist_model.sharded_state_dict() instead of dist_model", first[name])
        assert first["loaded"] and second["loaded"]
        assert f"{len({*first['slices'], *second['slices']})} problems" in first[name]  # once for both ranks


def test_parameters_that_a_pass_has_fused_are_refused_before_the_training(world2, tmp_path):
    for fused, alive, (described, checked), wrong, trained in world2.run(fused_by_a_pass, directory=str(tmp_path)):
        assert fused
        assert not alive  # what Paddle gives are copies: when it gives live memory, they can be described
        assert "the DistModel fuses parameters (fused_ffn_qkv)" in described
        advised("parallel/semi_auto.py", "unset FLAGS_enable_fused_ffn_qkv_pass", described)
        assert described in checked
        assert wrong == []
        assert trained >= 3 * 5  # three weights with their moments and powers


def test_every_level_of_parallelize(world4, tmp_path):
    for told in world4.run(parallelized, directory=str(tmp_path)):
        assert told["differs"] == []
        alone = told["losses"].pop("alone")
        assert len(told["losses"]) == 12
        for losses in told["losses"].values():
            assert difference(losses, alone) <= LOSS
