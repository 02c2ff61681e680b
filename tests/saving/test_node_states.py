"""All states in which a save to nodes can leave them when all of its ranks end at once: a load takes it on all or none.

No rank is left that knows how far the others had come. The calls within a step are in tests/crash.
"""

from __future__ import annotations

import itertools
import os

import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.native.node_directory import NodeDirectory
from tests.saving.test_nodes import load, save

STEPS = ("prepare_save", "publish_save", "finish")
# No step is begun before the one before has been taken on all nodes.
STATES = [(step, taken) for step in STEPS for count in range(3) for taken in itertools.combinations(range(3), count)]
STATES.append(("finish", (0, 1, 2)))
PUBLISHING = [("publish_save", taken) for taken in ((), (1,), (0, 2))]


class Dead(BaseException):
    """The end of a process."""


@pytest.fixture
def nodes(tmp_path):
    """The directories of three nodes."""
    return [str(tmp_path / name) for name in "abc"]


def save_and_die(monkeypatch, nodes, version, step, taken, **options):
    """Have a save end on all nodes at once, when these have taken a step."""
    real = getattr(NodeDirectory, step)

    def take(self, *arguments, **named):
        if self.path in [nodes[each] for each in taken]:
            real(self, *arguments, **named)
        raise Dead

    with monkeypatch.context() as context:
        context.setattr(NodeDirectory, step, take)
        assert {type(each) for each in save(nodes, version, unique_id=0, **options)} == {Dead}


def is_published(step, taken):
    return step == "finish" or (step == "publish_save" and bool(taken))


def loaded(paths):
    """The version that all ranks were given, whole; None if they had an error."""
    found = load(paths, unique_id=0)
    if isinstance(found, list):
        assert {isinstance(each, CheckpointError) for each in found} == {True}, found
        return None
    return found[1]


@pytest.mark.parametrize(("old", "copies"), [(None, 2), (1, 1), (1, 2)])
@pytest.mark.parametrize(("step", "taken"), STATES)
def test_a_load_takes_a_save_that_any_node_has_published(nodes, monkeypatch, step, taken, old, copies):
    if old is not None:
        save(nodes, old, unique_id=0, node_copies=copies)
    save_and_die(monkeypatch, nodes, 2, step, taken, node_copies=copies)
    new = is_published(step, taken)
    assert loaded(nodes[1:] + nodes[:1]) == (2 if new else old)  # ranks may be elsewhere
    for lost, empty in enumerate(f"{path}-empty" for path in nodes):
        there = [empty if place == lost else path for place, path in enumerate(nodes)]
        # Without the only node that has published it, nobody knows of it.
        is_known = new and (step == "finish" or {*taken} != {lost})
        expected = 2 if is_known else old
        assert loaded(there) == (expected if copies == 2 else None)


@pytest.mark.parametrize(("step", "taken"), PUBLISHING)
@pytest.mark.parametrize(("second_step", "second_taken"), PUBLISHING)
def test_a_second_save_that_dies_hides_no_whole_one(nodes, monkeypatch, step, taken, second_step, second_taken):
    save(nodes, 1, unique_id=0)
    save_and_die(monkeypatch, nodes, 2, step, taken)
    save_and_die(monkeypatch, nodes, 3, second_step, second_taken)
    before = 2 if is_published(step, taken) else 1
    assert loaded(nodes) == (3 if is_published(second_step, second_taken) else before)
    reports = save(nodes, 4, unique_id=0)
    assert [each.unique_id for each in reports] == [0] * 3
    assert loaded(nodes) == 4
    kinds = {name.rpartition(".")[2] for path in nodes for name in os.listdir(path)}
    assert kinds == {"manifest", "safetensors", "metadata"}
