"""Runs of records in ``.metadata``: read at once, they are what the machine makes of them one by one."""

from __future__ import annotations

import pickle
import random
import sys
import tracemalloc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign import pickle_reader
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.torch_values import DCP_METADATA, Chunk, ItemIndex, ItemPlace

ONE_BY_ONE = replace(DCP_METADATA, runs=None)
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES = {
    _METADATA: ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties"),
    _FILES: ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
}


class _Layout:
    def __reduce__(self):
        return sys.modules["torch.serialization"]._get_layout, ("torch.strided",)


class _Named:
    """Pickles as a name."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


@contextmanager
def torch_classes() -> Iterator[types.SimpleNamespace]:
    """Classes that pickle as torch's do."""
    made = {name: types.ModuleType(name) for name in ("torch.distributed", "torch.distributed.checkpoint", *_NAMES)}

    def init(self, **values):
        self.__dict__.update(values)

    found = {}
    for module, names in _NAMES.items():
        for name in names:
            if name == "_get_layout":
                found[name] = types.FunctionType((lambda text: None).__code__, {}, name)
                found[name].__module__, found[name].__qualname__ = module, name
            elif name == "Size":
                reduce = lambda self: (type(self), (tuple(self),))  # noqa: E731
                found[name] = type(name, (tuple,), {"__module__": module, "__reduce__": reduce})
            else:
                found[name] = type(name, (), {"__module__": module, "__init__": init})
            setattr(made[module], name, found[name])
    float32 = _Named("float32")
    float32.__module__ = "torch"
    float32.__qualname__ = "float32"
    made["torch"].float32 = float32
    with patch.dict(sys.modules, made):
        yield types.SimpleNamespace(**found, float32=float32)


def metadata(chunks, protocol=4, share=False, shuffle=False) -> bytes:
    """A ``.metadata``: ``chunks`` are keys, offsets, sizes, files' names, and places."""
    with torch_classes() as of:
        entries, places = {}, {}
        for key, offsets, sizes, file, place, length in chunks:
            form = of.TensorProperties()
            form.__dict__.update(dtype=of.float32)
            offset = of.Size(offsets)
            chunk = of.ChunkStorageMetadata(offsets=offset, sizes=of.Size(sizes))
            if key not in entries:
                entries[key] = of.TensorStorageMetadata(size=of.Size(sizes), chunks=[])
            entries[key].chunks.append(chunk)
            other = offset if share else of.Size(offsets)
            # Without a shared text, as after a gather.
            name = key if share else "".join(key)
            if shuffle:
                index = of.MetadataIndex(fqn=name, offset=other, index=len(places))
            else:
                index = of.MetadataIndex(fqn=name, index=len(places), offset=other)
            places[index] = of._StorageInfo(relative_path=file, offset=place, length=length)
        return pickle.dumps([list(entry.chunks) for entry in entries.values()] + [places], protocol)


def random_chunks(source: random.Random, count: int):
    files = [f"__{rank}_0.distcp" for rank in range(5)]
    most = [200, 300, 70_000, 1 << 33]
    for number in range(count):
        axes = source.choice((0, 1, 2, 2, 2, 3, 4, 6))
        key = f"k{number // 40}" + ("" if source.random() < 0.98 else "é")
        offsets, sizes = (tuple(source.randrange(source.choice(most)) for _ in range(axes)) for _ in range(2))
        yield key, offsets, sizes, source.choice(files), source.randrange(source.choice(most)), 1577


def outcome(data: bytes, vocabulary):
    try:
        return load_pickle(data, "f", vocabulary)
    except CheckpointError as error:
        return type(error), str(error)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_same_as_one_by_one(protocol, share, shuffle):
    source = random.Random(protocol + 2 * share + 4 * shuffle)
    chunks = list({(c[0], c[1]): c for c in random_chunks(source, 3000)}.values())
    data = metadata(chunks, protocol, share, shuffle)
    loaded = load_pickle(data, "f", DCP_METADATA)
    assert loaded == load_pickle(data, "f", ONE_BY_ONE)
    assert loaded[-1] == {
        ItemIndex(key, offsets): ItemPlace(file, place, length) for key, offsets, _, file, place, length in chunks
    }
    by_key: dict = {}
    for key, offsets, sizes, *_ in chunks:
        by_key.setdefault(key, []).append(Chunk(offsets, sizes))
    assert loaded[:-1] == list(by_key.values())


def count_operations(data: bytes, monkeypatch) -> int:
    counted = 0
    build = pickle_reader._Machine._build

    def counting(machine):
        nonlocal counted
        counted += 1
        build(machine)

    with monkeypatch.context() as patched:
        patched.setitem(pickle_reader.OPERATIONS, ord("b"), counting)
        load_pickle(data, "f", DCP_METADATA)
    return counted


def test_few_records_are_left_to_the_machine(monkeypatch):
    """Of 20,000 chunks with three records each: where a frame or a batch of the pickler's ends, and the first ones."""
    chunks = [("w", (4 * i, 0), (4, 8), f"__{i % 7}_0.distcp", 1577 * i, 1577) for i in range(20_000)]
    for share in (False, True):
        assert count_operations(metadata(chunks, share=share), monkeypatch) < 1000


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_damage_is_told_as_by_the_machine(count):
    source = random.Random(7)
    chunks = list({(c[0], c[1]): c for c in random_chunks(source, 60)}.values())
    data = metadata(chunks)
    assert type(outcome(data, DCP_METADATA)) is list
    refused = 0
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(source.choice((1, 1, 2))):
            changed[source.randrange(len(data))] = source.choice((source.randrange(256), *b"h)(\x94\x85KMJ"))
        expected = outcome(bytes(changed), ONE_BY_ONE)
        assert outcome(bytes(changed), DCP_METADATA) == expected
        refused += type(expected) is tuple
    assert 0.2 * count < refused < count


def test_an_object_of_a_run_that_is_referred_to():
    """The run did not keep it: the pickle is read again, one by one."""
    with torch_classes() as of:
        chunks = [of.ChunkStorageMetadata(offsets=of.Size((i,)), sizes=of.Size((1,))) for i in range(9)]
        data = pickle.dumps([chunks, [chunks[5]]], 4)
    assert load_pickle(data, "f", DCP_METADATA) == [[Chunk((i,), (1,)) for i in range(9)], [Chunk((5,), (1,))]]


def test_what_runs_cost():
    chunks = [("w", (4 * i, 0), (4, 8), f"__{i % 7}_0.distcp", 1577 * i, 1577) for i in range(4_000)]
    data = metadata(chunks)
    peaks = []
    for vocabulary in (DCP_METADATA, ONE_BY_ONE):
        tracemalloc.start()
        load_pickle(data, "f", vocabulary)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 14 * len(data)
    assert peaks[0] < 1.3 * peaks[1]
