"""Runs of records in ``.metadata``: read at once, into columns, they are what the machine makes of them one by one."""

from __future__ import annotations

import pickle
import pickletools
import random
import sys
import tracemalloc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import Catalog, CheckpointError
from paddle_flexckpt.foreign import pickle_reader, record_bytes, torch_records
from paddle_flexckpt.foreign.dcp_chunks import PlacedChunks, read_chunks, read_in_columns, read_one_by_one
from tests.property import examples

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES = {
    _METADATA: (
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "BytesStorageMetadata",
    ),
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
            elif name == "TensorProperties":
                state = lambda self: (float32, _Layout(), False, 0, False)  # noqa: E731
                found[name] = type(name, (), {"__module__": module, "__getstate__": state})
            else:
                found[name] = type(name, (), {"__module__": module, "__init__": init})
            setattr(made[module], name, found[name])
    float32 = _Named("float32")
    float32.__module__ = "torch"
    float32.__qualname__ = "float32"
    made["torch"].float32 = float32
    with patch.dict(sys.modules, made):
        yield types.SimpleNamespace(**found, float32=float32)


class Tensor(NamedTuple):
    """A tensor of a ``.metadata``; chunks are offsets, sizes, file, first byte, number of bytes."""

    key: str
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], str, int, int]]


def metadata(
    tensors,
    protocol=4,
    share=False,
    shuffle=None,
    reverse=False,
    others=(),
    descriptors=False,
    twice=(),
    dumps=pickle.dumps,
) -> bytes:
    """A ``.metadata`` of tensors.

    Args:
        tensors: What is in it.
        protocol: The pickle's.
        share: Whether places refer to the texts and sizes of chunks; otherwise they have been gathered from ranks.
        shuffle: Puts places into another order.
        reverse: Whether the fields of places' names are in another order.
        others: Keys that are no tensors.
        descriptors: Whether places have the field of transformations.
        twice: Keys whose first chunk is described twice.
        dumps: What pickles it.
    """
    with torch_classes() as of:
        entries, places = {key: of.BytesStorageMetadata() for key in others}, []
        paths: dict = {}
        for key, size, chunks in tensors:
            entry = of.TensorStorageMetadata(properties=of.TensorProperties(), size=of.Size(size), chunks=[])
            entries[key] = entry
            for number, (offsets, sizes, file, begin, length) in enumerate(chunks):
                offset = of.Size(offsets)
                entry.chunks.append(of.ChunkStorageMetadata(offsets=offset, sizes=of.Size(sizes)))
                if not number and key in twice:
                    entry.chunks.append(of.ChunkStorageMetadata(offsets=of.Size(offsets), sizes=of.Size(sizes)))
                fields = {
                    "fqn": key if share else "".join(list(key)),
                    "index": number if number % 3 else None,
                    "offset": offset if share else of.Size(offsets),
                }
                if reverse:
                    fields = dict(reversed(list(fields.items())))
                place = {"relative_path": paths.setdefault(file, file), "offset": begin, "length": length}
                more = {"transform_descriptors": None} if descriptors else {}
                places.append((of.MetadataIndex(**fields), of._StorageInfo(**place, **more)))
        if shuffle is not None:
            shuffle.shuffle(places)
        places += [
            (of.MetadataIndex(fqn=key), of._StorageInfo(relative_path="f", offset=0, length=9)) for key in others
        ]
        return dumps(of.Metadata(state_dict_metadata=entries, storage_data=dict(places)), protocol)


def random_tensors(source: random.Random, count: int) -> list[Tensor]:
    """Tensors of ``count`` chunks in all, of few and many axes, with small and large numbers."""
    files = [f"__{rank}_0.distcp" for rank in range(5)] + ["__7_12.distcp", "x"]
    most = [200, 300, 70_000, 1 << 33]
    tensors, left = [], count
    while left > 0:
        chunks = min(left, source.choice((1, 1, 3, 60)))
        left -= chunks
        axes = source.choice((0, 1, 2, 2, 2, 3, 4, 6, 9))
        if not axes:
            chunks = 1
        key = f"k{len(tensors)}" + source.choice([""] * 20 + ["é", "k" * 300])
        size = tuple(source.randrange(1, source.choice(most)) for _ in range(axes))
        offsets = {tuple(source.randrange(source.choice(most)) for _ in range(axes)) for _ in range(chunks)}
        places = [
            (
                offset,
                tuple(source.randrange(source.choice(most)) for _ in range(axes)),
                source.choice(files),
                source.randrange(source.choice(most)),
                source.randrange(source.choice(most)),
            )
            for offset in sorted(offsets)
        ]
        tensors.append(Tensor(key, size, places))
    return tensors


