"""flexckpt convert, by the installed script: what it writes, how it goes on, what it refuses, what memory it takes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.cli.llama import CONFIG, HIDDEN, INNER, llama
from tests.crash.harness import read_tree
from tests.ramdisk import memory_directory
from tests.transfer.samples import save, values_of

SCRIPT = shutil.which("flexckpt", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def flexckpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    if SCRIPT is None:
        pytest.skip("flexckpt is not installed")
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def converted(*arguments: object) -> dict:
    done = flexckpt("convert", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(*arguments: object) -> str:
    done = flexckpt("convert", *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def hf(tmp_path):
    path = tmp_path / "hf"
    path.mkdir()
    save_file(llama(), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("variant", ["plain", "fused"])
def test_from_hugging_face_and_back_with_heads_of_the_configuration(hf, tmp_path, variant):
    """Through TP2 x PP2: the values of every tensor come back, and from files of our own making the very bytes."""
    more = ("--to", "tp=2,pp=2", "--cut", "*.weight=0")
    report = converted(hf, tmp_path / "native", "--model", "auto", "--variant", variant, *more)
    assert (report["origin"], report["format"], report["keys"]) == (
        "huggingface",
        "native",
        len(SourceDirectory(tmp_path / "native").read_manifest().catalog.keys),
    )
    with TensorReader(tmp_path / "native") as reader:
        names = {"plain": "model.layers.0.mlp.down_proj.weight", "fused": "model.layers.0.mlp.down_proj.weight"}
        assert reader.infos[names[variant]].shape == (INNER, HIDDEN)
        assert any("qkv" in key for key in reader.infos) == (variant == "fused")
    assert len([*(tmp_path / "native").glob("*.safetensors")]) == 4
    back = tmp_path / "back"
    converted(tmp_path / "native", back, "--format", "huggingface", "--model", "llama", "--variant", variant)
    assert json.loads((back / "config.json").read_text()) == CONFIG
    found, expected = load_file(back / "model.safetensors"), llama()
    assert found.keys() == expected.keys()
    assert all(found[key].tobytes() == value.tobytes() for key, value in expected.items())
    names = ("--model", "llama", "--variant", variant)
    assert main(["convert", str(back), str(tmp_path / "parts"), *names, *more]) == 0
    assert main(["convert", str(tmp_path / "parts"), str(tmp_path / "again"), "--format", "huggingface", *names]) == 0
    assert read_tree(tmp_path / "again") == read_tree(back)


def test_statements_types_and_a_file_as_source(tmp_path):
    state = {"fc.weight": np.arange(24, dtype=np.float32).reshape(4, 6), "fc.bias": np.ones(6, np.float32)}
    (tmp_path / "model.pdparams").write_bytes(pickle.dumps(state, 4))
    out = tmp_path / "out"
    statements = json.dumps({"aoa_statements": ["fc.weight^T -> linear.weight"]})
    done = flexckpt(
        "convert",
        tmp_path / "model.pdparams",
        out,
        "--format",
        "huggingface",
        "--aoa",
        statements,
        "--dtype",
        "float16",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"converted 2 tensors of {tmp_path}/model.pdparams (id 0, paddle_pickle) to huggingface: 1 file"
    )
    found = load_file(out / "model.safetensors")
    assert found["linear.weight"].tobytes() == np.ascontiguousarray(state["fc.weight"].T.astype(np.float16)).tobytes()
    assert found["fc.bias"].dtype == np.float16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama", "--aoa", "{}"), "both say what becomes of the tensors"),
        (("--set", "prefix=x."), "give --model too"),
        (("--model", "auto", "--format", "huggingface"), "both sides are Hugging Face's"),
        (("--model", "bert"), "no model rules 'bert'"),
        (("--model", "auto", "--config", "/nowhere.json"), "cannot be read as a model's configuration"),
        (("--cut", "x"), "--cut takes GLOB=AXIS"),
        (("--memory", "1MiB"), "at least 128.0 MiB"),
    ],
)
def test_what_is_refused(hf, tmp_path, arguments, words):
    assert words in refused(hf, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_strategy_that_cannot_be_read_is_wrong_usage(hf, tmp_path):
    done = flexckpt("convert", hf, tmp_path / "out", "--to", "tp=2,format=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown entry (key 'format=3')" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_configuration_may_stand_for_the_family(hf, tmp_path):
    config = (hf / "config.json").rename(tmp_path / "config.json")
    converted(hf, tmp_path / "a", "--model", config)
    converted(hf, tmp_path / "b", "--model", "llama", "--config", config)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = refused(hf, tmp_path / "c", "--model", config, "--config", config)
    assert "--model and --config both give a config.json. Remedy (FC101): give one" in text


def test_a_model_without_a_configuration_is_refused(hf, tmp_path):
    (hf / "config.json").unlink()
    text = refused(hf, tmp_path / "out", "--model", "llama")
    lacking = f"there is no config.json in {hf}, which says how many heads the model has"
    assert f"{lacking}. Remedy (FC101): give its path by --config" in text
    assert flexckpt("convert", hf, tmp_path / "out", "--format", "gguf").returncode == 2


def test_a_killed_process_goes_on_and_ends_equal(tmp_path):
    """By the kernel: whenever the signal comes, the same command ends with the same bytes."""
    values = values_of({f"w{i:02d}": ("float32", (64, 64)) for i in range(48)})
    save(tmp_path / "in", values, world=1)
    options = ("--format", "huggingface", "--max-file-bytes", "16KiB")
    converted(tmp_path / "in", tmp_path / "whole", *options)
    out, kept = tmp_path / "out", 0
    for _ in range(3):
        if SCRIPT is None:
            pytest.skip("flexckpt is not installed")
        before = len(list(out.glob(".convert-*/*.done")))
        with subprocess.Popen(
            [SCRIPT, "convert", str(tmp_path / "in"), str(out), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if len(list(out.glob(".convert-*/*.done"))) > before + 3:
                    break
            process.send_signal(signal.SIGKILL)
        kept = len(list(out.glob(".convert-*/*.done")))
        if not kept:
            break  # it was faster than this test could look
        assert not (out / "model.safetensors.index.json").exists() or kept == 48
    if kept:
        report = converted(tmp_path / "in", out, *options)
        assert len(report["kept_files"]) == kept
    assert read_tree(str(out)) == read_tree(str(tmp_path / "whole"))


MEASURED = """
import sys
from paddle_flexckpt.cli.main import build_parser, main
import paddle_flexckpt.cli.convert

