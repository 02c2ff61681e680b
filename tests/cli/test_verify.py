"""flexckpt verify, inspect and repair: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.native.directory import CheckpointDirectory
from tests.native.samples import flip
from tests.saved import data_file
from tests.transfer.samples import save, values_of

KINDS = {
    "model.w": ("float32", (4, 6)),
    "model.norm": ("bfloat16", (5,)),
    "model.w.moment1_0": ("float32", (2, 3, 4)),
    "extra_state.own": ("uint8", (9,)),
}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save(str(tmp_path / "checkpoint"), values_of(KINDS), world=2, step=7)
    return tmp_path / "checkpoint"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_verify_of_a_sound_checkpoint(checkpoint, capsys):
    code, out, err = run(capsys, "verify", str(checkpoint))
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    assert line.startswith(f"verified {checkpoint} (id 0): nothing is wrong; 4 tensors")


def test_verify_of_a_run_looks_at_all_its_steps(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step:08d}", values_of(KINDS), world=1, step=step)
    code, out, err = run(capsys, "verify", str(tmp_path))
    assert (code, err, out.splitlines()[-1]) == (0, "", f"{tmp_path}: 3 of 3 checkpoints are whole")
    assert [line.split()[1] for line in out.splitlines()[:-1]] == [
        str(tmp_path / f"step_{step:08d}") for step in (1, 2, 3)
    ]
    (data,) = (tmp_path / "step_00000002").glob("*.safetensors")
    flip(data, data.stat().st_size - 1)
    code, out, _ = run(capsys, "verify", str(tmp_path))
    assert (code, len(out.splitlines()), out.splitlines()[-1]) == (1, 5, f"{tmp_path}: 2 of 3 checkpoints are whole")
    code, out, _ = run(capsys, "verify", str(tmp_path), "--json")
    report = json.loads(out)
    assert (code, report["ok"], [each["ok"] for each in report["checkpoints"]]) == (1, False, [True, False, True])


def test_verify_prints_one_line_per_problem_and_a_summary(checkpoint, capsys):
    catalog = CheckpointDirectory(str(checkpoint)).read_manifest().catalog
    for row in (0, len(catalog) - 1):
        flip(checkpoint / catalog.file_name(row), int(catalog.byte_offset[row]))
    code, out, err = run(capsys, "verify", str(checkpoint))
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert len(lines) == 3
    for line, row in zip(lines, (0, len(catalog) - 1)):
        assert line.startswith(
            f"bytes 0 to {catalog.byte_length[row]} of the shard are damaged (key {catalog.key_name(row)!r}, "
            f"rank {catalog.rank[row]}, file {str(checkpoint / catalog.file_name(row))!r}, "
            f"byte {catalog.byte_offset[row]}); expected xxh3 "
        )
    assert "(id 0): 2 problems;" in lines[2]


def test_verify_as_json(checkpoint, capsys):
    (checkpoint / data_file(checkpoint, 1)).unlink()
    code, out, _ = run(capsys, "verify", str(checkpoint), "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    assert [(p["what"], p["rank"]) for p in report["problems"]] == [("a file that the manifest names is missing", 1)]


def test_a_file_that_is_missing_has_the_code_that_a_load_gives_it(checkpoint, capsys):
    (checkpoint / data_file(checkpoint, 1)).unlink()
    assert "Remedy (FC304): restore the file" in run(capsys, "verify", str(checkpoint))[1]
    assert "Remedy (FC304): restore the file" in run(capsys, "show", str(checkpoint), "model.w")[2]


def test_a_file_that_is_too_short_is_one_line(checkpoint, capsys):
    catalog = CheckpointDirectory(str(checkpoint)).read_manifest().catalog
    mine = np.flatnonzero(catalog.rank == 1)
    with (checkpoint / data_file(checkpoint, 1)).open("r+b") as file:
        file.truncate(int(catalog.byte_offset[mine].min()))
    code, out, _ = run(capsys, "verify", str(checkpoint))
    line, _ = out.splitlines()
    assert (code, line.startswith("a file is shorter than it was")) == (1, True)
    keys = {catalog.key_name(row) for row in mine if catalog.byte_length[row]}
    assert f"({len(keys)} tensor{'s' * (len(keys) > 1)} not whole; --json lists all)" in line
    problems = json.loads(run(capsys, "verify", str(checkpoint), "--json")[1])["problems"]
    assert {each["key"] for each in problems} == {None, *keys}


def test_verify_of_what_is_no_checkpoint(tmp_path, capsys):
    code, out, err = run(capsys, "verify", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith("flexckpt verify:")
    assert "is not a checkpoint" in err


def test_inspect_lists_keys_and_totals(checkpoint, capsys):
    manifest = CheckpointDirectory(str(checkpoint)).read_manifest()
    code, out, _ = run(capsys, "inspect", str(checkpoint))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{checkpoint}, id 0: saved by 2 ranks, step 7"
    assert lines[1].split() == ["key", "dtype", "shape", "shards", "files", "bytes"]
    names = [line.split()[0] for line in lines[2:-2]]
    assert names == ["extra_state.own", "model.norm", "model.w", ".moment1_0"], "a state stands with its parameter"
    row = next(line for line in lines if line.startswith("model.w "))
    assert row.split() == ["model.w", "float32", "[4,", "6]", "2", "2", "96"]
    assert lines[-2] == "extra state: extra_state.own"
    total = 96 + 10 + 96 + 9
    assert lines[-1] == (
        f"total: 4 keys, {len(manifest.catalog)} shards, {total} bytes ({total} B) in 2 files of "
        f"{manifest.file_bytes.sum()} bytes"
    )


def test_inspect_of_one_key_lists_its_shards(checkpoint, capsys):
    catalog = CheckpointDirectory(str(checkpoint)).read_manifest().catalog
    code, out, _ = run(capsys, "inspect", str(checkpoint), "--key", "model.w", "--key", "model.norm")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "model.w"
    rows = np.flatnonzero(catalog.key == catalog.keys.index("model.w"))
    for line, row in zip(lines[1:], rows):
        begin = int(catalog.byte_offset[row])
        rank = int(catalog.rank[row])
        assert line == (
            f"  float32 [0:4, {3 * rank}:{3 * rank + 3}] of [4, 6], rank {rank}, {data_file(checkpoint, rank)}, "
            f"bytes {begin} to {begin + 48}"
        )
    assert lines[3] == "model.norm"
    code, out, err = run(capsys, "inspect", str(checkpoint), "--key", "model.x")
    assert (code, out) == (1, "")
    assert "there is no such key (key 'model.x')" in err


def test_inspect_takes_patterns_and_names_keys_with_the_text(tmp_path, capsys):
    kinds = {f"layers.{layer}.{part}": ("float32", (2,)) for layer in range(3) for part in ("up.w", "up.b", "down.w")}
    save(str(tmp_path / "a"), values_of({**kinds, "support": ("float32", (1,))}), world=1)
    code, out, _ = run(capsys, "inspect", str(tmp_path / "a"), "--key", "layers.1.up.*", "--key", "layers.0.down.w")
    assert code == 0
    named = [line for line in out.splitlines() if line[0] != " "]
    assert named == ["layers.1.up.b", "layers.1.up.w", "layers.0.down.w"]
    shown = json.loads(run(capsys, "inspect", str(tmp_path / "a"), "--json", "--key", "layers.*.b")[1])
    assert [*shown["tensors"]] == [f"layers.{layer}.up.b" for layer in range(3)]
    for command in (["inspect", str(tmp_path / "a"), "--key", "up"], ["map", str(tmp_path / "a"), "up"]):
        code, out, err = run(capsys, *command)
        assert (code, out) == (1, "")
        assert "10 keys such as ['layers.0.up.b', 'layers.0.up.w', 'layers.1.up.b']" in err


def test_inspect_shows_the_degrees_of_the_saving_run(tmp_path, capsys):
    layout = {"world_size": 4, "data": 1, "model": 2, "pipe": 1, "sharding": 2, "sep": 1}
    text = np.frombuffer(json.dumps({"version": 1, "layout": layout}).encode(), np.uint8)
    for name, value in (("a", text), ("b", text[:-1])):
        save(str(tmp_path / name), {"w": np.ones(2, np.float32), "extra_state.common": value}, world=4, step=2)
    code, out, _ = run(capsys, "inspect", str(tmp_path / "a"))
    assert code == 0
    assert out.splitlines()[0] == f"{tmp_path / 'a'}, id 0: saved by 4 ranks (model 2, sharding 2), step 2"
    degrees = {"data": 1, "model": 2, "pipe": 1, "sharding": 2, "sep": 1}
    for more in ([], ["--key", "w"]):
        assert json.loads(run(capsys, "inspect", str(tmp_path / "a"), "--json", *more)[1])["degrees"] == degrees
    code, out, _ = run(capsys, "inspect", str(tmp_path / "b"))
    assert code == 0 and "the degrees of parallelism cannot be read: extra_state.common is damaged" in out
    assert "saved by 4 ranks, step 2" in out and "w  " in out


def test_inspect_of_an_id(checkpoint, capsys):
    save(str(checkpoint), values_of({"other": ("bool", (3,))}), world=1, unique_id=4)
    code, out, _ = run(capsys, "inspect", str(checkpoint))
    assert code == 0
    assert out.splitlines()[0] == f"{checkpoint}, id 4: saved by 1 rank, step unknown; other ids here: [0]"
    assert out.splitlines()[-2] == "extra state: none"
    assert "model.w" in run(capsys, "inspect", str(checkpoint), "--id", "0")[1]


def test_repair_says_what_it_cannot_tell(checkpoint, capsys):
    code, out, err = run(capsys, "repair", str(checkpoint), "--id", "0")
    assert (code, out) == (1, "")
    assert "there is a manifest" in err
    assert "Remedy (FC306): flexckpt verify lists what is damaged" in err
    (checkpoint / "0.manifest").unlink()
    code, out, _ = run(capsys, "repair", str(checkpoint), "--id", "0")
    assert code == 0
    assert "rebuilt the manifest of id 0" in out
    assert "damage that happened before this repair cannot be found" in out
    assert run(capsys, "verify", str(checkpoint))[0] == 0
    assert run(capsys, "repair", str(checkpoint), "--id", "0", "--overwrite")[0] == 0


def test_repair_makes_nothing_whole_that_is_not(tmp_path, capsys):
    """And its errors name the command line's flags: whoever follows them gets further."""
    path = tmp_path / "checkpoint"
    save(str(path), values_of({"a": ("float32", (30,)), "b": ("float32", (30,))}), world=2, step=7)
    first, second = path / data_file(path), path / data_file(path, 1)
    repair = "repair", str(path), "--id", "0"
    flip(first, first.stat().st_size - 1)
    for flags in ((), ("--overwrite",), ("--overwrite", "--fewer-files")):
        code, out, err = run(capsys, *repair, *flags)
        assert (code, out) == (1, "")
        assert "there is a manifest" in err if not flags else "of the shard are damaged (key " in err
    flip(first, first.stat().st_size - 1)
    content = (path / "0.manifest").read_bytes()
    flip(path / "0.manifest", len(content) - 1)
    said = run(capsys, "verify", str(path))[1]
    command = said.partition("rebuild it with flexckpt ")[2].partition("\n")[0].partition(",")[0].rstrip("')")
    assert command == f"repair {path} --id 0 --overwrite"
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    assert run(capsys, *command.replace(str(path), str(copy)).split())[0] == 0
    assert run(capsys, "verify", str(copy))[0] == 0
    assert "Remedy (FC306): --overwrite replaces it" in run(capsys, *repair)[2]
    lost = second.read_bytes()
    second.unlink()
    code, _, err = run(capsys, *repair, "--overwrite")
    assert code == 1
    assert "--fewer-files does without them, and marks the checkpoint as partial" in err
    assert "=True" not in err
    code, out, _ = run(capsys, *repair, "--overwrite", "--fewer-files")
    assert code == 1
    assert "The checkpoint is partial: rebuilt from the data files of 1 of 2 ranks" in out
    assert "; partial: rebuilt from" in run(capsys, "inspect", str(path))[1].splitlines()[0]
    code, out, _ = run(capsys, "ls", str(path))
    assert code == 1
    assert " no " in out
    assert ": partial: rebuilt from" in out
    code, out, _ = run(capsys, "verify", str(path))
    assert code == 1
    assert "repair it again with --overwrite" in out
    second.write_bytes(lost)
    assert run(capsys, *repair, "--overwrite")[0] == 0
    assert run(capsys, "verify", str(path))[0] == 0
    assert (path / "0.manifest").read_bytes() == content


