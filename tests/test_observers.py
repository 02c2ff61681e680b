"""Observers: each call that ends is told to them, once, and they cannot harm it."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import threading

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.loading import live_model
from paddle_flexckpt.observers import Event, PrometheusObserver, ScalarObserver
from paddle_flexckpt.report import Report, SaveReport, VerifyReport
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.native.samples import flip

PATIENCE_SECONDS = 120.0


def state():
    return {"w": np.arange(60, dtype=np.float32)}


def solo(job):
    (result,) = SimulatedWorld(1).run(job)
    return result


@pytest.fixture
def events():
    found = []
    with fc.observe(found.append):
        yield found


def test_each_call_is_told_once_with_its_report(events, tmp_path):
    path = str(tmp_path / "run")
    reports = [
        solo(lambda comm: fc.save_state_dict(state(), path, comm)),
        solo(lambda comm: fc.load_state_dict(state(), path, comm)),
        solo(lambda comm: fc.reshard_sharded_state_dict(state(), state(), comm)),
        fc.export_safetensors(path, tmp_path / "export"),
        fc.verify_checkpoint(path),
        solo(lambda comm: fc.publish(state(), tmp_path / "published", comm)),
        convert_checkpoint(path, tmp_path / "converted"),
        solo(lambda comm: fc.merge_sharded_state_dict(path, tmp_path / "merged", process_group=comm)),
    ]
    calls = ["save", "load", "reshard", "export", "verify", "publish", "convert", "merge"]
    assert [event.call for event in events] == calls
    assert [event.report for event in events] == reports
    published = str(tmp_path / "published")
    assert [event.path for event in events] == [path, path, "memory", path, path, published, path, path]
    assert all(event.ok and event.seconds > 0 and event.time > 1.6e9 for event in events)
    for event in events:
        found = json.loads(json.dumps(event.to_dict(), allow_nan=False))
        assert found["report"]["schema"]["version"] == 1
        assert (found["ok"], found["error"]) == (True, "")


def test_a_plan_tells_each_run(events):
    def job(comm):
        plan = fc.plan_reshard(state(), state(), comm)
        assert events == []
        return [plan.run(), plan.run()]

    reports = solo(job)
    assert [event.report for event in events] == reports


def test_each_rank_tells_its_own(events, tmp_path):
    reports = SimulatedWorld(3).run(lambda comm: fc.save_state_dict(state(), tmp_path, comm))
    assert sorted(event.report.bytes_written for event in events) == sorted(each.bytes_written for each in reports)


def test_a_failure_is_told_with_type_and_text(events, tmp_path):
    with pytest.raises(ValidationError) as caught:
        solo(lambda comm: fc.load_state_dict(state(), tmp_path / "nowhere", comm))
    (event,) = events
    assert (event.call, event.path, event.ok) == ("load", str(tmp_path / "nowhere"), False)
    assert (event.error_type, event.error, event.report) == ("ValidationError", str(caught.value), None)
    assert event.to_dict()["report"] is None


def test_a_conversion_and_a_merge_that_fail_are_told(events, tmp_path):
    path = str(tmp_path / "nowhere")
    with pytest.raises(ValidationError):
        convert_checkpoint(path, tmp_path / "converted")
    with pytest.raises(ValidationError):
        solo(lambda comm: fc.merge_sharded_state_dict(path, tmp_path / "merged", process_group=comm))
    assert [(event.call, event.path, event.error_type) for event in events] == [
        ("convert", path, "ValidationError"),
        ("merge", path, "ValidationError"),
    ]


def test_the_command_converts_as_the_call_does(events, tmp_path):
    solo(lambda comm: fc.save_state_dict(state(), tmp_path / "run", comm))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "converted")]) == 0
    assert [(event.call, event.path) for event in events[1:]] == [("convert", str(tmp_path / "run"))]
    assert events[1].report.bytes_written == 240


def test_a_damaged_checkpoint_is_a_report_not_a_failure(events, tmp_path):
    solo(lambda comm: fc.save_state_dict(state(), tmp_path, comm))
    (data,) = tmp_path.glob("*.safetensors")
    flip(data, data.stat().st_size - 3)
    fc.verify_checkpoint(tmp_path)
    assert [event.ok for event in events] == [True, True]
    assert not events[1].report.ok


def test_arguments_that_do_not_fit_are_told_too(events):
    with pytest.raises(TypeError):
        fc.verify_checkpoint("a", "b", "c", "d")
    assert [(event.call, event.error_type) for event in events] == [("verify", "TypeError")]


@pytest.mark.parametrize("options", [{}, {"staging_bytes": 64 << 20}, {"slice_bytes": 4096}])
def test_an_asynchronous_save_is_told_before_its_result_is_there(events, tmp_path, options):
    with fc.BackgroundWriter() as writer:
        handle = solo(lambda comm: fc.save_state_dict(state(), tmp_path, comm, async_save=writer, **options))
        if "slice_bytes" in options:
            assert events == []
            handle.finish_staging()
        report = handle.result(PATIENCE_SECONDS)
        assert [event.report for event in events] == [report]
        assert (events[0].call, events[0].path) == ("save", str(tmp_path))


def test_an_asynchronous_save_that_fails_is_told_once(events, tmp_path):
    """The writer is killed before it has taken the save up; nobody else is there to commit."""
    with fc.BackgroundWriter() as writer:
        writer.reserve(0)
        solo(lambda comm: fc.save_state_dict(state(), tmp_path / "first", comm, async_save=writer)).result(
            PATIENCE_SECONDS
        )
        os.kill(writer.pid, signal.SIGSTOP)
        pid = writer.pid
        handle = solo(lambda comm: fc.save_state_dict(state(), tmp_path / "second", comm, async_save=writer))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CheckpointError):
            handle.result(PATIENCE_SECONDS)
    assert [event.path for event in events] == [str(tmp_path / "first"), str(tmp_path / "second")]
    assert (events[1].error_type, events[1].error) == ("CheckpointError", str(handle.error))


def test_an_observer_that_raises_is_logged_and_harms_nothing(events, tmp_path, caplog):
    def bad(event):
        raise ValueError("the dashboard is down")

    with fc.observe(bad), caplog.at_level(logging.ERROR, "paddle_flexckpt"):
        report = solo(lambda comm: fc.save_state_dict(state(), tmp_path, comm))
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "an observer failed when it was told of a save" in record.getMessage()
    assert record.exc_info is not None and "the dashboard is down" in str(record.exc_info[1])
    assert [event.report for event in events] == [report]
    assert fc.verify_checkpoint(tmp_path).ok


def test_an_observer_hears_nothing_after_its_end(tmp_path):
    first, second = [], []
    observation = fc.observe(first.append)
    with fc.observe(second.append):
        solo(lambda comm: fc.save_state_dict(state(), tmp_path, comm))
    observation.stop()
    observation.stop()
    fc.verify_checkpoint(tmp_path)
    assert (len(first), len(second)) == (1, 1)


def test_one_function_may_observe_twice_and_end_once(tmp_path):
    found = []
    with fc.observe(found.append):
        with fc.observe(found.append):
            pass
        solo(lambda comm: fc.save_state_dict(state(), tmp_path, comm))
    assert len(found) == 1


def test_observers_may_come_and_go_while_others_are_told():
    from paddle_flexckpt.observers import notify

    found, report = [], VerifyReport("a", 0)

    def work():
        for _ in range(200):
            with fc.observe(lambda event: None):
                notify("verify", "a", 0.0, report)

    with fc.observe(found.append):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert len(found) == 800


def test_an_observer_is_a_function():
    with pytest.raises(TypeError, match="an observer has to be a function of an Event; got 'log'"):
        fc.observe("log")


def test_calls_keep_their_signatures_and_names():
    names = ("save_state_dict", "load_state_dict", "export_safetensors", "verify_checkpoint", "publish")
    for name in (*names, "merge_sharded_state_dict", "convert_checkpoint"):
        function = convert_checkpoint if name == "convert_checkpoint" else getattr(fc, name)
        assert function.__name__ == name
        assert "progress" in inspect.signature(function).parameters
        assert "Args:" in inspect.getdoc(function)


class Writer:
    """As VisualDL's LogWriter."""

    def __init__(self):
        self.written = []

    def add_scalar(self, tag, value, step, walltime=None):
        self.written.append((tag, value, step))


