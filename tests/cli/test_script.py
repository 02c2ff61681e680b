"""The installed script ``flexckpt``: each of its commands, its exit statuses, and the commands that documents print."""

from __future__ import annotations

import array
import fcntl
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_flexckpt.cli import doctor
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.patching import read_patches
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.cli.llama import CONFIG, llama
from tests.cli.test_completion import commands
from tests.cli.test_convert import SCRIPT, flexckpt
from tests.documents import json_block, shell_block
from tests.foreign import test_paddle_pickles
from tests.native.samples import flip
from tests.transfer.samples import save

PATIENCE_SECONDS = 120.0
STATE = {
    "w": np.arange(64, dtype=np.float32).reshape(8, 8),
    "layers.0.up.weight": np.ones((4, 8), np.float32),
    "layers.1.up.weight": np.ones((4, 8), np.float32),
    "embed_tokens.weight": np.ones((8, 8), np.float32),
}
AOA = json.dumps({"aoa_statements": ["w^T -> v"]})
#: Command lines of the commands that the README has none of.
OTHERS = {
    "explain": f"flexckpt explain checkpoint --aoa '{AOA}' --key v",
    "expand": f"flexckpt expand checkpoint --aoa '{AOA}'",
    "invert": f"flexckpt invert --aoa '{AOA}'",
    "rules": "flexckpt rules llama --variant plain --direction to_hf",
    "patch": "flexckpt patch --list",
    "receive": "flexckpt receive --help",
    "apply": "flexckpt apply --help",
}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """What the documents name, and the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("checkpoint", "run"):
        save(tmp_path / name, STATE, world=2, step=7)
    save(tmp_path / "other", {**STATE, "w": STATE["w"] + 1}, world=2)
    test_paddle_pickles.write(tmp_path)
    (tmp_path / "directory").mkdir()
    return tmp_path


def lines_of(block: str) -> list[str]:
    """The commands of a block, without the comments behind them."""
    return [re.sub(r"\s+# .*", "", line) for line in block.splitlines()]


def command_of(line: str) -> str:
    return line.split()[1]


def printed(capsys, line: str, code: int = 0) -> str:
    """What a line of a shell prints: commands, one of which may read what the other has written, or go to a file."""
    line, _, file = line.partition(" > ")
    text = ""
    for each in line.split(" | "):
        program, *words = shlex.split(each)
        assert program == "flexckpt"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(text))
            assert main(words) == code, capsys.readouterr().err
        text = capsys.readouterr().out
    if file:
        Path(file).write_text(text)
    return text


def test_each_command_runs_by_the_script_as_the_readme_prints_it(places):
    lines = lines_of(shell_block("README.md", "flexckpt ls run"))
    assert {*map(command_of, lines), *OTHERS} == set(commands()), "a new command needs a line in the README, or here"
    assert not set(map(command_of, lines)) & set(OTHERS)
    outputs = {}
    for line in [*lines, *OTHERS.values()]:
        command = command_of(line)
        if command == "repair":
            (places / "checkpoint" / "0.manifest").unlink()
        done = flexckpt(*shlex.split(line)[1:], *(["--bytes", "1MiB"] if command == "bench" else []))
        assert done.returncode == (1 if command == "diff" else 0), f"{line}: {done.stderr}"
        assert "Traceback" not in done.stderr
        outputs[command] = done.stdout
    for command, words in {
        "ls": "7",
        "inspect": "layers.0.up.weight",
        "show": "w[0:4, :]: float32 [4, 8], from 0 to 31",
        "du": "768 B",
        "diff": "~ w: float32 [8, 8]: 64 elements differ (100.00%)",
        "map": "needed",
        "rehearse": "loads under tp=4 on 4 ranks",
        "verify": "nothing is wrong",
        "repair": "rebuilt the manifest of id 0",
        "export": "exported 4 tensors",
        "convert": "model.pdparams (id 0, paddle_pickle) to native",
        "completion": "_flexckpt",
        "doctor": "no problems",
        "explain": "[0:8, 0:8] <- w [0:8, 0:8], axes (1, 0)",
        "invert": "v^T -> w",
        "rules": "aoa_statements",
        "patch": "paddle-3.3.1",
        "receive": "FLEXCKPT_RECEIVE_SECRET",
        "apply": "ROOT",
    }.items():
        assert words in outputs[command], f"{command}: {outputs[command]}"
    assert load_file(places / "out" / "model.safetensors")["w"].tobytes() == STATE["w"].tobytes()


def by_script(code: int, *words: str) -> str:
    """Messages of the script, which ends with a status."""
    done = flexckpt(*words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done
    return done.stdout or done.stderr


def test_exit_statuses_are_those_of_the_page(places, capsys, monkeypatch):
    """Those of docs/cli.md: of 1 each reason; 2; others are tested above and below."""

    def finds(*words: str) -> str:
        assert main(words) == 1
        return capsys.readouterr().out

    save(places / "damaged", STATE, world=1)
    (data,) = (places / "damaged").glob("*.safetensors")
    flip(data, data.stat().st_size - 3)
    save(places / "larger", {**STATE, "more": STATE["w"]})
    (places / "torn").mkdir()
    shutil.copy(places / "run" / "0.manifest", places / "torn")
    name, edited = "paddle-3.3.1-aoa-fan-out", places / "site"
    for path in read_patches()[name].files:
        (edited / path).parent.mkdir(parents=True, exist_ok=True)
        (edited / path).write_text("edited")
        (edited / "paddle" / "__init__.py").touch()
    assert by_script(1, "inspect", "nowhere").startswith("flexckpt inspect: ")
    assert data.name in by_script(1, "verify", "damaged")
    text = by_script(2, "verify")
    assert text.startswith("usage: flexckpt verify") and "the following arguments are required" in text
    assert "no" in finds("ls", "torn")
    assert "the source has no such key" in finds("rehearse", "checkpoint", "--to", "tp=1", "--model", "larger")
    assert "sha256" in finds("patch", "--check", name, "--package-dir", str(edited))
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "0.1")
    assert "problem: xxhash 0.1" in finds("doctor")


def test_ctrl_c_ends_the_script_with_130(places):
    if SCRIPT is None:
        pytest.skip("flexckpt is not installed")

    def hear_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs these tests in the background may have it ignored

    with subprocess.Popen(
        [SCRIPT, "invert", "--aoa", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_signals,
    ) as process:
        process.stdin.write(b"{")
        process.stdin.flush()
        unread, until = array.array("i", [1]), time.monotonic() + PATIENCE_SECONDS
        while unread[0]:  # then it reads, and waits for more
            fcntl.ioctl(process.stdin, termios.FIONREAD, unread)
            assert process.poll() is None and time.monotonic() < until
            threading.Event().wait(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130
        assert process.stderr.read() == b"flexckpt invert: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_failure(places):
    if SCRIPT is None:
        pytest.skip("flexckpt is not installed")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([SCRIPT, "inspect", "run"], stdout=writing, stderr=subprocess.PIPE, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_guide_prints_commands_that_run(places, capsys):
    found = printed(capsys, shell_block("docs/guide.md", "flexckpt map checkpoint 'layers.0.*' --to tp=4,pp=2"))
    assert "layers.0.up.weight: float32 [4, 8]" in found and "needed" in found
    found = printed(capsys, shell_block("docs/guide.md", "rehearse checkpoint --to tp=4,pp=2"))
    assert "loads under tp=4,pp=2,sharding=v2:8" in found and "; direct: " in found


def test_pages_are_written_by_the_commands_of_their_page(places, capsys):
    pytest.importorskip("matplotlib")
    for line in lines_of(shell_block("docs/pages.md", "--html map.html")):
        printed(capsys, line, code=1 if command_of(line) == "diff" else 0)
    for name in ("map.html", "rehearsal.html", "diff.html"):
        assert "</html>" in (places / name).read_text(encoding="utf-8")
    assert (places / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Function that writes a Llama of this library's format to a directory, under names with a prefix."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    save_file(llama(), source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(CONFIG))

    def write(path: str, prefix: str = "model.") -> dict[str, np.ndarray]:
        statements = []
        for name, value in llama().items():
            turned = "^T" if value.ndim == 2 and "embed" not in name else ""
            statements.append(f"{name}{turned} -> {name.replace('model.', prefix, 1)}")
        convert_checkpoint(source, path, {"aoa_statements": statements})
        return llama()

    return write


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def test_meshes_of_semi_automatic_parallelism_are_rehearsed(model, tmp_path, capsys):
    model("whole")
    cuts = [("*norm.weight", None), ("*.weight", 1)]
    convert_checkpoint("whole", "checkpoint", strategy="tp=2", cuts=cuts)
    (tmp_path / "mesh.json").write_text(json_block("docs/rehearsal.md", '"dim_names"'))
    first, second = lines_of(shell_block("docs/rehearsal.md", "--to 'mesh=2x4:dp,mp"))
    found = printed(capsys, first)
    assert "on 8 ranks: 35.0 KiB needed" in found
    assert printed(capsys, second).splitlines()[:-1] == found.splitlines()[:-1]


@pytest.mark.parametrize("page", ["guide", "aoa"])
def test_rules_go_through_a_pipe_into_an_export(model, tmp_path, capsys, page):
    expected = model("checkpoint")
    line = {
        "guide": shell_block("docs/guide.md", "flexckpt rules llama"),
        "aoa": shell_block("docs/aoa.md", "flexckpt rules llama"),
    }[page]
    printed(capsys, line)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_what_the_paddlenlp_example_does_without_paddlenlp(model, tmp_path, capsys):
    expected = model("run/checkpoint-20/flex_checkpoint", "llama.")
    model("run/checkpoint-40/flex_checkpoint", "llama.")
    text = printed(capsys, shell_block("examples/paddlenlp/README.md", "flexckpt inspect"))
    assert re.search(r"^llama\.embed_tokens\.weight +float32 ", text, re.M)
    for line in lines_of(shell_block("examples/paddlenlp/README.md", "flexckpt rules llama")):
        printed(capsys, line)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), expected)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_is_installed_as_the_page_says(places):
    """Its line for zsh too where there is a zsh."""
    if SCRIPT is None:
        pytest.skip("flexckpt is not installed")
    (places / ".config/fish/completions").mkdir(parents=True)
    env = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(SCRIPT), os.environ["PATH"]])}
    for line in lines_of(shell_block("docs/cli.md", "flexckpt completion bash")):
        shell = "zsh" if "zsh" in line else "bash"
        if shutil.which(shell):
            done = subprocess.run([shell, "-c", f"set -e; {line}"], env=env, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
    assert "complete -c flexckpt" in (places / ".config/fish/completions/flexckpt.fish").read_text()


def test_patches_come_and_go_by_the_commands_of_their_page(tmp_path, monkeypatch, capsys):
    """In a copy of what they change; the installed package is not touched."""
    pytest.importorskip("paddle")
    from tests.patching.overlay import make_overlay, patches_for_installed

    lines = lines_of(shell_block("patches/README.md", "flexckpt patch --list"))
    named = {word for line in lines for word in line.split() if word in read_patches()}
    there = [patch for patch in patches_for_installed(read_patches().values()) if patch.name in named]
    if {patch.name for patch in there} != named:
        pytest.skip("another release of Paddle is installed")
    root = make_overlay(there, tmp_path / "site")
    before = {path: (root / path).read_bytes() for patch in there for path in patch.files}
    for line in lines:
        printed(capsys, line if "--list" in line else f"{line} --package-dir {root}")
    after = {path for path, content in before.items() if (root / path).read_bytes() != content}
    assert after == {*read_patches()["paddle-3.3.1-saving-again"].files}
