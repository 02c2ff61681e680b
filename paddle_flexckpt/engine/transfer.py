"""Transfer: fill the targets of all ranks from a source, files or the ranks' own memory, in steps that all take.

Tested in tests/engine/test_transfer.py, tests/live/test_policies.py and tests/live/test_options.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, CheckpointError, ValidationError, concat, validate_shards
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.engine.agreement import BRIEF_LOAD, Ranks, Solo, check_coordinator, check_heads, is_brief
from paddle_flexckpt.engine.kept_loads import KeptLoad, describe_load
from paddle_flexckpt.engine.kept_plans import KeptPlan, KeptPlans, fingerprint, in_full
from paddle_flexckpt.engine.mapping import compile_mapping
from paddle_flexckpt.engine.names import check_across_ranks
from paddle_flexckpt.engine.options import TransferOptions
from paddle_flexckpt.engine.plan import FillPlan, plan_fill
from paddle_flexckpt.engine.powers import NOTHING, Facts
from paddle_flexckpt.engine.resolution import Resolution
from paddle_flexckpt.engine.resolver import complete, resolve
from paddle_flexckpt.engine.targets import Memory, Targets
from paddle_flexckpt.engine.unexpected import check_unexpected, refuse_nothing
from paddle_flexckpt.report import LoadReport, order_warning, replica_warning

logger = logging.getLogger("paddle_flexckpt")
# What is the same on all ranks of what they say of a kept plan.
_BRIEF_BYTES = len(BRIEF_LOAD) + 16
_report_level = contextvars.ContextVar("report_level", default=logging.INFO)


@dataclass(frozen=True, eq=False)
class Task:
    """Say what one rank fills, and of what.

    Attributes:
        resolution: How each target is filled.
        mapping: What statements make, or None.
        plan: The rows to fill.
    """

    resolution: Resolution
    mapping: TensorMapping | None
    plan: FillPlan

    @property
    def maps(self) -> BoxMaps | None:
        """Return what keys are made of that statements define by moving elements, or None."""
        return None if self.mapping is None else self.mapping.maps

    @property
    def memory(self) -> Memory:
        """Return the memory of the targets."""
        return self.resolution.targets.memory


class Source(Facts):
    """Give what targets are filled from. :class:`Transfer` calls :meth:`open`, ``prepare``, ``plan`` and ``move``.

    Attributes:
        path: What to call it.
        unique_id: The checkpoint's id, or None.
        partial: What it lacks of its files, where a repair has rebuilt its manifest without them.
        catalog: All of its shards, or those that :meth:`want` chose; known when it is open.
        between_ranks: Whether ranks send each other what they need: each has to know what the others want.
        keeps_plans: Whether what was planned may serve again, by :meth:`keep` and :meth:`recall`.
    """

    path: str
    unique_id: int | None = None
    partial = ""
    catalog: Catalog
    between_ranks = False
    keeps_plans = False

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def open(self) -> dict[str, str]:
        """Open it; return what ranks compare of it: ``checkpoint`` says which one it is."""
        return {}

    def want(self, targets: Targets) -> None:
        """Know at least the shards that these targets may be filled from, all of each key; by default it knows all."""

    def complete(self) -> bool:
        """Know all shards; return whether it has not known them before."""
        return False

    def describe(self) -> bytes:
        """Return what is the same for a source with the same shards, and what only the other ranks know of it."""
        return encode_catalog(replace(self.catalog, files=()))

    def used(self, task: Task) -> bytes:
        """Return what :meth:`gather_used` has to know of each rank: what it fills something from."""
        return np.packbits(task.resolution.used(self.catalog, task.mapping)).tobytes()

    def gather_used(self, answers: Sequence[bytes]) -> tuple[Sequence[str], np.ndarray]:
        """Return all keys, and bool for each: whether a rank uses it; no keys where all of a model's are used.

        ``answers`` has what :meth:`used` gave on every rank.
        """
        bits = np.bitwise_or.reduce([np.frombuffer(each, dtype=np.uint8) for each in answers])
        return self.catalog.keys, np.unpackbits(bits, count=len(self.catalog.keys)).astype(bool)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Check that this rank can take part in a task, and return what the other ranks have to know of it."""
        raise NotImplementedError

    @property
    def access(self) -> bytes:
        """Return what it plans by, besides the catalog and what the ranks say; the same on every rank."""
        return b""

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Plan what ranks send each other; ``answers``: by field, what :meth:`prepare` gave on every rank."""

    def keep(self) -> Any:
        """Return what was planned, as :class:`KeptReads`, without anything of this checkpoint alone."""
        raise NotImplementedError

    def recall(self, task: Task, planned: Any) -> bytes:
        """Do what :meth:`prepare` does, but plan: take what :meth:`keep` gave for a source like this one.

        Return what the other ranks need to reach this one, if they send each other anything.
        """
        raise NotImplementedError

    def meet(self, addresses: list[bytes]) -> bool:
        """Take note of what :meth:`recall` gave on every rank; return whether the plan still holds."""
        return True

    def move(self, task: Task) -> dict[str, Any]:
        """Fill all rows of the plan; return what the report says of it, by field."""
        raise NotImplementedError


class Transfer:
    """Fill the targets of all ranks from a source.

    Every rank of the group makes one and makes the same calls, in this order; :meth:`run` makes them all:

    1. :meth:`describe`: where there are AOA statements, gather the targets of all ranks, so that statements mean the
       same on each of them (one collective).
    2. :meth:`agree`: open the source, resolve how each target is filled, plan what to fill; then compare options, and
       see which keys nobody asks for (one collective; two or three if ranks find that fused parameters have to be put
       right before they send them).
    3. :meth:`plan`: plan what ranks send each other (one collective; none if each reads for itself).
    4. :meth:`move`: read, or send and receive; compute; put back (one collective).
    5. :meth:`report`: say what was done.

    Where all ranks have kept a plan for what they are called with, the first collective tells so, in place of steps 1
    to 3. No target is touched before step 4. An error in any step is the same on every rank.
    """

    def __init__(
        self,
        comm: Ranks,
        source: Source,
        describe_targets: Callable[[], Targets],
        options: TransferOptions,
        call: str = "",
        context: str = "",
        begin: float | None = None,
        plans: KeptPlans | None = None,
    ) -> None:
        """Take no step yet.

        Args:
            comm: The ranks.
            source: What targets are filled from.
            describe_targets: Gives this rank's targets, or raises.
            options: Of the call.
            call: Its name, which ranks compare.
            context: What is being done, for errors.
            begin: When the call began; by default now.
            plans: Those that were kept; by default none is, or will be.
        """
        self._comm, self._source, self._options = comm, source, options
        self._describe_targets, self._call, self._context = describe_targets, call, context
        self._all_targets: Catalog | None = None
        self._plans = plans if source.keeps_plans else None
        self._own: bytes | None = None
        self._recalled: KeptPlan | None = None
        self._whole = False
        self._begin = time.perf_counter() if begin is None else begin

    def run(self) -> LoadReport:
        """Take all steps; return the report.

        Raises:
            ValidationError: Source and targets do not fit (on every rank, with the same text); no target was changed.
            CheckpointError: Something failed (likewise); from step 4 on targets may be partly overwritten.
        """
        with self._source.closing:
            self.prepare()
            self.move()
            return self.report()

    def prepare(self) -> Task:
        """Take the steps before the first target is touched; return what this rank fills."""
        self.describe()
        if self._recalled is None:
            self.agree()
        if self._recalled is None:
            self.plan()
            self._keep()
        self._planned = time.perf_counter()
        return self._task

    def again(self, begin: float) -> LoadReport:
        """Move what was planned, now or long ago, and report; ``begin``: when that was asked for."""
        self._begin, self._planned = begin, time.perf_counter()
        self.move()
        return self.report()

    @functools.cached_property
    def _described(self) -> tuple[Targets, bytes]:
        """Return this rank's targets, and what has to be the same on every rank."""
        said = self._said = self._source.open()
        targets = self._describe_targets()
        self._source.want(targets)
        check_coordinator(self._comm, self._options.coordinator_rank)
        return targets, self._options.encode(self._call, **said, context=self._context)

    def _meet(self, work: Callable[[], bytes]) -> list[bytes] | None:
        """Take a step in which ranks meet; return what all say, or None if it is the first and a kept plan serves.

        Where some have kept one and others have not, those say all in one collective more.
        """
        recalls = self._plans is not None and self._own is None

        def say() -> tuple[None, bytes]:
            return None, (self._recall() if recalls else b"") or work()

        _, answers = self._comm.together(say, self._context)
        if self._recalled is not None and self._all_recalled(answers):
            return None
        self._recalled = None
        return in_full(self._comm, answers, work, self._context)

    def _all_recalled(self, answers: list[bytes]) -> bool:
        """Return whether all ranks have kept the same plan; then they know how to reach each other."""
        said = [split(answer)[0] if is_brief(answer) else b"" for answer in answers]
        agreed = {each[:_BRIEF_BYTES] for each in said}
        return len(agreed) == 1 and b"" not in agreed and self._source.meet([each[_BRIEF_BYTES:] for each in said])

    def _recall(self) -> bytes:
        """Take the plan that was kept for what this rank is called with; return what it says then, or nothing."""
        targets, _ = self._described
        lasting = {name: said for name, said in self._said.items() if name != "checkpoint"}
        options = self._options.encode(self._call, **lasting)
        source = self._source
        self._own = describe_load(options, self._comm.ranks, targets, source.describe(), source.access) or b""
        self._recalled = None if self._plans is None else self._plans.find(self._own)
        if self._recalled is None:
            return b""
        kept: KeptLoad = self._recalled.plan
        if kept.whole:
            self._completed()
        self._task, self._unexpected = Task(kept.resolution(targets), kept.mapping, kept.plan), [*kept.unexpected]
        address = source.recall(self._task, kept.reads)
        agreed = fingerprint((self._recalled.origin, options, json.dumps(self._said).encode()))
        return join((BRIEF_LOAD + agreed + address,))

    def _keep(self) -> None:
        """Keep what was planned, if every rank knows all that its part was made of."""
        if self._plans is None or not all(self._owns):
            return
        resolution = self._task.resolution
        columns = resolution.others, resolution.filled, resolution.same_memory
        planned = self._task.mapping, self._task.plan, self._source.keep()
        kept = KeptLoad(*columns, *planned, [*self._unexpected], self._whole)
        self._plans.keep(self._owns[self._comm.position], KeptPlan(fingerprint(self._owns), kept, ()), kept.nbytes)

    def describe(self) -> None:
        """Gather the targets of all ranks, where statements are to mean the same on each of them."""
        if self._options.aoa_config is not None:
            self._gather_targets()

    def _gather_targets(self) -> None:
        def describe() -> bytes:
            targets, head = self._described
            problems = validate_shards(targets.catalog)
            if problems:
                raise ValidationError(problems)
            return join((head, encode_catalog(targets.catalog)))

        answers = self._meet(describe)
        if answers is not None:
            (catalogs,) = check_heads(answers, self._context, self._comm.ranks)
            self._all_targets = concat([decode_catalog(catalog) for catalog in catalogs])

    def agree(self) -> None:
        """Resolve and plan what each rank fills, and check that ranks agree and that the source is used up."""
        statements = self._agree_once(())
        if statements and self._source.between_ranks:
            # Whoever sends has to know them too.
            if self._all_targets is None:
                self._gather_targets()
            self._agree_once(statements)
        if self._recalled is None:
            check_across_ranks([json.loads(each) for each in self._names], self._context)

    def _agree_once(self, statements: Sequence[str]) -> list[str]:
        """Resolve and compare; return the statements that some rank's fused parameters need."""
        answers = self._meet(lambda: self._resolve(statements))
        if answers is None:
            return []
        heads = check_heads(answers, self._context, self._comm.ranks)
        needed, self._used, self._names, self._owns, *self._answers = heads
        return sorted({statement for texts in needed for statement in json.loads(texts)})

    @without_collector()
    def _resolve(self, statements: Sequence[str]) -> bytes:
        (targets, head), source = self._described, self._source
        try:
            task, needed = self._make_task(targets, statements if source.between_ranks else None)
        except ValidationError as error:
            if not source.partial:
                raise
            raise type(error)([*error.problems, f"the checkpoint is partial: {source.partial}"]) from error
        self._task = task
        names = json.dumps(task.resolution.raw_meanings()).encode()
        # The number of steps is no part of what a plan is kept for.
        own = b"" if task.resolution.by_key("completion") else self._own or b""
        return join((head, json.dumps(needed).encode(), source.used(task), names, own, *source.prepare(task)))

    def _make_task(self, targets: Targets, statements: Sequence[str] | None) -> tuple[Task, tuple[str, ...]]:
        """Return what :func:`make_task` does; where names of other keys matter, of all shards of the source."""

        def make() -> tuple[Task, tuple[str, ...]]:
            source = self._source
            return make_task(targets, source.catalog, self._options, self._all_targets, statements, source)

        try:
            made = make()
        except ValidationError:
            # Errors tell of keys that are like those that are asked for.
            if not self._completed():
                raise
            return make()
        # Statements that put fused parameters right are about their states too; scales tell of codes.
        incomplete = bool(made[1]) or made[0].resolution.may_be_codes
        return make() if incomplete and self._completed() else made

    def _completed(self) -> bool:
        """Have all shards of the source; return whether they were not known before."""
        completed = self._source.complete()
        # A kept plan is found by the shards that are known at first.
        self._whole = self._whole or completed
        return completed

    def plan(self) -> None:
        """Plan what ranks send each other; check that what nobody asks for may be left."""
        keys, used = self._source.gather_used(self._used)
        self._unexpected = check_unexpected(keys, used, self._task.mapping, self._options, self._context)
        self._source.plan(self._task, self._answers)

    def move(self) -> None:
        """Fill the targets."""

        def move() -> tuple[dict[str, Any], bytes]:
            # A process that works for itself fills files, whole or not at all: its errors stay what they are.
            with contextlib.nullcontext() if isinstance(self._comm, Solo) else _errors_name_the_targets():
                moved = self._source.move(self._task)
            resolution = self._task.resolution
            own = moved["bytes_needed"], len(resolution.filled), len(resolution.targets.catalog)
            return moved, " ".join(map(str, own)).encode()

        self._moved, answers = self._comm.together(move, self._context)
        columns = zip(*(map(int, answer.split()) for answer in answers))
        self._total_bytes, filled, asked = map(sum, columns)
        if not filled:
            refuse_nothing(asked, self._unexpected, self._context)
        self._task.memory.finish({*self._task.resolution.missing, *self._keys(self._task.plan.kept)})

    def _keys(self, rows: Iterator[int] | Mapping[int, Any] | set[int]) -> list[str]:
        catalog, band_of = self._task.resolution.targets.catalog, self._task.plan.band_of
        return sorted({catalog.key_name(row if band_of is None else int(band_of[row])) for row in rows})

    def report(self) -> LoadReport:
        """Return what was done; log it, and warn of damage and of orders that nobody knows."""
        source, end = self._source, time.perf_counter()
        moved = "exchange" if source.between_ranks else "read"
        report = LoadReport(
            source=source.path,
            unique_id=source.unique_id,
            partial=source.partial,
            unexpected=self._unexpected,
            kept=self._keys(self._task.plan.kept),
            computed=self._keys(self._task.plan.computed),
            total_bytes=self._total_bytes,
            seconds={"plan": self._planned - self._begin, moved: end - self._planned, "total": end - self._begin},
            **self._task.resolution.report(),
            **self._moved,
        )
        if report.maybe_fused:
            logger.warning(f"rank {self._comm.rank}: {order_warning(report.source, report.maybe_fused)}")
        if report.replicas_used:
            logger.warning(f"rank {self._comm.rank}: {replica_warning(report.source, report.replicas_used)}")
        if self._comm.position == self._options.coordinator_rank:
            logger.log(_report_level.get(), report.summary())
        return report


