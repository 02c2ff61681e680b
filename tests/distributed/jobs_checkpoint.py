"""Jobs of test_save_load, test_process_group and test_reshard: shards made by hand, in every layout and dtype."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.live import device_exchange, peers
from paddle_flexckpt.live import transport as transport
from paddle_flexckpt.live.communicator import Communicator, communicator_for
from tests.distributed import jobs_common as common


def here():
    return dist.get_rank(), dist.get_world_size()


def counted(group):
    """A communicator of a group, and a function that says how many collectives Paddle was asked for since."""
    comm = communicator_for(group)
    calls = []
    native = dist.all_gather_object

    def all_gather_object(*args, **kwargs):
        calls.append(1)
        return native(*args, **kwargs)

    dist.all_gather_object = all_gather_object

    def done():
        dist.all_gather_object = native
        return len(calls)

    return comm, done


# -- save and load -----------------------------------------------------------------------------------------------------


def save_zoo(directory, layout):
    rank, size = here()
    state = common.zoo_state(layout, rank, size)
    comm, done = counted(None)
    before = common.snapshot(state)
    report = fc.save_state_dict(state, directory, comm)
    return {
        "calls": done(),
        "collectives": comm.collectives,
        "written": report.bytes_written,
        "total": report.total_bytes,
        "stored": common.stored_bytes(directory),
        "source_untouched": before == common.snapshot(state),
        "keys": report.keys,
    }


def load_zoo(directory, layout):
    rank, size = here()
    state = common.zoo_state(layout, rank, size, salt="other")
    comm, done = counted(None)
    unequal = common.zoo_wrong(state, layout, rank, size)
    report = fc.load_state_dict(state, directory, comm)
    return {
        "calls": done(),
        "collectives": comm.collectives,
        "unequal_before": common.telling(state, unequal) == common.telling(state),
        "wrong": common.zoo_wrong(state, layout, rank, size),
        "read": report.bytes_read,
        "needed": report.bytes_needed,
        "local": common.local_bytes(state),
        "total": report.total_bytes,
        "missing": report.missing,
        "unexpected": report.unexpected,
    }


def merged_zoo(directory):
    """load_merged_state_dict on every rank by itself."""
    merged = fc.load_merged_state_dict(directory)
    return {
        "names": sorted(merged),
        "wrong": [name for name in merged if common.raw(merged[name]) != common.zoo_value(name).tobytes()],
    }


def pair(values, axis=0):
    """``values`` cut in two along an axis, this rank's half as a shard named "w"."""
    array = np.asarray(values, "float32")
    rank, size = here()
    part = np.split(array, size, axis)[rank]
    offset = [0] * array.ndim
    offset[axis] = part.shape[axis] * rank
    return {"w": fc.ShardedWeight("w", paddle.to_tensor(part), part.shape, array.shape, offset)}


def full(shape, value=0.0):
    return {"w": paddle.full(shape, value)}


def unique_ids(directory):
    """Saves without an id, with one, and over one; what each load then finds."""
    found = {}

    def load(unique_id=None):
        target = full([4])
        report = fc.load_state_dict(target, directory, unique_id=unique_id)
        return [report.unique_id, *target["w"].numpy().tolist()]

    found["first"] = fc.save_state_dict(pair([0, 1, 2, 3]), directory).unique_id
    found["second"] = fc.save_state_dict(pair([10, 11, 12, 13]), directory).unique_id
    found["explicit"] = fc.save_state_dict(pair([70, 71, 72, 73]), directory, unique_id=7).unique_id
    found["after explicit"] = fc.save_state_dict(pair([80, 81, 82, 83]), directory).unique_id
    found["loads"] = [load(), load(0), load(1), load(7), load(8)]
    report = fc.save_state_dict(pair([90, 91, 92, 93]), directory, unique_id=1)
    found["replaced"] = [report.unique_id, load(1), load(0), load()]
    dist.barrier()
    found["files"] = sorted(os.listdir(directory))
    return found


