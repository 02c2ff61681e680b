"""Processes, threads and connections of the simulated world, and the library's host channel over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.catalog.wire import join, pack_by_position
from paddle_flexckpt.ranks import host_channel
from paddle_flexckpt.ranks.framing import encode
from paddle_flexckpt.ranks.group_listener import GroupListener, ask_outcome, greet
from paddle_flexckpt.ranks.lost_ranks import address_of, open_presence
from paddle_flexckpt.ranks.writer_group import LostCoordinatorError, WriterGroup
from tests.simulated.modules import process_state, simulated
from tests.simulated.network import BUFFER_BYTES, Network
from tests.simulated.processes import Processes
from tests.simulated.scheduler import Node, Scheduler
from tests.simulated.sockets import Sockets
from tests.simulated.tasks import Process
from tests.simulated.threads import Namespace, Threads


class Store:
    """Imitate a key-value store that every process reaches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}

    def add(self, key: str, value: int) -> int:
        self.scheduler.sleep(self.scheduler.random.uniform(1e-4, 1e-3))
        self.counters[key] = self.counters.get(key, 0) + value
        return self.counters[key]

    def set(self, key: str, value: str) -> None:
        self.scheduler.sleep(1e-4)
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        while key not in self.values:
            self.scheduler.sleep(0.01)
        return self.values[key]


class World:
    """Hold three nodes and the modules of their processes, without files."""

    def __init__(self, seed: int = 0) -> None:
        self.scheduler = scheduler = Scheduler(seed)
        self.network = Network(scheduler)
        self.nodes = [self.network.add(Node(scheduler, f"node{n}")) for n in range(3)]
        self.threads, self.sockets, self.processes = Threads(scheduler), Sockets(self.network), Processes(scheduler)

    def start(self, name: str, function: Callable[[], Any], node: int = 0) -> Process:
        place = self.nodes[node]
        process = Process(self.scheduler, place, name, environ={"PADDLE_CURRENT_ENDPOINT": f"{place.address}:1"})
        process.start(function)
        return process

    def __enter__(self) -> World:
        scheduler, processes = self.scheduler, self.processes
        environ = Namespace(__name__="os.environ", get=lambda *args: scheduler.process.environ.get(*args))
        modules = {
            "threading": self.threads.threading,
            "queue": self.threads.queue,
            "socket": self.sockets.socket,
            "selectors": self.sockets.selectors,
            "time": processes.time,
            "secrets": processes.secrets,
            "os": Namespace(
                __name__="os",
                environ=environ,
                getpid=lambda: scheduler.process.pid,
                register_at_fork=lambda **functions: scheduler.process.kept.append(functions),
            ),
        }
        self._context = simulated(
            scheduler, modules, self.threads.names, self.threads.replacement, process_state(scheduler)
        )
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def gather_often(world: World, rank: int, size: int, store: Store, outcome: dict[int, Any], count: int = 5) -> None:
    from paddle_flexckpt.ranks.lost_ranks import announce

    channel = host_channel.HostChannel(store, "all", range(size), rank)
    announce(store, rank)
    outcome[rank] = []
    try:
        for turn in range(count):
            outcome[rank].append(channel.all_gather(f"{turn} of {rank}".encode()))
            world.scheduler.sleep(1.0)
    except LostRankError as error:
        outcome[rank] = str(error)


def run_job(seed: int, size: int = 5, disturb: Callable[[World, list[Process]], None] = lambda *_: None) -> Any:
    with World(seed) as world:
        store, outcome = Store(world.scheduler), {}

        def main(rank: int) -> Callable[[], None]:
            return lambda: gather_often(world, rank, size, store, outcome)

        ranks = [world.start(f"rank {rank}", main(rank), rank % 2) for rank in range(size)]
        world.scheduler.after(2.5, lambda: disturb(world, ranks))
        world.scheduler.run(steps=100_000)
    return outcome, world


