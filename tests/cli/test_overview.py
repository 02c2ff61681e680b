"""``flexckpt ls``, ``du`` and ``doctor``: what they print, their JSON and their exit statuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.cli import doctor, overview
from paddle_flexckpt.cli import main as cli
from paddle_flexckpt.cli.main import build_parser, main
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.tools.step_record import RECORD, StepRecord
from tests.patching.samples import install, write_patches
from tests.transfer.samples import save

VALUES = {
    "layers.0.w": np.ones((4, 8), np.float32),
    "layers.0.w.w_0": np.ones((4, 8), np.float32),
    "layers.0.w.moment1_0": np.ones((4, 8), np.float32),
    "layers.1.w": np.ones((2, 8), np.float16),
    "norm": np.ones(8, np.float32),
    "extra_state.common": np.ones(10, np.uint8),
}


RUN = "4d3c2b1a4d3c2b1a"


@pytest.fixture
def root(tmp_path):
    for step, age, loss in ((100, 7200, 2.5), (200, 30, float("nan"))):
        record = StepRecord(step, time.time() - age, {"loss": loss}, RUN).encode()
        save(tmp_path / "run" / f"step_{step:08d}", {**VALUES, RECORD: record}, world=1, step=step)
    return tmp_path / "run"


def printed(capsys, *arguments: str, code: int = 0) -> list[str]:
    assert main(arguments) == code
    return capsys.readouterr().out.splitlines()


def test_ls_lists_steps_with_age_and_metrics(root, capsys):
    lines = printed(capsys, "ls", str(root))
    assert lines[0].split() == ["step", "id", "age", "bytes", "ranks", "complete", "run", "metrics", "path"]
    assert re.match(r" +100 +0 +2\.0 h +\d+ B +1 +yes +4d3c2b1a4d3c2b1a +loss 2\.5 +\S+step_00000100$", lines[1])
    assert re.match(r" +200 +0 +3\d s +\d+ B +1 +yes +4d3c2b1a4d3c2b1a +loss nan +\S+step_00000200$", lines[2])
    assert len(lines) == 3
    entries = json.loads("\n".join(printed(capsys, "ls", str(root), "--json")))["checkpoints"]
    assert [(each["step"], each["complete"]) for each in entries] == [(100, True), (200, True)]
    assert (entries[0]["metrics"], entries[0]["run"]) == ({"loss": 2.5}, RUN)
    step = str(root / "step_00000100")
    assert printed(capsys, "inspect", step)[0].endswith(f"step 100, run {RUN}")
    assert json.loads("\n".join(printed(capsys, "inspect", step, "--json")))["run"] == RUN


def test_show_prints_the_text_of_extra_states(root, capsys):
    """As a run's record, which is JSON."""
    _, text = printed(capsys, "show", str(root / "step_00000100"), "extra_state.manager")
    assert json.loads(text)["run"] == RUN
    assert printed(capsys, "show", str(root / "step_00000100"), "extra_state.common")[1] == "[1 1 1 1 1 1 1 1 1 1]"


def test_ls_tells_what_is_not_complete_and_exits_with_1(root, capsys):
    step = root / "step_00000200"
    (data,) = [name for name in os.listdir(step) if name.endswith(".safetensors")]
    os.truncate(step / data, 100)
    lines = printed(capsys, "ls", str(root), code=1)
    assert " yes " in lines[1] and " no " in lines[2] and data in lines[2]
    shutil.rmtree(root)
    assert main(["ls", str(root)]) == 1
    assert f"{root} does not exist. Remedy (FC301): correct the path" in capsys.readouterr().err
    root.mkdir()
    assert main(["ls", str(root)]) == 1
    assert "there are no checkpoints" in capsys.readouterr().err


def test_ls_looks_below_a_directory_that_is_a_checkpoint_itself(root, capsys):
    """Such as one to which somebody has saved without a manager."""
    save(str(root), {"w": np.ones((3, 2), np.float32)}, world=1)
    for level in (root, root.parent):
        listed = [line.split()[-1] for line in printed(capsys, "ls", str(level))[1:]]
        assert listed == [str(root), *(str(root / f"step_{step:08}") for step in (100, 200))]


