"""What the patches for Paddle mend, one function each: it fails in the released Paddle and passes in the patched one.

Run as a script with the names of patches it prints, for each, what is wrong (or null) as JSON. Those in ``TWO_RANKS``
are run under ``paddle.distributed.launch`` with two processes, and each writes to a file. The Paddle that is found on
the path is the one that is tried: nothing of this repository is imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
import warnings

import numpy as np
import paddle
import paddle.distributed as dist


def numbers(*shape):
    return paddle.arange(int(np.prod(shape)), dtype="float32").reshape(shape)


def refused(function, *words):
    """Whether a call is refused by an error that says why."""
    try:
        function()
    except Exception as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{type(error).__name__}: {error} (does not say {missing})"
        return
    raise AssertionError("no error")


def flattened_shards(path):
    """Two ranks hold a flattened (2, 3, 4) tensor, cut inside of a row; also where the boxes of both begin alike.

    The latter needs an index that tells boxes apart that begin at one place: Paddle has it since 3.3.
    """
    from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

    whole = numbers(2, 3, 4)
    tells_apart = "local_shape" in [field.name for field in dataclasses.fields(LocalTensorIndex)]
    for cut in (14, 7) if tells_apart else (14,):
        directory = f"{path}/{cut}"
        os.mkdir(directory)
        metadata = Metadata({"w": []}, {}, {"w": ("w",)})
        for rank, (start, stop) in enumerate([(0, cut), (cut, 24)]):
            paddle.save({"w": whole.flatten()[start:stop].clone()}, f"{directory}/{rank}_0.distcp")
            shard = {"global_offset": (0, 0, 0), "local_shape": (2, 3, 4), "is_flattened": True}
            metadata.state_dict_metadata["w"].append(
                LocalTensorMetadata(dtype="float32", global_shape=(2, 3, 4), flattened_range=(start, stop), **shard)
            )
            if not tells_apart:
                del shard["local_shape"]
            index = LocalTensorIndex("w", flattened_range=(start, stop), **shard)
            metadata.storage_metadata[index] = f"{rank}_0.distcp"
        paddle.save(metadata, f"{directory}/0.metadata")
        target = paddle.full([2, 3, 4], -1.0)
        dist.load_state_dict({"w": target}, directory)
        np.testing.assert_array_equal(target.numpy(), whole.numpy(), err_msg=f"cut at {cut}")


def dtypes_and_shapes(path):
    dist.save_state_dict({"w": numbers(4, 8)}, path)
    target = paddle.full([4, 8], -1, "bfloat16")
    refused(lambda: dist.load_state_dict({"w": target}, path), "w: dtype bfloat16 expected", "has float32")
    assert target.dtype == paddle.bfloat16, f"the target became {target.dtype}"
    assert float(target.cast("float32").max()) == -1.0
    for shape in ([2, 8], [8, 8]):
        larger = paddle.full(shape, -1.0)
        refused(lambda: dist.load_state_dict({"w": larger}, path), f"global shape {tuple(shape)} expected", "(4, 8)")  # noqa: B023
        assert float(larger.max()) == -1.0
    refused(lambda: dist.load_state_dict({"v": numbers(2)}, path), "v: not in the checkpoint")
    right = paddle.zeros([4, 8])
    dist.load_state_dict({"w": right}, path)
    np.testing.assert_array_equal(right.numpy(), numbers(4, 8).numpy())


def saving_again(path):
    dist.save_state_dict({"w": numbers(4, 8)}, path)
    dist.save_state_dict({"w": numbers(8, 8), "v": numbers(3)}, path)
    targets = {"w": paddle.full([8, 8], -1.0), "v": paddle.full([3], -1.0)}
    dist.load_state_dict(targets, path)
    np.testing.assert_array_equal(targets["w"].numpy(), numbers(8, 8).numpy())
    np.testing.assert_array_equal(targets["v"].numpy(), numbers(3).numpy())
    # A save that died has left its lock.
    other = os.path.join(path, "other")
    os.mkdir(other)
    with open(f"{other}/0.metadata.lock", "w"):
        pass
    dist.save_state_dict({"w": numbers(4)}, other)
    assert os.path.exists(f"{other}/0.metadata"), "saved without metadata"


def checkpoint_ids(path):
    for unique_id in (0, 1, 11):
        dist.save_state_dict({"w": numbers(4) + 100.0 * unique_id}, path, unique_id=unique_id)
    for unique_id, first in ((1, 100.0), (0, 0.0), (11, 1100.0), (None, 1100.0)):
        target = paddle.full([4], -1.0)
        dist.load_state_dict({"w": target}, path, unique_id=unique_id)
        assert float(target[0]) == first, f"id {unique_id}: expected {first}; got {float(target[0])}"
    dist.save_state_dict({"w": numbers(4) + 5.0}, path, unique_id=12)
    assert float(dist.load_merged_state_dict(path)["w"][0]) == 5.0
    assert float(dist.load_merged_state_dict(path, unique_id=1)["w"][0]) == 100.0


def nested_state(path):
    dist.save_state_dict({"model": {"w": numbers(4)}, "optimizer": {"m": numbers(2, 3)}}, path)
    for shape in ([2, 3], [2, 3]):
        target = {"model": {"w": paddle.zeros([4])}, "optimizer": {"m": paddle.zeros(shape)}}
        before = target["model"]["w"]
        dist.load_state_dict(target, path)
        assert target["model"]["w"] is before
        np.testing.assert_array_equal(target["model"]["w"].numpy(), numbers(4).numpy())
        np.testing.assert_array_equal(target["optimizer"]["m"].numpy(), numbers(2, 3).numpy())
    # What another rank saved takes the other path.
    other = f"{path}/other"
    os.mkdir(other)
    os.rename(f"{path}/0_0.distcp", f"{other}/7_0.distcp")
    metadata = paddle.load(f"{path}/0.metadata")
    metadata.storage_metadata = {index: "7_0.distcp" for index in metadata.storage_metadata}
    paddle.save(metadata, f"{other}/0.metadata")
    target = {"model": {"w": paddle.zeros([4])}, "optimizer": {"m": paddle.zeros([2, 3])}}
    dist.load_state_dict(target, other)
    np.testing.assert_array_equal(target["model"]["w"].numpy(), numbers(4).numpy())


def aoa_fan_out(path):
    whole = numbers(4, 6)
    dist.save_state_dict({"e": whole}, path)

    def load(statements, **shapes):
        targets = {key: paddle.full(shape, -1.0) for key, shape in shapes.items()}
        shards = {
            key: dist.ShardedWeight(key, t, tuple(t.shape), tuple(t.shape), (0,) * t.ndim) for key, t in targets.items()
        }
        dist.load_state_dict(shards, path, aoa_config={"aoa_statements": statements})
        return {key: target.numpy() for key, target in targets.items()}

    e = whole.numpy()
    cases = [
        (["e -> a", "e^T -> b"], {"a": e, "b": e.T}),
        (["e^T -> a", "e -> b"], {"a": e.T, "b": e}),
        (["e -> a", "e -> b", "e -> c"], {"a": e, "b": e, "c": e}),
        (["e -> a1, a2, axis=0", "e -> b1, b2, b3, axis=1"],
         {"a1": e[:2], "a2": e[2:], "b1": e[:, :2], "b2": e[:, 2:4], "b3": e[:, 4:]}),
    ]  # fmt: skip
    for statements, wanted in cases:
        got = load(statements, **{key: list(value.shape) for key, value in wanted.items()})
        for key, value in wanted.items():
            np.testing.assert_array_equal(got[key], value, err_msg=f"{statements}: {key}")


def optimizer_state(path):
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    layer = paddle.nn.Linear(4, 3)
    dist.shard_layer(layer, mesh)
    inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters(), weight_decay=0.5)
    optimizer = dist.shard_optimizer(inner, dist.ShardingStage1("dp", mesh))
    before = [parameter.numpy().copy() for parameter in layer.parameters()]
    state = optimizer.state_dict()
    for parameter, old in zip(layer.parameters(), before):
        np.testing.assert_array_equal(
            parameter.numpy(), old, err_msg="parameters changed when their state was asked for"
        )
        assert parameter.grad is None
    powers = [value.numpy().item() for key, value in state.items() if "beta1_pow" in key]
    assert len(powers) == 2 and np.allclose(powers, 0.9), f"beta1 ** 1 expected; got {powers}"
    assert sum("moment" in key for key in state) == 4
    assert all(value.is_dist() for key, value in state.items() if "moment" in key)


def unscale_uninitialised(path):
    """Gradients that are defined and have no memory: all of them, then all but those of one layer."""
    from paddle.amp import grad_scaler

    class Place:
        def __getattr__(self, name):
            return lambda: name == "is_gpu_place"

    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    first, second = paddle.nn.Linear(3, 2), paddle.nn.Linear(3, 2)
    for layer in (first, second):
        dist.shard_layer(layer, mesh)
    x = dist.shard_tensor(paddle.ones([1, 3]), mesh, [dist.Replicate()])
    for groups in (False, True):
        parameters = [first.parameters(), second.parameters()]
        parameters = [{"params": each} for each in parameters] if groups else [*parameters[0], *parameters[1]]
        optimizer = paddle.optimizer.AdamW(0.1, parameters=parameters)
        # A scaler switches itself off on a CPU.
        native, grad_scaler._dygraph_tracer = (
            grad_scaler._dygraph_tracer,
            lambda: type("Tracer", (), {"_expected_place": Place()}),
        )
        try:
            scaler = dist.shard_scaler(paddle.amp.GradScaler(init_loss_scaling=4.0))
        finally:
            grad_scaler._dygraph_tracer = native
        for used in ((), (first,)):
            (first(x).sum() + second(x).sum()).backward()
            optimizer.clear_grad(set_to_zero=False)
            for layer in used:
                scaler.scale(layer(x).sum()).backward()
            scaler._optimizer_states.clear()
            scaler._unscale(optimizer)
            for layer in (first, second):
                for parameter in layer.parameters():
                    gradient = parameter._grad_ivar()
                    assert gradient._is_initialized() == (layer in used), f"{parameter.name}: memory out of nowhere"
            for layer in used:
                np.testing.assert_array_equal(layer.weight.grad._local_value().numpy(), np.ones([3, 2], "float32"))
            assert not bool(scaler._found_inf)


def numpy_2_4(path):
    with warnings.catch_warnings():
        # Before 2.4 it is a warning.
        warnings.simplefilter("error")
        mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
        assert mesh.get_rank_by_dim_and_process_id("x", 3) == 1
        assert mesh.get_rank_by_dim_and_process_id("y", 2) == 0


def async_save_on_cpu(path):
    from paddle.distributed.flex_checkpoint.dcp.save_state_dict import clear_async_save_task_queue

    tensor = numbers(4)
    dist.save_state_dict({"w": tensor}, path, async_save=True)
    tensor.zero_()
    clear_async_save_task_queue()
    target = paddle.full([4], -1.0)
    dist.load_state_dict({"w": target}, path)
    np.testing.assert_array_equal(target.numpy(), numbers(4).numpy())


def cpu_communication(path):
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, whole = dist.get_rank(), numbers(4, 6)
    rows = whole[2 * rank : 2 * rank + 2].clone()
    dist.save_state_dict({"w": ShardedWeight("w", rows, (2, 6), (4, 6), (2 * rank, 0))}, path)
    for method in ("broadcast", "send_recv", "grouped_send_recv"):
        columns = paddle.full([4, 3], -1.0)
        target = ShardedWeight("w", columns, (4, 3), (4, 6), (0, 3 * rank))
        dist.load_state_dict({"w": target}, path, comm_method=method)
        np.testing.assert_array_equal(columns.numpy(), whole[:, 3 * rank : 3 * rank + 3].numpy(), err_msg=method)


def dist_tensor_offsets(path):
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    layer = paddle.nn.Linear(4, 3)
    whole = numbers(4, 3)
    layer.weight.set_value(whole)
    layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])
    layer.bias = dist.shard_tensor(layer.bias, mesh, [dist.Replicate()])
    rank, shard = dist.get_rank(), layer.sharded_state_dict()["weight"]
    assert tuple(shard.global_offset) == (2 * rank, 0), f"rank {rank}: {shard.global_offset}"
    assert (tuple(shard.local_shape), tuple(shard.global_shape)) == ((2, 3), (4, 3))
    np.testing.assert_array_equal(shard.local_tensor.numpy(), whole[2 * rank : 2 * rank + 2].numpy())
    # Sharding stage 1: a parameter that is whole on every rank, and moments that are not.
    other = paddle.nn.Linear(4, 2)
    dist.shard_layer(other, mesh)
    inner = paddle.optimizer.AdamW(0.1, parameters=other.parameters())
    optimizer = dist.shard_optimizer(inner, dist.ShardingStage1("x", mesh))
    optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), other.parameters())
    moment = inner.sharded_state_dict(other.sharded_state_dict())["weight.moment1_0"]
    assert tuple(moment.global_offset) == (2 * rank, 0), f"rank {rank}: {moment.global_offset}"
    assert (tuple(moment.local_shape), tuple(moment.global_shape)) == ((2, 2), (4, 2))


SCENARIOS = {
    "flattened-shards": flattened_shards,
    "dtypes-and-shapes": dtypes_and_shapes,
    "saving-again": saving_again,
    "checkpoint-ids": checkpoint_ids,
    "nested-state": nested_state,
    "aoa-fan-out": aoa_fan_out,
    "optimizer-state": optimizer_state,
    "unscale-uninitialised": unscale_uninitialised,
    "numpy-2.4": numpy_2_4,
    "async-save-on-cpu": async_save_on_cpu,
}
TWO_RANKS = {"cpu-communication": cpu_communication, "dist-tensor-offsets": dist_tensor_offsets}


def outcome(function, path):
    """What is wrong; None if nothing is."""
    try:
        function(path)
        return None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error).strip()[:600]} ({last.filename}:{last.lineno})"


def main(names):
    paddle.device.set_device("cpu")
    results = {}
    if names[0] == "--shared":
        shared, names = names[1], names[2:]
        dist.init_parallel_env()
        for name in names:
            directory = os.path.join(shared, name)
            os.makedirs(directory, exist_ok=True)
            results[name] = outcome(TWO_RANKS[name], directory)
            with open(f"{shared}/{name}.{dist.get_rank()}.json", "w") as file:
                json.dump(results[name], file)
        return
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            results[name] = outcome(SCENARIOS[name], directory)
    print(json.dumps({"paddle": paddle.__file__, "results": results}))


if __name__ == "__main__":
    main(sys.argv[1:])
