"""The switch of an engine: on all ranks or on none, whatever fails and whoever dies."""

from __future__ import annotations

import os
import signal

import pytest

from paddle_flexckpt.catalog import EngineError, EngineLostError
from paddle_flexckpt.rollout.engine_client import EngineClient
from paddle_flexckpt.rollout.switch import SwitchProcess, switch
from tests.rollout.numpy_engine import model_directory, segment, weights
from tests.rollout.stub_engine import StubEngine

CALLS = [
    "flex_status",
    "/is_paused",
    "flex_stage",
    "/pause",
    "flex_commit",
    "/reset_prefix_cache",
    "/update_weight_version",
    "flex_accept",
    "/resume",
]
# Calls after which an engine serves the new version, even if their answers are lost.
AFTER = ("flex_accept", "/resume")


@pytest.fixture
def stub(tmp_path):
    engine = StubEngine(model_directory(tmp_path / "base", weights(0)), weights(0), ranks=2)
    yield engine
    engine.close()


def path(tmp_path, seed):
    return segment(tmp_path / f"{seed}.safetensors", weights(seed))


def test_a_switch(stub, tmp_path):
    done = switch(EngineClient(stub.url), "1", path(tmp_path, 1))
    assert stub.calls == CALLS
    assert stub.holds(weights(1))
    assert (stub.paused, stub.weight_version, done["released"]) == (None, "1", True)
    assert set(done["seconds"]) == {"stage", "pause"}


def test_memory_that_the_engine_keeps_is_not_released(stub, tmp_path):
    switch(EngineClient(stub.url), "1", path(tmp_path, 1))
    stub.engines[1].keeps = True
    switch(EngineClient(stub.url), "2", path(tmp_path, 2))
    stub.engines[1].keeps = False
    kept = stub.engines[1].model["head"]
    assert not switch(EngineClient(stub.url), "3", path(tmp_path, 3))["released"]
    assert kept is not None
    del kept
    assert switch(EngineClient(stub.url), "4", path(tmp_path, 4))["released"]


