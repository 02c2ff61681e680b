"""Saves that fail in the background: nobody misses it, and it is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.ranks.lost_ranks import split_address
from tests.background.helpers import limit_file_size, load, save, too_large
from tests.background.test_writer import names
from tests.saved import short, short_names

LARGE = 1 << 20


def failing(path, writer):
    """A save for which there is no room; the writer's files have room again afterwards."""
    limit_file_size(writer, 1 << 20)
    handle = save(path, -1, writer, LARGE)
    handle.wait()
    limit_file_size(writer, 1 << 40)
    return handle


def test_the_result_is_the_error_and_the_directory_is_as_it_was(tmp_path, writers):
    writer = writers()
    save(tmp_path, 1, unique_id=0)
    handle = failing(tmp_path, writer)
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            handle.result()
        file = str(tmp_path / "0_1-2.safetensors")
        assert (
            short(str(caught.value))
            == f"cannot save to {str(tmp_path)!r}: [rank 0] OSError: {too_large(file, '4.0 MiB')}"
        )
        assert type(caught.value) is CheckpointError
    assert CheckpointDirectory(tmp_path).list_ids() == [0]
    assert load(tmp_path) == 1
    assert short_names(names(tmp_path)) == ["0.manifest", "0_0-1.safetensors"]
    # Whoever has seen it is not told again.
    save(tmp_path, 2, writer).result()


@pytest.mark.parametrize("next_is_async", [True, False])
def test_the_next_save_raises_what_nobody_has_seen_once(tmp_path, writers, next_is_async):
    writer = writers()
    failing(tmp_path / "a", writer)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "b", 1, writer if next_is_async else False)
    assert short(str(caught.value)) == (
        f"cannot save to {str(tmp_path / 'b')!r}: [rank 0] the asynchronous save of id 0 to {str(tmp_path / 'a')!r} "
        f"failed: cannot save to {str(tmp_path / 'a')!r}: [rank 0] OSError: "
        f"{too_large(tmp_path / 'a' / '0_0-1.safetensors', '4.0 MiB')}"
    )
    assert CheckpointDirectory(tmp_path / "b").list_ids() == []
    assert writer.pending == 0
    save(tmp_path / "b", 2, writer).result()
    assert load(tmp_path / "b") == 2


def test_several_errors_are_told_together(tmp_path, writers):
    writer = writers(max_pending=2)
    limit_file_size(writer, 1 << 20)
    for name in "ab":
        save(tmp_path / name, 1, writer, LARGE)
    assert writer.wait()
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "c", 1)
    for name in "ab":
        assert f"the asynchronous save of id 0 to {str(tmp_path / name)!r} failed" in str(caught.value)
    save(tmp_path / "c", 1)


def test_closing_raises_what_nobody_has_seen(tmp_path, writers):
    writer = writers()
    failing(tmp_path, writer)
    with pytest.raises(CheckpointError, match="the asynchronous save of id 0 to .*File too large"):
        writer.close()
    save(tmp_path, 1)


def test_leaving_with_an_error_does_not_hide_it(tmp_path):
    with pytest.raises(KeyError, match="mine"), BackgroundWriter() as writer:
        with writer.open_slot():
            pass
        failing(tmp_path, writer)
        raise KeyError("mine")
    with pytest.raises(CheckpointError, match="File too large"):
        save(tmp_path, 1)


def test_a_writer_that_has_lost_its_mind_is_ended(tmp_path, writers, monkeypatch):
    writer = writers()
    with monkeypatch.context() as patch:
        patch.setattr(WriteJob, "encode", lambda job: b"nonsense")
        handle = save(tmp_path, 1, writer)
    with pytest.raises(CheckpointError, match=r"the background writer \(pid \d+\) ended with status 1: Traceback(.|\n)*"
                       "while it was saving"):  # fmt: skip
        handle.result()
    save(tmp_path, 2, writer).result()
    assert load(tmp_path) == 2


def test_a_process_that_cannot_be_started_is_an_error_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "no python"))
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError, match="the background writer could not be started: .*no python"):
        save(tmp_path / "d", 1, writer)
    assert not (tmp_path / "d").exists()
    writer.close()


def test_the_secret_of_a_writer_is_its_own_and_stands_where_no_other_user_can_read_it(tmp_path, writers):
    secrets = set()
    for writer in (writers(), writers()):
        with writer.open_slot() as slot:
            secrets.add(split_address(slot.address)[1])
        save(tmp_path, 1, writer).result()  # it has begun, and has got its secret
        arguments = Path(f"/proc/{writer.pid}/cmdline").read_bytes()
        assert arguments and not any(each.hex().encode() in arguments for each in secrets)
    assert [len(each) for each in secrets] == [16, 16]
