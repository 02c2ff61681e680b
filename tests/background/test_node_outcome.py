"""What becomes of a save to nodes whose writers are killed: one outcome on all ranks, wherever they look."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.background.outcome import Outcome, commit_on_nodes
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.node_commit import NodeLayout
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks import lost_ranks, writer_group
from paddle_flexckpt.ranks.writer_group import WriterGroup
from tests.background.helpers import PATIENCE_SECONDS
from tests.background.test_outcome import LOST, UNKNOWN, Hook, Save, after, before, kill
from tests.native.samples import items_of, whole

# Rank 0 commits on one node, rank 2 on the other.
NODES = ((0, 1), (2, 3))
LAYOUT = NodeLayout(NODES, ("0 (h:/a)", "1 (h:/b)"))
NAMES = SaveNames(0, "00000002" + "ab" * 12)


def answering(number: int, receivers: Iterable[int]) -> Hook:
    """Return the moment at which the coordinator's writer has answered an exchange to these members alone."""

    def hook(act: Callable[[], None], group: WriterGroup, directory: Any) -> None:
        answer, count = group._answer, itertools.count(1)

        def answer_some(*messages: Any) -> None:
            if next(count) == number:
                group._links = {each: link for each, link in group._links.items() if each in receivers}
                answer(*messages)
                act()
            answer(*messages)

        group._answer = answer_some  # type: ignore[method-assign]

    return hook


def at_exchange(number: int) -> Hook:
    def hook(act: Callable[[], None], group: WriterGroup, directory: Any) -> None:
        count = itertools.count(1)
        before(group, "_all_to_all", lambda: act() if next(count) == number else None)

    return hook


# Moments, and whether all nodes have published by then.
MOMENTS: dict[str, tuple[Hook, bool]] = {
    "sends its part": (at_exchange(1), False),
    "sends the manifest": (at_exchange(2), False),
    "begins to prepare": (lambda act, group, directory: before(directory, "prepare_save", act), False),
    "has prepared": (at_exchange(3), False),
    "begins to publish": (lambda act, group, directory: before(directory, "publish_save", act), False),
    "has published": (lambda act, group, directory: after(directory, "publish_save", act), False),
    "says that it has published": (at_exchange(4), False),
    "begins to clean up": (lambda act, group, directory: before(directory, "finish", act), True),
    "has cleaned up": (lambda act, group, directory: after(directory, "finish", act), True),
    "says that it has cleaned up": (at_exchange(5), True),
    "is done": (lambda act, group, directory: before(group, "close", act), True),
}
# The exchanges after the steps of a save, and some of the other members that can get the answer.
ANSWERS = {
    f"has answered {number} to {receivers}": answering(number, receivers)
    for number in (1, 2, 3, 4, 5)
    for count in range(4)
    for receivers in itertools.combinations(range(4), count)
}
OF_ALL = [
    *("sends its part", "sends the manifest", "has prepared", "says that it has published"),
    *("says that it has cleaned up", "is done"),
]


class NodesSave(Save):
    """One save of id 0 to two nodes of two ranks each, whose ranks have written their data."""

    moments = {name: hook for name, (hook, _) in MOMENTS.items()} | ANSWERS

    def __init__(self, path: Path, coordinator: int) -> None:
        addresses = self._open_sockets(4)
        self.jobs, self.names = [], NAMES
        for number, members in enumerate(NODES):
            directory = open_to_save(str(path / "ab"[number]))
            os.makedirs(directory.path)
            directory.mark_save(NAMES, 4, 2)
            for rank in members:
                items = items_of([whole(f"w{rank}", "float32", (9,), rank)], NAMES.data_file(rank))
                part = directory.write_data(NAMES, items, [np.zeros(36, np.uint8)], world_size=4)
                job = WriteJob(
                    directory.path, {}, None, NAMES, items, rank, (0, 1, 2, 3), coordinator, 7, PATIENCE_SECONDS,
                    addresses, LAYOUT, part.encode(),
                )  # fmt: skip
                self.jobs.append(job)

    def carry_out(self, job: WriteJob, directory: Any, group: WriterGroup, refusal: str) -> Outcome:
        assert job.layout is not None
        return commit_on_nodes(job, job.layout, directory, group, refusal)

    @property
    def published(self) -> list[bool]:
        return [open_to_save(self.jobs[members[0]].path).is_committed(NAMES) for members in NODES]


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], NodesSave]]:
    for module in (lost_ranks, writer_group):
        monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.1)
    made: list[NodesSave] = []
    yield lambda coordinator: made.append(NodesSave(tmp_path, coordinator)) or made[-1]
    for each in made:
        each.end()


@pytest.mark.parametrize("coordinator", [0, 3])
def test_all_nodes_publish(saves, coordinator):
    save = saves(coordinator).start({})
    assert save.text() is None
    assert save.published == [True, True]


@pytest.mark.parametrize("coordinator", [0, 1, 2])
@pytest.mark.parametrize(
    ("killed", "moment"), [*itertools.product([0, 2], MOMENTS), *itertools.product([1, 3], OF_ALL)]
)
def test_all_ranks_have_one_outcome_and_it_is_success_only_if_all_nodes_have_published(
    saves, killed, moment, coordinator
):
    save = saves(coordinator).start({killed: (moment, kill)})
    text = save.text()
    if MOMENTS[moment][1]:
        assert text is None and save.published == [True, True]
    elif killed == coordinator:
        assert text == f"[rank {killed}] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
    else:
        assert text is not None and f"[rank {killed}] {LOST}" in text


@pytest.mark.parametrize("coordinator", [0, 1, 2])
@pytest.mark.parametrize("moment", ANSWERS)
def test_all_ranks_have_one_outcome_whoever_gets_the_answer_of_a_coordinator_that_dies(saves, moment, coordinator):
    """Who knows more tells those who know less, or is told that they do not know."""
    if str(coordinator) in moment.partition(" to ")[2]:
        return  # it sends nothing to itself
    save = saves(coordinator).start({coordinator: (moment, kill)})
    text = save.text()
    assert text is None or text == f"[rank {coordinator}] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
    assert text is not None or save.published == [True, True]


def test_if_all_writers_are_killed_after_one_node_has_published_none_says_that_it_is_saved(saves):
    acts = {0: ("has published", kill), 1: ("says that it has published", kill)}
    save = saves(0).start(acts | {2: ("begins to publish", kill), 3: ("says that it has published", kill)})
    assert save.text() == f"[rank 0] {UNKNOWN.format(timeout=PATIENCE_SECONDS)}"
    assert save.published == [True, False]
