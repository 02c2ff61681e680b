"""``fc.save`` and ``fc.load``: the objects of a run in one call, under any layout, right or with an error."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.optimizer.lr import CosineAnnealingDecay as Cosine

import paddle_flexckpt as fc
from paddle_flexckpt.manager.whole_run import RunReport
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.documents import docstring_block
from tests.remedies.following import advised, provoked


@pytest.fixture(autouse=True)
def installed():
    yield
    fc.uninstall()


class Run:
    """A small network, an optimizer and a schedule."""

    def __init__(self, seed: int) -> None:
        paddle.seed(seed)
        self.model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 2))
        self.scheduler = Cosine(0.1, 20)
        self.optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=self.model.parameters())

    def parts(self, **more):
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler, **more}

    def train(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            x = paddle.to_tensor(np.random.RandomState(step).randn(8, 4).astype("float32")) + paddle.rand([8, 4])
            loss = (self.model(x) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.scheduler.step()
            losses.append(float(loss))
        return losses


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    run = Run(1)
    run.train(0, 3)
    fc.save(tmp_path, **run.parts(step=3, extra={"best": 0.5}, dataloader={"position": 24}))
    rest = run.train(3, 6)
    other = Run(2)
    report = fc.load(tmp_path, **other.parts())
    assert isinstance(report, RunReport)
    assert (report.step, report.extra.more, report.extra.dataloader) == (3, {"best": 0.5}, {"position": 24})
    assert report.extra.not_restored == {}
    assert other.train(3, 6) == rest


def test_the_example_of_the_docstring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(1)
    names = {"fc": fc, "model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, "step": 7}
    exec(docstring_block("paddle_flexckpt/manager/whole_run.py", "fc.save("), names)
    assert names["step"] == 7


def test_it_is_a_checkpoint_like_any_other(tmp_path):
    """A manager's step is loaded by ``fc.load``, and what ``fc.save`` wrote by ``load_state_dict``."""
    run, other = Run(1), Run(2)
    run.train(0, 2)
    with fc.CheckpointManager(tmp_path / "managed", preemption_signals=()) as manager:
        manager.save(2, **run.parts())
    rest = run.train(2, 4)
    assert fc.load(tmp_path / "managed" / "step_00000002", **other.parts()).step == 2
    assert other.train(2, 4) == rest
    fc.save(tmp_path / "single", model=run.model)
    fc.load_state_dict(other.model.sharded_state_dict(), tmp_path / "single")
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(run.model.parameters(), other.model.parameters()))


def test_a_constant_rate_is_the_saved_one_and_the_log_says_so(tmp_path, caplog):
    model = paddle.nn.Linear(2, 2)
    first, second = (paddle.optimizer.AdamW(rate, parameters=model.parameters()) for rate in (1e-3, 5e-4))
    fc.save(tmp_path, model=model, optimizer=first)
    caplog.set_level("INFO", "paddle_flexckpt")
    fc.load(tmp_path, model=model, optimizer=second)
    assert second.get_lr() == 1e-3
    assert "the constant learning rate is 0.001, as it was saved; it was 0.0005" in caplog.text


def test_the_model_alone(tmp_path):
    run, other = Run(1), Run(2)
    run.train(0, 2)
    fc.save(tmp_path, **run.parts())
    with pytest.raises(fc.ValidationError, match="optimizer_states"):
        fc.load(tmp_path, model=other.model)
    report = fc.load(tmp_path, model=other.model, optimizer_states="ignore")
    assert sorted(report.extra.not_restored) == ["lr_scheduler"]
    assert (other.model[0].weight.numpy() == run.model[0].weight.numpy()).all()


def test_a_scheduler_that_never_was_is_not_missed(tmp_path, caplog):
    model = paddle.nn.Linear(2, 2)
    fc.save(tmp_path, model=model, optimizer=paddle.optimizer.AdamW(1e-3, parameters=model.parameters()))
    report = fc.load(tmp_path, model=model, optimizer_states="ignore")
    assert report.extra.not_restored == {} and "not restored" not in caplog.text


def test_the_log_says_that_a_save_has_no_optimizer(tmp_path, caplog):
    caplog.set_level("INFO", "paddle_flexckpt")
    run, text = Run(1), "without an optimizer: none was given"
    frozen = paddle.nn.Linear(2, 2)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    states = fc.optimizer_sharded_state_dict(run.optimizer, run.model.sharded_state_dict())
    for parts in ({"model": run.model, "optimizer": run.optimizer}, {"model": frozen}, {"state": {"w": np.ones(2)}}):
        fc.save(tmp_path / "with", **parts)
    fc.save(tmp_path / "with", model=run.model, state={key: each for key, each in states.items() if "moment" in key})
    assert text not in caplog.text
    SimulatedWorld(2).run(lambda comm: fc.save(tmp_path / "a", model=run.model, process_group=comm))
    with fc.CheckpointManager(tmp_path / "run", keep=[]) as manager:
        manager.save(3, model=run.model)
    told = [each.getMessage().partition(" is saved ")[0] for each in caplog.records if text in each.getMessage()]
    assert told == [repr(str(tmp_path / "a")), f"step 3 of {tmp_path / 'run'}"]


