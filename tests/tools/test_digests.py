"""Digests of tensors: equal however a tensor is cut, different where anything differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog.dtypes import DTYPES, dtype_of
from paddle_flexckpt.tools import digests
from paddle_flexckpt.tools.digests import box_sums, digest_checkpoint, digest_of
from tests.property import examples
from tests.transfer.samples import SHAPES, save, values_of

KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES)}


def sums_of(value: np.ndarray) -> np.ndarray:
    return box_sums(np.ascontiguousarray(value).ravel(), (0,) * value.ndim, value.shape, value.shape)


def slow_sums(value: np.ndarray) -> list[int]:
    """Word by word, in Python's own integers."""
    words = value.ravel().view(f"<u{min(value.dtype.itemsize, 4)}").tolist()
    found = []
    for lane in range(2):
        total = 0
        for place, word in enumerate(words):
            low, high = (np.asarray([each], dtype=np.uint64) for each in (place & 0xFFFF, place >> 16))
            one = int(digests._mixed(low + np.uint64((lane + 1) << 32))[0])
            two = int(digests._mixed(high + np.uint64((lane + 1) << 48))[0])
            total += word * one * two
        found.append(total % 2**64)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_the_rule(dtype):
    value = values_of({"w": (dtype, (3, 5))})["w"]
    assert sums_of(value).tolist() == slow_sums(value)


def test_long_runs_and_short_ones_give_the_same(monkeypatch):
    value = np.random.default_rng(0).standard_normal((3, 50_000)).astype(np.float32)
    long = sums_of(value)
    monkeypatch.setattr(digests, "SHORT_RUN", 1 << 20)
    assert sums_of(value).tolist() == long.tolist()


def test_places_beyond_the_table_count():
    value = np.zeros(1 << 17, dtype=np.float32)
    found = set()
    for place in (0, 1, 1 << 16, (1 << 16) + 1):
        value[place] = 1
        found.add(tuple(sums_of(value).tolist()))
        value[place] = 0
    assert len(found) == 4


@examples(50)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 6), max_size=4),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_parts_add_up_to_the_whole(dtype, shape, at_once, random):
    value = values_of({"w": (dtype, tuple(shape))})["w"]
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(3 if shape else 0):
        offset, extents = boxes.pop(random.randrange(len(boxes)))
        axis = random.randrange(len(shape))
        cut = random.randint(0, extents[axis])
        for low, size in ((0, cut), (cut, extents[axis] - cut)):
            box = list(offset), list(extents)
            box[0][axis] += low
            box[1][axis] = size
            boxes.append((tuple(box[0]), tuple(box[1])))
    total = np.zeros(2, dtype=np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "SUMMED_AT_ONCE", at_once)
        patch.setattr(digests, "SHORT_RUN", random.choice([1, 4, 1000]))
        for offset, extents in boxes:
            part = value[tuple(slice(o, o + n) for o, n in zip(offset, extents))]
            total += box_sums(np.ascontiguousarray(part).ravel(), offset, extents, tuple(shape))
    assert total.tolist() == sums_of(value).tolist()


@examples(200)
@given(st.sampled_from(["float32", "bfloat16", "float64", "int8"]), st.randoms(use_true_random=False))
def test_what_differs_has_another_digest(dtype, random):
    info, numpy = TensorInfo((40,), dtype), dtype_of(dtype).numpy
    value = np.random.default_rng(random.randrange(1 << 30)).standard_normal(40).astype(numpy) * numpy.type(40)
    changed = value.copy()
    one, other = random.sample(range(40), 2)
    kind = random.choice(["swap", "signs", "one", "shift"])
    if kind == "swap":
        changed[[one, other]] = changed[[other, one]]
    elif kind == "signs":
        changed[[one, other]] = -changed[[one, other]]
    elif kind == "one":
        changed.view(np.uint8)[random.randrange(value.nbytes)] ^= 1 << random.randrange(8)
    else:
        changed = np.roll(changed, 1)
    if changed.tobytes() != value.tobytes():
        assert digest_of(info, sums_of(changed)) != digest_of(info, sums_of(value))


def test_shape_and_dtype_count():
    zeros = np.zeros(2, dtype=np.uint64)
    infos = [TensorInfo((2, 3), "float32"), TensorInfo((3, 2), "float32"), TensorInfo((2, 3), "int32")]
    assert len({digest_of(info, zeros) for info in infos}) == 3


def test_checkpoints_of_two_layouts_have_the_same_digests(tmp_path):
    values = values_of(KINDS)
    save(tmp_path / "three", values, world=3)
    save(tmp_path / "two", values, world=2, replicas=2)
    found = digest_checkpoint(tmp_path / "three")
    assert found == digest_checkpoint(tmp_path / "two")
    assert set(found) == set(values)
    assert len(set(found.values())) == len(values)
    renamed = digest_checkpoint(tmp_path / "two", aoa_config={"aoa_statements": ["m.float32 -> x"]})
    assert renamed["x"] == found["m.float32"]


def test_the_digest_stays_what_it_is():
    """Digests are kept by users and compared later, by other versions of the library."""
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest_of(TensorInfo((3, 4), "float32"), sums_of(value)) == "5abbae0d5b68dd4619023c7bf16314c1"
