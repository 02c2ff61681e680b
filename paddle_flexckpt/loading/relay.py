"""The forwarding of pieces among the ranks of a node, one of which has received them from another node.

Tested in tests/saving/test_nodes.py and tests/loading/test_cooperative.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.catalog.errors import StoppedExchangeError
from paddle_flexckpt.planning.exchange_plan import ExchangePlan
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import Transport, open_transport
from paddle_flexckpt.transfer.copies import pack, unpack
from paddle_flexckpt.transfer.filling import Filling


class Relay:
    """A second exchange of a load, after all else has arrived.

    Attributes:
        addresses: Every member's address, in the group's order; known when the exchange is planned.
    """

    addresses: list[bytes]

    def __init__(self, comm: Communicator, closing: contextlib.ExitStack) -> None:
        """Take the ranks, and the stack that closes the transport, which opens on first use."""
        self._comm, self._closing = comm, closing

    @functools.cached_property
    def _transport(self) -> Transport:
        transport = open_transport(self._comm)
        self._closing.callback(transport.close)
        return transport

    def address(self) -> bytes:
        """Return the address by which the others reach this rank."""
        return self._transport.address()

    def forward(self, plan: ExchangePlan, filling: Filling) -> None:
        """Forward what others of this rank's node want too, and receive what they forward."""
        catalog, storage = filling.catalog, filling.storage
        dtypes = [dtype_of(name).numpy for name in catalog.dtypes]
        outgoing = {rank: pack(pieces, storage) for rank, pieces in plan.relays.items()}
        incoming = {
            rank: unpack(pieces, storage, lambda row: dtypes[catalog.dtype[row]])
            for rank, pieces in plan.relayed.items()
        }
        self._transport.exchange(self.addresses, outgoing, incoming)

    def refuse(self, plan: ExchangePlan) -> None:
        """End the wait of the others for what this rank, which has failed, would forward or receive."""

        def refuse() -> Generator[np.ndarray]:
            raise StoppedExchangeError("this rank has failed before it forwarded anything")
            yield np.zeros(0, dtype=np.uint8)

        with contextlib.suppress(Exception):  # its own, or that of another rank which has failed too
            streams = ({rank: refuse() for rank in side} for side in (plan.relays, plan.relayed))
            self._transport.exchange(self.addresses, *streams)