class Network(paddle.nn.Layer):
    """Some layers, which may lack a bias, and perhaps a head."""

    def __init__(self, layers, bias=None, head=True):
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(4, 4, bias_attr=bias) for _ in range(layers)])
        if head:
            self.head = paddle.nn.Linear(4, 2)


def test_parameters_of_the_models_layers_that_it_lacks_are_a_warning(tmp_path, caplog):
    """Also where the plan of the load is cached; and not where a head is left out, or strict=False asks for nothing."""
    saved = Network(3)
    optimizer = paddle.optimizer.AdamW(parameters=saved.parameters())
    fc.save(tmp_path / "run", model=saved, optimizer=optimizer)
    with fc.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(1, model=saved, optimizer=optimizer)

    def loaded(network, **options):
        caplog.clear()
        options = {"optimizer_states": "ignore", **options}
        report = fc.load(tmp_path / "run", model=network, **options).load
        again = fc.load(tmp_path / "run", model=network, **options).load
        with fc.CheckpointManager(tmp_path / "manager") as manager:
            restored = manager.restore(model=network, **options).load
        assert report.dropped == again.dropped == restored.dropped
        texts = [record.getMessage() for record in caplog.records if "SMALLER" in record.getMessage()]
        assert len(texts) in (0, 3)
        return report.dropped, texts

    dropped, texts = loaded(Network(2))
    assert dropped == ["layers.2.bias", "layers.2.weight"]
    assert texts[0].startswith(
        "THE MODEL IS SMALLER THAN ITS CHECKPOINT: layer 2 of layers.*, 2 tensors: bias, weight: "
    )
    advised("catalog/texts.py", "say it with strict=False: the report lists it as unexpected", texts[0])
    advised("catalog/texts.py", "make the model as it was when it was saved", texts[0])
    advised("catalog/texts.py", "strict=True makes it an error", texts[0])
    with pytest.raises(fc.ValidationError, match=r"no rank asks for layer 2 of layers\.\*, 10 tensors, such as bias"):
        loaded(Network(2), strict=True)
    with provoked("transfer/further_layers.py", "load with strict=False") as caught:
        loaded(Network(5))
    advised("transfer/further_layers.py", "make the model as it was when it was saved", str(caught.value))
    first = fc.load_merged_state_dict(tmp_path / "run")["layers.0.weight"]
    fc.save_state_dict({"layers.0.weight": first}, tmp_path / "renumbered")
    target = {"layers.1.weight": paddle.zeros([4, 4])}
    with provoked(
        "transfer/further_layers.py", "if these layers have other numbers in the source, give AOA statements"
    ):
        fc.load_state_dict(target, tmp_path / "renumbered")
    fc.load_state_dict(target, tmp_path / "renumbered", aoa_config=["layers.0.weight -> layers.1.weight"])
    assert (target["layers.1.weight"] == saved.layers[0].weight).all()
    wider = Network(5)
    before = wider.layers[4].weight.numpy()
    fc.load(tmp_path / "run", model=wider, optimizer_states="ignore", strict=False)
    assert (wider.layers[4].weight.numpy() == before).all()
    assert (wider.layers[2].weight.numpy() == saved.layers[2].weight.numpy()).all()
    dropped, texts = loaded(Network(3, bias=False))
    assert (dropped, len(texts)) == ([f"layers.{number}.bias" for number in range(3)], 3)
    assert loaded(Network(2), strict=False) == (["layers.2.bias", "layers.2.weight"], [])
    for whole in (Network(3), Network(3, head=False)):
        assert loaded(whole) == ([], [])


