"""A push of weights without an engine: the bytes of a segment beside memcpy, in this process and through a receiver.

python -m benchmarks.push --directory /dev/shm
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import arguments, finish, random_tensors, ratios, row, turns
from paddle_flexckpt.loading.peers import ReshardOptions
from paddle_flexckpt.loading.pushed_weights import PushedWeights
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.rollout.authenticated import SECRET
from paddle_flexckpt.rollout.receiver import RemoteSink
from paddle_flexckpt.rollout.segment import LocalSink, SegmentDirectory, SegmentNames, Sink

KEY = "a common secret."


class Pusher:
    """Segments that are written one after the other, each into the memory of the one before the last."""

    def __init__(self, weights: PushedWeights, folder: str, address: str = "") -> None:
        self._weights, self._address = weights, address
        self._directory = SegmentDirectory(folder)
        self._before, self._current = "", ""
        self.path = ""

    def push(self) -> None:
        kept = (self._current,) if self._current else ()
        token = secrets.token_hex(6)
        names = SegmentNames(self._address.rpartition(":")[2] or "here", token, self._before, kept, self.nbytes, True)
        sink: Sink
        if self._address:
            sink = RemoteSink(self._address, KEY.encode(), names)
        else:
            sink = LocalSink(self._directory, names)
        with contextlib.closing(sink):
            self._weights.write(sink, leads=True)
            sink.seal()
        self._before, self._current = self._current, token
        self.path = self._directory.path(names.file(token))

    @property
    def nbytes(self) -> int:
        return self._weights.file.nbytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=9)
    parser.add_argument("--mib", type=int, default=1024, help="of the weights (default %(default)s)")
    options = parser.parse_args(argv)
    state = dict(sorted(random_tensors(options.mib // 4, (1024, 1024))))  # in the order of a segment
    arrays = [each.reshape(-1).view(np.uint8) for each in state.values()]
    space = np.zeros(sum(map(len, arrays)), dtype=np.uint8)

    def copy() -> None:
        begin = 0
        for array in arrays:
            space[begin : begin + len(array)] = array
            begin += len(array)

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        weights = PushedWeights(SoloCommunicator(), state, lambda: (b"{}",), "push", ReshardOptions(), None)
        weights.plan(None, (0,))
        command = [sys.executable, "-m", "paddle_flexckpt", "receive", "--port", "0", "--directory", folder]
        receiver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, SECRET: KEY})
        try:
            address = receiver.stderr.readline().split()[2] if receiver.stderr else ""
            here, there = Pusher(weights, folder), Pusher(weights, folder, address)
            first = turns({"memcpy": copy, "here": here.push}, 1)
            for pusher in (here, there, there):
                pusher.push()
            seconds = turns({"memcpy": copy, "here": here.push, "receiver": there.push}, options.pairs)
            for pusher in (here, there):
                with open(pusher.path, "rb") as file:
                    file.seek(len(weights.file.header))
                    if not np.array_equal(np.fromfile(file, np.uint8), space):
                        raise RuntimeError(f"{pusher.path} has other bytes")
        finally:
            receiver.kill()
            receiver.communicate()
    told = functools.partial("memcpy / push of {} MiB {}".format, options.mib)
    rows = [
        row(told("on one machine"), ratios(seconds["memcpy"], seconds["here"]), ">= 0.7"),
        row(told("on one machine, the first, which makes the memory"), ratios(first["memcpy"], first["here"])),
        row(told("through a receiver, over loopback"), ratios(seconds["memcpy"], seconds["receiver"])),
    ]
    finish(options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
