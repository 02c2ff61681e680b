"""Messages: parts come back as they were, whatever is in them."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog.wire import join, split


@pytest.mark.parametrize("parts", [[], [b""], [b"", b""], [b"a"], [b"abc", b"", b"\0" * 300, b"x"]], ids=str)
def test_parts_come_back(parts):
    assert split(join(parts)) == parts


def test_each_part_has_its_length_in_front():
    assert join([b"ab", b""]) == b"\2\0\0\0\0\0\0\0ab" + b"\0" * 8
    assert split(join([b"a" * 300])[:8] + b"b" * 300) == [b"b" * 300]
