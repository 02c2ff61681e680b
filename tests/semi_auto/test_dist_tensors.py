"""States of DistTensors: saved, loaded and resharded from every layout to every other, through real processes.

The jobs: states of known arrays in many layouts, from each to each.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.catalog.texts import format_ranks
from paddle_flexckpt.manager import SaveEvery
from paddle_flexckpt.memory.tensors import HostTensor
from tests.semi_auto import training
from tests.semi_auto.matrix import LOSS  # measured here too: 2.4e-7
from tests.semi_auto.strategies import BY_NAME
from tests.semi_auto.test_reshard import cut

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

#: Name, shape, dtype. Over four ranks "five" leaves the last one with less than nothing by Paddle's rule, "three" with
#: nothing; so does "one" all but the first.
TENSORS = {
    "model.even": ([8, 12], "float32"),
    "model.odd": ([7, 5], "float32"),
    "model.cube": ([2, 3, 5], "float32"),
    "model.three": ([3, 4], "float32"),
    "model.five": ([5], "float32"),
    "model.one": ([1, 3], "float32"),
    "model.brain": ([7, 4], "bfloat16"),
    "opt.half": ([6, 9], "float16"),
    "opt.count": ([9], "int64"),
    "opt.scalar": ([], "float32"),
    "opt.dense": ([4], "float32"),
    "opt.part.scalar": ([], "float32"),
    "opt.part.matrix": ([5, 3], "float32"),
}
#: The same dense tensor on every rank, in every layout.
DENSE = "opt.dense"
#: On a mesh of some of the ranks, in every layout that has a mesh.
PART = "opt.part."
#: Ranks of the mesh, and what each of its axes cuts: an axis of every tensor that has it, or None.
LAYOUTS = {
    4: {
        "rows": ([0, 1, 2, 3], (0,)),
        "columns": ([0, 1, 2, 3], (1,)),
        "replicas": ([0, 1, 2, 3], (None,)),
        "both": ([[0, 1], [2, 3]], (0, 1)),
        "turned": ([[0, 1], [2, 3]], (1, 0)),
        "rows and replicas": ([[0, 1], [2, 3]], (0, None)),
        "replicas and last": ([[0, 1], [2, 3]], (None, 2)),
        "rows twice": ([[0, 1], [2, 3]], (0, 0)),
        "columns twice": ([[0, 1], [2, 3]], (1, 1)),
        "another order": ([[3, 1], [2, 0]], (0, 1)),
        "two of four": ([2, 1], (0,)),
        "dense": (None, ()),
    },
    2: {
        "rows": ([0, 1], (0,)),
        "columns": ([1, 0], (1,)),
        "replicas": ([0, 1], (None,)),
        "one of two": ([1], (0,)),
        "dense": (None, ()),
    },
}


@functools.cache
def whole(key):
    """All of a tensor: numbers that tell its elements apart."""
    shape, dtype = TENSORS[key]
    start = list(TENSORS).index(key)
    array = np.arange(int(np.prod(shape))).reshape(shape) * 2 + start
    return paddle.to_tensor(array.astype("float32")).astype(dtype).numpy()


def placed(key, layout):
    """Ranks of the mesh of a tensor, as an array, and the axes that its axes cut; of a dense one the ranks are None."""
    size = dist.get_world_size()
    ranks, axes = LAYOUTS[size][layout]
    if key.startswith(PART) and ranks is not None:  # always on a part of the ranks
        ranks, axes = {4: [1, 2], 2: [1]}[size], (0,)
    if key == DENSE or ranks is None:
        return None, ()
    dimensions = len(TENSORS[key][0])
    return np.array(ranks), tuple(axis if axis is not None and axis < dimensions else None for axis in axes)


def part(array, key, layout, rank=None):
    """A rank's part of an array by slices, apart from the library; None if it has none."""
    ranks, axes = placed(key, layout)
    if ranks is None:
        return array
    here = np.argwhere(ranks == (dist.get_rank() if rank is None else rank))
    if not len(here):
        return None
    return cut(array, ranks.shape, here[0], ["R" if axis is None else f"S{axis}" for axis in axes])


def make(key, layout):
    """A tensor in a layout."""
    array = whole(key)
    ranks, axes = placed(key, layout)
    dense = tensor_of(array, key)
    if ranks is None:
        return dense
    mesh = dist.ProcessMesh(ranks, dim_names=["x", "y"][: ranks.ndim])
    placements = [dist.Replicate() if axis is None else dist.Shard(axis) for axis in axes]
    twice = len(axes) == 2 and axes[0] == axes[1] is not None
    if twice and (TENSORS[key][1] != "float32" or array.shape[axes[0]] in (1, 3, 5)):
        # Neither Paddle nor the CPU world cuts half precision, or into nothing, twice.
        local = tensor_of(part(array, key, layout), key)
        return paddle.Tensor(local, dims=TENSORS[key][0], process_mesh=mesh, placements=placements)
    return dist.shard_tensor(dense, mesh, placements)


