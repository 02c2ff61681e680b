"""What a save would refuse is said before the training starts, in the same words, and nothing is touched."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.run_state import collect_extra_state
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.documents import docstring_block
from tests.manager.samples import listed


@pytest.fixture(autouse=True)
def installed():
    fc.install()
    yield
    fc.uninstall()


def network():
    paddle.seed(3)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Linear(4, 2))
    return model, paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=0.1)


def train(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        x = paddle.to_tensor(np.random.RandomState(step).randn(8, 4).astype("float32"))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, [parameter.numpy().tolist() for parameter in model.parameters()]


def test_the_training_is_the_same_after_a_check(tmp_path):
    model, optimizer = network()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    assert fc.check(model, optimizer) is None
    assert not optimizer._accumulators
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert train(model, optimizer) == train(*network())
    fc.check(model, optimizer)  # with states
    fc.save_state_dict({**(shards := model.sharded_state_dict()), **optimizer.sharded_state_dict(shards)}, tmp_path)


def unruly():
    model, optimizer = network()
    model[2].weight.is_distributed = True
    return {"model": model, "optimizer": optimizer}


def stranger():
    return {"model": network()[0], "optimizer": network()[1]}


def twice():
    return {"model": network()[0], "state": {"0.weight": paddle.zeros([2])}}


def unknown():
    return {"state": {"value": object}}


@pytest.mark.parametrize("case", [unruly, stranger, twice, unknown])
def test_the_words_are_those_of_the_save(tmp_path, case):
    contents, texts = case(), set()
    for call in (
        lambda: fc.check(**contents),
        lambda: fc.CheckpointManager(tmp_path, preemption_signals=(), **contents),
        lambda: fc.CheckpointManager(tmp_path, preemption_signals=()).save(1, **contents),
    ):
        with pytest.raises(fc.CheckpointError) as error:
            call()
        assert str(error.value).startswith("cannot save")
        texts.add(str(error.value).partition(": ")[2])
    assert len(texts) == 1
    assert listed(tmp_path) == []


def rows(comm, start, value=1.0):
    return {"w": fc.ShardedWeight("w", np.full((2, 3), value + comm.rank, np.float32), (2, 3), (4, 3), (start, 0))}


@pytest.mark.parametrize("starts", [(0, 0), (2, 2), (3, 0)], ids=["a hole", "another", "outside"])
def test_what_only_all_ranks_together_can_know(tmp_path, starts):
    def try_both(comm):
        state, texts = rows(comm, starts[comm.rank], value=1.0 - comm.rank), []
        for call in (
            lambda: fc.check(state=state, process_group=comm),
            lambda: fc.save_state_dict(state, tmp_path, comm),
        ):
            with pytest.raises(fc.ValidationError) as error:
                call()
            texts.append(str(error.value).partition(": ")[2])
        return texts

    outcomes = SimulatedWorld(2).run(try_both)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == outcomes[0][1]


def test_a_check_is_one_collective():
    def count(comm):
        fc.check(state=rows(comm, 2 * comm.rank), process_group=comm)
        return comm.collectives

    assert SimulatedWorld(2).run(count) == [1, 1]


def test_a_rank_that_cannot_describe_its_state_is_every_ranks_error():
    def check(comm):
        fc.check(state={"w": np.zeros(3, np.float32) if comm.rank else "nothing"}, process_group=comm)

    (text,) = {str(outcome) for outcome in SimulatedWorld(2).run_all(check)}
    assert "a state dict holds tensors and ShardedWeights only" in text


def test_a_restore_says_what_it_did_in_one_line(tmp_path, caplog):
    model, optimizer = network()
    manager = fc.CheckpointManager(tmp_path, preemption_signals=())
    manager.save(1, model=model, optimizer=optimizer)
    with caplog.at_level("INFO", logger="paddle_flexckpt"):
        caplog.clear()
        manager.restore(model=model, optimizer=optimizer)
        (line,) = [record.message for record in caplog.records if record.name == "paddle_flexckpt"]
    manager.close()
    assert line.startswith("loaded 32 tensors on this rank from ")
    assert "unexpected" not in line


def test_the_dict_of_a_save_is_checked_as_that_save_checks_it(tmp_path):
    model, optimizer = network()
    shards = model.sharded_state_dict()
    state = {**shards, **optimizer.sharded_state_dict(shards), **collect_extra_state(step=3)}
    fc.check(state)
    exec(
        docstring_block("paddle_flexckpt/manager/step_contents.py", "fc.check(model, optimizer)  #"),
        {"fc": fc, "model": model, "optimizer": optimizer, "shards": shards},
    )
    wrong, texts = {**state, "value": object}, []
    for call in (lambda: fc.check(wrong), lambda: fc.save_state_dict(wrong, tmp_path)):
        with pytest.raises(fc.ValidationError) as error:
            call()
        texts.append(str(error.value).partition(": ")[2])
    assert texts[0] == texts[1]
    with pytest.raises(fc.ValidationError, match="Remedy .FC101.: give the dict alone, or the model in its place"):
        fc.check(state, optimizer)
