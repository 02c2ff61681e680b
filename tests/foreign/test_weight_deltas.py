"""Frames of one tensor: what is encoded is decoded, in any parts; what is no frame of the tensor is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("zstandard")
import zstandard

from paddle_flexckpt.foreign import weight_deltas
from paddle_flexckpt.foreign.weight_deltas import ENCODINGS, DeltaDecoder, DeltaEncoder, new_hasher
from tests.rollout import reference


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def encode(old, new, encoding, checksum="xxh3-128", parts=(0,)):
    encoder = DeltaEncoder(old.copy(), encoding, checksum)
    for begin, end in zip(parts, [*parts[1:], len(new)]):
        encoder.add(new[begin:end], begin)
    return encoder.finish()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 7, 1000, 4096])
def test_what_is_encoded_is_decoded(monkeypatch, encoding, size):
    """And the frame is the one of the format's description."""
    monkeypatch.setattr(weight_deltas, "CHUNK_BYTES", 512)
    rng = np.random.default_rng(size)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    for share in (0.01, 0.5, 1):
        new = old.copy()
        new[rng.random(size) < share] ^= 3
        new[-1] ^= 1
        frame, checksum = encode(old, new, encoding, parts=(0, size // 3, size // 2))
        assert frame == reference.frame_of(old.tobytes(), new.tobytes(), encoding)
        assert checksum == reference.checksum("xxh3-128", new.tobytes())
        made, decoder = old.copy(), DeltaDecoder(frame, encoding, size)
        for begin in range(0, size, 512):
            decoder.apply(made[begin : begin + 512], begin)
        assert (made == new).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_has_not_changed_has_no_frame(encoding):
    for size in (0, 5):
        same = np.arange(size, dtype=np.uint8)
        assert encode(same, same, encoding) is None
    # Changed to zero, at the first byte.
    assert encode(np.ones(1, np.uint8), np.zeros(1, np.uint8), encoding) is not None


def test_checksums_have_the_format_s_digits():
    for name, expected in [("adler32", "11e60398"), ("xxh3-128", "88a8434ce8f01c85d6fa9dfa0d0e7a3f")]:
        hasher = new_hasher(name)
        hasher.update(b"Wiki")
        hasher.update(b"pedia")
        assert hasher.hexdigest() == reference.checksum(name, b"Wikipedia")
        assert len(hasher.hexdigest()) == len(expected)
    assert hasher.hexdigest() != expected
    assert new_hasher("adler32").hexdigest() == "00000001"


def test_positions_in_any_order_are_applied_the_last_of_a_place_wins():
    delta = struct.pack("<I", 4) + struct.pack("<4I", 3, 0, 3, 1) + bytes([1, 2, 3, 4])
    made = np.zeros(5, np.uint8)
    DeltaDecoder(compress(delta), "overwrite", 5).apply(made, 0)
    assert made.tolist() == [2, 4, 0, 3, 0]


@pytest.mark.parametrize(
    ("encoding", "frame", "text"),
    [
        ("xor", compress(bytes(9)), "its frame has 9 bytes for a tensor of 10"),
        ("xor", compress(bytes(1 << 20)), "its frame has 1048576 bytes for a tensor of 10"),
        ("xor", b"not a frame", "its frame is damaged"),
        ("xor", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10)), "its frame has -1 bytes"),
        ("overwrite", compress(bytes(1 << 20)), "its frame has 1048576 bytes for a tensor of 10"),
        ("overwrite", compress(struct.pack("<I", 2) + bytes(9)), "its frame has 13 bytes for 2 positions"),
        ("overwrite", compress(struct.pack("<II", 1, 10) + b"x"), "a position beyond the 10 bytes"),
        ("overwrite", compress(b"ab"), "its frame has 2 bytes for"),
        ("overwrite", b"", "its frame is damaged"),
    ],
)
def test_what_is_no_frame_of_the_tensor_is_refused(encoding, frame, text):
    with pytest.raises(ValueError, match=text):
        DeltaDecoder(frame, encoding, 10)


def test_a_frame_that_ends_early_is_refused():
    random = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    for cut, text in [(700, "its frame (ends after|is damaged)"), (1005, "its frame (ends|is damaged)")]:
        frame = compress(random.tobytes())
        decoder = DeltaDecoder(frame[: min(cut, len(frame) - 1)], "xor", 1000)
        with pytest.raises(ValueError, match=text):
            decoder.apply(np.zeros(1000, np.uint8), 0)