def test_repair_names_the_saves_by_flags(checkpoint, capsys):
    other = checkpoint.parent / "other"
    save(str(other), values_of(KINDS), world=2, step=8)
    (checkpoint / "0.manifest").unlink()
    for rank in (0, 1):
        name = data_file(other, rank)
        (other / name).rename(checkpoint / name)
    code, _, err = run(capsys, "repair", str(checkpoint), "--id", "0")
    assert code == 1
    assert "Remedy (FC306): choose one by --save-token" in err
    token = re.search(r"([0-9a-f]{32}) \(step 8\)", err)[1]
    assert run(capsys, "repair", str(checkpoint), "--id", "0", "--save-token", token)[0] == 0
    assert "step 8" in run(capsys, "inspect", str(checkpoint))[1]


def test_export_verifies_as_asked(checkpoint, tmp_path, capsys):
    catalog = CheckpointDirectory(str(checkpoint)).read_manifest().catalog
    row = catalog.keys.index("model.w")
    row = int(np.flatnonzero(catalog.key == row)[0])
    flip(checkpoint / catalog.file_name(row), int(catalog.byte_offset[row]))
    assert run(capsys, "export", str(checkpoint), str(tmp_path / "a"), "--verify", "off")[0] == 0
    code, _, err = run(capsys, "export", str(checkpoint), str(tmp_path / "b"), "--verify", "full")
    assert code == 1
    assert "'model.w'" in err


def test_the_process_exits_with_1_and_without_paddle(checkpoint):
    (checkpoint / data_file(checkpoint)).unlink()
    code = (
        "import sys; from paddle_flexckpt.cli.main import main; code = main(['verify', sys.argv[1]]); "
        "assert 'paddle' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "is missing" in done.stdout
