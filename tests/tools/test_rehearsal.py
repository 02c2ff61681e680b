"""A rehearsal says exactly what loads count, and fails with their words."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.planning.layouts import ADAMW, Layout, Model, ModelTensor
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import is_mesh, parse_mesh
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.rehearsal import rehearse
from tests.tools.rehearsed import load, save, shard_of, state_of


def model(states=ADAMW[:3], scale: int = 1) -> Model:
    """Tensors of which parts are whole blocks, long runs, short runs, and less than a block."""
    found = [ModelTensor("embedding", (1024 * scale, 640), tp_axis=0, layers=(0,))]
    for layer in range(1, 5):
        found += [
            ModelTensor(f"{layer}.norm", (640,), layers=(layer,)),
            ModelTensor(f"{layer}.up", (64, 5 * 2048 * scale), tp_axis=1, layers=(layer,)),
            ModelTensor(f"{layer}.down", (2048 * scale, 64), tp_axis=0, layers=(layer,)),
            ModelTensor(f"{layer}.wide", (8, 8 * 16384 * scale), tp_axis=1, layers=(layer,)),
            ModelTensor(f"{layer}.cube", (6, 40, 1000), tp_axis=1, layers=(layer,)),
        ]
    return Model(tuple(found), 5, frozenset(range(1, 5)), states, segment_size=4096)


def layout(text: str, **more) -> Layout:
    return Layout(model(**more), parse_strategy(text))


TEXTS = [
    "dp=1",
    "tp=2",
    "tp=4",
    "dp=2",
    "pp=2",
    "sharding=v1:2",
    "sharding=v2:3",
    "tp=2,sharding=v2:2",
    "sharding=stage3:2",
]
PAIRS = [
    ("dp=1", "tp=4,dp=2"),
    ("tp=4", "tp=2,sharding=v2:2"),
    ("sharding=v2:3", "sharding=v1:2"),
    ("sharding=v1:2", "pp=2,tp=2"),
    ("pp=2", "sharding=stage3:2"),
    ("sharding=stage3:2", "tp=2"),
    ("dp=2", "dp=3"),
    # What these cut is cut above too.
    pytest.param("dp=1", "tp=2", marks=pytest.mark.slow),
    pytest.param("tp=4", "dp=1", marks=pytest.mark.slow),
    pytest.param("tp=2", "tp=4", marks=pytest.mark.slow),
    pytest.param("tp=2,sharding=v2:2", "sharding=v2:3", marks=pytest.mark.slow),
]


def check(path, target: Layout, values=None, **options):
    """Compares with a load of each rank."""
    report = rehearse(str(path), target, **({"options": options.pop("asked")} if "asked" in options else {}))
    assert report.error == ""
    assert sorted(rank for each in report.ranks for rank in each.ranks) == list(range(target.strategy.ranks))
    for each in report.ranks:
        for rank in each.ranks:
            catalog = target.catalog(rank)
            found, targets = load(path, catalog, rank, optimizer_states="ignore", **options)
            said = {name: getattr(each, name) for name in ("bytes_needed", "bytes_read", "reads")}
            assert said == {name: getattr(found, name) for name in said}
            assert each.scratch_bytes == found.peak_scratch_bytes
            assert each.target_bytes == sum(array.nbytes for array in targets.memory.arrays)
            assert found.unexpected == [] or target.strategy.ranks > 1
            for row in range(len(targets.catalog)) if values else ():
                expected = shard_of(targets.catalog, row, values[targets.catalog.key_name(row)])
                assert targets.memory.arrays[row].tobytes() == expected.tobytes()
    return report


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_counts_are_those_of_loads(tmp_path, saved, loaded):
    values = save(tmp_path, layout(saved))
    report = check(tmp_path, layout(loaded), values)
    assert report.total_bytes == sum(each.bytes_needed * len(each.ranks) for each in report.ranks)


def test_counts_are_those_of_loads_where_replicas_are_stored(tmp_path):
    save(tmp_path, layout("dp=3", states=()), save_replicas=True)
    report = check(tmp_path, layout("tp=2,dp=2", states=()))
    assert len(report.ranks) == 4  # which copy a rank reads depends on its number


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("dp=1", "tp=2,dp=2"), ("tp=4", "tp=2,sharding=v2:2"), ("sharding=v2:3", "pp=2,dp=2"), ("tp=2", "dp=3")],
)
def test_what_ranks_read_for_each_other_is_that_of_a_load(tmp_path, saved, loaded):
    save(tmp_path, layout(saved))
    target = layout(loaded)
    size = target.strategy.ranks
    report = rehearse(str(tmp_path), target, cooperative=True, bytes_per_second=1e6)

    def job(comm):
        state = state_of(target.catalog(comm.position))
        return load_state_dict(state, str(tmp_path), comm, comm_method="cooperative")

    found = SimulatedWorld(size).run(job)
    for name in ("bytes_read", "reads", "bytes_received", "bytes_sent"):
        assert report.cooperative[name] == [getattr(each, name) for each in found]
    assert sum(report.cooperative["bytes_received"]) == sum(report.cooperative["bytes_sent"]) > 0
    # Each byte is read once.
    assert sum(report.cooperative["bytes_read"]) < report.total_bytes
    assert report.seconds["direct"] == report.worst.bytes_read / 1e6
    assert report.seconds["cooperative"] > max(report.cooperative["bytes_read"]) / 1e6


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("dp=1", "tp=2", marks=pytest.mark.slow),
        ("tp=4", "tp=2,sharding=v2:2"),
        pytest.param("sharding=v2:3", "sharding=v1:2", marks=pytest.mark.slow),
        ("pp=2", "dp=1"),
    ],
)
def test_memory_is_that_of_a_load(tmp_path, saved, loaded):
    """Of more than 100 MiB of targets; what a load takes is what numpy and Python have at its peak."""
    save(tmp_path, layout(saved, scale=4))
    target = layout(loaded, scale=4)
    each = rehearse(str(tmp_path), target).ranks[0]
    catalog = target.catalog(each.ranks[0])
    gc.collect()
    tracemalloc.start()
    try:
        load(str(tmp_path), catalog, each.ranks[0], optimizer_states="ignore")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert each.memory_bytes == pytest.approx(peak, rel=0.05)


def many(layers: int) -> Model:
    tensors = []
    for layer in range(layers):
        tensors += [ModelTensor(f"{layer}.w{n}", (16, 64), tp_axis=n % 2, layers=(layer,)) for n in range(10)]
    return Model(tuple(tensors), layers, states=ADAMW[:3], segment_size=100)


def calls_of(work, *arguments, **options):
    """What a function returns, and how many functions of Python it calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        result = work(*arguments, **options)
    finally:
        sys.setprofile(None)
    return result, count


@pytest.mark.parametrize(
    ("text", "cooperative"),
    [
        ("tp=8,pp=4,sharding=v2:{}", False),
        ("tp=4,sharding=stage3:{}", False),
        ("tp=4,sharding=stage3:{}", True),
        ("mesh={}x4:dp,mp;sharding=stage3:dp", False),
        ("mesh={}x4:dp,mp;sharding=stage3:dp", True),
    ],
)
def test_a_rank_more_costs_few_calls(tmp_path, text, cooperative):
    """What grows with tensors and ranks is in columns, where no two ranks have the same."""
    save(tmp_path, Layout(many(6), parse_strategy("tp=4")))
    calls = []
    for degree in (16, 64):
        given = text.format(degree)
        target = MeshLayout(many(6), parse_mesh(given)) if is_mesh(given) else Layout(many(6), parse_strategy(given))
        ranks = target.strategy.ranks
        report, count = calls_of(rehearse, str(tmp_path), target, cooperative=cooperative)
        assert (report.error, len(report.ranks)) == ("", ranks)
        calls.append(count)
    assert (calls[1] - calls[0]) / (ranks - ranks // 4) < 20, calls
