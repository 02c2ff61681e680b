"""Saves staged in slices: what a slice copies, what may not happen meanwhile, and the hook of the optimizer."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_blocks
from paddle_flexckpt.saving.background_saves import Staging
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.saving.sliced_saves import SlicedSave
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import PATIENCE_SECONDS, SOLO, load, load_shards, save, shards, state
from tests.background.test_exit import run
from tests.remedies.following import provoked

SLICE = 4096


def test_a_staging_copies_as_much_as_it_is_told_and_all_at_the_end():
    random = np.random.default_rng(0)
    items = [random.integers(0, 256, size, dtype=np.uint8) for size in (0, 5, 40, 0, 3, 100)]
    sources = [(np.concatenate([np.zeros(2, np.uint8), item]), 2, len(item)) for item in items]
    space = np.zeros(148, np.uint8)
    staging = Staging(sources, space, None)
    staging.advance(20)
    whole = np.concatenate(items)
    # An item is cut between elements of 16 bytes.
    assert (space[:5] == whole[:5]).all()
    assert not space[5:].any()
    staging.advance(40)
    assert (space[:45] == whole[:45]).all()
    assert not staging.is_done
    staging.finish()
    assert staging.is_done
    assert (space == whole).all()
    assert len(space) == len(whole)


@pytest.mark.parametrize("copied", [0, 20, (1 << 20) + 77, 3 << 20, 1 << 30])
def test_blocks_are_hashed_whether_slices_have_copied_them_or_not(copied):
    random = np.random.default_rng(1)
    sizes = (5, (1 << 20) + 33, 1 << 19, 2 << 20, 7)
    items = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    space = np.zeros(sum(sizes), np.uint8)
    staging = Staging([(item, 0, len(item)) for item in items], space, None)
    staging.advance(copied)
    ends = np.cumsum(sizes)
    spans = [(int(ends[i] - sizes[i]), int(ends[i])) for i in (1, 3, 4)]
    blocks = [items[i][start : start + BLOCK_BYTES] for i in (1, 3, 4) for start in range(0, sizes[i], BLOCK_BYTES)]
    assert staging.finish(spans) == hash_blocks(blocks)
    assert (space == np.concatenate(items)).all()


def test_slices_make_the_checkpoint_that_was_there_at_the_call(tmp_path, writers):
    writer, elements = writers(), 5 * SLICE // 4
    handle = save(tmp_path, 3, writer, elements, slice_bytes=SLICE)
    assert isinstance(handle, SlicedSave)
    assert not handle.done()
    count = 1
    while handle.stage_next():
        count += 1
    assert count == 6  # 5 slices of "w" and one of the rest, 24 bytes of "b"
    assert not list(tmp_path.glob("*.manifest"))
    report = handle.finish_staging().result(PATIENCE_SECONDS)
    assert report.bytes_written == 5 * SLICE + 24
    assert load(tmp_path, elements=elements) == 3


def test_ranks_meet_once_more_than_in_other_saves_and_not_for_slices(tmp_path, writers):
    both = [writers(), writers()]

    def job(comm):
        own = shards(comm.position, 2, 1, rows=1000)
        options = {"async_save": both[comm.position], "slice_bytes": SLICE}
        handle = save_state_dict(own, tmp_path, comm, **options)
        called = comm.collectives
        # One rank does so more often than the other.
        for _ in range(1 + 2 * comm.position):
            handle.stage_next()
        assert comm.collectives == called
        handle.finish_staging().result(PATIENCE_SECONDS)
        return comm.collectives

    assert SimulatedWorld(2).run(job) == [3, 3]
    assert load_shards(tmp_path, 2, rows=1000) == 1


def test_a_change_meanwhile_is_an_error_on_every_rank_and_nothing_is_saved(tmp_path, writers):
    both = [writers(), writers()]

    def job(comm):
        own = shards(comm.position, 2, 1, rows=10000)
        handle = save_state_dict(own, tmp_path, comm, async_save=both[comm.position], slice_bytes=SLICE)
        handle.stage_next()
        if comm.position:
            own["w"].local_tensor[...] += 1
        try:
            handle.finish_staging()
        except ValidationError as error:
            with pytest.raises(ValidationError, match="changed while"):
                handle.result()
            return str(error)
        return None

    said = SimulatedWorld(2).run(job)
    assert said[0] == said[1]
    assert "[rank 1]" in said[0]
    assert "'w' changed while the save was staged in slices. Remedy (FC506): call finish_staging()" in said[0]
    assert not list(tmp_path.glob("*.manifest"))
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".safetensors", ".marker"))]
    # The writers and the directory are free.
    SimulatedWorld(2).run(
        lambda comm: save_state_dict(
            shards(comm.position, 2, 2), tmp_path, comm, async_save=both[comm.position]
        ).result(PATIENCE_SECONDS)
    )
    assert load_shards(tmp_path, 2) == 2


def large(shape=(1 << 17,)):
    return np.zeros(shape, dtype=np.float32)


def embedding():
    return paddle.nn.Embedding(1 << 12, 32, sparse=True)


def sparse_step(layer):
    """A step of SGD by a sparse gradient: it writes one row, the last, and counts nothing."""
    layer(paddle.to_tensor([(1 << 12) - 1])).sum().backward()
    paddle.optimizer.SGD(learning_rate=1.0, parameters=layer.parameters()).step()


def there_and_back(array, handle):
    array += 1
    for _ in range(200):
        handle.stage_next()
    array -= 1


CHANGES = {
    "one element of an array": (large, lambda array, _: array.__setitem__(99999, 1)),
    "an array that is not contiguous": (lambda: large((512, 256)).T, lambda array, _: array.__setitem__((7, 500), 1)),
    "an array, while a slice was copied": (large, there_and_back),
    "a row of a sparse embedding": (embedding, lambda layer, _: sparse_step(layer)),
    "large running statistics": (
        lambda: paddle.nn.BatchNorm1D(1 << 15),
        lambda layer, _: layer(paddle.ones([2, 1 << 15])),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_meanwhile_is_noticed(tmp_path, writers, name):
    make, change = CHANGES[name]
    thing = make()
    tensors = {"w": thing} if isinstance(thing, np.ndarray) else thing.state_dict()
    # Its first slices are of another tensor: this one is not copied yet.
    tensors = {"a": large(), **tensors}
    handle = save_state_dict(tensors, tmp_path, SOLO, async_save=writers(), slice_bytes=SLICE)
    handle.stage_next()
    change(thing, handle)
    with pytest.raises(ValidationError, match="changed while the save was staged in slices.* save without slice_bytes"):
        handle.finish_staging()
    assert not list(tmp_path.glob("*.manifest"))


def test_running_statistics_are_those_of_the_call(tmp_path, writers):
    """They are small, and every forward pass changes them: on all ranks, which compare them."""
    both = [writers(), writers()]

    def job(comm):
        layer, counter = paddle.nn.BatchNorm1D(64), np.zeros(3, dtype=np.int64)
        own = {**layer.state_dict(), "counter": counter, **shards(comm.position, 2, 1, rows=10000)}
        was = {key: np.array(own[key]) for key in ("_mean", "_variance", "counter")}
        handle = save_state_dict(own, tmp_path, comm, async_save=both[comm.position], slice_bytes=SLICE)
        layer(paddle.arange(128, dtype="float32").reshape([2, 64]))
        counter += 1
        handle.stage_next()
        handle.finish_staging().result(PATIENCE_SECONDS)
        assert (layer._mean.numpy() != was["_mean"]).any()
        return was

    was, _ = SimulatedWorld(2).run(job)
    found = {key: np.empty_like(value) for key, value in was.items()}
    load_state_dict(found, tmp_path, SOLO)
    for key, value in was.items():
        assert found[key].tobytes() == value.tobytes(), key
    assert load_shards(tmp_path, 2, rows=10000) == 1


def test_what_fails_in_a_slice_is_raised_on_every_rank_when_they_meet(tmp_path, writers, monkeypatch):
    both, right = [writers(), writers()], Staging.advance

    def job(comm):
        own = shards(comm.position, 2, 1, rows=1000)
        handle = save_state_dict(own, tmp_path, comm, async_save=both[comm.position], slice_bytes=SLICE)
        comm.together(lambda: (None, b""), "")
        if comm.position == 0:
            with monkeypatch.context() as patch:
                patch.setattr(Staging, "advance", lambda *_: (_ for _ in ()).throw(OSError("no link")))
                assert not handle.stage_next()
        try:
            handle.finish_staging()
        except CheckpointError as error:
            return str(error)
        return None

    said = SimulatedWorld(2).run(job)
    assert Staging.advance is right
    assert said[0] == said[1]
    assert "[rank 0] OSError: no link" in said[0]


def test_another_save_meanwhile_is_refused_at_once(tmp_path, writers):
    writer = writers()
    handle = save(tmp_path, 1, writer, slice_bytes=SLICE)
    with pytest.raises(
        ValidationError, match=r"being staged in slices. Remedy .FC102.: call its finish_staging\(\) first"
    ):
        save(tmp_path / "other", 2, writer)
    with pytest.raises(ValidationError, match=r"is not staged. Remedy .FC102.: call finish_staging\(\) first"):
        handle.result()
    handle.finish_staging().result(PATIENCE_SECONDS)
    with pytest.raises(ValidationError, match="is staged, or was given up"):
        handle.stage_next()
    save(tmp_path / "other", 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 1


def test_a_save_that_is_given_up_leaves_nothing(tmp_path, writers):
    writer = writers()
    handle = save(tmp_path, 1, writer, slice_bytes=SLICE)
    handle.stage_next()
    handle.give_up()
    with pytest.raises(CheckpointError, match="was given up"):
        handle.result()
    save(tmp_path, 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 2
    assert len(list(tmp_path.glob("*.manifest"))) == 1


@pytest.mark.parametrize("giving", [(0,), (1,), (0, 1)])
def test_one_rank_gives_up_and_no_rank_waits_or_saves(tmp_path, writers, giving):
    both = [writers(), writers()]

    def job(comm):
        handle = save_state_dict(
            shards(comm.position, 2, 1, rows=1000), tmp_path, comm, async_save=both[comm.position], slice_bytes=SLICE
        )
        called = comm.collectives
        handle.stage_next()
        if comm.position in giving:
            handle.give_up()
        else:
            with provoked("saving/sliced_saves.py", "call the same of the two on every rank"):
                handle.finish_staging()
        with pytest.raises(CheckpointError, match=r"give_up\(\) was called|was given up"):
            handle.result()
        assert comm.collectives == called + 1
        assert not list(tmp_path.glob("*.manifest"))
        # As it says. Nothing is in the way of that.
        again = save_state_dict(
            shards(comm.position, 2, 2, rows=1000), tmp_path, comm, async_save=both[comm.position], slice_bytes=SLICE
        )
        again.finish_staging().result(PATIENCE_SECONDS)

    SimulatedWorld(2).run(job)
    assert load_shards(tmp_path, 2, rows=1000) == 2
    assert len(list(tmp_path.glob("*.manifest"))) == 1


def test_the_hook_finishes_before_the_step_and_takes_itself_back(tmp_path, writers):
    tensors = state(5)

    class Optimizer:
        def step(self, factor=1):
            tensors["w"] *= factor
            return "stepped"

    optimizer = Optimizer()
    handle = save_state_dict(tensors, tmp_path, SOLO, async_save=writers(), slice_bytes=SLICE)
    handle.finish_before(optimizer)
    assert optimizer.step(factor=0) == "stepped"
    assert not tensors["w"].any()
    assert vars(optimizer) == {}
    handle.result(PATIENCE_SECONDS)
    assert load(tmp_path) == 5
    # A hook that is taken back does nothing.
    handle = save(tmp_path, 6, handle_writer := writers(), slice_bytes=SLICE)
    handle.finish_before(optimizer).put_back()
    optimizer.step()
    assert handle_writer.pending == 0
    handle.give_up()


@pytest.mark.parametrize(
    "wrong", [{"async_save": False}, {"slice_bytes": 16}, {"slice_bytes": "2MB"}, {"slice_bytes": 4096.5}]
)
def test_options_that_make_no_sense(tmp_path, writers, wrong):
    options = {"async_save": writers(), "slice_bytes": SLICE, **wrong}
    texts = "slice_bytes(=.* needs async_save, and at least 4096 bytes| has to be an integer >= 0; got )"
    with pytest.raises(ValidationError, match=texts):
        save_state_dict(state(1), tmp_path, SOLO, **options)


def test_a_save_that_was_never_finished_is_told_at_the_exit(tmp_path):
    status, output, errors = run(tmp_path, "save(path, 1, writer, slice_bytes=4096).stage_next()")
    assert status == 1
    assert output == ["atexit: last", "atexit: first"]
    path = repr(str(tmp_path))
    assert (
        errors
        == f"paddle_flexckpt: the save of id 0 to {path} is lost: finish_staging() of its handle was not called\n"
    )
