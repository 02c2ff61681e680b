"""Agreement: calls in which ranks differ are refused, with a text that says how they differ."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.transfer.agreement import Solo, check_coordinator, check_heads, check_same


def heads(*objects):
    return [json.dumps(each).encode() for each in objects]


def refusal(said, context="", ranks=None):
    with pytest.raises(ValidationError) as caught:
        check_same(said, context, ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("coordinator", "good"), [(0, True), (2, True), (3, False), (-1, False), (1.0, False), ("1", False)]
)
def test_a_coordinator_is_a_member(coordinator, good):
    comm = SimpleNamespace(size=3)
    if good:
        check_coordinator(comm, coordinator)
        return
    with pytest.raises(ValidationError) as caught:
        check_coordinator(comm, coordinator)
    assert f"0 to 2; got {coordinator!r}" in str(caught.value)


def test_a_process_that_works_for_itself_is_all_ranks():
    solo = Solo()
    assert (solo.rank, solo.position, solo.size, solo.ranks) == (0, 0, 1, (0,))
    assert solo.together(lambda: ("result", b"said"), "what") == ("result", [b"said"])
    with pytest.raises(ZeroDivisionError):
        solo.together(lambda: (1 // 0, b""))


def test_ranks_that_say_the_same_go_on():
    check_same([b"anything"] * 3, "")
    check_same(heads({"call": "load", "step": 1}, {"step": 1, "call": "load"}), "")
    check_same(heads({"call": "load", "context": "here"}, {"call": "load", "context": "there"}), "")
    check_same(heads({"call": "load"}, {"call": "load", "context": "there"}), "")


def test_what_differs_is_told_once_and_sorted():
    said = heads({"call": "load", "a": 1, "b": 2}, {"call": "load", "a": 1, "b": 1}, {"call": "load", "a": 1, "b": 2})
    text = refusal(said, "cannot load")
    assert text.startswith('cannot load: ranks disagree: {"b": 1}; {"b": 2}. Remedy (FC502): ')
    assert "same arguments on every rank" in text and "unique_id" in text
    text = refusal(said, "cannot load", ranks=[4, 7, 9])
    assert text.startswith('cannot load: ranks disagree: ranks 4, 9: {"b": 2}; rank 7: {"b": 1}. Remedy (FC502): ')
    said = heads({"call": "load", "context": "loading here", "a": 1}, {"call": "load", "context": "there"})
    text = refusal(said, "cannot load")
    assert text.startswith('loading here: ranks disagree: {"context": "loading here", "a": 1}; {"context": "there"}.')


def test_what_a_rank_does_not_say_differs_from_null():
    for said in (({"call": "load", "a": None}, {"call": "load"}), ({"call": "load"}, {"call": "load", "a": None})):
        assert refusal(heads(*said)).startswith('ranks disagree: {"a": null}; {}. ')


def test_what_is_no_json_object_is_told_as_it_is():
    for said in ([b"[1]", b"[2]"], [b"[1]", b'{"a": 1}']):
        text = refusal(said, "cannot")
        assert text.startswith("cannot: ranks disagree: " + "; ".join(sorted(each.decode() for each in said)) + ". ")


def test_ranks_in_different_calls_are_told_first():
    said = heads({"call": "save", "a": 1}, {"call": "load"}, {"call": "save", "a": 2})
    text = refusal(said, "cannot")
    assert text.startswith(
        "cannot: ranks do not make the same call: ranks 0, 2: save; rank 1: load. Remedy (FC502): make the same"
    )
    text = refusal([*said[:2], b"no json", b"[1]", b'{"a": 1}'], "", ranks=[4, 7, 9, 11, 12])
    assert "rank 4: save; rank 7: load; ranks 9, 11-12: a later step of a call" in text


def test_the_first_fields_are_compared_and_the_others_returned_by_field():
    answers = [join([b"same", b"a0", b"b0"]), join([b"same", b"a1", b"b1"])]
    assert check_heads(answers, "") == [(b"a0", b"a1"), (b"b0", b"b1")]
    assert check_heads([join([b"same"])] * 2, "") == []
    differing = [join([each, b"x"]) for each in heads({"call": "load", "a": 1}, {"call": "save"})]
    with pytest.raises(ValidationError, match="cannot: ranks do not make the same call: rank 3: load; rank 8: save"):
        check_heads(differing, "cannot", [3, 8])
    with pytest.raises(ValidationError, match=r"cannot: ranks disagree: ; \[1\]\. "):
        check_heads([join([b"[1]", b"x"]), b""], "cannot")
    with pytest.raises(ValidationError, match="same call: rank 0: load; rank 1: a later step"):
        check_heads([differing[0], b""], "cannot")
