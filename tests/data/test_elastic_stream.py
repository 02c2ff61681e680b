"""A stream's samples are the same, in the same order, however many ranks divide its splits, and wherever it stops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from tests.documents import code_block
from tests.remedies.following import provoked

pytestmark = pytest.mark.paddle
SPLITS = 12


class Packer:
    """Packs documents of a split, of different lengths, into samples of 4 tokens; keeps a half-filled buffer."""

    def __init__(self, split, documents=10**9):
        self.split, self.documents = split, documents
        self.next, self.buffer, self.kept = 0, [], paddle.zeros([2])

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.buffer) < 4:
            if self.next == self.documents:
                raise StopIteration
            self.buffer += [(self.split, self.next)] * (1 + (self.split * 7 + self.next * 5) % 6)
            self.next += 1
        sample, self.buffer = self.buffer[:4], self.buffer[4:]
        self.kept += 1
        return tuple(sample)

    def state_dict(self):
        buffer = np.array(self.buffer, dtype="int64").reshape(-1, 2)
        return {"next": self.next, "buffer": buffer, "nest": [self.kept, ("a", b"b", None)]}

    def load_state_dict(self, state):
        assert state["nest"][1] == ("a", b"b", None)
        self.next, self.kept = state["next"], state["nest"][0].clone()
        self.buffer = [tuple(each) for each in state["buffer"].tolist()]


def streams(ranks, splits=SPLITS, make=Packer, **options):
    return [fc.ElasticStream(make, splits, ranks, rank, **options) for rank in range(ranks)]


def take(group, size, count):
    """The samples of the next global batches, in the order of the whole stream."""
    taken = []
    for batches in zip(*(itertools.islice(stream.batches(size), count) for stream in group)):
        assert {len(batch) for batch in batches} == {size}
        end = group[0].position
        begin = end - size * len(group)
        by_rank = [iter(batch) for batch in batches]
        taken += [next(by_rank[number % len(group)]) for number in range(begin, end)]
    return taken


def resumed(group, ranks, **options):
    """Streams of another run that continue, each from the states of its own splits."""
    states = [stream.state_dict() for stream in group]
    merged = {split: each for state in states for split, each in state["states"].items()}
    assert len(merged) == SPLITS
    new = streams(ranks, **options)
    for stream in new:
        stream.load_state_dict({**states[0], "states": {split: merged[split] for split in stream.own_splits}})
    return new


@pytest.mark.parametrize("documents", [10**9, 9])
def test_other_ranks_and_batches_continue_with_the_samples_of_the_run_that_was_not_stopped(documents):
    def make(split):
        return Packer(split, documents + split if documents < 100 else documents)  # splits end at different times

    # No position but the first is a multiple of the next number of ranks' round, or of the number of splits.
    parts = [(2, 3, 5), (4, 5, 3), (3, 7, 4), (1, 1, 5), (12, 2, 3), (6, 1, 7), (1, 11, 3)]  # ranks, batch, steps
    total = sum(ranks * size * count for ranks, size, count in parts)
    expected = take(streams(1, make=make), 1, total)
    assert [sample[0][0] for sample in expected] == [k % SPLITS for k in range(total)], "round robin over the splits"
    group, taken = streams(parts[0][0], make=make), []
    for ranks, size, count in parts:
        group = resumed(group, ranks, make=make)
        taken += take(group, size, count)
    assert taken == expected
    assert sorted(taken) == sorted(expected)
    assert group[0].position == total


def test_the_interrupted_run_goes_on_without_its_states_being_touched():
    group = streams(2)
    take(group, 3, 4)
    copies = resumed(group, 4)
    assert take(copies, 3, 5) == take(group, 6, 5)


def test_a_split_that_ends_begins_again_and_one_without_samples_is_an_error():
    class Numbers:
        def __init__(self, split):
            self.split, self.number = split, 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.number == 2 + self.split:
                raise StopIteration
            self.number += 1
            return self.number + 10 * self.split

        def state_dict(self):
            return self.number

        def load_state_dict(self, state):
            self.number = state

    (stream,) = streams(1, splits=2, make=Numbers)
    assert take([stream], 1, 12) == [1, 11, 2, 12, 1, 13, 2, 11, 1, 12, 2, 13]
    (again,) = streams(1, splits=2, make=Numbers)
    again.load_state_dict(stream.state_dict())  # both splits are at their end
    assert take([again], 1, 2) == [1, 11]
    (empty,) = streams(1, splits=3, make=lambda split: Packer(split, 0 if split == 2 else 9))
    with provoked("data/elastic_stream.py", "begin the run anew with fewer splits"):
        next(empty.batches(3))
    (fewer,) = streams(1, splits=2, make=lambda split: Packer(split, 9))
    assert len(next(fewer.batches(3))) == 3


def test_readers_may_be_generators_over_their_own_state():
    class Counter:
        def __init__(self, split):
            self.split, self.number = split, 0

        def __iter__(self):
            while True:
                self.number += 1
                yield self.split, self.number

        def state_dict(self):
            return self.number

        def load_state_dict(self, state):
            self.number = state

    group = streams(3, make=Counter)
    taken = take(group, 5, 2)
    taken += take(resumed(group, 4, make=Counter), 2, 3)
    assert taken == [(k % SPLITS, k // SPLITS + 1) for k in range(len(taken))]


def test_batches_are_collated():
    (stream,) = streams(1)
    batch = next(stream.batches(2, collate=np.array))
    assert batch.shape == (2, 4, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loader_of_paddle_is_refused():
    (stream,) = streams(1)
    with provoked("data/elastic_stream.py", "iterate over stream.batches(batch_size), without a loader"):
        next(iter(paddle.io.DataLoader(stream, batch_size=4)))
    assert len(next(stream.batches(4))) == 4


def test_a_number_of_ranks_that_does_not_divide_the_splits_is_refused():
    with provoked("data/elastic_stream.py", "use one of these numbers of ranks; a new run may have") as error:
        streams(5)
    assert "expected 1, 2, 3, 4, 6, 12 ranks (data parallelism times sharding); got 5" in str(error.value)
    group = resumed(streams(4), 6)
    assert take(group, 1, 2) == take(streams(2), 1, 6)
    assert take(streams(5, splits=10), 1, 2) == take(streams(1, splits=10), 10, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"splits": 24}, "the stream has another number of splits: splits was 12 when it was saved, and is 24 here"),
        ({"name": "corpus 2"}, "the data has another name: name was corpus 1 when it was saved, and is corpus 2"),
    ],
)
def test_the_state_of_another_stream_is_refused(options, words):
    (old,), (new,) = streams(1, name="corpus 1"), streams(1, **{"name": "corpus 1", **options})
    next(old.batches(5))
    next(new.batches(2))
    with provoked("data/elastic_stream.py", "make the stream as in the run that saved it, or begin") as error:
        new.load_state_dict(old.state_dict())
    assert f"does not continue here: {words}" in str(error.value)
    assert new.position == 2
    (same,) = streams(1, name="corpus 1")
    same.load_state_dict(old.state_dict())
    assert take([same], 1, 7) == take([old], 1, 7)


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, [1]])
def test_what_is_no_state_is_refused(state):
    (stream,) = streams(1)
    with pytest.raises(ValidationError, match="no state of an ElasticStream"):
        stream.load_state_dict(state)


def test_a_split_whose_state_is_not_there_is_refused():
    (stream,) = streams(1)
    state = stream.state_dict()
    del state["states"][5]
    with pytest.raises(ValidationError, match="the states of splits 5 are not there"):
        stream.load_state_dict(state)


def test_a_batch_that_an_error_interrupted_is_not_half_taken():
    class Broken(Packer):
        def __next__(self):
            if self.split == 7 and self.next > 3 and broken:
                raise OSError("the disk is gone")
            return super().__next__()

    broken = True
    (stream,) = streams(1, make=Broken)
    next(stream.batches(SPLITS))
    saved = stream.state_dict()
    with pytest.raises(OSError, match="the disk is gone"):
        take([stream], SPLITS, 20)
    with provoked("data/elastic_stream.py", "restore the last checkpoint, with data= this stream"):
        stream.state_dict()
    with pytest.raises(ValidationError, match="an error has interrupted a batch"):
        next(stream.batches(1))
    broken = False
    stream.load_state_dict(saved)
    assert take([stream], SPLITS, 2) == take(streams(1), SPLITS, 3)[SPLITS:]


def test_a_reader_without_a_state_is_refused():
    (stream,) = streams(1, make=lambda split: iter(range(split)))
    with provoked("data/elastic_stream.py", "return an object that is iterable, and has state_dict()") as error:
        next(stream.batches(1))
    assert "make(0) returned a range_iterator without state_dict, load_state_dict" in str(error.value)
    assert len(next(streams(1)[0].batches(1))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"splits": 0}, "splits has to be an integer from 1"),
        ({"splits": 2.0}, "splits has to be an integer from 1"),
        ({"num_replicas": True}, "num_replicas has to be an integer from 1"),
        ({"rank": 2}, "rank has to be an integer from 0 to 1"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ValidationError, match=words):
        fc.ElasticStream(Packer, **{"splits": 4, "num_replicas": 2, "rank": 0, **arguments})
    with pytest.raises(ValidationError, match="batch_size has to be an integer from 1"):
        streams(1)[0].batches(0)


def test_a_checkpoint_has_the_states_of_the_splits_and_a_load_reads_those_it_needs(tmp_path):
    (stream,) = streams(1, name="corpus")
    expected = take(streams(1), 1, 60)
    assert take([stream], 5, 3) == expected[:15]
    layer = paddle.nn.Linear(2, 2)
    fc.save(tmp_path, model=layer, data=stream)
    keys = {key for key in read_keys(tmp_path) if key.startswith("extra_state.data.")}
    expected_keys = {f"extra_state.data.split{split}" for split in range(SPLITS)}
    assert keys == expected_keys | {f"{key}.nest.0" for key in expected_keys}, "tensors are stored as such"
    state = fc.load_extra_state(tmp_path, splits=[3])
    assert {key.split(".")[2] for key in state if key.startswith("extra_state.data.")} == {"split3"}
    # Rank 1 of 3 reads 4 of the 12 splits.
    other = fc.ElasticStream(Packer, SPLITS, 3, 1, name="corpus")
    report = fc.load(tmp_path, model=layer, data=other)
    assert "data" in report.extra.restored
    assert list(itertools.chain(*itertools.islice(other.batches(5), 3))) == expected[16:60:3][:15]
    with pytest.raises(ValidationError, match="data is saved and would not be restored: the stream has another number"):
        fc.load(tmp_path, model=layer, data=fc.ElasticStream(Packer, 24, 1, 0, name="corpus"))
    sampler = fc.ElasticBatchSampler(range(10), 2, 1, 0)
    with pytest.raises(ValidationError, match="no state of an ElasticBatchSampler"):
        fc.load(tmp_path, model=layer, data=sampler)
    by_hand = fc.ElasticStream(Packer, SPLITS, 1, 0, name="corpus")
    fc.restore_extra_state(fc.load_extra_state(tmp_path), data=by_hand)
    assert take([by_hand], 1, 45) == expected[15:]


def read_keys(path):
    from paddle_flexckpt.foreign.formats import SourceDirectory

    return SourceDirectory(path).read_manifest().catalog.keys


def test_a_state_that_is_not_portable_names_the_split(tmp_path):
    class Odd(Packer):
        def state_dict(self):
            return {"file": object()} if self.split == 2 else {}

    with pytest.raises(ValidationError, match=r"extra_state\.data\.split2\.file: a object cannot be part"):
        fc.save(tmp_path, model=paddle.nn.Linear(1, 1), data=streams(1, make=Odd)[0])


def test_the_loop_of_the_documentation_takes_each_sample_once(tmp_path):
    def run(stop):
        def train(step, samples):
            if step == stop:
                raise KeyboardInterrupt
            seen.extend(samples)
            return step + 1

        model = paddle.nn.Linear(1, 1)
        with fc.CheckpointManager(tmp_path, save_when=fc.SaveEvery(2), preemption_signals=()) as manager:
            names = {"fc": fc, "manager": manager, "make_reader": Packer, "train": train, "steps": 8, "step": 0}
            names.update(model=model, optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()))
            exec(code_block("docs/manager.md", "ElasticStream"), names)

    seen = []
    with pytest.raises(KeyboardInterrupt):
        run(stop=6)
    run(stop=None)
    assert seen == next(fc.ElasticStream(Packer, 48, 1, 0).batches(64))
