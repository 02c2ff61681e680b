"""Jobs of test_bad_input: each case breaks one thing and tells what came of it on this rank.

A case starts from a directory with a good checkpoint (id 0) of ``w`` ``[8, 6]``, cut by rows over two ranks, and ``b``
``[6]``, on both of them; its targets are ``w`` cut by columns and ``b``, filled with other values.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.media import local
from paddle_flexckpt.native import save_directory
from paddle_flexckpt.run_state import load_extra_state
from tests.distributed import jobs_common as common
from tests.saved import data_file

W = np.arange(48, dtype="float32").reshape(8, 6)
B = np.arange(6, dtype="float32") + 100


def rows(array=W, key="w"):
    rank, half = dist.get_rank(), len(array) // 2
    part = array[half * rank : half * rank + half]
    offset = (half * rank, *[0] * (array.ndim - 1))
    return fc.ShardedWeight(key, paddle.to_tensor(part), part.shape, array.shape, offset)


def source():
    return {"w": rows(), "b": paddle.to_tensor(B)}


def target():
    rank = dist.get_rank()
    shard = fc.ShardedWeight("w", paddle.full([8, 3], -1.0), (8, 3), (8, 6), (0, 3 * rank))
    return {"w": shard, "b": paddle.full([6], -2.0)}


def is_right(state):
    rank = dist.get_rank()
    return common.same_bytes(state["w"].local_tensor, W[:, 3 * rank : 3 * rank + 3]) and common.same_bytes(
        state["b"], B
    )


def on_rank(number, do):
    """Lets one rank do something to the files, and the others wait for it."""
    if dist.get_rank() == number:
        do()
    dist.barrier()


def files(directory):
    """Every file with its content, or None if there is no such directory."""
    if not os.path.isdir(directory):
        return None
    found = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = file.read()
    return found


def flip(path, position):
    """Flips one bit; a negative position counts from the end."""
    with open(path, "r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def last_byte(path, key):
    """A data file and the position of the last byte of a key in it."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return path, 8 + length + header[key]["data_offsets"][1] - 1


