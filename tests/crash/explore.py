"""All points of a scenario: saves that stop, power that goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from tests.crash.file_system import Fault
from tests.crash.harness import Bench, Tree, Violation, read_tree, write_tree
from tests.crash.power_loss import Disk

Item = TypeVar("Item")

# Who is gone, or has given up, when one rank of several stops.
SPREADS = ("job", "rank", "hang", "give up")
# So many violations say what is wrong.
ENOUGH = 20


@dataclass
class Found:
    """Hold what was looked at.

    Attributes:
        points: Points or states.
        violations: What was wrong, one text each.
        outcomes: How often a reader found what.
    """

    points: int = 0
    violations: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def enough(self) -> bool:
        """Tell whether more would not say more."""
        return len(self.violations) >= ENOUGH

    def add(self, other: Found) -> None:
        """Add what was looked at elsewhere."""
        self.points += other.points
        self.violations += other.violations

    def look(self, bench: Bench, done: int, turn: int, where: str) -> None:
        """Look at the disk as it is."""
        self.points += 1
        try:
            found = str(bench.check(done, turn, where))
        except Violation as error:
            self.violations.append(str(error))
            found = "wrong"
        self.outcomes[found] = self.outcomes.get(found, 0) + 1


def stops(
    bench: Bench,
    seed: int | None = None,
    share: float = 1.0,
    spreads: Sequence[str] = SPREADS,
    count: int | None = None,
) -> Found:
    """Stop the steps before each call in turn, with each spread.

    Args:
        bench: The scenario.
        seed: Of the order in which ranks run.
        share: Of the points that are looked at, chosen by the seed.
        spreads: Who is gone.
        count: Points at most.
    """
    calls = bench.record(seed).calls
    points = [
        (spread, at)
        for spread in (*(spreads if bench.scenario.ranks > 1 else spreads[:1]), "writer")
        for at, call in enumerate(calls)
        if spread != "writer" or call.by_writer
    ]
    found = Found()
    for spread, at in chosen(points, f"{bench.scenario.name} {seed}", share, count):
        if found.enough:
            break
        run = bench.act(Fault(at, spread), seed)
        where = f"{spread}: before call {at} ({calls[at]}), order {seed}"
        # Contents are not compared: the safetensors library writes metadata in random order.
        if run.struck is None or list(map(str, run.calls[:at])) != list(map(str, calls[:at])):
            found.violations.append(f"{bench.scenario.name}: {where}: the calls before it are others than they were")
            continue
        found.look(bench, len(run.returns), at, where)
    return found


def losses(bench: Bench, seed: int | None = None, limit: int = 32, count: int | None = None) -> Found:
    """Look at the disks that a loss of power leaves before each call of the steps, and after the last one.

    Args:
        bench: The scenario.
        seed: Of the order in which ranks run.
        limit: States for each point; a random sample where there are more.
        count: States at most, in all.
    """
    found = Found()
    states: Iterable[tuple[int, int, Tree]] = power_losses(bench, seed, limit)
    if count is not None:
        states = chosen(list(states), f"{bench.scenario.name} {seed}", 1.0, count)
    for number, (at, done, tree) in enumerate(states):
        if found.enough:
            break
        write_tree(bench.root, tree)
        found.look(bench, done, number, f"power lost before call {at}, order {seed}: {_sizes(tree)}")
    return found


def chosen(items: Sequence[Item], seed: str, share: float, count: int | None) -> list[Item]:
    """Return a share of some items, and no more than so many, in their order."""
    number = round(len(items) * share)
    number = number if count is None else min(number, count)
    picked = Random(seed).sample(range(len(items)), min(len(items), max(1, number)))
    return [items[i] for i in sorted(picked)]


def power_losses(bench: Bench, seed: int | None, limit: int) -> Iterator[tuple[int, int, Tree]]:
    """Yield the number of calls before, the steps acknowledged before, and the disk; each disk once."""
    run = bench.act(seed=seed)
    if any(run.errors):
        raise Violation(f"{bench.scenario.name}: without a fault: {run.errors}")
    after = read_tree(bench.root)
    disk = Disk(bench.before)
    chance = Random(f"{bench.scenario.name} {seed}")
    seen = set()
    for at in range(len(run.calls) + 1):
        if at:
            disk.apply(run.calls[at - 1])
        done = sum(count <= at for count in run.returns)
        for tree in disk.states(chance, limit):
            # Hashes of bytes are kept with them, and the same bytes come again and again.
            digest = hash((done, frozenset(tree.items())))
            if digest not in seen:
                seen.add(digest)
                yield at, done, tree
    if disk.tree() != after:
        raise Violation(f"{bench.scenario.name}: the recorded calls do not give the disk that the steps gave")


def _sizes(tree: Tree) -> str:
    return ", ".join(f"{path} {len(content)}" for path, content in sorted(tree.items()) if content is not None)