@pytest.mark.parametrize("seed", range(10))
def test_a_host_channel_carries_what_ranks_say(seed: int) -> None:
    outcome, world = run_job(seed)
    for rank in range(5):
        assert outcome[rank] == [[f"{turn} of {other}".encode() for other in range(5)] for turn in range(5)]
    assert all(process.status == 0 for process in world.scheduler.processes)


def test_a_run_repeats_from_its_seed() -> None:
    def trace(seed: int) -> Any:
        _, world = run_job(seed)
        return world.scheduler.now, world.scheduler.switches, world.network.messages, world.scheduler.story

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


@pytest.mark.parametrize("seed", range(10))
def test_survivors_name_a_killed_rank(seed: int) -> None:
    outcome, _ = run_job(seed, disturb=lambda world, ranks: ranks[3].kill())
    texts = {outcome[rank] for rank in (0, 1, 2, 4)}
    assert len(texts) == 1
    assert texts.pop().startswith("rank 3 is lost: it has gone")


def test_a_stopped_rank_goes_on() -> None:
    def disturb(world: World, ranks: list[Process]) -> None:
        ranks[1].stop()
        world.scheduler.after(600.0, ranks[1].resume)

    outcome, world = run_job(1, disturb=disturb)
    assert len(outcome[0]) == 5
    assert 602 < world.scheduler.now < 610


def test_what_is_cut_off_arrives_when_the_network_heals() -> None:
    def disturb(world: World, ranks: list[Process]) -> None:
        world.network.cut.add(frozenset(("node0", "node1")))

        def heal() -> None:
            world.network.cut.clear()
            world.network.heal()

        world.scheduler.after(100.0, heal)

    outcome, world = run_job(1, disturb=disturb)
    assert len(outcome[0]) == 5
    assert 102 < world.scheduler.now < 110


def write_together(
    seed: int,
    disturb: Callable[[World, list[Process]], None] = lambda *_: None,
    size: int = 5,
    told_bytes: int = 0,
) -> Any:
    """Have writers make a save, of which rank 1 is the coordinator's: three exchanges, the second of 2 MB from each.

    In the first all get at least ``told_bytes`` from each.
    """
    token, outcome, addresses = bytes(16), {}, {}
    with World(seed) as world:

        def write(rank: int) -> None:
            presence = open_presence()
            secret = bytes([rank]) * 16
            addresses[rank] = address_of(presence, secret)
            listener = GroupListener(presence, secret)
            while len(addresses) < size:
                world.scheduler.sleep(0.1)
            try:
                group = WriterGroup(
                    listener, [addresses[each] for each in range(size)], token, range(size), rank, 1, 60.0
                )
                world.scheduler.sleep(1.0 + rank)
                told = [group.together(lambda: (None, (b"%d" % rank).ljust(told_bytes)))[1]]
                told.append(group.trade(lambda: (None, b"", {1: bytes([rank]) * (2 << 20)}))[2])
                told.append(group.together(lambda: (None, b"%d" % rank))[1])
                outcome[rank] = told
            except LostRankError as error:
                outcome[rank] = error
            group.close(b"over")
            for _ in range(100):
                listener.select(10.0)

        def ask() -> None:
            world.scheduler.sleep(0.5)
            outcome["asked"] = ask_outcome(addresses[1], token, 300.0)

        writers = [world.start(f"writer {rank}", lambda rank=rank: write(rank), rank % 2) for rank in range(size)]
        world.start("asks", ask)
        disturb(world, writers)
        world.scheduler.run(steps=200_000)
    return outcome, world


@pytest.mark.parametrize("seed", range(10))
def test_a_group_of_writers_carries_what_they_have_to_tell(seed: int) -> None:
    outcome, world = write_together(seed)
    assert outcome.pop("asked") == b"over"
    told, parts = [b"%d" % rank for rank in range(5)], {rank: bytes([rank]) * (2 << 20) for rank in range(5)}
    assert outcome == {rank: [told, parts if rank == 1 else {}, told] for rank in range(5)}
    assert not world.scheduler.main_errors


