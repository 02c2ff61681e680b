"""The comparison runs, checks what is loaded, and writes what it says; times are not judged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("paddle.distributed.flex_checkpoint")
from benchmarks import compare, cores, report, run
from benchmarks.ranks import ROOT, part
from tests.ramdisk import memory_directory

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.fixture(scope="module")
def homes():
    """Ranks that outlive a comparison, for the next one."""

    class Kept(compare.Homes):
        def close(self):
            pass

    kept = Kept(None)
    yield kept
    compare.Homes.close(kept)


def test_small_cases_on_one_and_two_ranks(homes, capsys, monkeypatch):
    monkeypatch.setattr(compare, "Homes", lambda *_: homes)
    names = ["one-64", "one-aoa", "one-1024", "two-1024", "two-bf16", "two-v2", "disk-64", "disk-publish"]
    # On ranks that are there for the others.
    monkeypatch.setitem(compare.CASES, "disk-publish", replace(compare.CASES["disk-publish"], ranks=2))
    with memory_directory() as path:
        words = ["--mib", "1", "--scale", "32", "--pairs", "2", "--ram", str(path), "--directory", str(path)]
        compare.main([*words, "--json", str(path / "result.json"), "--cases", *names])
        result = json.loads((path / "result.json").read_text())
        assert [file.name for file in path.iterdir()] == ["result.json"]
        report.plot({"compare": result}, path)
        assert (path / "benchmarks-compare.svg").stat().st_size < 100_000
    assert list(result["cases"]) == names
    assert result["failures"] == []
    rows = {row["what"]: row for row in result["rows"]}
    for what in ("save", "load", "load of columns"):
        assert rows[f"Python calls a tensor: {what}, 1 rank"]["median"] <= 15
        assert {len(seconds) for seconds in result["cases"]["two-1024"]["seconds"][what].values()} == {2}
        assert {"raw", "ours", "Paddle", "Paddle safetensors"} <= set(result["cases"]["two-1024"]["seconds"][what])
        assert rows[f"{what}, times Paddle: 2 ranks, 32 tensors, tmpfs, bf16"]["turns"] == 2
    assert "export / raw: 1 rank, 32 tensors, tmpfs" in rows
    assert rows["publish / raw: 2 ranks, 2 tensors, disk"]["bound"] == ">= 0.9"
    assert "load of columns, times Paddle: 2 ranks, 32 tensors, tmpfs, V2 to TP" in rows
    assert "save, times Paddle, then fsync: 2 ranks, 2 tensors, disk" in rows
    text = report.table({"compare": result}, {"save / raw*": "a reason"})
    assert "## compare" in text
    short = report.summary({"compare": result})
    assert "| load of columns / raw " not in short  # 2 and 32 tensors have no such bound
    assert "| save / raw >= 0.95 |" in short
    assert "1 rank, 2 tensors, tmpfs" in capsys.readouterr().out


@pytest.mark.slow  # starts ranks of its own
def test_another_version_of_the_library_takes_part(tmp_path):
    with memory_directory() as path:
        words = ["--mib", "1", "--scale", "32", "--pairs", "2", "--ram", str(path), "--directory", str(path)]
        words += ["--earlier", str(ROOT), "--cases", "one-64"]
        compare.main([*words, "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failures"] == []
    rows = {row["what"]: row for row in result["rows"]}
    for what in ("save", "save, asynchronous", "load", "load of columns"):
        assert rows[f"{what}, times earlier: 1 rank, 2 tensors, tmpfs"]["bound"] == ">= 0.95"


def test_ranks_with_cores_of_their_own(homes, monkeypatch):
    monkeypatch.setattr(cores, "Homes", lambda *_: homes)
    monkeypatch.setattr(cores, "machine", lambda: {"processors": 1})
    with memory_directory() as path:
        words = ["--ranks", "2", "--mib", "1", "--tensors", "4", "--pairs", "2", "--reshards", "3x65536"]
        cores.main([*words, "--ram", str(path), "--directory", str(path), "--json", str(path / "result.json")])
        result = json.loads((path / "result.json").read_text())
        assert [file.name for file in path.iterdir()] == ["result.json"]
    assert result["failures"] == []
    assert list(result["cases"]) == ["2-tmpfs", "2-disk"]
    assert [list(each["seconds"]) for each in result["cases"].values()] == [
        ["save", "load", "load of columns"],
        ["save", "load"],
    ]
    rows = {row["what"]: row for row in result["rows"]}
    for what in ("save / raw: 2 ranks, 4 tensors, disk", "memcpy / reshard in memory, 2 ranks, 3 tensors"):
        assert rows[what]["turns"] == 2
    assert {row["note"] for row in rows.values()} == {"2 ranks on 1 core"}
    assert {row.note for row in cores.on_cores(1, [compare.row("x", 1.0)])} == {""}


def test_parts_that_are_only_run_where_they_are_asked_for(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(run, "run", lambda part, output, peers: ran.append(part) or True)
    assert run.main(["--output", str(tmp_path)]) == 0
    assert ran == [part for part in run.PARTS if part != "cores"]
    assert run.main(["cores", "--output", str(tmp_path)]) == 0
    assert ran[-1] == "cores"


def test_cases_with_bounds():
    cases = compare.CASES
    assert compare.bound_to_raw(cases["two-1024"], "save") == ">= 0.9"
    assert compare.bound_to_raw(cases["disk-1024"], "save") == ">= 0.95"
    assert compare.bound_to_raw(cases["two-16384"], "save") == ">= 0.6"
    assert compare.bound_to_raw(cases["two-1024"], "load") == ">= 0.95"
    assert compare.bound_to_raw(cases["two-1024"], "load of columns") == ">= 0.8"
    assert compare.bound_to_raw(cases["two-16384"], "load") == ""
    to_dcp = [compare.bound_to_peer(cases["two-1024"], what, "DCP") for what in ("save", "load", "load of columns")]
    assert to_dcp == [">= 5", ">= 5", ">= 6"]
    assert compare.bound_to_peer(cases["two-64"], "save", "DCP") == ">= 1.2"
    assert compare.bound_to_peer(cases["two-64"], "load of columns", "Paddle") == ">= 5"
    assert compare.bound_to_peer(cases["two-1024"], "load of columns", "Paddle") == ">= 20"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["rows", "flat", "transposed"])
def test_parts_are_the_whole(layout, size):
    parts = [part(layout, (8, 16), rank, size) for rank in range(size)]
    if layout == "flat":
        assert [each.flat[0] for each in parts] == [0, *(each.flat[1] for each in parts[:-1])]
        assert parts[-1].flat[1] == 128
        assert size == 1 or parts[0].flat[1] % 16
    else:
        assert sum(each.shape[0] * each.shape[1] for each in parts) == 128
        assert len({each.offset for each in parts}) == size


def test_what_a_part_raises_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(run.PARTS, "describe", ("--no-such-option",))
    assert run.main(["describe", "--output", str(tmp_path)]) == 1
    assert "no-such-option" in (tmp_path / "describe.log").read_text()
    assert "0 of 0 bounded rows" in (tmp_path / "table.md").read_text()
    with pytest.raises(SystemExit):
        run.main(["nothing"])
    assert "there is no benchmark nothing" in capsys.readouterr().err
