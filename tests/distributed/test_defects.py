"""One test per defect of Paddle's own FlexCheckpoint that its users met; the numbers are those of the study of it.

A: silently wrong data. B: wrong refusals. What concerns AOA (A3, A4, A7-A10, A20, A21, B7-B15, B20-B22), asynchronous
saving (A17) and extra state (A19) has no counterpart in this version.

The jobs: what Paddle's own FlexCheckpoint gets wrong between ranks, views and nested states.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from tests.distributed import jobs_bad_input
from tests.distributed import jobs_common as common
from tests.saved import data_file

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def nested(directory):
    """A nested dict, saved from shards and plain tensors, loaded nested and flat."""
    rank, _ = common.here()
    source = {
        "model": {"layer": common.pair([1, 2, 3, 4])},
        "optimizer": {"step": paddle.full([1], 7.0)},
        "nothing": {},
    }
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
    rank, _ = common.here()
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


def flattened(directory, shape, ranks):
    """A tensor flattened over some ranks, loaded whole and flattened over all; resharded likewise (A5)."""
    group = dist.new_group(list(range(ranks)))
    rank, size = dist.get_rank(), dist.get_world_size()
    array = np.arange(int(np.prod(shape)), dtype="float32").reshape(shape)

    def cut(number, filled):
        start, stop = array.size * rank // number, array.size * (rank + 1) // number
        part = array.reshape(-1)[start:stop]
        tensor = paddle.to_tensor(part) if filled else paddle.full([stop - start], -1.0)
        return {"w": fc.ShardedWeight("w", tensor, shape, shape, [0] * len(shape), True, slice(start, stop))}, part

    if rank < ranks:
        fc.save_state_dict(cut(ranks, True)[0], directory, group)
    dist.barrier()
    target, part = cut(size, False)
    fc.load_state_dict(target, directory)
    right = common.same_bytes(target["w"].local_tensor, part)
    if rank < ranks:
        whole = {"w": paddle.full(list(shape), -1.0)}
        fc.reshard_sharded_state_dict(cut(ranks, True)[0], whole, group)
        right = right and common.same_bytes(whole["w"], array)
    return right


def dist_parameter():
    """sharded_state_dict() of a semi-automatic layer (A6): shape and offset of this rank's shard."""
    fc.install()
    layer = paddle.nn.Linear(4, 2)
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])
    weight = layer.sharded_state_dict()["weight"]
    return [list(weight.local_shape), list(weight.global_offset)]


def without_cuda(directory):
    """Save, load and reshard where every call of ``Tensor.cuda`` is an error (B19)."""
    rank = dist.get_rank()
    array = np.arange(24, dtype="float32").reshape(4, 6)

    def refuse(*args, **kwargs):
        raise AssertionError("Tensor.cuda() was called")

    native = paddle.Tensor.cuda
    paddle.Tensor.cuda = refuse
    try:
        source = {"w": fc.ShardedWeight("w", paddle.to_tensor(array[2 * rank :][:2]), (2, 6), (4, 6), (2 * rank, 0))}
        targets = [{"w": fc.ShardedWeight("w", paddle.zeros([4, 3]), (4, 3), (4, 6), (0, 3 * rank))} for _ in range(2)]
        fc.save_state_dict(source, directory)
        fc.load_state_dict(targets[0], directory)
        fc.reshard_sharded_state_dict(source, targets[1])
    finally:
        paddle.Tensor.cuda = native
    return [common.same_bytes(target["w"].local_tensor, array[:, 3 * rank :][:, :3]) for target in targets]


def replicas_that_disagree(directory):
    """The same key on every rank, all of it, with other values: experts under one name, replicas out of step (U8)."""
    state = {"w": paddle.full([3 << 8, 1 << 10], float(dist.get_rank()))}
    target = {"w": paddle.full([3 << 8, 1 << 10], -1.0)}
    errors = [common.outcome(lambda: fc.save_state_dict(state, directory))]
    errors.append(common.outcome(lambda: fc.reshard_sharded_state_dict(state, target)))
    return errors


# -- what is asserted -------------------------------------------------------------------------------------------------


def filled(shape, value=0.0, dtype="float32"):
    return {"w": paddle.full(shape, value, dtype=dtype)}


def values(state):
    return state["w"].astype("float32").numpy().tolist()