@pytest.mark.parametrize("fault", [500, "drop before", "drop after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_one_version(stub, tmp_path, call, fault):
    client = EngineClient(stub.url)
    switch(client, "1", path(tmp_path, 1))
    stub.faults[call] = [fault]
    if call == "flex_accept":
        # The engine has the new version; it keeps the memory of the old one.
        assert not switch(client, "2", path(tmp_path, 2))["released"]
    else:
        with pytest.raises(EngineError):
            switch(client, "2", path(tmp_path, 2))
    assert stub.holds(weights(2 if call in AFTER else 1))
    switch(client, "3", path(tmp_path, 3))
    assert stub.holds(weights(3))
    assert stub.paused is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tensors", [0, 1, 3])
def test_a_rank_that_cannot_load_takes_all_back(stub, tmp_path, rank, tensors):
    client = EngineClient(stub.url)
    for version in ("1", "2"):  # back to the engine's own directory, and back to a segment
        before = weights(int(version) - 1)
        stub.engines[rank].failing_loads = [tensors]
        with pytest.raises(
            EngineError, match=rf"version {version} was not loaded: engine rank {rank}: .*injected fault"
        ):
            switch(client, version, path(tmp_path, int(version)))
        assert stub.holds(before)
        assert stub.paused is None
        switch(client, version, path(tmp_path, int(version)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_roll_back_that_fails_leaves_the_engine_paused(stub, tmp_path, rank):
    client = EngineClient(stub.url)
    stub.engines[rank].failing_loads = [1, 0]
    with pytest.raises(EngineLostError, match=r"could not be undone: .*engine rank \d: .*FC953\): start the engine"):
        switch(client, "1", path(tmp_path, 1))
    assert stub.paused == "keep"
    with pytest.raises(EngineLostError, match="FC953"):
        switch(client, "2", path(tmp_path, 2))
    stub.restart()
    switch(client, "3", path(tmp_path, 3))
    assert stub.holds(weights(3))


def test_a_version_that_is_served_stays_though_nobody_could_accept_it(stub, tmp_path):
    client = EngineClient(stub.url)
    switch(client, "1", path(tmp_path, 1))
    stub.faults["flex_accept"] = [500] * 3
    assert not switch(client, "2", path(tmp_path, 2))["released"]
    with pytest.raises(EngineError, match="was not staged"):
        switch(client, "3", str(tmp_path / "nothing"))
    assert stub.holds(weights(2))
    assert (stub.paused, stub.weight_version) == (None, "2")
    assert {each["accepted"] for each in client.status()} == {"2@2.safetensors"}


def test_the_label_and_the_cache_go_back_with_the_weights(stub, tmp_path):
    client = EngineClient(stub.url)
    for version in ("1", "2"):
        stub.faults["/update_weight_version"] = ["drop after"]
        with pytest.raises(EngineError):
            switch(client, version, path(tmp_path, int(version)))
        before = int(version) - 1
        assert stub.holds(weights(before))
        assert stub.weight_version == (str(before) if before else "default")
        assert stub.calls[-4:-1] == ["flex_status", "/reset_prefix_cache", "/update_weight_version"]
        switch(client, version, path(tmp_path, int(version)))


def test_a_pause_whose_answer_is_lost_ends(stub, tmp_path):
    stub.faults["/pause"] = ["drop after"]
    with pytest.raises(EngineError):
        switch(EngineClient(stub.url), "1", path(tmp_path, 1))
    assert stub.paused is None


def test_versions_of_one_name_are_told_apart(stub, tmp_path):
    """A trainer that was started again counts from 1 again."""
    client = EngineClient(stub.url)
    switch(client, "1", path(tmp_path, 1))
    client.workers("flex_stage", "1@2.safetensors", path(tmp_path, 2))
    client.pause()
    stub.engines[1].failing_loads = [2]
    client.workers("flex_commit", "1@2.safetensors")
    with pytest.raises(EngineError, match="was not staged"):
        switch(client, "1", str(tmp_path / "nothing"))
    assert stub.holds(weights(1))
    assert stub.paused is None


def test_what_does_not_fit_is_refused_while_the_engine_serves(stub, tmp_path):
    other = weights(1)
    other["head"] = other["head"][:, :2].copy()
    with pytest.raises(EngineError, match=r"was not staged: engine rank 0: .*'head'.*engine rank 1"):
        switch(EngineClient(stub.url), "1", segment(tmp_path / "x.safetensors", other))
    assert "/pause" not in stub.calls
    assert stub.calls[-1] == "flex_discard"


@pytest.mark.parametrize("call", CALLS)
def test_a_switch_that_dies_is_finished_or_undone_by_the_next(stub, tmp_path, call):
    switch(EngineClient(stub.url), "1", path(tmp_path, 1))
    process = SwitchProcess(stub.url, 30.0)
    stub.faults[call] = [process._process.kill, "drop after"][:1]
    process.begin("2", path(tmp_path, 2))
    with pytest.raises(EngineError, match=r"was killed. Remedy \(FC952\): push again"):
        process.result()
    stub.wait_until(lambda: True)
    assert stub.holds(weights(1)) or stub.holds(weights(2))
    switch(EngineClient(stub.url), "3", path(tmp_path, 3))
    assert stub.holds(weights(3))
    assert stub.paused is None
    states = EngineClient(stub.url).status()
    assert {(each["version"], each["accepted"], each["staged"]) for each in states} == {
        ("3@3.safetensors", "3@3.safetensors", None)
    }


@pytest.mark.parametrize("accepted", [0, 1])
def test_ranks_of_which_one_has_accepted_accept_all(stub, tmp_path, accepted):
    client = EngineClient(stub.url)
    client.workers("flex_stage", "1", path(tmp_path, 1))
    client.pause()
    client.workers("flex_commit", "1")
    stub.workers[accepted].accept("1")
    stub.engines[0].failing_loads = [None, 0]
    switch(client, "2", path(tmp_path, 2))
    assert stub.holds(weights(2))


def test_a_process_without_a_request_ends(stub):
    process = SwitchProcess(stub.url, 30.0)
    process.stop()
    assert process.is_done()
    assert stub.calls == []


def test_a_process_is_in_a_session_of_its_own(stub):
    process = SwitchProcess(stub.url, 30.0)
    assert os.getsid(process._process.pid) == process._process.pid
    process.stop()


def test_a_forked_process_that_holds_the_pipes_is_not_waited_for(stub, tmp_path):
    process = SwitchProcess(stub.url, 30.0)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        process.begin("1", path(tmp_path, 1))
        assert process.result()["released"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert stub.holds(weights(1))


def test_a_signal_to_the_job_does_not_stop_it(stub, tmp_path):
    process = SwitchProcess(stub.url, 30.0)
    stub.faults["flex_commit"] = [lambda: [os.kill(process._process.pid, each) for each in (2, 15)] and None]
    process.begin("1", path(tmp_path, 1))
    assert process.result()["released"]
    assert stub.holds(weights(1))