@pytest.mark.parametrize("kind", ["state", "buffer", "nested"])
def test_what_was_saved_beside_the_model_and_nothing_takes_is_a_warning(tmp_path, caplog, kind):
    """An average of the weights, say; or a buffer that is not persistable any more."""
    run, other = Run(1), Run(2)
    if kind == "buffer":
        run.model.register_buffer("rope", paddle.ones([3]))
        other.model.register_buffer("rope", paddle.ones([3]), persistable=False)
    left = {"state": {"ema": paddle.ones([2])}, "nested": {"ema": dict(run.model.state_dict())}}.get(kind)
    fc.save(tmp_path / "run", **run.parts(state=left))
    with fc.CheckpointManager(tmp_path / "manager", preemption_signals=()) as manager:
        manager.save(1, **run.parts(state=left))

    def told(**options):
        caplog.clear()
        fc.load(tmp_path / "run", **other.parts(**options))
        with fc.CheckpointManager(tmp_path / "manager", preemption_signals=()) as manager:
            manager.restore(**other.parts(**options))
        return [each.getMessage() for each in caplog.records if "NOT EVERYTHING WAS LOADED" in each.getMessage()]

    texts = told()
    assert len(texts) == 2 and all(("rope" if kind == "buffer" else "ema") in text for text in texts)
    advised("catalog/texts.py", "give again what was saved as state=", texts[0])
    assert told(strict=False) == []
    if left is not None:
        assert told(state={"ema": {key: each * 0 for key, each in left["ema"].items()} if kind == "nested" else
                           paddle.zeros([2])}) == []  # fmt: skip
    with pytest.raises(fc.ValidationError, match=r"FC203"):
        told(strict=True)


def test_a_checkpoint_without_extra_state(tmp_path):
    """Weights of another program: the model is loaded; a schedule that would start over is an error."""
    run, other = Run(1), Run(2)
    fc.install()
    shards = run.model.sharded_state_dict()
    fc.save_state_dict({**shards, **run.optimizer.sharded_state_dict(shards)}, tmp_path)
    before = other.model[0].weight.numpy()
    with provoked("manager/restore_targets.py", "give schedule='ignore', and set them to the step") as caught:
        fc.load(tmp_path, **other.parts())
    assert "the checkpoint has no state of lr_scheduler" in str(caught.value)
    assert (other.model[0].weight.numpy() == before).all()
    report = fc.load(tmp_path, **other.parts(schedule="ignore"))
    assert (report.step, report.extra.not_restored) == (None, {"extra_state": "the checkpoint has none"})
    assert report.summary().endswith("not restored: extra_state")
    assert (other.model[0].weight.numpy() == run.model[0].weight.numpy()).all()


