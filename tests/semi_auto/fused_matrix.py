"""Parameters that fuse q, k and v, or gate and up, between semi-automatic and fleet's tensor parallelism.

A DistTensor is in natural order; each rank of fleet's holds its part of everything that is fused. Parameters and
optimizer states are given values that follow from their names, so nothing is trained, and the order that each rank has
to hold is computed with numpy alone.

``python -m tests.semi_auto.fused_matrix [--json FILE]`` runs all pairs, through files and live.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

JOBS = "tests.semi_auto.fused_matrix"
HIDDEN, HEAD, HEADS, GROUPS, INNER = 16, 4, 8, 4, 24
FUSED = {"qkv": (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD), "gate_up": (INNER, INNER)}
STATEMENTS = {"qkv": f"fused_qkv_old, num_heads={HEADS}, num_key_value_groups={GROUPS}", "gate_up": "fused_ffn"}
# In Qwen's attention q, k and v have a bias.
FAMILIES = ("llama", "qwen")


@dataclass(frozen=True)
class Strategy:
    """How one job is parallel.

    Attributes:
        name: How tests call it.
        ranks: Size of the world.
        mp: Tensor-parallel degree; the other ranks are "dp", which stage 1 (V2 in fleet) cuts states over.
        kind: ``single``, ``semi`` (DistTensors) or ``fleet``.
    """

    name: str
    ranks: int
    mp: int
    kind: str


STRATEGIES = (
    Strategy("single", 1, 1, "single"),
    Strategy("semi-mp2", 2, 2, "semi"),
    Strategy("semi-mp4", 4, 4, "semi"),
    Strategy("semi-dp2-mp2-stage1", 4, 2, "semi"),
    Strategy("fleet-tp2", 2, 2, "fleet"),
    Strategy("fleet-tp4", 4, 4, "fleet"),
    Strategy("fleet-tp2-v2x2", 4, 2, "fleet"),
)
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


def fused_layer(name, bias, strategy):
    """A linear layer with fused outputs."""
    outputs = sum(FUSED[name])
    if strategy.kind != "fleet":
        return nn.Linear(HIDDEN, outputs, bias_attr=None if bias else False)

    class Fused(fleet.meta_parallel.ColumnParallelLinear):
        def _get_shard_rules(self):
            return {"weight": fc.FusedAxis(1, STATEMENTS[name]), "bias": fc.FusedAxis(0, STATEMENTS[name])}

    return Fused(HIDDEN, outputs, has_bias=bias, gather_output=False)


class Block(nn.Layer):
    """The linear layers of one block of a model."""

    def __init__(self, family, strategy):
        super().__init__()
        self.qkv = fused_layer("qkv", family == "qwen", strategy)
        self.gate_up = fused_layer("gate_up", False, strategy)
        if strategy.kind == "fleet":
            row = fleet.meta_parallel.RowParallelLinear
            self.o = row(HEADS * HEAD, HIDDEN, has_bias=False, input_is_parallel=True)
            self.down = row(INNER, HIDDEN, has_bias=False, input_is_parallel=True)
        else:
            self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias_attr=False)
            self.down = nn.Linear(INNER, HIDDEN, bias_attr=False)


class Job:
    """One strategy's block and optimizer; their values follow from their names and a salt."""

    def __init__(self, name, family, salt):
        fc.install()
        self.strategy = strategy = BY_NAME[name]
        if strategy.kind == "semi":
            cpu_world.reset_fleet()
        with paddle.utils.unique_name.guard():
            if strategy.kind == "fleet":
                sharding = strategy.ranks // strategy.mp
                cpu_world.init_fleet(mp=strategy.mp, sharding=sharding, split_param=sharding > 1)
            self.block = Block(family, strategy)
            if strategy.kind == "semi":
                ranks = np.arange(strategy.ranks).reshape(-1, strategy.mp)
                self.mesh = dist.ProcessMesh(ranks, dim_names=["dp", "mp"])
                dist.auto_parallel.set_mesh(self.mesh)
                dist.shard_layer(self.block, self.mesh, self._place)
            optimizer = paddle.optimizer.AdamW(0.01, parameters=self.block.parameters())
            if strategy.kind == "fleet":
                self.block = fleet.distributed_model(self.block)
                optimizer = fleet.distributed_optimizer(optimizer)
            elif strategy.kind == "semi":
                stage = dist.ShardingStage1("dp", self.mesh) if len(ranks) > 1 else None
                optimizer = dist.shard_optimizer(optimizer, stage)
            model = self.block.sharded_state_dict()
            self.state = {**model, **optimizer.sharded_state_dict(model)}
            self.optimizer = optimizer
        for key, weight in self.state.items():
            with paddle.no_grad():
                wanted = paddle.to_tensor(self.wanted(key, weight, salt))
                if wanted.size:
                    weight.local_tensor.copy_(wanted.astype(weight.local_tensor.dtype), True)

    def _place(self, name, layer, mesh):
        for short, parameter in list(layer._parameters.items()):
            placements = [dist.Replicate()] * mesh.ndim
            if name:
                placements[-1] = dist.Shard(1 if name in FUSED and short == "weight" else 0)
            layer._parameters[short] = dist.shard_tensor(parameter, mesh, placements)

    def wanted(self, key, weight, salt):
        """What this rank has to hold of a tensor."""
        shape = tuple(weight.global_shape)
        value = np.random.RandomState(zlib.crc32((key + salt).encode()) % 2**31).randn(*shape).astype("float32")
        name = key.split(".")[0]
        if self.strategy.kind == "fleet" and name in FUSED and value.size > 1:
            value = in_rank_order(value, FUSED[name], self.strategy.mp)
        part = value[tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape))]
        return part.reshape(-1)[weight.flattened_range] if weight.is_flattened else part

    def differing(self, salt):
        """Keys of which this rank does not hold, bit for bit, what it has to."""
        return [
            key
            for key, weight in self.state.items()
            if weight.local_tensor.numpy().tobytes() != self.wanted(key, weight, salt).tobytes()
        ]


