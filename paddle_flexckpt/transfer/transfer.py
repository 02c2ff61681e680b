"""Transfer: fill the targets of all ranks from a source, files or the ranks' own memory, in steps common to all.

Tested in tests/transfer/test_transfer.py, tests/loading/test_policies.py and tests/loading/test_options.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, ValidationError, concat, validate_shards
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.errors import MAX_LISTED
from paddle_flexckpt.catalog.texts import (
    order_warning,
    precision_warning,
    replica_warning,
    unread_warning,
    untouched_warning,
)
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.transfer.agreement import Ranks, Solo, check_coordinator, check_heads
from paddle_flexckpt.transfer.mapping import compile_mapping
from paddle_flexckpt.transfer.names import check_across_ranks
from paddle_flexckpt.transfer.options import TransferOptions
from paddle_flexckpt.transfer.plan import plan_fill
from paddle_flexckpt.transfer.powers import NOTHING, Facts
from paddle_flexckpt.transfer.resolution import MASTER_END, check_unexpected, dropped_parameters, refuse_nothing
from paddle_flexckpt.transfer.resolver import complete, resolve
from paddle_flexckpt.transfer.source import Source, Task
from paddle_flexckpt.transfer.targets import Targets

logger = logging.getLogger("paddle_flexckpt")
_report_level = contextvars.ContextVar("report_level", default=logging.INFO)


class Transfer:
    """The transfer of one call: it fills the targets of all ranks from a source.

    Every rank of the group makes one and calls :meth:`run`. No target is touched before the data moves. An error in any
    step is the same on every rank.
    """

    _task: Task
    _unexpected: list[str]
    _dropped: list[str]

    def __init__(
        self,
        comm: Ranks,
        source: Source,
        describe_targets: Callable[[], Targets],
        options: TransferOptions,
        call: str = "",
        context: str = "",
        begin: float | None = None,
    ) -> None:
        """Take no step yet."""
        self._comm, self._source, self._options = comm, source, options
        self._describe_targets, self._call, self._context = describe_targets, call, context
        self._all_targets: Catalog | None = None
        self._is_tied = False
        self._begin = time.perf_counter() if begin is None else begin

    def run(self) -> LoadReport:
        """Take all steps; return the report.

        Raises:
            ValidationError: Source and targets do not fit (on every rank, with the same text); no target was changed.
            CheckpointError: Something failed (likewise); once data moves, targets may be partly overwritten.
        """
        with self._source.closing:
            self.prepare()
            return self.carry_out(self._begin)

    def prepare(self) -> Task:
        """Take the steps before the first target is touched; return the task."""
        comm, source, context = self._comm, self._source, self._context
        # All send the options and the source's identity, with their targets or their tasks.
        _, answers = comm.together(self._first_message, context)
        if self._gathers_targets:
            self._read_targets(answers)
            _, answers = comm.together(self._task_message, context)
        needed, *others = check_heads(answers, context, comm.ranks)
        statements = sorted({statement for texts in needed for statement in json.loads(texts)})
        if statements and source.between_ranks:
            # Fused parameters have to be reordered before they are sent: the sender needs the statements.
            if self._all_targets is None:
                self._read_targets(comm.together(self._targets_message, context)[1])
            _, answers = comm.together(functools.partial(self._task_message, statements), context)
            _, *others = check_heads(answers, context, comm.ranks)
        used, meanings, stances, tied, *of_source = others
        self._is_tied = any(tied)
        if any(stances):
            from paddle_flexckpt.transfer.state_kinds import check_stances

            check_stances(stances, comm.ranks, context)
        check_across_ranks([json.loads(each) for each in meanings], context)
        # Unexpected keys may be an error.
        keys, is_used = source.gather_used(used)
        self._unexpected = check_unexpected(keys, is_used, self._task.mapping, self._options, context)
        self._dropped = dropped_parameters(self._unexpected, keys, is_used)
        # The exchange between ranks; empty if each reads for itself.
        source.plan(self._task, of_source)
        return self._task

    def carry_out(self, begin: float) -> LoadReport:
        """Fill the targets by the plan, which may be that of an earlier call, and return the report.

        Args:
            begin: When the call began.
        """
        planned, task, source = time.perf_counter(), self._task, self._source
        if self._is_tied:
            self._compare_tied()
        moved, answers = self._comm.together(self._move, self._context)
        counts, untouched, names = zip(*(json.loads(answer) for answer in answers))
        total_bytes, filled, asked = map(sum, zip(*counts))
        if not filled:
            refuse_nothing(asked, self._unexpected, self._context)
        kept, moving = task.keys_of(task.plan.kept), "exchange" if source.between_ranks else "read"
        task.memory.finish({*task.resolution.missing, *kept})
        end = time.perf_counter()
        report = LoadReport(
            source=source.path,
            unique_id=source.unique_id,
            partial=source.partial,
            unexpected=self._unexpected,
            dropped=self._dropped,
            kept=kept,
            computed=task.keys_of(task.plan.computed),
            total_bytes=total_bytes,
            seconds={"plan": planned - begin, moving: end - planned, "total": end - begin},
            **task.resolution.report(),
            **moved,
        )
        if report.maybe_fused:
            logger.warning(f"rank {self._comm.rank}: {order_warning(report.source, report.maybe_fused)}")
        if report.replicas_used:
            logger.warning(f"rank {self._comm.rank}: {replica_warning(report.source, report.replicas_used)}")
        if self._comm.position == self._options.coordinator_rank:
            if task.mapping is not None and task.mapping.unread:
                logger.warning(unread_warning(report.source, task.mapping.unread, task.resolution.targets.catalog.keys))
            left = {*self._unexpected}
            cast = [
                key for key, how in report.cast.items() if how.endswith("> float32") and f"{key}{MASTER_END}" in left
            ]
            if cast:
                logger.warning(precision_warning(report.source, cast))
            if any(untouched):
                known = sorted({key for keys in names for key in keys})
                is_all = all(count <= MAX_LISTED for count in untouched)
                logger.warning(untouched_warning(report.source, known, is_all))
            logger.log(_report_level.get(), report.summary())
        return report

    def _first_message(self) -> tuple[None, bytes]:
        """Open the source, and describe this rank's targets; return its first message to the others."""
        compared = self._source.open()
        self._targets = self._describe_targets()
        self._source.want(self._targets)
        check_coordinator(self._comm, self._options.coordinator_rank)
        self._head = self._options.encode(self._call, **compared, context=self._context)
        return self._targets_message() if self._gathers_targets else self._task_message()

    @property
    def _gathers_targets(self) -> bool:
        """Return whether ranks first gather their targets: statements have to mean the same on all of them."""
        return self._options.aoa_config is not None

    def _targets_message(self) -> tuple[None, bytes]:
        problems = validate_shards(self._targets.catalog)
        if problems:
            raise ValidationError(problems)
        return None, join((self._head, encode_catalog(self._targets.catalog)))

    def _read_targets(self, answers: list[bytes]) -> None:
        (catalogs,) = check_heads(answers, self._context, self._comm.ranks)
        self._all_targets = concat([decode_catalog(catalog) for catalog in catalogs])

    @without_collector()
    def _task_message(self, statements: Sequence[str] = ()) -> tuple[None, bytes]:
        """Resolve and plan this rank's targets; return its message to the others.

        ``statements`` reorder fused parameters on some rank, if ranks send each other elements.
        """
        source = self._source
        try:
            self._task, needed = self._make_task(statements if source.between_ranks else None)
        except ValidationError as error:
            if not source.partial:
                raise
            raise type(error)([*error.problems, f"the checkpoint is partial: {source.partial}"]) from None
        task = self._task
        meanings, statements_needed = (json.dumps(each).encode() for each in (task.resolution.raw_meanings(), needed))
        tied = b"+" if task.resolution.same_memory else b""
        stance = b""
        if self._options.optimizer_states == "ignore":
            from paddle_flexckpt.transfer.state_kinds import encode_stance  # most loads need none

            stance = encode_stance(self._targets.catalog, source.catalog)
        message = statements_needed, source.used(task), meanings, stance, tied, *source.prepare(task)
        return None, join((self._head, *message))

    def _make_task(self, statements: Sequence[str] | None) -> tuple[Task, tuple[str, ...]]:
        """Return the result of :func:`make_task`; if names of other keys matter, with all shards of the source."""
        source = self._source
        try:
            made = make_task(self._targets, source.catalog, self._options, self._all_targets, statements, source)
        except ValidationError:
            # Errors list keys similar to the missing ones.
            if not source.complete():
                raise
            return self._make_task(statements)
        # Statements that reorder fused parameters are about their states too; scales are evidence of codes.
        is_incomplete = bool(made[1]) or made[0].resolution.may_be_codes
        return self._make_task(statements) if is_incomplete and source.complete() else made

    def _compare_tied(self) -> None:
        """Compare the values that one tied parameter has under several names, in memory of their own."""
        comm, source, context = self._comm, self._source.again(), self._context

        def prepare() -> tuple[Task, bytes]:
            task = self._task.of_tied()
            return task, join(source.prepare(task))

        with source.closing:
            task, answers = comm.together(prepare, context)
            source.plan(task, [*zip(*map(split, answers))])

            def move() -> tuple[None, bytes]:
                source.move(task)
                task.refuse_differing()
                return None, b""

            comm.together(move, context)

    def _move(self) -> tuple[dict[str, Any], bytes]:
        """Fill this rank's targets; return fields of the report, and this rank's message for the others' reports."""
        # A single process writes files, complete or not at all: its errors are raised unchanged.
        with contextlib.nullcontext() if isinstance(self._comm, Solo) else _errors_name_the_targets():
            moved = self._source.move(self._task)
        resolution = self._task.resolution
        counts = moved["bytes_needed"], len(resolution.filled), len(resolution.targets.catalog)
        untouched = resolution.untouched(self._source.catalog)
        return moved, json.dumps((counts, len(untouched), untouched[:MAX_LISTED])).encode()