@pytest.mark.parametrize("seed", range(20))
def test_writers_name_a_killed_one(seed: int) -> None:
    # Its fourth second has all that it does: it connects, waits for others, and sends.
    when = 0.2 + seed / 4
    outcome, _ = write_together(seed, lambda world, writers: world.scheduler.after(when, writers[3].kill))
    texts = {str(outcome[rank]) for rank in (0, 1, 2, 4)}
    assert len(texts) == 1 and texts.pop().startswith("[rank 3] its processes have ended before it had done its share")
    assert outcome["asked"] == b"over"


@pytest.mark.parametrize("seed", range(20))
def test_writers_that_lose_the_coordinator_do_not_know_the_outcome(seed: int) -> None:
    when = 0.2 + seed / 4
    outcome, _ = write_together(seed, lambda world, writers: world.scheduler.after(when, writers[1].kill))
    assert {type(outcome[rank]) for rank in (0, 2, 3, 4)} == {LostCoordinatorError}
    assert outcome["asked"] is None


def test_writers_that_are_cut_off_for_a_while_go_on() -> None:
    def disturb(world: World, writers: list[Process]) -> None:
        def heal() -> None:
            world.network.cut.clear()
            world.network.heal()

        world.scheduler.after(2.0, lambda: world.network.cut.add(frozenset(("node0", "node1"))))
        world.scheduler.after(40.0, heal)

    outcome, _ = write_together(1, disturb)
    assert all(isinstance(outcome[rank], list) for rank in range(5))


def test_writers_that_stay_cut_off_are_given_up() -> None:
    outcome, _ = write_together(
        1, lambda world, _: world.scheduler.after(0.9, lambda: world.network.cut.add(frozenset(("node0", "node1"))))
    )
    assert str(outcome[1]) == str(outcome[3])
    assert str(outcome[1]).startswith("[ranks 0, 2, 4] has written nothing within 60 s after others had written")
    assert {type(outcome[rank]) for rank in (0, 2, 4)} == {LostCoordinatorError}


def test_a_stopped_writer_goes_on() -> None:
    def disturb(world: World, writers: list[Process]) -> None:
        world.scheduler.after(2.0, writers[0].stop)
        world.scheduler.after(50.0, writers[0].resume)

    outcome, _ = write_together(1, disturb)
    assert all(isinstance(outcome[rank], list) for rank in range(5))


def test_a_writer_that_takes_a_large_answer_late_goes_on() -> None:
    """It has sent its part, and is stopped while the others send theirs."""

    def disturb(world: World, writers: list[Process]) -> None:
        world.scheduler.after(4.0, writers[0].stop)
        world.scheduler.after(24.0, writers[0].resume)

    outcome, _ = write_together(1, disturb, told_bytes=1 << 20)
    assert all(isinstance(outcome[rank], list) for rank in range(5)), outcome


def write_slowly(leads: bool, chunks: int = 6) -> tuple[dict[int, Any], float]:
    """Have writers make an exchange, to which the last of them sends 200 bytes each 40 s: so many of 6 times.

    Return what the others got, and when all had ended. The slow one is the coordinator's, or is not.
    """
    token, size = bytes(16), 2 if leads else 3
    addresses: dict[int, str] = {}
    outcome: dict[int, Any] = {}
    with World(1) as world:

        def listen(position: int) -> GroupListener:
            presence = open_presence()
            addresses[position] = address_of(presence, bytes(16))
            while len(addresses) < size:
                world.scheduler.sleep(0.1)
            return GroupListener(presence, bytes(16))

        def write(position: int) -> None:
            listener, coordinator = listen(position), size - 1 if leads else 0
            places = [addresses[each] for each in range(size)]
            group = WriterGroup(listener, places, token, range(size), position, coordinator, 60.0)
            try:
                outcome[position] = group.all_gather(b"mine")
            except LostRankError as error:
                outcome[position] = error

        def write_last() -> None:
            listener, callers = listen(size - 1), []
            if leads:
                while not callers:
                    listener.select(1.0)
                    callers = listener.take(token)
                connection = callers[0][1]
                payload = join(pack_by_position({0: b"mine", 1: bytes(1000)}))
            else:
                connection, payload = greet(addresses[0], token, size - 1, 10.0), bytes(1000)
            message = b"".join(encode(1, [payload, b""]))
            for start in range(0, 200 * chunks, 200):
                world.scheduler.sleep(40.0)
                connection.sendall(message[start : start + 200])
            world.scheduler.sleep(1000.0)

        for position in range(size - 1):
            world.start(f"writer {position}", lambda position=position: write(position), position)
        world.start("slow", write_last, size - 1)
        while len(outcome) < size - 1:
            world.scheduler.run(until=world.scheduler.now + 1.0, steps=200_000)
        return outcome, world.scheduler.now


