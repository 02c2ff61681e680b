"""Block checksums: which block of which item has which value."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from paddle_flexckpt.native.checksums import BLOCK_BYTES, Checksums, hash_block


def test_a_block_is_hashed_with_xxh3_64():
    data = np.arange(1000, dtype=np.uint8)
    expected = xxhash.xxh3_64(bytes(data)).intdigest()
    assert hash_block(data) == hash_block(memoryview(data)) == hash_block(data.tobytes()) == expected


def test_blocks_are_numbered_item_by_item():
    lengths = np.asarray([0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 0, 5 * BLOCK_BYTES], dtype=np.int64)
    checksums = Checksums.of_items(np.arange(9, dtype=np.uint64), lengths)
    assert checksums.first.tolist() == [0, 0, 1, 2, 4, 4, 9]
    assert [checksums.of_block(3, b) for b in (0, 1)] == [2, 3]
    assert checksums.of_block(5, 4) == 8


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_checksum_too_few_or_too_many_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} checksums for 3 blocks"):
        Checksums.of_items(np.zeros(count, dtype=np.uint64), np.asarray([10, 20]), block_bytes=10)
