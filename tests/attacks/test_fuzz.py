"""Random and mutated files: only named errors, in bounded memory, and never anything but plain data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.pickle_reader import OPERATIONS
from paddle_flexckpt.native.manifest import Manifest
from tests.attacks.opcodes import array, named, program, short
from tests.attacks.targets import TARGETS, outcome
from tests.foreign.writers import NEW
from tests.native.samples import store, whole
from tests.property import examples


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """The first read imports what it needs, which is no memory of the bytes: whichever test comes first."""
    for target in TARGETS.values():
        target.read(target.seeds()[0])


def read(data: bytes) -> None:
    error = outcome(TARGETS["pickle"], data)
    assert error is None or "Remedy (FC" in str(error)


@given(st.binary(max_size=300))
@examples(300)
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
@examples(500)
def test_random_programs(body):
    read(program(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(JSON, st.binary(max_size=40))
@examples(300)
def test_random_headers(value, data):
    text = json.dumps(value).encode()
    for raw in (len(text).to_bytes(8, "little") + text + data, data):
        for name in ("header", "manifest", "data_file", "foreign_safetensors"):
            outcome(TARGETS[name], raw)


CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(["flip", "set", "insert", "cut"]),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", TARGETS)
@given(st.integers(0, 99), CHANGES)
@examples(100)
def test_changed_files(name, number, changes):
    """Good files of every kind, changed; the header's length follows the header in half of the changes."""
    target = TARGETS[name]
    good = target.seeds()
    data = bytearray(good[number % len(good)])
    for where, kind, new in changes:
        at = int(where * len(data))
        if kind == "flip" and data:
            data[at] ^= new[0]
        elif kind == "set":
            data[at : at + len(new)] = new
        elif kind == "insert":
            data[at:at] = new
        else:
            del data[at : at + new[0]]
    if target.has_length and number % 2:
        data[:8] = max(0, data.rfind(b"}") - 7).to_bytes(8, "little")
    outcome(target, bytes(data))


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