def write(path, text=b"something else"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(text)


# -- load: what is broken on disk, and what is asked for ---------------------------------------------------------------


def in_path(directory, name):
    return lambda: os.path.join(directory, name)


def remove(directory, name):
    on_rank(0, lambda: os.unlink(os.path.join(directory, name)))


def swap(directory):
    """Rank 0's data file of another, equally long save in the place of this one's."""
    other = f"{directory}_other"
    fc.save_state_dict({"w": rows(W + 1), "b": paddle.to_tensor(B + 1)}, other)
    on_rank(
        0, lambda: shutil.copy(os.path.join(other, data_file(other)), os.path.join(directory, data_file(directory)))
    )


def truncate(directory, name):
    on_rank(0, lambda: cut(os.path.join(directory, name)))


def cut(path):
    os.truncate(path, os.path.getsize(path) - 5)


DAMAGE = {
    "path_is_a_file": lambda d: on_rank(0, lambda: (shutil.rmtree(d), write(d))),
    "not_a_checkpoint": lambda d: on_rank(0, lambda: (shutil.rmtree(d), write(os.path.join(d, "notes.txt")))),
    "manifest_lost": lambda d: remove(d, "0.manifest"),
    "paddles_checkpoint_damaged": lambda d: on_rank(
        0, lambda: (shutil.rmtree(d), write(os.path.join(d, "0.metadata")))
    ),
    "data_file_truncated": lambda d: on_rank(0, lambda: cut(os.path.join(d, data_file(d, 1)))),
    "data_file_missing": lambda d: on_rank(0, lambda: os.unlink(os.path.join(d, data_file(d, 1)))),
    "data_file_swapped": swap,
    "bit_flipped_in_data": lambda d: on_rank(0, lambda: flip(*last_byte(os.path.join(d, data_file(d, 1)), "w"))),
    "bit_flipped_in_manifest": lambda d: on_rank(0, lambda: flip(os.path.join(d, "0.manifest"), -3)),
    "bit_flipped_in_manifest_header": lambda d: on_rank(0, lambda: flip(os.path.join(d, "0.manifest"), 40)),
    "manifest_truncated": lambda d: truncate(d, "0.manifest"),
    "manifest_of_another_id": lambda d: on_rank(
        0, lambda: os.rename(os.path.join(d, "0.manifest"), os.path.join(d, "3.manifest"))
    ),
    "ranks_ask_for_different_ids": lambda d: fc.save_state_dict(source(), d),
    "tied_targets_of_different_values": lambda d: fc.save_state_dict({**source(), "x": paddle.to_tensor(B + 1)}, d),
}


def ask(case):
    """Targets and further arguments of a load or reshard; ``path`` is put after the directory's."""
    rank = dist.get_rank()
    state, extra = target(), {}
    if case == "wrong_path":
        extra["path"] = "_nowhere"
    elif case == "bit_flipped_in_data":
        # Whole blocks are read, and only those have checksums: see test_a_flipped_bit_in_half_a_block.
        state["w"] = rows(W - 1)
    elif case == "no_such_id":
        extra["unique_id"] = 4
    elif case == "key_missing_on_one_rank":
        if rank == 1:
            state["model.v"] = paddle.zeros([2])
    elif case == "extra_key":
        del state["b"]
        extra["strict"] = True
    elif case == "dtype":
        state["b"] = paddle.full([6], 1, dtype="bfloat16" if rank else "float32")
    elif case == "dtype_that_no_cast_can_mend":
        state["b"] = paddle.full([6], 1, dtype="int32")
        extra["dtype"] = "cast"
    elif case == "global_shape":
        state["w"] = fc.ShardedWeight("w", paddle.full([10, 3], -1.0), (10, 3), (10, 6), (0, 3 * rank))
    elif case == "number_of_axes":
        state["b"] = paddle.full([1, 6], -1.0)
    elif case == "not_initialised":
        if rank == 1:
            state["b"]._clear_data()
    elif case == "outside_its_global_shape":
        state["w"].global_offset = (0, 3 * rank + 1)
    elif case == "local_shape_is_not_the_tensors":
        state["w"].local_shape = (8, 2)
    elif case == "int_value":
        state["step"] = 7
    elif case == "str_value":
        state["name"] = {"of": "llama"}
    elif case == "name_is_no_string":
        state[3] = paddle.zeros([1])
    elif case == "marked_is_distributed":
        state["b"].is_distributed = True
    elif case == "partial_dist_tensor":
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        state["b"] = dist.auto_parallel.api.dtensor_from_local(paddle.zeros([6]), mesh, [dist.Partial()])
    elif case == "aoa_config":
        extra["aoa_config"] = {"aoa_statements": ["b -> b", "w, nowhere -> w, axis=0"]}
    elif case == "aoa_config_that_removes_what_feeds_a_target":
        extra["aoa_config"] = {"aoa_statements": ["b -> _"]}
    elif case == "aoa_config_that_gives_another_shape":
        extra["aoa_config"] = {"aoa_statements": ["w^T -> w"]}
    elif case == "ranks_disagree_about_aoa_config":
        extra["aoa_config"] = {"aoa_statements": ["w -> w"] if rank else ["b -> b"]}
    elif case == "aoa_config_on_one_rank":
        extra["aoa_config"] = {"aoa_statements": ["w -> w"]} if rank else None
    elif case == "coordinator_out_of_range":
        extra["coordinator_rank"] = 2
    elif case == "ranks_disagree_about_strict":
        extra["strict"] = bool(rank)
    elif case == "unknown_policy":
        extra["dtype"] = "ignore"
    elif case == "not_a_dict":
        state = [paddle.zeros([2])]
    elif case == "ranks_ask_for_different_ids":
        extra["unique_id"] = rank
    elif case == "tied_targets_of_different_values":
        state["x"] = state["b"]
    return state, extra


LOADS = (
    "wrong_path",
    "path_is_a_file",
    "not_a_checkpoint",
    "manifest_lost",
    "paddles_checkpoint_damaged",
    "no_such_id",
    "data_file_truncated",
    "data_file_missing",
    "data_file_swapped",
    "bit_flipped_in_data",
    "bit_flipped_in_manifest",
    "bit_flipped_in_manifest_header",
    "manifest_truncated",
    "manifest_of_another_id",
    "ranks_ask_for_different_ids",
)
#: Wrong targets: of a load and of a reshard alike.
TARGETS = (
    "key_missing_on_one_rank",
    "extra_key",
    "dtype",
    "dtype_that_no_cast_can_mend",
    "global_shape",
    "number_of_axes",
    "not_initialised",
    "outside_its_global_shape",
    "local_shape_is_not_the_tensors",
    "int_value",
    "str_value",
    "name_is_no_string",
    "marked_is_distributed",
    "partial_dist_tensor",
    "aoa_config",
    "aoa_config_that_removes_what_feeds_a_target",
    "aoa_config_that_gives_another_shape",
    "ranks_disagree_about_aoa_config",
    "aoa_config_on_one_rank",
    "coordinator_out_of_range",
    "ranks_disagree_about_strict",
    "unknown_policy",
    "not_a_dict",
    "tied_targets_of_different_values",
)


def targets_of(state):
    """Bytes of what can be filled."""
    if not isinstance(state, dict):
        return {}
    tensors = {key: getattr(value, "local_tensor", value) for key, value in state.items()}
    return {
        key: common.raw(tensor)
        for key, tensor in tensors.items()
        if isinstance(tensor, paddle.Tensor) and tensor._is_initialized() and not tensor.is_dist()
    }


def loads(directory):
    results = {}
    for case in (*LOADS, *TARGETS):
        path = os.path.join(directory, case)
        fc.save_state_dict(source(), path)
        if case in DAMAGE:
            DAMAGE[case](path)
        state, extra = ask(case)
        path += extra.pop("path", "")
        before, disk = targets_of(state), files(path)
        error = common.outcome(lambda: fc.load_state_dict(state, path, **extra))  # noqa: B023
        results[case] = {
            "error": error,
            "unchanged": before == targets_of(state),
            "disk": disk == files(path),
            "path": path,
        }
        dist.barrier()
    return results


def reshards():
    results = {}
    for case in TARGETS:
        state, extra = ask(case)
        mine = source()
        if case == "tied_targets_of_different_values":
            mine["x"] = paddle.to_tensor(B + 1)
        before = targets_of(state)
        error = common.outcome(lambda: fc.reshard_sharded_state_dict(mine, state, **extra))  # noqa: B023
        results[case] = {"error": error, "unchanged": before == targets_of(state)}
    for case in (*SOURCES, TARGET_IN_SOURCE):
        mine, extra = source_of(case)
        state = target()
        if case == TARGET_IN_SOURCE:
            # Rows 0..4 of the source's memory as columns 0..3 of the target.
            state["w"].local_tensor = mine["w"].local_tensor.reshape([8, 3])
        before = targets_of(state)
        error = common.outcome(lambda: fc.reshard_sharded_state_dict(mine, state, **extra))  # noqa: B023
        results[f"source: {case}"] = {"error": error, "unchanged": before == targets_of(state)}
    good = target()
    fc.reshard_sharded_state_dict(source(), good)
    results["afterwards"] = is_right(good)
    return results


TARGET_IN_SOURCE = "target shares its memory"

# -- save --------------------------------------------------------------------------------------------------------------

#: Wrong sources: of a save and of a reshard alike.
SOURCES = (
    "rank_omits_its_shard",
    "outside_its_global_shape",
    "overlapping_shards_disagree",
    "ranks_differ_in_dtype",
    "ranks_differ_in_global_shape",
    "not_initialised",
    "int_value",
    "name_is_no_string",
    "same_name_twice",
    "coordinator_out_of_range",
    "partial_dist_tensor",
)
SAVES = (
    *SOURCES,
    "async_save_is_no_writer",
    "ranks_save_under_different_ids",
    "id_is_negative",
    "disk_full_on_one_rank",
    "commit_fails",
)


def source_of(case):
    rank = dist.get_rank()
    state, extra = source(), {}
    if case == "rank_omits_its_shard":
        if rank == 1:
            del state["w"]
    elif case == "outside_its_global_shape":
        state["w"].global_offset = (5 * rank, 0)
    elif case == "overlapping_shards_disagree":
        first = 0 if rank == 0 else 3
        part = W[first : first + 5] + 0.5 * rank
        state["w"] = fc.ShardedWeight("w", paddle.to_tensor(part), (5, 6), (8, 6), (first, 0))
    elif case == "ranks_differ_in_dtype":
        state["b"] = paddle.to_tensor(B).astype("bfloat16" if rank else "float32")
    elif case == "ranks_differ_in_global_shape":
        state["b"] = paddle.zeros([6 + rank])
    elif case == "not_initialised":
        if rank == 1:
            state["b"]._clear_data()
    elif case == "int_value":
        state["step"] = 7
    elif case == "name_is_no_string":
        state["model"] = {3: paddle.zeros([1])}
    elif case == "same_name_twice":
        state.update({"a": {"b": paddle.zeros([1])}, "a.b": paddle.zeros([1])})
    elif case == "coordinator_out_of_range":
        extra["coordinator_rank"] = -1
    elif case == "partial_dist_tensor":
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        state["b"] = dist.auto_parallel.api.dtensor_from_local(paddle.zeros([6]), mesh, [dist.Partial()])
    elif case == "async_save_is_no_writer":
        extra["async_save"] = "yes"
    elif case == "ranks_save_under_different_ids":
        extra["unique_id"] = 4 + rank
    elif case == "id_is_negative":
        extra["unique_id"] = -1
    return state, extra


@contextlib.contextmanager
def broken_disk(case):
    """Makes a step of writing fail: on rank 1, or in the commit."""
    if case == "disk_full_on_one_rank" and dist.get_rank() == 1:
        owner, name, error = local, "write_all", OSError(28, "No space left on device")
    elif case == "commit_fails" and dist.get_rank() == 0:
        owner, name, error = save_directory, "publish", OSError(5, "Input/output error")
    else:
        yield
        return
    native = getattr(owner, name)
    written = []

    def fail(*args):
        # The first block goes through, so that a part of the file is there when the disk is full.
        written.append(1)
        if name == "write_all" and len(written) == 1:
            return native(*args)
        raise error

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, native)


