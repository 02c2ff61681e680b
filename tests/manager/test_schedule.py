"""The signal handlers: a flag, the handler that was there before, and the way back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager.schedule import PreemptionSignals

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


def test_the_default_action_is_the_default_action_again():
    # The first is closed while the second is installed on top of it, so its handler comes back when the second goes.
    code = """
import signal
from paddle_flexckpt.manager.schedule import PreemptionSignals
first, second = PreemptionSignals([signal.SIGTERM]), PreemptionSignals([signal.SIGTERM])
first.close()
signal.raise_signal(signal.SIGTERM)
print("alive", second.received, first.received, flush=True)
second.close()
signal.raise_signal(signal.SIGTERM)
print("never")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("alive True False\n", -signal.SIGTERM), done.stderr


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