def test_ls_lists_other_programs_checkpoints_and_the_damaged_ones(root, capsys):
    """Those below other checkpoints, as PaddleFormers' three directories are, are not listed once more."""
    models = root.parent / "models"
    for name in ("a", "b"):
        (models / name).mkdir(parents=True)
        save_file({"w": np.ones((3, 2), np.float32)}, models / name / "model.safetensors")
    assert printed(capsys, "ls", str(models)) == [f"other: {models / n}: a Hugging Face directory" for n in "ab"]
    assert printed(capsys, "ls", str(models / "a")) == [f"other: {models / 'a'}: a Hugging Face directory"]
    others = json.loads("\n".join(printed(capsys, "ls", str(models), "--json")))["others"]
    assert others[1] == {"path": str(models / "b"), "title": "a Hugging Face directory"}
    (models / "b" / "model.safetensors").write_bytes(b"1")
    lines = printed(capsys, "ls", str(models.parent))
    assert len([line for line in lines if "other: " in line]) == 2
    assert lines[-1].startswith(f"other: {models / 'b'}: ") and "model.safetensors" in lines[-1]
    assert " yes " in lines[1]
    inside = models / "c" / "model_state"
    inside.mkdir(parents=True)
    save_file({"w": np.ones((3, 2), np.float32)}, inside / "model.safetensors")
    (last,) = printed(capsys, "ls", str(models / "c"))
    assert str(inside) in last


def test_ls_clean_and_verify_show_a_checkpoint_whose_manifest_is_lost(tmp_path, capsys):
    path = tmp_path / "run" / "step_1"
    for unique_id in (0, 1):
        save(str(path), {"w": np.ones((3, 2), np.float32)}, world=1, unique_id=unique_id)
    (path / "0.manifest").unlink()
    line = f"manifest lost: {path}, id 0: restore {path}/0.manifest from a copy, or `flexckpt repair {path} --id 0`"
    for root in (path, tmp_path / "run"):
        assert main(["ls", str(root)]) == 1
        assert line in capsys.readouterr().out.splitlines()
        assert main(["clean", str(root), "--remove"]) == 0
        assert line in capsys.readouterr().out.splitlines()
        for command, code in (("ls", 1), ("clean", 0)):
            told = json.loads("\n".join(printed(capsys, command, str(root), "--json", code=code)))
            assert told["lost"] == [{"path": str(path), "unique_id": 0}]
    assert printed(capsys, "verify", str(tmp_path / "run"), code=1)[-1] == line
    told = json.loads("\n".join(printed(capsys, "verify", str(tmp_path / "run"), "--json", code=1)))
    assert not told["ok"] and told["lost"] == [{"path": str(path), "unique_id": 0}]
    assert main(["repair", str(path), "--id", "0"]) == 0
    capsys.readouterr()
    assert "lost: " not in "".join(printed(capsys, "ls", str(path)))
    assert json.loads("\n".join(printed(capsys, "ls", str(path), "--json")))["lost"] == []


def test_ls_takes_the_age_of_a_checkpoint_without_a_record_from_its_manifest(tmp_path, capsys):
    save(tmp_path / "one", VALUES, world=1)
    then = time.time() - 7200
    os.utime(tmp_path / "one" / "0.manifest", (then, then))
    assert printed(capsys, "ls", str(tmp_path / "one"))[1].split()[2:4] == ["2.0", "h"]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (
            "role",
            {"parameters": 192, "master weights": 128, "state moment1_0": 128, "extra state": 10},
        ),
        ("layer", {"layers.0": 384, "layers.1": 32, "(no layer)": 32, "extra state": 10}),
        ("dtype", {"float32": 416, "float16": 32, "uint8": 10}),
        ("rank", {"0": 458}),
    ],
)
def test_du_sums_up_bytes(tmp_path, capsys, by, expected):
    save(tmp_path / "one", VALUES, world=1)
    entries = json.loads("\n".join(printed(capsys, "du", str(tmp_path / "one"), "--by", by, "--json")))["groups"]
    assert {each["name"]: each["bytes"] for each in entries} == expected
    assert [each["bytes"] for each in entries] == sorted(expected.values(), reverse=True)
    lines = printed(capsys, "du", str(tmp_path / "one"), "--by", by)
    assert len(lines) == len(expected) + 2
    assert lines[-1].split()[:2] == ["total", "458"]


def test_du_of_a_run_sums_up_its_steps(root, capsys):
    of_one = json.loads("\n".join(printed(capsys, "du", str(root / "step_00000100"), "--json")))
    of_all = json.loads("\n".join(printed(capsys, "du", str(root), "--json")))
    one, total = ({each["name"]: each["bytes"] for each in found["groups"]} for found in (of_one, of_all))
    assert {name: 2 * size for name, size in one.items() if name != "extra state"}.items() <= total.items()
    assert printed(capsys, "du", str(root))[-1] == "in 2 checkpoints"


