"""The end of a training process, and its forks: pending saves are waited for, errors are told, forks do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.background.helpers import PATIENCE_SECONDS, await_end, load, too_large
from tests.saved import short

ROOT = Path(__file__).resolve().parents[2]
# Newer Pythons warn of every fork of a process with threads.
WITHOUT_WARNINGS = ("-W", "ignore::DeprecationWarning")
PRELUDE = """
import atexit, os, signal, sys
sys.modules["paddle"] = None  # importing it takes a second, and says things
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError
from tests.background.helpers import limit_file_size, save, stopped
path = sys.argv[1]
atexit.register(print, "atexit: first")
writer = BackgroundWriter()
with writer.open_slot():
    pass
atexit.register(print, "atexit: last")
"""


def run(path, code):
    """Runs a training process; its output and its errors are pipes, so what is not flushed is lost."""
    done = subprocess.run(
        [sys.executable, *WITHOUT_WARNINGS, "-c", PRELUDE + textwrap.dedent(code), str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_pending_saves_are_waited_for(tmp_path):
    status, output, errors = run(
        tmp_path,
        """
        os.kill(writer.pid, signal.SIGSTOP)
        handle = save(path, 1, writer)
        atexit.register(os.kill, writer.pid, signal.SIGCONT)
        atexit.register(lambda: print("before the end of the save" if not handle.done() else "too late"))
        """,
    )
    assert (status, errors) == (0, "")
    assert output == ["before the end of the save", "atexit: last", "atexit: first"]
    assert load(tmp_path) == 1


def test_an_error_that_nobody_has_seen_is_printed_and_the_status_is_1(tmp_path):
    status, output, errors = run(
        tmp_path,
        """
        limit_file_size(writer, 1 << 20)
        save(path, 1, writer, 1 << 20)
        sys.stdout.write("not flushed; ")
        """,
    )
    assert status == 1
    assert output == ["not flushed; atexit: last", "atexit: first"], "each function once, in its order"
    assert short(errors) == (
        f"paddle_flexckpt: an error that nobody has seen: the asynchronous save of id 0 to {str(tmp_path)!r} failed: "
        f"cannot save to {str(tmp_path)!r}: [rank 0] OSError: "
        f"{too_large(tmp_path / '0_0-1.safetensors', '4.0 MiB')}\n"
    )


def test_an_error_that_was_seen_does_not_change_the_status(tmp_path):
    status, output, errors = run(
        tmp_path,
        """
        limit_file_size(writer, 1 << 20)
        try:
            save(path, 1, writer, 1 << 20).result()
        except CheckpointError as error:
            print("seen")
        """,
    )
    assert (status, errors) == (0, "")
    assert output == ["seen", "atexit: last", "atexit: first"]


def test_a_writer_that_was_killed_is_told_at_the_exit(tmp_path):
    status, _, errors = run(
        tmp_path,
        """
        with stopped(writer) as pid:
            save(path, 1, writer)
            os.kill(pid, signal.SIGKILL)
        """,
    )
    assert status == 1
    assert "was killed by signal 9 (Killed) while it was saving" in errors


def test_the_shared_writer_is_started_by_the_first_save_and_ends_with_the_process(tmp_path):
    status, output, errors = run(
        tmp_path,
        """
        writer.close()
        from paddle_flexckpt.background.writer import shared_writer
        save(path, 1, True)
        print(shared_writer() is shared_writer(), shared_writer().pid)
        """,
    )
    assert (status, errors) == (0, "")
    same, pid = output[0].split()
    assert same == "True"
    assert not os.path.exists(f"/proc/{pid}")
    assert load(tmp_path) == 1


def test_a_fork_neither_waits_nor_takes_part(tmp_path):
    """As a worker of a data loader: forked with all that its parent has, it ends before or after it."""
    status, output, errors = run(
        tmp_path,
        """
        handle = None
        with stopped(writer):
            handle = save(path, 1, writer)
            child = os.fork()
            if child == 0:
                for use in (handle.done, handle.result, writer.wait, writer.close, lambda: save(path, 2, writer)):
                    try:
                        use()
                    except CheckpointError as error:
                        assert "is a fork. Remedy" in str(error), error
                    else:
                        print("the fork could use it")
                # A save of its own to the same directory is refused by the lock, not by a deadlock.
                try:
                    save(path, 2)
                except CheckpointError as error:
                    assert "another save is writing to" in str(error), error
                sys.exit(7)  # runs the atexit functions of the fork
            # The writer is stopped: a fork that waited for it would not end.
            print("status of the fork:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(handle.result().unique_id)
        print(save(path, 3, writer).result().unique_id)
        """,
    )
    assert (status, errors) == (0, "")
    assert output == [
        "atexit: last", "atexit: first", "status of the fork: 7", "0", "1", "atexit: last", "atexit: first"
    ]  # fmt: skip
    assert [load(tmp_path, unique_id) for unique_id in (0, 1)] == [1, 3]


def test_a_fork_that_outlives_its_parent_does_not_keep_the_writer(tmp_path):
    read, write = os.pipe()
    code = """
    import select
    read = int(sys.argv[2])
    save(path, 1, writer)
    if os.fork() == 0:
        os.close(1), os.close(2)
        select.select([read], [], [])
        os._exit(0)
    print(writer.pid, flush=True)
    writer.wait()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    trainer = subprocess.Popen(
        [sys.executable, *WITHOUT_WARNINGS, "-c", PRELUDE + textwrap.dedent(code), str(tmp_path), str(read)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=(read,),
    )  # fmt: skip
    os.close(read)
    try:
        pid = int(trainer.stdout.readline())
        assert trainer.wait(PATIENCE_SECONDS) < 0
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        await_end(descriptor)
    finally:
        os.close(write)
        trainer.stdout.close()


def test_a_fork_has_a_shared_writer_of_its_own(tmp_path):
    status, _, errors = run(
        tmp_path,
        """
        from paddle_flexckpt.background.writer import shared_writer
        save(path + "/parent", 1, True).result()
        if os.fork() == 0:
            save(path + "/child", 2, True)
            shared_writer().close()
            os._exit(0)
        os.wait()
        save(path + "/parent", 3, True).result()
        """,
    )
    assert (status, errors) == (0, "")
    assert load(tmp_path / "parent") == 3
    assert load(tmp_path / "child") == 2
