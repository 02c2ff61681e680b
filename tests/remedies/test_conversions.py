"""Remedies of conversions, exports and described layouts, each provoked and followed."""

from __future__ import annotations

import functools
import json

import ml_dtypes  # noqa: F401 - float8_e5m2
import numpy as np
import pytest
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.paddle_files import PARAMETER_NAMES
from paddle_flexckpt.planning.job_layout import Model, ModelTensor
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.meshes import parse_placements
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools import conversion_content, conversion_targets, tensor_files
from paddle_flexckpt.tools.config_models import read_config_model
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.export import export_safetensors
from tests.remedies.following import Advice, advised, provoked

A = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def source(tmp_path):
    fc.save_state_dict({"a": A, "b": A[0].copy()}, tmp_path / "source")
    return tmp_path / "source"


def values(path, **options) -> dict[str, list]:
    return {key: tensor.numpy().tolist() for key, tensor in fc.load_merged_state_dict(path, **options).items()}


def test_whole_tensors_have_no_strategy(source, tmp_path):
    with provoked("tools/conversion.py", "leave it out, or write "):
        convert_checkpoint(source, tmp_path / "x", format="huggingface", strategy="tp=2", cuts=[("a", 0)])
    convert_checkpoint(source, tmp_path / "left out", format="huggingface")
    convert_checkpoint(source, tmp_path / "native", format="native", strategy="tp=2", cuts=[("a", 0)])
    assert values(tmp_path / "left out") == values(tmp_path / "native") == values(source)


def test_whole_tensors_have_no_replicas(source, tmp_path):
    with provoked("tools/conversion.py", "leave it out"):
        convert_checkpoint(source, tmp_path / "x", format="paddle", save_replicas=True)
    convert_checkpoint(source, tmp_path / "out", format="paddle")
    assert values(tmp_path / "out") == values(source)


def test_a_configuration_is_corrected_or_another_is_given(source, tmp_path):
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_text('{"model_type":')
    good.write_text('{"model_type": "llama"}')
    with provoked("tools/conversion_content.py", "correct it, or give another (config)"):
        convert_checkpoint(source, tmp_path / "x", format="huggingface", config=bad)
    convert_checkpoint(source, tmp_path / "out", format="huggingface", config=good)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    bad.write_text('{"model_type": "qwen2"}')
    convert_checkpoint(source, tmp_path / "corrected", format="huggingface", config=bad)
    assert values(tmp_path / "corrected") == values(source)


def stopped(source, out, monkeypatch, **options) -> None:
    """A conversion that ends before its first file is complete."""

    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("paddle_flexckpt.tools.conversion._Conversion._write", fail)
        convert_checkpoint(source, out, **options)


