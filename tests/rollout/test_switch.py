"""The switch of an engine: on all ranks or on none, whatever fails and whoever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from paddle_flexckpt.catalog import CheckpointError, EngineError, EngineLostError
from paddle_flexckpt.rollout import engine_client
from paddle_flexckpt.rollout.engine_client import EngineClient, OvertakenError
from paddle_flexckpt.rollout.switch import SwitchProcess, switch
from tests.rollout.numpy_engine import model_directory, segment, weights
from tests.rollout.stub_engine import StubEngine

CALLS = [
    "flex_status",
    "flex_begin",
    "flex_status",
    "/is_paused",
    "flex_stage",
    "/pause",
    "flex_commit",
    "/reset_prefix_cache",
    "/update_weight_version",
    "flex_accept",
    "/resume",
    "flex_begin",
]
# Calls after which an engine serves the new version, even if their answers are lost.
AFTER = ("flex_accept", "/resume")


@pytest.fixture
def stub(tmp_path):
    engine = StubEngine(model_directory(tmp_path / "base", weights(0)), weights(0), ranks=2)
    yield engine
    engine.close()


@pytest.fixture
def impatient(monkeypatch):
    """Another switch counts as dead as soon as it says nothing."""
    monkeypatch.setattr(engine_client, "SILENCE_SECONDS", 0.0)


def path(tmp_path, seed):
    return segment(tmp_path / f"{seed}.safetensors", weights(seed))


def test_a_switch(stub, tmp_path):
    done = switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    assert stub.calls == CALLS
    assert stub.holds(weights(1))
    assert (stub.paused, stub.weight_version, done["released"]) == (None, "1", True)
    assert set(done["seconds"]) == {"stage", "pause"}


def test_memory_that_the_engine_keeps_is_not_released(stub, tmp_path):
    switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    stub.engines[1].keeps = True
    switch([EngineClient(stub.url)], "2", path(tmp_path, 2))
    stub.engines[1].keeps = False
    kept = stub.engines[1].model["head"]
    assert not switch([EngineClient(stub.url)], "3", path(tmp_path, 3))["released"]
    assert kept is not None
    del kept
    assert switch([EngineClient(stub.url)], "4", path(tmp_path, 4))["released"]


@pytest.mark.parametrize("fault", [500, "drop before", "drop after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_one_version(stub, tmp_path, call, fault):
    client = EngineClient(stub.url)
    switch([client], "1", path(tmp_path, 1))
    stub.faults[call] = [fault]
    if call == "flex_accept":
        # The engine has the new version; it keeps the memory of the old one.
        assert not switch([client], "2", path(tmp_path, 2))["released"]
    else:
        with pytest.raises(EngineError):
            switch([client], "2", path(tmp_path, 2))
    assert stub.holds(weights(2 if call in AFTER else 1))
    switch([client], "3", path(tmp_path, 3))
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
            switch([client], version, path(tmp_path, int(version)))
        assert stub.holds(before)
        assert stub.paused is None
        switch([client], version, path(tmp_path, int(version)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_roll_back_that_fails_leaves_the_engine_paused(stub, tmp_path, rank):
    client = EngineClient(stub.url)
    stub.engines[rank].failing_loads = [1, 0]
    with pytest.raises(EngineLostError, match=r"could not be undone: .*engine rank \d: .*FC953\): start the engine"):
        switch([client], "1", path(tmp_path, 1))
    assert stub.paused == "keep"
    with pytest.raises(EngineLostError, match="FC953"):
        switch([client], "2", path(tmp_path, 2))
    stub.restart()
    switch([client], "3", path(tmp_path, 3))
    assert stub.holds(weights(3))


def test_a_version_that_is_served_stays_though_nobody_could_accept_it(stub, tmp_path):
    client = EngineClient(stub.url)
    switch([client], "1", path(tmp_path, 1))
    stub.faults["flex_accept"] = [500] * 3
    assert not switch([client], "2", path(tmp_path, 2))["released"]
    with pytest.raises(EngineError, match="was not staged"):
        switch([client], "3", str(tmp_path / "nothing"))
    assert stub.holds(weights(2))
    assert (stub.paused, stub.weight_version) == (None, "2")
    assert {each["accepted"] for each in client.status()} == {"2@2.safetensors"}


def test_the_label_and_the_cache_go_back_with_the_weights(stub, tmp_path):
    client = EngineClient(stub.url)
    for version in ("1", "2"):
        stub.faults["/update_weight_version"] = ["drop after"]
        with pytest.raises(EngineError):
            switch([client], version, path(tmp_path, int(version)))
        before = int(version) - 1
        assert stub.holds(weights(before))
        assert stub.weight_version == (str(before) if before else "default")
        assert stub.calls[-5:-2] == ["flex_status", "/reset_prefix_cache", "/update_weight_version"]
        switch([client], version, path(tmp_path, int(version)))


def test_a_pause_whose_answer_is_lost_ends(stub, tmp_path):
    stub.faults["/pause"] = ["drop after"]
    with pytest.raises(EngineError):
        switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    assert stub.paused is None


def test_versions_of_one_name_are_told_apart(stub, tmp_path):
    """A trainer that was started again counts from 1 again."""
    client = EngineClient(stub.url)
    switch([client], "1", path(tmp_path, 1))
    client.workers("flex_stage", "1@2.safetensors", path(tmp_path, 2))
    client.pause()
    stub.engines[1].failing_loads = [2]
    client.workers("flex_commit", "1@2.safetensors")
    with pytest.raises(EngineError, match="was not staged"):
        switch([client], "1", str(tmp_path / "nothing"))
    assert stub.holds(weights(1))
    assert stub.paused is None


def test_what_does_not_fit_is_refused_while_the_engine_serves(stub, tmp_path):
    other = weights(1)
    other["head"] = other["head"][:, :2].copy()
    with pytest.raises(EngineError, match=r"was not staged: engine rank 0: .*'head'.*engine rank 1"):
        switch([EngineClient(stub.url)], "1", segment(tmp_path / "x.safetensors", other))
    assert "/pause" not in stub.calls
    assert stub.calls[-2] == "flex_discard"


# -- several engines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stubs(stub, tmp_path):
    second = StubEngine(str(tmp_path / "base"), weights(0), ranks=2)
    yield stub, second
    second.close()


@pytest.mark.parametrize("fault", [500, "drop after", "load"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("failing", [0, 1])
def test_all_engines_switch_or_none(stubs, tmp_path, failing, call, fault):
    clients = [EngineClient(each.url) for each in stubs]
    assert switch(clients, "1", path(tmp_path, 1))["released"]
    assert all(each.holds(weights(1)) for each in stubs)
    if fault == "load":
        stubs[failing].engines[1].failing_loads = [2]
    else:
        stubs[failing].faults[call] = [fault]
    with contextlib.suppress(EngineError):
        switch(clients, "2", path(tmp_path, 2))
    held = 2 if call in (*AFTER, CALLS[-1]) and fault != "load" else 1
    if call == "flex_begin":
        held = 1  # its first call
    assert [each.holds(weights(held)) for each in stubs] == [True, True]
    assert [each.paused for each in stubs if call != "/resume"].count(None) == (2 if call != "/resume" else 0)
    switch(clients, "3", path(tmp_path, 3))
    assert [each.holds(weights(3)) for each in stubs] == [True, True]
    assert [(each.paused, each.weight_version) for each in stubs] == [(None, "3")] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_that_is_lost_is_named_and_the_others_serve(stubs, tmp_path, lost):
    clients = [EngineClient(each.url) for each in stubs]
    stubs[lost].engines[0].failing_loads = [1, 0]
    with pytest.raises(EngineLostError, match=rf"^{stubs[lost].url}: .*FC953"):
        switch(clients, "1", path(tmp_path, 1))
    assert stubs[1 - lost].holds(weights(0))
    assert (stubs[lost].paused, stubs[1 - lost].paused) == ("keep", None)
    stubs[lost].restart()
    switch(clients, "2", path(tmp_path, 2))
    assert all(each.holds(weights(2)) for each in stubs)


@pytest.mark.parametrize("call", ["flex_stage", "/pause", "flex_commit", "/reset_prefix_cache", "flex_accept"])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_switch_of_several_engines_that_is_overtaken_on_one(stubs, tmp_path, impatient, taken, call):
    clients, paths = [EngineClient(each.url) for each in stubs], {seed: path(tmp_path, seed) for seed in (1, 2, 3)}
    switch(clients, "1", paths[1])
    stubs[taken].faults[call] = [lambda: switch([EngineClient(stubs[taken].url)], "3", paths[3]) and None]
    with pytest.raises(OvertakenError):
        switch(clients, "2", paths[2])
    assert stubs[taken].holds(weights(3))
    assert stubs[1 - taken].holds(weights(2 if call == "flex_accept" else 1))
    assert [each.paused for each in stubs] == [None, None]


def test_engines_are_owned_in_one_order_by_all_switches(stubs, tmp_path):
    """Otherwise each of two would own one engine, and wait for the other."""
    clients, order = [EngineClient(each.url) for each in stubs], []
    for version, engines in (("1", clients), ("2", clients[::-1])):
        for each in stubs:
            each.faults["flex_begin"] = [lambda url=each.url: order.append(url)]
        switch(engines, version, path(tmp_path, int(version)))
    assert order == sorted(each.url for each in stubs) * 2


@pytest.mark.parametrize("call", ["flex_status", "flex_stage"])
def test_engines_that_have_answered_stay_owned_while_another_is_awaited(stubs, tmp_path, monkeypatch, call):
    monkeypatch.setattr(engine_client, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("paddle_flexckpt.rollout.switch.KEEP_SECONDS", 0.05)
    (fast, slow), renewed, kept = sorted(stubs, key=lambda each: each.url), threading.Event(), []

    def hold():
        fast.faults["flex_begin"] = [renewed.set]
        kept.append(renewed.wait(10))

    slow.faults[call] = [hold]
    switch([EngineClient(each.url) for each in stubs], "1", path(tmp_path, 1))
    assert kept == [True]
    assert all(each.holds(weights(1)) for each in stubs)


# -- two switches at once ----------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_is_not_waited_for_to_be_released(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "RELEASE_SECONDS", 0.1, raising=False)
    held, waited = threading.Event(), []
    stub.faults["flex_begin"] = [lambda: None, lambda: waited.append(held.wait(10))]
    switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    assert waited == []
    held.set()
    assert stub.holds(weights(1))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("at", range(len(CALLS) - 1))
def test_a_switch_that_another_overtakes_changes_nothing_more(stub, tmp_path, impatient, at, fails):
    """The newer one runs from beginning to end while a call of the older is under way; its load may fail."""
    switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    paths, outcomes = {seed: path(tmp_path, seed) for seed in (2, 3)}, []

    def overtake():
        if fails:
            stub.faults["flex_commit"].append(lambda: setattr(stub.engines[1], "failing_loads", [2]))
        with contextlib.suppress(CheckpointError):
            outcomes.append(switch([EngineClient(stub.url)], "3", paths[3]))
        outcomes.append(next(seed for seed in (1, 2, 3) if stub.holds(weights(seed))))

    call = CALLS[at]
    stub.faults[call] = [lambda: None] * CALLS[:at].count(call) + [overtake]
    with contextlib.suppress(CheckpointError):
        switch([EngineClient(stub.url)], "2", paths[2])
    newest = outcomes[-1]
    assert newest == 3 or fails
    assert stub.holds(weights(newest if at > 1 else 2))
    (version,) = {each["version"] for each in EngineClient(stub.url).status()}
    assert stub.weight_version == version.partition("@")[0]
    assert stub.paused is None
    switch([EngineClient(stub.url)], "4", path(tmp_path, 4))
    assert stub.holds(weights(4))


def test_the_error_of_a_switch_that_was_overtaken_says_by_whom(stub, tmp_path, impatient):
    stub.faults["flex_commit"] = [lambda: EngineClient(stub.url).workers("flex_begin", "x", owner=owner(stub))]
    with pytest.raises(OvertakenError, match=r"OwnerError: 'x' switches this engine now.*Remedy \(FC952\): let one"):
        switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    # It is the other one's to resume.
    assert (stub.paused, owner(stub)) == ("keep", "x")
    assert stub.holds(weights(0))
    switch([EngineClient(stub.url)], "2", path(tmp_path, 2))
    assert stub.holds(weights(2))
    assert stub.paused is None


def owner(stub):
    (name,) = {each["owner"] for each in EngineClient(stub.url).status()}
    return name


def test_a_switch_that_lives_is_waited_for(stub, tmp_path):
    held, done, begun = threading.Event(), [], threading.Event()

    def hold():
        begun.set()
        held.wait(60)

    stub.faults["flex_stage"] = [hold]
    paths = {seed: path(tmp_path, seed) for seed in (1, 2)}

    def run(seed):
        switch([EngineClient(stub.url)], str(seed), paths[seed])
        done.append(seed)

    threads = [threading.Thread(target=run, args=[seed]) for seed in (1, 2)]
    threads[0].start()
    assert begun.wait(60)
    asked = stub.calls.count("flex_status")
    threads[1].start()
    while stub.calls.count("flex_status") < asked + 2:
        pass
    held.set()
    for thread in threads:
        thread.join()
    assert done == [1, 2]
    assert stub.holds(weights(2))
    assert stub.calls.count("flex_begin") == 4


def test_a_switch_does_not_wait_for_ever(stub, tmp_path, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.rollout.switch.PATIENCE_SECONDS", 0.0)
    EngineClient(stub.url).workers("flex_begin", "host-7 (process 12)")
    with pytest.raises(EngineError, match=r"host-7 \(process 12\) has been switching it.*FC952\): wait until"):
        switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    assert owner(stub) == "host-7 (process 12)"


@pytest.mark.parametrize("call", ["/pause", "/reset_prefix_cache", "/resume"])
def test_a_switch_that_slept_asks_whether_the_engine_is_still_its_own(stub, tmp_path, monkeypatch, call):
    """Routes of the engine name no owner."""
    before = {"/pause": "flex_stage", "/reset_prefix_cache": "flex_commit", "/resume": "flex_accept"}[call]

    def sleep():
        monkeypatch.setattr(engine_client, "SILENCE_SECONDS", -1.0)

    stub.faults[before] = [sleep]
    switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    assert stub.calls[stub.calls.index(call) - 1] == "flex_begin"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", CALLS[:-1])
def test_a_switch_that_dies_is_finished_or_undone_by_the_next(stub, tmp_path, call):
    switch([EngineClient(stub.url)], "1", path(tmp_path, 1))
    process = SwitchProcess([stub.url], 30.0)
    stub.faults[call] = [process._process.kill]
    process.begin("2", path(tmp_path, 2))
    with pytest.raises(EngineError, match=r"was killed. Remedy \(FC952\): push again"):
        process.result()
    stub.wait_until(lambda: True)
    assert stub.holds(weights(1)) or stub.holds(weights(2))
    switch([EngineClient(stub.url)], "3", path(tmp_path, 3))
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
    switch([client], "2", path(tmp_path, 2))
    assert stub.holds(weights(2))


def test_a_process_without_a_request_ends(stub):
    process = SwitchProcess([stub.url], 30.0)
    process.stop()
    assert process.is_done()
    assert stub.calls == []


def test_a_process_is_in_a_session_of_its_own(stub):
    process = SwitchProcess([stub.url], 30.0)
    assert os.getsid(process._process.pid) == process._process.pid
    process.stop()


def test_a_forked_process_that_holds_the_pipes_is_not_waited_for(stub, tmp_path):
    process = SwitchProcess([stub.url], 30.0)
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
    process = SwitchProcess([stub.url], 30.0)
    stub.faults["flex_commit"] = [lambda: [os.kill(process._process.pid, each) for each in (2, 15)] and None]
    process.begin("1", path(tmp_path, 1))
    assert process.result()["released"]
    assert stub.holds(weights(1))
