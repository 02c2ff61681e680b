"""Targets: the memory of a host needs nothing done, and tensors are found by Paddle's names."""

from __future__ import annotations

import pytest

from paddle_flexckpt.engine.targets import Memory
from tests.engine.samples import Part, targets


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


def test_keys_are_found_by_the_name_of_the_tensor_behind_them():
    here = targets(
        Part("b", tensor_name="linear_0.w_0"),
        Part("a", tensor_name="linear_0.w_0.dist"),
        Part("c"),
        Part("d", tensor_name="mine"),
    )
    assert here.by_tensor_name == {"linear_0.w_0": ["a", "b"], "mine": ["d"]}
    assert targets(Part("c")).by_tensor_name == {}
