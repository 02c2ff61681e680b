"""Names of one state on two sides: the target's name here, and its possible names in the source.

A ``sharded_state_dict()`` has structured names everywhere: ``a.weight``, ``a.weight.moment1_0``, ``a.weight.w_0`` (the
master weight). A plain ``state_dict()`` names an optimizer's states after the parameter's own, *raw* name, which Paddle
counts by layer, in one of several ways. With ``linear_0.w_0`` for the parameter ``a.weight``:

- ``linear_0.w_0_moment1_0``; ``linear_0.w_0_fp32_master_0_moment1_0`` where the parameter has a master weight;
  ``linear_0.w_0_moment1_1`` of the second optimizer in the process;
- ``master_weights.linear_0.w_0`` (dynamic graph), ``linear_0.w_0_fp32_master_0`` (static graph);
- ``linear_0.w_0.dist...`` in all of these once the parameter is a DistTensor;
- ``model.`` or ``optimizer.`` in front, where the two are parts of one state dict;
- ``_layers.`` in front, or behind these, where a fleet wrapper of the model gave the names.

:func:`canonical` gives one form to all names of the same tensor. The rules of a search are

1. a target that is found under its own name is not searched by other names;
2. two keys of the source with one form are an error if a target needs it: there is no choice between them;
3. a key of the source fills one target, unless two targets are one tensor;
4. raw names count layers, so another process may mean another layer by one. A state whose structured name is known, as
   a save records it and a live model tells it, is found by that alone. Where one of both sides does not know it, a raw
   name is believed if parameters of other names have other shapes (:mod:`~paddle_flexckpt.transfer.problems`), and
   what leads to a key of the source has to mean one parameter on all ranks. Raw names of structured targets are used
   only if they lead to *every* state that was not found otherwise.

Tested in tests/transfer/test_names.py and tests/loading/test_name_compatibility.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.optimizer_states import ACCUMULATORS, is_torch_state, split_state, unwrapped
from paddle_flexckpt.optimizer_states import MASTER as MASTER_STATE

# Parts of a nested state dict that only one side may have.
PREFIXES = ("model.", "optimizer.")
# A number is a counter only after one of these: a model may have buffers called scale_0 and scale_1.
_NAMES = "|".join(ACCUMULATORS)
_ACCUMULATOR = re.compile(rf"(?P<parameter>.+?)_(?P<name>{_NAMES})_\d+")
# An optimizer's own name is a prefix of the names of its accumulators.
_NAMED_ACCUMULATOR = re.compile(
    rf"(?P<parameter>.*\.[wb]_\d+(?:\.dist)*(?:_fp32_master_\d+)?)_(?P<name>\w+_(?:{_NAMES}))_\d+"
)
_MASTER = re.compile(r"(?P<parameter>.+)_fp32_master_\d+")
_MASTER_WEIGHTS = re.compile(r"(?P<path>(?:.*\.)?)master_weights\.(?P<parameter>.+)")
_DIST = re.compile(r"(?:\.dist)+$")
# linear_0.w_0, batch_norm2d_3.b_0: Paddle's names of parameters without a name of the user's.
COUNTED = re.compile(r".*\.[wb]_\d+")
# A fast check first, as most keys are not raw names of states.
COUNTED_STATE = re.compile(r"\.[wb]_\d+(?:\.dist)*_|master_weights\.")
HINT = "give the names by AOA statements (plain_state_statements() makes them)"


class RawState(NamedTuple):
    """A state of an optimizer under a raw name, taken apart.

    Attributes:
        parameter: The parameter's raw name, without ``.dist``.
        state: The end of its structured name: ``moment1_0``, or ``w_0`` for the master weight.
    """

    parameter: str
    state: str


def raw_parameter(name: str) -> str:
    """Return a parameter's raw name, also of one that became a DistTensor, or of a slice (``slice@...``)."""
    return _DIST.sub("", name.rpartition("@")[2])