def tensor_of(array, key):
    """Bits as a tensor; those of bfloat16 are 16-bit integers to numpy."""
    tensor = paddle.to_tensor(array)
    return tensor.view("bfloat16") if TENSORS[key][1] == "bfloat16" else tensor


def state(layout):
    """The nested plain state in a layout."""
    out = {"model": {}, "opt": {"part": {}}}
    for key in TENSORS:
        *path, name = key.split(".")
        inner = out
        for step in path:
            inner = inner[step]
        inner[name] = make(key, layout)
    return out


def differing(nested, layout):
    """Keys of a nested state whose local values are not, bit for bit, the part of the known array."""
    wrong = []
    for key, tensor in fc.flatten_state_dict(nested)[0].items():
        wanted = part(whole(key), key, layout)
        local = local_of(tensor)
        got = None if not local._is_initialized() or 0 in local.shape else local.numpy()
        if wanted is None or wanted.size == 0:
            same = got is None
        else:
            same = got is not None and (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            same = same and got.tobytes() == wanted.tobytes()
        if not same:
            wrong.append(key)
    return wrong


def local_of(tensor):
    return tensor._local_value() if tensor.is_dist() else tensor


def spoil(nested):
    """Overwrites what this rank holds of a nested state."""
    for tensor in fc.flatten_state_dict(nested)[0].values():
        local = local_of(tensor)
        if local._is_initialized():
            HostTensor(local).array.view("uint8")[...] = 0xA5


@functools.cache
def numbers(key, layout, rank):
    """Numbers of the elements of a tensor that a rank holds."""
    shape = TENSORS[key][0]
    found = part(np.arange(int(np.prod(shape))).reshape(shape), key, layout, rank)
    return np.zeros(0, dtype=int) if found is None else found.reshape(-1)


@functools.cache
def itemsize(key):
    return whole(key).dtype.itemsize


def every_pair(directory):
    """Saves a state in all layouts at once, and loads and reshards each of them to each.

    Returns:
        ``wrong``: what is not as it was, or was not counted as it should be; ``pairs``: how many there were.
    """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    group = dist.new_group(list(ranks))
    layouts = list(LAYOUTS[len(ranks)])
    source, tensors = ({layout: state(layout) for layout in layouts} for _ in range(2))
    report = fc.save_state_dict(source, directory)
    parts = [[numbers(key, layout, each) for each in ranks] for layout in layouts for key in TENSORS]
    sizes = [itemsize(key) for _ in layouts for key in TENSORS]
    expected = {
        "keys": len(layouts) * len(TENSORS),
        # A part that several ranks hold is stored once.
        "items": sum(len({found.tobytes() for found in of if found.size}) for of in parts),
        "total_bytes": len(layouts) * sum(whole(key).nbytes for key in TENSORS),
        "held_bytes": sum(sum(found.size for found in of) * size for of, size in zip(parts, sizes)),
    }
    got = {name: getattr(report, name) for name in expected}
    wrong, pairs = [] if got == expected else [["save", got, expected]], set()
    for shift in range(len(layouts)):
        after = {layout: layouts[(i + shift) % len(layouts)] for i, layout in enumerate(layouts)}
        pairs.update(after.items())
        target = {layout: tensors[other] for layout, other in after.items()}
        spoil(target)
        fc.load_state_dict(target, directory, strict=True)
        wrong += [["load", *pair, key] for pair in after.items() for key in differing(target[pair[0]], pair[1])]
        spoil(target)
        report = fc.reshard_sharded_state_dict(source, target, group)
        wrong += [["reshard", *pair, key] for pair in after.items() for key in differing(target[pair[0]], pair[1])]
        # Each rank is sent what it lacks, and no more.
        lacks = sum(
            np.setdiff1d(numbers(key, new, rank), numbers(key, old, rank)).size * itemsize(key)
            for old, new in after.items()
            for key in TENSORS
        )
        if report.bytes_received != lacks:
            wrong.append(["received", shift, report.bytes_received, lacks])
    wrong += [["source", layout, key] for layout in layouts for key in differing(source[layout], layout)]
    return {"wrong": wrong, "pairs": len(pairs)}


# -- what is refused, and what is described ----------------------------------------------------------------------------


def rows(array, *placements):
    """A tensor over all ranks, cut by rows unless it is told otherwise."""
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["x"])
    return dist.shard_tensor(paddle.to_tensor(array), mesh, list(placements) or [dist.Shard(0)])


