"""Jobs of test_findings and test_bounds: what crosses the link, and what is left as it was."""

from __future__ import annotations

import gc
import os

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt import ShardedWeight
from tests.device import plugin

MIB = 1 << 20
COLUMNS = 4096
#: What a shard of so many MiB of float32 has of rows.
ROWS_PER_MIB = MIB // 4 // COLUMNS


def _status(name):
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith(name)) * 1024


def measured(work):
    """The plugin's counters of a call, and the host and device memory that it took at most, in bytes."""
    # The plugin keeps some of what was freed, poisoned, in this process's memory: let that be as much before as after.
    fillers = [paddle.zeros([8 * MIB], dtype="uint8") for _ in range(8)]
    del fillers
    paddle.zeros([1])  # what was freed is poisoned before its stream's next work
    paddle.device.synchronize()
    gc.collect()
    plugin.reset()
    before = plugin.stats()
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # sets the peak back to what is resident now
    resident = _status("VmRSS")
    work()
    peak = _status("VmHWM")
    paddle.device.synchronize()
    after = plugin.stats()
    device = after["device_peak"] - before["device_bytes"]
    return {
        # The device's memory is this process's memory too.
        "host": peak - resident - device,
        "device": device,
        **{way: after[way]["bytes"] for way in ("h2d", "d2h", "d2d", "ccl")},
        "collectives": after["ccl"]["calls"],
        "allocations": after["allocations"],
        "touches": after["host_touches"],
        "freed_uses": after["freed_uses"],
    }


def values(rows, first=0):
    """Rows of a global tensor, told apart by their numbers."""
    numbers = np.arange(first * COLUMNS, (first + rows) * COLUMNS, dtype=np.uint32)
    numbers *= np.uint32(2654435761)
    numbers >>= np.uint32(8)  # float32 has 24 bits
    return numbers.astype(np.float32).reshape(rows, COLUMNS)


def rows_shard(mib, fill=True):
    """This rank's rows of a tensor of which every rank has so many MiB."""
    rank, size, rows = dist.get_rank(), dist.get_world_size(), mib * ROWS_PER_MIB
    tensor = paddle.to_tensor(values(rows, rank * rows)) if fill else paddle.zeros([rows, COLUMNS])
    return {"w": ShardedWeight("w", tensor, (rows, COLUMNS), (rows * size, COLUMNS), (rows * rank, 0))}