def split_raw(name: str, parameters: Collection[str] = ()) -> RawState | None:
    """Take a raw name of an optimizer's state apart; None if it is no such name.

    Args:
        name: A name, without :data:`PREFIXES`.
        parameters: Known raw names of parameters, without ``.dist``: users' names have no special form.
    """
    found = _MASTER_WEIGHTS.fullmatch(name)
    if found:
        return RawState(found["path"] + raw_parameter(found["parameter"]), MASTER_STATE)
    for found in (_ACCUMULATOR.fullmatch(name), _NAMED_ACCUMULATOR.fullmatch(name)):
        if found:
            holder = found["parameter"]
            master = _MASTER.fullmatch(holder)
            parameter = raw_parameter(master["parameter"] if master else holder)
            if parameter != holder or COUNTED.fullmatch(parameter) or parameter in parameters:
                return RawState(parameter, f"{found['name']}_0")
    found = _MASTER.fullmatch(name)
    return RawState(raw_parameter(found["parameter"]), MASTER_STATE) if found else None


def is_state(key: str, keys: Mapping[str, object] | set[str]) -> bool:
    """Return whether a key, of all keys, is an optimizer's state, by any form of their names."""
    if split_state(key, keys)[1] or is_torch_state(key):
        return True
    return any(split_raw(name) is not None for _, name in without_prefix(key))


def canonical(name: str, parameters: Collection[str] = ()) -> str:
    """Return one form for all raw names of the same tensor; any other name unchanged.

    Args:
        name: As of :func:`split_raw`.
        parameters: Likewise.
    """
    name = unwrapped(name)
    raw = split_raw(name, parameters)
    if raw is not None:
        return f"{raw.parameter}_{'fp32_master_0' if raw.state == MASTER_STATE else raw.state}"
    parameter = raw_parameter(name)
    return parameter if COUNTED.fullmatch(parameter) else name


def without_prefix(name: str) -> list[tuple[str, str]]:
    """Return pairs of prefix and name: the whole name, and without its first part if that is in :data:`PREFIXES`."""
    return [("", name), *((prefix, name[len(prefix) :]) for prefix in PREFIXES if name.startswith(prefix))]


def bare(name: str) -> str:
    """Return a name without its first part if that is in :data:`PREFIXES`."""
    return without_prefix(name)[-1][1]