@contextlib.contextmanager
def _errors_name_the_targets() -> Iterator[None]:
    """Add to an error of the storage or the device that the targets may be partly overwritten."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{type(error).__name__}: {str(error).strip()}. Targets may be partly overwritten. Remedy: put right what "
            "failed, and make the same call again before they are used"
        ) from error


def make_task(
    targets: Targets,
    source: Catalog,
    options: TransferOptions,
    known: Catalog | None,
    statements: Sequence[str] | None = None,
    facts: Facts = NOTHING,
) -> tuple[Task, tuple[str, ...]]:
    """Resolve a rank's targets and plan what to fill; return also the statements that its fused parameters need.

    Args:
        targets: The rank's.
        source: All source shards.
        options: Of the call.
        known: The targets of all ranks; None where they are not known, and there are no AOA statements.
        statements: Those that put fused parameters right on some rank; None: this rank's count.
        facts: What the source says besides.

    Raises:
        ValidationError: Source and targets do not fit.
    """
    mapping = targets.mapping
    if options.aoa_config is not None:
        mapping = compile_mapping(options.aoa_config, source, known, options.master_weights)
    resolution = resolve(targets, source, options, mapping, facts)
    needed = resolution.statements(source)
    if statements is None:
        statements = needed
    if statements:
        everything = targets.catalog if known is None else known
        mapping, resolution = complete(resolution, statements, source, options, everything, facts)
    plan = plan_fill(resolution.catalog, resolution.filled, mapping, resolution.same_memory, targets.bands)
    return Task(resolution, mapping, plan), needed


@contextlib.contextmanager
def quiet_loads() -> Iterator[None]:
    """Let loads report at the level DEBUG: where the caller reads for itself, or reports itself."""
    token = _report_level.set(logging.DEBUG)
    try:
        yield
    finally:
        _report_level.reset(token)
