"""The signal handlers: a flag, the handler that was there before, the way back, and forks."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager.preemption import PreemptionSignals

SIGNAL = signal.SIGUSR2


@pytest.fixture(autouse=True)
def as_before():
    before = {number: signal.getsignal(number) for number in (SIGNAL, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_sets_the_flag_and_nothing_else():
    watch = PreemptionSignals([SIGNAL])
    assert not watch.received
    signal.raise_signal(SIGNAL)
    signal.raise_signal(SIGNAL)
    assert watch.received
    watch.close()
    assert watch.received


def test_close_puts_the_old_handlers_back():
    def old(number, frame):
        pass

    signal.signal(SIGNAL, old)
    term = signal.getsignal(signal.SIGTERM)
    watch = PreemptionSignals([SIGNAL, signal.SIGTERM, SIGNAL])
    assert signal.getsignal(SIGNAL) is not old
    assert signal.getsignal(signal.SIGTERM) != term
    watch.close()
    watch.close()
    assert signal.getsignal(SIGNAL) is old
    assert signal.getsignal(signal.SIGTERM) == term


def test_a_python_handler_that_was_there_is_called_as_well():
    calls = []
    signal.signal(SIGNAL, lambda number, frame: calls.append(number))
    watch = PreemptionSignals([SIGNAL])
    signal.raise_signal(SIGNAL)
    assert (watch.received, calls) == (True, [SIGNAL])


def test_keyboard_interrupt_is_not_raised():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = PreemptionSignals([signal.SIGINT])
    signal.raise_signal(signal.SIGINT)
    assert watch.received


def test_an_ignored_signal_is_noticed_and_ignored_again():
    signal.signal(SIGNAL, signal.SIG_IGN)
    watch = PreemptionSignals([SIGNAL])
    signal.raise_signal(SIGNAL)
    assert watch.received
    watch.close()
    assert signal.getsignal(SIGNAL) == signal.SIG_IGN


def test_two_of_them_closed_in_either_order():
    calls = []
    old = lambda number, frame: calls.append(number)  # noqa: E731
    for order in ((0, 1), (1, 0)):
        signal.signal(SIGNAL, old)
        both = [PreemptionSignals([SIGNAL]), PreemptionSignals([SIGNAL])]
        both[order[0]].close()
        calls.clear()
        signal.raise_signal(SIGNAL)
        assert both[order[1]].received
        assert not both[order[0]].received
        assert calls == [SIGNAL]
        both[order[1]].close()
        calls.clear()
        # Whatever is installed now does what the old handler does.
        signal.raise_signal(SIGNAL)
        assert calls == [SIGNAL]
        assert not both[order[0]].received


@pytest.mark.parametrize("told", ["by the signal", "by another rank"])
def test_after_a_preemption_the_signal_stays_ignored(told):
    """A launcher sends it again, and work after the loop goes on."""
    code = """
import signal, os, sys
from paddle_flexckpt.manager.preemption import PreemptionSignals
watch = PreemptionSignals([signal.SIGUSR2])
if sys.argv[1] == "by the signal":
    signal.raise_signal(signal.SIGUSR2)
watch.close(stopped=sys.argv[1] == "by another rank")
other = PreemptionSignals([signal.SIGUSR2])
other.close()
signal.raise_signal(signal.SIGUSR2)
print("alive", flush=True)
child = os.fork()
if not child:
    signal.pause()
os.kill(child, signal.SIGUSR2)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", code, told], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["alive", str(int(signal.SIGUSR2))]


