"""Saves to nodes that leave out a precaution: the search for crash points finds them."""

from __future__ import annotations

import pytest

from paddle_flexckpt.native import cleaner, node_directory
from paddle_flexckpt.native.node_directory import NodeDirectory
from tests.crash.file_system import Fault
from tests.crash.harness import Violation
from tests.crash.scenarios import find


def _publish_at_once(monkeypatch):
    """Let a node publish before the others have prepared."""
    prepare, publish = NodeDirectory.prepare_save, NodeDirectory.publish_save

    def early(self, ticket, rank, manifest, node):
        prepare(self, ticket, rank, manifest, node)
        publish(self, ticket, rank)

    monkeypatch.setattr(NodeDirectory, "prepare_save", early)


def _forget_prepared(monkeypatch):
    """Count what is prepared as dead."""
    find = cleaner.find_begun
    for module in (cleaner, node_directory):
        monkeypatch.setattr(module, "find_begun", lambda *args: (each._replace(prepared=[]) for each in find(*args)))


@pytest.mark.parametrize("fault", [_publish_at_once, _forget_prepared])
def test_a_save_to_nodes_without_its_precautions_is_found_out(bench, monkeypatch, fault):
    """The job dies when one node has published: then the next save must not remove what the other has not."""
    bench = bench(find("nodes: overwrite"))
    fault(monkeypatch)
    calls = bench.act().calls
    published = next(
        at for at, call in enumerate(calls) if call.name == "rename" and call.target.endswith("/0.manifest")
    )
    for at in range(published + 1, published + 4):
        bench.act(Fault(at, "job"))
        try:
            bench.check(0, 0, "a mutant")
        except Violation as error:
            assert "is not whole" in str(error) or "a reader finds" in str(error)
            return
    pytest.fail("nobody noticed")
