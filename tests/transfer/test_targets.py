"""Targets: the memory of a host needs nothing done."""

from __future__ import annotations

import pytest

from paddle_flexckpt.transfer.targets import Memory


def test_memory_is_on_the_host_unless_a_subclass_says_otherwise():
    memory = Memory()
    assert memory.devices == []
    assert memory.on_device(0) is None
    assert memory.addresses() is None
    assert memory.overlap(0, 1) is False
    assert memory.one_at_a_time is False
    memory.wait()
    memory.filled(0)
    memory.finish(["w"])
    with pytest.raises(NotImplementedError):
        memory.open(0, True)
