"""Saves to nodes that lose a writer: what the others say that hear of it later, are slow, or have ended meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from paddle_flexckpt.background import writer
from paddle_flexckpt.background.outcome import commit_on_nodes, find_outcome
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.worker import join_group
from paddle_flexckpt.catalog import CatalogBuilder
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.node_commit import NodeLayout
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.group_listener import GroupListener
from paddle_flexckpt.ranks.lost_ranks import address_of, open_presence
from tests.simulated.cluster import Cluster
from tests.simulated.scenario import Case, Fault, Scenario
from tests.simulated.tasks import Process
from tests.simulated.threads import Namespace
from tests.simulation.test_network import World

SIZE, TIMEOUT = 3, 60.0
LAYOUT = NodeLayout(tuple((rank,) for rank in range(SIZE)), tuple(f"{rank} (h{rank}:/a)" for rank in range(SIZE)))
NAMES = SaveNames(0, "00000002" + "ab" * 12)
# The exchange in which all learn that all nodes have published.
PUBLISHED = 4


class NodeInMemory:
    """What a save has reached on a node."""

    def __init__(self) -> None:
        self.prepared = self.published = self.finished = False
        self.backend = Namespace(__name__="backend", sync=lambda: None, has_path=True)

    def prepare_save(self, *_: Any) -> None:
        self.prepared = True

    def publish_save(self, *_: Any) -> None:
        self.published = True

    def finish(self, *_: Any, **options: Any) -> None:
        self.finished = True

    def is_committed(self, names: SaveNames) -> bool:
        return self.published

    def sees(self, names: SaveNames) -> bool:
        return not self.finished

    def discard(self, *_: Any) -> None: ...

    discard_late = discard


class Writers:
    """Three writers, each on a node of its own, and what their training processes are told."""

    def __init__(self, world: World, coordinator: int) -> None:
        self.world, self.coordinator = world, coordinator
        self.nodes = [NodeInMemory() for _ in range(SIZE)]
        self.addresses: dict[int, str] = {}
        self.told: dict[int, str] = {}
        self.processes: list[Process] = []
        self.prepare: Callable[[int, Any], None] = lambda rank, group: None
        self.ends: Collection[int] = ()

    def start(self) -> None:
        for rank in range(SIZE):
            self.processes.append(self.world.start(f"writer {rank}", lambda rank=rank: self._write(rank), rank))

    def job(self, rank: int) -> WriteJob:
        items = CatalogBuilder(rank, NAMES.data_file(rank)).build()
        part = Manifest.of_save(SaveInfo(NAMES.token, 0, SIZE), items, (), {NAMES.data_file(rank): 0})
        addresses = tuple(self.addresses[each] for each in range(SIZE))
        ranks = tuple(range(SIZE))
        return WriteJob(
            "/a", {}, None, NAMES, items, rank, ranks, self.coordinator, 1, TIMEOUT, addresses, LAYOUT, part.encode()
        )

    def _write(self, rank: int) -> None:
        presence, secret = open_presence(), bytes([rank]) * 16
        self.addresses[rank] = address_of(presence, secret)
        listener = GroupListener(presence, secret)
        while len(self.addresses) < SIZE:
            self.world.scheduler.sleep(0.1)
        job = self.job(rank)
        group = join_group(job, listener)
        self.prepare(rank, group)
        outcome = commit_on_nodes(job, LAYOUT, self.nodes[rank], group)
        self.tell(rank, outcome.failure)
        until = self.world.scheduler.now + 20 * TIMEOUT
        while rank not in self.ends and self.world.scheduler.now < until:
            listener.select(10.0)

    def tell(self, rank: int, failure: Any) -> None:
        self.told[rank] = "committed" if failure is None else "; ".join(failure.problems)

    def find(self, rank: int) -> None:
        """Have the training process of a writer that has died ask."""
        job = self.job(rank)
        self.world.start(
            f"trainer {rank}", lambda: self.tell(rank, find_outcome(job, self.nodes[rank], "was killed")), rank
        )


def answering(writers: Writers, exchange: int, receivers: Collection[int], act: Callable[[], None]) -> None:
    """Have the coordinator's writer act when it has answered an exchange to these members alone."""

    def prepare(rank: int, group: Any) -> None:
        if rank != writers.coordinator:
            return
        answer, count = group._answer, itertools.count(1)

        def answer_some(*messages: Any) -> None:
            if next(count) == exchange:
                links = group._links
                group._links = {each: link for each, link in links.items() if each in receivers}
                answer(*messages)
                group._links = links
                writers.world.scheduler.sleep(0.1)  # it has arrived
                act()
                writers.world.scheduler.check_alive()
            else:
                answer(*messages)

        group._answer = answer_some

    writers.prepare = prepare


