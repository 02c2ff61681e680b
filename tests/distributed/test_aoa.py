"""AOA statements between real processes: names, fused parameters and degrees change, bit for bit as in numpy.

The jobs: trained under one layout and one set of names, loaded or moved into others by AOA statements.
"""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common
from tests.distributed.matrix.assembly import assemble, differing
from tests.distributed.matrix.jobs import leave

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_SIZE, INNER = 2, 6, 8, 4, 2, 12
QKV, FFN = (HEADS + 2 * GROUPS) * HEAD_SIZE, 2 * INNER
BATCH = 8
#: Names of a block's layers in the one code base and in the other, and how they are put together.
PARTS = {"qkv": "attention.qkv_proj", "out": "attention.o_proj", "gate_up": "mlp.up_gate", "down": "mlp.down"}
SOURCE, TARGET = "layers", "decoder"
#: Degrees of tensor parallelism and of sharding V2.
LAYOUTS = {"tp2": (2, 1), "tp4": (4, 1), "tp2 v2": (2, 2), "v2": (1, 2), "dp1 tp1 v4": (1, 4)}
HALVED = f"{SOURCE}.0.down.bias"


def statements():
    """From the one code base to the other. Biases are cut along their only axis."""
    heads = f"num_heads={HEADS}, num_key_value_groups={GROUPS}"
    fused = {"qkv": f"fused_qkv_old, {heads}", "gate_up": "fused_ffn"}
    texts = []
    for ours, theirs in PARTS.items():
        for tensor, axis in (("weight", ""), ("bias", ", axis=0")):
            tail = f", {fused[ours]}{axis}" if ours in fused else ""
            texts.append(f"{SOURCE}.$LAYER_ID.{ours}.{tensor} -> {TARGET}.$LAYER_ID.{theirs}.{tensor}{tail}")
    return texts


def computing_statements():
    """The same, and a parameter (not its states) that is computed."""
    halved = HALVED.replace(SOURCE, TARGET, 1).replace("down", PARTS["down"])
    return [*statements(), f'{HALVED} -> {halved}, scale=0.5, states="model"']


class Block(nn.Layer):
    def __init__(self, names, degree):
        super().__init__()
        self.names = names
        column, row = fleet.meta_parallel.ColumnParallelLinear, fleet.meta_parallel.RowParallelLinear
        for key, width in (("qkv", QKV), ("gate_up", FFN)):
            if degree > 1:
                pair = (
                    column(HIDDEN, width, has_bias=True, gather_output=False),
                    row(width, HIDDEN, has_bias=True, input_is_parallel=True),
                )
            else:
                pair = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)
            for name, layer in zip((key, {"qkv": "out", "gate_up": "down"}[key]), pair):
                self.put(names[name], layer)

    def put(self, path, layer):
        owner, *rest = path.split(".")
        if not rest:
            self.add_sublayer(owner, layer)
            return
        if owner not in self._sub_layers:
            self.add_sublayer(owner, nn.Layer())
        self._sub_layers[owner].add_sublayer(rest[0], layer)

    def part(self, name):
        found = self
        for step in self.names[name].split("."):
            found = found._sub_layers[step]
        return found

    def forward(self, x):
        x = x + self.part("out")(F.gelu(self.part("qkv")(x)))
        return x + self.part("down")(F.gelu(self.part("gate_up")(x)))


