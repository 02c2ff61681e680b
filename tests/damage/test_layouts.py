"""A few of the flipped bits of the campaign under other layouts."""

from __future__ import annotations

import pytest

from tests.damage.layouts import CHANGES, run


@pytest.mark.parametrize("change", CHANGES)
def test_a_flipped_bit_is_never_loaded(change):
    found = run(change, flips=4)
    assert found["wrong"] == 0
    assert found.total() == 4