@pytest.mark.parametrize("kind", ["published", "one file", "pdparams", "paddle", "torch"])
def test_the_checkpoint_of_another_program(tmp_path, kind):
    run, other = Run(1), Run(2)
    fc.save_state_dict(run.model.state_dict(), tmp_path / "own")
    path = tmp_path / kind
    if kind == "published":
        fc.publish(run.model, path)
    elif kind == "one file":
        fc.publish(run.model, tmp_path / "published")
        path = tmp_path / "published" / "model.safetensors"
    elif kind == "pdparams":
        path = tmp_path / "model.pdparams"
        paddle.save(run.model.state_dict(), str(path))
    else:
        fc.convert_checkpoint(tmp_path / "own", path, format={"paddle": "paddle", "torch": "torch_dcp"}[kind])
    report = fc.load(path, model=other.model)
    assert (report.step, report.extra.not_restored) == (None, {"extra_state": "the checkpoint has none"})
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(run.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize("names", [{"model": None}, {"model": "text"}, {"state": {"w": object}}])
def test_objects_that_cannot_be_saved_are_an_error_that_writes_nothing(tmp_path, names):
    with pytest.raises(fc.CheckpointError, match="cannot save to"):
        fc.save(tmp_path / "new", **names)
    assert not (tmp_path / "new").exists()


def test_an_option_that_the_call_does_not_have_is_named_with_the_likely_one(tmp_path):
    with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'schedular'"):
        fc.save(tmp_path, model=Run(1).model, schedular=None)
    with pytest.raises(TypeError, match="did you mean 'optimizer_states'"):
        fc.load(tmp_path, model=Run(1).model, optimizer_state="ignore")


def test_ranks_that_differ_are_an_error_on_all(tmp_path):
    def work(comm):
        fc.save(tmp_path, state={"w": np.ones(2, np.float32)}, step=comm.rank, process_group=comm, rng=False)

    texts = {str(each) for each in SimulatedWorld(2).run_all(work)}
    assert len(texts) == 1
    assert "step" in texts.pop()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_is_an_error_on_all(tmp_path):
    def work(comm):
        state = {"w": np.ones(2, np.float32) if comm.rank else "text"}
        fc.save(tmp_path, state=state, process_group=comm, rng=False)

    (text,) = {str(each) for each in SimulatedWorld(2).run_all(work)}
    assert "key 'w'" in text or "'w'" in text


def test_several_ids_and_a_save_in_the_background(tmp_path):
    states = [{"w": np.full(3, number, np.float32)} for number in (1, 2)]
    for number, state in enumerate(states):
        saved = fc.save(tmp_path, state=state, unique_id=number, rng=False, async_save=number == 1)
        state["w"][:] = 0  # staged by now
        if isinstance(saved, fc.SaveHandle):
            saved.result(60)
    for unique_id, value in ((0, 1), (None, 2), (1, 2)):
        target = {"w": np.zeros(3, np.float32)}
        fc.load(tmp_path, state=target, unique_id=unique_id)
        assert target["w"].tolist() == [value] * 3


def test_a_checkpoint_that_is_replaced_is_reported_on_all_ranks(tmp_path):
    """Also where the plan of the save is cached."""

    def work(comm):
        reports = []
        for number, unique_id in enumerate([0, 0, 0, None]):
            state = {"w": np.full(3, number, np.float32)}
            reports.append(fc.save(tmp_path, state=state, process_group=comm, rng=False, unique_id=unique_id))
        return [(each.unique_id, each.replaced, "which replaces" in each.summary()) for each in reports]

    expected = [(0, False, False), (0, True, True), (0, True, True), (1, False, False)]
    assert SimulatedWorld(2).run_all(work) == [expected] * 2
    target = {"w": np.zeros(3, np.float32)}
    fc.load(tmp_path, state=target, unique_id=0)
    assert target["w"].tolist() == [2] * 3
    assert fc.save(tmp_path, state=target, rng=False, unique_id=0, async_save=True).result(60).replaced


def samples(position, ranks=1, batch=4, **options):
    sampler = fc.ElasticBatchSampler(range(50), batch, ranks, 0, shuffle=True, **options)
    sampler.position = position
    return sampler


def test_the_position_in_the_data_is_saved_once_and_continues(tmp_path):
    run = Run(1)
    fc.save(tmp_path, **run.parts(step=3), data=samples(24))
    other = samples(0, ranks=3, batch=7)
    report = fc.load(tmp_path, **run.parts(), data=other)
    assert (other.position, "data" in report.extra.restored) == (24, True)


def test_other_data_changes_nothing(tmp_path):
    run = Run(1)
    fc.save(tmp_path, **run.parts(step=3), data=samples(24))
    other, before = samples(8, seed=1), run.model.state_dict()["0.weight"].numpy()
    run.train(0, 1)
    trained = run.model.state_dict()["0.weight"].numpy()
    with pytest.raises(fc.ValidationError, match="data is saved and would not be restored: .* another seed"):
        fc.load(tmp_path, **run.parts(), data=other)
    with pytest.raises(fc.ValidationError, match="data is saved and would not be restored: none was passed"):
        fc.load(tmp_path, **run.parts())
    assert other.position == 8
    assert (run.model.state_dict()["0.weight"].numpy() == trained).all()
    assert (before != trained).any()
    report = fc.load(tmp_path, **run.parts(), data=other, schedule="ignore")
    assert (other.position, report.extra.not_restored["data"][:20]) == (8, "the samples are shuf")


def test_a_checkpoint_without_a_position_does_not_begin_the_data_anew_in_silence(tmp_path):
    run = Run(1)
    fc.save(tmp_path, **run.parts(step=3))
    other = samples(8)
    with provoked("manager/restore_targets.py", "give schedule='ignore', and set the sampler's position"):
        fc.load(tmp_path, **run.parts(), data=other)
    report = fc.load(tmp_path, **run.parts(), data=other, schedule="ignore")
    assert (other.position, report.extra.not_restored["data"]) == (8, "the checkpoint has none")


def test_data_is_a_sampler(tmp_path):
    run = Run(1)
    with provoked("run_state/extra_state.py", "give a loader or a position of another kind as dataloader="):
        fc.save(tmp_path, **run.parts(step=3), data={"position": 3})
    assert not list(tmp_path.iterdir())
    fc.save(tmp_path, **run.parts(step=3), dataloader={"position": 3}, extra={"own": 1})
    assert fc.load(tmp_path, **run.parts()).extra.dataloader == {"position": 3}


def test_an_object_of_another_kind_is_refused_before_anything_is_written(tmp_path):
    """A model given as the optimizer would save no states, and its training could not go on."""
    run = Run(0)
    wrong = {
        "optimizer": [run.model, paddle.optimizer.AdamW],
        "model": [paddle.nn.Linear, run.optimizer],
        "lr_scheduler": [0.1, run.model, Cosine],
        "scaler": [run.optimizer, run.model, 2.0],
    }
    for name, values in wrong.items():
        for value in values:
            with provoked("manager/step_contents.py", ", or leave it out", fc.ValidationError) as caught:
                fc.save(tmp_path / "a", **run.parts(**{name: value}))
            assert f"{name}= is of another kind; got " in str(caught.value)
            with pytest.raises(fc.ValidationError, match=f"{name}= is of another kind"):
                fc.check(**run.parts(**{name: value}))
    assert not (tmp_path / "a").exists()
    fc.save(tmp_path / "a", **run.parts())
    fc.save(tmp_path / "b", model=run.model)
    assert fc.load(tmp_path / "a", **run.parts()).load.keys
