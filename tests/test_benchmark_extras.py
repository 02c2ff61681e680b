"""The table of the extras: what it counts, and that the README has a row for each; times are not judged."""

from __future__ import annotations

import re
import zipfile

import pytest

from benchmarks import extras
from tests.documents import ROOT


def make_file(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def make_wheel(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", "Name: some", *(f"Provides-Extra: {name}" for name in names)]
        archive.writestr("some-1.dist-info/METADATA", "\n".join(lines))
    return path


def test_pip_and_links_are_not_counted(tmp_path):
    make_file(tmp_path / "pip" / "core.py", 1000)
    make_file(tmp_path / "pip-25.0.dist-info" / "METADATA", 1000)
    make_file(tmp_path / "pipe" / "core.py", 30)
    make_file(tmp_path / "pipe-1.0.dist-info" / "METADATA", 4)
    make_file(tmp_path / "single.py", 5)
    (tmp_path / "link.py").symlink_to("single.py")
    assert extras.installed(tmp_path) == (1, 39)


def test_a_row_has_two_digits_and_no_zero_minutes():
    rows = [extras.Measured("", 5, 82.3, 0.01), extras.Measured("cpu,test", 110, 1749.0, 3.56)]
    assert extras.table(rows, ["gpu"]).splitlines() == [
        "| extras | packages | MiB | minutes |",
        "|---|---|---|---|",
        "| none | 5 | 82 | 0.1 |",
        "| `cpu,test` | 110 | 1,700 | 3.6 |",
        "| `gpu` | not in the default index | | |",
    ]


def test_an_unknown_extra_is_named_with_those_there_are(monkeypatch, tmp_path, capsys):
    wheel = make_wheel(tmp_path / "some-1-py3-none-any.whl", "cli", "viz")
    monkeypatch.setattr(extras, "build", lambda scratch, python: wheel)
    monkeypatch.setattr(extras, "measure", lambda *arguments: pytest.fail("it installed something"))
    with pytest.raises(SystemExit):
        extras.main(["viz", "visual"])
    assert "no extra of setup.py: visual; there are cli, viz" in capsys.readouterr().err


def test_none_and_all_are_measured_but_those_of_another_index(monkeypatch, tmp_path, capsys):
    wheel = make_wheel(tmp_path / "some-1-py3-none-any.whl", "gpu", "cli", "paddlenlp")
    monkeypatch.setattr(extras, "build", lambda scratch, python: wheel)
    monkeypatch.setattr(extras, "measure", lambda wheel, names, python: extras.Measured(names, 1, 2.0, 3.0))
    assert extras.main([]) == 0
    rows = re.findall(r"^\| (?:`([\w,]+)`|(none)) \|", capsys.readouterr().out, re.M)
    assert ["".join(row) for row in rows] == ["none", "cli", "cpu,paddlenlp", "gpu"]


def test_the_guide_has_a_row_for_each_extra():
    declared = re.findall(r'^    "(\w+)": [\[A-Z]', (ROOT / "setup.py").read_text(), re.M)
    assert len(declared) > 8
    (text,) = re.findall(r"^\| extras \|.*", (ROOT / "docs" / "guide.md").read_text(), re.M | re.S)
    rows = re.findall(r"^\| `([\w,]+)` \|", text, re.M)
    assert sorted(rows) == sorted(extras.combination(name) for name in declared)
