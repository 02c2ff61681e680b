"""``.npz`` archives of numpy: arrays by byte ranges; what cannot be read so is refused by name."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.strided_boxes import boxes_of, count_boxes, row_major
from paddle_flexckpt.foreign.zip_directory import Layout, find_bytes, read_directory
from paddle_flexckpt.tools.tensor_reader import TensorReader

W = np.arange(24, dtype=np.float32).reshape(4, 6)
ARRAYS = {
    "w": W,
    "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, dtype=np.int64),
    "none": np.zeros((0, 3), dtype=np.uint8),
    "layers.0/b": np.array([True, False]),
    "c": np.array([1 + 2j], dtype=np.complex64),
}


def write(path, **changes):
    np.savez(path / "weights.npz", **{**ARRAYS, **changes})
    return path


def test_arrays_and_slices_are_read_from_a_directory_and_a_file(tmp_path):
    write(tmp_path)
    for source in (tmp_path, tmp_path / "weights.npz"):
        assert detect_format(source) == "npz"
        with TensorReader(source) as reader:
            assert set(reader.infos) == set(ARRAYS)
            for key, array in ARRAYS.items():
                got = reader.read(key)
                assert (got.shape, got.dtype, got.tobytes()) == (array.shape, array.dtype, array.tobytes()), key
            np.testing.assert_array_equal(reader.read("columns", (slice(1, 3), 2)), ARRAYS["columns"][1:3, 2])


def why(path, kind=ValidationError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


def test_what_has_no_byte_ranges_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **ARRAYS)
    assert "is compressed (numpy.savez_compressed): 'w.npy'" in why(tmp_path)
    assert "numpy.savez(new, **numpy.load(old))" in why(tmp_path)
    np.savez(tmp_path / "a.npz", w=W, o=np.array([{"a": 1}], dtype=object))
    assert "a pickle of Python objects is not read (key 'o'" in why(tmp_path)
    for other in (W.astype(">f4"), np.zeros(2, dtype="f4,i4"), np.array(["text"])):
        np.savez(tmp_path / "a.npz", o=other)
        assert "an array of another type than numbers is not read (key 'o'" in why(tmp_path)
    many = {name: np.zeros((2, 70_000), dtype=np.uint8, order="F") for name in "ab"}
    np.savez(tmp_path / "a.npz", **many)
    assert "arrays in column-major order with more than 131072 columns in all are not read (key 'b'" in why(tmp_path)
    np.savez(tmp_path / "a.npz")
    assert "has no arrays in it" in why(tmp_path)
    np.savez(tmp_path / "b.npz", w=W)
    assert "several files of arrays: a.npz, b.npz" in why(tmp_path)
    assert "there is no such file" in why(tmp_path / "c.npz")
    with pytest.raises(ValidationError, match="has no ids"):
        SourceDirectory(tmp_path / "b.npz").read_manifest(3)


def test_cut_short_anywhere(tmp_path):
    file = write(tmp_path) / "weights.npz"
    data = file.read_bytes()
    for length in range(1, len(data), 13):
        file.write_bytes(data[:length])
        assert "weights.npz is damaged" in why(tmp_path, CorruptCheckpointError)


def archive(text: bytes, data: bytes, name: str = "w.npy") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        file.writestr(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
    return target.getvalue()


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"


@pytest.mark.parametrize(
    ("text", "data", "what"),
    [
        (HEADER, bytes(4), r"has 8 bytes, 'w\.npy' 4"),
        (HEADER.replace(b"2", b"900000000000000000"), bytes(8), "has 3600000000000000000 bytes"),
        (HEADER.replace(b"(2,)", b"(" + b"1," * 40 + b")"), bytes(4), "has 4 bytes"),
        (HEADER.replace(b"(2,)", b"(-2,)"), bytes(8), "is none that numpy writes"),
        (HEADER.replace(b"False", b"print(1)"), bytes(8), "is none that numpy writes"),
        (HEADER + b" " * 20_000, bytes(8), "has 20058 bytes"),
    ],
)
def test_headers_that_lie(tmp_path, text, data, what):
    (tmp_path / "a.npz").write_bytes(archive(HEADER, bytes(8)))
    assert SourceDirectory(tmp_path).read_manifest().catalog.keys == ("w",)
    (tmp_path / "a.npz").write_bytes(archive(text, data))
    with pytest.raises(CorruptCheckpointError, match=what):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("name", ["../w.npy", "/etc/w.npy", "a/../../w.npy"])
def test_names_that_lead_out(tmp_path, name):
    (tmp_path / "a.npz").write_bytes(archive(HEADER, bytes(8), name))
    assert "leaves the checkpoint's directory" in why(tmp_path, CorruptCheckpointError)


def test_a_directory_that_lies(tmp_path):
    """Sizes and places in the directory are compared with the archive, and names with the members' own."""
    good = archive(HEADER, bytes(8))
    entry = good.rindex(b"PK\1\2")
    changes = {
        20: ("<L", 1 << 30),  # packed
        24: ("<L", 5),  # unpacked
        42: ("<L", 1 << 20),  # header
        46: ("5s", b"v.npy"),
        8: ("<H", 1),  # encrypted
        10: ("<H", 8),  # deflated
    }
    for offset, (form, value) in changes.items():
        data = bytearray(good)
        struct.pack_into(form, data, entry + offset, value)
        (tmp_path / "a.npz").write_bytes(bytes(data))
        with pytest.raises((CorruptCheckpointError, ValidationError)):
            SourceDirectory(tmp_path).read_manifest()


