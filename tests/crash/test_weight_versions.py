"""Publishers and receivers of weights that die at any call: bit-equal, or refused with a remedy.

A seeded handful; ``python -m tests.crash.weight_versions`` goes through as many as one likes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("zstandard")

from paddle_flexckpt.loading.weight_publisher import WeightPublisher
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.rollout.local_copy import apply_version
from tests.crash.weight_versions import dying, live
from tests.rollout import reference
from tests.rollout.streams import bytes_of, first, publish_stream


@pytest.mark.parametrize(("seed", "count"), [(0, 12), pytest.param(100, 400, marks=pytest.mark.slow)])
def test_lives(seed, count):
    found: Counter[str] = Counter()
    for number in range(seed, seed + count):
        found += live(number)
    assert {"published", "received", "publisher died", "receiver died", "refused", "reference refused"} <= set(found)


def test_a_publisher_dies_at_each_call(tmp_path):
    """Of a delta: there is the old version alone, or the new one too, and the next publisher goes on."""
    publish_stream(tmp_path, 1)
    values = {name: np.asarray(value + 1) for name, value in first().items()}
    outcomes = []
    for at in range(1, 200):
        root = tmp_path / f"v{at}"
        publish_stream(root, 1)
        publisher = WeightPublisher(root, process_group=SoloCommunicator())
        died = dying(at, lambda publisher=publisher: publisher.publish(values))
        there = (root / "weight_v000002" / reference.INDEX).exists()
        outcomes.append(there)
        report = WeightPublisher(root, process_group=SoloCommunicator()).publish(values)
        assert report.version == 2 + there
        apply_version(root, tmp_path / f"local{at}")
        assert reference.tensors_of(tmp_path / f"local{at}") == bytes_of(values)
        if not died:
            break
    assert not died
    assert at > 10
    assert outcomes == sorted(outcomes)


def test_a_receiver_dies_at_each_call(tmp_path):
    """The copy is as it was, or the next call finishes it."""
    history = publish_stream(tmp_path / "v", 3, ranks=3)
    for at in range(1, 200):
        local = tmp_path / f"local{at}"
        apply_version(tmp_path / "v", local, 2)
        died = dying(at, lambda local=local: apply_version(tmp_path / "v", local, 3))
        names = sorted(path.name for path in (local / ".weight_sync").iterdir())
        if "next.json" not in names and b"000002" in (local / ".weight_sync" / "state.json").read_bytes():
            assert reference.tensors_of(local) == history[2]
        apply_version(tmp_path / "v", local, 3)
        assert reference.tensors_of(local) == history[3]
        if not died:
            break
    assert not died
    assert at > 20
