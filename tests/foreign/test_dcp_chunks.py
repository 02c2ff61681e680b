"""``.metadata`` of torch.distributed.checkpoint: its chunks, and what damage of it is refused."""

from __future__ import annotations

import pickle
import random
import sys
import tracemalloc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.torch_dcp import PlacedChunks, read_chunks

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
        return pickle.dumps(of.Metadata(state_dict_metadata=entries, storage_data=dict(places)), protocol)


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


def rows_of(found: PlacedChunks) -> set[tuple]:
    """Key, offset, shape, file, first byte and number of bytes of each chunk."""
    table = found.catalog
    return {
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


@pytest.mark.parametrize(
    ("protocol", "share", "shuffled"), [(2, False, True), (4, False, True), (4, True, False), (5, False, False)]
)
def test_chunks_are_those_that_were_written(protocol, share, shuffled):
    source = random.Random(protocol + 8 * share + 16 * shuffled)
    tensors = random_tensors(source, 500)
    data = metadata(
        tensors, protocol, share, source if shuffled else None, shuffled, others=["step", "k0.x"], descriptors=share,
        twice=[tensor.key for tensor in tensors[::7]],
    )  # fmt: skip
    expected = {
        (tensor.key, offset, sizes, file, begin, length)
        for tensor in tensors
        for offset, sizes, file, begin, length in tensor.chunks
    }
    found = read_chunks(data, "f")
    assert rows_of(found) == expected
    assert len(found.catalog) == len(expected)
    assert found.others == ("step", "k0.x")


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_damage_is_refused_by_a_named_error(count):
    """Other bytes are other chunks or a CheckpointError, and nothing else."""
    source = random.Random(7)
    data = metadata(random_tensors(source, 50))
    refused = 0
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(source.choice((1, 1, 2))):
            changed[source.randrange(len(data))] = source.choice((source.randrange(256), *b"h)(\x94\x85KMJ"))
        try:
            read_chunks(bytes(changed), "f")
        except CheckpointError:
            refused += 1
    assert 0.2 * count < refused < count


def test_the_same_place_twice_is_an_error():
    tensor = Tensor("w", (80,), [((4 * i,), (4,), "__0_0.distcp", 9 * i, 9) for i in range(20)])
    data = metadata([tensor])
    place = data.rindex(b"K\x08\x85\x94\x85\x94R\x94")  # the offset of the third
    changed = data[:place] + data[place:].replace(b"K\x08", b"K\x0c", 1)
    with pytest.raises(CheckpointError, match="the same key twice in a dict"):
        read_chunks(changed, "f")


def test_memory_is_in_proportion_to_the_file():
    chunks = [((4 * i, 0), (4, 8), f"__{i % 7}_0.distcp", 1577 * i, 1577) for i in range(2_000)]
    data = metadata([Tensor("w", (8_000, 8), chunks)])
    tracemalloc.start()
    read_chunks(data, "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * len(data)
