"""A background writer for the tests of a module, and its process brought to a stop."""

from __future__ import annotations

import contextlib
import os
import signal

import numpy as np
import pytest


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    fc = pytest.importorskip("paddle_flexckpt")
    from paddle_flexckpt.ranks.communicator import SoloCommunicator

    with fc.BackgroundWriter(nice=0) as made:
        # Its process is there from now on.
        path = tmp_path_factory.mktemp("first")
        fc.save_state_dict({"w": np.zeros(1)}, path, SoloCommunicator(), async_save=made).result(60)
        yield made


@pytest.fixture
def stopped(writer):
    """A context in which the writer process does nothing."""

    @contextlib.contextmanager
    def stop():
        os.kill(writer.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(writer.pid, signal.SIGCONT)

    return stop
