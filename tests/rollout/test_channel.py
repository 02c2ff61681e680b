"""A channel of one process to an engine of two ranks: bits, counts, and every way to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.catalog.dtypes import dtype_of
from paddle_flexckpt.loading import weight_channel
from paddle_flexckpt.rollout.authenticated import SECRET
from paddle_flexckpt.rollout.receiver import Receiver
from paddle_flexckpt.rollout.segment import SegmentDirectory
from paddle_flexckpt.rollout.switch import SwitchProcess
from tests.rollout.numpy_engine import model_directory, weights
from tests.rollout.sender import PLACES
from tests.rollout.stub_engine import StubEngine

pytestmark = pytest.mark.paddle


@pytest.fixture
def stub(tmp_path):
    engine = StubEngine(model_directory(tmp_path / "base", weights(0)), weights(0), ranks=2)
    yield engine
    engine.close()
    for name in segments(engine.url):
        os.unlink(f"/dev/shm/{name}")


def segments(url):
    channel = fc.WeightChannel(url)._channel
    return sorted(name for name in os.listdir("/dev/shm") if channel in name)


def tensors(seed):
    return {name: paddle.to_tensor(value) for name, value in weights(seed).items()}


def change(model, seed):
    for name, value in weights(seed).items():
        model[name].set_value(value)


# -- what a push does --------------------------------------------------------------------------------------------------


def test_pushes_of_a_model_whose_values_change(stub):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    reports = []
    for seed in (1, 2, 3, 4):
        change(model, seed)
        reports.append(channel.push(model))
        assert stub.holds(weights(seed))
        assert stub.weight_version == str(seed)
    total = sum(value.nbytes for value in weights(0).values())
    assert [each.planned for each in reports] == [True, False, False, False]
    assert [each.recycled for each in reports] == [False, False, True, True]
    assert {(each.keys, each.total_bytes, each.bytes_written) for each in reports} == {(4, total, total)}
    assert set(reports[0].seconds) == {"write", "stage", "pause", "total"}
    # The version that is served, and the one before, whose memory is used next.
    assert len(segments(stub.url)) == 2
    channel.close()
    assert len(segments(stub.url)) == 1
    channel.close()


def test_strided_tensors_are_read_again_at_each_push(stub):
    """A strided host tensor is copied to be read; the copy of one push must not serve the next."""
    channel, base = fc.WeightChannel(stub.url), {name: value.T.copy() for name, value in weights(1).items()}
    model = {name: value.T for name, value in base.items()}
    for seed in (1, 2):
        for name, value in weights(seed).items():
            base[name][:] = value.T
        channel.push(model)
        assert stub.holds(weights(seed))
    for name, value in weights(3).items():
        base[name][:] = value.T
    assert not channel.verify(model).is_equal


def test_another_directory(stub, tmp_path):
    report = fc.WeightChannel(stub.url, directory=str(tmp_path)).push(tensors(1))
    assert stub.holds(weights(1))
    assert report.planned
    assert [name for name in os.listdir(tmp_path) if name.startswith("flexckpt-")]
    assert segments(stub.url) == []


def test_a_second_push_plans_nothing_and_agrees_in_64_bytes(stub, monkeypatch):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    sent = []
    kind = type(channel._comm)
    gather = kind.all_gather
    monkeypatch.setattr(kind, "all_gather", lambda self, data: sent.append(data) or gather(self, data))
    monkeypatch.setattr(weight_channel, "PushedWeights", None)
    channel.push(model)
    # The notice; that the segment is open (its path), written, and sealed (its digest); the outcome.
    assert len(sent) == 5
    assert len(sent[0]) <= 64


def test_the_engine_serves_until_the_segment_is_staged(stub):
    channel = fc.WeightChannel(stub.url)
    channel.push(tensors(1))
    assert stub.calls.index("/pause") > stub.calls.index("flex_stage")


@pytest.mark.parametrize("call", ["flex_stage", "flex_commit"])
def test_a_segment_that_is_changed_after_it_was_written_is_not_served(stub, receiver, call):
    channel, model = fc.WeightChannel(stub.url, **receiver), tensors(1)
    channel.push(model)
    (before,) = segments(stub.url)

    def overwrite():
        (name,) = {*segments(stub.url)} - {before}
        path = Path("/dev/shm", name)
        assert path.stat().st_mode & 0o777 == 0o400
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"evil")

    change(model, 2)
    stub.faults[call] = [overwrite]
    with pytest.raises(fc.EngineError, match="has changed since it was written"):
        channel.push(model)
    assert stub.holds(weights(1))
    assert segments(stub.url) == [before]
    channel.push(model)
    assert stub.holds(weights(2))


def test_a_push_may_go_on_beside_the_training(stub):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    held = threading.Event()
    stub.faults["flex_stage"] = [lambda: held.wait(60) and None]
    handle = channel.push(model, version="one", wait=False)
    change(model, 2)  # the training goes on
    assert not handle.is_done()
    held.set()
    assert handle.result().version == "one"
    assert handle.is_done()
    assert handle.result() is handle.result()
    assert stub.holds(weights(1))
    channel.push(model, wait=False)
    channel.push(model)  # waits for the one before
    assert stub.holds(weights(2))
    assert stub.weight_version == "3"


def test_a_handle_raises_what_failed_each_time(stub):
    channel = fc.WeightChannel(stub.url)
    stub.faults["flex_commit"] = [500]
    handle = channel.push(tensors(1), wait=False)
    for _ in range(2):
        with pytest.raises(fc.CheckpointError, match="injected fault"):
            handle.result()
    channel.push(tensors(1))
    assert stub.holds(weights(1))


def test_observers_are_told_of_each_push(stub):
    channel, model, events = fc.WeightChannel(stub.url), tensors(1), []
    with fc.observe(events.append):
        report = channel.push(model)
        handle = channel.push(model, wait=False)
        assert len(events) == 1
        later = handle.result()
        assert handle.result() is later
        stub.faults["flex_commit"] = [500]
        handle = channel.push(model, wait=False)
        with pytest.raises(fc.EngineError):
            channel.push(model)  # what failed is the push before
        stub.close()
        with pytest.raises(fc.EngineError):
            channel.push(model)
    assert [(each.call, each.path, each.report) for each in events] == [
        ("push", stub.url, report),
        ("push", stub.url, later),
        ("push", stub.url, None),
        ("push", stub.url, None),
    ]
    assert [each.error_type for each in events] == ["", "", "EngineError", "EngineError"]
    assert events[1].seconds >= later.seconds["write"]


def test_several_engines_get_each_version(stub, tmp_path):
    second = StubEngine(str(tmp_path / "base"), weights(0), ranks=2)
    channel, model = fc.WeightChannel([stub.url, second.url]), tensors(1)
    try:
        for seed in (1, 2, 3):
            change(model, seed)
            report = channel.push(model)
            assert (stub.holds(weights(seed)), second.holds(weights(seed))) == (True, True)
        assert (report.url, report.recycled) == (f"{stub.url}, {second.url}", True)
        compared = channel.verify(model)
        assert (compared.is_equal, compared.engine_ranks, compared.live_compared) == (True, 4, 16)
        change(model, 4)
        second.engines[0].failing_loads = [1]
        with pytest.raises(fc.EngineError, match=f"{second.url}: version 4 was not loaded"):
            channel.push(model)
        assert (stub.holds(weights(3)), second.holds(weights(3))) == (True, True)
        second.restart()
        channel.push(model)
        assert (stub.holds(weights(4)), second.holds(weights(4))) == (True, True)
    finally:
        second.close()
        for name in os.listdir("/dev/shm"):
            if channel._channel in name:
                os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize("urls", [["http://a", "http://a"], ["http://a", "http://a/"]])
def test_each_engine_is_named_once(urls):
    with pytest.raises(fc.ValidationError, match=r"give each engine's URL once. Remedy \(FC101\)"):
        fc.WeightChannel(urls)


def test_an_empty_list_of_engines_is_refused():
    with pytest.raises(fc.ValidationError, match=r"url=\[\]: give the URL of an engine. Remedy \(FC101\)"):
        fc.WeightChannel([])


def test_requests_under_way_end_well(stub):
    """One token comes from the old version, the next ones from the new: as the engine documents ``mode=keep``."""
    from tests.rollout.engine_calls import call

    channel, answers = fc.WeightChannel(stub.url), []
    stub.steps = 1
    body = {"prompt": [1, 2], "max_tokens": 3}
    request = threading.Thread(target=lambda: answers.append(call(stub.url, "/v1/completions", body)))
    request.start()
    stub.wait_until(lambda: stub.served == 1)
    old = stub.digest()
    channel.push(tensors(1))
    stub.allow(2)
    request.join()
    assert answers[0][1]["choices"] == [{"text": " ".join([old, old, *[stub.digest()] * 2]), "finish_reason": "length"}]


# -- names, types, computed tensors ------------------------------------------------------------------------------------

STATEMENTS = {
    "aoa_statements": [
        "q^T -> attn.q",
        "up, gate -> mlp.up_gate, axis=0",
        "norm -> norm, dtype='bfloat16'",
        "scale -> scale, scale=2",
    ]
}


def statement_model(seed):
    rng = np.random.default_rng(seed)
    shapes = {"q": (6, 4), "up": (4, 3), "gate": (4, 3), "norm": (8,), "scale": (6, 2)}
    return {name: paddle.to_tensor(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}


@pytest.fixture(params=["here", "by a receiver"])
def receiver(request, tmp_path, monkeypatch):
    """Options of a channel whose ranks are on the engine's machine, or on another."""
    if request.param == "here":
        yield {}
        return
    monkeypatch.setenv(SECRET, "a common secret.")
    monkeypatch.setattr(weight_channel.WeightChannel, "_own_place", lambda self: b"another machine")
    server = Receiver("127.0.0.1", 0, b"a common secret.")
    thread = threading.Thread(target=server.run)
    thread.start()
    yield {"receiver": server.address}
    server.close()
    thread.join()