class NameIndex:
    """An index of a source's keys by their canonical forms."""

    def __init__(
        self,
        keys: Iterable[str],
        parameters: Collection[str] = (),
        state_names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Take the source's keys, known raw names of parameters, and other names of some keys."""
        self._parameters = parameters
        self._keys: dict[str, list[tuple[str, str]]] = {}
        for key in keys:
            for full_name in state_names.get(key, (key,)):
                for prefix, name in without_prefix(full_name):
                    self._keys.setdefault(canonical(name, parameters), []).append((prefix, key))

    def find(self, names: Iterable[str]) -> list[str]:
        """Return the keys of the same tensor as one of some names, each once."""
        found: dict[str, None] = {}
        for name in names:
            for prefix, rest in without_prefix(name):
                for other, key in self._keys.get(canonical(rest, self._parameters), ()):
                    # A name of the model's does not match one of the optimizer's.
                    if not prefix or not other or prefix == other:
                        found[key] = None
        return list(found)


@dataclass(frozen=True)
class Unresolved:
    """A target that the source does not have under its own name.

    Attributes:
        key: Its name.
        rank: The rank that has it.
        aliases: Other names of the same, tied parameter.
        raw_names: Raw names of the state, if it is one under a structured name.
        place: Equal for targets that are one tensor; None: unlike any other.
        state_names: Structured names of the state, if it is one under a raw name, and they are known.
        shape: Its global shape.
    """

    key: str
    rank: int
    aliases: tuple[str, ...] = ()
    raw_names: tuple[str, ...] = ()
    place: object = None
    state_names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def raw_name(self) -> str:
        """Return its raw name: for a state under a structured name, a raw name of the state; else its own name."""
        return self.raw_names[0] if self.raw_names else self.key


class SourceKeys(NamedTuple):
    """The keys of the source of a search.

    Attributes:
        shapes: The global shape of each key.
        state_names: As in the source's catalog.
    """

    shapes: Mapping[str, tuple[int, ...]]
    state_names: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class CompatibleNames:
    """The result of a search.

    Attributes:
        names: The source's keys by target.
        by_raw_name: Those found only by a raw name.
        taken: By target without a key: the other target that has the matching key.
        lost_by_raw_name: Targets without a key, of which this side or the source has only a raw name.
        of_others: By target without a key: the state of another parameter that has its raw name in the source.
        problems: Ambiguous names.
    """

    names: dict[str, str] = field(default_factory=dict)
    by_raw_name: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    lost_by_raw_name: list[str] = field(default_factory=list)
    of_others: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def find_compatible(
    targets: Sequence[Unresolved],
    source: SourceKeys,
    claimed: Mapping[str, Sequence[tuple[str, object]]],
    exact: bool = False,
) -> CompatibleNames:
    """Find the source's names of targets that it lacks under their own names, or has under raw names.

    Args:
        targets: The targets of one rank.
        source: The source's keys.
        claimed: Targets (name and place) that are found under their own names, by key of the source.
        exact: Search only for the targets' own names.
    """
    indexes = _Indexes(targets, source)
    source_is_raw = any(split_raw(key) for key in source.shapes)
    result = CompatibleNames()
    given: dict[str, list[Unresolved]] = {}
    for target in targets:
        hits, by_raw_name = indexes.hits(target)
        if exact or target.key in hits:
            hits = [key for key in hits if key == target.key]
        if len(hits) > 1:
            result.problems.append(_ambiguous(target, hits))
        elif hits:
            given.setdefault(hits[0], []).append(target)
            if by_raw_name:
                result.by_raw_name[target.key] = hits[0]
        elif (target.raw_names and source_is_raw) or split_raw(target.key):
            result.lost_by_raw_name.append(target.key)
            others = [name for key in indexes.recorded(target) for name in source.state_names[key]]
            if others:
                result.of_others[target.key] = others[0]
    for key, takers in given.items():
        owners = claimed.get(key) or [(each.key, each.place) for each in takers if each.key == key]
        for taker in takers:
            is_same = taker.key == key or any(place is not None and place == taker.place for _, place in owners)
            if owners and not is_same:
                # The other target has priority; this one is missing.
                result.taken[taker.key] = owners[0][0]
                result.by_raw_name.pop(taker.key, None)
            else:
                result.names[taker.key] = key
        places = {taker.place for taker in takers if taker.key in result.names}
        if len(takers) > 1 and (len(places) > 1 or None in places):
            result.problems.append(_wanted_twice(key, takers))
    structured = [each for each in targets if each.raw_names]
    believed = {each.key: result.by_raw_name[each.key] for each in structured if each.key in result.by_raw_name}
    lost = [target for target in structured if target.key in result.lost_by_raw_name]
    if believed and lost:
        result.problems.append(_half_believed(believed, lost))
    return result


class _Indexes:
    """A search for targets in a source: by structured names, and by raw names if necessary."""

    def __init__(self, targets: Sequence[Unresolved], source: SourceKeys) -> None:
        parameters = {bare(name) for target in targets for name in _named_parameters(target)}
        self._parameters = parameters
        self._index = NameIndex(source.shapes, parameters, source.state_names)
        self._recorded = NameIndex([key for key in source.state_names if key in source.shapes], parameters)

    def recorded(self, target: Unresolved) -> list[str]:
        """Return the keys of the target's raw name whose parameters the source records."""
        return self._recorded.find([target.raw_name])

    def hits(self, target: Unresolved) -> tuple[list[str], bool]:
        """Search for a target's names in turn; return the source keys of the first name that is found.

        Return also whether that name is a raw name.
        """
        is_raw = bool(target.state_names) or is_counted(target.key)
        if target.state_names or not is_raw:
            groups = [target.state_names] if is_raw else [[name] for name in (target.key, *target.aliases)]
            for names in groups:
                hits = self._index.find(names)
                if hits:
                    return hits, False
        hits = self._index.find([target.raw_name])
        if not hits and not ((target.state_names or target.raw_names) and is_counted(target.raw_name)):
            hits = self.recorded(target)
        return hits, True


def is_counted(name: str) -> bool:
    """Return whether a name is a state's, with Paddle's count of layers."""
    return COUNTED_STATE.search(name) is not None and split_raw(bare(name)) is not None


def counted_names(catalog: Catalog) -> list[str]:
    """Return the keys of states with Paddle's count of layers in their names, or with known structured names."""
    if not catalog.state_names and not COUNTED_STATE.search("\n".join(catalog.keys)):
        return []
    return [key for key in catalog.keys if key in catalog.state_names or is_counted(key)]


def _named_parameters(target: Unresolved) -> Iterator[str]:
    """Yield the name, within a target's raw name, of the parameter whose state it is."""
    for name in target.state_names[:1] or (target.key,) * len(target.raw_names[:1]):
        suffix = re.escape(name.rpartition(".")[2].rpartition("_")[0])
        found = re.fullmatch(rf"(.+?)(?:\.dist)*(?:_fp32_master_\d+)?_{suffix}_\d+", target.raw_name)
        if found:
            yield found[1]


def raw_meanings(found: Iterable[tuple[str, str, Sequence[str], Sequence[str]]]) -> dict[str, list[str]]:
    """Return the meanings on this rank of raw names that lead to keys of the source.

    Args:
        found: Targets, their keys in the source, their aliases, and the structured names of those under raw names.

    Returns:
        Structured names of the parameter, by raw name, as far as the state dict has them.
    """
    meanings: dict[str, dict[str, None]] = {}
    for target, key, aliases, state_names in found:
        raw = split_raw(bare(key)) if COUNTED_STATE.search(key) else None
        if raw is not None and (state_names or split_raw(bare(target)) is None):
            names = [name.rpartition(".")[0] for name in state_names or (target, *aliases)]
            # The path of the state may precede that of the parameter.
            meanings.setdefault(raw.parameter, {}).update(dict.fromkeys(bare(bare(name)) for name in names))
    return {name: list(parameters) for name, parameters in meanings.items()}


def check_across_ranks(meanings: Sequence[Mapping[str, Sequence[str]]], context: str) -> None:
    """Check that a raw name that leads to a key of the source means one parameter.

    Args:
        meanings: :func:`raw_meanings` of every rank.
        context: The context of the error.

    Raises:
        ValidationError: It means several, as each process counts its own layers.
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
                        code="FC202",
                        remedy=f"save and load sharded_state_dict(), whose names are the same everywhere; or {HINT}",
                    )
                )
            earlier.update(parameters)
    if problems:
        raise ValidationError(problems, context)


def _ambiguous(target: Unresolved, hits: list[str]) -> Problem:
    return Problem(
        "the source has no key of this name, and several that may be meant",
        key=target.key,
        rank=target.rank,
        got=f"{hits[:5]}",
        code="FC202",
        remedy=f"say which by an AOA statement ({hits[0]} -> {target.key})",
    )


def _wanted_twice(key: str, takers: list[Unresolved]) -> Problem:
    return Problem(
        f"several targets would be filled from key {key!r} of the source, and none of them has its name",
        rank=takers[0].rank,
        got=f"targets {[taker.key for taker in takers[:5]]}",
        code="FC202",
        remedy="say by an AOA statement for each of them where it comes from",
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
        code="FC202",
        remedy=HINT,
    )