def coordinator(directory):
    """Who commits and who writes the log line with coordinator_rank=1."""
    commits, lines = [], []
    native = os.rename
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("paddle_flexckpt")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    os.rename = lambda old, new: (commits.append(new) if new.endswith(".manifest") else None, native(old, new))
    try:
        fc.save_state_dict(pair([1, 2]), directory, coordinator_rank=1)
        fc.load_state_dict(full([2]), directory, coordinator_rank=1)
        fc.reshard_sharded_state_dict(pair([1, 2]), full([2]), coordinator_rank=1)
    finally:
        os.rename = native
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {"commits": len(commits), "lines": [line.split()[0] for line in lines]}


def replicas(directory, save_replicas):
    """A tensor of 3 MiB on every rank and a small one: who writes how much of it."""
    big = np.arange(3 << 18, dtype="float32").reshape(3 << 8, 1 << 10)
    state = {"big": paddle.to_tensor(big), "small": paddle.full([3], 5.0)}
    report = fc.save_state_dict(state, directory, save_replicas=save_replicas)
    target = {"big": paddle.zeros(big.shape), "small": paddle.zeros([3])}
    loaded = fc.load_state_dict(target, directory)
    return {
        "written": report.bytes_written,
        "total": report.total_bytes,
        "held": report.held_bytes,
        "stored": common.stored_bytes(directory),
        "right": bool((target["big"].numpy() == big).all()) and target["small"].numpy().tolist() == [5.0] * 3,
        "read": loaded.bytes_read,
        "verified": loaded.bytes_verified,
    }


def policies(directory):
    """strict and dtype, and what the report says about it."""
    source = {**pair([1, 2, 3, 4]), "extra": paddle.full([2], 9.0)}
    fc.save_state_dict(source, directory)
    out = {}
    target = {"w": paddle.zeros([4]), "lost": paddle.full([2], -1.0)}
    report = fc.load_state_dict(target, directory, strict=False)
    out["lenient"] = [target["w"].numpy().tolist(), target["lost"].numpy().tolist(), report.missing, report.unexpected]
    target = {"w": paddle.zeros([4], dtype="bfloat16")}
    report = fc.load_state_dict(target, directory, dtype="cast")
    out["cast"] = [target["w"].astype("float32").numpy().tolist(), str(target["w"].dtype), report.cast]
    target = {"w": paddle.zeros([4], dtype="float64")}
    report = fc.reshard_sharded_state_dict(source, target, dtype="cast")
    out["cast in memory"] = [target["w"].numpy().tolist(), str(target["w"].dtype), report.cast]
    target = {"w": paddle.zeros([4])}
    report = fc.reshard_sharded_state_dict(source, target)
    out["unexpected in memory"] = [target["w"].numpy().tolist(), report.unexpected]
    return out


def nested(directory):
    """A nested dict, saved from shards and plain tensors, loaded nested and flat."""
    rank, _ = here()
    source = {"model": {"layer": pair([1, 2, 3, 4])}, "optimizer": {"step": paddle.full([1], 7.0)}, "nothing": {}}
    fc.save_state_dict(source, directory)
    deep = {"model": {"layer": {"w": paddle.zeros([4])}}, "optimizer": {"step": paddle.zeros([1])}}
    fc.load_state_dict(deep, directory, strict=True)
    flat = {"model.layer.w": paddle.zeros([4])} if rank else {"optimizer.step": paddle.zeros([1])}
    fc.load_state_dict(flat, directory, strict=True)
    return {
        "deep": [deep["model"]["layer"]["w"].numpy().tolist(), deep["optimizer"]["step"].numpy().tolist()],
        "flat": {key: tensor.numpy().tolist() for key, tensor in flat.items()},
    }


