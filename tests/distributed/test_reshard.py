"""Live state from layout to layout, in memory, between real processes.

The jobs: live states into other layouts, exchanges that fail, and code that users wrote for Paddle while
FlexCheckpoint was made, word for word, with the names from here.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt import (
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
    _load_state_dict,
    make_replicated_sharded_tensor,
    make_tp_sharded_tensor_for_checkpoint,
)
from paddle_flexckpt.communication import device_exchange, rounds
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import LAYOUTS

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


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
    rank, size = common.here()
    state, goal = common.zoo_state(source, rank, size), common.zoo_state(target, rank, size, salt="other")
    before = common.snapshot(state)
    comm, done = common.counted(None)
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
    from tests.distributed import test_tensor_parallel as tensor_parallel

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
    here_rank, size = common.here()
    native = getattr(rounds, where)

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
        setattr(rounds, where, no_copy if where == "copy_pieces" else broken)
    begin = time.monotonic()
    try:
        error = common.outcome(attempt)
    finally:
        setattr(rounds, where, native)
    return {"error": error, "seconds": time.monotonic() - begin, "again": attempt()}


def build_sharded_state_dict(state_dict, shard_rules=None, prefix=""):
    shard_rules = shard_rules or {}
    sharded_state_dict = {}
    for key, tensor in state_dict.items():
        full_key = f"{prefix}{key}" if prefix else key
        if key in shard_rules:
            sharded_state_dict[full_key] = make_tp_sharded_tensor_for_checkpoint(
                key=full_key, tensor=tensor, tensor_parallel_axis=shard_rules[key]
            )
        else:
            sharded_state_dict[full_key] = make_replicated_sharded_tensor(key=full_key, tensor=tensor)
    return sharded_state_dict


def reshard_sharded_state_dict(src_sharded_state_dict, dst_sharded_state_dict, process_group, coordinator_rank=0):
    local_src_state_dict_shard_info = {
        key: (
            value.global_offset,
            value.local_shape,
            str(value.local_tensor.dtype).split(".")[-1],
            value.global_shape,
            value.is_flattened,
        )
        for key, value in src_sharded_state_dict.items()
    }
    global_src_state_dict_shard_info = []
    dist.all_gather_object(global_src_state_dict_shard_info, local_src_state_dict_shard_info, group=process_group)
    src_state_dict_shard_info = {}
    for rank_shard_info in global_src_state_dict_shard_info:
        for key, tensor_shard_info in rank_shard_info.items():
            if key not in src_state_dict_shard_info:
                src_state_dict_shard_info[key] = []
            src_state_dict_shard_info[key].append(tensor_shard_info)
    state_dict_metadata = {
        tensor_name: [
            LocalTensorMetadata(global_offset=shard_info[0], local_shape=shard_info[1], dtype=shard_info[2])
            for shard_info in shard_infos
        ]
        for tensor_name, shard_infos in src_state_dict_shard_info.items()
    }
    virtual_file_path = f"vfile_{dist.get_rank()}"
    local_storage_metadata = {
        LocalTensorIndex(tensor_key=value.key, global_offset=value.global_offset): virtual_file_path
        for key, value in src_sharded_state_dict.items()
    }
    global_storage_metadata = []
    dist.all_gather_object(global_storage_metadata, local_storage_metadata, group=process_group)
    storage_metadata = {}
    for rank_storage_metadata in global_storage_metadata:
        storage_metadata.update(rank_storage_metadata)
    metadata = Metadata(state_dict_metadata=state_dict_metadata, storage_metadata=storage_metadata, flat_mapping=None)
    src_state_dict = {key: value.local_tensor for key, value in src_sharded_state_dict.items()}
    _load_state_dict(
        target_state_dict=dst_sharded_state_dict,
        source_state_dict={virtual_file_path: src_state_dict},
        metadata_list=[metadata],
        coordinator_rank=coordinator_rank,
        process_group=process_group,
        offload=False,
    )


def older_code():
    """Rows of a tensor-parallel layer, described by the older names, become columns through the older call."""
    common.init_tensor_parallel(2)
    rank = dist.get_rank()
    whole = np.arange(48, dtype="float32").reshape(8, 6)
    bias = np.arange(6, dtype="float32")
    tensors = {"weight": paddle.to_tensor(whole[4 * rank :][:4]), "bias": paddle.to_tensor(bias)}
    source = build_sharded_state_dict(tensors, {"weight": 0}, "linear.")
    described = [[list(w.global_shape), list(w.global_offset)] for w in source.values()]
    target = {
        "linear.weight": fc.ShardedTensor("linear.weight", paddle.zeros([8, 3]), (8, 3), (8, 6), (0, 3 * rank)),
        "linear.bias": make_replicated_sharded_tensor("linear.bias", paddle.zeros([6])),
    }
    reshard_sharded_state_dict(source, target, None)
    return {
        "described": described,
        "right": common.same_bytes(target["linear.weight"].local_tensor, whole[:, 3 * rank :][:, :3])
        and common.same_bytes(target["linear.bias"].local_tensor, bias),
    }


# -- what is asserted -------------------------------------------------------------------------------------------------


def check(reports, collectives=4):
    assert sum(report["sent"] for report in reports) == sum(report["received"] for report in reports)
    for report in reports:
        assert report["unequal_before"]
        assert report["wrong"] == []
        assert report["source_untouched"]
        assert report["received"] == report["lacked"]
        assert report["needed"] == report["local"] == report["received"] + report["copied"]
        if collectives is not None:
            assert report["collectives"] == report["calls"] == collectives


# Every pair, in simulated worlds of 1 to 64 ranks: tests/property. Here each layout is a source and a target.
@pytest.mark.parametrize(("source", "target"), [*zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0])), ("flat rows", "flat rows")])
def test_exactly_what_a_rank_lacks_is_moved(world2, source, target):
    reports = world2.run(reshard_zoo, source=source, target=target)
    check(reports)
    if source == target:
        assert [report["received"] for report in reports] == [0, 0]


def test_without_devices_offload_changes_nothing(world2):
    """What it does with devices: tests/device/test_bounds.py."""
    plain, offloaded = (world2.run(reshard_zoo, source="rows", target="flat", offload=o) for o in (False, True))
    check(offloaded)
    assert plain == offloaded


@pytest.mark.parametrize(("source", "target"), [("rows", "columns"), ("flat", "reversed"), ("flat rows", "flat")])
def test_four_ranks(world4, source, target):
    reports = world4.run(reshard_zoo, source=source, target=target)
    check(reports)
    assert sum(report["received"] for report in reports) > 0


@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 1), (4, 2), (1, 4), (2, 2)])
def test_a_live_model_and_its_optimizer(world4, source, target):
    """Degree 2 is dp2 x mp2. In (2, 2) nothing moves."""
    reports = world4.run(reshard_model, source_degree=source, target_degree=target)
    for report in reports:
        assert report["keys"] == 45
        assert report["wrong"] == []
        assert report["received"] == report["lacked"]
        assert report["needed"] == report["local"]
    moved = sum(report["received"] for report in reports)
    # From degree 1 every rank has all; from 2 to 4, ranks 1 and 2 need a quarter that is in the other half.
    assert (moved == 0) == ((source, target) in ((1, 4), (2, 2)))


@pytest.mark.parametrize("where", ["pack", "unpack", "copy_pieces"])
def test_a_peer_that_fails_fails_everybody_and_the_next_reshard_works(world4, where):
    reports = world4.run(failing_exchange, where=where, rank=1)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert "[rank 1] MemoryError: no room" in report["error"][1]
        assert report["seconds"] < 10
        assert report["again"] == []


def test_older_names_and_an_older_call_word_for_word(world2):
    """Metadata without global shapes, and shards by the names that came before Paddle's ``..._weight``."""
    for rank, report in enumerate(world2.run(older_code)):
        assert report["described"] == [[[8, 6], [4 * rank, 0]], [[6], [0]]]
        assert report["right"]