def text_of(call, *args):
    """The text of the error that a call ends with, or None."""
    try:
        call(*args)
    except fc.ValidationError as error:
        return str(error)
    return None


def refused(directory, case):
    """What nobody can tell the place of: the errors of save, load and reshard, and what they left.

    Args:
        directory: for a checkpoint.
        case: ``partial``, ``partial on rank 1`` alone, ``split factor`` or ``slice``.
    """
    array = np.arange(24, dtype="float32").reshape(8, 3)
    fc.save_state_dict({"w": rows(array), "model": {"bad": rows(array)}}, directory)

    def bad_state(value):
        key, bad = "bad", rows(np.full_like(array, value))
        if case.startswith("partial") and (case == "partial" or dist.get_rank() == 1):
            bad = dist.auto_parallel.api.dtensor_from_local(
                paddle.full([8, 3], value), bad.process_mesh, [dist.Partial()]
            )
        elif case == "split factor":
            placement = dist.Shard(0)
            placement.set_split_factor(2)
            bad = paddle.Tensor(bad._local_value(), dims=[8, 3], process_mesh=bad.process_mesh, placements=[placement])
        elif case == "slice":
            key, bad = "slice@bad", rows(np.full([8, 3], value, "float32"), dist.Replicate())
        return {"w": rows(np.full_like(array, value)), "model": {key: bad}}

    target, whole_ones = bad_state(-1), {"w": paddle.to_tensor(array), "model": {"bad": paddle.to_tensor(array)}}
    good = {"w": rows(np.full_like(array, -1)), "model": {"bad": rows(np.full_like(array, -1))}}
    texts = {
        "save": text_of(fc.save_state_dict, bad_state(2), f"{directory}-bad"),
        "load": text_of(fc.load_state_dict, target, directory),
        "reshard from": text_of(fc.reshard_sharded_state_dict, bad_state(2), good),
        "reshard to": text_of(fc.reshard_sharded_state_dict, whole_ones, target),
    }
    targets = fc.flatten_state_dict({"target": target, "good": good})[0].values()
    untouched = [bool((local_of(tensor).numpy() == -1).all()) for tensor in targets]
    return {
        "texts": texts,
        "untouched": untouched,
        "files": [names for *_, names in os.walk(f"{directory}-bad") if names],
    }


