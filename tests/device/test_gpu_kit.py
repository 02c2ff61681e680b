"""The kit for a GPU machine: its parts are whole or refused, and its steps keep their limits and go on after one fails.

No GPU and no Paddle are needed here. ``make gpu-rehearsal`` runs all steps on the simulated runtime.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.device.gpu import pack, steps

NAMES = ("install", "compile", "smoke", "check-one", "check-two", "bench-device", "bench-host")


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    """Two wheels: one that pip can install, and one of 40 kB that do not get smaller."""
    folder = tmp_path_factory.mktemp("wheels")
    small, large = folder / "kit_probe-1.0-py3-none-any.whl", folder / "numpy-9.9-py3-none-any.whl"
    info = "kit_probe-1.0.dist-info"
    with zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("kit_probe.py", "value = 'here'\n" + "# filler\n" * 500)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kit-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in ("kit_probe.py", f"{info}/RECORD")))
    with zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("noise", random.Random(0).randbytes(40_000))
    return [small, large]


@pytest.fixture(scope="module")
def packed(wheels, tmp_path_factory) -> Path:
    """A kit for this Python, of two parts."""
    kit = tmp_path_factory.mktemp("packed") / "gpu-kit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "PYTHON", "{}.{}".format(*sys.version_info))
        pack.pack(wheels, kit, part_bytes=30_000, block_bytes=16_000)
    return kit


@pytest.fixture
def kit(packed, tmp_path) -> Path:
    """A copy of that kit, for the test alone."""
    return Path(shutil.copytree(packed, tmp_path / "gpu-kit"))


def test_parts_are_the_wheels_and_none_is_too_large(kit, wheels, tmp_path):
    found = {number: (path / pack.PART).stat().st_size for number, path in pack.parts(kit).items()}
    assert list(found) == [1, 2]
    assert max(found.values()) <= 30_000
    assert sorted(path.name for path in kit.iterdir()) == ["1", "2"]  # what was written in between is gone
    unpacked = pack.unpack(kit, tmp_path / "out")
    assert [path.name for path in unpacked] == sorted(path.name for path in wheels)
    for before, after in zip(sorted(wheels), unpacked):
        with zipfile.ZipFile(before) as first, zipfile.ZipFile(after) as second:
            assert {name: first.read(name) for name in first.namelist()} == {
                name: second.read(name) for name in second.namelist()
            }
    lines = pack.sizes(kit)
    assert lines[0] == f"gpu-kit/1/part.tar.xz: {found[1] / 1e6:.1f} MB"
    assert lines[-1].startswith("2 parts, 0.0 MB; 2 wheels, ")


def test_parts_can_be_put_together_by_hand(kit, tmp_path):
    archive = tmp_path / "by-hand.tar"
    archive.write_bytes(lzma.decompress(b"".join((kit / str(n) / pack.PART).read_bytes() for n in (1, 2))))
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["kit_probe-1.0-py3-none-any.whl", "numpy-9.9-py3-none-any.whl"]


def test_a_new_kit_replaces_the_parts_of_an_earlier_one(kit, wheels, monkeypatch):
    monkeypatch.setattr(pack, "compress", lzma.compress)
    pack.pack(wheels, kit, part_bytes=100_000, block_bytes=200_000)
    assert list(pack.parts(kit)) == [1]
    assert pack.described(kit)["wheels"] == {path.name: path.stat().st_size for path in wheels}


def test_what_is_missing_damaged_or_for_another_python_is_refused(kit, tmp_path, monkeypatch):
    part = kit / "2" / pack.PART
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(pack.KitError, match=r"2/part.tar.xz from byte .* has SHA-256 .*; expected .*carry that part"):
        pack.unpack(kit, tmp_path / "out")
    part.write_bytes(whole[:-1])
    with pytest.raises(pack.KitError, match=rf"has {len(whole) - 1} bytes; expected {len(whole)}"):
        pack.unpack(kit, tmp_path / "out")
    part.unlink()
    with pytest.raises(pack.KitError, match=r"2/part.tar.xz is missing; .*Remedy: carry gpu-kit/2 again"):
        pack.unpack(kit, tmp_path / "out")
    with pytest.raises(pack.KitError, match="no part of a whole kit"):
        pack.described(tmp_path / "nothing")
    (kit / "1" / pack.KIT).unlink()  # written last: `make gpu-kit` was cut off
    with pytest.raises(pack.KitError, match="no part of a whole kit"):
        pack.described(kit)
    shutil.copy(kit / "2" / pack.KIT, kit / "1")
    part.write_bytes(whole)
    monkeypatch.setattr(pack.sys, "version_info", (3, 8, 0))
    with pytest.raises(pack.KitError, match=r"the kit is for Python .*, and this is 3\.8"):
        pack.install(kit, tmp_path / "site")


def test_a_block_that_is_larger_than_a_part_is_refused(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "compress", lambda block: block)
    with pytest.raises(pack.KitError, match="a part may have 1000"):
        pack.pack(wheels, tmp_path / "gpu-kit", part_bytes=1000)


def test_what_is_lacking_is_installed_without_a_network(kit, tmp_path, capfd, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")  # nobody answers there
    assert pack.main(["install", str(kit), str(tmp_path / "site")]) == 0
    said = capfd.readouterr().out
    assert "installing kit_probe-1.0-py3-none-any.whl" in said
    assert "there already: numpy-9.9-py3-none-any.whl" in said
    source = "import kit_probe; from importlib.metadata import version; print(kit_probe.value, version('kit-probe'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["here", "1.0"]
    assert sorted(path.name for path in kit.iterdir()) == ["1", "2"]


def test_a_version_that_paddle_asks_for_is_installed_over_another_one():
    assert pack.is_wanted(Path("paddlepaddle-3.3.1-cp312-cp312-manylinux1_x86_64.whl"))
    assert pack.is_wanted(Path("opt_einsum-3.3.0-py3-none-any.whl"))
    assert pack.is_wanted(Path("surely_not_there-1-py3-none-any.whl"))
    assert not pack.is_wanted(Path("pytest-1-py3-none-any.whl"))


# -- steps -------------------------------------------------------------------------------------------------------------


def words(source: str) -> tuple[str, ...]:
    return ("-c", source, "{json}")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(steps)`` runs steps; it returns the exit status and the folder of results."""
    monkeypatch.delenv("OUT", raising=False)

    def run(*made: steps.Step, arguments=("all",)):
        monkeypatch.setattr(steps, "steps", lambda options: list(made))
        folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
        return steps.main([*arguments, *folders, "--kit", str(tmp_path / "gpu-kit")]), tmp_path / "results"

    return run


