"""What a save, a load or a reshard did, against whole arrays: bit-equal, or an error; anything else is a finding.

Nothing here asks the library what the right values are: the source's shards are painted into whole arrays, and every
target's part is cut out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.report import LoadReport
from tests.property.layouts import Pick
from tests.silence.models import MASTER, Model, Side, State, interleaved, natural


class Finding(Exception):
    """The library was silent, or raised what it should not."""


def raw(array: np.ndarray) -> np.ndarray:
    """An array's elements as rows of bytes."""
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


@dataclass
class Painted:
    """What the shards of one key amount to; ``fault`` says why they are no whole tensor."""

    whole: np.ndarray
    fault: str | None


def paint(states: Sequence[State]) -> dict[str, Painted]:
    """All keys of all ranks, painted shard by shard."""
    found: dict[str, Painted] = {}
    held: dict[str, np.ndarray] = {}
    for rank, state in enumerate(states):
        for key, weight in state.items():
            array = np.asarray(getattr(weight, "local_tensor", weight))
            shape = tuple(getattr(weight, "global_shape", array.shape))
            if key not in found:
                found[key] = Painted(np.zeros(shape, array.dtype), None)
                held[key] = np.zeros(math.prod(shape), dtype=bool)
            painted = found[key]
            if painted.whole.shape != shape or painted.whole.dtype != array.dtype:
                painted.fault = f"rank {rank} has another shape or dtype"
                continue
            offset = tuple(getattr(weight, "global_offset", (0,) * len(shape)))
            extents = tuple(getattr(weight, "local_shape", shape))
            if any(o < 0 or o + n > g for o, n, g in zip(offset, extents, shape)):
                painted.fault = f"rank {rank} is outside"
                continue
            where = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(o, o + n) for o, n in zip(offset, extents))]
            where = where.reshape(-1)
            flat = getattr(weight, "flattened_range", None)
            if flat is not None:
                if not 0 <= flat.start <= flat.stop <= where.size:
                    painted.fault = f"rank {rank} has a range outside its box"
                    continue
                where = where[flat]
            if where.size != array.size:
                painted.fault = f"rank {rank} has another number of elements"
                continue
            rows, values = raw(painted.whole), raw(array)
            twice = held[key][where]
            if (rows[where][twice] != values[twice]).any():
                painted.fault = f"rank {rank} differs from another"
            rows[where] = values
            painted.whole = rows.reshape(-1).view(array.dtype).reshape(shape)
            held[key][where] = True
    for key, painted in found.items():
        if not held[key].all():
            painted.fault = painted.fault or "nobody holds some of it"
    return found


@dataclass
class Case:
    """One run.

    Attributes:
        pick: Choices.
        root: A directory of its own.
        model: What was saved.
        source: The saving job.
        target: The loading job.
        way: "files", "merged" or "memory".
        save: Options of the save, by rank.
        load: Options of the load, by rank.
        must: "equal", "error" or "either": what may come of it.
        meant: The source key of a target, where it is not its own; None: there is none, and it may stay as it is.
        made: Whole arrays of targets that statements make, from the painted source.
        truth: What is really read, where a mistake leads to another state than ``source``.
        instead: Another state that may be read as well, but all of it.
        before: Done before the save; after_save: before the load.
        call: What every rank calls in place of the load.
    """

    pick: Pick
    root: Path
    model: Model
    source: Side
    target: Side
    way: str
    save: list[dict[str, Any]]
    load: list[dict[str, Any]]
    must: str = "equal"
    meant: dict[str, str | None] = field(default_factory=dict)
    made: dict[str, Callable[[dict[str, Painted]], np.ndarray]] = field(default_factory=dict)
    truth: Side | None = None
    instead: Side | None = None
    before: Callable[[], None] | None = None
    after_save: Callable[[], None] | None = None
    call: Callable[[Any, State, dict[str, Any]], Any] | None = None
    save_call: Callable[[Any, State, dict[str, Any]], Any] | None = None

    @property
    def path(self) -> Path:
        return self.root / "checkpoint"