def test_du_by_rank_counts_what_each_wrote(tmp_path, capsys):
    save(tmp_path / "one", {"w": np.ones((4, 8), np.float32)}, world=2)
    entries = json.loads("\n".join(printed(capsys, "du", str(tmp_path / "one"), "--by", "rank", "--json")))["groups"]
    assert sorted((each["name"], each["bytes"]) for each in entries) == [("0", 64), ("1", 64)]


def test_doctor_finds_nothing_wrong_here(capsys):
    report = json.loads("\n".join(printed(capsys, "doctor", "--json")))
    assert report["problems"] == []
    versions = {each["package"]: each["version"] for each in report["packages"]}
    assert versions["numpy"] == np.__version__
    assert printed(capsys, "doctor")[-1] == "no problems: this installation is as it should be"


def test_doctor_names_what_is_missing_or_not_supported(monkeypatch, capsys):
    def version(name):
        if name == "xxhash":
            raise metadata.PackageNotFoundError(name)
        return {"numpy": "1.20.3", "paddlepaddle": "2.6.2"}.get(name, "99.0")

    monkeypatch.setattr(doctor.metadata, "version", version)
    lines = printed(capsys, "doctor", code=1)
    assert "problem: xxhash is missing. Remedy (FC901): pip install xxhash" in lines
    assert "problem: numpy 1.20.3 is not a version that the tests run with" in lines
    assert "problem: paddlepaddle 2.6.2 is not a version that the tests run with" in lines
    assert not [line for line in lines if line.startswith("no problems")]


