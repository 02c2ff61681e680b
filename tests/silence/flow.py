"""Flows by name, what judges one, and :func:`run_flows`, which runs seeds."""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paddle_flexckpt as fc
from tests.property.layouts import Pick
from tests.ramdisk import memory_directory
from tests.silence.judge import Finding
from tests.silence.totals import Totals

Flow = Callable[[Pick, Path], str]
FLOWS: dict[str, Flow] = {}


def flow(name: str) -> Callable[[Flow], Flow]:
    def register(function: Flow) -> Flow:
        FLOWS[name] = function
        return function

    return register


def refused(call: Callable[[], Any]) -> str | None:
    """The text of the library's error; None where there is none."""
    try:
        call()
    except fc.CheckpointError as error:
        return str(error)
    except ValueError as error:  # of a description
        if "Remedy" in str(error):
            return str(error)
        raise
    return None


def judged(error: str | None, got: Any, wanted: Any, what: str, may_fail: bool = True) -> str:
    """ "error" or "equal".

    Raises:
        Finding: The values are wrong, or what is right was refused.
    """
    if error is not None:
        if not may_fail:
            raise Finding(f"refused: {error[:400]}")
        return "error"
    if got != wanted:
        raise Finding(f"{what}: wrong values, and nothing says so")
    return "equal"


def collect() -> dict[str, Flow]:
    """Fill :data:`FLOWS`, and return it."""
    for module in ("flows", "flows_of_files", "flows_of_runs"):
        importlib.import_module(f"tests.silence.{module}")
    return FLOWS


def run_flows(seeds: Sequence[int]) -> Totals:
    """Runs seeds, each flow in turn."""
    logging.getLogger("paddle_flexckpt").setLevel(logging.CRITICAL)
    fc.install()
    totals, names = Totals(), list(collect())
    with memory_directory() as root:
        for number in seeds:
            name = names[number % len(names)]
            directory = root / str(number)
            directory.mkdir()
            try:
                outcome = FLOWS[name](Pick.from_seed(number), directory)
            except Finding as finding:
                totals.findings.append((number, name, str(finding)))
            except Exception as error:
                totals.findings.append((number, name, f"raw {error!r:.400}"))
            else:
                getattr(totals, outcome)[name] += 1
            shutil.rmtree(directory, ignore_errors=True)
    return totals
