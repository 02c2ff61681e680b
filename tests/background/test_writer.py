"""Saves of one rank in the background: what is saved, when the caller goes on, and what it is told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.saver import save_state_dict
from tests.background.helpers import ELEMENTS, PATIENCE_SECONDS, SOLO, Watch, kill, load, save, state, stopped
from tests.saved import data_file, short_names


def names(path):
    return sorted(set(os.listdir(path)) - {PADDLE_METADATA})


def test_what_is_saved_are_the_values_at_the_time_of_the_call(tmp_path, writers):
    writer = writers()
    mine = state(5)
    mine["strided"] = np.arange(12).reshape(3, 4).T
    with stopped(writer):
        handle = save_state_dict(mine, tmp_path, SOLO, async_save=writer)
        for array in mine.values():
            array[...] = -1
        assert not handle.done()
        assert not handle.wait(0)
        with pytest.raises(TimeoutError, match="is not over after 0 s"):
            handle.result(0)
        assert CheckpointDirectory(tmp_path).list_ids() == []
    report = handle.result(PATIENCE_SECONDS)
    assert handle.done()
    assert load(tmp_path) == 5
    found = {"strided": np.zeros((4, 3), dtype=np.int64)}
    load_state_dict(found, tmp_path, SOLO, strict="missing")
    assert (found["strided"] == np.arange(12).reshape(3, 4).T).all()
    assert isinstance(report, SaveReport)
    assert (report.path, report.unique_id, report.keys) == (str(tmp_path), 0, 3)
    assert (handle.path, handle.unique_id) == (str(tmp_path), 0)
    assert report.bytes_written == ELEMENTS * 4 + 3 * 8 + 12 * 8


def test_the_files_are_those_of_a_synchronous_save(tmp_path, writers):
    save(tmp_path / "sync", 1, step=7)
    save(tmp_path / "async", 1, writers(), step=7).result()
    for kind in ("sync", "async"):
        assert short_names(names(tmp_path / kind)) == ["0.manifest", "0_0-1.safetensors"]
    one, other = (CheckpointDirectory(tmp_path / kind).read_manifest() for kind in ("sync", "async"))
    assert one.step == other.step == 7
    assert (one.checksums.values == other.checksums.values).all()
    for name, column in one.catalog.to_arrays().items():
        if name != "files":  # their names have the saves' tokens
            assert (column == other.catalog.to_arrays()[name]).all(), name


def test_the_report_says_where_the_time_went(tmp_path, writers, caplog):
    caplog.set_level(logging.INFO, "paddle_flexckpt")
    report = save(tmp_path, 1, writers()).result()
    assert set(report.seconds) == {"plan", "queue", "stage", "blocked", "write", "commit", "total"}
    assert report.seconds["plan"] + report.seconds["stage"] <= report.seconds["blocked"] <= report.seconds["total"]
    assert report.seconds["write"] > 0
    assert report.warnings == []
    assert report.summary().endswith(f"training stood still for {report.seconds['blocked']:.2f} s")
    assert report.summary() in caplog.text


def test_one_process_and_its_memory_serve_many_saves(tmp_path, writers):
    writer = writers()
    pid = writer.pid
    save(tmp_path, 0, writer).result()
    taken = writer.staging_bytes
    for version in range(1, 6):
        save(tmp_path, version, writer).result()
    assert (writer.pid, writer.staging_bytes) == (pid, taken)
    larger = 3 << 20
    save(tmp_path, 6, writer, elements=larger).result()
    assert larger * 4 < writer.staging_bytes < 2 * larger * 4
    save(tmp_path, 7, writer).result()
    assert load(tmp_path, 6, larger) == 6
    assert [load(tmp_path, unique_id) for unique_id in (0, 1, 2, 3, 4, 5, 7)] == [0, 1, 2, 3, 4, 5, 7]
    assert writer.pid == pid


def test_reserved_memory_is_what_the_first_save_uses(tmp_path, writers):
    writer = writers(max_pending=2)
    assert writer.staging_bytes == 0
    writer.reserve(8 << 20)
    taken = writer.staging_bytes
    assert taken >= 16 << 20
    with stopped(writer):
        handles = [save(tmp_path / str(i), i, writer, elements=1 << 20) for i in range(2)]
        assert writer.pending == 2
    for handle in handles:
        handle.result()
    assert writer.staging_bytes == taken


def test_a_save_beyond_the_limit_waits_for_an_earlier_one(tmp_path, writers):
    writer = writers(max_pending=2)
    seen = []
    with stopped(writer):
        handles = [save(tmp_path / str(i), i, writer) for i in range(2)]

        def third():
            seen.append(save(tmp_path / "2", 2, writer))
            seen.append(handles[0].done())

        thread = threading.Thread(target=third)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert writer.pending == 2
    thread.join(PATIENCE_SECONDS)
    handle, first_was_done = seen
    assert first_was_done
    assert handle.result().seconds["queue"] > 0.01
    assert [load(tmp_path / str(i)) for i in range(3)] == [0, 1, 2]


def test_two_saves_to_one_directory_follow_each_other(tmp_path, writers):
    writer = writers(max_pending=2)
    first, second = (save(tmp_path, version, writer) for version in (1, 2))
    assert first.done(), "the second needs the directory's lock, which the first had"
    assert [handle.result().unique_id for handle in (first, second)] == [0, 1]
    assert [load(tmp_path, unique_id) for unique_id in (0, 1)] == [1, 2]


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_synchronous_save_waits_for_the_one_under_way(tmp_path, writers, through_a_link):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    writer = writers()
    with stopped(writer):
        handle = save(tmp_path / "real", 1, writer)
        path = tmp_path / "link" if through_a_link else tmp_path / "real"
        thread = threading.Thread(target=save, args=(path, 2))
        thread.start()
        # Elsewhere nothing is in the way.
        save(tmp_path / "other", 3)
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(PATIENCE_SECONDS)
    assert handle.result().unique_id == 0
    assert [load(tmp_path / "real", unique_id) for unique_id in (0, 1)] == [1, 2]
    assert load(tmp_path / "other") == 3


def test_a_save_by_another_writer_waits_as_well(tmp_path, writers):
    first, second = writers(), writers()
    handles = [save(tmp_path, 1, first), save(tmp_path, 2, second)]
    assert handles[0].done()
    assert [handle.result().unique_id for handle in handles] == [0, 1]


def test_while_a_save_is_under_way_others_are_locked_out_and_the_old_checkpoint_is_read(tmp_path, writers):
    save(tmp_path, 1, unique_id=0)
    writer = writers()
    with stopped(writer):
        handle = save(tmp_path, 2, writer, unique_id=0)
        assert load(tmp_path) == 1
        with pytest.raises(CheckpointError, match="another save is writing to"):
            open_backend(tmp_path).locks.take()
    handle.result()
    assert load(tmp_path) == 2
    open_backend(tmp_path).locks.take().release()


def test_a_replaced_id_leaves_nothing_behind(tmp_path, writers):
    writer = writers()
    for version in range(3):
        save(tmp_path, version, writer, unique_id=4).result()
    assert short_names(names(tmp_path)) == ["0_4-3.safetensors", "4.manifest"]


def test_dead_saves_are_cleaned_up(tmp_path, writers):
    directory = open_to_save(tmp_path)
    save(tmp_path, 1)
    dead = directory.open_save(None)
    (tmp_path / dead.data_file(0)).write_bytes(b"half")
    save(tmp_path, 2, writers()).result()
    assert short_names(names(tmp_path)) == ["0.manifest", "0_0-1.safetensors", "0_2-3.safetensors", "2.manifest"]


def test_a_save_that_is_refused_gives_everything_back(tmp_path, writers):
    writer = writers()
    for _ in range(3):
        with pytest.raises(ValidationError, match="never_a_tensor"):
            save_state_dict({"never_a_tensor": 3}, tmp_path, SOLO, async_save=writer)
    assert writer.pending == 0
    save(tmp_path, 1, writer).result()
    assert load(tmp_path) == 1


def test_closing_waits_and_ends_the_process(tmp_path):
    with BackgroundWriter() as writer:
        handle = save(tmp_path, 1, writer)
        pid = writer.pid
    assert handle.done()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (writer.pid, writer.staging_bytes) == (None, 0)
    with pytest.raises(ValidationError, match="this BackgroundWriter is closed. Remedy .FC102.: make another one"):
        save(tmp_path, 2, writer)
    writer.close()
    assert load(tmp_path) == 1


def test_signals_to_the_job_do_not_stop_a_save(tmp_path, writers):
    writer = writers()
    save(tmp_path, 0, writer).result()
    assert os.getsid(writer.pid) == writer.pid != os.getsid(0)
    with stopped(writer) as pid:
        handle = save(tmp_path, 1, writer)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    handle.result()
    assert writer.pid == pid


def test_the_process_has_low_priority_and_no_paddle(tmp_path, writers):
    pytest.importorskip("paddle")
    writer = writers(nice=7, io_class="idle")
    save(tmp_path, 0, writer).result()
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
    # Sessions share the processor first, and the writer has one of its own.
    with contextlib.suppress(FileNotFoundError):
        text = Path(f"/proc/{writer.pid}/autogroup").read_text()
        assert text.endswith(f" nice {os.getpriority(os.PRIO_PROCESS, writer.pid)}\n")
    with open(f"/proc/{writer.pid}/maps", encoding="utf-8") as stream:
        mapped = stream.read()
    assert "numpy" in mapped
    assert "paddle/" not in mapped
    with open(f"/proc/{os.getpid()}/maps", encoding="utf-8") as stream:
        assert "paddle/" in stream.read(), "so it would be seen"


def test_media_that_other_processes_do_not_see_are_refused(tmp_path, writers):
    class Private(LocalBackend):
        def reopen_token(self):
            raise ValidationError(["only this process sees it. Remedy (FC406): save synchronously"])

    with pytest.raises(ValidationError, match=r"cannot save to .*only this process sees it. Remedy .FC406.: save sync"):
        save(Private(str(tmp_path)), 1, writers())
    save(Private(str(tmp_path)), 1)
    assert load(tmp_path) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_pending": 0}, "max_pending has to be an integer >= 1; got 0"),
        ({"max_pending": True}, "max_pending has to be an integer >= 1; got True"),
        ({"nice": -1}, "nice has to be an integer from 0 to 19; got -1"),
        ({"io_class": "slow"}, "io_class has to be one of 'best-effort-low', 'idle', 'unchanged'; got 'slow'"),
        ({"timeout": 0}, "timeout has to be a number of seconds > 0; got 0"),
    ],
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises(ValidationError) as caught:
        BackgroundWriter(**arguments)
    assert text in str(caught.value)


def test_a_writer_that_dies_while_it_is_idle_is_replaced(tmp_path, writers, monkeypatch):
    writer = writers()
    save(tmp_path, 1, writer).result()
    pid = writer.pid
    # The thread that would notice is slow.
    notice, process = threading.Event(), writer._process
    monkeypatch.setattr(process, "_end", lambda: f"ended {notice.wait(PATIENCE_SECONDS)}")
    kill(pid)
    save(tmp_path, 2, writer).result()
    assert writer.pid not in (None, pid)
    notice.set()
    process._listener.join(PATIENCE_SECONDS)
    save(tmp_path, 3, writer).result()
    assert [load(tmp_path, unique_id) for unique_id in (0, 1, 2)] == [1, 2, 3]


def test_a_writer_killed_in_the_middle_of_its_file_fails_the_save_and_the_next_one_works(tmp_path, writers):
    elements = 24 << 20
    writer = writers()
    save(tmp_path, 1)
    pid = writer.pid
    with Watch(tmp_path, Watch.MODIFY) as watch:
        handle = save(tmp_path, 2, writer, elements)
        watch.wait_for("0_1-*.safetensors")
        kill(pid)
    written = os.path.getsize(tmp_path / data_file(tmp_path, 0, 1))
    assert 0 < written < elements * 4, "the kill came in the middle"
    with pytest.raises(CheckpointError) as caught:
        handle.result(PATIENCE_SECONDS)
    assert str(caught.value) == (
        f"cannot save to {str(tmp_path)!r}: [rank 0] the background writer (pid {pid}) was killed by signal 9 (Killed) "
        "while it was saving"
    )
    assert CheckpointDirectory(tmp_path).list_ids() == [0]
    assert load(tmp_path) == 1
    save(tmp_path, 3, writer).result()
    assert short_names(names(tmp_path)) == ["0.manifest", "0_0-1.safetensors", "0_2-3.safetensors", "2.manifest"]
    assert load(tmp_path) == 3
    assert isinstance(handle, SaveHandle)