def columns_shard(mib):
    """This rank's columns of it, to be filled."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, width = mib * ROWS_PER_MIB * size, COLUMNS // size
    tensor = paddle.zeros([rows, width])
    return {"w": ShardedWeight("w", tensor, (rows, width), (rows, COLUMNS), (0, width * rank))}


def right_columns(target, mib):
    """Whether the columns hold what they should."""
    rank, size = dist.get_rank(), dist.get_world_size()
    width = COLUMNS // size
    whole = values(mib * ROWS_PER_MIB * size)[:, width * rank : width * (rank + 1)]
    return bool((target["w"].local_tensor.numpy() == whole).all())


def costs(directory, mib):
    """Counters of each call, with ``mib`` of state on each rank, and whether the values were right."""
    state = rows_shard(mib)
    made = {"save": measured(lambda: fc.save_state_dict(state, f"{directory}/sharded"))}
    handles = []
    made["async"] = measured(lambda: handles.append(fc.save_state_dict(state, f"{directory}/async", async_save=True)))
    handles[0].result()
    target = rows_shard(mib, fill=False)
    made["load"] = measured(lambda: fc.load_state_dict(target, f"{directory}/async"))
    made["load"]["right"] = bool((target["w"].local_tensor.numpy() == state["w"].local_tensor.numpy()).all())
    target = columns_shard(mib)
    made["load of columns"] = measured(lambda: fc.load_state_dict(target, f"{directory}/sharded"))
    made["load of columns"]["right"] = right_columns(target, mib)
    for name, offload in (("reshard", False), ("reshard through the host", True)):
        target["w"].local_tensor.zero_()
        made[name] = measured(lambda: fc.reshard_sharded_state_dict(state, target, offload=offload))  # noqa: B023
        made[name]["right"] = right_columns(target, mib)
    fc.save_state_dict(target, f"{directory}/columns")
    rows = rows_shard(mib, fill=False)
    made["load of rows from columns"] = measured(lambda: fc.load_state_dict(rows, f"{directory}/columns"))
    made["load of rows from columns"]["right"] = bool(
        (rows["w"].local_tensor.numpy() == state["w"].local_tensor.numpy()).all()
    )
    return made


def replicated_costs(directory, mib):
    """Counters of saves of ``mib`` of state that every rank has all of."""
    whole = paddle.to_tensor(values(mib * ROWS_PER_MIB))
    state = {"large": whole, "small": paddle.arange(1000, dtype="float32")}
    # The device keeps what was freed until its stream has come so far. That comes on top of what the save takes, and
    # varies: of 120 saves, 15 seemed to take more than 64 MiB, up to 123, the others 55 to 64. So the least counts.
    saves = [
        measured(lambda turn=turn: fc.save_state_dict(state, f"{directory}/replicated{turn}")) for turn in range(3)
    ]
    made = {
        "save": min(saves, key=lambda cost: cost["host"]),
        "unchecked": measured(lambda: fc.save_state_dict(state, f"{directory}/unchecked", check_replicas=False)),
    }
    drifted = {**state, "small": state["small"] + dist.get_rank() * 0.5}
    found = []
    made["drifted"] = measured(
        lambda: found.append(fc.save_state_dict(drifted, f"{directory}/drifted", check_replicas="close").replicas)
    )
    made["drifted"]["replicas"] = found[0]
    target = {"large": paddle.zeros(whole.shape), "small": paddle.zeros([1000])}
    made["load"] = measured(lambda: fc.load_state_dict(target, f"{directory}/replicated0"))
    made["load"]["right"] = all(bool((target[key].numpy() == state[key].numpy()).all()) for key in state)
    return made


def merged_costs(directory, mib):
    """Counters of a merged load by rank 0."""
    fc.save_state_dict(rows_shard(mib), directory)
    if dist.get_rank():
        return None
    loaded = {}
    made = measured(lambda: loaded.update(fc.load_merged_state_dict(directory)))
    made["place"] = str(loaded["w"].place)
    made["right"] = bool((loaded["w"].numpy() == values(mib * ROWS_PER_MIB * dist.get_world_size())).all())
    return made


# -- views -------------------------------------------------------------------------------------------------------------


def _transposed(array):
    return array.T if isinstance(array, np.ndarray) else array.transpose([1, 0])


VIEWS = {
    "transposed": _transposed,
    "columns": lambda array: array[:, 1:3],
    "rows": lambda array: array[1:3],
    "every other": lambda array: array[::2, ::2],
    "one column": lambda array: array[:, 2],
}


def _tensor(array, dtype):
    return paddle.to_tensor(array).astype(dtype) if dtype != "complex128" else paddle.to_tensor(array.astype(dtype))


def views(directory, dtype):
    """A view of each kind through save, load and reshard; returns what went wrong."""
    array = np.arange(1, 31).reshape(6, 5).astype("float32")
    wrong = []
    for name, view in VIEWS.items():
        base = _tensor(array, dtype)
        source = view(base)
        address = source.data_ptr()
        path = os.path.join(directory, name.replace(" ", "-"), str(dist.get_rank()))
        fc.save_state_dict({"v": source}, path, process_group="self")
        base.copy_(_tensor(np.full_like(array, 99), dtype), True)
        if source.data_ptr() != address:
            wrong.append(f"{name}: the save gave the tensor other memory")
        if not (_array(source) == 99).all():
            wrong.append(f"{name}: after the save the view does not show its base any more")
        for how in ("load", "reshard"):
            target = _tensor(np.zeros_like(array), dtype)
            into, expected = view(target), np.zeros_like(array)
            view(expected)[...] = view(array)
            if how == "load":
                fc.load_state_dict({"v": into}, path, process_group="self")
            else:
                origin = view(_tensor(array, dtype))
                fc.reshard_sharded_state_dict({"v": origin}, {"v": into}, process_group="self")
            if not (_array(target) == expected).all():
                wrong.append(f"{name}: a {how} into the view did not reach its base, or more than the view")
    return wrong


def _array(tensor):
    return tensor.cpu().astype("float32").numpy() if "complex" not in str(tensor.dtype) else tensor.cpu().numpy().real


def host_views(directory):
    """Strided tensors of host memory, as offloaded states are, while a device is current."""
    host = paddle.CPUPlace()
    array = np.arange(30, dtype="float32").reshape(5, 6)
    base = paddle.to_tensor(array, place=host)
    path = os.path.join(directory, str(dist.get_rank()))
    fc.save_state_dict({"v": base[:, 2:5]}, path, process_group="self")
    target = paddle.to_tensor(np.zeros_like(array), place=host)
    fc.load_state_dict({"v": target[:, 2:5]}, path, process_group="self")
    expected = np.zeros_like(array)
    expected[:, 2:5] = array[:, 2:5]
    other = paddle.to_tensor(np.zeros_like(array), place=host)
    fc.reshard_sharded_state_dict({"v": base[:, 2:5]}, {"v": other[:, 2:5]}, process_group="self")
    return [bool((tensor.numpy() == expected).all()) for tensor in (target, other)]


# -- other streams -----------------------------------------------------------------------------------------------------


def unfinished(directory, what):
    """The share of right values when a tensor is saved or resharded that another stream is still writing.

    The device's streams do only what somebody waits for, so that a write that nobody waits for is not done.
    """
    size, rank = 512, dist.get_rank()
    new = paddle.full([size, size], 7.0)
    tensor, target = paddle.zeros([size, size]), paddle.zeros([size, size])
    half = size // 2
    state = {"t": tensor}
    if what == "reshard":
        part = tensor[half * rank : half * (rank + 1)]
        state = {"t": ShardedWeight("t", part, (half, size), (size, size), (half * rank, 0))}
    paddle.device.synchronize()
    stream = paddle.device.Stream(paddle.device.get_device())
    plugin.configure(lazy=1)
    try:
        with paddle.device.stream_guard(stream):
            paddle.assign(new, tensor)
        if what == "reshard":
            fc.reshard_sharded_state_dict(state, {"t": target})
        else:
            saved = fc.save_state_dict(state, directory, async_save=what == "async save")
    finally:
        plugin.configure(lazy=0)
    paddle.device.synchronize()
    if what == "async save":
        saved.result()
    if what != "reshard":
        fc.load_state_dict({"t": target}, directory)
    return float((target.numpy() == 7.0).mean())


# -- with the host as the current device -------------------------------------------------------------------------------


def with_the_host_current(directory, mib):
    """``paddle.set_device("cpu")`` before a save, a load and a reshard of device tensors."""
    state, target = rows_shard(mib), columns_shard(mib)
    device = paddle.device.get_device()
    paddle.set_device("cpu")
    try:
        fc.reshard_sharded_state_dict(state, target)
        fc.save_state_dict(state, directory)
    finally:
        now = paddle.device.get_device()
        paddle.set_device(device)
    again = columns_shard(mib)
    paddle.set_device("cpu")
    try:
        fc.load_state_dict(again, directory)
    finally:
        paddle.set_device(device)
    return [now, right_columns(target, mib), right_columns(again, mib)]
