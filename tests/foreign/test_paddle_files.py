"""Files of Paddle's own checkpoints, written without it: as Python's pickle reads them, and as the reader here does."""

from __future__ import annotations

import pickle
import pickletools

import numpy as np
import pytest

from paddle_flexckpt.catalog import CatalogBuilder, concat
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata
from paddle_flexckpt.foreign.paddle_files import PARAMETER_NAMES, StateFile, encode_metadata
from paddle_flexckpt.foreign.pickle_reader import load_pickle

DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 bfloat16 float8_e4m3fn float8_e5m2".split()
)


def table():
    """Every type, no axes, no elements, a flattened range, a part, a long name, and more axes than opcodes have."""
    builder = CatalogBuilder(0, "0_0.distcp")
    for dtype in DTYPES:
        builder.add(dtype, dtype, (2, 3), (0, 0), (2, 3))
    builder.add("scalar", "float32", (), (), ())
    builder.add("none", "float32", (0, 3), (0, 0), (0, 3))
    builder.add("flat", "float32", (4, 5), (0, 0), (4, 5), (3, 9))
    builder.add("nothing of it", "float32", (4, 5), (0, 0), (4, 5), (20, 20))
    builder.add("part", "int64", (1000, 4), (300, 0), (300, 4))
    builder.add("ä" * 300, "float32", (1, 2, 1, 2, 1), (0,) * 5, (1, 2, 1, 2, 1))
    return builder.build()


def values_of(items):
    """The elements of each shard, as a ``.distcp`` has them."""
    stand_ins = {"bfloat16": "uint16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
    values = {}
    for row in range(len(items)):
        name = items.dtype_name(row)
        shape = (int(items.size[row]),) if items.is_flattened[row] else items.unpadded(row, items.shape)
        numbers = np.arange(int(items.size[row])) % 2 if name == "bool" else np.arange(int(items.size[row]))
        values[items.key_name(row)] = numbers.astype(stand_ins.get(name, name)).reshape(shape)
    return values


def written(items, *parts):
    file = StateFile(items)
    data = b"".join(piece.tobytes() for piece in file.pieces(iter(parts)))
    assert len(data) == file.nbytes
    return data


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("read", [pickle.loads, load_pickle])
def test_a_data_file_is_a_pickle_of_a_dict_of_arrays(read):
    items = table()
    values = values_of(items)
    # In any number of arrays; none for what has no elements.
    parts = [part for value in values.values() for part in np.array_split(value.reshape(-1), 3) if part.size]
    found = read(written(items, *parts))
    assert found.pop(PARAMETER_NAMES) == {key: key for key in values}
    assert list(found) == list(values)
    for key, value in values.items():
        assert (found[key].dtype, found[key].shape, found[key].tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.parametrize("read", [pickle.loads, load_pickle])
def test_a_rank_without_anything_has_a_file_too(read):
    assert read(written(table().take(np.zeros(0, dtype=np.int64)))) == {PARAMETER_NAMES: {}}


def test_it_names_nothing_but_arrays_of_numpy():
    """By the module that numpy 1 and numpy 2 know; and is of protocol 4, which Paddle writes."""
    items = table()
    operations = list(pickletools.genops(written(items, *(v for v in values_of(items).values() if v.size))))
    texts = [argument for opcode, argument, _ in operations if opcode.name.endswith("UNICODE")]
    assert {texts[place - 1] for place, text in enumerate(texts) if text in ("_reconstruct", "ndarray", "dtype")} == {
        "numpy.core.multiarray",
        "numpy",
    }
    assert not [opcode.name for opcode, _, _ in operations if opcode.proto > 4]


@pytest.mark.parametrize("sizes", [[], [5], [7], [2, 5]])
def test_data_that_does_not_end_with_a_shard_is_refused(sizes):
    builder = CatalogBuilder(0, "0_0.distcp")
    builder.add("w", "int8", (6,), (0,), (6,))
    with pytest.raises(ValueError, match="does not end with a shard"):
        written(builder.build(), *(np.zeros(size, np.int8) for size in sizes))


def test_replicas_are_numbered_from_the_first_row_on():
    """The class of an index and its number are both new to the reader then."""
    tables = []
    for rank in (0, 1):
        builder = CatalogBuilder(rank, f"{rank}_0.distcp")
        builder.add("w", "float32", (2,), (0,), (2,))
        tables.append(builder.build())
    found = load_pickle(encode_metadata(concat(tables)))
    assert found.storage_metadata == {
        LocalTensorIndex("w", (0,), local_shape=(2,), replica_id=rank): f"{rank}_0.distcp" for rank in (0, 1)
    }


def test_metadata_says_where_everything_is():
    items = table()
    found = load_pickle(encode_metadata(items, flat_mapping=True))
    assert found.flat_mapping == {key: (key,) for key in items.keys}
    assert found.state_dict_metadata["flat"] == [LocalTensorMetadata((0, 0), (4, 5), "float32", (4, 5), True, (3, 9))]
    assert found.state_dict_metadata["bfloat16"] == [LocalTensorMetadata((0, 0), (2, 3), "bfloat16", (2, 3))]
    index = LocalTensorIndex("part", (300, 0), local_shape=(300, 4))
    assert found.storage_metadata[index] == "0_0.distcp"
    assert len(found.storage_metadata) == len(items)
