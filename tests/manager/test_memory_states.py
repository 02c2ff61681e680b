"""All states in which the death of a job leaves two steps in the memory of three nodes: what a restart takes and keeps.

The newer step may be written, prepared, published or cleaned up on some nodes, and the older one may be gone there.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.manager import memory_steps
from paddle_flexckpt.media.backend import write_file
from paddle_flexckpt.native.save_names import SaveNames
from tests.manager.test_memory_tier import Nodes, go_on, one_of, resume, shards, train

THREE, TWO = [0, 1, 2], [0, 1]
WRITTEN, PREPARED, PUBLISHED, CLEAN = range(4)
# Each step of a commit begins when all nodes have taken the one before.
# The older one goes when the newer one is there on all.
STATES = [
    (commit, gone)
    for size in (2, 3)
    for commit in sorted({each for low in range(3) for each in itertools.product((low, low + 1), repeat=size)})
    for count in range(size + 1 if commit == (CLEAN,) * size else 1)
    for gone in itertools.combinations(range(size), count)
]


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """Steps 2 and 4 are whole in the memory of three nodes, and nothing is in the root."""
    nodes = Nodes(tmp_path_factory.mktemp("run") / "now")
    assert one_of(nodes.run(THREE, train(5), tier={"keep": 2})) == [2, 4]
    return nodes


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The same, but the third node was away when step 4 was saved."""
    nodes = Nodes(tmp_path_factory.mktemp("behind") / "now")
    assert one_of(nodes.run(THREE, train(3))) == [2]
    assert one_of(nodes.run(TWO, go_on(5), tier={"keep": 2})) == [4]
    assert [nodes.steps(node) for node in THREE] == [["a/02", "a/04"], ["a/02", "a/04"], ["a/02"]]
    return nodes


def step_of(nodes: Nodes, node: int, step: int) -> Path:
    (path,) = Path(nodes.memory(node)).glob(f"*/step_{step:08d}")
    return path


def go_back_to(nodes: Nodes, node: int, state: int, size: int) -> None:
    """Have the newer step, of so many nodes, be as far on a node as it was in this state."""
    directory = open_to_save(str(step_of(nodes, node, 4)))
    names = SaveNames(0, directory.tokens()[0])
    if state < CLEAN:
        directory.mark_save(names, size, size)
    if state == PREPARED:
        write_file(directory.backend, names.prepared_file(node), directory.backend.read("0.manifest"))
    if state <= PREPARED:
        directory.backend.remove("0.manifest")


def save_in_vain(manager, comm):
    """Go on from the newest step, and die in the next save, for which there is room now."""
    step = manager.restore(state=shards(comm, 0)).step
    manager.should_save(8)
    with pytest.raises(fc.CheckpointError, match="as a test asks"):
        manager.save(8, state=shards(comm, 8), rng=False)
    manager.__exit__(InterruptedError, None, None)
    return step


@pytest.mark.parametrize(("commit", "gone"), STATES)
def test_a_step_that_a_restart_takes_outlives_any_one_node(of_three, of_two, tmp_path, monkeypatch, commit, gone):
    def fail(*args, **options):
        raise fc.CheckpointError("as a test asks")

    monkeypatch.setattr(memory_steps, "save_from_file", fail)
    nodes = of_three if len(commit) == 3 else of_two
    kept = tmp_path / "kept"
    shutil.copytree(nodes.path, kept)
    try:
        for node, state in enumerate(commit):
            go_back_to(nodes, node, state, len(commit))
        for node in gone:
            shutil.rmtree(step_of(nodes, node, 2))
        left = tmp_path / "left"
        shutil.copytree(nodes.path, left)
        for lost in THREE:  # before anything is saved
            nodes.lose(lost)
            is_known = max(commit[:lost] + commit[lost + 1 :]) >= PUBLISHED
            assert one_of(nodes.run(THREE, resume())).step == (4 if is_known else 2)
            shutil.rmtree(nodes.path)
            shutil.copytree(left, nodes.path)
        step = one_of(nodes.run(THREE, save_in_vain))
        assert step == (4 if max(commit) >= PUBLISHED else 2)
        assert {each for node in THREE for each in nodes.steps(node)} == {f"a/{step:02d}"}, "there is room"
        shutil.rmtree(left)
        shutil.copytree(nodes.path, left)
        for lost in THREE:
            nodes.lose(lost)
            assert one_of(nodes.run(THREE, resume())).step == step
            shutil.rmtree(nodes.path)
            shutil.copytree(left, nodes.path)
    finally:
        shutil.rmtree(nodes.path)
        shutil.copytree(kept, nodes.path)
