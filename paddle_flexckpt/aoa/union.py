"""Unite the statements of ranks that hold different parts of a model. Tested in tests/aoa/test_union.py.

Each rank has the statements of its own layers and experts. A load needs all statements on every rank, each once, in an
order that keeps that of each rank: statements are carried out from top to bottom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paddle_flexckpt.aoa.macros import array_names
from paddle_flexckpt.aoa.parser import Statement, Variable, parse_program
from paddle_flexckpt.aoa.placeholders import NameTable, parse_name
from paddle_flexckpt.aoa.statements import AoaError, StatementError, describe_problem, shorten


def united_statements(programs: Mapping[int, Sequence[str]]) -> list[str]:
    """Return one program for all ranks: each statement of each rank, once, in an order that keeps every rank's.

    A statement of one rank alone goes before the next statement that it shares with earlier ranks. A statement that a
    rank has twice stays twice. Texts with several statements are split, unless all ranks have the same.

    Args:
        programs: The statements of each rank.

    Raises:
        AoaError: A rank's statements are malformed, or ranks contradict each other: they assign a name differently,
            have the same statements in another order, or one reads what another assigns and no rank does both.
    """
    given = list(programs.values())
    if all(list(program) == list(given[0]) for program in given):
        return list(given[0])
    table = _Table()
    steps = {rank: table.numbers(rank, program) for rank, program in programs.items()}
    problems = list(_Uses(steps, table.statements).contradictions())
    if problems:
        raise AoaError(problems)
    merged: list[int] = []
    for rank, numbers in steps.items():
        merged = _merged(merged, numbers, rank, table.statements)
    return [table.statements[number].place.text for number in merged]


class _Table:
    """The numbered statements of all ranks; equal ones have one number, except those that one rank has twice."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self._numbers: dict[tuple[tuple[str, ...], int], int] = {}
        self._parsed: dict[str, list[tuple[tuple[str, ...], Statement]]] = {}

    def numbers(self, rank: int, program: Sequence[str]) -> list[int]:
        """Return the statements of a rank."""
        seen: Counter[tuple[str, ...]] = Counter()
        found = []
        for position, text in enumerate(program, start=1):
            for tokens, statement in self._parse(rank, position, text):
                number = self._numbers.setdefault((tokens, seen[tokens]), len(self.statements))
                seen[tokens] += 1
                if number == len(self.statements):
                    self.statements.append(statement)
                found.append(number)
        return found

    def _parse(self, rank: int, position: int, text: str) -> list[tuple[tuple[str, ...], Statement]]:
        if text not in self._parsed:
            try:
                statements = parse_program([text], position)
            except AoaError as error:
                raise AoaError([f"[rank {rank}] {problem}" for problem in error.problems]) from None
            for statement in statements:
                for variable in (*statement.left, *statement.right):
                    try:
                        parse_name(variable.name, variable.column)
                    except StatementError as error:
                        problem = describe_problem(str(error), statement.place.at(error.column))
                        raise AoaError([f"[rank {rank}] {problem}"]) from error
            self._parsed[text] = [(tuple(token.text for token in each.tokens), each) for each in statements]
        return self._parsed[text]


class _Uses:
    """The ranks that assign and read each name."""

    def __init__(self, steps: Mapping[int, list[int]], statements: Sequence[Statement]) -> None:
        self._statements = statements
        # By name and rank, the statements that assign it; by name and statement, the ranks where that reads it.
        self._assigned: dict[str, dict[int, list[int]]] = {}
        self._read: dict[tuple[str, int], set[int]] = {}
        for rank, numbers in steps.items():
            for number in numbers:
                for name in _names(statements[number].right):
                    self._assigned.setdefault(name, {}).setdefault(rank, []).append(number)
                for name in _names(statements[number].left):
                    self._read.setdefault((name, number), set()).add(rank)
        # Names that differ in their placeholders' names alone have one item.
        self._alike: NameTable[list[str]] = NameTable()
        for name in self._assigned:
            self._alike.put(name, [*(self._alike.get(name) or ()), name])

    def contradictions(self) -> Iterator[str]:
        """Return the contradictions between ranks."""
        for name, by_rank in self._assigned.items():
            first = next(iter(by_rank))
            for rank, numbers in by_rank.items():
                if numbers != by_rank[first]:
                    yield self._different(name, (first, by_rank[first]), (rank, numbers))
        for name in self._assigned:
            if "$" in name or "*" in name:
                yield from self._beside(name)
        for (name, number), ranks in self._read.items():
            for made in self._made(name):
                if ranks.isdisjoint(self._assigned[made]):
                    yield self._unordered(name, number, min(ranks), made)

    def _beside(self, pattern: str) -> Iterator[str]:
        """Return problems of names that other ranks assign and that a pattern stands for too."""
        own = self._assigned[pattern]
        for name in self._made(pattern):
            others = self._assigned[name]
            if name != pattern and own.keys() != others.keys():
                rank = next(iter(own.keys() - others.keys()), next(iter(own)))
                other = next(iter(others.keys() - own.keys()), next(iter(others)))
                yield self._different(name, (rank, own[rank]), (other, others[other]))

    def _made(self, name: str) -> list[str]:
        """Return the assigned names that may stand for the same key as a name."""
        return [made for names in self._alike.like(name) for made in names]

    def _different(self, name: str, one: tuple[int, list[int]], other: tuple[int, list[int]]) -> str:
        first, second = (", then ".join(self._text(number) for number in numbers) for _, numbers in (one, other))
        return (
            f"ranks {one[0]} and {other[0]} contradict each other about {name!r}: rank {one[0]} has {first}, rank "
            f"{other[0]} has {second}. Remedy (FC502): generate the same statements about a name on all ranks that "
            "have it"
        )

    def _unordered(self, name: str, number: int, rank: int, made: str) -> str:
        maker = min(self._assigned[made])
        return (
            f"rank {rank} reads {name!r} in {self._text(number)}, and rank {maker} assigns {made!r}, but no rank does "
            "both: which goes first is not known. Remedy (FC502): generate both statements on one rank, or choose "
            f"another name for what rank {maker} assigns"
        )

    def _text(self, number: int) -> str:
        return repr(shorten(self._statements[number].place.text))


def _names(variables: Sequence[Variable]) -> Iterator[str]:
    return (name for name in array_names(variables) if name != "_")


def _merged(before: list[int], numbers: list[int], rank: int, statements: Sequence[Statement]) -> list[int]:
    """Return both programs as one, in an order that keeps that of each."""
    known, merged, waiting, position = set(before), [], [], 0
    for number in numbers:
        if number not in known:
            waiting.append(number)
            continue
        try:
            place = before.index(number, position)
        except ValueError as error:
            raise AoaError(
                f"rank {rank} has {shorten(statements[number].place.text)!r} after a statement that an earlier rank "
                "has after it. Remedy (FC502): generate the statements that ranks share in the same order on all of "
                "them"
            ) from error
        merged += [*before[position:place], *waiting, number]
        waiting, position = [], place + 1
    return [*merged, *before[position:], *waiting]
