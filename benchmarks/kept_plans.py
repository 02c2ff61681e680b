"""How long planning takes for a layout that comes again, in CPU time: ``python -m benchmarks.kept_plans``.

Planning is all that a call of one process does before data moves, but for what it asks of the medium: locks, markers,
manifests. Describing the tensors is a part of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import paddle

import paddle_flexckpt as fc
from benchmarks.harness import arguments, finish, row, turns
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.shared_saves import SharedSave


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=15)
    parser.add_argument("--tensors", type=int, default=1000)
    options = parser.parse_args(argv)
    medium: list[float] = []
    time_calls(SharedSave, "begin", medium)

    def planning(call: Callable[[], Any]) -> float:
        """Return the milliseconds of planning in a call, whose report counts CPU time for once."""
        medium.clear()
        with mock.patch("time.perf_counter", time.process_time):
            return 1000 * (call().seconds["plan"] - sum(medium))

    names = [f"model.layers.{number}.weight" for number in range(options.tensors)]
    source, target = ({name: paddle.full([16, 16], 1.0) for name in names} for _ in range(2))
    plan, comm = fc.plan_reshard(source, target), SoloCommunicator()
    with tempfile.TemporaryDirectory(dir=options.directory) as path:
        taken = turns(
            {
                "a first save": lambda: planning(lambda: fc.save_state_dict(source, path, SoloCommunicator(), 0, 0)),
                "a save": lambda: planning(lambda: fc.save_state_dict(source, path, comm, 0, 0)),
                "a reshard by its plan": lambda: planning(plan.run),
            },
            options.pairs,
        )
    case = f"{options.tensors:,} tensors, CPU time"
    bounds = {name: "" if "first" in name else "<= 5" for name in taken}
    finish(options, [row(f"planning of {name}: {case}", taken[name], bounds[name], "ms") for name in taken], ms=taken)


def time_calls(owner: type, name: str, seconds: list[float]) -> None:
    """Have a list take the seconds of each call of a method."""
    call = getattr(owner, name)

    def timed(*given: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*given)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(owner, name, timed)


if __name__ == "__main__":
    main()