def strided(directory):
    """Transposed views and column slices as sources and as targets."""
    rank, _ = here()
    array = np.arange(48, dtype="float32").reshape(6, 8)
    half = array[:, 4 * rank : 4 * rank + 4]

    def views(values):
        """A transposed view, and a column slice of a wider tensor, that hold the same ``[6, 4]`` values."""
        wide = paddle.to_tensor(np.concatenate([np.full((6, 1), -1), values, np.full((6, 1), -2)], 1).astype("float32"))
        return {"transposed": paddle.to_tensor(np.ascontiguousarray(values.T)).T, "slice": wide[:, 1:5]}, wide

    def columns(tensors):
        return {key: fc.ShardedWeight(key, tensor, (6, 4), (6, 8), (0, 4 * rank)) for key, tensor in tensors.items()}

    def rows():
        return {
            key: fc.ShardedWeight(key, paddle.zeros([3, 8]), (3, 8), (6, 8), (3 * rank, 0))
            for key in ("transposed", "slice")
        }

    zeros = np.zeros((6, 4), "float32")
    sources, _ = views(half)
    targets, wide = views(zeros)
    moved, _ = views(zeros)
    contiguous = [tensor.is_contiguous() for tensor in (*sources.values(), *targets.values(), *moved.values())]
    fc.save_state_dict(columns(sources), directory)
    fc.load_state_dict(columns(targets), directory)
    fc.reshard_sharded_state_dict(columns(sources), columns(moved))
    # And a real change of layout, into plain tensors: rows.
    loaded_rows, moved_rows = rows(), rows()
    fc.load_state_dict(loaded_rows, directory)
    fc.reshard_sharded_state_dict(columns(sources), moved_rows)
    got = [(tensor, half) for tensor in (*targets.values(), *moved.values())]
    got += [(w.local_tensor, array[3 * rank :][:3]) for w in (*loaded_rows.values(), *moved_rows.values())]

    # A view that is older than the flag is no tensor to Paddle any more: an error, and nothing changed.
    flag = paddle.get_flags("FLAGS_use_stride_kernel")
    late, _ = views(zeros)
    state = {"of": {"plain": paddle.zeros([6, 4])}, **columns(late)}
    fc.save_state_dict({"of.plain": paddle.ones([6, 4]), **columns(sources)}, directory)
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        error = common.outcome(lambda: fc.load_state_dict(state, directory))
        unsaved = common.outcome(lambda: fc.save_state_dict(columns(sources), directory))
    finally:
        paddle.set_flags(flag)
    return {
        "contiguous": contiguous,
        "right": [bool((tensor.numpy() == value).all()) for tensor, value in got],
        "margins": [wide[:, 0].numpy().tolist(), wide[:, 5].numpy().tolist()],
        "errors": [error, unsaved],
        "unchanged": [float(t.abs().sum()) for t in (state["of"]["plain"], *late.values())],
        "ids": sorted(name for name in os.listdir(directory) if name.endswith(".manifest")),
    }