def test_a_begun_conversion_is_repeated_or_begun_anew_or_goes_elsewhere(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(source, out, monkeypatch)
    with provoked("tools/conversion_notes.py", "repeat the command that began it; or begin anew with --restart"):
        convert_checkpoint(source, out, max_file_bytes=50)
    convert_checkpoint(source, tmp_path / "elsewhere")
    convert_checkpoint(source, out)
    again = tmp_path / "again"
    stopped(source, again, monkeypatch, max_file_bytes=50)
    convert_checkpoint(source, again, restart=True)
    for each in (tmp_path / "elsewhere", out, again):
        assert values(each) == values(source)


def test_a_destination_that_is_not_empty(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with provoked("foreign/formats.py", "or empty it"):
        convert_checkpoint(source, out)
    assert (out / "notes.txt").read_text() == "mine"
    convert_checkpoint(source, tmp_path / "other")
    (out / "notes.txt").unlink()
    convert_checkpoint(source, out)
    assert values(out) == values(tmp_path / "other") == values(source)


def test_an_export_goes_to_an_empty_place(source, tmp_path):
    out = tmp_path / "out"
    export_safetensors(source, out)
    with provoked("foreign/formats.py", "give another"):
        export_safetensors(source, out)
    export_safetensors(source, tmp_path / "other")
    assert values(out) == values(tmp_path / "other") == values(source)


def test_states_alone_are_exported_if_asked_for(tmp_path):
    fc.save_state_dict({"a.moment1_0": A, "b": A}, tmp_path / "source")
    with provoked("tools/tensor_files.py", "give states=True"):
        export_safetensors(tmp_path / "source", tmp_path / "x", prefix="a")
    export_safetensors(tmp_path / "source", tmp_path / "out", prefix="a", states=True)
    assert values(tmp_path / "out") == {"moment1_0": A.tolist()}


def test_a_header_fits_into_smaller_files(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", 100)
    with provoked("tools/tensor_files.py", "a smaller max_file_bytes"):
        export_safetensors(source, tmp_path / "x")
    export_safetensors(source, tmp_path / "out", max_file_bytes=90)
    assert values(tmp_path / "out") == values(source)


def test_a_dtype_that_the_files_do_not_know(tmp_path):
    fc.save_state_dict({"a": A, "pair": A.astype("complex128")}, tmp_path / "source")
    with provoked("tools/tensor_files.py", "cast it, or leave it out, with an AOA statement"):
        export_safetensors(tmp_path / "source", tmp_path / "x")
    export_safetensors(tmp_path / "source", tmp_path / "left out", {"aoa_statements": ["pair -> _"]})
    assert set(load_file(tmp_path / "left out" / "model.safetensors")) == {"a"}
    cast = {"aoa_statements": ['pair -> pair, dtype="complex64"']}
    export_safetensors(tmp_path / "source", tmp_path / "cast", cast)
    assert load_file(tmp_path / "cast" / "model.safetensors")["pair"].dtype == "complex64"


def test_what_paddle_has_no_place_for(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    fc.save_state_dict({"a": A, "small": A.astype("float8_e5m2")}, source)
    with provoked("tools/tensor_files.py", "cast it, or leave it out, with an AOA statement"):
        convert_checkpoint(source, out, format="paddle")
    for number, text in enumerate(('small -> small, dtype="float32"', "small -> _")):
        convert_checkpoint(source, out / str(number), {"aoa_statements": [text]}, format="paddle")
        assert values(out / str(number))["a"] == A.tolist()
    fc.save_state_dict({"a": A, PARAMETER_NAMES: A}, source)
    with provoked("tools/conversion_targets.py", "rename it with an AOA statement"):
        convert_checkpoint(source, out, format="paddle")
    renamed = {"aoa_statements": [f'"{PARAMETER_NAMES}" -> names']}
    convert_checkpoint(source, out / "renamed", renamed, format="paddle")
    assert values(out / "renamed")["names"] == A.tolist()


def test_statements_or_a_family(source, tmp_path, capsys):
    aoa = tmp_path / "aoa.json"
    aoa.write_text('{"aoa_statements": ["a^T -> a"]}')
    command = ["convert", str(source), str(tmp_path / "out")]
    assert main([*command, "--model", "llama", "--aoa", str(aoa)]) == 1
    advised("cli/convert.py", "give one; `flexckpt rules` prints the statements of a family", capsys.readouterr().err)
    assert main([*command, "--model", "llama"]) == 1
    advised("cli/convert.py", "leave --model out, or give --aoa", capsys.readouterr().err)
    assert main([*command, "--aoa", str(aoa)]) == 0
    assert values(tmp_path / "out")["a"] == A.T.tolist()
    assert main(["convert", str(source), str(tmp_path / "plain")]) == 0
    assert values(tmp_path / "plain") == values(source)


def test_how_tensor_parallelism_cuts_a_model_is_said(source, tmp_path, capsys):
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "tp=2"]
    assert main(command) == 1
    advised(
        "tools/models.py", "give axes by names, --cut '*.q_proj.weight=1' or cuts= in Python", capsys.readouterr().err
    )
    assert main([*command, "--cut", "a=0"]) == 0
    convert_checkpoint(source, tmp_path / "python", strategy="tp=2", cuts=[("a", 0)])
    assert values(tmp_path / "out") == values(tmp_path / "python") == values(source)


def test_a_model_of_another_family_is_described_by_a_checkpoint(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "t5"}')
    with provoked("tools/config_models.py", "give a checkpoint"):
        read_config_model(path)
    fc.save_state_dict({"a": A}, tmp_path / "checkpoint")
    assert main(["rehearse", str(tmp_path / "checkpoint"), "--to", "dp=2"]) == 0


def test_muon_has_no_tensor_parallelism():
    with provoked("planning/strategy.py", "leave tp out"):
        parse_strategy("sharding=muon:2,tp=2")
    assert parse_strategy("sharding=muon:2").kind == "muon"


def layout(strategy: str, *tensors: ModelTensor, **more) -> Layout:
    return Layout(Model(tensors, **more), parse_strategy(strategy))


EXPERT = ModelTensor("w", (4,), expert=(0, 4))


def test_experts_that_share_an_optimizer():
    with provoked("planning/layouts.py", "with experts' parameters of a color of their own; or "):
        layout("sharding=v1:2,ep=2", EXPERT)
    with provoked("planning/layouts.py", "spread experts over dp alone, ep=dp:DEGREE, or leave the sharding out"):
        layout("dp=2,sharding=v2:3,ep=2", EXPERT)
    for strategy in ("sharding=v2:2,ep=2", "dp=2,sharding=v2:3,ep=dp:2", "dp=2,ep=2"):
        assert layout(strategy, EXPERT).strategy.ep == 2


def test_the_matrices_of_muon_are_those_of_a_checkpoint_of_its_own():
    with provoked(
        "planning/layouts.py", "take the model of a checkpoint that Muon has trained (--model), or sharding=v2"
    ):
        layout("sharding=muon:2", ModelTensor("w", (4, 4)))
    assert layout("sharding=muon:2", ModelTensor("w", (4, 4), lacks=("moment2_0",)))
    assert layout("sharding=v2:2", ModelTensor("w", (4, 4)))


def test_a_partial_is_resharded_first():
    with provoked("planning/meshes.py", "give the placements after its reshard"):
        parse_placements("w", "R,P")
    assert len(parse_placements("w", "R,S1")) == 2


def test_a_header_for_too_many_tensors_of_a_rank(tmp_path, monkeypatch):
    state = {f"layers.{number}.w": np.full((4, 4), number, np.float32) for number in range(8)}
    fc.save_state_dict(state, tmp_path / "source")
    monkeypatch.setattr(conversion_targets, "MAX_HEADER_BYTES", 900)
    for module in (conversion_targets, conversion_content):
        monkeypatch.setattr(module, "MOST_TENSORS", 3)
    convert = functools.partial(convert_checkpoint, tmp_path / "source", format="native")
    words = Advice(
        "tools/conversion_targets.py", "a strategy with more stages or replicas, or whole tensors (without --to)"
    )
    with provoked(*words):
        convert(tmp_path / "x", strategy="tp=2", cuts=[("*", 0)])
    convert(tmp_path / "stages", strategy="tp=2,pp=4", cuts=[("*", 0)])
    convert(tmp_path / "replicas", strategy="tp=2,dp=4", cuts=[("*", 0)])
    convert(tmp_path / "whole")
    for each in ("stages", "replicas", "whole"):
        assert fc.digest(tmp_path / each) == fc.digest(state)


def test_a_fused_parameter_that_paddle_would_take_for_another(tmp_path):
    def save(comm):
        part = np.concatenate([gate[:, 3 * comm.rank :][:, :3], up[:, 3 * comm.rank :][:, :3]], axis=1)
        mark = fc.FusedAxis(1, "fused_ffn")
        shard = fc.ShardedWeight("w", part, (4, 6), (4, 12), (0, 6 * comm.rank), fused=mark)
        fc.save_state_dict({"w": shard}, tmp_path / "source", comm)

    gate, up = np.split(np.arange(48, dtype=np.float32).reshape(4, 12), 2, axis=1)
    SimulatedWorld(2).run(save)
    convert = functools.partial(convert_checkpoint, tmp_path / "source", format="paddle")
    words = Advice(
        "tools/conversion_targets.py", "convert to whole tensors or for tp=1, or split it with an AOA statement"
    )
    with provoked(*words):
        convert(tmp_path / "x", strategy="tp=2", cuts=[("w", 1)])
    convert(tmp_path / "whole")
    convert(tmp_path / "one", strategy="tp=1")
    whole = {"w": np.concatenate([gate, up], axis=1).tolist()}
    assert values(tmp_path / "whole") == values(tmp_path / "one") == whole
    options = {"strategy": "tp=2", "cuts": [("g", 1), ("u", 1)], "aoa_config": ["w -> g, u, fused_ffn"]}
    convert(tmp_path / "split", **options)
    assert values(tmp_path / "split") == {"g": gate.tolist(), "u": up.tolist()}