class Net(nn.Layer):
    def __init__(self, root, degree):
        super().__init__()
        names = {name: name for name in PARTS} if root == SOURCE else PARTS
        self.blocks = [Block(names, degree) for _ in range(LAYERS)]
        self.add_sublayer(root, nn.LayerList(self.blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Job:
    """A model and its AdamW under a layout."""

    def __init__(self, layout, root, salt):
        fc.install()
        self.degree, self.sharding = LAYOUTS[layout]
        cpu_world.init_fleet(mp=self.degree, sharding=self.sharding, split_param=self.sharding > 1)
        self.net = Net(root, self.degree)
        for key, weight in self.net.sharded_state_dict().items():
            generator = np.random.RandomState(zlib.crc32((key + salt).encode()) % 2**31)
            value = (generator.randn(*weight.global_shape) * 0.3).astype("float32")
            box = tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape))
            weight.local_tensor.set_value(value[box])
        self.model, self.optimizer = self.net, paddle.optimizer.AdamW(0.01, parameters=self.net.parameters())
        self.model = fleet.distributed_model(self.net)
        self.optimizer = fleet.distributed_optimizer(self.optimizer)

    def train(self, steps):
        place = dist.get_rank() // self.degree if self.sharding > 1 else 0
        for step in range(steps):
            x = np.random.RandomState(step).randn(BATCH, HIDDEN).astype("float32")
            rows = slice(BATCH // self.sharding * place, BATCH // self.sharding * (place + 1))
            (self.model(paddle.to_tensor(x[rows])) ** 2).mean().backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self

    def state(self):
        model = self.model.sharded_state_dict()
        return {**model, **fc.init_optimizer_state(self.optimizer, model)}


def save(layout, folder):
    """Trains and saves; leaves the shards for the oracle."""
    state = Job(layout, SOURCE, "saved").train(2).state()
    fc.save_state_dict(state, os.path.join(folder, "checkpoint"))
    leave(state, os.path.join(folder, "saved"))
    return {"keys": sorted(state), "flattened": sum(weight.is_flattened for weight in state.values())}


def load(layout, folder, texts, root=TARGET, result="loaded", reverse=False):
    """Loads into other names and another layout; leaves the shards."""
    state = Job(layout, root, "other").state()
    config = {"aoa_statements": texts, "aoa_config_reverse": reverse}
    report = fc.load_state_dict(state, os.path.join(folder, "checkpoint"), aoa_config=config, strict=True)
    leave(state, os.path.join(folder, result))
    return described(report, state)


def again(layout, folder, texts):
    """Loads into other names and another layout, and saves that."""
    state = Job(layout, TARGET, "other").state()
    config = {"aoa_statements": texts}
    fc.load_state_dict(state, os.path.join(folder, "checkpoint"), aoa_config=config, strict=True)
    fc.save_state_dict(state, os.path.join(folder, "there", "checkpoint"))


def reshard(source, target, folder, texts):
    """Moves a live, trained job into other names and another layout."""
    held = Job(source, SOURCE, "saved").train(2).state()
    leave(held, os.path.join(folder, "saved"))
    before = common.snapshot(held)
    # As fleet broadcasts initial values in the order of parameter names, all ranks have to count alike.
    with paddle.utils.unique_name.guard("moved_"):
        state = Job(target, TARGET, "other").state()
    report = fc.reshard_sharded_state_dict(held, state, aoa_config={"aoa_statements": texts}, strict=True)
    leave(state, os.path.join(folder, "loaded"))
    return {**described(report, state), "source_untouched": common.snapshot(held) == before}


def described(report, state):
    return {
        "needed": report.bytes_needed,
        "local": common.local_bytes(state),
        "read": report.bytes_read,
        "copied": report.bytes_copied,
        "received": report.bytes_received,
        "sent": report.bytes_sent,
        "computed": report.computed,
        "missing": report.missing,
        "unexpected": report.unexpected,
    }


def refused(folder, config):
    """What a load and a reshard say of a configuration (of one for each rank), and whether a target was touched."""
    rank = dist.get_rank()
    config = config[rank] if isinstance(config, list) else config
    half = fc.ShardedWeight("w", paddle.full([4, 3], float(rank)), (4, 3), (8, 3), (4 * rank, 0))
    state = {"w": half, "b": paddle.arange(6, dtype="float32")}
    fc.save_state_dict(state, folder)
    target = {"w": paddle.full([8, 3], -1.0), "b": paddle.full([6], -1.0)}
    before, size = common.snapshot(target), dist.get_world_size()
    results = {
        "load": common.outcome(lambda: fc.load_state_dict(target, folder, aoa_config=config)),
        "reshard": common.outcome(lambda: fc.reshard_sharded_state_dict(state, target, aoa_config=config)),
    }
    unchanged = common.snapshot(target) == before
    # And both work afterwards.
    fc.load_state_dict(target, folder, aoa_config={"aoa_statements": ["w -> w"]})
    expected = np.repeat(np.arange(size, dtype="float32"), 4)[:8, None] * np.ones((1, 3), "float32")
    return {**results, "unchanged": unchanged, "afterwards": common.same_bytes(target["w"], expected)}


# -- what is asserted -------------------------------------------------------------------------------------------------

STATES = ("", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
HALVED_BIAS = f"{TARGET}.0.mlp.down.bias"
KEYS = LAYERS * len(PARTS) * 2 * len(STATES)


def ranks_of(layout):
    degree, sharding = LAYOUTS[layout]
    return degree * sharding


def relaid(whole, axis, sizes, source_degree, target_degree):
    """Parts that lie side by side on every rank of one degree, side by side on every rank of another."""
    pieces = [[] for _ in sizes]
    for part in np.split(whole, source_degree, axis):
        ends = np.cumsum([size // source_degree for size in sizes])[:-1]
        for piece, found in zip(pieces, np.split(part, ends, axis)):
            piece.append(found)
    joined = [np.split(np.concatenate(piece, axis), target_degree, axis) for piece in pieces]
    return np.concatenate([np.concatenate(parts, axis) for parts in zip(*joined)], axis)


def oracle(saved, source, target):
    """What the other code base has to have, from the whole arrays of the one."""
    degrees = [LAYOUTS[layout][0] for layout in (source, target)]
    head = HEAD_SIZE
    sizes = {
        "qkv": [HEADS * head, GROUPS * head, GROUPS * head],
        "gate_up": [INNER, INNER],
    }
    expected = {}
    for key, array in saved.items():
        root, layer, part, rest = key.split(".", 3)
        assert root == SOURCE
        if part in sizes and array.size > 1:
            array = relaid(array, array.ndim - 1, sizes[part], *degrees)
        expected[f"{TARGET}.{layer}.{PARTS[part]}.{rest}"] = array
    return expected


def check_moved(reports, folder, source, target, computed=()):
    saved = assemble(folder / "saved", ranks_of(source))
    expected = oracle(saved, source, target)
    assert len(expected) == KEYS
    for key in computed:
        expected[key] = expected[key] * np.float32(0.5)
    loaded = assemble(folder / "loaded", ranks_of(target))
    assert differing(loaded, expected) == []
    # Too much alike would show no mistake.
    assert len({array.tobytes() for array in saved.values()}) > KEYS // 2
    for report in reports:
        assert report["computed"] == list(computed)
        assert report["missing"] == report["unexpected"] == []
        assert report["needed"] == report["local"] == report["read"] + report["copied"] + report["received"]


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    done = {}

    def once(layout):
        if layout not in done:
            done[layout] = tmp_path_factory.mktemp("aoa") / layout.replace(" ", "-")
            for report in world(ranks_of(layout)).run(save, layout=layout, folder=str(done[layout])):
                flattened = LAYOUTS[layout][1] > 1
                assert (report["flattened"] > 0) == flattened
                assert len(report["keys"]) == KEYS or flattened
        return done[layout]

    return once


def test_the_oracle_moves_something():
    """Parts of one degree are not those of another, and back again is the identity."""
    whole = np.arange(48)
    other = relaid(whole, 0, [24, 12, 12], 2, 4)
    assert other.tolist() == [
        *range(6), *range(12, 15), *range(18, 21), *range(6, 12), *range(15, 18), *range(21, 24),
        *range(24, 30), *range(36, 39), *range(42, 45), *range(30, 36), *range(39, 42), *range(45, 48),
    ]  # fmt: skip
    assert relaid(other, 0, [24, 12, 12], 4, 2).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *[("tp2", "tp4"), ("tp4", "tp2 v2"), ("tp2 v2", "v2")],
        *[pytest.param(*pair, marks=pytest.mark.slow) for pair in (("tp4", "tp2"), ("tp2", "v2"), ("tp2 v2", "tp4"))],
    ],
)
def test_a_load_into_other_names_and_another_degree(world, saved, source, target):
    folder = saved(source)
    texts = statements()
    reports = world(ranks_of(target)).run(load, layout=target, folder=str(folder), texts=texts)
    check_moved(reports, folder, source, target)


@pytest.mark.parametrize(("source", "target"), [("tp2", "tp4"), ("tp2 v2", "tp2")])
def test_a_load_that_computes(world, saved, source, target):
    folder = saved(source)
    texts = computing_statements()
    reports = world(ranks_of(target)).run(load, layout=target, folder=str(folder), texts=texts)
    check_moved(reports, folder, source, target, [HALVED_BIAS])


@pytest.mark.parametrize("layout", ["tp4", "tp2 v2"])
def test_the_inverse_gives_back_what_was_saved(world, saved, layout):
    folder, texts = saved("tp2"), statements()
    world(4).run(again, layout=layout, folder=str(folder), texts=texts)
    there = str(folder / "there")
    arguments = {"layout": "tp2", "texts": texts, "root": SOURCE, "reverse": True}
    world(2).run(load, folder=there, **arguments)
    assert differing(assemble(folder / "there" / "loaded", 2), assemble(folder / "saved", 2)) == []


# Each layout once in CI, and each kind of statements.
@pytest.mark.parametrize(
    ("source", "target", "texts"),
    [
        ("tp2 v2", "tp4", statements),
        ("tp4", "tp2 v2", computing_statements),
        ("tp4", "dp1 tp1 v4", statements),
        pytest.param("tp2 v2", "tp4", computing_statements, marks=pytest.mark.slow),
        pytest.param("tp4", "tp2 v2", statements, marks=pytest.mark.slow),
        pytest.param("tp4", "dp1 tp1 v4", computing_statements, marks=pytest.mark.slow),
    ],
)
def test_a_live_reshard(world4, tmp_path, source, target, texts):
    folder, texts = str(tmp_path), texts()
    reports = world4.run(reshard, source=source, target=target, folder=folder, texts=texts)
    computed = [HALVED_BIAS] if "scale" in texts[-1] else []
    check_moved(reports, tmp_path, source, target, computed)
    assert sum(report["sent"] for report in reports) == sum(report["received"] for report in reports) > 0
    assert all(report["source_untouched"] and report["read"] == 0 for report in reports)


REFUSED = {
    "malformed": (["w -> w, axis="], ["AOA statement 1, column"]),
    "no such source": (["b -> b", "nowhere -> w"], ["AOA statement 2", "'nowhere'", "nowhere -> w", "Remedy"]),
    "another shape": (["w^T -> w"], ["AOA statement 1: w^T -> w", "expected [8, 3]", "Remedy"]),
    "joined with another dtype": (['b -> x, dtype="bfloat16"', "x, b -> w, axis=0"], ["AOA statement 2", "dtype"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_that_does_not_fit_is_one_aoa_error_on_every_rank(world2, tmp_path, case):
    texts, fragments = REFUSED[case]
    reports = world2.run(refused, folder=str(tmp_path), config={"aoa_statements": texts})
    for way in ("load", "reshard"):
        kind, text = reports[0][way]
        assert reports[1][way] == [kind, text]
        assert kind == "AoaError"
        assert "[ranks 0-1] " in text
        for fragment in fragments:
            assert fragment in text
    assert all(report["unchanged"] and report["afterwards"] for report in reports)


@pytest.mark.parametrize("other", [{"aoa_statements": ["b -> b"]}, None, {"aoa_statements": ["w -> w", "b -> _"]}])
def test_ranks_have_to_be_given_the_same_statements(world2, tmp_path, other):
    config = [{"aoa_statements": ["w -> w"]}, other]
    reports = world2.run(refused, folder=str(tmp_path), config=config)
    for way in ("load", "reshard"):
        kind, text = reports[0][way]
        assert reports[1][way] == [kind, text]
        assert kind == "ValidationError"
        assert "ranks disagree" in text
        assert "aoa_config" in text
    assert all(report["unchanged"] and report["afterwards"] for report in reports)