def paddle_shards(directory, layout, target):
    """The in-tree class on both sides."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, size = here()
    fc.save_state_dict(common.zoo_state(layout, rank, size, make=ShardedWeight), directory)
    state = common.zoo_state(target, rank, size, salt="other", make=ShardedWeight)
    fc.load_state_dict(state, directory)
    wrong = common.zoo_wrong(state, target, rank, size)
    state = common.zoo_state(target, rank, size, salt="other", make=ShardedWeight)
    fc.reshard_sharded_state_dict(common.zoo_state(layout, rank, size, make=ShardedWeight), state)
    return wrong + common.zoo_wrong(state, target, rank, size)


# -- process groups ----------------------------------------------------------------------------------------------------


def group_job(directory, ranks, coordinator_rank):
    """Save, load and reshard among some ranks of the world; the others do something else meanwhile."""
    group = dist.new_group(ranks)
    rank = dist.get_rank()
    out = {"member": rank in ranks}
    if rank not in ranks:
        others = {"w": paddle.full([2], float(rank))}
        # A rank that is not a member is told so, and does not hang.
        out["refused"] = common.outcome(lambda: fc.save_state_dict(others, directory, group))
        return out
    place, size = ranks.index(rank), len(ranks)
    names = ("of.float32", "of.bfloat16", "of.int64", "scalar")
    state = common.zoo_state("rows", place, size, names=names)
    report = fc.save_state_dict(state, directory, group, coordinator_rank)
    out["id"] = report.unique_id
    again = fc.save_state_dict(state, directory, group, coordinator_rank)
    out["second id"] = again.unique_id
    out["written"] = report.bytes_written
    out["unique"] = sum(common.zoo_value(name).nbytes for name in names)
    target = common.zoo_state("columns", place, size, salt="other", names=names)
    loaded = fc.load_state_dict(target, directory, group, coordinator_rank)
    out["read"] = [loaded.bytes_read, loaded.bytes_needed, common.local_bytes(target)]
    out["wrong"] = common.zoo_wrong(target, "columns", place, size)
    target = common.zoo_state("flat", place, size, salt="other", names=names)
    fc.reshard_sharded_state_dict(state, target, group, coordinator_rank)
    out["wrong"] += common.zoo_wrong(target, "flat", place, size)
    out["error"] = common.outcome(lambda: fc.save_state_dict(state, directory, group, size))
    return out


def load_by_all(directory, unique_id):
    """The whole world loads what a group of it has saved."""
    rank, size = here()
    names = ("of.float32", "of.bfloat16", "of.int64", "scalar")
    state = common.zoo_state("rows", rank, size, salt="other", names=names)
    fc.load_state_dict(state, directory, unique_id=unique_id)
    return common.zoo_wrong(state, "rows", rank, size)


class Permuted(Communicator):
    """The world with its ranks in another order."""

    def __init__(self, order):
        super().__init__(tuple(order), order.index(dist.get_rank()))
        self._inner = communicator_for(None)

    def _all_gather(self, payload):
        gathered = self._inner.all_gather(payload)
        return [gathered[rank] for rank in self.ranks]

    def open_transport(self):
        return transport.SocketTransport(self.ranks, self.position)


def permuted(directory, order):
    """A group whose ranks are not in rising order: the place in it, not the rank, counts."""
    comm = Permuted(order)
    place, size = comm.position, comm.size
    state = common.zoo_state("rows", place, size)
    fc.save_state_dict(state, directory, comm)
    wrong = []
    for layout in ("columns", "rows", "whole"):
        target = common.zoo_state(layout, place, size, salt="other")
        fc.load_state_dict(target, directory, comm)
        wrong += common.zoo_wrong(target, layout, place, size)
        target = common.zoo_state(layout, place, size, salt="other")
        fc.reshard_sharded_state_dict(state, target, comm)
        wrong += common.zoo_wrong(target, layout, place, size)
    return wrong


# -- reshard -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_rounds(round_bytes):
    """Exchanges between devices in rounds of so few bytes."""
    before = device_exchange.ROUND_BYTES
    device_exchange.ROUND_BYTES = round_bytes or before
    try:
        yield
    finally:
        device_exchange.ROUND_BYTES = before


def reshard_zoo(source, target, round_bytes=None, offload=False):
    """Moves the zoo between two layouts; on devices, in rounds of ``round_bytes``."""
    rank, size = here()
    state, goal = common.zoo_state(source, rank, size), common.zoo_state(target, rank, size, salt="other")
    before = common.snapshot(state)
    comm, done = counted(None)
    unequal = common.zoo_wrong(goal, target, rank, size)
    with small_rounds(round_bytes):
        report = fc.reshard_sharded_state_dict(state, goal, comm, offload=offload)
    return {
        "calls": done(),
        "collectives": comm.collectives,
        "unequal_before": common.telling(goal, unequal) == common.telling(goal),
        "wrong": common.zoo_wrong(goal, target, rank, size),
        "source_untouched": before == common.snapshot(state),
        "received": report.bytes_received,
        "lacked": common.lacked_bytes(source, target, rank, size),
        "needed": report.bytes_needed,
        "copied": report.bytes_copied,
        "local": common.local_bytes(goal),
        "sent": report.bytes_sent,
    }


def reshard_model(source_degree, target_degree, round_bytes=None):
    """A live model with its stepped AdamW into another one under another degree, in memory."""
    from tests.distributed import jobs_tensor_parallel as tensor_parallel

    fc.install()
    hcg = common.init_tensor_parallel(source_degree)
    place, _ = common.place_in(hcg)
    old = common.Net(common.KINDS, True, source_degree, place=place)
    common.hook_sequence_parallel(old)
    optimizer = tensor_parallel.adamw(old)
    common.train(old, optimizer, (0, 1))
    model = old.sharded_state_dict()
    source = {**model, **optimizer.sharded_state_dict(model)}
    gathered = []
    arrays = tensor_parallel.optimizer_arrays(old, optimizer, source_degree)
    dist.all_gather_object(gathered, {name: tensor_parallel.as_array(tensor) for name, (tensor, _) in arrays.items()})

    hcg = common.init_tensor_parallel(target_degree)
    place, _ = common.place_in(hcg)
    new = common.Net(common.KINDS, True, target_degree, salt="other", place=place)
    fresh = tensor_parallel.adamw(new)
    model = new.sharded_state_dict()
    target = {**model, **fresh.sharded_state_dict(model)}
    with small_rounds(round_bytes):
        report = fc.reshard_sharded_state_dict(source, target, strict=True)
    wrong = []
    lacked = 0
    for name, (tensor, axis) in tensor_parallel.optimizer_arrays(new, fresh, target_degree).items():
        parts = [gathered[r][name] for r in range(source_degree)]
        together = parts[0] if axis is None else np.concatenate(parts, axis)
        if common.raw(tensor) != common.cut(together, axis, place, target_degree).tobytes():
            wrong.append(name)
        if axis is not None:
            # In units of a quarter: what this rank needs and what it has.
            needs = set(range(place * 4 // target_degree, (place + 1) * 4 // target_degree))
            had = dist.get_rank() % source_degree
            has = set(range(had * 4 // source_degree, (had + 1) * 4 // source_degree))
            lacked += len(needs - has) * together.nbytes // 4
    return {
        "keys": len(target),
        "wrong": wrong,
        "received": report.bytes_received,
        "lacked": lacked,
        "needed": report.bytes_needed,
        "local": common.local_bytes(target),
    }


def failing_exchange(where, rank, round_bytes=None):
    """One rank fails in the middle of an exchange; then everybody reshards again."""
    here_rank, size = here()
    native = getattr(peers, where)

    def no_copy(*args):
        raise MemoryError("no room to copy_pieces")

    def broken(*args):
        first = True
        for chunk in native(*args):
            if not first:
                raise MemoryError(f"no room to {where}")
            first = False
            yield chunk
        raise MemoryError(f"no room to {where}")

    def attempt():
        state = common.zoo_state("rows", here_rank, size)
        goal = common.zoo_state("columns", here_rank, size, salt="other")
        with small_rounds(round_bytes):
            fc.reshard_sharded_state_dict(state, goal)
        return common.zoo_wrong(goal, "columns", here_rank, size)

    if here_rank == rank:
        setattr(peers, where, no_copy if where == "copy_pieces" else broken)
    begin = time.monotonic()
    try:
        error = common.outcome(attempt)
    finally:
        setattr(peers, where, native)
    return {"error": error, "seconds": time.monotonic() - begin, "again": attempt()}


def one_rank_saves_for_all(directory):
    """Pure data parallelism: rank 0 saves without the others, and everyone loads."""
    values = paddle.arange(12, dtype="float32").reshape([3, 4])
    if dist.get_rank() == 0:
        fc.save_state_dict({"w": values}, directory, process_group="self")
    dist.barrier()
    target = paddle.zeros([3, 4])
    fc.load_state_dict({"w": target}, directory)
    return bool((target == values).all())