def test_what_statements_make_is_what_publish_writes(tmp_path, receiver):
    published = []
    for seed in (0, 1, 2, 3):
        fc.publish(statement_model(seed), tmp_path / str(seed), aoa_config=STATEMENTS)
        published.append(load_file(tmp_path / str(seed) / "model.safetensors"))
    stub = StubEngine(str(tmp_path / "0"), published[0], 2)
    try:
        model = statement_model(0)
        channel = fc.WeightChannel(stub.url, aoa_config=STATEMENTS, **receiver)
        for seed in (1, 2, 3):
            for name, value in statement_model(seed).items():
                model[name].set_value(value)
            report = channel.push(model)
            assert report.bytes_written == report.total_bytes == sum(each.nbytes for each in published[0].values())
            assert stub.holds(published[seed])
            compared = channel.verify(model)
            assert compared.is_equal
            assert (compared.keys, compared.live_compared) == (4, 8)
        assert published[0]["norm"].dtype == dtype_of("bfloat16").numpy
        assert report.recycled
    finally:
        stub.close()
        SegmentDirectory().forget()
        for name in segments(stub.url):
            os.unlink(f"/dev/shm/{name}")


def test_a_prefix_is_removed(stub):
    model = {f"policy.{name}": value for name, value in tensors(1).items()}
    fc.WeightChannel(stub.url, prefix="policy").push({**model, "critic.head": paddle.zeros([2])})
    assert stub.holds(weights(1))