def saves(directory, unique_id):
    """Every bad save over a good checkpoint: with None under a new id, with 0 in its place."""
    results = {}
    for case in SAVES:
        path = os.path.join(directory, f"{case}_{unique_id}")
        fc.save_state_dict(source(), path)
        state, extra = source_of(case)
        if unique_id is not None:
            extra.setdefault("unique_id", unique_id)
        dist.barrier()
        disk = files(path)
        dist.barrier()  # a rank that is ahead begins its save, and leaves a marker while it is under way
        with broken_disk(case):
            error = common.outcome(lambda: fc.save_state_dict(state, path, **extra))  # noqa: B023
        dist.barrier()
        result = {"error": error, "disk": disk == files(path), "files": sorted(files(path))}
        dist.barrier()
        old = target()
        fc.load_state_dict(old, path)
        result["old"] = is_right(old)
        report = fc.save_state_dict({"w": rows(W + 1), "b": paddle.to_tensor(B)}, path, unique_id=unique_id)
        new = target()
        loaded = fc.load_state_dict(new, path)
        rank = dist.get_rank()
        result["new"] = [report.unique_id, loaded.unique_id]
        result["new is right"] = common.same_bytes(new["w"].local_tensor, (W + 1)[:, 3 * rank : 3 * rank + 3])
        results[case] = result
    return results