def test_members_with_large_sizes_in_their_extra_field(tmp_path):
    """As zipfile writes what it does not know the size of: the local header has an extra field."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file, file.open("w.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, W)
    with TensorReader(tmp_path) as reader:
        np.testing.assert_array_equal(reader.read("w"), W)


def test_the_end_of_a_directory_of_many_members(tmp_path):
    """More than 65,535 members have the longer end."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for number in range(65_536):
            file.writestr(f"{number}", b"")
        file.writestr("w.npy", archive(HEADER, bytes(8))[35:][: 10 + len(HEADER) + 8])
    assert SourceDirectory(tmp_path).read_manifest().catalog.keys == ("w",)


@pytest.mark.parametrize(
    ("shape", "strides", "count"),
    [((4, 6), (6, 1), 1), ((4, 6), (1, 4), 6), ((2, 3, 4), (12, 1, 3), 8), ((1, 5), (9, 1), 1), ((5,), (2,), 5),
     ((0, 3), (1, 1), 1), ((), (), 1), ((3, 1), (1, 77), 1), ((2, 3), (5, 1), 2), ((2, 2), (1, 1), 2)],
)  # fmt: skip
def test_boxes_are_the_array(shape, strides, count):
    storage = np.arange(100)
    whole = np.lib.stride_tricks.as_strided(storage, shape, tuple(8 * each for each in strides))
    made = np.full(shape, -1)
    boxes = list(boxes_of(shape, strides))
    assert len(boxes) == count_boxes(shape, strides) == count
    for box in boxes:
        size = int(np.prod(box.shape))
        place = tuple(slice(a, a + b) for a, b in zip(box.offset, box.shape))
        made[place] = storage[box.begin : box.begin + size].reshape(box.shape)
    np.testing.assert_array_equal(made, whole)
    assert row_major((2, 3, 4)) == (12, 4, 1)


def test_an_archive_of_a_known_layout_has_its_members_there(tmp_path):
    """Whatever byte of it is another one: if the layout is said to be the same, reading finds the same."""

    def archive(text: bytes, elements: bytes) -> bytes:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as file:
            file.writestr("a/data.pkl", text)
            file.writestr("a/data/0", elements)
            file.writestr("a/version", b"3")
        return made.getvalue()

    def members_of(data: bytes):
        read = lambda offset, length: data[offset : offset + length]  # noqa: E731
        members = read_directory(read, len(data), "f")
        found = [(member, find_bytes(read, member, "f")) for member in members[:2]]
        return read, members, found, read(found[0][1], members[0].size)

    known, other = archive(b"the text", bytes(40)), archive(b"the text", bytes(range(40)))
    read, members, found, text = members_of(known)
    layout = Layout(read, len(known), "f", members[:2], members[:1])
    path = tmp_path / "archives"
    same = 0
    for at in range(len(other)):
        changed = bytearray(other)
        changed[at] ^= 0x11
        path.write_bytes(b"before" + known + changed)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            found_at = layout.match_at(mapped, np.asarray([6, 5, 6 + len(known)])).tolist()
            assert found_at[:2] == [True, False]
            if found_at[2]:
                same += 1
                assert members_of(bytes(changed))[1:] == (members, found, text)
    # The elements, and the checksums in three headers (one of which nobody reads) and three entries.
    assert 40 + 2 * 4 + 3 * 4 <= same <= 40 + 30 + len("a/version") + 1 + 2 * 4 + 3 * 4
