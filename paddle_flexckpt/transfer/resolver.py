"""Resolve targets: find the source of each, and check that it fits, before anything is touched.

Tested in tests/transfer/test_resolution.py and tests/loading/test_policies.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import (
    NATURAL,
    Catalog,
    Problem,
    ValidationError,
    may_be_fused,
    sound_fused,
    validate_shards,
)
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.transfer.codes import Codes
from paddle_flexckpt.transfer.fused import FusedMismatch, find_mismatch
from paddle_flexckpt.transfer.mapping import compile_mapping
from paddle_flexckpt.transfer.names import (
    CompatibleNames,
    SourceKeys,
    Unresolved,
    counted_names,
    find_compatible,
)
from paddle_flexckpt.transfer.options import TransferOptions
from paddle_flexckpt.transfer.powers import NOTHING, Facts, Power
from paddle_flexckpt.transfer.resolution import (
    ALIAS,
    MASTER,
    MASTER_END,
    MISSING,
    OWN,
    RAW_NAME,
    STATEMENT,
    Given,
    Resolution,
    Resolved,
    are_ruled,
    fit,
    have_same_form,
)
from paddle_flexckpt.transfer.targets import Targets, share_memory

if TYPE_CHECKING:
    from paddle_flexckpt.transfer.problems import Missing

_HALVES = frozenset({"float16", "bfloat16"})
_MASTER_REMEDY = 'load with master_weights="convert", by which a float32 parameter comes from its master'


def resolve(
    targets: Targets,
    source: Catalog,
    options: TransferOptions,
    mapping: TensorMapping | None = None,
    facts: Facts = NOTHING,
) -> Resolution:
    """Find the source of every target, and check that it fits.

    Args:
        targets: This rank's targets.
        source: All source shards.
        options: The options of the load.
        mapping: The mapping of keys that statements make; every other target is the source's tensor of its name.
        facts: Facts about the source.

    Raises:
        ValidationError: A target is malformed, its key is missing, or dtype or global shape differ; all are listed.
    """
    resolver = _Resolver(targets, source, options, mapping, facts)
    problems = [*validate_shards(targets.catalog), *resolver.compatible.problems]
    others = {row: resolver.resolve(row) for row in np.flatnonzero(~resolver.are_plain()).tolist()}
    if options.optimizer_states == "ignore":
        from paddle_flexckpt.transfer.state_kinds import states_of_another

        for row in states_of_another(targets.catalog, source):
            key = targets.catalog.keys[row]
            # A master that the source has is its parameter's, whatever the optimizer.
            if not key.endswith(MASTER_END) or (row in others and others[row].how == MISSING):
                others[row] = Resolved(MISSING, key)
        others = dict(sorted(others.items()))
    ambiguous = {problem.key for problem in resolver.compatible.problems}
    of_rows = {
        row: other.problem
        for row, other in others.items()
        if other.problem is not None and not (other.how == MISSING and targets.catalog.keys[row] in ambiguous)
    }
    if of_rows:
        from paddle_flexckpt.transfer.other_states import summarised

        missing = {row for row, other in others.items() if other.how == MISSING and mapping is None}
        problems += summarised(of_rows, missing, targets.catalog, source)
    if problems:
        from paddle_flexckpt.transfer.problems import with_family

        raise ValidationError(with_family(problems, options.aoa_config is not None, facts))
    names = dict(enumerate(targets.catalog.keys))
    for row, other in others.items():
        if other.how == MISSING or other.mismatch is not None or other.completion:
            del names[row]
        else:
            names[row] = other.name
    filled, same_memory = share_memory(targets, names, mapping)
    return Resolution(targets, others, np.asarray(filled, dtype=np.int64), same_memory)


def complete(
    first: Resolution,
    statements: Sequence[str],
    source: Catalog,
    options: TransferOptions,
    targets: Catalog,
    facts: Facts = NOTHING,
) -> tuple[TensorMapping, Resolution]:
    """Resolve a rank's targets again, with the statements that reorder fused parameters.

    A statement reorders one parameter, and any shard of the parameter shows how it was cut. So a rank may compile only
    the statements that it needs itself: the result is the same as if it compiled those of all ranks.

    Raises:
        ValidationError: Statements or targets do not fit.
    """
    problems = _mixed(first, source)
    if problems:
        raise ValidationError(problems)
    mapping = compile_mapping(options.aoa_config, source, targets, options.master_weights, statements)
    again = resolve(first.targets, source, options, mapping, facts)
    if again.mismatches:
        raise ValidationError([one.problem() for one in again.mismatches])
    # The report has the first results.
    others = {
        row: new._replace(
            mismatch=old.mismatch,
            alias=new.alias or old.alias,
            maybe_fused=old.maybe_fused,
            completion=old.completion,
        )
        for row, (old, new) in enumerate(zip(first.rows, again.rows))
    }
    return mapping, replace(again, others=others)


def _mixed(first: Resolution, source: Catalog) -> list[Problem]:
    """Return the states in another order than their parameter, whose statement would move them too."""
    catalog = first.targets.catalog
    keys, filled = {*source.keys, *catalog.keys}, set(first.filled.tolist())
    moved = {one.key: one.summary() for one in first.mismatches}
    rows = {key: row for row, key in enumerate(catalog.keys)}
    bases = {split_state(key, keys)[0]: key for key in sorted(moved, reverse=True)}
    problems = []
    for key, row in rows.items():
        base = split_state(key, keys)[0]
        if base not in bases or (key not in moved and row not in filled):
            continue
        like = rows[bases[base]]
        same = catalog.unpadded(row, catalog.global_shape) == catalog.unpadded(like, catalog.global_shape)
        if same and moved.get(key) != moved[bases[base]]:
            remedy = "mark parameter and states with the same FusedAxis, or give AOA statements for them"
            what = "a fused parameter and its states are not in the same order"
            got = moved.get(key, "nothing to do")
            problems.append(
                Problem(what, key, int(catalog.rank[row]), None, moved[bases[base]], got, remedy, code="FC207")
            )
    return problems


class _Resolver:
    """The resolution of targets, one after the other."""

    def __init__(
        self,
        targets: Targets,
        source: Catalog,
        options: TransferOptions,
        mapping: TensorMapping | None,
        facts: Facts,
    ) -> None:
        self._targets, self._catalog, self._source = targets, targets.catalog, source
        self._options, self._mapping, self._casts = options, mapping, options.dtype == "cast"
        self._facts = facts
        self._codes = Codes(source, mapping, facts.settings)
        self._numbers = {name: i for i, name in enumerate(source.keys)}
        self._defined: Collection[str] = () if mapping is None else mapping.tensors
        # Keys that statements remove, or consume without making another of the name, have no other names.
        self._gone = frozenset() if mapping is None else mapping.unfed | mapping.removed
        self._removed = frozenset() if mapping is None else mapping.removed
        self._unfed = self._gone - self._removed
        # A key that a statement defines or removes is not the source's tensor of that name.
        away = {*self._defined, *self._gone}
        self._index = {name: i for name, i in self._numbers.items() if name not in away} if away else self._numbers
        self._first_row = np.full(len(source.keys), -1, dtype=np.int64)
        # In reverse, so that the first row of each key stays.
        self._first_row[source.key[::-1]] = np.arange(len(source))[::-1]
        self._unordered = may_be_fused(source)
        self._may_move = self._unordered | sound_fused(source)
        # Targets that statements make are in the order that these give them.
        self._mends = options.fused == "convert" and targets.mapping is None
        self._copied: dict[str, str] = {}
        if mapping is not None and targets.mapping is None:
            ruled = any(order.axis is not None for order in (*self._catalog.orders, *source.orders))
            # Renames matter only if orders are recorded or may be missing.
            self._copied = mapping.copied_keys(mapping.tensors) if ruled or self._unordered.any() else {}
        index = self._index
        # A raw name may mean another parameter in another process.
        self._counted = frozenset[str]()
        if options.mw_name_compatibility or options.raw_names != "trusted":
            self._counted = frozenset(counted_names(self._catalog))
        self._names = [
            key if key in index and key not in self._counted else self._own_name(row)
            for row, key in enumerate(self._catalog.keys)
        ]
        self.compatible = CompatibleNames()
        if None in self._names and (options.mw_name_compatibility or self._counted):
            self.compatible = self._find_compatible()

    def _aliases(self, row: int) -> tuple[str, ...]:
        """Return the other names of a tied target; if a statement removes its own, also those of the same memory."""
        if not self._options.tied_names:
            return ()
        targets, keys, others = self._targets, self._catalog.keys, list[int]()
        if keys[row] in self._removed and targets.place(row) is not None:
            others = np.flatnonzero((targets.spans == targets.spans[row]).all(axis=1)).tolist()
        shared = (keys[each] for each in others if each != row and targets.place(each) == targets.place(row))
        return (*targets.aliases[row], *shared)

    def _own_name(self, row: int) -> str | None:
        """Return a target's name in the source or the mapping: its own, or a tied parameter's."""
        key = self._catalog.keys[row]
        # If nothing feeds its own name, its other names do not count either, unless a statement removes it: a tied
        # parameter's states are under one of its names, which is that of statements.
        unfed = key in self._unfed
        for name in (key, *self._aliases(row)):
            if name in self._defined or (not unfed and name in self._index and name not in self._counted):
                return name
        return None

    def _find_compatible(self) -> CompatibleNames:
        """Find the source's names of targets that it lacks under their own names."""
        catalog, targets, source = self._catalog, self._targets, self._source
        exact = not self._options.mw_name_compatibility
        unresolved: list[Unresolved] = []
        claimed: dict[str, list[tuple[str, object]]] = {}
        for row, name in enumerate(self._names):
            key, place = catalog.keys[row], targets.place(row)
            if name is not None:
                claimed.setdefault(name, []).append((key, place))
            elif key not in self._gone and (key in self._counted or not exact):
                rank, shape = int(catalog.rank[row]), catalog.unpadded(row, catalog.global_shape)
                names, known = targets.raw_names[row], catalog.state_names.get(key, ())
                unresolved.append(Unresolved(key, rank, self._aliases(row), names, place, known, shape))
        rows = {key: int(self._first_row[number]) for key, number in self._index.items()}
        shapes = {key: source.unpadded(row, source.global_shape) for key, row in rows.items()}
        there = SourceKeys(shapes, source.state_names)
        found = find_compatible(unresolved, there, claimed, exact)
        if self._options.raw_names == "trusted" or not unresolved:
            return found
        from paddle_flexckpt.transfer.problems import find_guesses

        return replace(found, problems=found.problems + find_guesses(unresolved, there, found))

    def are_plain(self) -> np.ndarray:
        """Return bool per target: whether the source's tensor of its name fills it without a cast or a remark."""
        target, source = self._catalog, self._source
        number = np.asarray([self._index.get(key, -1) for key in target.keys], dtype=np.int64)
        if self._counted:
            number[[key in self._counted for key in target.keys]] = -1
        plain = number >= 0
        rows, number = np.flatnonzero(plain), number[plain]
        ruled = are_ruled(target)[rows] | are_ruled(source)[number] | self._may_move[number]
        plain[rows] = have_same_form(target, rows, source, self._first_row[number]) & ~ruled
        return plain

    def resolve(self, row: int) -> Resolved:
        """Return the source of a target."""
        key = self._catalog.keys[row]
        found = self._names[row] or self.compatible.names.get(key)
        if self._mapping is not None and found is not None and found in self._mapping.tensors:
            return self._by_statement(row, found, self._mapping)
        master = self._master(row, found)
        name = master or found
        power = Power.of(key) if name is None else None
        if power is not None:
            return self._of_steps(row, power)
        if name is None:
            problem = self._unfilled(row)
            return Resolved(MISSING, key, problem=problem)
        how = OWN if name == key else MASTER if master else RAW_NAME if key in self.compatible.names else ALIAS
        alias = name if name != key and not master else ""
        number = self._index[name]
        given = self._stored(row, number)
        casts = self._casts or (row in self._targets.masters and given.dtype in _HALVES)
        cast, problem = fit(self._catalog, row, given, bool(master) or casts)
        if problem is not None and not (master or casts) and self._counterpart(row, name) is not None:
            same_shape = given.shape == self._catalog.unpadded(row, self._catalog.global_shape)
            problem = replace(problem, code="FC204", remedy=_MASTER_REMEDY) if same_shape else problem
        problem = self._of_codes(row, name) or problem
        resolved = Resolved(how, name, alias, cast, master or "", problem=problem)
        return resolved if problem else self._in_order(resolved, row, number)

    def _of_steps(self, row: int, power: Power) -> Resolved:
        """Return how to fill a power of beta that the source lacks: from the number of steps of its moments."""
        key, mapping, sources = self._catalog.keys[row], self._mapping, set[str]()
        for moment in power.moments:
            number = self._target_numbers.get(moment)
            name = (moment if number is None else self._names[number]) or self.compatible.names.get(moment, "")
            sources |= {name} if mapping is None else mapping.source_names([name])
        sources &= self._numbers.keys()
        steps, beta = power.progress(self._facts, sorted(sources))
        if steps is not None and beta is None:
            beta = self._targets.memory.beta(row, power.number)
        if steps is not None and beta is not None:
            # Paddle begins with beta itself, and multiplies after each step.
            return Resolved(STATEMENT, key, completion=power.statement(float(beta ** (steps + 1))))
        problem = self._unfilled(row)
        if problem is None or not sources:
            return Resolved(MISSING, key, problem=problem)
        return Resolved(MISSING, key, problem=replace(problem, code="FC204", remedy=power.remedy(steps)))

    @cached_property
    def _target_numbers(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self._catalog.keys)}

    def _by_statement(self, row: int, found: str, mapping: TensorMapping) -> Resolved:
        """Return the source of a target that statements make under a name."""
        key, master = self._catalog.keys[row], mapping.masters.get(found, "")
        info = mapping.tensors[found]
        # Braces of the statement are its own.
        origin = mapping.made_by(found).replace("{", "{{").replace("}", "}}")
        remedy = "correct the statement, or the target"
        given = Given(info.shape, info.dtype, f"AOA gives {{}}{origin}", shape_remedy=remedy)
        cast, problem = fit(self._catalog, row, given, bool(master) or self._casts)
        problem = self._of_codes(row, found) or problem
        resolved = Resolved(STATEMENT, found, found if found != key else "", cast, master, problem=problem)
        if self._targets.mapping is not None and found in self._numbers and found not in mapping.provenance:
            resolved = resolved._replace(maybe_fused=found if self._unordered[self._numbers[found]] else "")
        stored = self._copied.get(found, found)
        # A rename keeps the order; a statement ``key -> key`` takes the stored order.
        return resolved if problem or stored == found else self._in_order(resolved, row, self._numbers[stored])

    def _of_codes(self, row: int, name: str) -> Problem | None:
        """Return the problem of a target that would be made of codes without their scales."""
        catalog = self._catalog
        rank = int(catalog.rank[row])
        return self._codes.problem(name, catalog.dtype_name(row), key=catalog.key_name(row), rank=rank)

    def _in_order(self, resolved: Resolved, row: int, number: int) -> Resolved:
        """Return the same with its problem or remark about the order of the elements."""
        key, found = self._catalog.keys[row], self._source.keys[number]
        mismatch = find_mismatch(self._catalog, row, self._source, number)
        if isinstance(mismatch, FusedMismatch):
            mismatch, other_name = replace(mismatch, found=resolved.name), self.compatible.names.get(key, key) != key
            resolved = resolved._replace(maybe_fused=found if mismatch.assumed else "")
            if self._mends and mismatch.statement is not None and not other_name:
                return resolved._replace(mismatch=mismatch)
            return resolved._replace(problem=mismatch.problem(other_name))
        if mismatch is not None:
            return resolved._replace(problem=mismatch)
        if self._may_move[number] and self._is_cut_otherwise(row, number):
            return resolved._replace(maybe_fused=found)
        return resolved

    def _is_cut_otherwise(self, row: int, number: int) -> bool:
        """Return whether a target without a rule is cut otherwise, along its last axis, than the source's shards."""
        here, there = self._catalog.order(row), self._source.order(number)
        if any(each is not None and each.axis is not None for each in (here, there)) or here == there == NATURAL:
            return False
        return bool(self._catalog.shape[row, -1] != self._source.shape[self._first_row[number], -1])

    def _master(self, row: int, found: str | None) -> str | None:
        """Return the source key to convert from, if that is allowed."""
        converts = self._options.master_weights == "convert" or row in self._targets.masters
        return self._counterpart(row, found) if converts else None

    def _counterpart(self, row: int, found: str | None) -> str | None:
        """Return the source key of a master's parameter, or of a parameter's master, to convert a target from, or None.

        Args:
            row: The target.
            found: The source key of its name.
        """
        key = self._catalog.keys[row]
        if self._mapping is not None and key in self._mapping.unfed:
            return None
        if found is None:
            candidates = (key, *self._targets.aliases[row])
            parameters = [name[: -len(MASTER_END)] for name in candidates if name.endswith(MASTER_END)]
            return next((name for name in parameters if name in self._index), None)
        stored = self._source.dtype_name(int(self._first_row[self._index[found]]))
        if self._catalog.dtype_name(row) == "float32" and stored in _HALVES and found + MASTER_END in self._index:
            return found + MASTER_END
        return None

    def _unfilled(self, row: int) -> Problem | None:
        """Return the problem of a target that nothing fills, if that is an error."""
        if not self._options.missing_is_an_error:
            return None
        power = Power.of(self._catalog.keys[row])
        beta = None if power is None else self._targets.memory.beta(row, power.number)
        return self._missing.problem(row, self._counterpart(row, None) is not None, beta)

    @cached_property
    def _missing(self) -> Missing:
        from paddle_flexckpt.transfer.problems import Missing

        return Missing(self._catalog, self._source, self._mapping, self.compatible)

    def _stored(self, row: int, number: int) -> Given:
        """Return the source's tensor of the number of a key."""
        source, source_row = self._source, int(self._first_row[number])
        shape = source.unpadded(source_row, source.global_shape)
        given = Given(shape, source.dtype_name(source_row), "{} (source)", source.file_name(source_row))
        if shape == self._catalog.unpadded(row, self._catalog.global_shape):
            return given
        from paddle_flexckpt.transfer.problems import reshaped

        remedy = reshaped(self._catalog, row, source, source_row, self._missing.known)
        return replace(given, shape_remedy=remedy) if remedy else given
