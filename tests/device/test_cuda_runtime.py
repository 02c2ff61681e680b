"""The plugin over CUDA's runtime: it compiles, and all of its logic runs over functions that look like CUDA's.

What they do not have is a card: streams that run on their own, and kernels as a card runs them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.testing import World
from tests.device import plugin

MISSING = plugin.missing_tools("fake")
pytestmark = [
    pytest.mark.paddle,
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
CHECKS = Path(__file__).with_name("cuda_checks.py")


@pytest.mark.skipif(bool(plugin.missing_tools("cuda")), reason=plugin.missing_tools("cuda"))
def test_it_compiles_without_warnings_where_the_toolkit_is():
    assert list(plugin.build("cuda").iterdir())


def test_the_runtime_of_a_process_has_a_name_and_no_card_is_said_to_be_none():
    env = {**os.environ, **plugin.environment(1, runtime="fake")}
    code = "import paddle; from tests.device import plugin; print(plugin.runtime())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "fake"


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What came of each check, in one process."""
    env = {**os.environ, **plugin.environment(2, runtime="fake"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(CHECKS)], env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return {**json.loads(lines[-1]), "": done.stderr}


@pytest.mark.parametrize("name", re.findall(r"^def check_(\w+)", CHECKS.read_text(), re.M))
def test_in_one_process(answers, name):
    assert answers.get(name, f"the process ended before\n{answers['']}") == ""
    assert "fake cudart" not in answers[""] or name == "host_memory_is_page_locked"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, device="tests.device.fake_ranks", grace=20) as both:
        yield both


def collectives() -> dict[str, object]:
    """Call each collective that only moves bytes, one that is larger than the ranks' buffers, and a reduction."""
    import paddle
    import paddle.distributed as dist

    rank = dist.get_rank()
    mine = paddle.arange(5, dtype="int64") + 10 * rank
    gathered: list[paddle.Tensor] = []
    plugin.reset()
    dist.all_gather(gathered, mine)
    large = paddle.full([11 << 20], float(rank))  # 44 MiB
    dist.broadcast(large, src=1)
    received = paddle.zeros([3 if rank else 5], dtype="int64")
    split = [[2, 3], [3, 0]][rank]
    sizes = [[2, 3], [3, 0]]
    dist.alltoall_single(
        received,
        paddle.arange(sum(split), dtype="int64") + 100 * rank,
        in_split_sizes=split,
        out_split_sizes=[sizes[0][rank], sizes[1][rank]],
    )
    if rank == 0:
        dist.send(mine, dst=1)
    else:
        passed = paddle.zeros([5], dtype="int64")
        dist.recv(passed, src=0)
    paddle.device.synchronize()
    moved = plugin.stats()
    total = mine.clone()
    dist.all_reduce(total)
    paddle.device.synchronize()
    return {
        "gathered": [each.numpy().tolist() for each in gathered],
        "large": bool((large.numpy() == 1.0).all()),
        "received": received.numpy().tolist(),
        "passed": passed.numpy().tolist() if rank else mine.numpy().tolist(),
        "total": total.numpy().tolist(),
        "sent": moved["ccl"]["bytes"],
        "on the host": sorted(set(moved["fallbacks"]) & set(moved["collectives"])),
        "then": plugin.stats()["fallbacks"].get("all_reduce"),
    }


def check_values(first: dict[str, object], second: dict[str, object]) -> None:
    for answer in (first, second):
        assert answer["gathered"] == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
        assert answer["large"]
        assert answer["passed"] == [0, 1, 2, 3, 4]
        assert answer["total"] == [10, 12, 14, 16, 18]
        assert answer["then"] == 1
    assert first["received"] == [0, 1, 100, 101, 102]
    assert second["received"] == [2, 3, 4]
    assert first["sent"] == 5 * 8 + 3 * 8 + 5 * 8
    assert second["sent"] == 5 * 8 + (44 << 20) + 3 * 8


def test_messages_go_from_device_to_device_and_reductions_through_the_host(world):
    answers = world.run(collectives)
    check_values(*answers)
    assert [answer["on the host"] for answer in answers] == [[], []]


def test_where_processes_cannot_share_memory_messages_go_through_the_host():
    with World(2, device="tests.device.fake_ranks", env={"FAKE_CUDART_WITHOUT_IPC": "1"}) as world:
        answers = world.run(collectives)
    check_values(*answers)
    moved = ["all_gather", "all_to_all", "broadcast"]
    assert [answer["on the host"] for answer in answers] == [[*moved, "send"], [*moved, "recv"]]


def reshard() -> list[bool]:
    """Cut a tensor by rows, then by columns, in types of each width."""
    import paddle.distributed as dist

    import paddle_flexckpt as fc
    from paddle_flexckpt.testing.device_check_record import elements, on_device, same

    rank, right = dist.get_rank(), []
    for dtype in ("uint8", "bfloat16", "float32", "int64"):
        whole = elements(dtype, (34, 26), dtype)
        rows, columns = np.split(whole, 2, 0)[rank], np.ascontiguousarray(np.split(whole, 2, 1)[rank])
        source = fc.ShardedWeight("w", on_device(rows, dtype), rows.shape, whole.shape, (17 * rank, 0))
        target = fc.ShardedWeight(
            "w", on_device(np.zeros_like(columns), dtype), columns.shape, whole.shape, (0, 13 * rank)
        )
        plugin.reset()
        fc.reshard_sharded_state_dict({"w": source}, {"w": target})
        crossed = plugin.stats()
        right.append(same(target.local_tensor, columns) and not crossed["fallbacks"] and crossed["ccl"]["bytes"] > 0)
    return right


def test_a_reshard_uses_neither_the_host_nor_its_kernels(world):
    assert world.run(reshard) == [[True] * 4] * 2
