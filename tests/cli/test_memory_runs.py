"""flexckpt clean in the directory of a memory tier: which runs have steps there, and what is removed."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.tools.memory_runs import note_root
from tests.transfer.samples import save

FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def tier(tmp_path):
    """The memory of two runs: one has two steps, one of them unfinished; the other has none."""
    path = tmp_path / "shm"
    for name in (FIRST, SECOND):
        (path / name).mkdir(parents=True)
        note_root(LocalBackend(str(path / name)), "/shared/run")
    (path / FIRST / f"memory.json.{bytes(16).hex()}.tmp").touch()
    save(path / FIRST / "step_00000020", {"w": np.zeros(1000, "u1")})
    (path / FIRST / "step_00000040").mkdir()
    (path / FIRST / "step_00000040" / "part").write_bytes(bytes(50))
    return path


def clean(path, capsys, *options):
    assert main(["clean", str(path), *options]) == 0
    return capsys.readouterr().out.splitlines()


def size_of(path) -> int:
    return sum(os.stat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(path) for name in names)


def test_runs_are_listed_and_those_that_nobody_holds_removed(tier, capsys):
    with LocalBackend(str(tier / SECOND)).locks.take():
        first, second, hint = clean(tier, capsys)
        assert first.startswith(f"memory: {tier}/{FIRST}, of /shared/run: step 20, ")
        assert first.endswith("; no process holds it")
        assert second.endswith("of /shared/run: no step, 23 B; a process holds it")
        assert hint == f"`flexckpt clean {tier} --remove` removes the memory that no process holds"
        first, second = clean(tier, capsys, "--remove")
        assert (first.rpartition("; ")[2], second.rpartition("; ")[2]) == ("removed", "a process holds it")
        assert os.listdir(tier) == [SECOND]
    clean(tier, capsys, "--remove")
    assert os.listdir(tier) == []
    assert clean(tier, capsys) == [f"there is no unfinished save in {tier} and below"]


def test_a_run_whose_step_is_written_or_read_is_held(tier, capsys):
    """Its manager has died, and its writers go on; or another job reads."""
    step = LocalBackend(str(tier / FIRST / "step_00000040"))
    with step.locks.take():
        assert [line.rpartition("; ")[2] for line in clean(tier, capsys, "--remove")] == [
            "a process holds it",
            "removed",
        ]
    with LocalBackend(str(tier / FIRST / "step_00000020")).locks.share("0.manifest"):
        (line,) = clean(tier, capsys, "--remove")
        assert line.endswith("no process holds it")
        assert os.listdir(tier / FIRST / "step_00000020")
    clean(tier, capsys, "--remove")
    assert os.listdir(tier) == []


def test_the_memory_of_several_nodes_is_found_above_their_directories(tier, capsys, tmp_path):
    above = tmp_path / "nodes"
    above.mkdir()
    tier.rename(above / "node0")
    assert main(["ls", str(above)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(f"{above}/node0/{FIRST}/step_00000020")
    first, second, hint = clean(above, capsys)
    assert (f"{above}/node0/{FIRST}" in first, f"{above}/node0/{SECOND}" in second) == (True, True)
    assert hint == f"`flexckpt clean {above}/node0 --remove` removes the memory that no process holds"


def test_runs_below_the_directory_that_is_given_are_never_removed(tier, capsys):
    """They may be of a job that crashed and waits for its restart, where somebody cleans up after an engine."""
    size = size_of(tier.parent)
    first, second, hint = clean(tier.parent, capsys, "--remove")
    assert [each.rpartition("; ")[2] for each in (first, second)] == ["no process holds it"] * 2
    assert hint == f"`flexckpt clean {tier} --remove` removes the memory that no process holds"
    told = json.loads("\n".join(clean(tier.parent, capsys, "--json", "--remove")))
    assert ([each["path"] for each in told["memory"]], told["freed"]) == ([f"{tier}/{FIRST}", f"{tier}/{SECOND}"], [])
    assert size_of(tier.parent) == size


def test_as_json(tier, capsys):
    size = size_of(tier / FIRST)
    told = json.loads("\n".join(clean(tier, capsys, "--json", "--remove")))
    assert told["memory"][0] == {
        "path": f"{tier}/{FIRST}", "root": "/shared/run", "step": 20, "bytes": size, "held": False,
    }  # fmt: skip
    assert told["freed"] == [f"{tier}/{FIRST}", f"{tier}/{SECOND}"]


def test_a_directory_without_the_note_is_none_of_them(tier, capsys):
    for content in (None, "no JSON", "{}", "[1]"):
        note = tier / FIRST / "memory.json"
        note.unlink() if content is None else note.write_text(content, "utf-8")
        assert FIRST not in "".join(clean(tier, capsys, "--remove"))
    (tier / FIRST / "memory.json").write_text('{"root": "/x"}', "utf-8")
    os.rename(tier / FIRST, tier / "steps")
    assert clean(tier, capsys, "--remove") == [f"there is no unfinished save in {tier} and below"]
    assert len(os.listdir(tier / "steps" / "step_00000020")) > 1