def test_doctor_tells_which_patches_fit(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_root", lambda package: None)
    assert not [line for line in printed(capsys, "doctor") if "patch" in line]
    monkeypatch.setattr(doctor, "check_patch", lambda root, every, patch: ("fits", ""))
    lines = printed(capsys, "doctor")
    (head,) = (line for line in lines if line.startswith("defects of Paddle 3.3.1 itself"))
    assert "optional patches mend; flexckpt works without them" in head
    (own,) = (line for line in lines if line.startswith("  paddle-3.3.1-nested-state "))
    assert own.endswith("  Nested state dicts load")
    assert lines[-1].startswith("no problems")
    report = json.loads("\n".join(printed(capsys, "doctor", "--json")))
    assert {each["owner"] for each in report["patches"]} >= {"Paddle 3.3.1"}


def test_what_doctor_advises_patches_what_is_installed(monkeypatch, capsys, tmp_path):
    root, patches = install(tmp_path / "site"), write_patches(tmp_path / "patches", "later")
    monkeypatch.setattr(doctor, "read_patches", lambda: patches)
    monkeypatch.setattr(doctor, "find_root", lambda *_: root)
    (line,) = (line for line in printed(capsys, "doctor") if "to apply some: " in line)
    printed(capsys, *line.partition("flexckpt ")[2].partition(" ...")[0].split())
    assert b"first_9 = 90" in (root / "sample" / "inner" / "first.py").read_bytes()
    assert "patched: title (later)" in printed(capsys, "doctor")


def test_every_command_is_found_by_its_name():
    everything = build_parser().format_help()
    for module, names in cli._COMMANDS.items():
        for name in names:
            assert re.search(rf"^    {name}\s", everything, re.MULTILINE)
            # Only this module was imported for it, and it has these commands and no others.
            alone = build_parser([name]).format_help()
            assert [each for each in names if re.search(rf"^    {each}\s", alone, re.MULTILINE)] == list(names), module
            assert len(re.findall(r"^    \w+\s", alone, re.MULTILINE)) == len(names)


def test_the_version_needs_no_numpy():
    code = (
        "import sys\nfrom paddle_flexckpt.cli.main import main\ntry: main(['--version'])\n"
        "except SystemExit: print(sorted({'numpy', 'paddle', 'xxhash'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["[]"]


def test_ctrl_c_leaves_no_traceback(root, monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(overview, "list_checkpoints", interrupted)
    assert main(["ls", str(root)]) == 130
    assert capsys.readouterr().err == "flexckpt ls: interrupted\n"


def begun(path):
    """A save that has begun and died."""
    directory = open_to_save(path)
    lock, _, names = directory.begin_save(None, 1)
    (path / names.data_file(0)).write_bytes(bytes(5000))
    lock.release()
    return names


def test_ls_shows_unfinished_saves_and_clean_removes_them(root, capsys):
    inner = root / "checkpoint-20" / "flex_checkpoint"
    names = begun(inner)
    size = 5000 + os.path.getsize(inner / names.marker_file)
    lines = printed(capsys, "ls", str(root), code=1)
    assert len(lines) == 5
    died = f"unfinished: {inner}, id 0: 2 files, {format_bytes(size)}; it died"
    assert lines[3:] == [died, f"`flexckpt clean {root} --remove` removes what died"]
    for command in ("ls", "verify"):
        told = json.loads("\n".join(printed(capsys, command, str(root), "--json", code=1)))
        (entry,) = told["unfinished"]
        assert (entry["bytes"], entry["files"], entry["running"]) == (
            size,
            [names.marker_file, names.data_file(0)],
            False,
        )
    assert printed(capsys, "verify", str(root), code=1)[-2:] == lines[3:]
    before = sorted(os.listdir(inner))
    assert printed(capsys, "clean", str(root)) == lines[3:]
    assert sorted(os.listdir(inner)) == before
    assert printed(capsys, "clean", str(root), "--remove") == [died, f"{inner}: 2 files removed, and the directory"]
    assert not inner.exists()
    assert printed(capsys, "clean", str(root)) == [f"there is no unfinished save in {root} and below"]
    assert len(printed(capsys, "ls", str(root))) == 3


def test_a_save_that_is_running_is_nothing_wrong(root, capsys):
    directory = open_to_save(root / "step_00000300")
    lock, _, _ = directory.begin_save(None, 1)
    assert printed(capsys, "ls", str(root))[-1].endswith("; running")
    assert printed(capsys, "verify", str(root))[-1].endswith("; running")
    lock.release()


def test_a_save_that_may_be_running_is_nothing_wrong(root, capsys, monkeypatch):
    """Storage without locks cannot tell."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    begun(root / "step_00000300")
    for command in ("ls", "verify"):
        unfinished, hint = printed(capsys, command, str(root))[-2:]
        assert unfinished.endswith("; running, or it died")
        assert hint == f"`flexckpt clean {root} --remove` removes what died"
    assert json.loads("\n".join(printed(capsys, "verify", str(root), "--json")))["ok"] is True


def test_ls_shows_an_unfinished_save_where_there_is_nothing_else(tmp_path, capsys):
    begun(tmp_path / "run")
    lines = printed(capsys, "ls", str(tmp_path), code=1)
    assert len(lines) == 2 and lines[0].startswith("unfinished: ")


def test_ls_looks_two_levels_below(tmp_path, capsys):
    save(tmp_path / "checkpoint-20" / "flex_checkpoint", VALUES, world=1, step=20)
    (line,) = printed(capsys, "ls", str(tmp_path))[1:]
    assert line.endswith("checkpoint-20/flex_checkpoint")


def test_clean_says_that_a_directory_does_not_exist(tmp_path, capsys):
    for more in ([], ["--remove"], ["--json"]):
        assert main(["clean", str(tmp_path / "nowhere"), *more]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{tmp_path / 'nowhere'} does not exist. Remedy (FC301): correct the path" in captured.err


def test_clean_leaves_a_running_save_alone(tmp_path, capsys):
    directory = open_to_save(tmp_path)
    lock, _, names = directory.begin_save(None, 1)
    (line,) = printed(capsys, "clean", str(tmp_path))  # no hint: there is nothing to remove
    assert line.endswith("; running")
    assert json.loads("\n".join(printed(capsys, "clean", str(tmp_path), "--json")))["unfinished"][0]["running"] is True
    lines = printed(capsys, "clean", str(tmp_path), "--remove", code=1)
    assert "0 files removed; a save is running: " in lines[1]
    assert names.marker_file in os.listdir(tmp_path)
    lock.release()


def test_clean_leaves_the_directory_that_it_is_given(tmp_path, capsys):
    begun(tmp_path)
    assert printed(capsys, "clean", str(tmp_path), "--remove")[1] == f"{tmp_path}: 2 files removed"
    assert os.listdir(tmp_path) == []


def test_inspect_explains_a_save_that_has_only_begun(tmp_path, capsys):
    directory = open_to_save(tmp_path)
    lock, _, _ = directory.begin_save(None, 1)
    lock.release()
    assert main(["inspect", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert (
        "has an unfinished save (id 0)" in text and f"It is running, or it died (`flexckpt clean {tmp_path}`)" in text
    )