def die(writers: Writers, late: Collection[int] = ()) -> None:
    """Kill the coordinator's writer; the word of its end does not reach the late ones."""
    network, own = writers.world.network, writers.coordinator
    network.cut |= {frozenset((f"node{own}", f"node{other}")) for other in late}

    def heal() -> None:
        network.forget(writers.world.nodes[own])
        network.cut.clear()
        writers.find(own)

    writers.world.scheduler.after(0.1, heal)
    writers.processes[own].kill()


def stop(writers: Writers, rank: int, seconds: float) -> None:
    """Stop a writer, which goes on later."""
    writers.processes[rank].stop()
    writers.world.scheduler.after(seconds, writers.processes[rank].resume)


def some(of: Collection[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(of) + 1):
        yield from itertools.combinations(sorted(of), count)


CASES = [
    (coordinator, exchange, receivers, late)
    for coordinator in range(SIZE)
    for exchange in (PUBLISHED - 1, PUBLISHED, PUBLISHED + 1)
    for receivers in some({*range(SIZE)} - {coordinator})
    for late in some({*range(SIZE)} - {coordinator})
]


@pytest.mark.parametrize(("coordinator", "exchange", "receivers", "late"), CASES)
def test_those_who_hear_a_timeout_later_have_the_same_outcome(coordinator, exchange, receivers, late) -> None:
    with World() as world:
        writers = Writers(world, coordinator)
        answering(writers, exchange, receivers, lambda: die(writers, late))
        writers.start()
        world.scheduler.run(steps=200_000)
    assert not world.scheduler.main_errors, world.scheduler.main_errors
    assert len(writers.told) == SIZE
    assert len({*writers.told.values()}) == 1, writers.told


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("late", [(), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("receivers", [(), (1,), (2,), (1, 2)])
def test_one_that_is_slow_to_decide_is_waited_for(receivers, late, seconds) -> None:
    """The first that outlives the coordinator's is stopped meanwhile."""
    with World() as world:
        writers = Writers(world, 0)

        def act() -> None:
            stop(writers, 1, seconds * TIMEOUT)
            die(writers, late)

        answering(writers, PUBLISHED, receivers, act)
        writers.start()
        world.scheduler.run(steps=200_000)
    assert not world.scheduler.main_errors
    assert len(writers.told) == SIZE and len({*writers.told.values()}) == 1, writers.told


def check_honest(writers: Writers) -> None:
    """Check that none says that a save failed that is complete, nor the opposite; who cannot know says so."""
    assert not writers.world.scheduler.main_errors
    assert len(writers.told) == SIZE
    if "committed" in writers.told.values():
        assert all(node.published for node in writers.nodes)
        others = [text for text in writers.told.values() if text != "committed"]
        assert all("it is not known what became of the save" in text for text in others)


@pytest.mark.parametrize("coordinator", range(SIZE))
@pytest.mark.parametrize("exchange", range(1, 6))
def test_when_a_coordinator_is_given_up_that_goes_on_later_nobody_says_more_than_he_knows(
    coordinator, exchange
) -> None:
    for receivers in some({*range(SIZE)} - {coordinator}):
        with World() as world:
            writers = Writers(world, coordinator)
            answering(writers, exchange, receivers, partial(stop, writers, coordinator, 5 * TIMEOUT))
            writers.start()
            world.scheduler.run(steps=200_000)
        check_honest(writers)


@pytest.mark.parametrize("ends", [{1}, {2}, {1, 2}])
@pytest.mark.parametrize("late", [(1,), (2,)])
def test_when_those_who_have_decided_end_before_others_ask_nobody_says_more_than_he_knows(late, ends) -> None:
    for receivers in some((1, 2)):
        with World() as world:
            writers = Writers(world, 0)
            writers.ends = ends
            answering(writers, PUBLISHED, receivers, partial(die, writers, late))
            writers.start()
            world.scheduler.run(steps=200_000)
        check_honest(writers)


def test_a_rank_whose_writer_has_died_is_told_what_the_others_were_told_who_have_ended_since(monkeypatch) -> None:
    """It is slow to notice, and the others end at once with the error."""
    find = writer.find_outcome

    def find_late(*args: Any) -> Any:
        writer.time.sleep(1.0)
        return find(*args)

    monkeypatch.setattr(writer, "find_outcome", find_late)
    for count in (1, 4):
        scenario = Scenario(1, (3,), nodes=3, storage="per_node", is_async=True, steps=4, step_seconds=1000.0)
        cluster = Cluster(Case(scenario, (Fault("kill_writer", 999.0, "writer:1", "send", count),)))
        assert not cluster.run().violations
        told = [each.outcomes for each in cluster.ledger.attempts.values()][0]
        assert sorted(told) == [0, 1, 2] and len({*told.values()}) == 1, told
        assert "[rank 1] its processes have ended before" in str(told[1])
