"""Names of one state in two worlds: what a target is called here, and what the source may call it.

A ``sharded_state_dict()`` has structured names everywhere: ``a.weight``, ``a.weight.moment1_0``, ``a.weight.w_0`` (the
master weight). A plain ``state_dict()`` names an optimizer's states after the parameter's own, *raw* name, which Paddle
counts by layer, in one of several ways. With ``linear_0.w_0`` for the parameter ``a.weight``:

- ``linear_0.w_0_moment1_0``; ``linear_0.w_0_fp32_master_0_moment1_0`` where the parameter has a master weight;
  ``linear_0.w_0_moment1_1`` of the second optimizer in the process;
- ``master_weights.linear_0.w_0`` (dynamic graph), ``linear_0.w_0_fp32_master_0`` (static graph);
- ``linear_0.w_0.dist...`` in all of these once the parameter is a DistTensor;
- ``model.`` or ``optimizer.`` in front, where the two are parts of one state dict;
- ``_layers.`` in front, or behind these, where a fleet wrapper of the model gave the names.

:func:`canonical` gives one form to all that mean the same. The rules of a search are

1. what is found under its own name is never looked for elsewhere;
2. two keys of the source with one form are an error, if a target asks for it, never a choice;
3. a key of the source goes to one target, unless two targets are one tensor;
4. raw names count layers, so another process may mean another layer by one: what leads to a key of the source has to
   mean one parameter on all ranks. Raw names of structured targets are used only if they lead to *every* state that
   was not found otherwise.

Tested in tests/engine/test_names.py and tests/live/test_name_compatibility.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paddle_flexckpt.aoa.states import ACCUMULATORS, is_torch_state, split_state
from paddle_flexckpt.aoa.states import MASTER as MASTER_STATE
from paddle_flexckpt.aoa.wrappers import unwrapped
from paddle_flexckpt.catalog import Problem, ValidationError

# Parts of a nested state dict that one side may have and the other not.
PREFIXES = ("model.", "optimizer.")
# Only after one of these is a number known to be a counter: a model may have buffers called scale_0 and scale_1.
_NAMES = "|".join(ACCUMULATORS)
_ACCUMULATOR = re.compile(rf"(?P<parameter>.+?)_(?P<name>{_NAMES})_\d+")
# An optimizer with a name puts that in front of the names of its accumulators.
_NAMED_ACCUMULATOR = re.compile(
    rf"(?P<parameter>.*\.[wb]_\d+(?:\.dist)*(?:_fp32_master_\d+)?)_(?P<name>\w+_(?:{_NAMES}))_\d+"
)
_MASTER = re.compile(r"(?P<parameter>.+)_fp32_master_\d+")
_MASTER_WEIGHTS = re.compile(r"(?P<path>(?:.*\.)?)master_weights\.(?P<parameter>.+)")
_DIST = re.compile(r"(?:\.dist)+$")
# linear_0.w_0, batch_norm2d_3.b_0: how Paddle names a parameter that the user gives no name.
_COUNTED = re.compile(r".*\.[wb]_\d+")
# A cheap look: most keys are no raw names of states.
_COUNTED_STATE = re.compile(r"\.[wb]_\d+(?:\.dist)*_|master_weights\.")
_HINT = "give the names by AOA statements (plain_state_statements() makes them)"


class RawState(NamedTuple):
    """Hold a state of an optimizer under a raw name, taken apart.

    Attributes:
        parameter: The parameter's raw name, without ``.dist``.
        state: What a structured name ends with: ``moment1_0``, or ``w_0`` for the master weight.
    """

    parameter: str
    state: str


def raw_parameter(name: str) -> str:
    """Return a parameter's raw name as it was before the parameter became a DistTensor."""
    return _DIST.sub("", name)


def split_raw(name: str, parameters: Collection[str] = ()) -> RawState | None:
    """Take a raw name of an optimizer's state apart; None if it is no such name.

    Args:
        name: A name, without :data:`PREFIXES`.
        parameters: Raw names of parameters, without ``.dist``, that are known: those that users gave look like any
            other name.
    """
    found = _MASTER_WEIGHTS.fullmatch(name)
    if found:
        return RawState(found["path"] + raw_parameter(found["parameter"]), MASTER_STATE)
    for found in (_ACCUMULATOR.fullmatch(name), _NAMED_ACCUMULATOR.fullmatch(name)):
        if found:
            holder = found["parameter"]
            master = _MASTER.fullmatch(holder)
            parameter = raw_parameter(master["parameter"] if master else holder)
            if parameter != holder or _COUNTED.fullmatch(parameter) or parameter in parameters:
                return RawState(parameter, f"{found['name']}_0")
    found = _MASTER.fullmatch(name)
    return RawState(raw_parameter(found["parameter"]), MASTER_STATE) if found else None


