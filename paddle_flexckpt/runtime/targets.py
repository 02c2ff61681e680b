"""Targets: what a load has to fill, checked against the source before anything is touched, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, Problem, ValidationError, dtype_of, validate_shards
from paddle_flexckpt.runtime.state import LocalState
from paddle_flexckpt.runtime.tensors import HostTensor, address_range
from paddle_flexckpt.sharded_weight import FusedAxis

Strict = Union[bool, Literal["missing", "unexpected"]]
_FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})
_HALVES = frozenset({"float16", "bfloat16"})
_MASTER = ".w_0"


@dataclass(frozen=True)
class Policy:
    """What a load may do beyond copying.

    Attributes:
        strict: Which of missing and unexpected keys are errors; True both, False neither.
        dtype: Whether a source of another dtype is an error ("raise") or is cast ("cast").
        tied_names: Whether a key that the source lacks may be taken from a name of the same, tied parameter.
        master_weights: ``"exact"``: a parameter and its master weight come from their own keys. ``"convert"``: a
            master weight (``.w_0``) that the source lacks starts from its parameter, and a float32 parameter whose
            source is of lower precision is taken from its master weight.
    """

    strict: Strict = "missing"
    dtype: Literal["raise", "cast"] = "raise"
    tied_names: bool = True
    master_weights: Literal["exact", "convert"] = "exact"

    def __post_init__(self) -> None:
        if self.strict not in (True, False, "missing", "unexpected"):
            raise ValidationError([f"strict is True, False, 'missing' or 'unexpected'; got {self.strict!r}"])
        if self.dtype not in ("raise", "cast"):
            raise ValidationError([f"dtype is 'raise' or 'cast'; got {self.dtype!r}"])
        if self.master_weights not in ("exact", "convert"):
            raise ValidationError([f"master_weights is 'exact' or 'convert'; got {self.master_weights!r}"])

    @property
    def missing_is_an_error(self) -> bool:
        """Whether a key that only the targets have is an error."""
        return self.strict in (True, "missing")

    @property
    def unexpected_is_an_error(self) -> bool:
        """Whether a key that only the source has is an error."""
        return self.strict in (True, "unexpected")


@dataclass(frozen=True, eq=False)
class Wanted:
    """What one rank's load will fill.

    Attributes:
        catalog: The rank's targets, with every key under the name that the source has for it.
        rows: The rows to fill.
        same_memory: For rows that share their memory with an earlier row but come from another key of the source: that
            earlier row. They are compared, not written.
        missing: Keys that the source does not have.
        aliases: Keys found under another name.
        cast: Keys whose values are cast, with the dtypes.
        masters: Master weights that start from their parameters, and parameters taken from their master weights.
    """

    catalog: Catalog
    rows: np.ndarray
    same_memory: dict[int, int]
    missing: list[str]
    aliases: dict[str, str] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)


def resolve(state: LocalState, source: Catalog, policy: Policy) -> Wanted:
    """Finds every target's key in the source and checks that they fit.

    Args:
        state: This rank's targets.
        source: All source shards.
        policy: What is allowed.

    Raises:
        ValidationError: A target is malformed, its key is missing, or dtype or global shape differ; all are listed.
    """
    target = state.catalog
    index = {name: i for i, name in enumerate(source.keys)}
    first_row = np.full(len(source.keys), -1, dtype=np.int64)
    # Written back to front: the first row of each key stays.
    first_row[source.key[::-1]] = np.arange(len(source))[::-1]
    names, missing = list(target.keys), []
    aliases: dict[str, str] = {}
    cast: dict[str, str] = {}
    masters: dict[str, str] = {}
    problems = validate_shards(target)
    rows = []
    for row, weight in enumerate(state.weights):
        key = target.key_name(row)
        found = _find(key, weight, index, policy)
        master = _master(key, weight, found, target.dtype_name(row), source, index, first_row, policy)
        if master is not None:
            found = masters[key] = master
        if found is None:
            missing.append(key)
            if policy.missing_is_an_error:
                problems.append(
                    Problem(
                        "the source has no such key",
                        key=key,
                        rank=int(target.rank[row]),
                        expected=target.describe(row),
                        got=_similar(key, source.keys),
                        remedy="correct the name, or load with strict=False to leave this target as it is",
                    )
                )
            continue
        if found != key:
            names[target.key[row]] = found
            if master is None:
                aliases[key] = found
        allowed = policy if master is None else replace(policy, dtype="cast")
        problem = _unfit(target, row, source, int(first_row[index[found]]), allowed, cast)
        if problem is None and getattr(weight, "fused", None) is not None:
            problem = _permuted(target, row, source, index[found], weight.fused)
        if problem is not None:
            problems.append(problem)
            continue
        rows.append(row)
    if problems:
        raise ValidationError(problems)
    rows, same_memory = _share_memory(state, names, rows)
    renamed = replace(target, keys=tuple(names))
    return Wanted(renamed, np.asarray(rows, dtype=np.int64), same_memory, missing, aliases, cast, masters)


def _find(key: str, weight: Any, index: dict[str, int], policy: Policy) -> str | None:
    if key in index:
        return key
    if policy.tied_names:
        for alias in getattr(weight, "aliases", ()):
            if alias in index:
                return alias
    return None


def _master(
    key: str,
    weight: Any,
    found: str | None,
    dtype: str,
    source: Catalog,
    index: dict[str, int],
    first_row: np.ndarray,
    policy: Policy,
) -> str | None:
    """The source key to convert from, where the policy allows it: a master's parameter, or a parameter's master."""
    if policy.master_weights == "exact":
        return None
    if found is None:
        candidates = (key, *getattr(weight, "aliases", ()))
        parameters = [name[: -len(_MASTER)] for name in candidates if name.endswith(_MASTER)]
        return next((name for name in parameters if name in index), None)
    stored = source.dtype_name(int(first_row[index[found]]))
    if dtype == "float32" and stored in _HALVES and found + _MASTER in index:
        return found + _MASTER
    return None


def _permuted(target: Catalog, row: int, source: Catalog, source_key: int, fused: FusedAxis) -> Problem | None:
    """The problem of a fused parameter that was cut into parts of another size than the target's."""
    ndim = int(target.ndim[row])
    axis = fused.axis % ndim
    here = int(target.shape[row, target.width - ndim + axis])
    there = sorted(set(source.shape[source.key == source_key][:, source.width - ndim + axis].tolist()))
    if there == [here]:
        return None
    key = target.key_name(row)
    return Problem(
        "the parts of a fused parameter lie side by side on every rank, so another cut would permute them",
        key=key,
        rank=int(target.rank[row]),
        expected=f"parts of {here} along axis {axis}, as here",
        got=f"parts of {there}",
        remedy=f"load under the tensor-parallel degree of the save; the AOA statement for another degree is "
        f'"{key} -> {key}, {fused.statement}"',
    )