def memory(name):
    with open("/proc/self/status") as status:
        return int(status.read().split(f"{name}:")[1].split()[0]) << 10

begin = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
code = main(["convert", *sys.argv[1:]])
print(memory("VmHWM") - begin)
sys.exit(code)
"""


def extra_memory(*arguments: object) -> int:
    """The most memory that a conversion takes beyond what the process has when it begins."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of float32 zeros, with the last element of each tensor 1, which takes no room on disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.mkdir()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            file.seek(8 + len(text) + entry["data_offsets"][1] - 4)
            file.write(np.float32(1).tobytes())


WAYS = [
    (),
    ("--to", "tp=2", "--cut", "*=0"),
    ("--format", "huggingface", "--dtype", "bfloat16"),
    ("--format", "paddle", "--to", "tp=2", "--cut", "*=0"),
    ("--format", "torch_dcp", "--to", "tp=2", "--cut", "*=0"),
]


@pytest.mark.parametrize(
    "options", [*WAYS[1:3], *(pytest.param(each, marks=pytest.mark.slow) for each in (WAYS[0], *WAYS[3:]))]
)
def test_memory_is_bounded(options):
    """384 MiB, 256 of them one tensor, within 128."""
    with memory_directory(1 << 30) as root:
        sparse(root / "in", {"large": (4096, 16384), **{f"w{i}": (1024, 2048) for i in range(16)}})
        extra = extra_memory(root / "in", root / "out", "--memory", "128MiB", *options)
        assert 8 << 20 < extra <= 128 << 20
        with TensorReader(root / "out") as reader:
            for name in ("large", "w3"):
                row = reader.read(name, -1).astype(np.float32)
                assert (row[-1], np.count_nonzero(row)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_two_gibibytes_take_at_most_256_mebibytes(tmp_path, options):
    sparse(tmp_path / "in", {"large": (1 << 14, 1 << 14), **{f"w{i}": (2048, 4096) for i in range(32)}})
    assert (tmp_path / "in" / "model.safetensors").stat().st_size >= 2 << 30
    assert extra_memory(tmp_path / "in", tmp_path / "out", *options) <= 256 << 20
    if "--dtype" not in options:
        assert diff(tmp_path / "in", tmp_path / "out").equal


def test_the_summary_is_one_line(hf, tmp_path, capsys):
    assert main(["convert", str(hf), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