def error_of(outcomes: Sequence[Any], untouched: Callable[[], bool]) -> CheckpointError | None:
    """The error that all ranks raised; None where all did what they were asked.

    Raises:
        Finding: Ranks disagree, or the error is none of the library's.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return None
    foreign = [error for error in errors if not isinstance(error, CheckpointError)]
    if foreign:
        raise Finding(f"raw {type(foreign[0]).__name__}: {str(foreign[0])[:300]}") from foreign[0]
    if len(errors) < len(outcomes):
        raise Finding(f"{len(errors)} of {len(outcomes)} ranks raised: {str(errors[0])[:300]}")
    if len({id(error) for error in errors}) < len(errors):
        raise Finding(f"a rank was left waiting: {str(errors[0])[:300]}")
    texts = {str(error) for error in errors}
    if len(texts) > 1:
        raise Finding(f"ranks say different things: {sorted(texts)}"[:600])
    if isinstance(errors[0], ValidationError) and not untouched():
        raise Finding(f"targets were touched before {str(errors[0])[:300]}")
    return errors[0]


def contents(states: Sequence[State]) -> list[dict[str, bytes]]:
    return [{k: np.asarray(getattr(w, "local_tensor", w)).tobytes() for k, w in state.items()} for state in states]


def expected(case: Case, key: str, weight: Any, painted: dict[str, Painted]) -> np.ndarray | None:
    """The bytes that a target has to hold; None where the source has nothing for it."""
    truth = case.truth or case.source
    if key in case.made:
        whole = case.made[key](painted)
    else:
        name = case.meant.get(key, key)
        if name is None or name not in painted:
            return None
        whole = painted[name].whole
        parts, wanted = truth.parts.get(name), case.target.parts.get(key)
        if parts is not None and wanted is not None:
            widths = case.model.tensors()[name][0].widths
            whole = interleaved(natural(whole, widths, parts), widths, wanted)
    tensor = np.asarray(getattr(weight, "local_tensor", weight))
    if whole.dtype != tensor.dtype:
        whole = whole.astype(tensor.dtype)
    if not hasattr(weight, "global_shape"):
        return raw(whole)
    if tuple(weight.global_shape) != whole.shape:
        raise Finding(f"{key}: filled, though its shape is {list(weight.global_shape)} and the source's {whole.shape}")
    box = whole[tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape))]
    return raw(box if weight.flattened_range is None else box.reshape(-1)[weight.flattened_range])


def check_targets(case: Case, reports: Sequence[Any], before: list[dict[str, bytes]]) -> None:
    """Every target is what it has to be, or listed as missing and untouched.

    Raises:
        Finding: A target is something else.
    """
    painted = paint((case.truth or case.source).states)
    asked: set[str] = set()
    for rank, (state, report) in enumerate(zip(case.target.states, reports)):
        strict = case.load[rank].get("strict", "missing")
        for key, weight in state.items():
            wanted = expected(case, key, weight, painted)
            now = raw(np.asarray(getattr(weight, "local_tensor", weight)))
            untouched = now.tobytes() == before[rank][key]
            asked.add(case.meant.get(key, key) or "")
            if isinstance(report, LoadReport) and key in report.missing:
                if wanted is not None or not untouched or strict in (True, "missing"):
                    raise Finding(f"rank {rank}: {key!r} is listed as missing; strict={strict!r}, {untouched=}")
            elif wanted is None:
                raise Finding(f"rank {rank}: nothing is meant for {key!r}, it is not listed as missing, {untouched=}")
            elif now.shape != wanted.shape or (now != wanted).any():
                what = "was not loaded, and nothing says so" if untouched and now.size else "has wrong values"
                raise Finding(f"rank {rank}: {key!r} {what}")
    if isinstance(reports[0], LoadReport) and not case.made:
        used = {*asked, *reports[0].unexpected, *reports[0].masters.values(), *reports[0].aliases.values()}
        # A parameter and its master weight say the same: where one of them serves, the other is not left over.
        used |= {name[: -len(MASTER) - 1] for name in used if name.endswith(f".{MASTER}")}
        left = {key for key in painted if key not in used}
        if left:
            raise Finding(f"saved keys {sorted(left)} are used by nobody, and not listed")