# -- A: silently wrong data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "target"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64"), ("int64", "int32"), ("int32", "int64")],
)
@pytest.mark.parametrize("way", ["load", "reshard"])
def test_A01_dtype_mismatch_is_an_error(tmp_path, way, saved, target):
    source, state = filled([4], 5, saved), filled([4], 3, target)
    with pytest.raises(fc.ValidationError, match=f"dtypes differ .*expected {target} .*got {saved} .*Remedy"):
        if way == "load":
            fc.save_state_dict(source, tmp_path)
            fc.load_state_dict(state, tmp_path)
        else:
            fc.reshard_sharded_state_dict(source, state)
    assert str(state["w"].dtype) == f"paddle.{target}"
    assert values(state) == [3] * 4


@pytest.mark.parametrize(("saved", "target"), [([2, 8], [4, 8]), ([4, 8], [8, 4]), ([4, 8], [2, 8]), ([4, 8], [32])])
def test_A02_global_shape_mismatch_is_an_error(tmp_path, saved, target):
    fc.save_state_dict(filled(saved), tmp_path)
    state = filled(target, 3)
    with pytest.raises(fc.ValidationError, match=r"global shapes differ .*key 'w'.*expected .*got .*Remedy"):
        fc.load_state_dict(state, tmp_path)
    assert (state["w"].numpy() == 3).all()


@pytest.mark.parametrize("shape", [[2, 10, 12], [2, 3, 4], [3, 2, 2, 5]], ids=str)
def test_A05_flattened_shards_of_three_and_more_axes(world4, tmp_path, shape):
    assert world4.run(flattened, directory=str(tmp_path), shape=shape, ranks=3) == [True] * 4


def test_A06_a_dist_tensor_is_no_replica_but_stands_where_its_placements_put_it(world2):
    assert world2.run(dist_parameter) == [[[2, 2], [0, 0]], [[2, 2], [2, 0]]]


def test_A11_a_failed_load_leaves_nothing_to_the_next(tmp_path):
    fc.save_state_dict({"w": paddle.full([4], 1.0), "v": paddle.full([4], 1.0)}, tmp_path / "one")
    fc.save_state_dict(filled([8], 2.0), tmp_path / "two")
    with pytest.raises(fc.ValidationError, match="global shapes differ"):
        fc.load_state_dict(filled([8]), tmp_path / "one")
    state = filled([8])
    report = fc.load_state_dict(state, tmp_path / "two", strict=True)
    assert values(state) == [2] * 8
    assert report.unexpected == []


def test_A12_another_id_and_a_directory_made_anew_are_seen(tmp_path):
    path = tmp_path / "checkpoint"
    for value in (1.0, 2.0):
        fc.save_state_dict(filled([4], value), path)
    for unique_id, value in ((1, 2), (0, 1), (None, 2)):
        state = filled([4])
        fc.load_state_dict(state, path, unique_id=unique_id)
        assert values(state) == [value] * 4
    shutil.rmtree(path)
    fc.save_state_dict(filled([4], 3.0), path)
    state = filled([4])
    assert fc.load_state_dict(state, path).unique_id == 0
    assert values(state) == [3] * 4


@pytest.mark.parametrize("unique_id", [None, 0])
def test_A13_saving_again_replaces_shapes_and_keys(tmp_path, unique_id):
    fc.save_state_dict(filled([4, 8], 1.0), tmp_path)
    fc.save_state_dict({"w": paddle.full([8, 8], 2.0), "new": paddle.full([2], 2.0)}, tmp_path, unique_id=unique_id)
    state = {"w": paddle.zeros([8, 8]), "new": paddle.zeros([2])}
    fc.load_state_dict(state, tmp_path, strict=True)
    assert (state["w"].numpy() == 2).all()
    assert (state["new"].numpy() == 2).all()


def test_A14_a_save_that_fails_half_way_leaves_the_old_checkpoint_whole(world2, tmp_path):
    results = world2.run(jobs_bad_input.saves, directory=str(tmp_path), unique_id=0)
    for result in results:
        for case in ("disk_full_on_one_rank", "commit_fails"):
            assert result[case]["error"] is not None
            assert result[case]["old"]


def test_A14_a_flipped_bit_is_found(tmp_path):
    fc.save_state_dict(filled([4, 4], 488.0), tmp_path)
    path = tmp_path / data_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-2] ^= 4  # 488 becomes 496
    path.write_bytes(data)
    with pytest.raises(fc.CorruptCheckpointError, match=r"key 'w'.*are damaged.*expected xxh3.*Remedy"):
        fc.load_state_dict(filled([4, 4]), tmp_path)


