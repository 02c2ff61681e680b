"""Orders: what is said of them, what files hold of them, and what two ranks say together."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import CUT, NATURAL, Order, Problem
from paddle_flexckpt.catalog.orders import common_order

FFN = Order(2, 1, "fused_ffn")


@pytest.mark.parametrize(("order", "permuted", "tags", "text"), [
    (NATURAL, False, None, "natural order"),
    (CUT, False, None, "cut, and without a rule"),
    (Order(2), True, None, "cut, and without a rule"),
    (FFN, True, "fused_ffn", "fused_ffn, along axis 1, 2 parts"),
    (Order(1, 1, "fused_ffn"), False, "fused_ffn", "fused_ffn, along axis 1, natural order"),
    (Order(2, 0, "fused_ffn"), True, "fused_ffn, axis=0", "fused_ffn, along axis 0, 2 parts"),
    (Order(2, 0, "fused_ffn, axis = 0"), True, "fused_ffn, axis = 0", "fused_ffn, axis = 0, along axis 0, 2 parts"),
    (Order(3, 2, None), True, None, "fused, by no known statement, along axis 2, 3 parts"),
])  # fmt: skip
def test_what_an_order_says(order, permuted, tags, text):
    assert (order.is_permuted, order.tags, order.describe()) == (permuted, tags, text)
    assert Order.decode(order.encode()) == order


@pytest.mark.parametrize("good", [[1, None, None], [1 << 16, (1 << 15) - 1, "x"], [None, None, None], [1, 0, None]])
def test_orders_at_the_limits_are_read(good):
    assert Order.decode(good).encode() == good


@pytest.mark.parametrize(("bad", "said"), [
    ([0, None, None], "an order of 0 parts"),
    ([(1 << 16) + 1, None, None], "an order of 65537 parts"),
    ([True, None, None], "an order of True parts"),
    (["1", None, None], "an order of '1' parts"),
    ([1, -1, None], "an order along axis -1 in 1 parts"),
    ([1, 1 << 15, None], "an order along axis 32768 in 1 parts"),
    ([1, 1.0, None], "an order along axis 1.0 in 1 parts"),
    ([None, 1, None], "an order along axis 1 in None parts"),
    ([1, 1, 5], "an order by the statement 5"),
    ([1, None, "fused_ffn"], "an order by the statement 'fused_ffn'"),
    ([1, None], "an order of 0 parts"),
    ((1, None, None), "an order of 0 parts"),
    (None, "an order of 0 parts"),
])  # fmt: skip
def test_what_is_no_order_is_refused(bad, said):
    with pytest.raises(ValueError) as caught:
        Order.decode(bad)
    assert str(caught.value) == said


@pytest.mark.parametrize(("one", "other", "both"), [
    (FFN, FFN, FFN),
    (NATURAL, NATURAL, NATURAL),
    (NATURAL, CUT, CUT),
    (Order(1, 1, "fused_ffn"), NATURAL, Order(1, 1, "fused_ffn")),
])  # fmt: skip
def test_what_two_ranks_say_together(one, other, both):
    assert common_order("w", one, other) == common_order("w", other, one) == both


@pytest.mark.parametrize(("one", "other"), [(FFN, NATURAL), (FFN, CUT), (Order(1, 1, "fused_ffn"), CUT)])
def test_ranks_that_contradict_each_other_are_told_so(one, other):
    expected = Problem(
        "ranks disagree about how a fused parameter is cut",
        key="w",
        expected=one.describe(),
        got=other.describe(),
        remedy="give its shards the same FusedAxis on every rank",
        code="FC207",
    )
    assert common_order("w", one, other) == common_order("w", other, one) == expected
    two = Order(4, 1, "fused_ffn")
    assert common_order("w", FFN, two).got == two.describe()
