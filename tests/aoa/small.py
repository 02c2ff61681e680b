"""Small programs on whole numpy arrays: compiled, planned for sharded sides, carried out, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.aoa.element_maps import TensorMapping
from paddle_flexckpt.catalog import Catalog
from tests.aoa.evaluate import carry_out
from tests.aoa.layouts import catalog_of
from tests.property.layouts import Shard

Arrays = Mapping[str, np.ndarray]
# Axis and number of equal tensor-parallel parts, by key; other keys are whole.
Cuts = Mapping[str, "tuple[int, int]"]


def numbered(*shape: int, dtype: str = "float32", start: int = 0) -> np.ndarray:
    """An array whose elements are all different (as far as the dtype can tell them apart)."""
    return (np.arange(np.prod(shape, dtype=int)) + start).reshape(shape).astype(np.dtype(dtype))


def room(*shape: int, dtype: str = "float32") -> np.ndarray:
    """A target of that shape: what it has is -7, or 7 where that does not exist."""
    return np.full(shape, 7 if np.dtype(dtype).kind in "bu" else -7).astype(np.dtype(dtype))


def shards_of(arrays: Arrays, cuts: Cuts) -> list[Shard]:
    """The shards of all arrays; part i is on rank i."""
    shards = []
    for key, array in arrays.items():
        axis, parts = cuts.get(key, (0, 1))
        for rank in range(parts):
            offset, shape = [0] * array.ndim, list(array.shape)
            if parts > 1:
                if shape[axis] % parts:
                    raise ValueError(f"{key}: {parts} parts of {shape} along axis {axis}")
                shape[axis] //= parts
                offset[axis] = rank * shape[axis]
            shards.append(Shard(key, array.dtype.name, array.shape, tuple(offset), tuple(shape), None, rank))
    return sorted(shards, key=lambda shard: shard.rank)


def catalog(arrays: Arrays, cuts: Cuts | None = None) -> Catalog:
    """The catalog of arrays that are cut."""
    return catalog_of(shards_of(arrays, cuts or {}))


def compiled(texts: Sequence[str], source: Arrays, target: Arrays | None, **options) -> TensorMapping:
    """The mapping for whole tensors."""
    return compile_program(
        {"aoa_statements": list(texts)}, catalog(source), None if target is None else catalog(target), **options
    )


def run(
    texts: Sequence[str],
    source: Arrays,
    target: Arrays,
    source_cuts: Cuts | None = None,
    target_cuts: Cuts | None = None,
    config: Mapping[str, object] | None = None,
    **options,
) -> dict[str, np.ndarray]:
    """What a program makes of the source, by target key.

    Args:
        texts: The statements.
        source: Whole source arrays.
        target: What the whole targets hold before.
        source_cuts: How source keys are cut.
        target_cuts: How target keys are cut.
        config: The whole configuration, in place of ``texts``.
        options: Further arguments of ``compile_program``.

    Raises:
        LookupError: A target key gets nothing.
    """
    held, wanted = shards_of(source, source_cuts or {}), shards_of(target, target_cuts or {})
    catalogs = catalog_of(held), catalog_of(wanted)
    mapping = compile_program(config or {"aoa_statements": list(texts)}, *catalogs, **options)
    if mapping.unfed:
        raise LookupError(f"nothing feeds {sorted(mapping.unfed)}")
    storages = [shard.of(target[shard.key]).copy() for shard in wanted]
    written, kept, _ = carry_out(mapping, (catalogs[0], held), (catalogs[1], wanted), dict(source), storages)
    found = {key: array.copy() for key, array in target.items()}
    for shard, storage, count, mask in zip(wanted, storages, written, kept):
        if (count + mask != 1).any():
            raise LookupError(f"{shard}: elements are written {count.tolist()} times, kept: {mask.tolist()}")
        found[shard.key][tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.shape))] = storage.reshape(
            shard.shape
        )
    return found


def assert_equal(got: Arrays, expected: Arrays) -> None:
    """Same keys, shapes, dtypes and bits."""
    assert set(got) == set(expected)
    for key, array in expected.items():
        assert (key, got[key].shape, got[key].dtype) == (key, array.shape, array.dtype)
        assert got[key].tobytes() == np.ascontiguousarray(array).tobytes(), key
