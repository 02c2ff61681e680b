"""A run's samples are the same, in the same order, however many ranks divide them, and wherever it stops."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.data import ElasticBatchSampler
from tests.documents import code_block
from tests.remedies.following import provoked


@pytest.fixture(autouse=True)
def _no_workers_left(monkeypatch):
    """End the workers of loops that a test leaves: each keeps a copy of this process."""
    if "paddle" not in sys.modules:
        yield
        return
    from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess

    made, begin = [], _DataLoaderIterMultiProcess.__init__

    def noted(self, loader):
        made.append(self)
        begin(self, loader)

    monkeypatch.setattr(_DataLoaderIterMultiProcess, "__init__", noted)
    yield
    for each in made:
        each._try_shutdown_all()


def samplers(ranks, length, batch, **options):
    return [ElasticBatchSampler(range(length), batch, ranks, rank, **options) for rank in range(ranks)]


def steps(group, count):
    """The samples of the next steps of all ranks, in their order; every rank counts what it takes."""
    taken = []
    while count:
        loaders = [sampler.batches(list(sampler)) for sampler in group]
        for batches in zip(*loaders):
            assert {len(batch) for batch in batches} == {group[0].batch_size}
            taken += [sample for batch in batches for sample in batch]
            count -= 1
            if not count:
                break
    return taken


def resumed(group, ranks, length, batch, **options):
    """Samplers of another run that continue."""
    states = [sampler.state_dict() for sampler in group]
    assert all(state == states[0] for state in states), "the position is the same on every rank"
    new = samplers(ranks, length, batch, **options)
    for sampler in new:
        sampler.load_state_dict(states[0])
    return new


@pytest.mark.parametrize("length", [3, 24, 101, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_other_ranks_and_batches_continue_with_the_samples_of_the_run_that_was_not_stopped(length, shuffle):
    options = {"shuffle": shuffle, "seed": 7}
    parts = [(2, 3, 5), (4, 2, 6), (3, 5, 9), (1, 4, 20), (4, 1, 3), (2, 3, 1)]  # ranks, batch, steps
    total = sum(ranks * batch * count for ranks, batch, count in parts)
    expected = steps(samplers(1, length, 1, **options), total)
    group, taken = samplers(*parts[0][:1], length, parts[0][1], **options), []
    for ranks, batch, count in parts:
        group = resumed(group, ranks, length, batch, **options)
        taken += steps(group, count)
    assert taken == expected
    # Every epoch has each sample once.
    assert all(sorted(taken[e : e + length]) == list(range(length)) for e in range(0, total - length + 1, length))


def test_epochs_have_orders_of_their_own_that_follow_from_the_seed():
    orders = [steps(samplers(1, 50, 10, shuffle=True, seed=seed), 10) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:50] != orders[0][50:]
    # The numbers of RandomState, which no release of numpy changes.
    assert orders[0][:50] == np.random.RandomState([0, 0]).permutation(50).tolist()


def test_the_last_batch_of_an_epoch_has_the_first_samples_of_the_next():
    (sampler,) = samplers(1, 10, 4)
    assert len(sampler) == 3
    assert list(sampler.batches(list(sampler))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert (sampler.epoch, sampler.position, len(sampler)) == (1, 12, 2)
    sampler.set_epoch(1)  # as loops do: nothing is repeated
    assert list(sampler.batches(list(sampler))) == [[2, 3, 4, 5], [6, 7, 8, 9]]
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.position) == (5, 50)


def test_the_rest_of_an_epoch_may_be_left_out():
    group = samplers(2, 11, 2, drop_last=True)
    assert steps(group, 3) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert [sampler.epoch for sampler in group] == [1, 1]
    # 7 samples are left, which do not fill a batch of 8: the next epoch begins.
    assert steps(resumed(group, 2, 11, 4, drop_last=True), 1) == list(range(8))


def test_batches_that_a_loop_has_left_are_drawn_again():
    (sampler,) = samplers(1, 10, 2)
    for batch in sampler.batches(list(sampler)):
        if batch[0] == 4:
            break
    assert sampler.position == 6
    assert next(sampler.batches(list(sampler))) == [6, 7]


@pytest.mark.parametrize(
    "change",
    [
        lambda sampler, state: sampler.load_state_dict(state),
        lambda sampler, state: sampler.set_epoch(1),
        lambda sampler, state: sampler.advance(),
        lambda sampler, state: setattr(sampler, "batch_size", 4),
    ],
)
def test_a_loop_does_not_go_on_with_batches_of_another_position(change):
    (sampler,) = samplers(1, 20, 2)
    state, taken = sampler.state_dict(), []
    with provoked("data/batch_sampler.py", "after a restore, loop over range(sampler.epoch, epochs), and in each"):
        for batch in sampler.batches(list(sampler)):
            taken.append(batch)
            if len(taken) == 2:
                change(sampler, state)
                position = sampler.position
    assert taken == [[0, 1], [2, 3]]
    assert next(sampler.batches(list(sampler)))[0] == position % 20


def test_an_epoch_before_the_one_that_was_restored_does_not_begin():
    (sampler,), (new,) = samplers(1, 20, 2), samplers(1, 20, 2)
    sampler.advance(23)
    new.load_state_dict(sampler.state_dict())
    for _ in range(2):
        with provoked("data/batch_sampler.py", "loop over range(sampler.epoch, epochs)") as error:
            new.set_epoch(1)
        told = f"set_epoch(1) would go back from sample {new.position} to 20; this run was restored in epoch 2"
        assert told in str(error.value)
        new.set_epoch(2)
        assert len(list(new.batches(list(new)))) in (7, 10)
    new.set_epoch(5)
    new.set_epoch(4)
    assert new.position == 80
    sampler.set_epoch(0)  # nothing was restored here
    assert sampler.position == 0


def test_a_position_that_nothing_counted_is_no_state():
    (sampler,) = samplers(1, 10, 2)
    for _ in sampler:  # a loader draws ahead of the training
        break
    with provoked("data/batch_sampler.py", "sampler.batches(loader) anew, which counts the batches"):
        sampler.state_dict()
    sampler.advance()
    assert sampler.state_dict()["position"] == 2
    assert next(sampler.batches(list(sampler))) == [2, 3]
    assert sampler.state_dict()["position"] == 4


@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        (11, {}, "the data has another number of samples: length was 10 when it was saved, and is 11 here"),
        (10, {"seed": 1}, "the samples are shuffled with another seed: seed was 0"),
        (10, {"shuffle": True}, "the samples are shuffled in one run, and not in the other: shuffle was False"),
    ],
)
def test_the_position_of_other_data_is_refused(length, options, words):
    (old,), (new,) = samplers(1, 10, 2), samplers(1, length, 2, **options)
    old.advance(3)
    new.advance()
    with provoked("data/batch_sampler.py", "make the sampler as in the run that saved it, or begin this data") as error:
        new.load_state_dict(old.state_dict())
    assert f"does not continue here: {words}" in str(error.value)
    assert new.position == 2
    (again,) = samplers(1, 10, 2)
    again.load_state_dict(old.state_dict())
    assert again.position == 6


@pytest.mark.parametrize("state", [None, {}, {"version": 2}, [1]])
def test_what_is_no_state_is_refused(state):
    (sampler,) = samplers(1, 10, 2)
    with pytest.raises(ValidationError, match="no state of an ElasticBatchSampler"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size has to be an integer from 1"),
        ({"batch_size": 2.0}, "batch_size has to be an integer >= 0"),
        ({"batch_size": True}, "batch_size has to be an integer >= 0"),
        ({"rank": 2}, "rank has to be an integer from 0 to 1"),
        ({"seed": -1}, "seed has to be an integer >= 0"),
        ({"dataset": []}, "the data is too short"),
        ({"dataset": range(7), "drop_last": True}, "expected 8 samples, one global batch"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ValidationError, match="has to be|too short") as error:
        ElasticBatchSampler(**{"dataset": range(10), "batch_size": 4, "num_replicas": 2, "rank": 0, **arguments})
    assert words in str(error.value)


@pytest.mark.paddle
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loader_of_paddle_draws_ahead_and_the_position_is_that_of_the_loop(options):
    paddle = pytest.importorskip("paddle")
    data = [np.array([number]) for number in range(30)]
    sampler = ElasticBatchSampler(data, 4, 1, 0, shuffle=True)
    loader = paddle.io.DataLoader(data, batch_sampler=sampler, **options)
    expected = steps(samplers(1, 30, 4, shuffle=True), 20)
    taken = []
    while len(taken) < len(expected):
        for batch in sampler.batches(loader):
            taken += np.asarray(batch[0] if isinstance(batch, list) else batch).ravel().tolist()
            assert sampler.state_dict()["position"] == len(taken)
            if len(taken) == len(expected) or len(taken) in (12, 40):  # a loop that ends within an epoch
                break
    assert taken == expected
    other = paddle.io.DataLoader(data, batch_size=4)
    with provoked("data/batch_sampler.py", "make the loader with batch_sampler= this sampler"):
        sampler.batches(other)


@pytest.mark.paddle
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_iterator_of_a_loader_that_is_older_than_a_restore_counts_nothing(options):
    paddle = pytest.importorskip("paddle")
    (saved,), (sampler,) = samplers(1, 20, 2), samplers(1, 20, 2)
    loader = paddle.io.DataLoader(np.arange(20), batch_sampler=sampler, **options)
    saved.advance(13)
    old = iter(loader)
    sampler.load_state_dict(saved.state_dict())
    for _ in range(2):
        next(old)
        with provoked("data/batch_sampler.py", "sampler.batches(loader) anew, which counts the batches") as error:
            sampler.advance()
        assert "expected (0, 2), as (position, samples of a global batch); got (26, 2)" in str(error.value)
        assert sampler.position == 26
    del old
    taken = [batch.numpy().tolist() for batch in sampler.batches(loader)]
    assert taken == [[number, number + 1] for number in range(6, 20, 2)]


@pytest.mark.paddle
def test_the_loop_of_the_documentation_takes_each_sample_once(tmp_path):
    paddle = pytest.importorskip("paddle")
    import paddle_flexckpt as fc

    def run(stop):
        """Train in the loop until a step, after which the process ends."""

        def train(step, batch):
            if step == stop:
                raise KeyboardInterrupt
            seen.extend(batch[0].numpy().ravel().astype(int).tolist())
            return step + 1

        model = paddle.nn.Linear(1, 1)
        with fc.CheckpointManager(tmp_path, save_when=fc.SaveEvery(2), preemption_signals=()) as manager:
            names = {"fc": fc, "paddle": paddle, "manager": manager, "train": train, "epochs": 2, "step": 0}
            names.update(model=model, optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()))
            names["dataset"] = [(np.array([number], dtype="float32"),) for number in range(40)]
            text = code_block("docs/manager.md", "ElasticBatchSampler").replace("num_workers=2", "num_workers=0")
            exec(text, names)

    seen = []
    with pytest.raises(KeyboardInterrupt):
        run(stop=6)
    run(stop=None)
    assert sorted(seen) == sorted([*range(40)] * 2)
