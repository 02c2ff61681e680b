"""Saves to nodes that leave out a precaution: the search for crash points finds them."""

from __future__ import annotations

import pytest

from paddle_flexckpt.storage import CheckpointDirectory, NodeDirectory
from tests.crash import explore
from tests.crash.explore import stops
from tests.crash.harness import Violation
from tests.crash.scenarios import find


def _publish_at_once(monkeypatch):
    """A node publishes before the others have prepared."""
    prepare, publish = NodeDirectory.prepare_save, NodeDirectory.publish_save

    def early(self, ticket, rank, manifest, node):
        prepare(self, ticket, rank, manifest, node)
        publish(self, ticket, rank)

    monkeypatch.setattr(NodeDirectory, "prepare_save", early)


def _forget_prepared(monkeypatch):
    """What is prepared counts as dead."""
    monkeypatch.setattr(CheckpointDirectory, "prepared", lambda self, ticket: [])


@pytest.mark.parametrize("fault", [_publish_at_once, _forget_prepared])
def test_a_save_to_nodes_without_its_precautions_is_found_out(bench, monkeypatch, fault):
    monkeypatch.setattr(explore, "ENOUGH", 1)
    bench = bench(find("nodes: overwrite"))
    fault(monkeypatch)
    try:
        found = stops(bench, seed=None, spreads=("job",))
    except Violation as error:
        assert "is not whole" in str(error)
        return
    assert any("is not whole" in text or "a reader finds" in text for text in found.violations)