def is_state(key: str, keys: Mapping[str, object] | set[str]) -> bool:
    """Return whether a key, of all that there are, is an optimizer's, by any of the names that states have."""
    if split_state(key, keys)[1] or is_torch_state(key):
        return True
    return any(split_raw(name) is not None for _, name in without_prefix(key))


def canonical(name: str, parameters: Collection[str] = ()) -> str:
    """Return one form for all raw names of the same tensor; any other name as it is.

    Args:
        name: As of :func:`split_raw`.
        parameters: Likewise.
    """
    name = unwrapped(name)
    raw = split_raw(name, parameters)
    if raw is not None:
        return f"{raw.parameter}_{'fp32_master_0' if raw.state == MASTER_STATE else raw.state}"
    parameter = raw_parameter(name)
    return parameter if _COUNTED.fullmatch(parameter) else name


def without_prefix(name: str) -> list[tuple[str, str]]:
    """Return pairs of prefix and name: the name as it is, and without its first part if that is of :data:`PREFIXES`."""
    return [("", name), *((prefix, name[len(prefix) :]) for prefix in PREFIXES if name.startswith(prefix))]


class NameIndex:
    """Find keys of a source by their canonical forms."""

    def __init__(self, keys: Iterable[str], parameters: Collection[str] = ()) -> None:
        """Take the source's keys, and raw names of parameters that are known."""
        self._parameters = parameters
        self._keys: dict[str, list[tuple[str, str]]] = {}
        for key in keys:
            for prefix, name in without_prefix(key):
                self._keys.setdefault(canonical(name, parameters), []).append((prefix, key))

    def find(self, names: Iterable[str]) -> list[str]:
        """Return the keys that mean what one of some names means, each once."""
        found: dict[str, None] = {}
        for name in names:
            for prefix, rest in without_prefix(name):
                for other, key in self._keys.get(canonical(rest, self._parameters), ()):
                    # What is the model's here is not the optimizer's there.
                    if not prefix or not other or prefix == other:
                        found[key] = None
        return list(found)


@dataclass(frozen=True)
class Unresolved:
    """Describe a target that the source does not have under its own name.

    Attributes:
        key: Its name.
        rank: The rank that has it.
        aliases: Other names of the same, tied parameter.
        raw_names: Raw names of the state, if it is one under a structured name.
        place: Equal for targets that are one tensor; None: unlike any other.
    """

    key: str
    rank: int
    aliases: tuple[str, ...] = ()
    raw_names: tuple[str, ...] = ()
    place: object = None


@dataclass(frozen=True)
class CompatibleNames:
    """Hold what a search found.

    Attributes:
        names: The source's keys by target.
        by_raw_name: Those of them that only the raw name of a structured target led to.
        taken: Targets that remain without a key, as the one that would do is another target's: that target.
        lost_by_raw_name: Targets without a key, of which this side or the source has only a raw name.
        problems: What is ambiguous.
    """

    names: dict[str, str] = field(default_factory=dict)
    by_raw_name: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    lost_by_raw_name: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_compatible(
    targets: Sequence[Unresolved],
    source: Iterable[str],
    claimed: Mapping[str, Sequence[tuple[str, object]]],
    structured: Mapping[str, Sequence[str]],
) -> CompatibleNames:
    """Find the names under which a source has targets that it lacks under their own.

    Args:
        targets: The targets of one rank.
        source: The source's keys.
        claimed: Targets (name and place) that are found under their own names, by key of the source.
        structured: Names in the state of the targets by raw name of a parameter, without ``.dist``.
    """
    keys = list(source)
    index = NameIndex(keys, structured)
    source_is_raw = any(split_raw(key) for key in keys)
    result = CompatibleNames()
    given: dict[str, list[Unresolved]] = {}
    for target in targets:
        hits, by_raw_name = _hits(index, target, structured)
        if len(hits) > 1:
            result.problems.append(_ambiguous(target, hits))
        elif hits:
            given.setdefault(hits[0], []).append(target)
            if by_raw_name:
                result.by_raw_name[target.key] = hits[0]
        elif (target.raw_names and source_is_raw) or split_raw(target.key):
            result.lost_by_raw_name.append(target.key)
    for key, takers in given.items():
        owners = claimed.get(key, ())
        for taker in takers:
            if owners and not any(place is not None and place == taker.place for _, place in owners):
                # The other one has the better title, and this one is missing.
                result.taken[taker.key] = owners[0][0]
                result.by_raw_name.pop(taker.key, None)
            else:
                result.names[taker.key] = key
        places = {taker.place for taker in takers if taker.key in result.names}
        if len(takers) > 1 and (len(places) > 1 or None in places):
            result.problems.append(_wanted_twice(key, takers))
    lost = [target for target in targets if target.raw_names and target.key in result.lost_by_raw_name]
    if result.by_raw_name and lost:
        result.problems.append(_half_believed(result.by_raw_name, lost))
    return result