def plain(found: PlacedChunks) -> Any:
    """What can be compared."""
    columns = {name: getattr(found.catalog, name) for name in Catalog.COLUMNS}
    return (
        {name: (column.dtype.str, column.tolist()) for name, column in columns.items()},
        (found.catalog.keys, found.catalog.dtypes, found.catalog.files),
        found.lengths.tolist(),
        found.others,
    )


@contextmanager
def small_frames(batch: int, frame: int) -> Iterator[Any]:
    """What pickles in batches of so many elements and frames of about so many bytes, all of which are looked at."""
    pickler, framer = pickle._Pickler, pickle._Framer
    with (
        patch.multiple(pickler, _BATCHSIZE=batch),
        patch.multiple(framer, _FRAME_SIZE_TARGET=frame, _FRAME_SIZE_MIN=1),
        patch.multiple(record_bytes, _LEAST_FRAME=1),
    ):
        yield pickle._dumps


def outcome(read, data: bytes):
    try:
        return plain(read(data, "f"))
    except CheckpointError as error:
        return type(error), str(error)


def check(data: bytes) -> None:
    """Columns are what the machine makes one by one."""
    found = read_in_columns(data, "f")
    assert found is not None
    assert plain(found) == plain(read_one_by_one(data, "f"))


@pytest.mark.parametrize(
    ("protocol", "share", "shuffled"), [(2, False, True), (4, False, True), (4, True, False), (5, False, False)]
)
def test_the_same_as_one_by_one(protocol, share, shuffled):
    source = random.Random(protocol + 8 * share + 16 * shuffled)
    tensors = random_tensors(source, 500)
    data = metadata(
        tensors, protocol, share, source if shuffled else None, shuffled, others=["step", "k0.x"], descriptors=share,
        twice=[tensor.key for tensor in tensors[::7]],
    )  # fmt: skip
    check(data)
    expected = {
        (tensor.key, offset, sizes, file, begin, length)
        for tensor in tensors
        for offset, sizes, file, begin, length in tensor.chunks
    }
    found = read_chunks(data, "f")
    table = found.catalog
    assert expected == {
        (
            table.key_name(row),
            table.unpadded(row, table.offset),
            table.unpadded(row, table.shape),
            table.file_name(row),
            int(table.byte_offset[row]),
            int(found.lengths[row]),
        )
        for row in range(len(table))
    }
    assert len(table) == len(expected)
    assert found.others == ("step", "k0.x")


@examples(40)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 100),
    share=st.booleans(),
    shuffled=st.booleans(),
    batch=st.sampled_from([3, 10, 1000]),
    frame=st.sampled_from([60, 400, 1 << 16]),
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sampled_from([*b"h)(\x94\x85KMJNRbtue", 0, 1, 255])), max_size=3
    ),
)
def test_whatever_is_in_it_the_columns_are_what_is_read_one_by_one(
    seed, count, share, shuffled, batch, frame, changes
):  # fmt: skip
    """And where they are not, it is read one by one: the same comes out, or the same error."""
    source = random.Random(seed)
    with small_frames(batch, frame) as dumps:
        shuffle = source if shuffled else None
        data = bytearray(metadata(random_tensors(source, count), 4, share, shuffle, dumps=dumps))
        for place, value in changes:
            data[place % len(data)] = value
        expected = outcome(read_one_by_one, bytes(data))
        found = read_in_columns(bytes(data), "f")
        if not changes:
            assert found is not None
        assert found is None or plain(found) == expected
        assert outcome(read_chunks, bytes(data)) == expected


