"""Differences between two checkpoints: what is reported, and what has to be read for it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES, dtype_of
from paddle_flexckpt.tools import differences
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.differences import DifferenceSums
from tests.property import examples
from tests.ramdisk import memory_directory
from tests.transfer.samples import SHAPES, save, values_of

KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES)}
BLOCK = 1 << 20


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


def test_one_state_in_two_layouts_is_equal(values, tmp_path):
    save(tmp_path / "three", values, world=3)
    save(tmp_path / "two", values, world=2, replicas=2)
    report = diff(tmp_path / "three", tmp_path / "two")
    assert report.equal, report.lines()
    assert report.keys == len(KINDS)
    assert "are equal" in report.summary()
    # Only tensors of one axis or none are stored alike.
    assert 0 < report.bytes_by_checksum < sum(value.nbytes for value in values.values())


def test_one_layout_is_compared_by_checksums_alone(values, tmp_path):
    for name in ("one", "other"):
        save(tmp_path / name, values)
    report = diff(tmp_path / "one", tmp_path / "other")
    assert report.equal
    assert (report.bytes_read, report.bytes_by_checksum) == (0, sum(value.nbytes for value in values.values()))


def test_only_blocks_that_differ_are_read(tmp_path):
    """20 MiB in three flattened ranges, of which three elements differ, two of them in one block."""
    first = {"w": np.random.default_rng(0).standard_normal((5, 1 << 10, 1 << 10), dtype=np.float32)}
    second = {"w": first["w"].copy()}
    for place in ((0, 0, 7), (0, 0, 9), (4, 1023, 1023)):
        second["w"][place] += 1
    save(tmp_path / "one", first)
    save(tmp_path / "other", second)
    report = diff(tmp_path / "one", tmp_path / "other")
    assert report.bytes_read <= 1.05 * 2 * 2 * BLOCK
    found = report.differing["w"]
    assert (found.changed, found.first_index, found.share) == (3, [0, 0, 7], 3 / first["w"].size)
    assert 0.9 < found.max_difference < 1.1


@pytest.mark.slow
def test_two_gibibytes_of_which_one_percent_of_the_blocks_differ():
    """2,048 blocks a side, of which 20 differ in one element: only these are read, by the system's count too."""
    tensors, per_tensor = 64, 32
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.w": rng.random(per_tensor * BLOCK // 4, dtype=np.float32) for i in range(tensors)}
    differing = rng.choice(tensors * per_tensor, 20, replace=False).tolist()
    with memory_directory(4 << 30) as root:
        save(root / "one", state, world=1)
        for number in differing:
            tensor, block = divmod(number, per_tensor)
            state[f"layers.{tensor}.w"][block * BLOCK // 4 + 5] += 1
        save(root / "other", state, world=1)
        assert sum(file.stat().st_size for file in (root / "one").iterdir()) >= 2 << 30
        manifests = sum(file.stat().st_size for file in root.glob("*/0.manifest"))
        before = bytes_read_by_process()
        report = diff(root / "one", root / "other")
        taken = bytes_read_by_process() - before
    assert report.bytes_read <= 1.05 * 2 * len(differing) * BLOCK
    assert report.bytes_by_checksum == (tensors * per_tensor - len(differing)) * BLOCK
    assert len(report.differing) == len({number // per_tensor for number in differing})
    assert sum(each.changed for each in report.differing.values()) == len(differing)
    assert taken - manifests <= 1.05 * 2 * len(differing) * BLOCK


def bytes_read_by_process() -> int:
    """What this process has read by system calls."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def test_keys_shapes_and_dtypes_that_differ(tmp_path):
    zeros = np.zeros((4, 6), dtype=np.float32)
    save(tmp_path / "one", {"a": zeros, "b": zeros, "c": zeros, "d": zeros})
    save(tmp_path / "other", {"b": zeros.T.copy(), "c": zeros.astype(np.float16), "d": zeros, "e": zeros})
    report = diff(tmp_path / "one", tmp_path / "other")
    assert (report.only_in_first, report.only_in_second, report.keys) == (["a"], ["e"], 3)
    assert set(report.unlike) == {"b", "c"}
    assert not report.equal
    assert not report.differing
    text = "\n".join(report.lines())
    for words in ("- a: only in the first", "+ e: only in the second", "[4, 6]", "[6, 4]", "float16"):
        assert words in text
    assert "2 in shape or dtype; 1 are only in the first, 1 only in the second" in report.summary()


def test_statements_bring_the_first_to_the_names_of_the_second(tmp_path):
    w = np.random.default_rng(1).standard_normal((4, 6), dtype=np.float32)
    save(tmp_path / "one", {"w": w, "v": w + 1})
    save(tmp_path / "other", {"wt": w.T.copy(), "x": w + 1})
    report = diff(tmp_path / "one", tmp_path / "other", {"aoa_statements": ["w^T -> wt", "v -> x"]})
    assert report.equal, report.lines()
    # What is only renamed is compared as it is stored.
    assert report.bytes_by_checksum == w.nbytes
    assert not diff(
        tmp_path / "one", tmp_path / "other", {"aoa_statements": ['w -> wt, reshape="[6, 4]"', "v -> x"]}
    ).equal


def test_another_programs_file_is_compared_by_its_values(tmp_path):
    w = np.random.default_rng(1).standard_normal((4, 6), dtype=np.float32)
    save(tmp_path / "one", {"w": w})
    save_file({"w": w}, tmp_path / "model.safetensors")
    report = diff(tmp_path / "one", tmp_path / "model.safetensors")
    assert report.equal
    assert report.bytes_read == 2 * w.nbytes


def test_extra_state_is_compared_where_asked(tmp_path):
    common = {"w": np.zeros(3, dtype=np.float32)}
    for number, name in enumerate(("one", "other")):
        save(tmp_path / name, {**common, "extra_state.rng.rank0": np.full(4, number, dtype=np.uint8)})
    assert diff(tmp_path / "one", tmp_path / "other").equal
    assert list(diff(tmp_path / "one", tmp_path / "other", extra_state=True).differing) == ["extra_state.rng.rank0"]


def test_weights_are_compared_alone_where_asked(tmp_path):
    """One side has an optimizer and the other has none; the weights are renamed by a statement."""
    weight, moment = np.zeros((4, 2), dtype=np.float32), np.ones((4, 2), dtype=np.float32)
    save(tmp_path / "one", {"w": weight, "w.moment1_0": moment, "w.beta1_pow_acc_0": moment[0, :1], "w.w_0": moment})
    save(tmp_path / "other", {"v": weight})
    renamed = {"aoa_statements": ["w -> v"]}
    report = diff(tmp_path / "one", tmp_path / "other", renamed)
    assert (len(report.only_in_first), report.left_out) == (3, 0)
    report = diff(tmp_path / "one", tmp_path / "other", renamed, states=False)
    assert report.equal, report.lines()
    assert (report.keys, report.left_out) == (1, 3)
    assert report.summary().endswith("3 states left out")
    save(tmp_path / "other", {"w": weight + 1, "w.moment1_0": moment + 1})
    report = diff(tmp_path / "one", tmp_path / "other", states=False)
    assert (list(report.differing), report.left_out) == (["w"], 4)


def test_no_such_checkpoint(tmp_path):
    save(tmp_path / "one", {"w": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ValidationError, match="nothing does not exist"):
        diff(tmp_path / "one", tmp_path / "nothing")


def difference(dtype: str, first, second, position=lambda element: element):
    found = DifferenceSums(TensorInfo((len(first),), dtype))
    numpy = dtype_of(dtype).numpy
    found.add(np.asarray(first).astype(numpy), np.asarray(second).astype(numpy), position)
    return found.result()


def test_floats_are_measured_in_ulps():
    one = np.asarray([1.0, -1.0, 0.0, 5.0], dtype=np.float32)
    other = np.nextafter(one, np.float32(9), dtype=np.float32)
    other[3] = 5.0
    found = difference("float32", one, other)
    assert (found.changed, found.max_ulps, found.first_index) == (3, 1, [0])
    # Zeros of both signs differ in their bits, and by nothing.
    signs = difference("float32", [0.0], [-0.0])
    assert (signs.changed, signs.max_difference, signs.max_ulps) == (1, 0.0, 0)
    # Across zero: one number below, one above.
    tiny = np.finfo(np.float64).smallest_subnormal
    assert difference("float64", [tiny], [-tiny]).max_ulps == 2
    assert difference("bfloat16", [1.0], [1.0078125]).max_ulps == 1


def test_what_is_not_finite_is_counted():
    found = difference("float32", [np.nan, np.inf, 1.0, np.nan], [1.0, -np.inf, 2.0, np.nan])
    assert (found.changed, found.not_finite, found.max_difference) == (3, 2, 1.0)
    assert "2 not finite" in str(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_signalling_nans_are_not_finite_and_warned_of_by_nobody(dtype):
    numpy = dtype_of(dtype).numpy
    infinity = np.asarray([np.inf], numpy).view(f"u{numpy.itemsize}")
    signalling, one = (infinity + infinity.dtype.type(1)).view(numpy), np.ones(1, numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = DifferenceSums(TensorInfo((1,), dtype))
        found.add(signalling, one, lambda element: element)
    assert (found.result().changed, found.result().not_finite) == (1, 1)


def test_integers_are_measured_exactly():
    found = difference("int64", [np.iinfo(np.int64).min, 3], [np.iinfo(np.int64).max, 1])
    assert (found.max_difference, found.max_ulps) == (float(2**64 - 1), None)
    assert difference("uint8", [255, 0], [0, 1]).mean_difference == 128.0
    assert difference("bool", [True], [False]).max_difference == 1.0
    assert difference("complex64", [3 + 4j], [0j]).max_difference == 5.0


@examples(25)
@given(st.sets(st.integers(0, 59), max_size=8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 60))
def test_differences_do_not_depend_on_the_layout(tmp_path_factory, places, first_world, second_world, at_once):
    path = tmp_path_factory.mktemp("diff")
    first = {"w": np.arange(60, dtype=np.int32).reshape(3, 4, 5), "v": np.arange(60, dtype=np.float32).reshape(6, 10)}
    second = {key: value.copy() for key, value in first.items()}
    for place in places:
        for value in second.values():
            value.reshape(-1)[place] += place + 1
    save(path / "one", first, world=first_world)
    save(path / "other", second, world=second_world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "COMPARED_AT_ONCE", at_once)
        report = diff(path / "one", path / "other")
    if not places:
        assert report.equal
        return
    for key, value in first.items():
        found = report.differing[key]
        index = [int(each) for each in np.unravel_index(min(places), value.shape)]
        assert (found.changed, found.first_index) == (len(places), index)
        assert found.max_difference == max(places) + 1
        assert found.mean_difference == pytest.approx(sum(place + 1 for place in places) / 60)


def test_the_largest_relative_difference_comes_first(tmp_path):
    """A tiny change of every element comes after a change of one, and what is not finite before all."""
    first = {name: np.ones(1000, dtype=np.float32) for name in ("a.tiny", "b.one", "c.nan", "d.sign")}
    first["a.tiny"][:] = 0
    second = {name: value.copy() for name, value in first.items()}
    second["a.tiny"][:] = 1e-21
    first["a.tiny"][0] = second["a.tiny"][0] = 1
    second["b.one"][3] = 1.5
    second["c.nan"][3] = np.nan
    second["d.sign"][3] = -1
    save(tmp_path / "one", first)
    save(tmp_path / "other", second)
    report = diff(tmp_path / "one", tmp_path / "other")
    assert list(report.differing) == ["c.nan", "d.sign", "b.one", "a.tiny"]
    assert [each.split(":")[0] for each in report.lines()] == ["~ c.nan", "~ d.sign", "~ b.one", "~ a.tiny"]
    relative = {name: each.max_relative for name, each in report.differing.items()}
    assert relative == {"c.nan": 0.0, "d.sign": 2.0, "b.one": 0.5 / 1.5, "a.tiny": pytest.approx(1e-21)}
    assert list(report.to_dict()["differing"]) == list(report.differing)


def test_tolerances_are_told_from_equality(tmp_path):
    first = {name: np.linspace(1, 2, 60, dtype=np.float32).reshape(6, 10) for name in ("near", "far", "same")}
    second = {"near": first["near"] * np.float32(1.00001), "far": first["far"] * np.float32(1.1), "same": first["same"]}
    save(tmp_path / "one", first, world=2)
    save(tmp_path / "other", second, world=3)
    report = diff(tmp_path / "one", tmp_path / "other", rtol=1e-4)
    assert (report.equal, report.within_tolerance) == (False, False)
    assert [(name, each.beyond, each.within_tolerance) for name, each in report.differing.items()] == [
        ("far", 60, False),
        ("near", 0, True),
    ]
    assert report.lines()[1].startswith("= near: ")
    assert "2 differ in values, 1 of these within the tolerances (rtol 0.0001, atol 0), and" in report.summary()
    wide = diff(tmp_path / "one", tmp_path / "other", rtol=0.2)
    assert (wide.equal, wide.within_tolerance) == (False, True)
    assert "are equal within the tolerances (rtol 0.2, atol 0): 3 tensors, of which 2 differ" in wide.summary()
    exact = diff(tmp_path / "one", tmp_path / "other")
    assert not exact.within_tolerance
    assert all(each.beyond == each.changed for each in exact.differing.values())
    del second["same"]
    save(tmp_path / "less", second)
    assert not diff(tmp_path / "one", tmp_path / "less", rtol=0.2).within_tolerance
    for wrong in ({"rtol": -1.0}, {"atol": float("nan")}, {"atol": float("inf")}, {"rtol": "1"}):
        with pytest.raises(ValidationError, match="finite number of at least 0"):
            diff(tmp_path / "one", tmp_path / "other", **wrong)
