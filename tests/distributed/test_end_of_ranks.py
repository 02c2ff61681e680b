"""The end of the rank that holds Paddle's store, while a peer hangs up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from paddle_flexckpt.testing import device_check
from tests.device import plugin
from tests.documents import ROOT

# libc runs what was registered before the import of Paddle after the destructors of Paddle's statics: first close(1),
# which the test sees, then wait(), which ends when the test closes the standard input of `cat`.
RANK = textwrap.dedent("""
    import ctypes, socket, subprocess, sys

    waiting = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.wait, None, None)
    libc.__cxa_atexit(libc.close, ctypes.c_void_p(1), None)

    import paddle

    if sys.argv[2] == "cpu_world":
        from paddle_flexckpt.testing import cpu_world

        cpu_world.install()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = paddle.base.core.TCPStore("127.0.0.1", port, True, 1, 60)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # a job's store is never destroyed
    print(port, flush=True)
    with open(int(sys.argv[1])) as peer_is_connected:
        peer_is_connected.read()
""")


def simulated_device() -> dict[str, str]:
    reason = plugin.missing_tools()
    if reason:
        pytest.skip(reason)
    return {**plugin.environment(1), "FLAGS_selected_rehearsals": "0"}


#: The variables of a rank, for each way in which ranks are started here without one's own launcher.
WAYS = {"cpu_world": dict, "simulated_device": simulated_device, "device_check": lambda: device_check.ENVIRONMENT}


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_hangs_up_late_ends_nobody(way):
    connected, connect = os.pipe()
    command = [sys.executable, "-c", RANK, str(connected), way]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_"))}
    env = {**kept, **WAYS[way]()}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[connected],
        cwd=ROOT,
        env=env,
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        port = int(rank.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
            os.close(connect)
            assert rank.stdout.read() == b"", "the rank has not come to its end"
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b"", "the store closes its side when it has seen the end, or its process aborts"
        rank.stdin.close()
        assert rank.wait(timeout=60) == 0
    os.close(connected)
