"""How long ``check()`` and ``sharded_state_dict()`` take: python benchmarks/describe.py [--parameters N]."""

from __future__ import annotations

import argparse
import time

import paddle

import paddle_flexckpt as fc


def seconds(call) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    fc.install()
    model = paddle.nn.LayerList([paddle.nn.Linear(2, 2) for _ in range(args.parameters // 2)])
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    checked = min(seconds(lambda: fc.check(model, optimizer)) for _ in range(args.repeats))
    state = model.sharded_state_dict()
    first = seconds(lambda: optimizer.sharded_state_dict(state))
    of_model = min(seconds(model.sharded_state_dict) for _ in range(args.repeats))
    of_optimizer = min(seconds(lambda: optimizer.sharded_state_dict(state)) for _ in range(args.repeats))
    print(
        f"{len(state)} parameters: check() {checked:.2f} s, model {of_model:.2f} s, optimizer {of_optimizer:.2f} s, ",
        end="",
    )
    print(f"optimizer for the first time, creating {4 * len(state)} accumulators, {first:.2f} s")


if __name__ == "__main__":
    main()
