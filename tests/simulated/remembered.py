"""What functions of the library that only compute have answered, for campaigns of many seeds.

The ranks of a job plan from the same shards, and jobs of other seeds have the same layouts: most of such work is done
again and again. Nothing here is of a process, a file or a clock; the same arguments have the same answer.

Tested in tests/simulation/test_remembered.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.undo import Undo
from tests.simulated.modules import library_modules

_PACKAGE = "paddle_flexckpt"
# What takes most of a run's time, by measurement, and gets few different arguments.
FUNCTIONS = (
    "algebra.flat:flat_ranges_to_boxes",
    "catalog.findings:inspect",
    "catalog.key_rows:decode_rows",
    "catalog.key_rows:encode_rows",
    "catalog.validate:validate_shards",
    "catalog.wire:decode_catalog",
    "catalog.wire:encode_catalog",
    "transfer.files:plan_reads",
    "saving.save_plan:assign",
    "planning.holder_sets:find_sets",
    "planning.holder_sets:share_out",
    "planning.matching:ShardMatcher",
    "planning.requests:find_requests",
)
# Answers of each function that are kept: those of some runs.
_MOST = 256
_PLAIN = (bytes, str, int, float, bool, type(None))


class _Unknown(Exception):
    """Signal an argument that cannot be compared by what it holds."""


@functools.cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """Return the fields of a frozen dataclass; None of another type."""
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return None
    return tuple(each.name for each in dataclasses.fields(kind))


class Memory:
    """Hold answers, by function and by what its arguments hold.

    Attributes:
        is_on: Whether answers are given; else each is computed.
        given: How many were.
    """

    def __init__(self) -> None:
        self.is_on, self.given, self._serial = True, 0, 0
        # Of answers that are kept: by identity, their number, which is the whole of what they hold.
        self._kept: dict[int, int] = {}

    def key(self, value: Any) -> Any:
        """Return what is equal for two arguments only if they hold the same."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is np.ndarray:
            return value.dtype.str, value.shape, value.tobytes()
        number = self._kept.get(id(value))
        if number is not None:
            return number
        if kind is tuple or kind is list:
            return (kind, *map(self.key, value))
        if kind is dict:
            return (kind, *((self.key(name), self.key(each)) for name, each in value.items()))
        names = _fields(kind)
        if names is None:
            raise _Unknown
        return (kind, *[self.key(getattr(value, name)) for name in names])

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with a memory."""
        answers: OrderedDict[Any, Any] = OrderedDict()

        def call(*args: Any, **keywords: Any) -> Any:
            if not self.is_on:
                return function(*args, **keywords)
            try:
                key = self.key(args), self.key(keywords)
            except _Unknown:
                return function(*args, **keywords)
            if key in answers:
                answers.move_to_end(key)
                self.given += 1
                return answers[key]
            answer = answers[key] = function(*args, **keywords)
            freeze(answer)
            if type(answer) not in _PLAIN and type(answer) is not np.ndarray:
                self._serial += 1
                self._kept[id(answer)] = self._serial
            if len(answers) > _MOST:
                self._kept.pop(id(answers.popitem(last=False)[1]), None)
            return answer

        return call


def freeze(value: Any) -> None:
    """Have a change of an answer's arrays be an error: others have the same one."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, (tuple, list)):
        for each in value:
            freeze(each)
    elif isinstance(value, dict):
        for each in value.values():
            freeze(each)
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith(_PACKAGE):
        for each in getattr(value, "__dict__", {}).values():
            freeze(each)


@contextlib.contextmanager
def remembering() -> Iterator[Memory]:
    """Have those functions remember, in all modules of the library."""
    library_modules()
    memory, undo = Memory(), Undo()
    try:
        for each in FUNCTIONS:
            module, _, name = each.partition(":")
            before = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
            undo.replace_everywhere(name, before, memory.of(before), _PACKAGE)
        decode = memory.of(Manifest.decode)
        undo.set(Manifest, "decode", staticmethod(decode))
        yield memory
    finally:
        undo.put_back()