def test_the_plan_keeps_its_limits_and_does_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps.subprocess, "Popen", None)
    assert steps.main(["all", "--dry-run", "--kit", str(tmp_path / "gpu-kit")]) == 0
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines() if line[:1].isdigit()] == list(NAMES)
    assert int(said.partition("all: ")[2].split()[0]) <= 540
    assert "no kit: " in said
    assert list(tmp_path.iterdir()) == []


def test_the_plan_tells_the_sizes_of_the_parts(kit, capsys):
    steps.main(["2", "3", "--dry-run", "--kit", str(kit)])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said if line[:2] in ("2 ", "3 ") and "at most" in line] == ["compile", "smoke"]
    assert "gpu-kit/1/part.tar.xz: 0.0 MB" in said


def test_the_document_has_the_steps_and_their_limits():
    rows = re.findall(r"^\| (\d) \| `([a-z-]+)` \| (\d+) s \|", (steps.HERE / "README.md").read_text(), re.M)
    made = steps.steps(steps.parse(["all"]))
    assert [(int(number), name, float(limit)) for number, name, limit in rows] == [
        (step.number, step.name, step.limit) for step in made
    ]


@pytest.mark.parametrize("small", [[], ["--small"]])
def test_every_module_that_a_step_runs_is_there(small):
    options = steps.parse(["all", *small, "--peers", "python"])
    for step in steps.steps(options):
        for command in step.commands:
            modules = [command[at + 1] for at, word in enumerate(command) if word == "-m"]
            scripts = [word for word in command if word.endswith(".py")]
            assert modules or scripts or command[0] == "-c", command
            assert all(importlib.util.find_spec(name) for name in modules)
            assert all(Path(name).is_file() for name in scripts)


@pytest.mark.parametrize("wrong", [["8"], ["0"], ["all", "1"], ["install"]])
def test_a_step_that_there_is_not_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        steps.main(wrong)
    assert "STEP is all, or numbers from 1 to 7; got " in capsys.readouterr().err


