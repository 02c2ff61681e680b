"""A part of the suites for the host, with a simulated device current; ``make test-device`` runs all of them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")
from tests.device import exceptions, on_device, plugin, suites

pytestmark = pytest.mark.paddle


@pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools())
def test_a_suite_passes_with_a_device_current():
    status, said = suites.run("tests/memory/test_tensors.py", [])
    assert status == 0, said
    counted = re.search(r"device: (\d+) guarded calls, (\d+) host touches, (\d+) uses of freed memory", said)
    assert counted is not None, said
    assert int(counted[1]) > 100
    assert (counted[2], counted[3]) == ("0", "0")


class _Item:
    def __init__(self, nodeid):
        self.nodeid, self.marks = nodeid, []

    def add_marker(self, mark):
        self.marks.append(mark)


def _collect(monkeypatch, names, *nodeids):
    entries = tuple(exceptions.Exempt(name, "host", "because") for name in names)
    monkeypatch.setattr(exceptions, "EXCEPTIONS", entries)
    monkeypatch.setattr(on_device, "EXCEPTIONS", entries)
    items = [_Item(nodeid) for nodeid in nodeids]
    config = SimpleNamespace(args=["tests"], option=SimpleNamespace(keyword=""))
    on_device.pytest_collection_modifyitems(None, config, items)
    return items


def test_an_exception_has_to_fail_and_says_why(monkeypatch):
    exempt, other = _collect(monkeypatch, ["t.py::test_a[x-*]"], "t.py::test_a[x-1]", "t.py::test_b[x-1]")
    assert other.marks == []
    (mark,) = exempt.marks
    assert mark.mark.name == "xfail"
    assert mark.mark.kwargs["strict"] is True
    assert "because" in mark.mark.kwargs["reason"]


def test_an_exception_that_names_no_test_is_an_error(monkeypatch):
    with pytest.raises(pytest.UsageError, match="t.py::test_gone"):
        _collect(monkeypatch, ["t.py::test_gone"], "t.py::test_b")


def test_an_exception_of_a_file_that_is_not_run_is_none(monkeypatch):
    assert _collect(monkeypatch, ["other.py::test_gone"], "t.py::test_b")[0].marks == []
