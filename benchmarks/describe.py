"""How long ``check()`` and ``sharded_state_dict()`` take, in CPU time: ``python -m benchmarks.describe``."""

from __future__ import annotations

import time
from collections.abc import Callable

import paddle

import paddle_flexckpt as fc
from benchmarks.harness import arguments, finish, row, turns


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--parameters", type=int, default=10_000)
    options = parser.parse_args(argv)
    fc.install()
    model = paddle.nn.LayerList([paddle.nn.Linear(2, 2) for _ in range(options.parameters // 2)])
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    state = model.sharded_state_dict()
    first = processor_time(lambda: optimizer.sharded_state_dict(state))
    seconds = turns(
        {
            "check()": lambda: processor_time(lambda: fc.check(model, optimizer)),
            "sharded_state_dict() of the model": lambda: processor_time(model.sharded_state_dict),
            "sharded_state_dict() of AdamW": lambda: processor_time(lambda: optimizer.sharded_state_dict(state)),
        },
        options.pairs,
    )
    case = f"{options.parameters:,} parameters, CPU time"
    rows = [row(f"{name}: {case}", taken, unit="s") for name, taken in seconds.items()]
    created = f"sharded_state_dict() of AdamW that creates {4 * len(state):,} accumulators: {case}"
    finish(options, [*rows, row(created, first, unit="s")], seconds=seconds)


def processor_time(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
