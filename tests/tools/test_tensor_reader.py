"""Single tensors and slices: values as numpy gives them, and no more bytes than they need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.native.samples import flip
from tests.property import examples
from tests.transfer.samples import SHAPES, save, values_of

KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES)}
CUBE = (5, 6, 7)


@pytest.fixture(scope="module")
def values():
    return {**values_of(KINDS), "cube": np.arange(210, dtype=np.float32).reshape(CUBE)}


@pytest.fixture(scope="module")
def checkpoint(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "checkpoint"
    save(path, values)
    return path


def test_whole_tensors(values, checkpoint):
    with TensorReader(checkpoint) as reader:
        assert set(reader.infos) == set(values)
        for key, value in values.items():
            found = reader.read(key)
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
            assert (reader.infos[key].shape, reader.infos[key].dtype) == (value.shape, value.dtype.name)


PART = st.one_of(
    st.integers(-5, 4),
    st.builds(slice, st.none() | st.integers(-8, 8), st.none() | st.integers(-8, 8), st.none() | st.integers(1, 3)),
)


@examples(60)
@given(st.lists(PART, max_size=3), st.none() | st.integers(0, 3))
def test_slices_are_those_of_numpy(values, checkpoint, parts, dots):
    if dots is not None:
        parts.insert(min(dots, len(parts)), ...)
    wanted = values["cube"][tuple(parts)]
    with TensorReader(checkpoint) as reader:
        found = reader.read("cube", tuple(parts))
    assert found.shape == wanted.shape
    assert (found == wanted).all()


def test_a_slice_reads_what_it_needs(tmp_path, monkeypatch):
    big = np.random.default_rng(0).standard_normal((1 << 11, 1 << 10), dtype=np.float32)
    save(tmp_path / "big", {"w": big}, world=1)
    read = []
    whole = FileReader.close
    monkeypatch.setattr(FileReader, "close", lambda self: (read.append(self.count.bytes_read), whole(self))[1])
    with TensorReader(tmp_path / "big") as reader:
        assert (reader.read("w", np.s_[7, 3:5]) == big[7, 3:5]).all()
        assert (reader.read("w", 9) == big[9]).all()
    assert read == [8, 4096]


def test_statements_say_what_is_read(checkpoint, values):
    config = {"aoa_statements": ['cube -> flat, reshape="[30, 7]"', "m.float32^T -> turned"]}
    with TensorReader(checkpoint, aoa_config=config) as reader:
        assert "cube" not in reader.infos
        assert (reader.read("flat", np.s_[3:5]) == values["cube"].reshape(30, 7)[3:5]).all()
        assert reader.read("turned", 0).tobytes() == values["m.float32"].T[0].tobytes()


@pytest.mark.parametrize(
    ("key", "index", "error", "words"),
    [
        ("cubes", ..., ValidationError, "there is no such key.*such as.*'cube'"),
        ("cube", 5, IndexError, r"axis 0: 5 is not in a tensor of shape \[5, 6, 7\]"),
        ("cube", (0, 0, 0, 0), IndexError, "4 indices for a tensor"),
        ("cube", (..., ...), IndexError, "at most one"),
        ("cube", slice(None, None, -1), IndexError, "steps have to be positive"),
        # numpy takes these for something else than places along axes.
        ("cube", [0, 1], IndexError, r"axis 0: .*got \[0, 1\]"),
        ("cube", np.asarray([0, 1]), IndexError, "axis 0: expected an integer, a slice or"),
        ("cube", True, IndexError, "axis 0: .*got True"),
        ("cube", None, IndexError, "axis 0: .*got None"),
        ("cube", (0, 1.5), IndexError, "axis 1: .*got 1.5"),
        ("cube", "0:4", IndexError, "axis 0: .*got '0:4'"),
    ],
)
def test_what_there_is_not(checkpoint, key, index, error, words):
    with TensorReader(checkpoint) as reader, pytest.raises(error, match=words):
        reader.read(key, index)


def test_damage_is_found(tmp_path):
    save(tmp_path / "one", {"w": np.zeros(100, dtype=np.float32)}, world=1)
    (file,) = [each for each in (tmp_path / "one").iterdir() if each.suffix == ".distcp" or ".safetensors" in each.name]
    flip(file, file.stat().st_size - 3)
    with TensorReader(tmp_path / "one") as reader, pytest.raises(CorruptCheckpointError, match="'w'"):
        reader.read("w")


def test_a_reader_that_is_closed_reads_no_more(checkpoint):
    """Nothing keeps the checkpoint from being removed any more."""
    with TensorReader(checkpoint) as reader:
        reader.read("cube", 0)
    with pytest.raises(ValueError, match="is closed"):
        reader.read("cube", 0)