def test_frames_that_begin_inside_an_operation():
    """Nobody writes them. One by one, their headers are what they are there: a part of a text, of a number."""
    source = random.Random(3)
    chunks = [((4 * i, 0), (4, 8), f"__{i % 7}_0.distcp", 1577 * i, 1577) for i in range(40)]
    whole = metadata([Tensor("w", (160, 8), chunks)], protocol=5)
    operations = [place for operation, _, place in pickletools.genops(whole) if operation.name != "FRAME"]
    places = set(operations[1:])
    bare = whole[11:]  # behind the protocol and the one frame's header
    read = {True: 0, False: 0}
    with patch.multiple(record_bytes, _LEAST_FRAME=1):
        for turn in range(120):
            cut = source.randrange(len(bare) // 2, len(bare) - 100) if turn % 2 else source.choice(operations[50:]) - 11
            parts = (bare[:cut], bare[cut:])
            data = whole[:2] + b"".join(b"\x95" + len(part).to_bytes(8, "little") + part for part in parts)
            expected = outcome(read_one_by_one, data)
            found = read_in_columns(data, "f")
            assert found is None or plain(found) == expected
            read[cut + 11 in places] += found is not None
    assert read[True] > 50 and not read[False]


def count_work(data: bytes, monkeypatch) -> tuple[int, list[int]]:
    """Return how many records the machine has made, and of how many places each look at a run was."""
    counted, looks = 0, list[int]()
    build, starts = pickle_reader._Machine._build, torch_records._starts

    def counting(machine):
        nonlocal counted
        counted += 1
        build(machine)

    def looking(text, head):
        found = starts(text, head)
        looks.append(len(found))
        return found

    with monkeypatch.context() as patched:
        patched.setitem(pickle_reader.OPERATIONS, ord("b"), counting)
        patched.setattr(torch_records, "_starts", looking)
        assert read_in_columns(data, "f") is not None
    return counted, looks


@pytest.mark.parametrize(("order", "share"), [("by tensor", True), ("by rank", False)])
def test_few_records_are_left_to_the_machine(monkeypatch, order, share):
    """Of 20,000 chunks with three records each: the first ones of a tensor's. By rank there are vectors in between.

    A run does not end where a frame or a batch of the pickler's does, and is looked at in few pieces, and once.
    """
    shapes = [(4, 8), (4,), (4, 8), (4, 2, 3)]
    tensors = [
        Tensor(
            f"layers.{number}.weight",
            (4 * 500, *shapes[number % 4][1:]),
            [
                ((4 * rank, *[0] * (len(shapes[number % 4]) - 1)), shapes[number % 4], f"__{rank}_0.distcp",
                 1577 * number, 1577)
                for rank in range(500)
            ],
        )
        for number in range(40)
    ]  # fmt: skip

    class ByRank:
        def shuffle(self, places):
            places.sort(key=lambda place: place[1].relative_path)

    data = metadata(tensors, share=share, shuffle=ByRank() if order == "by rank" else None)
    records, looks = count_work(data, monkeypatch)
    assert records < 4 * len(tensors)
    assert len(looks) < 3 * len(tensors)
    assert sum(looks) < 1.2 * 40_000


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_damage_is_told_as_by_the_machine(count):
    source = random.Random(7)
    data = metadata(random_tensors(source, 50))
    check(data)
    refused = 0
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(source.choice((1, 1, 2))):
            changed[source.randrange(len(data))] = source.choice((source.randrange(256), *b"h)(\x94\x85KMJ"))
        expected = outcome(read_one_by_one, bytes(changed))
        found = read_in_columns(bytes(changed), "f")
        assert found is None or plain(found) == expected
        assert outcome(read_chunks, bytes(changed)) == expected
        refused += len(expected) == 2
    assert 0.2 * count < refused < count


def test_the_same_place_twice_is_an_error():
    tensor = Tensor("w", (80,), [((4 * i,), (4,), "__0_0.distcp", 9 * i, 9) for i in range(20)])
    data = metadata([tensor])
    place = data.rindex(b"K\x08\x85\x94\x85\x94R\x94")  # the offset of the third
    changed = data[:place] + data[place:].replace(b"K\x08", b"K\x0c", 1)
    assert read_in_columns(changed, "f") is None
    with pytest.raises(CheckpointError, match="the same key twice in a dict"):
        read_chunks(changed, "f")


def test_what_runs_cost():
    chunks = [((4 * i, 0), (4, 8), f"__{i % 7}_0.distcp", 1577 * i, 1577) for i in range(2_000)]
    data = metadata([Tensor("w", (8_000, 8), chunks)])
    peaks = []
    for read in (read_in_columns, read_one_by_one):
        tracemalloc.start()
        read(data, "f")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 8 * len(data)
    assert peaks[0] < 0.7 * peaks[1]
