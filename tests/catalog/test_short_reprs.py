"""The repr of a report is short."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paddle_flexckpt.catalog.short_reprs import ShortRepr
from paddle_flexckpt.report import LoadReport


@dataclass(frozen=True)
class Inner(ShortRepr):
    names: list[str]


@dataclass(frozen=True)
class Outer(ShortRepr):
    path: str
    inner: Inner
    none: None = None
    counts: dict[str, int] = field(default_factory=dict)
    zero: int = 0


def test_what_is_empty_is_left_out_and_what_is_long_is_counted():
    names = [f"name{number}" for number in range(100)]
    assert repr(Outer("a", Inner(["b"]))) == "Outer(path='a', inner=Inner(names=['b']))"
    assert repr(Outer("a" * 99, Inner(names), counts=dict.fromkeys(names, 1))) == (
        f"Outer(path='{'a' * 59}..., inner=Inner(names=<100 entries>), counts=<100 entries>)"
    )


def test_a_report_of_many_tensors_is_a_line():
    unexpected = [f"layers.{number}.w" for number in range(999)]
    report = LoadReport("run", 0, 9, [], unexpected, {}, {}, comm_method="direct", comm_reason="auto: a long reason")
    assert repr(report).startswith("LoadReport(source='run', unique_id=0, keys=9, unexpected=<999 entries>")
    assert len(repr(report)) < 130 and "reason" not in repr(report)
    report = replace(report, comm_reason="")
    assert report == LoadReport(
        "run", 0, 9, [], unexpected, {}, {}, comm_method="direct", comm_reason=report.comm_reason
    )
