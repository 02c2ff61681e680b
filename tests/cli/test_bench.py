"""flexckpt bench: its line, its JSON, and that a rehearsal takes what it found."""

from __future__ import annotations

import json

import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from tests.tools.rehearsed import save
from tests.tools.test_models import decoder


def test_a_line_and_json(tmp_path, capsys):
    command = ["bench", str(tmp_path), "--bytes", "1MiB", "--threads", "2"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 2 threads write ")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["nbytes"], found["threads"]) == (str(tmp_path), 1 << 20, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path, capsys):
    assert main(["bench", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.startswith("flexckpt bench: there is no directory")


@pytest.fixture
def rehearsed(tmp_path, capsys):
    """Rehearses with options; returns the report."""
    save(tmp_path / "one", Layout(decoder(), parse_strategy("tp=2")))
    found = {"path": "there", "nbytes": 1, "threads": 1, "latency_seconds": 9.0, "request_seconds": 0.25}
    found.update(write_bytes_per_second=2000.0, read_bytes_per_second=1000.0)
    (tmp_path / "found.json").write_text(json.dumps(found))

    def run(*options: str):
        command = ["rehearse", str(tmp_path / "one"), "--to", "tp=2", "--json", *options]
        assert main([*command, "--probe", str(tmp_path / "found.json")]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_rehearsal_takes_what_was_found(rehearsed):
    report = rehearsed("--cooperative", "--ranks-per-node", "2")
    ranks = report["ranks"]
    assert report["seconds"]["direct"] == max(each["bytes_read"] / 500 + each["reads"] * 0.5 for each in ranks)
    assert report["seconds"]["cooperative"] > 0
    saved = rehearsed("--save")
    assert saved["seconds"] == {"write": max(saved["ranks"]["bytes_written"]) / 2000}


def test_a_rehearsal_probes_a_directory(tmp_path, rehearsed, capsys, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.tools.probe.probe.__defaults__", (1 << 20, 2))
    command = ["rehearse", str(tmp_path / "one"), "--to", "tp=2", "--probe", str(tmp_path)]
    assert main(command) == 0
    assert "; direct: " in capsys.readouterr().out
    assert main([*command, "--gbps", "1"]) == 1
    assert "give one of them" in capsys.readouterr().err
    assert main([*command, "--ranks-per-node", "0"]) == 1