def test_A15_strided_tensors(world2, tmp_path):
    first, second = world2.run(strided, directory=str(tmp_path))
    assert first["errors"] == second["errors"]
    for report in (first, second):
        assert report["contiguous"] == [False] * 6  # they really are strided
        assert report["right"] == [True] * 8
        assert report["margins"] == [[-1] * 6, [-2] * 6]  # and their neighbours untouched
        for kind, text in report["errors"]:
            assert kind == "CheckpointError"
            assert "FLAGS_use_stride_kernel is closed" in text
        assert report["unchanged"] == [0, 0, 0]
        assert report["ids"] == ["0.manifest", "1.manifest"]


def test_A15_without_stride_kernels_from_the_start(tmp_path):
    """As Paddle's documents advise for other devices: the flag in the environment of the whole process."""
    script = (
        "import sys, numpy as np, paddle, paddle_flexckpt as fc\n"
        "assert paddle.get_flags('FLAGS_use_stride_kernel') == {'FLAGS_use_stride_kernel': False}\n"
        "array = np.arange(48, dtype='float32').reshape(6, 8)\n"
        "source = {'w': paddle.to_tensor(array)}\n"
        "part = lambda: {'w': fc.ShardedWeight('w', paddle.zeros([6, 3]), (6, 3), (6, 8), (0, 2))}\n"
        "loaded, moved = part(), part()\n"
        "fc.save_state_dict(source, sys.argv[1])\n"
        "fc.load_state_dict(loaded, sys.argv[1])\n"
        "fc.reshard_sharded_state_dict(source, moved)\n"
        "for state in (loaded, moved):\n"
        "    assert (state['w'].local_tensor.numpy() == array[:, 2:5]).all()\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "FLAGS_use_stride_kernel": "0", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True, env=env, timeout=300)


@pytest.fixture
def installed():
    fc.install()
    yield
    fc.uninstall()


def stepped(**kwargs):
    layer = paddle.nn.Linear(3, 4)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), **kwargs)
    layer(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    return layer, optimizer


def test_A18_a_fresh_optimizer_is_restored(installed, tmp_path):
    layer, optimizer = stepped()
    fc.save_state_dict(optimizer.sharded_state_dict(layer.sharded_state_dict()), tmp_path)
    fresh = paddle.optimizer.AdamW(parameters=layer.parameters())
    state = fresh.sharded_state_dict(layer.sharded_state_dict())
    assert len(state) == 8
    fc.load_state_dict(state, tmp_path, strict=True)
    for name, tensors in optimizer._accumulators.items():
        for parameter, tensor in tensors.items():
            assert (fresh._accumulators[name][parameter].numpy() == tensor.numpy()).all()
    assert (fresh._accumulators["moment1"][layer.weight.name].numpy() != 0).all()


# -- B: wrong refusals -------------------------------------------------------------------------------------------------


def test_B01_nested_state_dicts(world2, tmp_path):
    first, second = world2.run(nested, directory=str(tmp_path))
    assert first["deep"] == second["deep"] == [[1, 2, 3, 4], [7]]
    assert first["flat"] == {"optimizer.step": [7]}
    assert second["flat"] == {"model.layer.w": [1, 2, 3, 4]}


def test_B02_several_ids_in_one_directory(tmp_path):
    for unique_id in (1, 11, 111):  # each a suffix of the next
        fc.save_state_dict(filled([4], unique_id), tmp_path, unique_id=unique_id)
    for unique_id in (1, 11, 111, None):
        state = filled([4])
        fc.load_state_dict(state, tmp_path, unique_id=unique_id)
        assert values(state) == [unique_id or 111] * 4


def test_B03_what_a_crash_left_behind_hinders_nobody(tmp_path):
    names = ("0.metadata.lock", "0_0.safetensors", "1_0.safetensors", "0_0.part", "0.manifest.abc.tmp")
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(fc.ValidationError, match=r"unfinished save \(id 0\)"):
        fc.load_state_dict(filled([4]), tmp_path)
    for unique_id in (None, 0):
        report = fc.save_state_dict(filled([4], 5.0), tmp_path, unique_id=unique_id)
        state = filled([4])
        fc.load_state_dict(state, tmp_path, unique_id=report.unique_id)
        assert values(state) == [5] * 4


def test_B04_a_damaged_manifest_is_replaced_by_the_next_save(tmp_path):
    fc.save_state_dict(filled([4], 1.0), tmp_path)
    (tmp_path / "0.manifest").write_bytes((tmp_path / "0.manifest").read_bytes()[:100])
    with pytest.raises(fc.CorruptCheckpointError, match=r"0.manifest is damaged"):
        fc.load_state_dict(filled([4]), tmp_path)
    fc.save_state_dict(filled([4], 2.0), tmp_path, unique_id=0)
    state = filled([4])
    fc.load_state_dict(state, tmp_path)
    assert values(state) == [2] * 4


def test_B05_a_missing_key_is_named(tmp_path):
    fc.save_state_dict({"net.layers.0.weight": paddle.zeros([4])}, tmp_path)
    with pytest.raises(fc.ValidationError, match=r"no such key \(key 'layers.0.weight'.*'net.layers.0.weight'.*Remedy"):
        fc.load_state_dict({"layers.0.weight": paddle.zeros([4])}, tmp_path)


def test_B06_another_number_of_axes_is_named(tmp_path):
    fc.save_state_dict(filled([4, 1]), tmp_path)
    with pytest.raises(fc.ValidationError, match=r"global shapes differ .*expected \[4\] .*got \[4, 1\]"):
        fc.load_state_dict(filled([4]), tmp_path)


@pytest.mark.parametrize("kwargs", [{"amsgrad": True}, {"name": "x"}], ids=str)
def test_B17_amsgrad_and_named_optimizers(installed, tmp_path, kwargs):
    layer, optimizer = stepped(**kwargs)
    state = optimizer.sharded_state_dict(layer.sharded_state_dict())
    assert ("weight.moment2_max_0" in state) == ("amsgrad" in kwargs)
    fc.save_state_dict(state, tmp_path)
    fresh = paddle.optimizer.AdamW(parameters=layer.parameters(), **kwargs)
    fc.load_state_dict(fresh.sharded_state_dict(layer.sharded_state_dict()), tmp_path, strict=True)
    for name, tensors in optimizer._accumulators.items():
        for parameter, tensor in tensors.items():
            assert (fresh._accumulators[name][parameter].numpy() == tensor.numpy()).all()


def test_B18_async_saves_report_what_became_of_them(tmp_path):
    path = tmp_path / "d"
    handle = fc.save_state_dict(filled([4], 3.0), path, async_save=True)
    assert handle.result().unique_id == 0
    target = filled([4])
    fc.load_state_dict(target, path)
    assert target["w"].tolist() == [3.0] * 4
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(fc.ValidationError, match="is not a directory"):
        fc.save_state_dict(filled([4]), tmp_path / "file", async_save=True)


def test_B19_resharding_on_a_cpu_calls_no_cuda(world2, tmp_path):
    assert world2.run(without_cuda, directory=str(tmp_path)) == [[True, True]] * 2


# -- U: found while training hybrid-parallel models --------------------------------------------------------------------


@pytest.mark.parametrize("case", ["ranks_differ_in_global_shape", "ranks_differ_in_dtype"])
def test_U08_one_key_for_two_tensors_is_an_error(world2, case):
    for result in world2.run(jobs_bad_input.reshards):
        kind, text = result[f"source: {case}"]["error"]
        assert kind == "ValidationError"
        assert "two different tensors need two different keys" in text


def test_U08_replicas_that_disagree_are_an_error(world2, tmp_path):
    for errors in world2.run(replicas_that_disagree, directory=str(tmp_path)):
        for error in errors:
            assert error is not None
            assert "key 'w'" in error[1]


# -- C: what was absent ------------------------------------------------------------------------------------------------


def test_C04_nothing_that_is_written_needs_pickle(tmp_path):
    """What this library reads is a safetensors container, which holds numbers and text only."""
    from safetensors.numpy import load_file

    fc.save_state_dict({"w": paddle.ones([4]), "v": {"x": paddle.zeros([2], dtype="int64")}}, tmp_path)
    names = sorted({path.name for path in tmp_path.iterdir()} - {PADDLE_METADATA})
    assert names == ["0.manifest", data_file(tmp_path)]
    for name in names:
        load_file(tmp_path / name)
    assert (load_file(tmp_path / data_file(tmp_path))["w"] == np.ones(4, "float32")).all()


def test_C13_holes_and_shards_outside_are_errors(tmp_path):
    half = paddle.zeros([2])
    with pytest.raises(fc.ValidationError, match=r"no rank holds .*key 'w'.*got 2 elements"):
        fc.save_state_dict({"w": fc.ShardedWeight("w", half, (2,), (4,), (0,))}, tmp_path)
    with pytest.raises(fc.ValidationError, match=r"outside its global shape .key 'w', rank 0"):
        fc.save_state_dict({"w": fc.ShardedWeight("w", half, (2,), (4,), (3,))}, tmp_path)
    assert list(tmp_path.iterdir()) == []
