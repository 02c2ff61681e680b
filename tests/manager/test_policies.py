"""Policies: what each keeps, and what holds for all of them together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager.policies import (
    KeepBest,
    KeepEvery,
    KeepInterval,
    KeepLatest,
    SaveEvery,
    SaveInterval,
    StepRecord,
    best_first,
    steps_to_remove,
)

# Few values, so that equal metrics and times are frequent.
METRICS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]), st.floats(-2, 2))
HISTORIES = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.one_of(st.integers(0, 100).map(float), st.floats(0, 100)),
        st.dictionaries(st.sampled_from(["loss", "score"]), METRICS),
    ),
    max_size=12,
    unique_by=lambda each: each[0],
).map(lambda each: [StepRecord(*fields) for fields in each])
POLICY = st.one_of(
    st.builds(KeepLatest, st.integers(1, 4)),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepBest, st.integers(1, 3), st.sampled_from(["loss", "score"]), st.sampled_from(["min", "max"])),
    st.builds(KeepInterval, st.integers(1, 40)),
)
POLICIES = st.lists(POLICY, min_size=1, max_size=3)


def left(records, policies, newest=None):
    removed = steps_to_remove(records, policies, newest)
    assert removed == sorted(set(removed))
    assert set(removed) <= {record.step for record in records}
    return [record for record in records if record.step not in removed]


def steps(records):
    return sorted(record.step for record in records)


def run(saves, policies):
    """What is left after saves one after the other, with retention after each."""
    there: list[StepRecord] = []
    for record in saves:
        there = left([*there, record], policies, record.step)
    return there


def in_order(count: int, apart: float = 10.0, losses=None) -> list[StepRecord]:
    return [StepRecord(100 * i, apart * i, {} if losses is None else {"loss": losses[i]}) for i in range(count)]


def test_keep_latest():
    assert steps(run(in_order(6), [KeepLatest(2)])) == [400, 500]


def test_keep_every():
    assert steps(run(in_order(8), [KeepEvery(300)])) == [0, 300, 600, 700]


def test_keep_best():
    assert steps(run(in_order(6, losses=[3, 1, 2, 5, 1, 4]), [KeepBest(2)])) == [100, 400, 500]
    assert steps(run(in_order(6, losses=[3, 1, 2, 5, 1, 4]), [KeepBest(1)])) == [400, 500]
    assert steps(run(in_order(6, losses=[3, 1, 2, 5, 1, 4]), [KeepBest(1, "loss", "max")])) == [300, 500]


def test_keep_best_without_the_metric_keeps_nothing_but_the_newest():
    assert steps(run(in_order(4), [KeepBest(3)])) == [300]
    assert steps(run(in_order(4, losses=[math.nan, 2, math.nan, math.nan]), [KeepBest(3)])) == [100, 300]


def test_keep_interval():
    assert steps(run(in_order(8), [KeepInterval(25)])) == [0, 300, 600, 700]
    assert steps(run(in_order(8), [KeepInterval(10)])) == [100 * i for i in range(8)]


def test_the_union_of_all():
    losses = [9, 8, 7, 6, 1, 5, 4, 3]
    assert steps(run(in_order(8, losses=losses), [KeepLatest(2), KeepEvery(300), KeepBest(1)])) == [
        0, 300, 400, 600, 700,
    ]  # fmt: skip


def test_without_policies_nothing_goes():
    assert steps_to_remove(in_order(5), []) == []
    assert steps_to_remove([], [KeepLatest(1)]) == []


def test_after_a_rollback_the_step_saved_last_is_kept_besides_the_highest():
    records = [StepRecord(100, 1.0), StepRecord(200, 2.0), StepRecord(300, 3.0), StepRecord(150, 4.0)]
    assert steps_to_remove(records, [KeepLatest(1)]) == [100, 200]
    # The clock went back: the caller knows better.
    records[-1] = StepRecord(150, 0.0)
    assert steps_to_remove(records, [KeepLatest(1)], newest=150) == [100, 200]
    assert steps_to_remove(records, [KeepLatest(1)]) == [100, 150, 200]


@given(HISTORIES, POLICIES)
def test_the_newest_is_never_removed(records, policies):
    kept = {record.step for record in left(records, policies)}
    if records:
        assert max(record.step for record in records) in kept
        last = max(record.time for record in records)
        assert kept & {record.step for record in records if record.time == last}


@given(HISTORIES, POLICIES)
def test_what_any_policy_keeps_is_kept_and_nothing_else(records, policies):
    ordered = sorted(records, key=lambda record: record.step)
    kept = {record.step for record in left(records, policies)}
    wanted = {step for policy in policies for step in policy.kept(ordered)}
    assert wanted <= kept
    assert len(kept - wanted) <= 2  # the highest step, and the one saved last


@given(HISTORIES, POLICIES, POLICY)
def test_another_policy_never_removes_more(records, policies, another):
    assert set(steps_to_remove(records, [*policies, another])) <= set(steps_to_remove(records, policies))


@given(HISTORIES, POLICIES)
def test_the_order_of_records_and_policies_does_not_matter(records, policies):
    assert steps_to_remove(records[::-1], policies[::-1]) == steps_to_remove(records, policies)


@given(HISTORIES, POLICIES)
def test_a_second_retention_removes_nothing(records, policies):
    assert steps_to_remove(left(records, policies), policies) == []


@given(HISTORIES, POLICIES)
def test_retention_after_each_save_leaves_what_one_at_the_end_leaves(records, policies):
    saves = sorted(records, key=lambda record: record.step)
    times = sorted(record.time for record in records)
    saves = [StepRecord(record.step, time, record.metrics) for record, time in zip(saves, times)]
    assert steps(run(saves, policies)) == steps(left(saves, policies, saves[-1].step if saves else None))


@given(HISTORIES, st.sampled_from(["min", "max"]))
def test_best_first_is_sorted_and_leaves_out_what_has_no_number(records, mode):
    by_step = {record.step: record.metrics for record in records}
    order = best_first(records, "loss", mode)
    assert sorted(order) == sorted(s for s, m in by_step.items() if "loss" in m and not math.isnan(m["loss"]))
    for better, worse in zip(order, order[1:]):
        a, b = by_step[better]["loss"], by_step[worse]["loss"]
        assert (a < b if mode == "min" else a > b) or (a == b and better > worse)


def test_save_every():
    assert [step for step in range(7) if SaveEvery(3).wants(step, 0.0)] == [0, 3, 6]
    assert not SaveEvery(3).uses_clock


def test_save_interval():
    policy = SaveInterval(60)
    assert [policy.wants(1, seconds) for seconds in (0.0, 59.9, 60.0, 1e9)] == [False, False, True, True]
    assert policy.uses_clock


@pytest.mark.parametrize("make", [SaveEvery, KeepLatest, KeepEvery, KeepBest])
@pytest.mark.parametrize("count", [0, -1, 1.0, "3", True, None])
def test_counts_are_positive_integers(make, count):
    with pytest.raises(ValidationError, match=rf"{make.__name__}: \w+ has to be an integer >= 1; got {count!r}"):
        make(count)


@pytest.mark.parametrize("metric", [3, None, ["loss"]])
def test_a_metric_is_a_name(metric):
    with pytest.raises(ValidationError, match=r"KeepBest: metric has to be the name of one of metrics=; got"):
        KeepBest(2, metric)


@pytest.mark.parametrize("make", [SaveInterval, KeepInterval])
@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan, "3", True, None])
def test_seconds_are_positive_numbers(make, seconds):
    with pytest.raises(ValidationError, match="seconds has to be a positive number"):
        make(seconds)


def test_modes():
    with pytest.raises(ValidationError, match="mode has to be 'min' or 'max'; got 'smallest'"):
        KeepBest(1, "loss", "smallest")
