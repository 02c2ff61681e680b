"""Checks of the rehearsal device's collectives: the script of one rank of several."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from plugin_checks import main

from tests.device import plugin

RANK, SIZE = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])


def values(rank: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 3)) -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) % 50 + 10 * rank).astype(dtype)


def tensor(array: np.ndarray, dtype: str | None = None) -> paddle.Tensor:
    host = paddle.to_tensor(array, place=paddle.CPUPlace())
    device = int(paddle.get_device().split(":")[1])
    return (host if dtype is None else host.astype(dtype))._copy_to(paddle.CustomPlace("rehearsal", device), True)


def same(got: paddle.Tensor, want: np.ndarray) -> None:
    assert "rehearsal" in str(got.place)
    got = got.cpu().astype("float32").numpy()
    assert (got == want.astype("float32")).all(), f"{got} is not {want}"


def finished(task: object) -> None:
    """Wait for the work that was asked for with sync_op=False."""
    task.wait()


def check_reductions() -> None:
    each = [values(rank) for rank in range(SIZE)]
    for dtype in ("float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8", "int8"):
        of_all = tensor(values(RANK), dtype)
        dist.all_reduce(of_all)
        same(of_all, sum(each))
    for operation, want in ((dist.ReduceOp.MAX, np.max(each, 0)), (dist.ReduceOp.MIN, np.min(each, 0))):
        extreme = tensor(values(RANK))
        dist.all_reduce(extreme, operation)
        same(extreme, want)
    product = tensor(values(RANK) % 3)
    dist.all_reduce(product, dist.ReduceOp.PROD)
    same(product, np.prod([v % 3 for v in each], 0))
    at_last = tensor(values(RANK))
    finished(dist.reduce(at_last, dst=SIZE - 1, sync_op=False))
    if RANK == SIZE - 1:
        same(at_last, sum(each))
    part = paddle.zeros([4, 3])
    finished(dist.reduce_scatter(part, [tensor(values(RANK) + k) for k in range(SIZE)], sync_op=False))
    same(part, sum(v + RANK for v in each))


def check_gathers() -> None:
    for sync in (True, False):
        gathered: list[paddle.Tensor] = []
        task = dist.all_gather(gathered, tensor(values(RANK)), sync_op=sync)
        if not sync:
            finished(task)
        for rank, one in enumerate(gathered):
            same(one, values(rank))
        sent = tensor(values(RANK))
        task = dist.broadcast(sent, src=1, sync_op=sync)
        if not sync:
            finished(task)
        same(sent, values(1))
        mine = paddle.zeros([4, 3])
        task = dist.scatter(mine, [tensor(values(k)) for k in range(SIZE)] if RANK == 1 else [], src=1, sync_op=sync)
        if not sync:
            finished(task)
        same(mine, values(RANK))
    objects: list[object] = []
    dist.all_gather_object(objects, {"rank": RANK, "text": "x" * 10 * RANK})
    assert [one["rank"] for one in objects] == list(range(SIZE))
    dist.barrier()


def check_all_to_all() -> None:
    out: list[paddle.Tensor] = []
    finished(dist.alltoall(out, [tensor(values(RANK) + k) for k in range(SIZE)], sync_op=False))
    for rank, one in enumerate(out):
        same(one, values(rank) + RANK)
    # Unequal by a factor of 1,000, with parts of size zero.
    width = [[0, 1, 1000, 3][(a + 2 * b) % 4] for a in range(SIZE) for b in range(SIZE)]
    ins, outs = width[RANK * SIZE : (RANK + 1) * SIZE], width[RANK::SIZE]
    received = paddle.zeros([sum(outs)], dtype="uint8")
    sent = tensor(np.concatenate([np.full(n, 16 * RANK + k, "uint8") for k, n in enumerate(ins)]))
    finished(dist.alltoall_single(received, sent, ins, outs, sync_op=False))
    assert received.numpy().tolist() == [16 * k + RANK for k, n in enumerate(outs) for _ in range(n)]


def check_traffic_that_is_one_way_or_empty() -> None:
    for sizes in ({(0, 1): 4}, {}, {(SIZE - 1, 0): 1, (0, SIZE - 1): 1000}):
        ins, outs = [sizes.get((RANK, k), 0) for k in range(SIZE)], [sizes.get((k, RANK), 0) for k in range(SIZE)]
        received = paddle.zeros([sum(outs)])
        dist.alltoall_single(received, paddle.full([sum(ins)], 1.0 + RANK), ins, outs)
        assert received.numpy().tolist() == [1.0 + k for k, n in enumerate(outs) for _ in range(n)]


def check_messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    received = paddle.zeros([4, 3])
    operations = [dist.P2POp(dist.isend, tensor(values(RANK)), after), dist.P2POp(dist.irecv, received, before)]
    for task in dist.batch_isend_irecv(operations):
        task.wait()
    same(received, values(before))
    if RANK < 2:
        one = tensor(values(RANK))
        if RANK == 0:
            dist.send(one, dst=1)
        else:
            dist.recv(one, src=0)
        same(one, values(0))


def check_sub_groups() -> None:
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, SIZE, 2)]
    first = RANK // 2 * 2
    of_pair = tensor(values(RANK))
    dist.all_reduce(of_pair, group=pairs[RANK // 2])
    same(of_pair, values(first) + values(first + 1))


def check_types_of_eight_bits() -> None:
    """Paddle has no number for float8 in collectives: the bytes travel."""
    typed = tensor(values(RANK), "float8_e4m3fn")
    try:
        dist.broadcast(typed, src=0)
    except RuntimeError as error:
        assert "DataType is not supported" in str(error)
    else:
        raise AssertionError("Paddle knows float8 now: so should the plugin")
    raw = typed.view("uint8")
    dist.broadcast(raw, src=0)
    assert (raw.numpy() == tensor(values(0), "float8_e4m3fn").view("uint8").numpy()).all()


def check_counters() -> None:
    paddle.device.synchronize()
    plugin.reset()
    plugin.configure(trace=1)
    dist.all_reduce(tensor(values(RANK)))
    paddle.device.synchronize()
    plugin.configure(trace=0)
    counters = plugin.stats()
    assert counters["collectives"] == {"all_reduce": 1}
    assert counters["ccl"]["bytes"] == 48 * (SIZE - 1)
    (span,) = [span for span in plugin.trace() if span.what == "all_reduce"]
    assert os.path.basename(span.caller).startswith("plugin_ranks.py:")
    assert span.stream >= 0 and span.nbytes == 48 * (SIZE - 1)


def check_a_peer_that_dies() -> None:
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    one = tensor(values(RANK))
    try:
        dist.all_reduce(one)
        one.numpy()
    except RuntimeError as error:
        text = str(error)
        assert "communicator" in text and "rank 1 has closed the connection" in text, text
        assert "all_reduce" in text
        return
    raise AssertionError("nothing was raised")


def check_a_peer_that_says_nothing() -> None:
    dist.barrier()
    if RANK == 1:
        sys.stdin.read()  # until the other rank has had enough
        return
    plugin.configure(patience_s=0.3)
    one = tensor(values(RANK))
    try:
        dist.all_reduce(one)
        one.numpy()
    except RuntimeError as error:
        assert "rank 1 said nothing for 0.3 seconds" in str(error), str(error)
        return
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    dist.init_parallel_env()
    main(globals(), sys.argv[1:])
