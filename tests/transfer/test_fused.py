"""Fused parameters: which lie otherwise in the source, what is told of it, and what statements put it right."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import CUT, NATURAL, Order, Problem
from paddle_flexckpt.transfer.fused import FusedMismatch, find_mismatch, mending_statements
from tests.transfer.samples import Part, catalog, columns

FFN, QKV = "fused_ffn", "fused_qkv, num_heads=4, num_key_value_groups=2"


def ffn(parts, axis=1, statement=FFN):
    return Order(parts, axis, statement)


def target(extent=6, order=None, rank=3):
    """The first part of ``w`` on a rank, behind another target and in a table of three axes."""
    here = Part("w", (4, 12), shape=(4, extent), order=order, rank=rank)
    return catalog(Part("other", (2, 3, 5), rank=rank), here)


def source(extents=(6, 6), order=None, key="w"):
    """The whole of ``w``, cut, among other keys, with a part without elements, and in a table of four axes."""
    parts = columns(key, extents, order=order)
    return catalog(
        Part("wide", (2, 3, 5, 7)),
        Part("first", (4, 12), shape=(4, 1)),
        *parts,
        Part(key, (4, 12), shape=(0, 5), rank=len(extents), order=order),
        Part("last", (4, 12), shape=(4, 2), rank=len(extents)),
    )


def found(here, there, own=6, cuts=(6, 6), key="w"):
    table = source(cuts, there, key)
    return find_mismatch(target(own, here), 1, table, table.keys.index(key))


def mismatch(there, here, statement=FFN, assumed=False, key="w"):
    return FusedMismatch("w", 3, key, 1, 12, there, here, statement, assumed)


@pytest.mark.parametrize(("here", "there", "own", "cuts"), [
    (None, None, 6, (3,) * 4),
    (NATURAL, None, 6, (3,) * 4),
    (None, ffn(4), 6, (3,) * 4),
    (CUT, CUT, 6, (3,) * 4),
    (ffn(2), None, 6, (6, 6)),
    (ffn(2), ffn(2), 6, (4, 4, 4)),
    (ffn(1), NATURAL, 6, (4, 4, 4)),
    (ffn(1), CUT, 6, (12,)),
    (NATURAL, ffn(1), 6, (6, 6)),
    (CUT, ffn(1), 12, (6, 6)),
    (ffn(2), ffn(4), 0, (3,) * 4),
    (ffn(2), CUT, 6, ()),
    (ffn(2), ffn(4), 6, ()),
    (ffn(1), None, 12, (12,)),
])  # fmt: skip
def test_what_lies_alike_or_says_nothing_is_no_mismatch(here, there, own, cuts):
    assert found(here, there, own, cuts) is None


@pytest.mark.parametrize(("here", "there", "own", "cuts", "expected"), [
    (ffn(2), ffn(4), 6, (3,) * 4, mismatch(4, 2)),
    (ffn(2), ffn(4), 6, (12,), mismatch(4, 2)),
    (ffn(2), NATURAL, 6, (3,) * 4, mismatch(1, 2)),
    (ffn(2), CUT, 6, (12,), mismatch(1, 2)),
    (ffn(2), None, 6, (12,), mismatch(1, 2)),
    (ffn(2), None, 6, (3,) * 4, mismatch(4, 2, assumed=True)),
    (ffn(2), None, 6, (4, 8), mismatch(None, 2, assumed=True)),
    (ffn(2), None, 6, (6, 4, 2), mismatch(None, 2, assumed=True)),
    (NATURAL, ffn(4), 6, (3,) * 4, mismatch(4, 1)),
    (CUT, ffn(4), 12, (3,) * 4, mismatch(4, 1)),
    (ffn(2), ffn(4, 1, None), 6, (3,) * 4, mismatch(4, 2)),
    (ffn(2, 1, None), ffn(4), 6, (3,) * 4, mismatch(4, 2)),
    (ffn(2, 1, None), ffn(4, 1, None), 6, (3,) * 4, mismatch(4, 2, None)),
    (ffn(2, 1, None), NATURAL, 6, (3,) * 4, mismatch(1, 2, None)),
    (ffn(2, 1, None), None, 6, (3,) * 4, mismatch(4, 2, None, assumed=True)),
    (ffn(2, 1, "fused_qkv,num_heads = 4 , num_key_value_groups=2, axis=1"),
     ffn(4, 1, "num_key_value_groups=2 , fused_qkv,num_heads=4"), 6, (3,) * 4,
     mismatch(4, 2, "fused_qkv,num_heads = 4 , num_key_value_groups=2, axis=1")),
])  # fmt: skip
def test_another_number_of_parts_is_a_mismatch(here, there, own, cuts, expected):
    assert repr(found(here, there, own, cuts)) == repr(expected)


def test_parts_of_one_element_count():
    here = catalog(Part("w", (1, 4), shape=(1, 2), order=ffn(2)))
    found = find_mismatch(here, 0, catalog(*columns("w", [1] * 4, rows=1)), 0)
    assert found.summary() == "4 parts -> 2 parts"


def test_a_mismatch_names_the_key_that_the_source_has():
    assert found(ffn(2), ffn(4), key="w.other") == mismatch(4, 2, key="w.other")


def test_a_mismatch_is_along_the_axis_of_the_rule():
    here = catalog(Part("w", (12, 4), shape=(6, 4), order=ffn(2, 0), rank=1))
    parts = [Part("w", (12, 4), shape=(3, 4), offset=(3 * n, 0), rank=n, order=ffn(4, 0)) for n in range(4)]
    there = catalog(Part("wide", (2, 3, 4)), *parts)
    assert find_mismatch(here, 0, there, 1) == FusedMismatch("w", 1, "w", 0, 12, 4, 2, "fused_ffn, axis=0")
    unknown = catalog(Part("wide", (2, 3, 4)), *(Part(p.key, p.whole, shape=p.shape, rank=p.rank) for p in parts))
    found = find_mismatch(here, 0, unknown, 1)
    assert found == FusedMismatch("w", 1, "w", 0, 12, 4, 2, "fused_ffn, axis=0", assumed=True)


def test_shards_of_a_source_without_a_rule_are_refused_with_both_statements():
    for statement, tags in ((FFN, FFN), (QKV, QKV), (None, "fused_ffn")):
        rule = ffn(2, 1, statement)
        assert found(rule, CUT, 6, (8, 4)) == Problem(
            "a parameter is fused here, and the source has its shards without a rule that says how they lie",
            "w",
            3,
            expected=f"a FusedAxis at the save, or whole tensors; here it is {rule.describe()}",
            got="parts of [4, 8] along axis 1",
            remedy=f'mark it where it is saved; or give an AOA statement: "w -> w, {tags}" takes every shard for a '
            'part, "w -> w" takes the elements as they are',
            code="FC207",
        )


def test_shards_of_a_target_without_a_rule_are_refused():
    rule = ffn(4, 1, QKV)
    assert found(CUT, rule) == Problem(
        "a parameter is fused in the source, and here its shards have no rule that says how they lie",
        "w",
        3,
        expected=f"a FusedAxis here too, or a whole tensor; in the source it is {rule.describe()}",
        got="parts of 6 along axis 1",
        remedy=f"mark it: FusedAxis(1, {QKV!r}) if every rank holds its part of all that is fused, "
        f"FusedAxis(1, {QKV!r}, parts=1) if the whole is in natural order",
        code="FC207",
    )


@pytest.mark.parametrize("there", [ffn(4, 0), ffn(4, 1, QKV), ffn(4, 1, QKV.replace("4", "8"))])
@pytest.mark.parametrize("here", [ffn(2), ffn(2, 1, "fused_qkv, num_heads=4")])
def test_rules_that_contradict_each_other_are_refused(here, there):
    assert found(here, there) == Problem(
        "source and target say different things about a fused parameter",
        "w",
        3,
        expected=here.describe(),
        got=there.describe(),
        remedy="correct the FusedAxis of one of them",
        code="FC207",
    )


def test_the_report_says_what_becomes_of_it():
    assert mismatch(4, 2).summary() == "4 parts -> 2 parts"
    assert mismatch(None, 2).summary() == "parts of several sizes -> 2 parts"


@pytest.mark.parametrize(("other_name", "convert"), [(False, 'fused="convert", or with '), (True, "")])
def test_a_mismatch_that_may_not_be_mended_is_a_problem_that_names_the_statement(other_name, convert):
    problem = mismatch(4, 2, key="v").problem(other_name)
    assert problem == Problem(
        "the parts of a fused parameter lie side by side on every rank, so another cut would permute them",
        key="w",
        rank=3,
        expected="parts of 6 along axis 1, as here",
        got="parts of [3]",
        remedy=f'load with {convert}the AOA statement "v -> w, fused_ffn"',
        code="FC207",
    )
    assert mismatch(4, 2).problem() == mismatch(4, 2).problem(False)


def test_a_mismatch_without_a_statement_says_how_to_take_it_as_it_is():
    problem = mismatch(None, 4, None, key="v").problem()
    assert (problem.expected, problem.got) == ("parts of 3 along axis 1, as here", "parts of several sizes")
    assert problem.remedy == (
        "no AOA statement is known for this parameter: load it under the degree of the save, or take it as it is "
        'stored, by the AOA statement "v -> w"'
    )


def test_statements_are_about_parameters_and_each_is_there_once():
    def one(key, found, statement=FFN):
        return FusedMismatch(key, 0, found, 1, 12, 4, 2, statement)

    others = [
        one("w.moment1_0", "v.moment1_0"), one("w", "v"), one("b", "b", QKV), one("c", "c", None), one("a.x_0", "a.x_0")
    ]  # fmt: skip
    assert mending_statements(others, {"w", "v", "a"}) == ("a -> a, fused_ffn", f"b -> b, {QKV}", "v -> w, fused_ffn")
    assert mending_statements(others[-1:], set()) == ("a.x_0 -> a.x_0, fused_ffn",)
    assert mending_statements([], set()) == ()
