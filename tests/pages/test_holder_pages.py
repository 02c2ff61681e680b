"""The page of who holds what: parts where they are, hostile keys, and sizes with many ranks and keys."""

from __future__ import annotations

import html
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.pages.holder_pages import MOST_DRAWN, cut_axes, holders_page, plane, save_page
from paddle_flexckpt.pages.markup import text
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.tools.holders import HoldersReport, Part, TensorHolders
from tests.pages.samples import HOSTILE, Page, check, holders


@pytest.mark.parametrize("ranks", [1, 8, 1024])
@pytest.mark.parametrize("job", [None, 4])
def test_a_page_is_sound_and_small_for_few_and_for_many_ranks(ranks, job):
    seconds = {"plan": [0.1] * ranks, "write": [2.0] * (ranks - 1) + [9.0]}
    content = holders_page(holders(ranks, job=job), seconds)
    found = check(content)
    assert len(content) < 2_000_000
    headings = [text for tag, text in found.texts if tag == "h2"]
    assert ("Bytes needed by each rank" in headings) == bool(job)
    if ranks > 1:
        assert f"write: rank {ranks - 1} stands out; rank {ranks - 1} has 9 s, 4.5 times the median." in found.text()
    shown = [each for tag, each in found.texts if tag in ("h3", "th")]
    for key in HOSTILE:
        assert any(html.unescape(text(key)) in each for each in shown)


def test_the_pictures_come_first_and_name_the_ranks_where_there_is_room():
    def page_of(columns: int, copies: int) -> Page:
        parts = [
            Part([column, 0], [1, 8], None, 8, list(range(column, columns * copies, columns)), ["a"])
            for column in range(columns)
        ]
        every = {"w": TensorHolders("int8", [columns, 8], parts, [])}
        transposed = [replace(p, global_offset=p.global_offset[::-1], local_shape=p.local_shape[::-1]) for p in parts]
        every["x"] = TensorHolders("int8", [8, columns], transposed, [])
        return check(holders_page(HoldersReport("c", 0, 7, 1, "", every, [8 * columns])))

    found = page_of(4, 8)
    assert [each for tag, each in found.texts if tag == "h2"][:2] == ["Overview", "Parameters"]
    rows = [
        f"{first}, {first + 4}, {first + 8}, {first + 12}, {first + 16}, {first + 20} and 2 more" for first in range(4)
    ]
    assert [each for tag, each in found.texts if tag == "text"][:8] == [*rows, *(f"{first} +7" for first in range(4))]
    assert {"0+", "11+"} <= {each for tag, each in page_of(12, 8).texts if tag == "text"}


def test_of_many_keys_the_first_are_shown_and_the_rest_counted():
    report = holders(8, tuple(f"w{n:05}" for n in range(20_000)))
    content = holders_page(report)
    found = check(content)
    assert len(content) < 500_000
    assert f"{20_000 - MOST_DRAWN} smaller ones are not drawn" in found.text()
    assert "of 20000 parameters; the text and --json have all" in found.text()


def test_the_largest_parameters_are_drawn_the_largest_first():
    sizes = {f"w{n:02}": n + 1 for n in range(20)}
    tensors = {key: TensorHolders("int8", [n], [Part([0], [n], None, n, [0])], []) for key, n in sizes.items()}
    found = check(holders_page(HoldersReport("c", 0, 7, 1, "", tensors, [210])))
    drawn = [each.partition(" ")[0] for tag, each in found.texts if tag == "h3"]
    assert drawn == sorted(sizes, reverse=True)[:MOST_DRAWN]  # the largest first


def adam(parts: dict[str, list[Part]]) -> HoldersReport:
    """A parameter of 4 elements, with the states of AdamW; ``parts``: of some of them."""
    whole = [Part([0], [4], None, 8, [0], ["a"])]
    states = {"": "bfloat16", ".moment1_0": "float32", ".moment2_0": "float32", ".w_0": "float32"}
    tensors = {f"w{name}": TensorHolders(dtype, [4], parts.get(name, whole), []) for name, dtype in states.items()}
    tensors["w.beta1_pow_acc_0"] = TensorHolders("float32", [1], [Part([0], [1], None, 4, [0], ["a"])], [])
    return HoldersReport("c", 0, 7, 2, "", dict(sorted(tensors.items())), [36, 0])


def test_states_that_are_cut_as_their_parameter_share_its_drawing():
    # A flattened range that is all of the box is no other cut.
    found = check(holders_page(adam({".w_0": [Part([0], [4], [0, 4], 16, [0], ["b"])]})))
    assert [each for tag, each in found.texts if tag == "h3"] == ["w [4]"]
    names = "parameter bfloat16; moment1_0, moment2_0, master weight (w_0) float32"
    assert [each for tag, each in found.texts if tag in ("p", "td") and "moment1" in each] == [names] * 2
    titles = [each for tag, each in found.texts if tag == "title" and each.startswith("[")]
    assert titles == ["[0:4]: rank 0, 40 B"]
    assert [each for tag, each in found.texts if tag in ("th", "td")][-14:] == [
        *("w", names, "saved", "[0:4]", "0", "40 B", "a, b"),
        *("w", "beta1_pow_acc_0 float32", "saved", "[0:1]", "0", "4 B", "a"),
    ]