def described():
    """Ways to describe a DistTensor by hand, right and wrong: what a ShardedWeight says, or the error."""
    array = np.arange(21, dtype="float32").reshape(7, 3)
    tensor, other = rows(array), rows(array * 2, dist.Shard(1))
    rank, size = dist.get_rank(), dist.get_world_size()
    share = -(-7 // size)
    local = tuple(tensor._local_shape)

    def told(make, *args):
        try:
            weight = make("w", *args)
        except ValueError as error:
            return str(error)
        shares_memory = weight.local_tensor.data_ptr() == args[0]._local_value().data_ptr()
        return [weight.local_shape, weight.global_shape, weight.global_offset, shares_memory, weight.is_flattened]

    like = fc.make_replicated_sharded_weight("like", tensor)
    return {
        "replicated": told(fc.make_replicated_sharded_weight, tensor),
        "as whole": told(fc.ShardedWeight, tensor, (7, 3), (7, 3), (0, 0)),
        "as a part": told(fc.ShardedWeight, tensor, local, (7, 3), (share * rank, 0)),
        "another tensor": told(fc.create_sharded_weight_with_new_local, tensor, like),
        "in another cut": told(fc.create_sharded_weight_with_new_local, other, like),
        "of another shape": told(fc.create_sharded_weight_with_new_local, rows(array[:, :2]), like),
        "wrong global shape": told(fc.ShardedWeight, tensor, (7, 3), (7, 4), (0, 0)),
        "wrong local shape": told(fc.ShardedWeight, tensor, (3, 1), (7, 3), (0, 0)),
        "wrong offset": told(fc.ShardedWeight, tensor, local, (7, 3), (1 + share * rank, 0)),
        "flattened": told(fc.ShardedWeight, tensor, (7, 3), (7, 3), (0, 0), True, slice(0, 21)),
    }


# -- asynchronous saves, and the manager -------------------------------------------------------------------------------


def saved_while_changing(directory):
    """An asynchronous save of some layouts, whose tensors change at once; keys that it does not hold as they were."""
    layouts = list(LAYOUTS[dist.get_world_size()])
    source = {layout: state(layout) for layout in layouts}
    handle = fc.save_state_dict(source, directory, async_save=True)
    spoil(source)
    handle.result(60)
    target = {layout: state(after) for layout, after in zip(layouts, reversed(layouts))}
    spoil(target)
    fc.load_state_dict(target, directory, strict=True)
    return [
        [before, after, key]
        for before, after in zip(layouts, reversed(layouts))
        for key in differing(target[before], after)
    ]


def ranks_of(strategy):
    """The ranks that a strategy needs."""
    return BY_NAME[strategy].ranks


def managed(directory, strategy, steps, last):
    """A run of a strategy with a manager, from the beginning or where another one stopped.

    Returns:
        ``restored``: the step that it began after, or None; ``differs``, keys that are not as ``wanted.npz`` has them
        after that; ``losses`` by step.
    """
    fc.install()
    built = training.build(strategy)
    wanted_file = f"{directory}/wanted.npz"
    restored, differs, losses = None, [], {}
    with fc.CheckpointManager(f"{directory}/run", save_when=SaveEvery(2), async_save=True) as manager:
        if manager.latest_step() is not None:
            restored = manager.restore(model=built.model, optimizer=built.optimizer).step
            wanted, got = dict(np.load(wanted_file)), training.gather(built)
            differs = sorted(k for k in {**got, **wanted} if k not in got or not np.array_equal(got[k], wanted.get(k)))
        for step in range((restored or 0) + 1, last + 1):
            losses[str(step)] = built.step(step)
            if step <= steps and manager.should_save(step):
                manager.save(step, model=built.model, optimizer=built.optimizer)
                arrays = training.gather(built)
                if dist.get_rank() == 0:
                    np.savez(wanted_file, **arrays)
    return {"restored": restored, "differs": differs, "losses": losses}


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_to_every_layout(world, ranks, tmp_path):
    reports = world(ranks).run(every_pair, directory=str(tmp_path / "c"))
    assert reports == [{"wrong": [], "pairs": len(LAYOUTS[ranks]) ** 2}] * ranks


@pytest.mark.parametrize(
    ("case", "words", "where"),
    [
        ("partial", "the tensor is Partial over mesh axis 0", [0, 1]),
        ("partial on rank 1", "the tensor is Partial over mesh axis 0", [1]),
        ("split factor", "re-arranged over mesh axis 0 (Shard(dim=0, split_factor=2))", [0, 1]),
        ("slice", "is one rank's range of a fused buffer, of unknown place", [0, 1]),
    ],
)
def test_a_tensor_of_unknown_place_is_refused(world2, tmp_path, case, words, where):
    first, second = world2.run(refused, directory=str(tmp_path / "c"), case=case)
    assert first["texts"] == second["texts"]
    key = "model.slice@bad" if case == "slice" else "model.bad"
    for text in first["texts"].values():
        assert text.count(words) == 1
        assert f"[rank{'s' * (len(where) > 1)} {format_ranks(where)}] " in text
        assert f"(key {key!r}" in text
        assert "Remedy" in text
    assert first["untouched"] == second["untouched"] == [True] * 4
    assert first["files"] == []


def test_descriptions_by_hand(world2):
    for rank, told in enumerate(world2.run(described)):
        mine = [[[4, 3], [3, 3]][rank], [7, 3], [[0, 0], [4, 0]][rank], True, False]
        assert [told.pop(name) for name in ("replicated", "as whole", "as a part", "another tensor")] == [mine] * 4
        assert told.pop("in another cut") == [[[7, 2], [7, 1]][rank], [7, 3], [[0, 0], [0, 2]][rank], True, False]
        assert told.pop("of another shape") == (
            "Shape mismatch: 'w' has global shape (7, 2); expected (7, 3) as 'like' has"
        )
        holds = f"of which this rank holds shape {tuple(mine[0])} at {tuple(mine[2])}. Remedy (FC105): make_replicated"
        assert sorted(told) == ["flattened", "wrong global shape", "wrong local shape", "wrong offset"]
        for text in told.values():
            assert text.startswith("key 'w': global_shape (7, ")
            assert holds in text


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_asynchronous_save_has_what_there_was(world, ranks, tmp_path):
    assert world(ranks).run(saved_while_changing, directory=str(tmp_path / "c")) == [[]] * ranks


@pytest.mark.parametrize(
    ("source", "target"),
    [("dp2-mp2-stage1", "dp2-stage3"), ("dp2-stage3", "dp2-mp2-stage2"), ("dp2-fusion", "dp4-fully-shard-fused")],
)
def test_a_run_goes_on_under_another_strategy_with_the_manager(world, source, target, tmp_path):
    arguments = {"directory": str(tmp_path), "steps": 2, "last": 4}
    before = world(ranks_of(source)).run(managed, strategy=source, **arguments)[0]
    assert before["restored"] is None
    for report in world(ranks_of(target)).run(managed, strategy=target, **arguments):
        assert report["restored"] == 2
        assert report["differs"] == []
        assert sorted(report["losses"]) == ["3", "4"]
        assert max(np.abs(before["losses"][step] - loss) for step, loss in report["losses"].items()) <= LOSS