@contextlib.contextmanager
def _errors_name_the_targets() -> Iterator[None]:
    """Add to an error of the storage or the device that the targets may be partly overwritten."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{type(error).__name__}: {str(error).strip()}. Targets may be partly overwritten. Remedy (FC401): put "
            "right what failed, and make the same call again before they are used"
        ) from error


def make_task(
    targets: Targets,
    source: Catalog,
    options: TransferOptions,
    known: Catalog | None,
    statements: Sequence[str] | None = None,
    facts: Facts = NOTHING,
) -> tuple[Task, tuple[str, ...]]:
    """Resolve a rank's targets and plan the rows to fill; return also the statements that its fused parameters need.

    Args:
        targets: The rank's targets.
        source: All source shards.
        options: The options of the call.
        known: The targets of all ranks; None: not known, and there are no AOA statements.
        statements: The statements that reorder fused parameters on some rank; None: this rank's own.
        facts: Facts about the source.

    Raises:
        ValidationError: Source and targets do not fit.
    """
    mapping = targets.mapping
    if options.aoa_config is not None:
        mapping = compile_mapping(options.aoa_config, source, known, options.master_weights, settings=facts.settings)
    resolution = resolve(targets, source, options, mapping, facts)
    needed = resolution.statements(source)
    if statements is None:
        statements = needed
    if statements:
        everything = targets.catalog if known is None else known
        mapping, resolution = complete(resolution, statements, source, options, everything, facts)
    written = np.setdiff1d(resolution.filled, [*resolution.same_memory])  # others are compared
    return Task(resolution, mapping, plan_fill(resolution.catalog, written, mapping, targets.bands)), needed


@contextlib.contextmanager
def quiet_loads() -> Iterator[None]:
    """Let loads log their reports at the level DEBUG, for callers with reports of their own."""
    token = _report_level.set(logging.DEBUG)
    try:
        yield
    finally:
        _report_level.reset(token)
