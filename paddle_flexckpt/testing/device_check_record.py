"""The record of the results of checks, and values that are known on the host.

A figure may have a bound. On a simulated device a time proves nothing: it is reported, and never makes a check fail.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: Data types by the bytes of an element. The results name those that this version of Paddle lacks.
DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
}
FP8 = {"float8_e4m3fn": 1, "float8_e5m2": 1}

#: Set by a program that starts the checks on a simulated device.
SIMULATED_VARIABLE = "FLEXCKPT_SIMULATED_DEVICE"
#: Names the module that has a device's counters, as ``stats()``, ``reset()`` and ``spans()``.
COUNTERS_VARIABLE = "FLEXCKPT_DEVICE_COUNTERS"

#: The result of a check: ``nbytes``, ``detail``, ``figures`` and ``bounds``, any of which may be missing.
Found = dict[str, Any]
Work = Callable[[], Found]


class CheckFailed(Exception):
    """A failed check: values are not what they should be."""


class NotHere(Exception):
    """A check that cannot be made on this machine."""


@dataclass
class Outcome:
    """The outcome of a check: ``result`` is ``ok``, ``WRONG``, ``skipped``, or ``begun`` for one that never ended.

    ``nbytes`` were saved, loaded or moved; ``detail`` is the failure, the reason for skipping, or the finding. For the
    checks of one process ``rank`` is None. ``bounds`` has the bounds of some figures, such as ``{"at_least": 0.5}``.
    """

    check: str
    result: str = "begun"
    nbytes: int = 0
    seconds: float = 0.0
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)
    rank: int | None = None


class Record:
    """A file of the outcomes of checks, each written as it comes, so that a crash leaves the earlier ones."""

    def __init__(self, path: Path, rank: int | None = None) -> None:
        """Open the file for the lines of this rank."""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open as long as the process)
        self._rank = rank

    def note(self, **facts: Any) -> None:
        """Write facts that are not checks."""
        self._write(facts)

    def check(self, name: str, work: Callable[[], Mapping[str, Any] | None]) -> None:
        """Make a check; ``work`` returns a :data:`Found`."""
        outcome = Outcome(name, rank=self._rank)
        self._write(asdict(outcome))
        begin = time.perf_counter()
        try:
            found = work() or {}
        except NotHere as reason:
            outcome.result, outcome.detail = "skipped", str(reason)
        except Exception as error:  # any error is the result of this check, and the next one is made
            outcome.result, outcome.detail = "WRONG", f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        else:
            outcome.result = "ok"
            outcome.nbytes = int(found.get("nbytes", 0))
            outcome.detail = str(found.get("detail", ""))
            outcome.figures = dict(found.get("figures", {}))
            outcome.bounds = dict(found.get("bounds", {}))
            _hold(outcome)
        outcome.seconds = time.perf_counter() - begin
        self._write(asdict(outcome))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def is_simulated() -> bool:
    """Return whether the device is a simulated one."""
    return bool(os.environ.get(SIMULATED_VARIABLE))


def _hold(outcome: Outcome) -> None:
    """Add figures and their bounds to the detail; a figure out of bounds makes the check wrong on a real device."""
    texts, broken = [], False
    for name, bound in outcome.bounds.items():
        figure = outcome.figures[name]
        kept = bound.get("at_least", figure) <= figure <= bound.get("at_most", figure)
        limits = " and ".join(f"{limit.replace('_', ' ')} {value:g}" for limit, value in bound.items())
        texts.append(f"{name} {figure:.3g} ({limits}{'' if kept else ': not kept'})")
        broken |= not kept
    outcome.detail = "; ".join(filter(None, [outcome.detail, *texts]))
    if broken and is_simulated():
        outcome.detail += "; a simulated device need not keep it"
    elif broken:
        outcome.result = "WRONG"


def read_record(path: Path) -> tuple[list[Outcome], dict[str, Any]]:
    """Return the checks of a record, each with its last outcome, and the facts."""
    outcomes: dict[str, Outcome] = {}
    facts: dict[str, Any] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        entry = json.loads(line)
        if "check" in entry:
            outcomes[entry["check"]] = Outcome(**entry)
        else:
            facts.update(entry)
    return list(outcomes.values()), facts


# -- values ------------------------------------------------------------------------------------------------------------


def elements(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return random elements that follow from the name, as opaque items: the dtype's arithmetic is not used."""
    width = {**DTYPES, **FP8}[dtype]
    generator = np.random.RandomState(zlib.crc32(name.encode()) % 2**31)
    data = generator.bytes(int(np.prod(shape)) * width)
    if dtype == "bool":
        data = (np.frombuffer(data, "uint8") & 1).tobytes()
    return np.frombuffer(data, f"V{width}").reshape(shape)


def on_device(items: np.ndarray, dtype: str, device: str | None = None) -> Any:
    """Return a tensor of opaque items on a device; on the current one by default."""
    import paddle

    place = None if device is None else paddle.device.device_to_place(device)
    if not items.size:
        tensor = paddle.empty(list(items.shape), dtype=dtype)
        return tensor if place is None else tensor._copy_to(place, True)
    data = np.frombuffer(items.tobytes(), "uint8").copy()
    return paddle.to_tensor(data, place=place).view(dtype).reshape(list(items.shape)).clone()


def state_of(nbytes: int, count: int = 8) -> dict[str, Any]:
    """Return ``count`` float32 tensors of ``nbytes`` together on the current device; their keys are their values."""
    import paddle

    each = max(1, nbytes // count // 4)
    return {str(i): paddle.full([each], float(i)) for i in range(count)}


def bytes_of(state: Mapping[str, Any]) -> int:
    """Return the bytes of some tensors."""
    return sum(int(tensor.size) * tensor.element_size() for tensor in state.values())


def same(tensor: Any, items: np.ndarray) -> bool:
    """Return whether a contiguous tensor has exactly these elements."""
    import paddle

    if tuple(tensor.shape) != items.shape:
        return False
    if not items.size:
        return True
    host = tensor.detach()._copy_to(paddle.CPUPlace(), True)
    return bool(host.reshape([-1]).view("uint8").numpy().tobytes() == items.tobytes())


# -- what the device itself counts -------------------------------------------------------------------------------------


def counters() -> Any:
    """Return the module that has the device's counters.

    Raises:
        NotHere: This device has none that are known.
    """
    name = os.environ.get(COUNTERS_VARIABLE)
    if not name:
        raise NotHere(f"{COUNTERS_VARIABLE} names no module with the counters of this device")
    return importlib.import_module(name)


def require(truth: bool, otherwise: str) -> None:
    """Raise :class:`CheckFailed` unless something is true."""
    if not truth:
        raise CheckFailed(otherwise)


def require_same(tensors: Mapping[str, Any], items: Mapping[str, np.ndarray], otherwise: str) -> None:
    """Raise :class:`CheckFailed` unless contiguous tensors, or the shards' tensors, have exactly these elements."""
    wrong = [
        key for key, values in items.items() if not same(getattr(tensors[key], "local_tensor", tensors[key]), values)
    ]
    require(not wrong, f"{otherwise}: {wrong}")