def in_rank_order(value, extents, degree):
    """Components side by side along the last axis, as tensor-parallel ranks hold their parts of them."""
    parts = [np.split(component, degree, axis=-1) for component in np.split(value, np.cumsum(extents)[:-1], axis=-1)]
    return np.concatenate([part[rank] for rank in range(degree) for part in parts], axis=-1)


def save(name, family, folder):
    """Saves what a strategy holds."""
    fc.save_state_dict(Job(name, family, "saved").state, folder, unique_id=0)


def load(name, family, folder):
    """Loads into a strategy; returns the keys that are wrong, and those that were put right."""
    job = Job(name, family, "other")
    report = fc.load_state_dict(job.state, folder, strict=True)
    return job.differing("saved"), sorted(report.fused)


def merged(family, folder):
    """Merges and exports; returns the keys that are wrong."""
    from safetensors.numpy import load_file

    single = Job("single", family, "other")
    fc.export_safetensors(folder, f"{folder}-exported", states=True)
    exported = load_file(f"{folder}-exported/model.safetensors")
    whole = {key: tensor.numpy() for key, tensor in fc.load_merged_state_dict(folder).items()}
    return [
        key
        for key, weight in single.state.items()
        for found in (exported, whole)
        if found[key].tobytes() != single.wanted(key, weight, "saved").tobytes()
    ]


def move(source, target, family):
    """Moves a live state into another strategy of the same world; returns the keys that are wrong."""
    here, there = Job(source, family, "saved"), Job(target, family, "other")
    report = fc.reshard_sharded_state_dict(here.state, there.state, strict=True)
    return there.differing("saved"), sorted(report.fused)


def pairs():
    """All ``(way, family, source, target)``."""
    for family in FAMILIES:
        for source in STRATEGIES:
            for target in STRATEGIES:
                yield "files", family, source.name, target.name
                if source.ranks == target.ranks > 1:
                    yield "live", family, source.name, target.name


def sample(count, seed=0):
    """A seeded part of the pairs, in which one side is semi-automatic and the other is fleet's."""
    crossing = [p for p in pairs() if {BY_NAME[p[2]].kind, BY_NAME[p[3]].kind} == {"semi", "fleet"}]
    return sorted(random.Random(seed).sample(crossing, count))


def check(worlds, root, pair, saved):
    """Runs one pair; returns what is wrong.

    Args:
        worlds: gives the world of so many ranks.
        root: a directory.
        pair: of :func:`pairs`.
        saved: what has been saved under the root; added to.
    """
    way, family, source, target = pair
    folder = Path(root) / f"{family}-{source}"
    if way == "live":
        world = worlds(BY_NAME[source].ranks)
        reports = world.run(f"{JOBS}:move", source=source, target=target, family=family)
    else:
        if folder not in saved:
            worlds(BY_NAME[source].ranks).run(f"{JOBS}:save", name=source, family=family, folder=str(folder))
            saved.add(folder)
        reports = worlds(BY_NAME[target].ranks).run(f"{JOBS}:load", name=target, family=family, folder=str(folder))
    parts = [BY_NAME[name].mp if BY_NAME[name].kind == "fleet" else 1 for name in (source, target)]
    problems = sorted({f"differs: {key}" for wrong, _ in reports for key in wrong})
    if bool(reports[0][1]) != (parts[0] != parts[1]):
        problems.append(f"reported as put right: {reports[0][1]}")
    return problems


def main(arguments):
    """Runs all pairs; see the module."""
    from paddle_flexckpt.testing import World

    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    worlds, begun, problems, saved = {}, time.monotonic(), [], set()
    chosen = list(pairs())
    with tempfile.TemporaryDirectory() as root:
        try:
            for pair in chosen:
                found = check(lambda ranks: worlds.setdefault(ranks, World(ranks)), root, pair, saved)
                problems += [(*pair, found)] if found else []
                print(*pair, found or "ok", flush=True)
        finally:
            for world in worlds.values():
                world.close()
    print(f"{len(chosen)} pairs in {time.monotonic() - begun:.0f} s, {len(problems)} problems")
    if options.json:
        Path(options.json).write_text(json.dumps({"pairs": len(chosen), "problems": problems}))
    return len(problems)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
