"""Checkpoints of DeepSpeed: what it has written with ZeRO 1 to 3 and what it has converted; lies and code refused.

``data/deepspeed`` is of DeepSpeed 0.19.8 with torch 2.13.0 on two ranks; each ``.npz`` beside a directory has what
DeepSpeed's own converters make of it. With ``FLEXCKPT_TORCH_PYTHON`` (and deepspeed) it is written anew.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, UnsafePickleError, ValidationError
from paddle_flexckpt.foreign.deepspeed_file import DEEPSPEED, Fragment
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.attacks.opcodes import call, named, named_by_line, program, short
from tests.foreign import make_deepspeed
from tests.foreign.layouts import load_into_three_layouts

DATA = Path(__file__).parent / "data" / "deepspeed"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
STATES = {"": "w_0", ".exp_avg": "moment1_0", ".exp_avg_sq": "moment2_0"}


def check(path, npz):
    """Every byte in three layouts, and the weights by themselves."""
    said = dict(np.load(npz))
    names = [name for name in said if f"{name}.exp_avg" in said]
    expected = {f"{name}.{suffix}": said[name + state] for name in names for state, suffix in STATES.items()}
    expected |= {name: said[name] for name in said if name not in names and not name.endswith((".exp_avg", "_sq"))}
    assert detect_format(path) == "deepspeed"
    with TensorReader(path) as reader:
        assert set(reader.infos) == {*expected, *names}
        for name in names:
            weight = reader.read(name)
            assert weight.shape == said[name].shape
            # A copy in bfloat16 where the ranks have whole weights, the fp32 ones elsewhere.
            assert weight.tobytes() == said[name].astype(weight.dtype).tobytes()
            if weight.dtype == np.float32:
                expected[name] = said[name]
    assert load_into_three_layouts(path, expected) <= 1.05


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_has_written(stage):
    check(DATA / f"stage{stage}", DATA / f"stage{stage}.npz")
    assert not {"torch", "deepspeed"} & set(sys.modules)


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints(stage):
    check(DATA / f"universal{stage}", DATA / f"stage{stage}.npz")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_writes_now(tmp_path, stage):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python or subprocess.run([python, "-c", "import deepspeed"], capture_output=True).returncode:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with deepspeed")
    command = [python, make_deepspeed.__file__, str(tmp_path / "new"), str(stage)]
    # The first one in an environment compiles an extension of DeepSpeed's, which takes minutes on a busy machine.
    subprocess.run(command, check=True, timeout=900, capture_output=True)
    check(tmp_path / "new" / "global_step3", tmp_path / "new" / "expected.npz")
    check(tmp_path / "new" / "universal" / "global_step3_universal", tmp_path / "new" / "expected.npz")
    (tmp_path / "new" / "expected.npz").unlink()
    text = why(tmp_path / "new", ValidationError)
    assert "latest of DeepSpeed, and global_step3, universal. Remedy (FC301): give the path of one of them" in text


def test_the_directory_above(tmp_path):
    (tmp_path / "latest").write_text("global_step3")
    (tmp_path / "zero_to_fp32.py").write_text("")
    write(tmp_path / "global_step3")
    text = why(tmp_path, ValidationError)
    assert "latest of DeepSpeed, and global_step3. Remedy (FC301): give the path of one of them" in text


def why(path, kind=CorruptCheckpointError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


def write(path, stage=1):
    return shutil.copytree(DATA / f"stage{stage}", path, dirs_exist_ok=True)


def test_cut_short_or_missing(tmp_path):
    for stage in (1, 3):
        path = write(tmp_path / str(stage), stage)
        for file in sorted(path.iterdir()):
            data = file.read_bytes()
            if stage == 3 and file.name.startswith("zero_pp_rank_1"):
                continue  # it has nothing but what the other model's file has
            for length in range(0, len(data), 301):
                file.write_bytes(data[:length])
                assert file.name in why(path)
            file.write_bytes(data)
        (path / OPTIMIZER.format(1)).unlink()
        assert "2 ranks have saved their parts (partition_count), and there are" in why(path)
        write(path, stage)
    (tmp_path / "1" / "mp_rank_00_model_states.pt").unlink()
    assert "lacks mp_rank_00_model_states.pt" in why(tmp_path / "1")


def test_what_does_not_tell_how_parts_belong_together(tmp_path):
    path = write(tmp_path)
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_00_001_optim_states.pt"):
        shutil.copy(path / "mp_rank_00_model_states.pt", path / name)
        text = why(path, ValidationError)
        assert f"{name} is of a model that is cut among ranks" in text
        assert "ds_to_universal" in text
        (path / name).unlink()


def test_weights_alone(tmp_path):
    """Without ZeRO, or where only the model's file was kept."""
    shutil.copy(DATA / "stage1" / "mp_rank_00_model_states.pt", tmp_path)
    with TensorReader(tmp_path) as reader:
        assert sorted(reader.infos) == ["0.bias", "0.weight", "1.bias", "1.scale", "1.weight", "2.weight"]