def event_of(call, report: Report | None, **more):
    return Event(call, "/run", 1700000000.5, 2.0, report, **more)


SAVED = SaveReport("/run", 0, 1, 1, 10, 20, 40, 1.0, {"write": 0.5, "total": 2.0})
FAILED = event_of("save", None, error_type="CheckpointError", error="no")


def test_scalars_have_a_tag_for_each_number():
    writer = Writer()
    observer = ScalarObserver(writer)
    observer(event_of("save", SAVED))
    assert writer.written == [
        ("flexckpt/save/failed", 0.0, 0),
        ("flexckpt/save/seconds/write", 0.5, 0),
        ("flexckpt/save/seconds/total", 2.0, 0),
        ("flexckpt/save/bytes_written", 10.0, 0),
        ("flexckpt/save/total_bytes", 20.0, 0),
        ("flexckpt/save/held_bytes", 40.0, 0),
    ]
    writer.written.clear()
    observer(FAILED)
    ScalarObserver(writer, step=lambda: 700)(FAILED)
    assert writer.written == [("flexckpt/save/failed", 1.0, 1), ("flexckpt/save/failed", 1.0, 700)]


def test_prometheus_reads_counts_and_the_last_numbers():
    metrics = PrometheusObserver()
    for event in (event_of("save", SAVED), event_of("save", SAVED), FAILED):
        metrics(event)
    assert metrics.render() == (
        "# HELP flexckpt_calls_total Calls that have ended, by outcome: ok, or the error's class.\n"
        "# TYPE flexckpt_calls_total counter\n"
        'flexckpt_calls_total{call="save",outcome="CheckpointError"} 1\n'
        'flexckpt_calls_total{call="save",outcome="ok"} 2\n'
        "# HELP flexckpt_last_success_timestamp_seconds When the last call that went well ended.\n"
        "# TYPE flexckpt_last_success_timestamp_seconds gauge\n"
        'flexckpt_last_success_timestamp_seconds{call="save"} 1700000000.5\n'
        "# HELP flexckpt_last_seconds Seconds of the last report, by phase.\n"
        "# TYPE flexckpt_last_seconds gauge\n"
        'flexckpt_last_seconds{call="save",phase="write"} 0.5\n'
        'flexckpt_last_seconds{call="save",phase="total"} 2.0\n'
        "# HELP flexckpt_last_bytes Bytes in the last report, by field.\n"
        "# TYPE flexckpt_last_bytes gauge\n"
        'flexckpt_last_bytes{call="save",field="bytes_written"} 10\n'
        'flexckpt_last_bytes{call="save",field="total_bytes"} 20\n'
        'flexckpt_last_bytes{call="save",field="held_bytes"} 40\n'
    )


@pytest.mark.parametrize("call", ["publish", "convert", "merge", "export", "full_param", "digest", "diff"])
def test_what_a_call_reads_inside_is_logged_at_debug_only(call, tmp_path, caplog, monkeypatch):
    """Who calls reports; the loads and reshards beneath do not."""
    monkeypatch.setattr(live_model, "FEW_RUNS", -1 << 20)  # else nothing is resharded to publish it
    if call == "full_param":
        pytest.importorskip("paddle")
    path, output = str(tmp_path / "run"), tmp_path / "out"
    solo(lambda comm: fc.save_state_dict(state(), path, comm))
    calls = {
        "publish": lambda: solo(lambda comm: fc.publish(state(), output, comm)),
        "convert": lambda: convert_checkpoint(path, output),
        "merge": lambda: solo(lambda comm: fc.merge_sharded_state_dict(path, output, process_group=comm)),
        "export": lambda: fc.export_safetensors(path, output),
        "full_param": lambda: solo(lambda comm: dict(fc.full_param(state(), process_group=comm))),
        "digest": lambda: fc.digest(path),
        "diff": lambda: fc.diff(path, path),
    }
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "paddle_flexckpt"):
        calls[call]()
    assert caplog.records
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
