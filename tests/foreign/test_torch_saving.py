"""What torch saves, written without torch: archives with the bytes that torch gives them, and ``.metadata``."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign import torch_saving
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.torch_archive import DCP_TENSOR, open_archive, place_elements
from paddle_flexckpt.foreign.torch_dcp import read_chunks
from paddle_flexckpt.foreign.torch_saving import (
    DcpChunk,
    DcpTensor,
    encode_dcp_metadata,
    head_of,
    plan_archive,
    tail_of,
)
from tests.foreign import make_torch_dcp

DATA = Path(__file__).parent / "data" / "torch_dcp"


def archive_of(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    plan = plan_archive(dtype, shape)
    whole = head_of(plan) + data + tail_of(plan, zlib.crc32(data))
    assert (len(whole), len(data)) == (plan.nbytes, plan.data_bytes)
    return whole


def archives_of_torch():
    """The archives of tensors that torch has written, and what is pickled in each."""
    for path in sorted(DATA.glob("*.distcp")):
        data, begin = path.read_bytes(), 0
        for match in re.finditer(b"PK\5\6", data):
            archive, begin = data[begin : match.end() + 18], match.end() + 18
            found = zipfile.ZipFile(io.BytesIO(archive))
            if "archive/data/0" in found.namelist():
                tensor = load_pickle(found.read("archive/data.pkl"), "f", DCP_TENSOR)
                yield archive, tensor, found.read("archive/data/0")


def test_an_archive_has_the_bytes_that_torch_gives_it():
    """But for a transposed tensor, and the strides of one without elements, which do not matter."""
    alike, others = [], []
    for archive, tensor, data in archives_of_torch():
        same = archive_of(tensor.dtype, tensor.size, data) == archive
        (alike if same else others).append((tensor.dtype, tensor.size))
    assert sorted(others) == [("float32", (0, 3)), ("float32", (3, 4))]
    assert {dtype for dtype, _ in alike} == {dtype for _, dtype, _ in make_torch_dcp.EXPECTED.values()}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 300), (2, 3, 1, 70_000), (1,) * 7], ids=str)
def test_archives_are_read(dtype, shape):
    size = int(np.prod(shape, dtype=int)) * dtype_of(dtype).itemsize
    data = np.random.default_rng(0).bytes(size)
    whole = archive_of(dtype, shape, data)
    read = lambda offset, length: whole[offset : offset + length]  # noqa: E731
    archive = open_archive(read, len(whole), "f", DCP_TENSOR, 1 << 16, {})
    begin, _ = place_elements(read, archive, archive.value, "f")
    assert (archive.value.dtype, archive.value.size) == (dtype, shape)
    assert begin % 64 == 0
    assert whole[begin : begin + size] == data
    with zipfile.ZipFile(io.BytesIO(whole)) as found:
        assert found.testzip() is None
        assert found.read("archive/data/0") == data


@pytest.mark.parametrize("limit", [1, 100, 700, 1000, 5000])
def test_sizes_and_places_beyond_32_bits(monkeypatch, limit):
    """With a lower limit: members from there on have their sizes and places in 64 bits."""
    monkeypatch.setattr(torch_saving, "_MOST_32", limit)
    monkeypatch.setattr(torch_saving, "_ENTRY", Lowered(torch_saving._ENTRY, limit))
    monkeypatch.setattr(torch_saving, "_END", Lowered(torch_saving._END, limit))
    torch_saving.plan_archive.cache_clear()
    torch_saving.head_of.cache_clear()
    try:
        data = bytes(range(256)) * 6
        whole = archive_of("uint8", (1536,), data)
    finally:
        torch_saving.plan_archive.cache_clear()
        torch_saving.head_of.cache_clear()
    with zipfile.ZipFile(io.BytesIO(whole)) as found:
        assert found.testzip() is None
        assert found.read("archive/data/0") == data
    read = lambda offset, length: whole[offset : offset + length]  # noqa: E731
    archive = open_archive(read, len(whole), "f", DCP_TENSOR, 1 << 16, {})
    begin, _ = place_elements(read, archive, archive.value, "f")
    assert whole[begin : begin + 1536] == data


class Lowered:
    """A layout of bytes in which the lowered limit stands for the largest number, as the real one does."""

    def __init__(self, layout, limit):
        self._layout, self._limit, self.size = layout, limit, layout.size

    def pack(self, *values):
        wide = {8, 9, 16} if len(values) == 17 else {6}
        return self._layout.pack(
            *(0xFFFFFFFF if place in wide and value == self._limit else value for place, value in enumerate(values))
        )


def test_metadata_is_read_as_it_was_meant():
    """Many chunks and tensors, texts of more than 255 bytes and of other alphabets, scalars, large numbers."""
    tensors = [
        DcpTensor(
            f"layer.{number}" + ("é" * 200) * (number == 3),
            sorted(DTYPES)[number % len(DTYPES)],
            (6000, 4, *[1] * (number % 5)),
            [
                DcpChunk(
                    (3 * part, 0, *[0] * (number % 5)),
                    (3, 4, *[1] * (number % 5)),
                    f"__{part % 3}_0.distcp",
                    (1 << 31) * (number % 3) + 1577 * part,
                    1577 + number,
                )
                for part in range(1100 if not number else 1)
            ],
        )
        for number in range(1010)
    ]
    tensors.append(DcpTensor("scalar", "float32", (), [DcpChunk((), (), "__0_0.distcp", 0, 1577)]))
    data = encode_dcp_metadata(tensors)
    found = read_chunks(data, "f")
    table = found.catalog
    assert {
        (
            table.key_name(row),
            table.dtype_name(row),
            table.unpadded(row, table.global_shape),
            DcpChunk(
                table.unpadded(row, table.offset),
                table.unpadded(row, table.shape),
                str(table.file_name(row)),
                int(table.byte_offset[row]),
                int(found.lengths[row]),
            ),
        )
        for row in range(len(table))
    } == {(tensor.key, tensor.dtype, tensor.shape, chunk) for tensor in tensors for chunk in tensor.chunks}
