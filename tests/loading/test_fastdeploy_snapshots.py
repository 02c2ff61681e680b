"""``publish_fastdeploy``: files for each rank of an engine, with slices of what ``publish`` writes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading import live_model, publishing
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.media.local import LocalBackend, OutputParts
from paddle_flexckpt.rollout import fastdeploy_versions
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.transfer.samples import cut, values_of

KINDS = {
    "m.up": ("float32", (8, 12)),
    "m.down": ("float32", (12, 8)),
    "m.q": ("float16", (8, 16)),
    "m.k": ("float16", (8, 4)),
    "m.v": ("float16", (8, 4)),
    "m.norm": ("bfloat16", (8,)),
    "m.one": ("float32", ()),
    "m.none": ("float32", (0, 4)),
    "m.up.moment1_0": ("float32", (8, 12)),
}
STATEMENTS = {
    "aoa_statements": ["m.up^T -> e.up", "m.down -> e.down", "m.q, m.k, m.v -> e.qkv, axis=1", "m.norm -> e.norm"]
}
AXES = {"e.up": 0, "e.d*n": -2, "e.qkv": (1, [4, 1, 1])}


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


def snapshot(directory, rank):
    """What a rank of the engine loads, as FastDeploy finds it."""
    names = sorted(name for name in os.listdir(directory) if name.startswith(f"model_state.tp{rank}.{rank}.part"))
    found = {}
    for name in names:
        tensors = load_file(directory / name)
        assert not tensors.keys() & found.keys()
        found.update(tensors)
    return found


def part_of(values, rank, degree, heads):
    """A rank's part of the engine's tensors; ranks share a key-value head where there are fewer than ranks."""

    def part(array, axis, pieces=degree):
        return np.split(array, pieces, axis)[rank * pieces // degree]

    qkv = [part(values[f"m.{name}"], 1, min(degree, count)) for name, count in zip("qkv", heads)]
    return {
        "e.up": part(values["m.up"].T, 0),
        "e.down": part(values["m.down"], 0),
        "e.qkv": np.concatenate(qkv, 1),
        "e.norm": values["m.norm"],
        "m.one": values["m.one"],
        "m.none": values["m.none"],
    }


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].shape, found[name].tobytes()) == (value.shape, value.tobytes()) for name, value in expected.items()
    )


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (1, 2), (2, 2), (3, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize("how", ["owned", "sent"])
@pytest.mark.parametrize("heads", [[4, 1, 1], [8, 2, 2], [16, 4, 4]])
def test_each_rank_of_the_engine_has_its_part(values, tmp_path, monkeypatch, ranks, degree, how, heads):
    if how == "sent":
        monkeypatch.setattr(live_model, "FEW_RUNS", -1)
        monkeypatch.setattr(live_model, "RUN_BYTES", 1 << 60)
        monkeypatch.setattr(publishing, "BATCH_BYTES", 256)

    axes = {**AXES, "e.qkv": (1, heads)}

    def job(comm):
        return fc.publish_fastdeploy(
            cut(values, comm.rank, ranks), tmp_path / "out", 7, degree, axes, comm, aoa_config=STATEMENTS
        )

    reports = SimulatedWorld(ranks).run(job)
    for rank in range(degree):
        assert equal(snapshot(tmp_path / "out", rank), part_of(values, rank, degree, heads))
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*reports[0].files, "version.yaml"])
    assert sum(report.bytes_written for report in reports) == reports[0].total_bytes
    assert (reports[0].keys, reports[0].left_out) == (6 * degree, 1)
    version = yaml.safe_load((tmp_path / "out" / "version.yaml").read_text())
    assert version["step"] == 7
    assert sorted(version["files"]) == sorted(reports[0].files)
    assert all(
        entry
        == [os.path.getsize(tmp_path / "out" / name), fastdeploy_versions.file_digest(str(tmp_path / "out" / name))]
        for name, entry in version["files"].items()
    )


def test_every_rank_owns_files_and_parts_are_small(values, tmp_path):
    def job(comm):
        state = {key: value for key, value in cut(values, comm.rank, 3).items() if key in ("m.up", "m.down")}
        return fc.publish_fastdeploy(state, tmp_path / "out", "s", 2, {"m.*": 0}, comm, max_file_bytes=100)

    report = SimulatedWorld(3).run(job)[0]
    assert {len(load_file(tmp_path / "out" / name)) for name in report.files} == {1}
    assert report.files == [f"model_state.tp{rank}.{rank}.part{part}.pdparams" for rank in (0, 1) for part in (0, 1)]
    assert json.loads((tmp_path / "out" / "version.yaml").read_text())["step"] == "s"


def test_prefix_configuration_and_gpus(values, tmp_path):
    def job(comm):
        return fc.publish_fastdeploy(
            dict(values), tmp_path, 1, 2, {"up": 1}, comm, prefix="m", config={"layers": 2}, gpu_ids=[5, 3]
        )

    SimulatedWorld(1).run(job)
    assert load_file(tmp_path / "model_state.tp1.3.part0.pdparams")["up"].tolist() == values["m.up"][:, 6:].tolist()
    assert json.loads((tmp_path / "config.json").read_text()) == {"layers": 2}


def test_statements_that_are_reversed_and_names_with_any_characters(tmp_path):
    values = {'a "b"/w': np.arange(8, dtype=np.float32).reshape(4, 2), "_layers.w": np.ones(2, np.float32)}
    reverse = {"aoa_statements": ['"x y" -> "a \\x22b\\x22/w"'], "aoa_config_reverse": True}
    SimulatedWorld(1).run(
        lambda comm: fc.publish_fastdeploy(values, tmp_path, 1, 2, {"x y": 0}, comm, aoa_config=reverse)
    )
    found = snapshot(tmp_path, 1)
    assert found["x y"].tolist() == [[4, 5], [6, 7]]
    assert found["_layers.w"].tolist() == [1, 1]


def test_a_fused_parameter_is_in_natural_order_before_it_is_cut(tmp_path):
    """Under tensor parallelism of 2, two ranks have [gate | up] each; an engine of 4 has its own [gate | up]."""
    gate, up = np.arange(8, dtype=np.float32), np.arange(8, 16, dtype=np.float32)

    def job(comm):
        own = np.concatenate([np.split(each, 2)[comm.rank] for each in (gate, up)])
        fused = fc.FusedAxis(0, "fused_ffn")
        shard = fc.ShardedWeight("w", own, (8,), (16,), (8 * comm.rank,), fused=fused)
        return fc.publish_fastdeploy({"w": shard}, tmp_path, 1, 4, {"w": (0, [1, 1])}, comm)

    SimulatedWorld(2).run(job)
    assert [snapshot(tmp_path, rank)["w"].tolist() for rank in range(4)] == [
        [*gate[2 * rank : 2 * rank + 2], *up[2 * rank : 2 * rank + 2]] for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("degree", "axes", "message"),
    [
        (3, {"m.q": 1}, "a tensor cannot be split so (key 'm.q'); expected extent 16 to be multiples of degree 3"),
        (
            2,
            {"m.norm": 1},
            "(key 'm.norm'); expected an axis of [8]; got axis 1. Remedy (FC101): correct axes or degree",
        ),
        (4, {"m.q": (1, [14, 1, 1])}, "expected shares [14, 1, 1] of extent 16 to be multiples of degree 4"),
        (4, {"m.q": (1, [10, 3, 3])}, "expected shares [10, 3, 3] of extent 16 to be multiples of degree 4"),
        (4, {"m.q": (1, [4, 6, 6])}, "expected shares [4, 6, 6] of extent 16 to be multiples of degree 4, or to"),
        (2, {"m.q": (1, [2, 1])}, "expected shares [2, 1] of extent 16"),
        (2, {"m.q": 0, "m.?": 1}, "expected one axis; another pattern gives (0, (1,)); got axis 1"),
        (2, {"n.*": 0}, "axes: 'n.*' matches no tensor; there are ['m.down', 'm.k', 'm.none']. Remedy (FC101)"),
        (2, {"m.q": "0"}, "axes['m.q'] has to be an axis, or an axis and shares; got '0'"),
        (2, {"m.q": (0, [0])}, "axes['m.q'] has to be an axis, or an axis and shares; got (0, [0])"),
        (0, {}, "degree has to be an integer >= 1; got 0"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(values, tmp_path, degree, axes, message):
    def job(comm):
        fc.publish_fastdeploy(cut(values, comm.rank, 2), tmp_path / "out", 1, degree, axes, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(each, ValidationError) and message in str(each) for each in outcomes), outcomes
    assert not (tmp_path / "out").exists()


def test_other_mistakes(values, tmp_path):
    def refused(message, state=values, output=tmp_path / "out", step=1, **options):
        def job(comm):
            fc.publish_fastdeploy(state, output, step, 2, {}, comm, **options)

        (error,) = SimulatedWorld(1).run_all(job)
        assert isinstance(error, ValidationError), error
        assert message in str(error)

    refused("step has to be a number or a name; got ''", step="")
    refused("gpu_ids has to have a number for each of 2 ranks; got [1]", gpu_ids=[1])
    refused("publish_fastdeploy has another use for this name (key 'rank0/w')", {"rank0/w": np.ones(2, np.float32)})
    no_path = LocalBackend(str(tmp_path / "out"))
    no_path.has_path = False
    refused("FastDeploy reads files by path. Remedy (FC406)", output=no_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").touch()
    refused("is not empty. Remedy (FC405)")


def test_ranks_that_ask_for_different_things(values, tmp_path):
    def job(comm):
        fc.publish_fastdeploy(dict(values), tmp_path / "out", comm.rank, 2, {"m.up": comm.rank}, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(each, ValidationError) and "step" in str(each) and "axes" in str(each) for each in outcomes)


@pytest.mark.parametrize("fault", ["write", "digest", "version.yaml"])
def test_a_failure_leaves_nothing(values, tmp_path, monkeypatch, fault):
    def fail(*_):
        raise OSError("broken")

    if fault == "write":
        monkeypatch.setattr(OutputParts, "make_durable", fail)
    elif fault == "digest":
        monkeypatch.setattr("paddle_flexckpt.loading.fastdeploy_snapshots.file_digest", fail)
    else:
        create = LocalBackend.create
        monkeypatch.setattr(
            LocalBackend,
            "create",
            lambda self, name, *rest, **more: (fail if "yaml" in name else create)(self, name, *rest, **more),
        )

    def job(comm):
        fc.publish_fastdeploy(cut(values, comm.rank, 2), tmp_path / "out", 1, 2, {}, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(each, CheckpointError) and "broken" in str(each) for each in outcomes)
    assert not (tmp_path / "out").exists()


def test_publish_reads_the_same_whole(values, tmp_path):
    """The slices are of what ``publish`` writes with the same statements."""

    def job(comm):
        state = cut(values, comm.rank, 2)
        publish(state, tmp_path / "whole", comm, aoa_config=STATEMENTS)
        fc.publish_fastdeploy(state, tmp_path / "out", 1, 2, {"e.down": 1}, comm, aoa_config=STATEMENTS)

    SimulatedWorld(2).run(job)
    whole = {}
    for name in os.listdir(tmp_path / "whole"):
        if name.endswith(".safetensors"):
            whole.update(load_file(tmp_path / "whole" / name))
    for rank in (0, 1):
        expected = {**whole, "e.down": whole["e.down"][:, 4 * rank : 4 * rank + 4]}
        assert equal(snapshot(tmp_path / "out", rank), expected)