def _hits(index: NameIndex, target: Unresolved, structured: Mapping[str, Sequence[str]]) -> tuple[list[str], bool]:
    """Return the keys of the first of a target's names that lead to any; whether only a raw name of a state did."""
    for name in (target.key, *target.aliases):
        hits = index.find([name])
        if hits:
            return hits, False
    for prefix, name in without_prefix(target.key):
        raw = split_raw(name, structured)
        for parameter in structured.get(raw.parameter, ()) if raw else ():
            # The state dict may hold the model under a prefix, or the model's own names may begin so.
            hits = index.find([f"{prefix}{each}.{raw.state}" for _, each in without_prefix(parameter)] if raw else ())
            if hits:
                return hits, False
    return index.find(target.raw_names), True


def raw_meanings(
    found: Iterable[tuple[str, str, Sequence[str]]], structured: Callable[[], Mapping[str, Sequence[str]]]
) -> dict[str, list[str]]:
    """Return what the raw names that lead to keys of the source mean on this rank.

    Args:
        found: Targets, their keys in the source, and their aliases.
        structured: Gives that of :func:`find_compatible`; called where there are raw names.

    Returns:
        Structured names of the parameter, by raw name; without those of which the state dict does not tell.
    """
    known: Mapping[str, Sequence[str]] | None = None
    meanings: dict[str, dict[str, None]] = {}
    for target, key, aliases in found:
        raw = split_raw(_bare(key)) if _COUNTED_STATE.search(key) else None
        if raw is None:
            continue
        known = structured() if known is None else known
        own = split_raw(_bare(target))
        if own is None:
            names = [name.rpartition(".")[0] for name in (target, *aliases)]
        else:
            names = list(known.get(own.parameter, ()))
        meanings.setdefault(raw.parameter, {}).update(dict.fromkeys(map(_bare, names)))
    return {name: list(parameters) for name, parameters in meanings.items() if parameters}


def check_across_ranks(meanings: Sequence[Mapping[str, Sequence[str]]], context: str) -> None:
    """Check that a raw name that leads to a key of the source means one parameter.

    Args:
        meanings: :func:`raw_meanings` of every rank.
        context: What is being done, for the error.

    Raises:
        ValidationError: It does not: each process counts its own layers.
    """
    known: dict[str, set[str]] = {}
    problems = []
    for names in meanings:
        for raw, parameters in names.items():
            earlier = known.setdefault(raw, set(parameters))
            if earlier.isdisjoint(parameters):
                problems.append(
                    Problem(
                        f"{raw!r} in the keys of the source would mean different parameters on different ranks: every "
                        "process counts its own layers",
                        got=f"{sorted(earlier)[:3]} and {sorted(parameters)[:3]}",
                        remedy=f"save and load sharded_state_dict(), whose names are the same everywhere; or {_HINT}",
                    )
                )
            earlier.update(parameters)
    if problems:
        raise ValidationError(problems, context)


def _bare(name: str) -> str:
    return without_prefix(name)[-1][1]


def _ambiguous(target: Unresolved, hits: list[str]) -> Problem:
    return Problem(
        "the source has no key of this name, and several that may be meant",
        key=target.key,
        rank=target.rank,
        got=f"{hits[:5]}",
        remedy=f"say which by an AOA statement ({hits[0]} -> {target.key}), or load with mw_name_compatibility=False",
    )


def _wanted_twice(key: str, takers: list[Unresolved]) -> Problem:
    return Problem(
        f"several targets would be filled from key {key!r} of the source, and none of them has its name",
        rank=takers[0].rank,
        got=f"targets {[taker.key for taker in takers[:5]]}",
        remedy="say which is meant by an AOA statement, or load with mw_name_compatibility=False",
    )


def _half_believed(found: Mapping[str, str], lost: list[Unresolved]) -> Problem:
    target, key = next(iter(found.items()))
    return Problem(
        "only some states are in the source under the raw names that they have here: raw names count layers, and the "
        "source's may count others",
        key=lost[0].key,
        rank=lost[0].rank,
        expected=f"{lost[0].raw_names[0]!r}, as target {target!r} is there as {key!r}",
        got=f"{len(lost)} states without a key",
        remedy=_HINT,
    )