def test_a_step_that_fails_does_not_keep_the_next_from_running(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    write = "import json, sys; json.dump({'rows': [1]}, open(sys.argv[1], 'w'))"
    status, results = run(
        steps.Step(1, "raises", 60, (words("raise RuntimeError('the reason')"), words(write))),
        steps.Step(2, "half", 60, (words("import sys; open(sys.argv[1], 'w').write('{'); sys.exit(3)"),)),
        steps.Step(3, "well", 60, (words(write),)),
    )
    assert status == 1
    records = [json.loads((results / f"{stem}.json").read_text()) for stem in ("1-raises", "2-half", "3-well")]
    assert [record["ok"] for record in records] == [False, False, True]
    assert [each["code"] for record in records for each in record["commands"]] == [1, 0, 3, 0]
    assert [each["found"] for record in records for each in record["commands"]] == [
        None,
        {"rows": [1]},
        None,
        {"rows": [1]},
    ]
    assert "RuntimeError: the reason" in (results / "1-raises.log").read_text()
    summary = json.loads((results / "summary.json").read_text())
    assert [step["ok"] for step in summary["steps"]] == [False, False, True]
    assert summary["machine"]["processors"] >= 1
    assert summary["runtime"] == "cuda"
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-3:]] == ["FAILED", "FAILED", "ok"]
    # No more than eight files come back from the machine.
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.json"]
    with tarfile.open(out / "results.tar.gz") as archive:
        kept = {f"{stem}.{kind}" for stem in ("1-raises", "2-half", "3-well") for kind in ("json", "log")}
        assert set(archive.getnames()) == {*kept, "summary.json"}


def test_a_step_that_is_not_done_in_time_is_ended_with_what_it_started(run, monkeypatch):
    monkeypatch.setattr(steps, "GRACE", 0.5)
    child = "import signal; signal.pause()"
    deaf = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
while True:
    signal.pause()
"""
    status, results = run(
        steps.Step(1, "deaf", 3, (("-c", deaf), ("-c", "print('never')"))),
        steps.Step(2, "next", 60, (("-c", "print('it runs')"),)),
    )
    assert status == 1
    records = [json.loads((results / f"{stem}.json").read_text()) for stem in ("1-deaf", "2-next")]
    assert [[each["in_time"] for each in record["commands"]] for record in records] == [[False, False], [True]]
    log = (results / "1-deaf.log").read_text().splitlines()
    assert "interrupted" in log
    assert "never" not in log
    assert log[-1] == "[kit] not begun: the time of this step is used up"
    assert "it runs" in (results / "2-next.log").read_text()
    (pid,) = [int(line) for line in log if line.isdigit()]
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_a_log_has_at_most_200_lines_with_its_beginning_and_its_end(run):
    _, results = run(steps.Step(1, "long", 60, (("-c", "print('x' * 9000); [print(i) for i in range(5000)]"),)))
    lines = (results / "1-long.log").read_text().splitlines()
    assert len(lines) == 200
    assert lines[0].startswith("$ ")
    assert lines[1] == "x" * 500 + " ..."
    assert lines[60] == "[kit] 4803 lines are left out here"
    assert lines[59:62:2] == ["57", "4861"]
    assert lines[-1] == "4999"


def test_commands_see_what_was_installed_and_nothing_of_the_shell(run, monkeypatch, tmp_path):
    for name in ("PADDLE_TRAINER_ID", "CUSTOM_DEVICE_ROOT", "FLAGS_x", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "1")
    source = "import json, os, sys; json.dump({'env': dict(os.environ), 'cwd': os.getcwd()}, open(sys.argv[1], 'w'))"
    _, results = run(steps.Step(1, "environment", 60, (words(source),)))
    found = json.loads((results / "1-environment.json").read_text())["commands"][0]["found"]
    assert not {"PADDLE_TRAINER_ID", "CUSTOM_DEVICE_ROOT", "FLAGS_x", "PIP_INDEX_URL"} & set(found["env"])
    assert found["env"]["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "work" / "site"), str(steps.ROOT)]
    assert Path(found["cwd"]) == steps.ROOT


def test_the_shell_script_runs_the_steps_from_anywhere(tmp_path):
    script = steps.HERE / "run.sh"
    words = ["bash", str(script), "--dry-run", "3", "--kit", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].split() == ["3", "smoke", "60", "s", "at", "most"]