def _similar(key: str, names: tuple[str, ...]) -> str:
    """Keys that the user may have meant."""
    tail = key.rsplit(".", 2)[-2:]
    alike = [name for name in names if name.rsplit(".", 2)[-2:] == tail][:3]
    return f"{len(names)} keys, among them {alike or list(names[:3])}"


def _unfit(
    target: Catalog, row: int, source: Catalog, source_row: int, policy: Policy, cast: dict[str, str]
) -> Problem | None:
    """Why a target cannot be filled from its source key, if it cannot; notes a cast."""
    key, rank = target.key_name(row), int(target.rank[row])
    where: dict[str, Any] = {"key": key, "rank": rank, "file": source.file_name(source_row)}
    target_shape = target.unpadded(row, target.global_shape)
    source_shape = source.unpadded(source_row, source.global_shape)
    if target_shape != source_shape:
        return Problem(
            "global shapes differ",
            **where,
            expected=f"{list(target_shape)} (target)",
            got=f"{list(source_shape)} (source)",
            remedy="load into a model of the saved size, or leave this key out",
        )
    to_dtype, from_dtype = target.dtype_name(row), source.dtype_name(source_row)
    if to_dtype == from_dtype:
        return None
    if policy.dtype == "raise":
        return Problem(
            "dtypes differ",
            **where,
            expected=f"{to_dtype} (target)",
            got=f"{from_dtype} (source)",
            remedy='load with dtype="cast" to convert the values',
        )
    if not _castable(from_dtype, to_dtype):
        return Problem(
            "a cast would lose what the values mean",
            **where,
            expected=f"{to_dtype} (target)",
            got=f"{from_dtype} (source)",
            remedy="load into a target of the saved dtype",
        )
    cast[key] = f"{from_dtype} -> {to_dtype}"
    return None


