"""Messages to other ranks: catalogs and fields as bytes, no pickle. Tested in tests/catalog/test_wire.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog.table import Catalog


def encode_catalog(catalog: Catalog) -> bytes:
    """Encode a catalog as bytes."""
    return safetensors_numpy.save(catalog.to_arrays())


def decode_catalog(data: bytes) -> Catalog:
    """Decode a catalog of :func:`encode_catalog`."""
    return Catalog.from_arrays(safetensors_numpy.load(data))


def join(parts: Iterable[bytes]) -> bytes:
    """Join several parts into one message."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def split(message: bytes) -> list[bytes]:
    """Split a message of :func:`join` into its parts."""
    parts, position = [], 0
    while position < len(message):
        end = position + 8 + int.from_bytes(message[position : position + 8], "little")
        parts.append(message[position + 8 : end])
        position = end
    return parts


def pack_by_position(payloads: Mapping[int, bytes]) -> tuple[bytes, bytes]:
    """Return payloads for some positions as the parts of a message."""
    return np.asarray([*payloads], dtype="<u4").tobytes(), join(payloads.values())


def join_by_position(*payloads: Mapping[int, bytes]) -> dict[int, bytes]:
    """Join several payloads for each position into one message."""
    places = sorted(set().union(*payloads))
    return {place: join([each.get(place, b"") for each in payloads]) for place in places}


def split_by_position(messages: Mapping[int, bytes], count: int) -> list[dict[int, bytes]]:
    """Return the payloads of :func:`join_by_position`, ``count`` from each position, without empty ones."""
    parts = {place: split(message) for place, message in messages.items()}
    return [{place: each[i] for place, each in parts.items() if each[i]} for i in range(count)]


def unpack_by_position(parts: Sequence[bytes]) -> dict[int, bytes]:
    """Return the payloads of :func:`pack_by_position`, by position."""
    return dict(zip(np.frombuffer(parts[0], dtype="<u4").tolist(), split(parts[1])))