# -- comparison --------------------------------------------------------------------------------------------------------


def test_verify_names_what_differs(stub):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    report = channel.verify(model)
    assert (report.is_equal, report.engine_ranks, report.keys, report.live_compared) == (True, 2, 4, 8)
    stub.engines[1].model["head"][0, 0] += 1
    report = channel.verify(model)
    assert (report.different, report.live_different, report.is_equal) == ([], ["head"], False)
    stub.engines[1].model["head"][0, 0] -= 1
    model["embed"].set_value(weights(2)["embed"])
    report = channel.verify(model)
    assert (report.different, report.is_equal) == (["embed"], False)
    assert "differs from version 1 in embed" in report.summary()


def test_verify_before_a_push_or_of_another_model(stub):
    channel = fc.WeightChannel(stub.url)
    with pytest.raises(fc.ValidationError, match=r"not the one that was pushed last. Remedy \(FC101\): push it first"):
        channel.verify(tensors(1))
    channel.push(tensors(1))
    with pytest.raises(fc.ValidationError, match="push it first"):
        channel.verify(tensors(1))


def test_verify_of_an_engine_that_was_started_again(stub):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    stub.restart()
    with pytest.raises(fc.CheckpointError, match="the weights were not compared.*base"):
        channel.verify(model)
    channel.push(model)
    assert channel.verify(model).is_equal


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"head": paddle.zeros([8, 2])}, "another than that of the engine's checkpoint.*'head'|'head'.*engine's"),
        ({"head": paddle.zeros([8, 6], dtype="float64")}, "'head'"),
        ({"head": None}, "got no such tensor"),
        ({"more": paddle.zeros([8, 2])}, "expected no such tensor"),
    ],
)
def test_a_model_of_another_form_is_refused_while_the_engine_serves(stub, changed, text):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    wrong = {name: value for name, value in {**model, **changed}.items() if value is not None}
    with pytest.raises(fc.CheckpointError, match=text):
        channel.push(wrong)
    assert stub.holds(weights(1))
    assert stub.calls.count("/pause") == 1
    change(model, 2)
    assert channel.push(model).planned
    assert stub.holds(weights(2))


