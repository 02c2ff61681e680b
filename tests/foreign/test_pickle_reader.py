"""The reader of foreign pickles: plain data comes back as it was."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError
from paddle_flexckpt.catalog.metadata import Metadata
from paddle_flexckpt.foreign import pickle_reader
from paddle_flexckpt.foreign.paddle_files import BEGIN, END, FILLED, NEW, NONE, named, text
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.pickle_values import ELEMENT_TYPES
from tests.property import examples

PROTOCOLS = [2, 3, 4, 5]
ATOMS = st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    ATOMS | st.lists(ATOMS, max_size=5).map(tuple),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=40,
)


@given(value=DATA)
@examples(60)
def test_plain_data_comes_back(value):
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        got = load_pickle(data)
        assert (got, repr(got)) == (value, repr(value))
        assert repr(load_pickle(pickletools.optimize(data))) == repr(value)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 3)], ids=str)
def test_arrays_and_numbers_of_numpy(shape):
    for protocol, code in itertools.product(PROTOCOLS, sorted(ELEMENT_TYPES)):
        check_array(protocol, code, shape)


def check_array(protocol, code, shape):
    size = int(np.prod(shape, dtype=int))
    array = np.arange(size).astype(code).reshape(shape)
    array = np.asarray(array)
    value = {"c": array, "again": array.copy(), "fortran": array.copy(order="F"), "number": array.dtype.type(1)}
    got = load_pickle(pickle.dumps(value, protocol))
    for name in ("c", "again", "fortran"):
        assert (got[name].dtype, got[name].shape) == (value[name].dtype, shape)
        assert got[name].tobytes() == value[name].tobytes()
        assert size == 0 or not got[name].flags.writeable
    assert got["number"] == 1
    assert type(got["number"]) in (bool, int, float, complex)


def test_arrays_are_views_of_the_file():
    data = pickle.dumps({"w": np.zeros(1 << 20, dtype=np.float32)}, 4)
    tracemalloc.start()
    try:
        array = load_pickle(data)["w"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.shape == (1 << 20,)
    assert peak < 1 << 16


def test_truncation_is_damage():
    data = pickle.dumps({"w": np.arange(5.0), "t": (1, "a"), "l": [2.5, None, True]}, 4)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="the file"):
            load_pickle(data[:length], "the file")


def test_limits_are_limits(monkeypatch):
    monkeypatch.setattr(pickle_reader, "MOST_OPERATIONS", 300)
    assert load_pickle(pickle.dumps(list(range(100)), 4))[99] == 99
    nested = []
    for _ in range(80):
        nested = [nested]
    for value, what in ((1 << 150, "integer of 19 bytes"), (nested, "nested deeper than 64")):
        with pytest.raises(UnsafePickleError, match=what):
            load_pickle(pickle.dumps(value, 4))
    monkeypatch.setattr(pickle_reader, "MOST_OPERATIONS", 50)
    with pytest.raises(UnsafePickleError, match="more than 50 operations"):
        load_pickle(pickle.dumps(list(range(100)), 4))


PADDLE_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"


def described(name: str, field: str, value: bytes) -> bytes:
    """A pickle of an instance of one of Paddle's classes, with one more field; the value is given by its opcodes."""
    tensor = {"tensor_key": text("w"), "global_offset": b")"}
    fields = {} if name == "Metadata" else tensor if "Index" in name else {
        "global_offset": b")", "local_shape": b")", "dtype": text("float32")
    }  # fmt: skip
    state = b"".join(text(key) + code for key, code in {**fields, field: value}.items())
    return BEGIN + named(PADDLE_CLASSES, name) + NEW + state + FILLED + END


PLAIN = {"text": text("x"), "number": b"K\x02", "tuple": text("a") + b"\x85", "dict": b"}(" + text("a") + b"K\x01u"}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_more_fields_of_plain_data_are_left_out_of_metadata_with_a_warning(value, caplog):
    assert type(load_pickle(described("Metadata", "checkpoint_version", value))) is Metadata
    assert "are left out: 'checkpoint_version'" in caplog.text
    caplog.clear()
    for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex"):
        load_pickle(described(name, "some_field", NONE))
        # Nothing but data; and a shard's fields say what its bytes are.
        for other, field in ((named("numpy", "ndarray"), "f"), (named("os", "system"), "f"), (NONE, "__class__")):
            with pytest.raises(UnsafePickleError):
                load_pickle(described(name, field, other))
    for name in ("LocalTensorMetadata", "LocalTensorIndex"):
        with pytest.raises(UnsafePickleError, match="no field of that name"):
            load_pickle(described(name, "compression", value))
    assert not caplog.text
