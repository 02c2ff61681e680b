"""What a type checker says of the public functions, in a program of somebody else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import paddle_flexckpt

pytest.importorskip("mypy")
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import paddle_flexckpt as fc

writer = fc.BackgroundWriter()
flag = bool(input())
reveal_type(fc.save_state_dict({}, "a"))
reveal_type(fc.save_state_dict({}, "a", async_save=False))
reveal_type(fc.save_state_dict({}, "a", async_save=True))
reveal_type(fc.save_state_dict({}, "a", async_save=writer))
reveal_type(fc.save_state_dict({}, "a", async_save=flag))
reveal_type(fc.verify_checkpoint("a"))
manager = fc.CheckpointManager("a", async_save=flag)
reveal_type(manager.save(1, model=1))
reveal_type(manager.save(1, blocking=True))
reveal_type(manager.save(1, blocking=False, metrics={"loss": 1.0}))
reveal_type(manager.save(1, blocking=flag))
manager.save(1, metric={"loss": 1.0})
manager.save(1, blocking=True, metric={"loss": 1.0})
fc.save_state_dict({}, "a", async_save="yes")
"""


def test_a_save_returns_a_report_or_a_handle_as_async_save_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        # What `make lint` has left there makes it several times as fast.
        str(ROOT / ".mypy_cache"),
    ]
    done = subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if "program.py" in line]
    found = [line.partition('Revealed type is "')[2].rstrip('"') for line in lines if "Revealed" in line]
    report, handle = "paddle_flexckpt.report.SaveReport", "paddle_flexckpt.background.pending.SaveHandle"
    assert found[:4] == [report, report, handle, handle]
    assert set(found[4].split(" | ")) == {report, handle}
    assert found[5] == "paddle_flexckpt.report.VerifyReport"
    assert [set(each.split(" | ")) for each in found[6:]] == [{report, handle}, {report}, {handle}, {report, handle}]
    assert sum("No overload variant" in line for line in lines) == 3, done.stdout


def test_the_package_says_that_it_has_types():
    assert (Path(paddle_flexckpt.__file__).parent / "py.typed").is_file()


def paths_of(site: Path) -> list[str]:
    """The directories that a type checker looks into because of files in ``site-packages``: lines that are paths."""
    lines = [line for file in site.glob("*.pth") for line in file.read_text().splitlines()]
    return [line for line in lines if not line.startswith(("import ", "import\t"))]


def test_an_editable_installation_is_a_path_and_no_hook():
    """Type checkers read .pth files; what a hook of the import system would find they do not see."""
    site = Path(sysconfig.get_path("purelib"))
    found = [*metadata.distributions(name="paddle-flexckpt", path=[str(site)])]
    origin = json.loads((found[0].read_text("direct_url.json") if found else None) or "{}")
    if not origin.get("dir_info", {}).get("editable") or origin["url"] != ROOT.as_uri():
        pytest.skip("this tree is not what is installed here as editable")
    assert str(ROOT) in paths_of(site)


@pytest.mark.slow
def test_mypy_sees_what_pip_has_installed_as_editable(tmp_path):
    """In an environment that has nothing else, from a directory elsewhere. pip fetches setuptools."""
    source, env = tmp_path / "source", tmp_path / "env"
    for name in ("paddle_flexckpt", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    python = str(env / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "-e", str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = (env / "lib").glob("python*/site-packages")
    assert str(source) in paths_of(site)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*mypy, str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert "import-not-found" not in done.stdout and "import-untyped" not in done.stdout, done.stdout
    assert 'Revealed type is "paddle_flexckpt.report.VerifyReport"' in done.stdout
    # It finds the patches, which stand beside the package.
    code = "from paddle_flexckpt.patching import read_patches; print(len(read_patches()))"
    listed = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert int(listed.stdout) > 10, listed.stderr
