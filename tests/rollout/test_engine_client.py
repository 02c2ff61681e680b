"""The calls of an engine, and errors that say what to do."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import EngineError, EngineLostError
from paddle_flexckpt.rollout.engine_client import EngineClient
from paddle_flexckpt.rollout.engine_worker import EngineWorker
from tests.rollout.numpy_engine import model_directory, weights
from tests.rollout.stub_engine import StubEngine


@pytest.fixture
def stub(tmp_path):
    engine = StubEngine(model_directory(tmp_path / "base", weights(0)), weights(0), ranks=2)
    yield engine
    engine.close()


def test_the_state_of_all_ranks(stub):
    states = EngineClient(stub.url).status()
    found = [(each["rank"], each["version"], each["accepted"]) for each in states]
    assert found == [(0, "base", "base"), (1, "base", "base")]


def test_an_engine_without_its_routes_says_how_to_start_it(stub):
    stub.developer = False
    with pytest.raises(
        EngineError, match=r"/collective_rpc: 404 .*Remedy \(FC952\): start the engine as docs/rollout.md"
    ):
        EngineClient(stub.url).status()


def test_an_engine_without_the_extension_says_how_to_start_it(stub):
    with pytest.raises(EngineError, match=r"500 .*no attribute 'flex_x'.*--worker-extension-cls"):
        EngineClient(stub.url).workers("flex_x")


def test_nobody_at_the_url():
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/collective_rpc: .*see that the engine runs at this URL"):
        EngineClient("http://127.0.0.1:9/").status()


@pytest.mark.parametrize("answer", [{}, {"results": []}, {"results": [1]}, {"results": [{"rank": 0}]}])
def test_an_answer_of_something_else_is_no_answer(stub, monkeypatch, answer):
    monkeypatch.setattr(stub, "_post_collective_rpc", lambda query, body: (200, answer))
    with pytest.raises(EngineError, match="flex_status has answered"):
        EngineClient(stub.url).status()


def test_another_version_of_the_extension(stub, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.rollout.engine_worker.PROTOCOL", 7)
    with pytest.raises(EngineError, match=r"has protocol 7, and this library 3.*install the same version"):
        EngineClient(stub.url).status()


def test_an_older_extension_is_told_apart_by_a_call_that_it_takes(stub, monkeypatch):
    """It knows no named arguments: a call with some would raise on its workers, and the engine would lose count."""
    reply, client = stub._post_collective_rpc, EngineClient(stub.url)

    def old(query, body):
        assert not body.get("kwargs")
        status, answer = reply(query, body)
        for each in answer["results"]:
            del each["call"], each["owner"], each["silent"]
            each["protocol"] = 1
        return status, answer

    monkeypatch.setattr(stub, "_post_collective_rpc", old)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"has protocol 1, and this library 3.*FC952\): install the same version"):
            client.status()
    assert stub.paused is None


def test_answers_that_name_no_call_are_of_another_protocol(stub, monkeypatch):
    client, reply = EngineClient(stub.url), stub._post_collective_rpc

    def nameless(query, body):
        status, answer = reply(query, body)
        for each in answer["results"]:
            del each["call"]
        return status, answer

    client.status()
    monkeypatch.setattr(stub, "_post_collective_rpc", nameless)
    with pytest.raises(EngineError, match=r"has protocol 1, and this library 3.*FC952\): install the same"):
        client.workers("flex_discard")
    assert stub.paused is None


def test_data_parallel_engines_are_refused(stub, monkeypatch):
    status = EngineWorker.status
    monkeypatch.setattr(EngineWorker, "status", lambda self, *d: {**status(self, *d), "data_parallel_size": 2})
    with pytest.raises(EngineError, match=r"several data-parallel engines.*FC952\): start a server for each"):
        EngineClient(stub.url).status()


def test_an_engine_that_has_to_be_restarted(stub):
    stub.workers[1]._needs_restart = True
    with pytest.raises(EngineLostError, match=r"must not serve. Remedy \(FC953\): start the engine again"):
        EngineClient(stub.url).status()


def test_pause_and_resume(stub):
    client = EngineClient(stub.url)
    assert not client.is_paused()
    client.pause()
    assert (client.is_paused(), stub.paused) == (True, "keep")
    client.resume()
    assert not client.is_paused()


def test_the_version_is_set_and_the_prefix_cache_dropped(stub):
    EngineClient(stub.url).set_version("v7")
    assert stub.calls == ["/reset_prefix_cache", "/update_weight_version"]
    assert stub.weight_version == "v7"


def test_late_answers_are_told_from_others(stub, monkeypatch):
    """After a timeout of its own, the engine gives each call the answers of the one before."""
    client, answers = EngineClient(stub.url), []
    reply = stub._post_collective_rpc

    def late(query, body):
        assert "timeout" not in body
        answers.append(reply(query, body))
        return answers[-2]

    client.status()
    answers.append(reply({}, {"method": "flex_status"}))
    monkeypatch.setattr(stub, "_post_collective_rpc", late)
    with pytest.raises(EngineLostError, match=r"flex_status was given the answers of another call.*FC953"):
        client.status()
    assert stub.paused == "keep"
