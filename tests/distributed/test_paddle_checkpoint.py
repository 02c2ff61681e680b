"""What stock Paddle saved, this library loads bit for bit, under the same and other layouts and numbers of ranks.

The jobs: stock Paddle saves, this library loads under other layouts.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("paddle.distributed.flex_checkpoint")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from tests.attacks.opcodes import call, named, program

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool", "complex64", "float8_e4m3fn")


def whole(dtype, shape):
    size = int(np.prod(shape, dtype=int))
    numbers = paddle.to_tensor((np.arange(size) * 37 % 101 - 50).astype("float32").reshape(shape))
    return numbers.astype(dtype)


def raw(tensor):
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def rows(count, rank, world):
    """Uneven: the last rank has what is left over."""
    step = count // world
    return rank * step, count if rank == world - 1 else (rank + 1) * step


def shards(fill, cut, rank, world):
    """Every dtype cut along an axis, a tensor that is flattened, one that all ranks have, and one that rank 0 has."""
    state, shape = {}, (7, 6)
    for dtype in DTYPES:
        begin, end = rows(shape[cut], rank, world)
        index = (slice(begin, end), slice(None)) if cut == 0 else (slice(None), slice(begin, end))
        local = fill(dtype, shape, lambda tensor, index=index: tensor.cast("float32")[index].cast(tensor.dtype))
        offset = (begin, 0) if cut == 0 else (0, begin)
        state[f"cut.{dtype}"] = fc.ShardedWeight(f"cut.{dtype}", local, tuple(local.shape), shape, offset)
    flat = (4, 5)
    begin, end = rows(20, rank, world)
    local = fill("float32", flat, lambda tensor: tensor.flatten()[begin:end])
    state["flat"] = fc.ShardedWeight("flat", local, flat, flat, (0, 0), True, slice(begin, end))
    everywhere = fill("bfloat16", (3, 3), lambda tensor: tensor)
    state["everywhere"] = fc.ShardedWeight("everywhere", everywhere, (3, 3), (3, 3), (0, 0))
    return state


def source(dtype, shape, part):
    return part(whole(dtype, shape))


def target(dtype, shape, part):
    return paddle.zeros_like(part(whole(dtype, shape)).cast("float32")).cast(dtype)


def save_with_paddle(directory, safetensors):
    dist.save_state_dict(shards(source, 0, dist.get_rank(), dist.get_world_size()), directory, safetensors=safetensors)
    dist.barrier()
    return paddle.__version__


def load_with_us(directory, cut):
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = shards(target, cut, rank, world)
    expected = shards(source, cut, rank, world)
    report = fc.load_state_dict(wanted, directory, strict=True)
    wrong = [key for key in wanted if raw(wanted[key].local_tensor) != raw(expected[key].local_tensor)]
    wrong += [f"{key} dtype" for key in wanted if wanted[key].local_tensor.dtype != expected[key].local_tensor.dtype]
    return {"keys": report.keys, "wrong": wrong, "verified": report.bytes_verified, "needed": report.bytes_needed}


def save_with_us(directory):
    fc.save_state_dict(shards(source, 0, dist.get_rank(), dist.get_world_size()), directory)


def load_with_paddle(directory):
    """What is wrong after Paddle's own load of the ranks' own rows: without a GPU, Paddle can send nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted, expected = (shards(fill, 0, rank, world) for fill in (target, source))
    del wanted["everywhere"]
    dist.load_state_dict(wanted, directory, safetensors=True)
    return [key for key in wanted if raw(wanted[key].local_tensor) != raw(expected[key].local_tensor)]


def save_replicas_with_paddle(directory):
    """Every rank writes all of its tensors, also those that others have."""
    state = {"w": whole("bfloat16", (5, 3))}
    dist.save_state_dict(state, directory, save_replicas=True)
    dist.barrier()


def merge_with_us(directory):
    merged = fc.load_merged_state_dict(directory)
    return {key: raw(tensor) == raw(whole(str(tensor.dtype)[7:], tensor.shape)) for key, tensor in merged.items()}


def refused(directory):
    """The error of a load, and whether its target was left alone."""
    target = paddle.full([5, 3], 7.0)
    try:
        fc.load_state_dict({"w": target}, directory)
    except fc.CheckpointError as error:
        return [type(error).__name__, str(error), bool((target == 7.0).all())]
    return None


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safetensors", [False, True], ids=["distcp", "safetensors"])
def test_loads_what_paddle_saved(world2, tmp_path, safetensors):
    world2.run(save_with_paddle, directory=str(tmp_path), safetensors=safetensors)
    ending = "safetensors" if safetensors else "distcp"
    names = sorted(os.listdir(tmp_path))
    assert names == ["0.metadata", f"0_0.{ending}", f"1_0.{ending}"]
    for cut in (0, 1):
        for report in world2.run(load_with_us, directory=str(tmp_path), cut=cut):
            assert report["wrong"] == []
            assert report["keys"] == len(DTYPES) + 2
            assert (report["verified"], report["needed"] > 0) == (0, True)
    # This process alone.
    report = load_with_us(str(tmp_path), 0)
    assert report["wrong"] == []
    # Nothing was written there.
    assert sorted(os.listdir(tmp_path)) == names


def test_paddle_loads_what_we_saved(world2, tmp_path):
    world2.run(save_with_us, directory=str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert world2.run(load_with_paddle, directory=str(tmp_path)) == [[], []]
    assert sorted(os.listdir(tmp_path)) == names


def test_whole_tensors_and_replicas(world2, tmp_path):
    pieces, replicas = tmp_path / "pieces", tmp_path / "replicas"
    world2.run(save_with_paddle, directory=str(pieces), safetensors=False)
    equal = merge_with_us(str(pieces))
    assert all(equal.values())
    assert len(equal) == len(DTYPES) + 2
    world2.run(save_replicas_with_paddle, directory=str(replicas))
    assert {"0_0.distcp", "1_0.distcp"} <= set(os.listdir(replicas))
    assert merge_with_us(str(replicas)) == {"w": True}


def test_code_in_a_data_file_is_refused_on_all_ranks(world2, tmp_path):
    checkpoint, canary = tmp_path / "checkpoint", tmp_path / "canary"
    world2.run(save_replicas_with_paddle, directory=str(checkpoint))
    file = checkpoint / "1_0.distcp"
    file.write_bytes(program(call(named("os", "system"), f"touch {canary}")))
    for kind, text, untouched in world2.run(refused, directory=str(checkpoint)):
        assert (kind, untouched) == ("UnsafePickleError", True)
        assert f"{file}: refused before byte" in text
        assert "the name 'os.system' is not among those of plain data" in text
    assert not canary.exists()
