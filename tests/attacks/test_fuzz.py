"""Random and mutated files: only named errors, in bounded memory, and never anything but plain data."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
)
from paddle_flexckpt.storage import Manifest, load_pickle
from paddle_flexckpt.storage.pickle_machine import OPERATIONS
from paddle_flexckpt.storage.safetensors_header import header_bytes, parse_header
from tests.attacks.opcodes import array, named, program, short
from tests.storage.foreign import NEW, metadata_pickle
from tests.storage.samples import store, whole

PLAIN = (int, float, complex, bool, str, type(None), np.ndarray)
ROW = {"key": "w", "dtype": "float32", "shape": (4, 4), "offset": (0, 0), "local": (4, 4), "flat": (1, 7)}
SAMPLES = [
    metadata_pickle({"0_0.distcp": [ROW, {**ROW, "key": "v", "flat": None}]}),
    metadata_pickle({"0_0.distcp": [ROW]}, protocol=2),
    *(
        pickle.dumps({"w": np.arange(6.0).reshape(2, 3), "s": np.int64(3), "names": {"w": "linear_0.w_0"}}, protocol)
        for protocol in (2, 4, 5)
    ),
]


def walk(value):
    """All that is in a result; a bomb would not let this end."""
    stack = [value]
    while stack:
        each = stack.pop()
        kind = type(each)
        if kind in (list, tuple):
            stack.extend(each)
        elif kind is dict:
            stack.extend(each)
            stack.extend(each.values())
        elif kind in (Metadata, LocalTensorIndex, LocalTensorMetadata):
            stack.extend(vars(each).values())
        else:
            assert kind in PLAIN, kind


def read(data: bytes) -> None:
    tracemalloc.start()
    try:
        walk(load_pickle(data))
    except CorruptCheckpointError as error:
        assert "Remedy: " in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # The constant: Hypothesis and tracebacks allocate too.
    assert peak < 2 * len(data) + (1 << 20)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_random_bytes(data):
    read(data)
    read(b"\x80\x04" + data)
    read(program(data))


OPERATION = st.sampled_from(sorted(OPERATIONS)).map(lambda code: bytes([code]))
PART = st.one_of(
    OPERATION,
    st.sampled_from(sorted(OPERATIONS)).flatmap(lambda c: st.binary(max_size=4).map(lambda d: bytes([c]) + d)),
    st.integers(0, 8).map(lambda i: b"h" + bytes([i])),
    st.sampled_from(
        [
            array(b"K\x01\x85"),
            named(NEW, "Metadata") + b")\x81",
            named(NEW, "LocalTensorIndex") + b")\x81",
            named("numpy._core.multiarray", "scalar"),
            named("numpy._core.numeric", "_frombuffer"),
            named("_codecs", "encode"),
            named("os", "system"),
            short("w"),
            short("global_offset"),
            b"C\x04\0\0\0\0",
            b"]\x94",
            b"}\x94",
            b"(",
            b"K\x01",
        ]
    ),
)


@given(st.lists(PART, max_size=40).map(b"".join))
@example(b"]\x94(h\x00h\x00e")
@example(array(b"K\x01\x85") + array(b"K\x01\x85") + b"K\x01\x87" + b"R")
@settings(deadline=None, max_examples=500)
def test_random_programs(body):
    read(program(body))


@given(
    st.sampled_from(SAMPLES),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(min_size=1, max_size=9)), max_size=6
    ),
)
@settings(deadline=None, max_examples=500)
def test_mutations(sample, changes):
    data = bytearray(sample)
    for where, kind, new in changes:
        at = int(where * len(data))
        if kind == 0:
            data[at] ^= new[0]
        elif kind == 1:
            data[at : at + len(new)] = new
        elif kind == 2:
            data[at:at] = new
        else:
            del data[at : at + new[0]]
        data = data or bytearray(b"\x80")
    read(bytes(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON, st.binary(max_size=40))
@settings(deadline=None, max_examples=300)
def test_random_headers(value, data):
    import json

    text = json.dumps(value).encode()
    whole_file = len(text).to_bytes(8, "little") + text + data
    for raw in (whole_file, data):
        try:
            length = header_bytes(raw[:8], len(raw), "f")
            parse_header(raw[8 : 8 + length], len(raw), "f")
        except CorruptCheckpointError as error:
            assert "Remedy: " in str(error)
        try:
            Manifest.decode(raw, "f")
        except CheckpointError as error:
            assert str(error).startswith("f is damaged")


def test_mutated_manifests(tmp_path):
    data = store(tmp_path, [whole("w", "float32", (4, 4)), whole("v", "int64", (3,))]).manifest.encode()
    random = np.random.default_rng(0)
    for _ in range(500):
        mutated = bytearray(data)
        mutated[random.integers(len(data))] ^= int(random.integers(1, 256))
        try:
            Manifest.decode(bytes(mutated), "f")
        except CheckpointError as error:
            assert str(error).startswith("f ")
        else:
            raise AssertionError("a flipped byte went unnoticed")
