"""The messages of the ranks of a push, the version that was sent, and the handle of a push under way.

Tested in tests/rollout/test_channel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.wire import split
from paddle_flexckpt.rollout.push_reports import PushReport
from paddle_flexckpt.rollout.segment import SegmentNames
from paddle_flexckpt.rollout.switch import SwitchProcess
from paddle_flexckpt.transfer.agreement import BRIEF_PUSH
from paddle_flexckpt.transfer.plan_cache import encode_short

TOKEN_BYTES = 6
VERSION_BYTES = 8
_NOTHING = "00" * TOKEN_BYTES


class Notice(NamedTuple):
    """One rank's message at the beginning of a push, of at most 64 bytes; the tokens are the coordinator's."""

    is_unchanged: bool
    version: bytes
    token: str = ""
    recycled: str = ""
    kept: str = ""

    def encode(self) -> bytes:
        """Return the message."""
        tokens = [bytes.fromhex(each or _NOTHING) for each in (self.token, self.recycled, self.kept)]
        return encode_short(BRIEF_PUSH, self.version, bytes([self.is_unchanged, *b"".join(tokens)]))

    @classmethod
    def decode(cls, message: bytes) -> Notice:
        """Return the notice that :meth:`encode` encoded."""
        rest = split(message)[0][len(BRIEF_PUSH) :]
        version, flag, tokens = rest[:VERSION_BYTES], rest[VERSION_BYTES], rest[VERSION_BYTES + 1 :].hex()
        step = len(_NOTHING)
        return cls(bool(flag), version, *(tokens[i : i + step].replace(_NOTHING, "") for i in range(0, 3 * step, step)))


@dataclass(frozen=True, eq=False)
class Sent:
    """A version whose bytes are written.

    Attributes:
        version: Its name.
        path: The path of its segment, on the engine's machine.
        names: Its segment, and others of the channel.
        written: Bytes of tensors that this rank wrote.
        planned: Whether it was planned anew.
        switch: The process that switches the engine; the coordinator's.
        begin: When the push began.
        seconds: From then until everything was written.
    """

    version: str
    path: str
    names: SegmentNames
    written: int
    planned: bool
    switch: SwitchProcess | None
    begin: float
    seconds: float


class PushHandle:
    """A push under way: the weights are written, and the engine takes them."""

    def __init__(self, finish: Callable[[], PushReport], look: Callable[[], bool]) -> None:
        """Made by :meth:`WeightChannel.push`."""
        self._finish, self._look = finish, look
        self._outcome: PushReport | CheckpointError | None = None

    def is_done(self) -> bool:
        """Return whether the engine has switched, or refused. The coordinator alone knows before :meth:`result`."""
        return self._outcome is not None or self._look()

    def result(self) -> PushReport:
        """Wait for the engine. Every rank calls this.

        Returns:
            The report.

        Raises:
            CheckpointError: The engine refused: it serves the version it had.
        """
        if self._outcome is None:
            try:
                self._outcome = self._finish()
            except CheckpointError as error:
                self._outcome = error
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        return self._outcome