def test_states_that_are_cut_otherwise_have_a_drawing_of_their_own():
    halves = [Part([0], [4], [2 * r, 2 * r + 2], 8, [r]) for r in range(2)]
    found = check(holders_page(adam(dict.fromkeys((".moment1_0", ".moment2_0", ".w_0"), halves))))
    assert [each for tag, each in found.texts if tag == "h3"] == ["w [4]"]
    names = [each for tag, each in found.texts if tag == "p" and "float" in each]
    assert names == ["parameter bfloat16", "moment1_0, moment2_0, master weight (w_0) float32"]
    titles = [each for tag, each in found.texts if tag == "title" and each.startswith("[")]
    assert titles == [
        "[0:4]: rank 0, 8 B",
        "[0:4] flattened 0:2: rank 0, 24 B",
        "[0:4] flattened 2:4: rank 1, 24 B",
    ]


def test_a_state_alone_is_drawn_under_its_parameter():
    tensors = {"w.moment1_0": TensorHolders("float32", [1], [Part([0], [1], None, 4, [0])], [])}
    found = check(holders_page(HoldersReport("c", 0, 7, 1, "", tensors, [4])))
    assert [each for tag, each in found.texts if tag == "h3"] == ["w [1]"]
    assert "moment1_0 float32" in [each for tag, each in found.texts if tag == "p"]


def rectangles(parts: list[Part], shape: tuple[int, ...]) -> np.ndarray:
    """Who holds each element of the plane that is drawn, or -1; each once."""
    axes = cut_axes(parts, shape)
    found = np.full([shape[axis] if axis >= 0 else 1 for axis in axes], -1)
    for area in plane(parts, shape):
        place = slice(area.row[0], sum(area.row)), slice(area.column[0], sum(area.column))
        assert (found[place] == -1).all()
        found[place] = area.colour
    return found


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ((), [Part([], [], None, 4, [3])], [[3]]),
        ((4,), [Part([0], [1], None, 1, [0]), Part([1], [3], None, 3, [1, 5])], [[0, 1, 1, 1]]),
        ((2, 4), [Part([0, 2 * r], [2, 2], None, 4, [r]) for r in range(2)], [[0, 0, 1, 1]] * 2),
        (
            (2, 4),
            [Part([0, 0], [2, 4], [0, 3], 3, [0]), Part([0, 0], [2, 4], [3, 8], 5, [1])],
            [[0] * 3 + [1], [1] * 4],
        ),
        ((3, 2, 2), [Part([r, 0, 0], [1, 2, 2], None, 4, [r]) for r in range(3)], [[0, 0], [1, 1], [2, 2]]),
        ((2, 0), [Part([0, 0], [2, 0], None, 0, [0])], [[], []]),
    ],
)
def test_parts_are_drawn_where_they_lie(shape, parts, expected):
    assert rectangles(parts, shape).tolist() == expected


def test_axes_that_are_cut_come_first():
    parts = [Part([0, 0, r, 0], [2, 3, 1, 5], None, 1, [r]) for r in range(4)]
    assert cut_axes(parts, (2, 3, 4, 5)) == (2, 3)
    assert cut_axes([Part([0, 0, 0, 0], [1, 3, 1, 5], None, 1, [0])], (2, 3, 4, 5)) == (0, 2)


# -- the page of a save ----------------------------------------------------------------------------------------------


def report_of_save(ranks: int, **more) -> SaveReport:
    seconds = {"plan": [0.1] * ranks, "write": [1.0] * (ranks - 1) + [4.0]}
    fields = {"path": HOSTILE[0], "unique_id": 0, "keys": 3, "items": 9, "bytes_written": 5, "total_bytes": 5 * ranks}
    fields.update(held_bytes=7 * ranks, imbalance=1.25, seconds={"plan": 0.1, "write": 4.0, "total": 4.2})
    return SaveReport(**fields, rank_bytes=[5] * ranks, rank_seconds=seconds, **more)


@pytest.mark.parametrize("ranks", [1, 8, 1024])
def test_a_straggler_of_a_save_is_named(ranks):
    content = save_page(report_of_save(ranks), holders(ranks, job=None), 100, {"loss": 2.5})
    found = check(content)
    assert len(content) < 2_000_000
    assert [each for tag, each in found.texts if tag == "h1"] == ["Checkpoint of step 100"]
    named = f"write: rank {ranks - 1} stands out; rank {ranks - 1} has 4 s, 4.0 times the median."
    assert (named in found.text()) == (ranks > 1)
    assert "2.5" in [each for tag, each in found.texts if tag == "dd"]


def test_replicas_and_warnings_are_told():
    said = report_of_save(2, replicas=dict.fromkeys(HOSTILE, "differ by 0.5"), warnings=list(HOSTILE))
    found = check(save_page(said, holders(2, job=None), metrics={HOSTILE[0]: 1.0}))
    for key in HOSTILE:
        shown = html.unescape(text(key))
        assert shown in [each for tag, each in found.texts if tag == "li"]
        assert shown in [each for tag, each in found.texts if tag == "th"]
    assert HOSTILE[0] in [each for tag, each in found.texts if tag == "dt"]