def test_a_universal_checkpoint_without_a_weight(tmp_path):
    path = shutil.copytree(DATA / "universal1", tmp_path / "u")
    (path / "zero" / "0.weight" / "fp32.pt").unlink()
    assert "lacks fp32.pt of 0.weight" in why(path)


def change(path, old, new, count=1):
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, count))


def test_slices_that_lie(tmp_path):
    path = write(tmp_path)
    file = path / OPTIMIZER.format(0)
    # The first slice of 0.weight: 42 elements from 0.
    change(file, b"K\x2a", b"K\x29")
    assert "key '0.weight" in why(path)
    change(file, b"K\x29", b"K\xff")
    assert "255 elements of '0.weight.w_0' from 0, in a buffer of 46 from 0" in why(path)
    for stage, old, new in ((3, b"K\x07K\x06", b"K\x07K\x08"), (1, b"K\x07K\x06", b"K\x07K\x08")):
        path = write(tmp_path / f"shapes{stage}", stage)
        for model in path.glob("*model_states.pt"):
            data = model.read_bytes()
            begin = data.index(b"param_shapes")
            model.write_bytes(data[:begin] + data[begin:].replace(old, new, 1))
        assert "key '0.weight" in why(path) if stage == 1 else "elements a rank in buffers of" in why(path)


def test_random_damage_is_an_error_or_makes_no_difference(tmp_path):
    """Nothing but this library's errors comes out."""
    source = random.Random(5)
    refused = 0
    for stage in (1, 3):
        path = write(tmp_path / str(stage), stage)
        for file in sorted(path.iterdir()):
            data = file.read_bytes()
            for _ in range(60):
                changed = bytearray(data)
                for _ in range(source.choice((1, 3))):
                    changed[source.randrange(len(data))] = source.randrange(256)
                file.write_bytes(bytes(changed))
                try:
                    SourceDirectory(path).read_manifest()
                except CheckpointError:
                    refused += 1
            file.write_bytes(data)
    assert refused > 50


def test_a_checkpoint_with_code_in_it_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "c")
    for attack in (
        call(named("os", "system"), "touch canary"),
        named_by_line("posix", "system") + b"X\x05\0\0\0touch\x85R",
    ):
        for name in (OPTIMIZER.format(0), "mp_rank_00_model_states.pt"):
            with zipfile.ZipFile(path / name, "w") as archive:
                archive.writestr("a/data.pkl", program(attack))
            assert "system'" in why(path, UnsafePickleError)
            write(path)
    assert not (tmp_path / "canary").exists()


def test_the_names_of_deepspeed_and_no_others():
    fragment = named("deepspeed.utils.tensor_fragment", "fragment_address") + b")\x81}("
    fragment += short("numel") + b"K\x07" + short("start") + b"K\x02ub"
    assert load_pickle(program(b"]" + fragment + b"a"), "f", DEEPSPEED) == [Fragment(7, 2)]
    ordered = named_by_line("collections", "OrderedDict") + b")R"
    assert load_pickle(program(ordered + short("a") + b"K\x01s}" + short("_metadata") + b"}sb"), "f", DEEPSPEED) == {
        "a": 1
    }
    scaler = named("deepspeed.runtime.fp16.loss_scaler", "LossScaler") + b")\x81}" + short("anything") + b"K\x01sb"
    assert load_pickle(program(scaler), "f", DEEPSPEED) is None
    for module, name in (
        ("os", "system"),
        ("torch", "load"),
        ("builtins", "eval"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("deepspeed.runtime.fp16.loss_scaler", "os"),
        ("argparse", "Namespace"),
    ):
        with pytest.raises(UnsafePickleError, match="is not among those of plain data"):
            load_pickle(program(call(named(module, name), "a")), "f", DEEPSPEED)
    # Arguments in arguments, without end.
    with pytest.raises(UnsafePickleError):
        load_pickle(program(named("torch", "Tensor") + b"\x85" * 1000), "f", DEEPSPEED)
    rebuild = named_by_line("torch._tensor", "_rebuild_from_type_v2")
    for arguments in (b")", b"(NNNNt", b"(" + named("torch", "Tensor") * 2 + b")}t"):
        with pytest.raises(UnsafePickleError):
            load_pickle(program(rebuild + arguments + b"R"), "f", DEEPSPEED)
