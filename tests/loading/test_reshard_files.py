"""``_load_state_dict`` with virtual files described by Metadata objects, ours or Paddle's own."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle_flexckpt.loading import resharder
from paddle_flexckpt.loading.resharder import _load_state_dict, reshard_sharded_state_dict, virtual_file
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld

SHAPE = (6, 4)
FULL = np.arange(24, dtype=np.float32).reshape(SHAPE)
OURS = SimpleNamespace(Metadata=Metadata, LocalTensorIndex=LocalTensorIndex, LocalTensorMetadata=LocalTensorMetadata)


@pytest.fixture(params=["ours", "paddle's"])
def classes(request):
    if request.param == "ours":
        return OURS
    return pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.metadata")


def metadata_of(classes, files: dict[str, list[tuple]], dtype: str = "float32"):
    """Metadata of ``{file: [(key, offset, shape, flattened range)]}``."""
    shards, storage = {}, {}
    for file, entries in files.items():
        for key, offset, shape, flat in entries:
            shards.setdefault(key, []).append(
                classes.LocalTensorMetadata(offset, shape, dtype, SHAPE, flat is not None, flat)
            )
            index = classes.LocalTensorIndex(key, offset, flat is not None, flat, local_shape=shape)
            storage[index] = file
    return classes.Metadata(shards, storage, {})


def run(world: int, files: dict[int, dict[str, dict]], metadata: list, targets=None) -> tuple[list, list]:
    """Every rank wants two columns; ``files`` are those that each rank holds."""
    targets = targets or [np.full((6, 2), -1, dtype=np.float32) for _ in range(world)]

    def job(comm):
        rank = comm.position
        wanted = {"w": ShardedWeight("w", targets[rank], (6, 2), SHAPE, (0, 2 * (rank % 2)))}
        return _load_state_dict(wanted, files.get(rank, {}), metadata, process_group=comm)

    return SimulatedWorld(world).run_all(job), targets


def test_files_on_several_ranks(classes):
    metadata = metadata_of(classes, {
        "vfile_0": [("w", (0, 0), (3, 4), None)],
        "extra": [("w", (3, 0), (3, 4), (0, 5))],
        "vfile_1": [("w", (3, 0), (3, 4), (5, 12))],
    })  # fmt: skip
    files = {
        0: {"vfile_0": {"w": FULL[:3].copy()}, "extra": {"w": FULL[3:].reshape(-1)[:5].copy()}},
        1: {"vfile_1": {"w": FULL[3:].reshape(-1)[5:].copy()}},
    }
    outcomes, targets = run(2, files, [metadata])
    for rank in (0, 1):
        assert outcomes[rank].source == "memory"
        assert (targets[rank] == FULL[:, 2 * rank : 2 * rank + 2]).all()


def test_parts_of_states_under_raw_names_have_the_places_of_the_metadata(classes):
    import paddle

    parameter, state = paddle.to_tensor(FULL), "linear_0.w_0_moment1_0"
    parameter.name = "linear_0.w_0"
    metadata = metadata_of(classes, {
        "a": [("linear.weight", (0, 0), SHAPE, None), (state, (0, 0), (3, 4), None)],
        "b": [(state, (3, 0), (3, 4), None)],
    })  # fmt: skip
    files = [{"a": {"linear.weight": parameter, state: FULL[:3].copy()}}, {"b": {state: FULL[3:].copy()}}]

    def job(comm):
        target = np.zeros(SHAPE, dtype=np.float32)
        wanted = {state: ShardedWeight(state, target, SHAPE, SHAPE, (0, 0))}
        _load_state_dict(wanted, files[comm.position], [metadata], process_group=comm)
        return target.tobytes() == FULL.tobytes()

    assert SimulatedWorld(2).run(job) == [True, True]


def test_metadata_in_several_parts_and_sharded_weights_as_tensors(classes):
    parts = [
        metadata_of(classes, {"a": [("w", (0, 0), (6, 1), None)]}),
        metadata_of(classes, {"b": [("w", (0, 1), (6, 3), None)]}),
    ]
    files = {0: {"b": {"w": ShardedWeight("w", FULL[:, 1:].copy(), (6, 3), SHAPE, (0, 1))}},
             1: {"a": {"w": FULL[:, :1].copy()}}}  # fmt: skip
    outcomes, targets = run(2, files, parts)
    assert all((targets[rank] == FULL[:, 2 * rank : 2 * rank + 2]).all() for rank in (0, 1)), outcomes


def assert_all_refuse(outcomes, targets, *words):
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes), outcomes
    assert len({id(outcome) for outcome in outcomes}) == len(outcomes), "a rank was left waiting"
    (text,) = {str(outcome) for outcome in outcomes}
    for word in words:
        assert word in text
    assert all((target == -1).all() for target in targets)


WHOLE = {"vfile_0": [("w", (0, 0), SHAPE, None)]}


def test_a_file_that_nobody_holds(classes):
    outcomes, targets = run(2, {1: {"other": {"w": FULL}}}, [metadata_of(classes, WHOLE)])
    assert_all_refuse(outcomes, targets, "no rank holds a file", "vfile_0")


@pytest.mark.parametrize(("tensors", "words"), [
    ({}, ["a tensor that is not there", "'w'", "vfile_0", "rank 1"]),
    ({"w": FULL[:3]}, ["not what the metadata says", "expected float32 [0:6, 0:4]", "got float32 [3, 4]"]),
    ({"w": FULL.astype(np.float64)}, ["not what the metadata says", "got float64 [6, 4]"]),
])  # fmt: skip
def test_a_tensor_that_is_not_what_the_metadata_says(classes, tensors, words):
    outcomes, targets = run(2, {1: {"vfile_0": tensors}}, [metadata_of(classes, WHOLE)])
    assert_all_refuse(outcomes, targets, *words)


def test_metadata_with_a_hole(classes):
    holed = {"vfile_0": [("w", (0, 0), (6, 3), None)]}
    outcomes, targets = run(2, {0: {"vfile_0": {"w": FULL[:, :3].copy()}}}, [metadata_of(classes, holed)])
    assert_all_refuse(outcomes, targets, "no rank holds", "[0:6, 3:4]")


def without_global_shapes(classes, key: str):
    shard = classes.LocalTensorMetadata((0, 0), SHAPE, "float32")
    return classes.Metadata({key: [shard]}, {classes.LocalTensorIndex(key, (0, 0)): "vfile_0"}, None)


def test_metadata_without_global_shapes_takes_those_of_the_targets(classes):
    outcomes, targets = run(2, {0: {"vfile_0": {"w": FULL.copy()}}}, [without_global_shapes(classes, "w")])
    for rank in (0, 1):
        assert outcomes[rank].keys == 1
        assert (targets[rank] == FULL[:, 2 * rank : 2 * rank + 2]).all()


def test_metadata_without_global_shapes_of_keys_that_no_target_has(classes):
    outcomes, targets = run(2, {0: {"vfile_0": {"v": FULL.copy()}}}, [without_global_shapes(classes, "v")])
    assert_all_refuse(outcomes, targets, "'v' has no global shape, and no target of that key tells it", "Remedy")


def test_shards_that_do_not_make_up_the_shape_of_the_targets(classes):
    half = classes.LocalTensorMetadata((0, 0), (3, 4), "float32")
    metadata = classes.Metadata({"w": [half]}, {classes.LocalTensorIndex("w", (0, 0)): "vfile_0"}, None)
    outcomes, targets = run(2, {0: {"vfile_0": {"w": FULL[:3].copy()}}}, [metadata])
    assert_all_refuse(outcomes, targets, "no rank holds [3:6, 0:4]")


def test_reshard_is_the_same_thing_with_vfiles_and_one_rank_logs(caplog):
    assert virtual_file(3) == "vfile_3"

    def job(comm):
        rank = comm.position
        source = {"w": ShardedWeight("w", FULL[3 * rank : 3 * rank + 3].copy(), (3, 4), SHAPE, (3 * rank, 0))}
        target = np.zeros((6, 2), dtype=np.float32)
        reshard_sharded_state_dict(
            source, {"w": ShardedWeight("w", target, (6, 2), SHAPE, (0, 2 * rank))}, comm, coordinator_rank=1
        )
        return (target == FULL[:, 2 * rank : 2 * rank + 2]).all()

    with caplog.at_level(logging.INFO, logger="paddle_flexckpt"):
        assert all(SimulatedWorld(2).run(job))
    assert caplog.text.count("resharded 1 tensor on this rank in memory") <= 1


@pytest.mark.parametrize("offload", [False, True])
def test_a_reshard_drives_load_state_dict_with_a_virtual_file_of_each_rank(monkeypatch, offload):
    calls, original = {}, resharder._load_state_dict

    def spy(target_state_dict, source_state_dict, metadata_list, process_group, coordinator_rank, offload, **more):
        calls[process_group.position] = source_state_dict, metadata_list, coordinator_rank, offload
        return original(
            target_state_dict, source_state_dict, metadata_list, process_group, coordinator_rank, offload, **more
        )

    monkeypatch.setattr(resharder, "_load_state_dict", spy)
    events: list = []

    def job(comm):
        rank = comm.position
        source = {"v": ShardedWeight("v", FULL[3 * rank : 3 * rank + 3].copy(), (3, 4), SHAPE, (3 * rank, 0))}
        wanted = {"w": ShardedWeight("w", np.zeros((4, 3), np.float32), (4, 3), (4, 6), (0, 3 * rank))}
        with fc.observe(events.append):
            report = reshard_sharded_state_dict(source, wanted, comm, 1, offload, aoa_config=["v^T -> w"])
        np.testing.assert_array_equal(wanted["w"].local_tensor, FULL.T[:, 3 * rank : 3 * rank + 3])
        assert list(calls[rank][0]) == [virtual_file(rank)]
        assert calls[rank][0][virtual_file(rank)]["v"] is source["v"]
        (catalog,) = calls[rank][1]
        assert sorted(catalog.files) == [virtual_file(0), virtual_file(1)]
        return report, comm.collectives

    outcomes = SimulatedWorld(2).run(job)
    assert {call[2:] for call in calls.values()} == {(1, offload)}
    assert {event.call for event in events} == {"reshard"}
    assert all(report.bytes_received == 0 for report, _ in outcomes)


def test_observers_are_told_of_a_reshard_once():
    events: list = []
    source, target = {"w": FULL.copy()}, {"w": np.zeros(SHAPE, np.float32)}
    with fc.observe(events.append):
        reshard_sharded_state_dict(source, target, "self")
        with pytest.raises(ValidationError):
            reshard_sharded_state_dict(source, {"v": target["w"]}, "self")
        _load_state_dict(target, {"a": source}, [metadata_of(OURS, {"a": [("w", (0, 0), SHAPE, None)]})], "self")
    assert [(event.call, event.ok) for event in events] == [("reshard", True), ("reshard", False), ("reshard", True)]
