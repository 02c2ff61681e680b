"""The stub answers as the engine does."""

from __future__ import annotations

import http.client
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.engine_calls import RefusedError, call, push, rpc
from tests.rollout.numpy_engine import model_directory, segment, weights
from tests.rollout.stub_engine import StubEngine

OLD, NEW = weights(1), weights(2)


@pytest.fixture(params=[1, 2])
def stub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StubEngine]:
    engine = StubEngine(model_directory(tmp_path / "model", OLD), OLD, request.param)
    yield engine
    engine.close()


@pytest.fixture
def new(tmp_path: Path) -> str:
    return segment(tmp_path / "new.safetensors", NEW)


def complete(stub: StubEngine, tokens: int = 2) -> list[str]:
    status, answer = call(stub.url, "/v1/completions", {"prompt": [1, 2], "max_tokens": tokens})
    assert status == 200
    return answer["choices"][0]["text"].split()


def test_a_push_reaches_all_ranks_and_the_prefix_cache(stub: StubEngine, new: str) -> None:
    old = stub.digest()
    assert complete(stub) == [old] * 3
    assert [each["released"] for each in push(stub.url, "1", new)] == [True] * len(stub.engines)
    assert stub.holds(NEW)
    assert complete(stub) == [stub.digest()] * 3 != [old] * 3
    assert call(stub.url, "/weight_info", method="GET") == (200, {"weight_version": "1"})
    assert [each["version"] for each in rpc(stub.url, "flex_status")] == ["1"] * len(stub.engines)
    assert stub.calls.count("flex_commit") == 1


def test_without_a_reset_a_cached_prompt_is_of_the_old_weights(stub: StubEngine, new: str) -> None:
    old = stub.digest()
    complete(stub)
    call(stub.url, "/pause?mode=keep")
    rpc(stub.url, "flex_stage", "1", new)
    rpc(stub.url, "flex_commit", "1")
    call(stub.url, "/resume")
    assert complete(stub) == [old, stub.digest(), stub.digest()]


def test_a_commit_that_fails_on_one_rank_is_rolled_back_on_all(stub: StubEngine, new: str) -> None:
    stub.engines[-1].failing_loads = [2]
    with pytest.raises(RefusedError, match=rf"^rank {len(stub.engines) - 1}: RuntimeError: injected fault"):
        push(stub.url, "1", new)
    assert stub.holds(OLD)
    assert stub.paused is None
    push(stub.url, "1", new)
    assert stub.holds(NEW)


def test_a_request_under_way_stands_still_during_a_pause(stub: StubEngine, new: str) -> None:
    old = stub.digest()
    stub.steps = 2
    words: list[str] = []
    request = threading.Thread(target=lambda: words.extend(complete(stub, 5)))
    request.start()
    stub.wait_until(lambda: stub.served == 2)
    call(stub.url, "/pause?mode=keep")
    assert call(stub.url, "/reset_prefix_cache")[1] == {"success": False}
    call(stub.url, "/resume")
    push(stub.url, "1", new)
    stub.allow(3)
    request.join()
    assert words == [old] * 3 + [stub.digest()] * 3


def test_a_pause_aborts_requests_where_it_is_told_to(stub: StubEngine) -> None:
    stub.steps = 1
    answers: list[tuple[int, dict]] = []
    body = {"prompt": [1], "max_tokens": 9}
    request = threading.Thread(target=lambda: answers.append(call(stub.url, "/v1/completions", body)))
    request.start()
    stub.wait_until(lambda: stub.served == 1)
    call(stub.url, "/pause?mode=abort")
    request.join()
    assert answers[0][1]["choices"][0]["finish_reason"] == "abort"


def test_faults_of_routes(stub: StubEngine, new: str) -> None:
    stub.faults["/pause"] = [500]
    assert call(stub.url, "/pause?mode=keep")[0] == 500
    assert stub.paused is None
    stub.faults["flex_stage"] = ["drop before", "drop after"]
    for staged in (None, "1"):
        with pytest.raises((http.client.RemoteDisconnected, urllib.error.URLError, ConnectionError)):
            rpc(stub.url, "flex_stage", "1", new)
        assert {each["staged"] for each in rpc(stub.url, "flex_status")} == {staged}
    assert call(stub.url, "/collective_rpc", {"method": "nonsense"})[0] == 500
    stub.developer = False
    assert call(stub.url, "/pause?mode=keep")[0] == 404


def test_a_restarted_engine_has_its_own_weights(stub: StubEngine, new: str) -> None:
    push(stub.url, "1", new)
    stub.restart()
    status = rpc(stub.url, "flex_status")[0]
    assert status["version"] == "base"
    assert stub.holds(OLD)