def test_a_writer_whose_answer_comes_slowly_waits_for_as_long_as_it_comes() -> None:
    outcome, _ = write_slowly(leads=True)
    assert outcome == {0: [b"mine", bytes(1000)]}


def test_a_coordinator_waits_for_a_part_as_long_as_it_comes() -> None:
    """The others hear meanwhile that it is there."""
    outcome, now = write_slowly(leads=False)
    assert outcome == {each: [b"mine", b"mine", bytes(1000)] for each in range(2)}
    assert now > 200


def test_a_coordinator_does_not_wait_for_the_rest_of_a_part_that_does_not_come() -> None:
    outcome, now = write_slowly(leads=False, chunks=3)
    texts = {str(error) for error in outcome.values()}
    assert len(texts) == 1 and "[rank 2] has written nothing within 60 s after others had written" in texts.pop()
    assert now < 120 + 2 * 60 + 10


def test_who_sends_more_than_a_dead_receiver_takes_gets_an_error() -> None:
    """Its buffer is full when it dies, and there is none any more for what follows."""
    errors: list[type[OSError]] = []
    with World() as world:
        socket = world.sockets.socket

        def receive() -> None:
            with socket.create_server(("node0", 1)) as listener, listener.accept()[0]:
                world.scheduler.sleep(1000.0)

        def send() -> None:
            with socket.create_connection(("node0", 1)) as connection:
                connection.sendall(bytes(BUFFER_BYTES))
                receiver.kill()  # it is not told yet
                try:
                    connection.sendall(b"more")
                except OSError as error:
                    errors.append(type(error))

        receiver = world.start("receives", receive)
        world.start("sends", send, 1)
        world.scheduler.run(steps=10_000)
    assert errors == [ConnectionResetError]


def test_a_process_that_dies_in_a_condition_s_wait_has_no_error() -> None:
    with World() as world:

        def wait() -> None:
            changed = world.threads.threading.Condition()
            with changed:
                changed.wait()

        process = world.start("waits", wait)
        world.scheduler.after(1.0, process.kill)
        world.scheduler.run()
    assert process.status == -9
    assert process.main is not None
    assert process.main.ended
    assert process.main.error is None


def test_a_name_that_is_not_simulated_is_named() -> None:
    with World() as world, pytest.raises(RuntimeError, match=r"threading\.Barrier is not simulated"):
        _ = world.threads.threading.Barrier


def test_a_function_that_fails_at_the_exit_ends_no_other_and_is_told():
    world, called, said = World(), [], []
    with world:

        def work() -> None:
            world.processes.atexit.register(called.append, "first")
            world.processes.atexit.register(lambda: 1 // 0)
            world.processes.atexit.register(called.append, "last")

        process = world.start("p", work)
        process.stderr = said.append
        world.scheduler.run(until=10.0)
    assert (called, process.status) == (["last", "first"], 0)
    (told,) = (text for _, text in world.scheduler.main_errors)
    assert "ZeroDivisionError" in told and said == [told]
