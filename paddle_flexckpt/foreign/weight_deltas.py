"""The delta of one tensor, in the format that slime, miles and SGLang share: a zstd frame.

``xor`` has the exclusive-or of the new and the old bytes. ``overwrite`` has a count, that many positions (all ``<u4``),
and the new byte at each of them. A checksum is that of all new bytes of the tensor.

Tested in tests/foreign/test_weight_deltas.py.
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import ValidationError

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "adler32", "blake3")
# Decompressed, combined and hashed at a time: it stays in the processor's cache.
CHUNK_BYTES = 1 << 19


def import_package(name: str) -> Any:
    """Return a package that deltas need; ValidationError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValidationError(
            [f"deltas of weights need {name}, which is not installed. Remedy (FC901): pip install {name}"]
        ) from error


class _Adler32:
    value = 1

    def update(self, data: Any) -> None:
        self.value = zlib.adler32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def new_hasher(checksum: str) -> Any:
    """Return an object with ``update`` and ``hexdigest`` for one of ``CHECKSUMS``; errors of :func:`import_package`."""
    if checksum == "adler32":
        return _Adler32()
    return import_package("xxhash").xxh3_128() if checksum == "xxh3-128" else import_package("blake3").blake3()


class DeltaEncoder:
    """A delta in the making, of a tensor whose new bytes come in order."""

    def __init__(self, old: np.ndarray, encoding: str, checksum: str) -> None:
        """Take the old bytes, which are overwritten."""
        self._old, self._is_xor, self._hasher = old, encoding == "xor", new_hasher(checksum)
        self._positions, self._values = list[np.ndarray](), list[np.ndarray]()

    def add(self, new: np.ndarray, begin: int) -> None:
        """Add new bytes, of which the first has this place in the tensor."""
        self._hasher.update(new)
        old = self._old[begin : begin + len(new)]
        if self._is_xor:
            np.bitwise_xor(old, new, out=old)
            return
        changed = np.flatnonzero(old != new)
        self._positions.append((changed + begin).astype("<u4"))
        self._values.append(new[changed])

    def finish(self) -> tuple[bytes, str] | None:
        """Return the frame and the checksum; None if nothing has changed."""
        delta = self._old
        if not self._is_xor:
            count = np.array([sum(map(len, self._values))], "<u4")
            delta = np.concatenate([part.view(np.uint8) for part in (count, *self._positions, *self._values)])
        if not delta.any():
            return None
        return import_package("zstandard").ZstdCompressor(level=1).compress(delta), self._hasher.hexdigest()


class DeltaDecoder:
    """A frame that is applied to a tensor's bytes, which come in order. A ValueError says that it is damaged."""

    def __init__(self, frame: bytes, encoding: str, nbytes: int) -> None:
        """Begin; ``nbytes``: of the tensor."""
        zstandard = import_package("zstandard")
        self._error, self._positions = zstandard.ZstdError, None
        try:
            length = zstandard.frame_content_size(frame)
            # Before anything is allocated: a few bytes can claim to be very many.
            if (encoding == "xor" and length != nbytes) or not 0 <= length <= 4 + 5 * nbytes:
                raise ValueError(f"its frame has {length} bytes for a tensor of {nbytes}")
            if encoding == "xor":
                self._reader = zstandard.ZstdDecompressor().stream_reader(frame)
                self._scratch = np.empty(min(CHUNK_BYTES, nbytes), dtype=np.uint8)
                return
            delta = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(f"its frame is damaged: {error}") from error
        count = int.from_bytes(delta[:4].tobytes(), "little")
        if len(delta) != 4 + 5 * count:
            raise ValueError(f"its frame has {len(delta)} bytes for {count} positions")
        positions, values = delta[4 : 4 + 4 * count].view("<u4").astype(np.int64), delta[4 + 4 * count :]
        if count and positions.max() >= nbytes:
            raise ValueError(f"its frame has a position beyond the {nbytes} bytes of the tensor")
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions, kind="stable")
            positions, values = positions[order], values[order]
        self._positions, self._values = positions, values

    def apply(self, part: np.ndarray, begin: int) -> None:
        """Change a part of the tensor, no longer than ``CHUNK_BYTES``; the parts are all of it."""
        if self._positions is not None:
            low, high = np.searchsorted(self._positions, (begin, begin + len(part)))
            part[self._positions[low:high] - begin] = self._values[low:high]
            return
        done, scratch = 0, self._scratch[: len(part)]
        try:
            while done < len(part):
                count = self._reader.readinto(scratch[done:])
                if not count:
                    raise ValueError(f"its frame ends after {begin + done} bytes")
                done += count
        except self._error as error:
            raise ValueError(f"its frame is damaged: {error}") from error
        np.bitwise_xor(part, scratch, out=part)