def test_the_default_action_is_the_default_action_again():
    # The first is closed while the second is installed on top of it, so its handler comes back when the second goes.
    code = """
import signal
from paddle_flexckpt.manager.preemption import PreemptionSignals
first, second = PreemptionSignals([signal.SIGUSR2]), PreemptionSignals([signal.SIGUSR2])
first.close()
print("alive", second.received, first.received, flush=True)
second.close()
signal.raise_signal(signal.SIGUSR2)
print("never")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("alive False False\n", -signal.SIGUSR2), done.stderr


def test_another_thread_cannot_install():
    errors = []

    def work():
        try:
            PreemptionSignals([SIGNAL])
        except ValidationError as error:
            errors.append(str(error))

    before = signal.getsignal(SIGNAL)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "in the main thread only" in errors[0]
    assert "preemption_signals=()" in errors[0]
    assert signal.getsignal(SIGNAL) == before


def test_another_thread_may_have_none_and_may_close():
    calls = []
    signal.signal(SIGNAL, lambda number, frame: calls.append(number))
    watch = PreemptionSignals([SIGNAL])
    none: list = []
    thread = threading.Thread(target=lambda: (none.append(PreemptionSignals(())), watch.close()))
    thread.start()
    thread.join()
    assert not none[0].received
    signal.raise_signal(SIGNAL)
    assert (watch.received, calls) == (False, [SIGNAL])


@pytest.mark.parametrize("number", [signal.SIGKILL, 100000, "SIGTERM"])
def test_what_cannot_be_handled_is_an_error_and_nothing_is_installed(number):
    before = signal.getsignal(SIGNAL)
    with pytest.raises(ValidationError, match="cannot be handled"):
        PreemptionSignals([SIGNAL, number])
    assert signal.getsignal(SIGNAL) == before


# -- forks -------------------------------------------------------------------------------------------------------------

# Writes what the system has for the signal (handler, mask and flags), and Python, and which signals are blocked.
REPORT = f"""
import ctypes, os, pathlib, signal
action = ctypes.create_string_buffer(1024)
ctypes.CDLL(None).sigaction({int(SIGNAL)}, None, action)
handler = signal.getsignal({int(SIGNAL)})
said = [action.raw[:16].hex(), action.raw[136:140].hex(), getattr(handler, "__qualname__", repr(handler))]
said.append(sorted(signal.pthread_sigmask(0, [])))
pathlib.Path(path + ".new").write_text(repr(said)), os.replace(path + ".new", path)
"""


def report(path: str) -> None:
    exec(REPORT, {"path": path})


def fork(path: str) -> None:
    child = os.fork()
    if not child:
        report(path)
        os._exit(0)
    os.waitpid(child, 0)


def start(method: str, path: str) -> None:
    process = multiprocessing.get_context(method).Process(target=exec, args=(REPORT, {"path": path}))
    process.start()
    process.join()


def load_data(path: str) -> None:
    from paddle.io import DataLoader

    samples = [np.zeros(1, "float32")] * 2
    list(DataLoader(samples, batch_size=1, num_workers=1, worker_init_fn=lambda worker: report(path)))


FORKS = {
    "os.fork": fork,
    "fork": partial(start, "fork"),
    "forkserver": partial(start, "forkserver"),
    "preexec_fn": lambda path: subprocess.run(["true"], preexec_fn=lambda: report(path), check=True),
}


def of_python(number, frame):
    """A handler that was there before."""


@contextlib.contextmanager
def handler_in_c():
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(SIGNAL, file=nowhere)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)


BEFORE = {
    "default": lambda stack: signal.signal(SIGNAL, signal.SIG_DFL),
    "ignored": lambda stack: signal.signal(SIGNAL, signal.SIG_IGN),
    "python": lambda stack: signal.signal(SIGNAL, of_python),
    "in C": lambda stack: stack.enter_context(handler_in_c()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of every fork of a process with threads
@pytest.mark.parametrize("way, before", [*((way, "in C") for way in FORKS), *(("fork", each) for each in BEFORE)])
def test_a_fork_has_what_was_there_before_the_manager(tmp_path, way, before):
    """However it is made, of nested watches, of which one is closed, and after all are closed."""
    path = tmp_path / "report"

    def seen() -> str:
        path.unlink(missing_ok=True)
        FORKS[way](str(path))
        return path.read_text()

    with contextlib.ExitStack() as stack:
        BEFORE[before](stack)
        expected = seen()
        watches = [PreemptionSignals([SIGNAL]) for _ in range(3)]
        assert seen() == expected
        watches[1].close()
        assert seen() == expected
        signal.raise_signal(SIGNAL)
        assert [watch.received for watch in watches] == [True, False, True]
        for watch in watches:
            watch.close()
        assert seen() == expected


def run(code: str) -> tuple[int, str]:
    prelude = """
import os, signal, sys, threading
wait = lambda child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    command = [sys.executable, "-W", "ignore", "-c", prelude + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_signal_to_a_fork_that_has_not_begun_does_what_it_did_before():
    """It comes before the library has a say there; the second time the handler before raises an exception."""
    status, said = run("""
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR2))
from paddle_flexckpt.manager.preemption import PreemptionSignals
class Ended(Exception): pass
def end(number, frame): raise Ended
for before in (signal.SIG_DFL, end):
    signal.signal(signal.SIGUSR2, before)
    watches = [PreemptionSignals([signal.SIGUSR2]) for _ in range(2)]
    try:
        child = os.fork()
        if not child:
            os._exit(1)
    except Ended:
        os._exit(7)
    print(wait(child), watches[0].received, watches[1].received)
    for watch in watches:
        watch.close()
""")
    assert (status, said) == (0, f"{-signal.SIGUSR2} False False\n7 False False\n")


def test_an_exception_of_a_handler_is_raised_where_a_process_forks():
    """The signal comes in the middle of the fork. Its handler ran in a hook before, whose exceptions nobody sees."""
    status, said = run("""
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGUSR2))
from paddle_flexckpt.manager.preemption import PreemptionSignals
class Ended(Exception): pass
calls = []
def end(number, frame):
    calls.append(number)
    raise Ended
signal.signal(signal.SIGUSR2, end)
watch = PreemptionSignals([signal.SIGUSR2])
try:
    if not os.fork():
        os._exit(len(calls))
except Ended:
    print(wait(-1), len(calls), watch.received, signal.pthread_sigmask(0, []))
""")
    assert (status, said) == (0, "0 1 True set()\n")