def test_a_full_memory(stub, monkeypatch):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)

    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        change(model, 2)
        with pytest.raises(fc.CheckpointError, match=r"bytes of shared memory are needed.*FC402"):
            channel.push(model)
    assert stub.holds(weights(1))
    assert len(segments(stub.url)) == 1
    channel.push(model)
    assert stub.holds(weights(2))


def test_nobody_at_the_url_costs_no_memory(stub):
    stub.close()
    with pytest.raises(fc.CheckpointError, match="FC952"):
        fc.WeightChannel(stub.url).push(tensors(1))
    assert segments(stub.url) == []


def test_another_trainer_takes_over(stub):
    first, second = fc.WeightChannel(stub.url), fc.WeightChannel(stub.url)
    for channel, seed in ((first, 1), (first, 2), (second, 3), (first, 4), (second, 5)):
        assert not channel.push(tensors(seed)).recycled
        assert stub.holds(weights(seed))
    assert len(segments(stub.url)) == 1


def test_an_engine_that_was_started_again_gets_everything(stub):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    channel.push(model)
    stub.restart()
    change(model, 3)
    report = channel.push(model)
    assert (report.planned, report.recycled) == (False, False)
    assert stub.holds(weights(3))
    assert channel.verify(model).is_equal


@pytest.mark.parametrize("end", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_sender_that_is_killed(stub, place, end):
    fc.WeightChannel(stub.url).push(tensors(1))
    before = stub.calls.count("/resume")
    command = [sys.executable, "-m", "tests.rollout.sender", stub.url, place, end]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert killed.returncode == -9, killed.stderr
    # The request was sent: the switch goes on by itself.
    switched = (place, end) == ("request", "after") or place in ("result", "report")
    if switched:
        stub.wait_until(lambda: stub.calls.count("/resume") > before)
    assert stub.holds(weights(2 if switched else 1))
    assert stub.paused is None
    channel, model = fc.WeightChannel(stub.url), tensors(3)
    channel.push(model)
    assert stub.holds(weights(3))
    assert channel.verify(model).is_equal
    assert len(segments(stub.url)) == 1


def test_a_switch_that_is_killed(stub, monkeypatch):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    channel.push(model)
    processes = []
    start = SwitchProcess.__init__
    monkeypatch.setattr(SwitchProcess, "__init__", lambda self, *a: processes.append(self) or start(self, *a))
    stub.faults["flex_commit"] = [lambda: processes[0]._process.kill()]
    change(model, 2)
    with pytest.raises(fc.CheckpointError, match=r"was killed. Remedy \(FC952\): push again"):
        channel.push(model)
    for worker in stub.workers:
        worker._heard -= 60  # its owner has said nothing for a minute
    change(model, 3)
    channel.push(model)
    assert stub.holds(weights(3))
    assert stub.paused is None


def test_a_switch_that_is_killed_before_it_gets_its_request(stub, monkeypatch):
    channel, model = fc.WeightChannel(stub.url), tensors(1)
    begin = SwitchProcess.begin

    def killed(self, *request):
        self._process.kill()
        self._process.wait()
        begin(self, *request)

    with monkeypatch.context() as patch:
        patch.setattr(SwitchProcess, "begin", killed)
        with pytest.raises(fc.EngineError, match=r"was killed. Remedy \(FC952\): push again"):
            channel.push(model)
    channel.push(model)
    assert stub.holds(weights(1))


def test_a_switch_that_cannot_start_is_an_error_of_the_push(stub, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.rollout.switch.sys.executable", "/nothing")
    with pytest.raises(fc.CheckpointError, match="/nothing"):
        fc.WeightChannel(stub.url).push(tensors(1))


# -- a receiver on the engine's machine --------------------------------------------------------------------------------


def test_a_rank_elsewhere_needs_a_receiver(stub, monkeypatch):
    monkeypatch.setattr(weight_channel.WeightChannel, "_own_place", lambda self: b"another machine")
    with pytest.raises(fc.ValidationError, match=r"on another machine than rank 0. Remedy \(FC951\): run"):
        fc.WeightChannel(stub.url).push(tensors(1))


def test_a_push_that_fails_leaves_no_memory_on_the_engines_machine(stub, receiver):
    channel, model = fc.WeightChannel(stub.url, **receiver), tensors(1)
    for before in (0, 1):
        stub.faults["flex_commit"] = [500]
        with pytest.raises(fc.EngineError, match="injected fault"):
            channel.push(model)
        assert len(segments(stub.url)) == before
        with pytest.raises(fc.EngineError, match="not fit"):
            channel.push({**model, "more": paddle.zeros([2])})
        assert len(segments(stub.url)) == before
        channel.push(model)
    assert stub.holds(weights(1))
    channel.close()
    assert len(segments(stub.url)) == 1


def test_a_receiver_beside_another_engine(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_channel.WeightChannel, "_own_place", lambda self: b"another machine")
    monkeypatch.setenv(SECRET, "a common secret.")
    server = Receiver("127.0.0.1", 0, b"a common secret.", str(tmp_path))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with pytest.raises(fc.ValidationError, match="another directory of shared memory than the engine"):
            fc.WeightChannel(stub.url, receiver=server.address).push(tensors(1))
    finally:
        server.close()
        thread.join()


def test_a_receiver_that_is_killed(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where the receiver makes a secret
    monkeypatch.setattr(weight_channel.WeightChannel, "_own_place", lambda self: b"another machine")

    def start():
        command = [sys.executable, "-m", "paddle_flexckpt", "receive", "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        return process, process.stderr.readline().split()[2]

    process, address = start()
    channel, model = fc.WeightChannel(stub.url, receiver=address), tensors(1)
    try:
        for seed in (1, 2):
            change(model, seed)
            channel.push(model)
        process.kill()
        process.communicate()
        with pytest.raises(fc.CheckpointError, match=r"the receiver at .*Remedy \(FC951\)"):
            channel.push(model)
        assert stub.holds(weights(2))
        process, address = start()
        channel = fc.WeightChannel(stub.url, receiver=address)
        change(model, 3)
        channel.push(model)
        assert stub.holds(weights(3))
        assert len(segments(stub.url)) == 1
    finally:
        process.kill()
        process.communicate()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_checked(stub):
    with pytest.raises(fc.ValidationError, match="kind"):
        fc.WeightChannel(stub.url, kind="other")
    with pytest.raises(TypeError, match="did you mean 'receiver'"):
        fc.WeightChannel(stub.url, recevier="x")
    with pytest.raises(fc.ValidationError, match="coordinator_rank"):
        fc.WeightChannel(stub.url, coordinator_rank=3).push(tensors(1))