def _castable(source: str, target: str) -> bool:
    """Floats and complex numbers among themselves, integers to anything wider or floating; nothing to bool."""
    if source in _FLOATS:
        return target in _FLOATS or target in _COMPLEX
    if source in _COMPLEX:
        return target in _COMPLEX
    if target in _FLOATS or target in _COMPLEX:
        return True
    return np.can_cast(dtype_of(source).numpy, dtype_of(target).numpy, "safe")


def _share_memory(state: LocalState, names: list[str], rows: list[int]) -> tuple[list[int], dict[int, int]]:
    """Sorts out tied targets: which rows to fill, and which of these only to compare with an earlier one."""
    catalog = state.catalog
    seen: dict[tuple[Any, ...], list[int]] = {}
    keep, same_memory = [], {}
    for row in rows:
        span = address_range(state.tensor(row))
        if span is None:
            keep.append(row)
            continue
        place = (span, catalog.dtype_name(row), catalog.describe(row))
        earlier = seen.setdefault(place, [])
        if any(names[catalog.key[row]] == names[catalog.key[other]] for other in earlier):
            continue  # the same memory from the same source key: filled already
        if earlier:
            same_memory[row] = earlier[0]
        earlier.append(row)
        keep.append(row)
    return keep, same_memory


class TargetMemory:
    """The targets' memory during a load; staged copies go back when their last piece has arrived."""

    def __init__(self, state: LocalState, wanted: Wanted, piece_targets: np.ndarray | None = None) -> None:
        """Opens nothing yet.

        Args:
            state: The targets.
            wanted: What to fill.
            piece_targets: int64, target row of every planned piece, where :meth:`piece_done` will be called for each;
                without it, staged copies go back at the end only.
        """
        self._state = state
        self._wanted = wanted
        self._left = np.bincount([] if piece_targets is None else piece_targets, minlength=len(state.weights))
        self._open: dict[int, HostTensor] = {}
        self._compare: dict[int, np.ndarray] = {}

    def storage(self, row: int) -> np.ndarray:
        """The 1-D memory of a target row."""
        if row in self._wanted.same_memory:
            if row not in self._compare:
                first = HostTensor(self._state.tensor(row)).array
                self._compare[row] = np.empty_like(first)
            return self._compare[row]
        if row not in self._open:
            self._open[row] = HostTensor(self._state.tensor(row))
        return self._open[row].array

    def piece_done(self, row: int) -> None:
        """Notes that a piece of a row has arrived."""
        self._left[row] -= 1
        if self._left[row] == 0 and row in self._open:
            self._open.pop(row).store()

    def finish(self) -> None:
        """Puts back what is still staged and compares tied targets.

        Raises:
            CheckpointError: Two source keys that go into one tied parameter differ in value.
        """
        for host in self._open.values():
            host.store()
        self._open.clear()
        for row, other in self._wanted.same_memory.items():
            stored = HostTensor(self._state.tensor(other)).array
            if row in self._compare and stored.tobytes() != self._compare[row].tobytes():
                names = self._wanted.catalog.keys
                key = self._wanted.catalog.key
                raise CheckpointError(
                    f"targets {names[key[other]]!r} and {names[key[row]]!r} are one tied parameter, but the source "
                    f"holds different values for them; the target has those of {names[key[other]]!r}. Remedy: untie "
                    "the parameters, or leave one of the keys out"
                )
