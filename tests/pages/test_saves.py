"""The page of a save: all that its report says, hostile or not."""

from __future__ import annotations

import html

import pytest

from paddle_flexckpt.pages.markup import text
from paddle_flexckpt.pages.saves import save_page
from paddle_flexckpt.report import SaveReport
from tests.pages.samples import HOSTILE, check, holders


def report(ranks: int, **more) -> SaveReport:
    seconds = {"plan": [0.1] * ranks, "write": [1.0] * (ranks - 1) + [4.0]}
    fields = {"path": HOSTILE[0], "unique_id": 0, "keys": 3, "items": 9, "bytes_written": 5, "total_bytes": 5 * ranks}
    fields.update(held_bytes=7 * ranks, imbalance=1.25, seconds={"plan": 0.1, "write": 4.0, "total": 4.2})
    return SaveReport(**fields, rank_bytes=[5] * ranks, rank_seconds=seconds, **more)


@pytest.mark.parametrize("ranks", [1, 8, 1024])
def test_a_straggler_is_named(ranks):
    content = save_page(report(ranks), holders(ranks, job=None), 100, {"loss": 2.5})
    found = check(content)
    assert len(content) < 2_000_000
    assert [each for tag, each in found.texts if tag == "h1"] == ["Checkpoint of step 100"]
    named = f"write: rank {ranks - 1} stands out; rank {ranks - 1} has 4 s, 4.0 times the median."
    assert (named in found.text()) == (ranks > 1)
    assert "2.5" in [each for tag, each in found.texts if tag == "dd"]


def test_replicas_and_warnings_are_told():
    said = report(2, replicas=dict.fromkeys(HOSTILE, "differ by 0.5"), warnings=list(HOSTILE))
    found = check(save_page(said, holders(2, job=None), metrics={HOSTILE[0]: 1.0}))
    for key in HOSTILE:
        shown = html.unescape(text(key))
        assert shown in [each for tag, each in found.texts if tag == "li"]
        assert shown in [each for tag, each in found.texts if tag == "th"]
    assert HOSTILE[0] in [each for tag, each in found.texts if tag == "dt"]