def fine(directory):
    """What looks odd and is right: overlapping shards that agree, and a rank that holds nothing."""
    rank = dist.get_rank()
    first = 0 if rank == 0 else 3
    shard = fc.ShardedWeight("w", paddle.to_tensor(W[first : first + 5]), (5, 6), (8, 6), (first, 0))
    state = {"w": shard, "b": paddle.to_tensor(B)} if rank else {"w": shard}
    report = fc.save_state_dict(state, directory)
    loaded, moved = target(), target()
    fc.load_state_dict(loaded, directory)
    fc.reshard_sharded_state_dict(state, moved)
    nothing = fc.load_state_dict({} if rank else target(), directory)
    return [is_right(loaded), is_right(moved), report.total_bytes, nothing.bytes_read]


def half_a_block(directory):
    """The error for a flipped bit in a block of which each rank needs a part."""
    fc.save_state_dict(source(), directory)
    on_rank(0, lambda: flip(*last_byte(os.path.join(directory, data_file(directory, 1)), "w")))
    return common.outcome(lambda: fc.load_state_dict(target(), directory))


def before_the_first_exchange(directory):
    """One rank's path or process group is none: what each call says on this rank, and that the next one works."""
    last = dist.get_world_size() - 1
    is_odd = dist.get_rank() == last
    whole = {"b": paddle.to_tensor(B)}
    results = {}
    for what, group, path in (("group", "all", directory), ("group of ranks", [0, 1], directory), ("path", None, None)):
        own = {"process_group": group if is_odd else None}
        place = path if is_odd else directory
        calls = {
            "save": lambda: fc.save_state_dict(whole, place, **own),  # noqa: B023
            "asynchronous save": lambda: fc.save_state_dict(whole, place, async_save=True, **own),  # noqa: B023
            "load": lambda: fc.load_state_dict(whole, place, **own),  # noqa: B023
            "extra state": lambda: load_extra_state(place, **own),  # noqa: B023
            "manager": lambda: fc.CheckpointManager(place, preemption_signals=(), **own),  # noqa: B023
        }
        if what != "path":
            calls["reshard"] = lambda: fc.reshard_sharded_state_dict(whole, dict(whole), **own)  # noqa: B023
        results[what] = {call: common.outcome(do) for call, do in calls.items()}
    fc.save_state_dict(whole, directory)
    return results
