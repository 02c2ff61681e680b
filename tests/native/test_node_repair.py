"""flexckpt repair --nodes: lost data files are rebuilt from parity by one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.native.node_repair import rebuild_lost_files
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.native.samples import flip
from tests.remedies.following import advised
from tests.saved import data_file
from tests.saving.test_nodes import load, save


@pytest.fixture
def nodes(tmp_path):
    """The directories of four nodes, in one group, with version 1 as id 0, of two ranks on each."""
    paths = [str(tmp_path / name) for name in "abcd"]
    assert save([path for path in paths for _ in range(2)], 1, parity=4)[0].unique_id == 0
    return paths


def contents(*paths):
    return {name: (Path(path) / name).read_bytes() for path in paths for name in os.listdir(path)}


def lose(path):
    shutil.rmtree(path)
    os.mkdir(path)


@pytest.mark.parametrize("lost", range(4))
def test_the_data_of_a_node_is_rebuilt_in_directories_of_others(nodes, capsys, lost):
    wanted = {name: data for name, data in contents(nodes[lost]).items() if name.endswith(".safetensors")}
    before = contents(*nodes)
    lose(nodes[lost])
    left = contents(*nodes)
    for flags in (["--dry-run"], []):
        assert contents(*nodes) == left
        assert main(["repair", "--nodes", *nodes, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        done = "can be rebuilt" if flags else "was rebuilt and verified"
        assert [line.split(f" {done} in ")[0] for line in lines[:2]] == sorted(wanted)
        assert lines[2] == f"id 0: of 2 lost data files 2 {done.replace('was', 'were')}"
    after = contents(*nodes)
    assert {name: after[name] for name in wanted} == wanted
    assert after.keys() - left.keys() == wanted.keys()
    assert os.listdir(nodes[lost]) == [], "it has no manifest"
    assert all(before[name] == data for name, data in after.items())
    assert load([path for path in nodes if path != nodes[lost]] + [nodes[0]])[1] == 1
    assert main(["repair", "--nodes", *nodes]) == 0
    assert capsys.readouterr().out == "id 0: of 0 lost data files 0 were rebuilt and verified\n"


def test_what_cannot_be_rebuilt_has_a_reason(nodes, capsys):
    a, b, c, d = nodes
    manifest_of = {path: Path(path, "0.manifest").read_bytes() for path in nodes}
    lose(a)
    assert main(["repair", "--nodes", b, c]) == 1
    out = capsys.readouterr().out
    assert f"{data_file(b, 0)} is lost: parity cannot rebuild it without" in out and f":{d})" in out
    assert "id 0: of 4 lost data files 0 were rebuilt and verified" in out
    assert Path(b, "0.manifest").read_bytes() == manifest_of[b]
    with pytest.raises(ValidationError, match="no manifest of id 3 is in"):
        rebuild_lost_files([b, c], 3)
    with pytest.raises(ValidationError, match=r"no manifest of id None is in .*; ids there: none"):
        rebuild_lost_files([a])


def test_the_older_save_of_a_node_that_was_away_does_no_harm(nodes, tmp_path):
    a, b, c, d = nodes
    shutil.copytree(d, tmp_path / "old")
    assert save([path for path in nodes for _ in range(2)], 2, unique_id=0, parity=4)[0].unique_id == 0
    shutil.rmtree(d)
    os.rename(tmp_path / "old", d)
    found = rebuild_lost_files(nodes)
    assert not found.reasons and {*found.rebuilt} == {data_file(a, 6), data_file(a, 7)}
    assert d not in found.rebuilt.values()
    assert load([a, b, c, a])[1] == 2


def test_damage_is_found_by_verify_and_never_used(nodes, capsys):
    a, b, _, d = nodes
    lose(d)
    parity = data_file(a, 2).replace(".safetensors", ".parity")
    flip(Path(b, parity), Path(b, parity).stat().st_size - 20)
    problems = [each for each in verify_checkpoint(b).problems if each.file == f"{b}/{parity}"]
    assert [each.what for each in problems] == ["a parity file is damaged"]
    assert "its checksum is another" in problems[0].got
    assert not any("parity" in each.what for each in verify_checkpoint(a).problems)
    with pytest.raises(CorruptCheckpointError, match="rebuilt by parity, is not what was saved"):
        rebuild_lost_files(nodes)
    assert not any(data_file(a, 6) in name for path in nodes for name in os.listdir(path))
    advised("tools/verification.py", "save again; until then it protects nothing", str(problems[0]))
    save([path for path in nodes for _ in range(2)], 2, unique_id=0, parity=4)
    assert not any("parity" in each.what for path in nodes for each in verify_checkpoint(path).problems)


def test_a_copy_of_a_parity_file_that_is_cut_off_does_no_harm(nodes, tmp_path):
    a, b, c, d = nodes
    lose(d)
    copy = str(tmp_path / "copy of b")
    shutil.copytree(b, copy)
    os.truncate(os.path.join(copy, data_file(a, 2).replace(".safetensors", ".parity")), 500)
    for order in ([b, copy], [copy, b]):
        found = rebuild_lost_files([a, *order, c], dry_run=True)
        assert not found.reasons and {*found.rebuilt} == {data_file(a, 6), data_file(a, 7)}
    lose(c)
    found = rebuild_lost_files([a, b, copy])
    assert found.reasons and not any("has 500 bytes" in reason for reason in found.reasons.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give CHECKPOINT, whose manifest is rebuilt, or --nodes, whose data files are"),
        (["run"], "CHECKPOINT needs --id"),
        (["--id", "0"], "give CHECKPOINT, whose manifest is rebuilt, or --nodes"),
        (["run", "--id", "0", "--nodes", "a"], "give CHECKPOINT, whose manifest is rebuilt, or --nodes"),
        (["run", "--id", "0", "--dry-run"], "--dry-run goes with --nodes alone"),
        (["--nodes", "a", "--overwrite"], "--overwrite, --save-token and --fewer-files go with CHECKPOINT alone"),
    ],
)
def test_other_arguments_are_refused(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        main(["repair", *arguments])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
