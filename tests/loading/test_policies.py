"""What a load may do beyond copying: missing and unexpected keys, casts, other names, tied targets."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES, dtype_of
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.options import LoadOptions
from tests.ramdisk import memory_directory
from tests.remedies.following import Advice, provoked
from tests.saved import data_file


def state(**tensors) -> dict[str, np.ndarray]:
    return {key: np.asarray(value, dtype=np.float32) for key, value in tensors.items()}


def test_parameters_that_nothing_fills_are_warned_of_once(caplog, tmp_path):
    """Also those of other ranks, and those that statements leave out; states are no parameters."""
    save_state_dict(state(a=[1, 2], b=[3], c=[4]), tmp_path)

    def load(comm):
        own = ["a.moment2_0", "x.w", "1.w"][: 2 + comm.rank]
        targets = state(a=[0, 0], b=[0, 0], **{key: [9] for key in own}, **{"a.moment1_0": [9, 9]})
        load_state_dict(targets, tmp_path, comm, aoa_config={"aoa_statements": ["b -> _"]}, strict=False)
        return targets["b"].tolist()

    assert SimulatedWorld(2).run(load) == [[0, 0]] * 2
    (text,) = [each.getMessage() for each in caplog.records if "keep" in each.getMessage()]
    assert text == f"3 parameters keep the values they had, as {tmp_path} gives them none: 1.w; b; x.w"


def test_a_rank_sends_few_names_of_many_that_nothing_fills(caplog, tmp_path):
    save_state_dict(state(a=[1, 2]), tmp_path)

    def load(comm):
        load_state_dict(state(a=[0, 0], **{f"w{i}": [9] for i in range(50)}), tmp_path, comm, strict=False)

    SimulatedWorld(2).run(load)
    assert "at least 20 parameters keep the values they had" in caplog.text


@pytest.mark.parametrize(("strict", "missing", "unexpected"), [
    (True, True, True), (False, False, False), ("missing", True, False), ("unexpected", False, True),
])  # fmt: skip
def test_strict(move, strict, missing, unexpected):
    source = state(a=[1, 2], b=[3])
    for target, is_error, key in ((state(a=[0, 0], b=[0], c=[9]), missing, "c"), (state(a=[0, 0]), unexpected, "b")):
        if is_error:
            with pytest.raises(ValidationError, match=f"'{key}'") as caught:
                move(source, target, strict=strict)
            assert "Remedy" in str(caught.value)
            assert target["a"].tolist() == [0, 0], "nothing is touched before the error"
        else:
            report = move(source, target, strict=strict)
            assert target["a"].tolist() == [1, 2]
            assert [report.missing, report.unexpected][key == "b"] == [key]
            assert target.get("c", np.float32(9)).item() == 9


def test_the_default_is_that_missing_keys_are_errors_and_unexpected_ones_are_reported(move):
    with pytest.raises(ValidationError, match="the source has no such key"):
        move(state(a=[1]), state(a=[0], b=[0]))
    assert move(state(a=[1], b=[2]), state(a=[0])).unexpected == ["b"]


def test_saved_states_of_what_is_loaded_are_asked_for_or_ignored_explicitly(move):
    source = {"a.weight": np.ones(2), "a.weight.moment1_0": np.ones(2), "a.weight.beta1_pow_acc_0": np.ones(1)}
    source.update({"b": np.ones(1), "b.moment1_0": np.ones(1)})
    for strict in ("missing", False, True):
        target = {"a.weight": np.zeros(2)}
        with pytest.raises(ValidationError) as caught:
            move(source, target, strict=strict)
        for words in ("2 optimizer states", "'a.weight.moment1_0'", "install()", "optimizer_states='ignore'"):
            assert words in str(caught.value)
        assert "'b.moment1_0'" not in str(caught.value), "b is not loaded"
        assert not target["a.weight"].any(), "nothing is touched before the error"
    report = move(source, target, optimizer_states="ignore")
    assert target["a.weight"].tolist() == [1, 1]
    assert sorted(report.unexpected) == sorted(set(source) - {"a.weight"})
    weights = {"a.weight": np.zeros(2), "b": np.zeros(1)}
    assert move(source, weights, optimizer_states="ignore", strict=True).keys == 2
    with pytest.raises(ValidationError, match="no rank asks for key 'b'"):
        move(source, target, optimizer_states="ignore", strict=True)


def test_an_optimizer_that_is_loaded_by_itself_leaves_no_states_behind(move):
    source = {"a": np.ones(2), "a.moment1_0": np.ones(2), "b": np.ones(1), "b.moment1_0": np.ones(1)}
    assert move(source, {"a.moment1_0": np.zeros(2)}).unexpected == ["a", "b", "b.moment1_0"]
    # Names with numbers alone are no states.
    assert move({"a": np.ones(2), "a_0": np.ones(1), "layers.0": np.ones(1)}, {"a": np.zeros(2)}).keys == 1


def test_saved_states_under_raw_names_count_too(move):
    source = {"model.a.weight": np.ones(2), "optimizer.linear_0.w_0_moment1_0": np.ones(2)}
    source["optimizer.master_weights.linear_0.w_0"] = np.ones(2)
    with pytest.raises(ValidationError, match=r"2 optimizer states.*'optimizer\.linear_0\.w_0_moment1_0'"):
        move(source, {"model.a.weight": np.zeros(2)})
    assert move(source, {"model.a.weight": np.zeros(2)}, optimizer_states="ignore").keys == 1
    assert move(source, {"optimizer.linear_0.w_0_moment1_0": np.zeros(2)}).keys == 1


def test_master_weights_that_nobody_asks_for(move):
    source = {"a": np.ones(2, dtype=ml_dtypes.bfloat16), "a.w_0": np.full(2, 1.001, np.float32)}
    target = state(a=[0, 0])
    with pytest.raises(ValidationError, match="master_weights='convert'"):
        move(source, target, dtype="cast")
    move(source, target, dtype="cast", master_weights="convert")
    assert target["a"].tolist() == source["a.w_0"].tolist()


def test_ranks_have_to_agree_about_states_that_nobody_asks_for(tmp_path):
    source = {"a": np.ones(2), "a.moment1_0": np.ones(2)}

    def job(comm):
        options = {"optimizer_states": ("raise", "ignore")[comm.rank]}
        with pytest.raises(ValidationError, match="optimizer_states") as in_memory:
            reshard_sharded_state_dict(source, {"a": np.zeros(2)}, comm, **options)
        save_state_dict(source, tmp_path, comm)
        with pytest.raises(ValidationError, match="optimizer_states") as caught:
            load_state_dict({"a": np.zeros(2)}, tmp_path, comm, **options)
        # One rank may ask for what another does not.
        load_state_dict({"a": np.zeros(2)} if comm.rank else {"a.moment1_0": np.zeros(2)}, tmp_path, comm)
        return str(in_memory.value), str(caught.value)

    first, second = SimulatedWorld(2).run(job)
    assert first == second


def test_a_similar_name_is_suggested(move):
    with pytest.raises(ValidationError, match=r"net\.layers\.0\.attn\.weight"):
        move({"net.layers.0.attn.weight": np.zeros(1)}, {"layers.0.attn.weight": np.zeros(1)})


@pytest.mark.parametrize("options", [
    {"strict": "all"}, {"strict": None}, {"dtype": "force"}, {"mw_name_compatibility": "yes"},
    {"optimizer_states": "drop"},
])  # fmt: skip
def test_an_unknown_policy_is_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        LoadOptions(**options).check()


def test_another_dtype_is_an_error_by_default(move):
    source, target = {"w": np.ones(3, dtype=np.float32)}, {"w": np.zeros(3, dtype=ml_dtypes.bfloat16)}
    with provoked("transfer/resolution.py", 'load with dtype="cast"') as caught:
        move(source, target)
    for words in ("dtypes differ", "'w'", "bfloat16 (target)", "float32 (source)"):
        assert words in str(caught.value)
    assert not target["w"].any()
    move(source, target, dtype="cast")
    assert target["w"].tolist() == [1, 1, 1]
    with provoked("transfer/resolution.py", "load into a target of the saved dtype"):
        move(source, {"w": np.zeros(3, dtype=np.int8)})
    target = {"w": np.zeros(3, dtype=np.float32)}
    move(source, target)
    assert target["w"].tolist() == [1, 1, 1]


FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def numbers(name: str) -> np.ndarray:
    """Finite values of a dtype that do not round trivially."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5000) * np.exp2(rng.integers(-9, 9, 5000))
    return np.clip(values, -400, 400).astype(np.float32).astype(dtype_of(name).numpy)


def test_casts_between_floats_round_like_ml_dtypes(move):
    pairs = {f"{source} -> {target}": (source, target) for source, target in itertools.permutations(FLOATS, 2)}
    values = {pair: numbers(source) for pair, (source, _) in pairs.items()}
    into = {pair: np.zeros(5000, dtype=dtype_of(target).numpy) for pair, (_, target) in pairs.items()}
    report = move(values, into, dtype="cast")
    assert report.cast == {pair: pair for pair in pairs}
    for pair, array in into.items():
        assert array.tobytes() == values[pair].astype(array.dtype).tobytes(), pair


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("source", "target", "large"),
    [
        ("float32", "float16", 1e6),
        ("float32", "bfloat16", 3.4e38),
        ("bfloat16", "float16", 1e5),
        ("float16", "float8_e4m3fn", 500),
        ("float8_e5m2", "float8_e4m3fn", 512),
        ("float64", "float32", 1e300),
        ("int32", "float16", 70000),
        ("complex128", "complex64", 1e300j),
    ],
)
def test_numbers_that_a_cast_cannot_hold_are_an_error(move, source, target, large):
    of, to = dtype_of(source).numpy, dtype_of(target).numpy
    finite = of.kind == "i" or target == "float8_e4m3fn"
    fine = np.asarray([0, 1, 2, 3] if finite else [0, 1, np.inf, np.nan]).astype(of)
    into = np.zeros(8, to)
    move({"w": np.tile(fine, 2)}, {"w": into}, dtype="cast")
    assert into.tobytes() == np.tile(fine, 2).astype(to).tobytes()
    values = np.tile(np.append(fine, np.asarray([large, -large]).astype(of)), (6, 2))
    parts = {
        "whole": values,
        "columns": ShardedWeight("w", np.zeros((6, 6), to), (6, 6), values.shape, (0, 3)),
    }
    for name, part in parts.items():
        wanted = np.zeros(values.shape, to) if name == "whole" else part
        with pytest.raises(CheckpointError) as caught:
            move({"w": values}, {"w": wanted}, dtype="cast")
        count = 24 if name == "whole" else 12
        for words in ("key 'w'", f"a cast from {source} to {target} met {count} finite numbers", "Remedy"):
            assert words in str(caught.value), (name, str(caught.value))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "float16", "float8_e5m2"])
@pytest.mark.parametrize("by_statement", [False, True])
def test_infinity_where_there_is_none_is_an_error(move, source, by_statement):
    values = np.asarray([1, -np.inf, np.nan, np.inf]).astype(dtype_of(source).numpy)
    statements = ['w -> v, dtype="float8_e4m3fn"'] if by_statement else ["w -> v"]
    for dtype in ("float8_e4m3fn", "float32") if by_statement else ("float8_e4m3fn",):
        into = np.zeros(4, dtype_of(dtype).numpy)
        with provoked("catalog/dtypes.py", "or another dtype that has infinity") as caught:
            move({"w": values}, {"v": into}, dtype="cast", aoa_config=statements)
        assert f"a cast from {source} to float8_e4m3fn met infinity 2 times" in str(caught.value)
    into = np.zeros(4, dtype_of("float8_e5m2").numpy)
    move({"w": values}, {"v": into}, dtype="cast", aoa_config=["w -> v"])
    assert into.tobytes() == values.astype(into.dtype).tobytes()


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["float64", "int64", "uint64", "int32", "uint32"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_cast_rounds_once(move, source, target):
    """Numbers half way between two neighbours and next to half way; a way by float32 would make ties of both."""
    narrow, wide = dtype_of(target).numpy, dtype_of(source).numpy
    bits = np.random.default_rng(0).integers(0, 1 << (8 * min(narrow.itemsize, 4) - 1), 3000)
    some = np.unique(bits.astype(f"u{narrow.itemsize}").view(narrow).astype(np.float64))
    some = some[np.isfinite(some)]
    if wide.kind in "iu":
        some = some[(some >= 1) & (some < float(np.iinfo(wide).max) / 2)]
    # The neighbour above, exactly.
    above = (some.astype(narrow).view(f"u{narrow.itemsize}") + 1).astype(f"u{narrow.itemsize}").view(narrow)
    values, expected = [], []
    for low, high, odd in zip(some.tolist(), above.astype(np.float64).tolist(), bits_of(some, narrow)):
        middle = (Fraction(low) + Fraction(high)) / 2 if np.isfinite(high) else None
        if middle is None or (wide.kind in "iu" and middle.denominator > 1):
            continue
        step = 1 if wide.kind in "iu" else np.spacing(float(middle))
        for value, rounded in ((middle - step, low), (middle, high if odd else low), (middle + step, high)):
            if wide.kind not in "iu" or abs(value - Fraction(rounded)) <= (Fraction(high) - Fraction(low)) / 2:
                values.append(int(value) if wide.kind in "iu" else float(value))
                expected.append(rounded)
    array = np.asarray(values, wide)
    into = np.zeros(array.shape, narrow)
    move({"w": array}, {"w": into}, dtype="cast")
    assert len(values) > 50
    assert into.astype(np.float64).tolist() == expected
    if wide.kind != "u":
        move({"w": -array}, {"w": into}, dtype="cast")
        assert (-into.astype(np.float64)).tolist() == expected


def bits_of(numbers: np.ndarray, dtype: np.dtype) -> list[int]:
    """The last bit of each number."""
    return (numbers.astype(dtype).view(f"u{dtype.itemsize}") & 1).tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_cast_of_a_statement_is_no_other(move, dtype):
    """Of the float16 target a move, of the other a step."""
    for value, is_error in ((60000, False), (np.inf, False), (1e6, True)):
        into = np.zeros(3, dtype)
        statement = 'w -> v, dtype="float16"'
        if not is_error:
            move(state(w=[1, 2, value]), {"v": into}, aoa_config=[statement], dtype="cast")
            assert into.tolist() == [1, 2, value]
            continue
        with pytest.raises(CheckpointError, match="key '[vw]': a cast from float32 to float16 met 1 finite number"):
            move(state(w=[1, 2, value]), {"v": into}, aoa_config=[statement], dtype="cast")


def test_a_cast_where_no_dtype_differs_is_reported_as_none(move):
    assert move(state(a=[1]), state(a=[0]), dtype="cast").cast == {}


KINDS = {name: dtype_of(name).numpy.kind for name in DTYPES}
INTEGERS = [name for name, kind in KINDS.items() if kind in "iu"]


@pytest.mark.parametrize(("source", "target", "allowed"), [
    ("float32", "int32", False), ("float32", "bool", False), ("float64", "uint8", False),
    ("complex64", "float32", False), ("complex128", "float64", False), ("complex64", "complex128", True),
    ("float32", "complex64", True), ("bfloat16", "complex128", True), ("int32", "bool", False),
    ("bool", "int8", True), ("bool", "float16", True), ("int32", "int64", True), ("int64", "int32", False),
    ("uint8", "int16", True), ("uint8", "int8", False), ("int8", "uint8", False), ("uint64", "int64", False),
    ("int64", "float32", True), ("int32", "bfloat16", True), ("int16", "complex64", True),
    ("complex64", "int64", False),
])  # fmt: skip
def test_which_casts_are_allowed(move, source, target, allowed):
    values = np.asarray([0, 1, 2, 100, 1]).astype(dtype_of(source).numpy)
    into = np.zeros(5, dtype=dtype_of(target).numpy)
    if allowed:
        move({"w": values}, {"w": into}, dtype="cast")
        assert into.tobytes() == values.astype(into.dtype).tobytes()
    else:
        with pytest.raises(ValidationError, match=f"lose what the values mean.*{target}.*{source}"):
            move({"w": values}, {"w": into}, dtype="cast")
        assert not into.any()


def test_another_global_shape_is_an_error_under_every_policy(move):
    with pytest.raises(ValidationError, match=r"global shapes differ.*'w'.*\[4\] \(target\).*\[3\] \(source\)"):
        move(state(w=[1, 2, 3]), state(w=[0, 0, 0, 0]), strict=False, dtype="cast")


@pytest.mark.parametrize("rows", [3, 6])
def test_another_vocabulary_is_mended_by_the_statement_that_the_error_names(move, rows):
    """The states follow their parameter; where the target is larger, the rest keeps what it has."""
    names = ("embed.weight", "embed.weight.moment1_0", "embed.weight.w_0")
    source = {name: np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * i for i, name in enumerate(names)}
    target = {name: np.full((rows, 2), -1, dtype=np.float32) for name in names}
    with provoked("transfer/problems.py", "in a vocabulary, cut or extend it by the AOA statement") as caught:
        move(source, target)
    statements = set(re.findall("AOA statement '(.*?)'", str(caught.value)))
    fill = ', fill="keep"' if rows > 4 else ""
    assert statements == {f'embed.weight -> embed.weight, resize="auto"{fill}'}
    move(source, target, aoa_config={"aoa_statements": sorted(statements)})
    for name in names:
        assert (target[name][:4] == source[name][:rows]).all()
        assert (target[name][4:] == -1).all()


ORDER = Advice("transfer/problems.py", "if the source has its axes in another order")
ROW_MAJOR = Advice("transfer/problems.py", "if the values are the same in row-major order, add the AOA statement")


@pytest.mark.parametrize(("advice", "old", "new", "statement"), [
    (ORDER, (6, 4), (4, 6), "w^T -> w"),
    (ORDER, (2, 3, 4), (4, 2, 3), 'w -> w, permute="[2, 0, 1]"'),
    (ROW_MAJOR, (2, 3, 1, 1), (2, 3), 'w -> w, reshape="auto"'),
    (ROW_MAJOR, (6,), (2, 3), 'w -> w, reshape="auto"'),
    (ROW_MAJOR, (), (1,), 'w -> w, reshape="auto"'),
])  # fmt: skip
def test_the_statement_for_another_shape_gives_every_element(move, advice, old, new, statement):
    """A weight of another framework is most often transposed: cutting and extending it would lose most of it."""
    names = ("w", "w.moment1_0", "w.w_0")
    source = {
        name: np.arange(100.0 * i, 100.0 * i + np.prod(old, dtype=int)).reshape(old) for i, name in enumerate(names)
    }
    source["w.beta1_pow_acc_0"] = np.full((), 0.5)
    target = {name: np.full(new, -1.0) for name in names} | {"w.beta1_pow_acc_0": np.zeros(1)}
    with provoked(*advice) as caught:
        move(source, target)
    assert "resize" not in str(caught.value)
    statements = set(re.findall("AOA statement '(.*?)'", str(caught.value)))
    # A state with a shape of its own does not follow its parameter.
    own = "w.beta1_pow_acc_0"
    assert statements - {statement} <= {f'{own} -> {own}, reshape="auto"'}
    move(source, target, aoa_config={"aoa_statements": sorted(statements)})
    for name in names:
        axes = [old.index(extent) for extent in new] if sorted(old) == sorted(new) else None
        assert target[name].tolist() == (source[name].transpose(axes) if axes else source[name]).reshape(new).tolist()
    assert target[own].tolist() == [0.5]


@pytest.mark.parametrize(("old", "new"), [
    ((4, 6), (5, 7)), ((4, 6), (6, 5)), ((4, 6), (3, 8)), ((2, 2, 3), (3, 2, 2)), ((4, 3, 1, 1), (3, 4)),
    ((0,), (0, 3)), ((4,), (5, 1)), ((2, 6), (3, 4)),
])  # fmt: skip
def test_where_several_things_may_be_meant_no_statement_is_offered(move, old, new):
    with pytest.raises(ValidationError, match="global shapes differ") as caught:
        move({"w": np.zeros(old)}, {"w": np.zeros(new)})
    assert "AOA statement" not in str(caught.value)
    assert "load into a model of the saved size" in str(caught.value)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_a_tied_head_that_is_no_longer_tied_is_mended_by_the_statement_that_the_error_names(move, shape):
    states = ("", ".moment1_0", ".w_0")
    source = {f"llama.embed_tokens.weight{s}": np.random.default_rng(i).random((6, 4)) for i, s in enumerate(states)}
    target = {f"{name}.weight{s}": np.zeros(extents) for name, extents in
              (("llama.embed_tokens", (6, 4)), ("lm_head", shape)) for s in states}  # fmt: skip
    with pytest.raises(ValidationError, match="no such key") as caught:
        move(source, target)
    statements = set(re.findall("AOA statement '(.*?)'", str(caught.value)))
    assert statements == {f"llama.embed_tokens.weight{'' if shape == (6, 4) else '^T'} -> lm_head.weight"}
    move(source, target, aoa_config={"aoa_statements": sorted(statements)})
    for s in states:
        saved = source[f"llama.embed_tokens.weight{s}"]
        assert (target[f"llama.embed_tokens.weight{s}"] == saved).all()
        assert (target[f"lm_head.weight{s}"] == (saved if shape == (6, 4) else saved.T)).all()


def test_shards_of_no_extent(move_between):
    """Uneven rows: of 5, ranks 0 to 2 hold two, two and one, and rank 3 none."""
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)

    def rows(rank: int, filled: bool) -> dict[str, ShardedWeight]:
        start, stop = min(2 * rank, 5), min(2 * rank + 2, 5)
        part = whole[start:stop].copy() if filled else np.full((stop - start, 4), -1, dtype=np.float32)
        return {"w": ShardedWeight("w", part, part.shape, (5, 4), (start, 0))}

    def columns(rank: int, filled: bool) -> dict[str, ShardedWeight]:
        start, stop = (0, 0) if rank == 0 else ((rank - 1) * 4 // 3, rank * 4 // 3)
        part = whole[:, start:stop].copy() if filled else np.full((5, stop - start), -1, dtype=np.float32)
        return {"w": ShardedWeight("w", part, part.shape, (5, 4), (0, start))}

    for source, target in ((rows, columns), (columns, rows), (rows, rows)):
        for rank, got in enumerate(move_between(4, source, target)):
            assert got["w"].local_tensor.tobytes() == target(rank, True)["w"].local_tensor.tobytes()


def aliased(key: str, array: np.ndarray, *aliases: str) -> ShardedWeight:
    zero = (0,) * array.ndim
    return ShardedWeight(key, array, array.shape, array.shape, zero, aliases=aliases)


def test_a_tied_parameter_is_found_under_any_of_its_names(move):
    target = np.zeros(2, dtype=np.float32)
    report = move(state(embed=[1, 2]), {"head": aliased("head", target, "other", "embed")})
    assert target.tolist() == [1, 2]
    assert report.aliases == {"head": "embed"}
    assert (report.missing, report.unexpected) == ([], [])


def test_the_own_name_comes_before_the_others(move):
    target = np.zeros(2, dtype=np.float32)
    report = move(state(head=[3, 4], embed=[1, 2]), {"head": aliased("head", target, "embed")})
    assert target.tolist() == [3, 4]
    assert (report.aliases, report.unexpected) == ({}, ["embed"])


def test_other_names_can_be_forbidden(move):
    target = {"head": aliased("head", np.zeros(2, dtype=np.float32), "embed")}
    with pytest.raises(ValidationError, match="no such key.*'head'"):
        move(state(embed=[1, 2]), target, tied_names=False)


def test_tied_targets_that_agree_are_both_filled(move):
    memory = np.zeros(3, dtype=np.float32)
    report = move(state(a=[1, 2, 3], b=[1, 2, 3]), {"a": memory, "b": memory}, strict=True)
    assert memory.tolist() == [1, 2, 3]
    assert report.keys == 2


def test_tied_targets_that_get_different_values_are_an_error(move):
    memory = np.zeros(3, dtype=np.float32)
    other, source = np.zeros(2, dtype=np.float32), state(a=[1, 2, 3], b=[1, 2, 4], c=[5, 6])
    target = {"c": other, "a": memory, "b": memory}
    with pytest.raises(ValidationError, match="'a' and 'b' are one tied parameter.*two values"):
        move(source, target)
    assert (memory.tolist(), other.tolist()) == ([0, 0, 0], [0, 0])
    for removed, kept in (("b", [1, 2, 3]), ("a", [1, 2, 4])):
        report = move(source, target, aoa_config={"aoa_statements": [f"{removed} -> _"]}, strict=True)
        assert (memory.tolist(), other.tolist(), report.missing) == (kept, [5, 6], [])


def test_tied_targets_that_statements_make_are_compared_too(move):
    """Also computed ones; and elements that one of the targets keeps are those of the other."""
    memory, source = np.full(3, 9, dtype=np.float32), state(a=[1, 2, 3], b=[2, 4, 6], part=[2, 3])
    target = {"x": memory, "y": memory}
    with pytest.raises(ValidationError, match="'x' and 'y' are one tied parameter"):
        move(source, target, aoa_config={"aoa_statements": ["a -> x", "b -> y, scale=3"]})
    assert memory.tolist() == [9, 9, 9]
    move(source, target, aoa_config={"aoa_statements": ["a -> x", "b -> y, scale=0.5"]})
    assert memory.tolist() == [1, 2, 3]


@pytest.mark.parametrize("reads", ["direct", "cooperative"])
def test_tied_targets_are_compared_before_any_rank_changes_one(tmp_path, reads):
    """Only one rank has them, and they differ there in its own part alone."""
    save_state_dict(state(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[5, 6]), tmp_path)

    def load(comm, second):
        memory, other = np.zeros(2, dtype=np.float32), np.zeros(2, dtype=np.float32)
        target = {"c": other}
        if comm.rank == 1:
            target |= {key: ShardedWeight(key, memory, (2,), (4,), (second,)) for key in "ab"}
        try:
            load_state_dict(target, tmp_path, comm, comm_method=reads)
        except ValidationError as error:
            return "'a' and 'b' are one tied parameter" in str(error), memory.tolist(), other.tolist()
        return None, memory.tolist(), other.tolist()

    assert SimulatedWorld(2).run(lambda comm: load(comm, 2)) == [(True, [0, 0], [0, 0])] * 2
    assert SimulatedWorld(2).run(lambda comm: load(comm, 0)) == [(None, [0, 0], [5, 6]), (None, [1, 2], [5, 6])]


def test_tied_targets_of_one_source_are_filled_once(move):
    memory = np.zeros(3, dtype=np.float32)
    report = move(state(a=[1, 2, 3]), {"a": memory, "b": aliased("b", memory, "a")}, strict=True)
    assert memory.tolist() == [1, 2, 3]
    assert report.bytes_needed == memory.nbytes


def test_nested_targets_are_filled(move):
    target = {"model": {"w": np.zeros(2, dtype=np.float32)}, "step": np.zeros((), dtype=np.int64)}
    move({"model": state(w=[1, 2]), "step": np.asarray(7)}, target, strict=True)
    assert target["model"]["w"].tolist() == [1, 2]
    assert target["step"].item() == 7


def test_verify_says_which_bytes_are_compared():
    rows, columns = 300, 1000
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)  # 1.2 MB: two blocks

    def job(comm):
        with memory_directory() as path:
            save_state_dict({"w": values}, path, comm)
            file = path / data_file(path)
            reports = {}
            for mode in ("read", True, "full", "off", False):
                target = ShardedWeight("w", np.zeros((rows, 3), np.float32), (rows, 3), (rows, columns), (0, 500))
                reports[mode] = load_state_dict({"w": target}, path, comm, verify=mode)
                assert (target.local_tensor == values[:, 500:503]).all()
            with pytest.raises(ValidationError, match="verify has to be 'read', 'full' or 'off'.*got 'some'"):
                load_state_dict({"w": target}, path, comm, verify="some")
            with file.open("r+b") as stream:
                stream.seek(-1, 2)  # of no column that is loaded
                stream.write(b"\x7f")
            load_state_dict({"w": target}, path, comm, verify="off")
            with pytest.raises(CorruptCheckpointError, match="'w'.*bytes 1048576 to 1200000 of the shard"):
                load_state_dict({"w": target}, path, comm)
            return reports

    (reports,) = SimulatedWorld(1).run(job)
    for mode, report in reports.items():
        everything = mode == "full"
        assert report.bytes_needed == rows * 3 * 4
        assert report.bytes_read == (values.nbytes if everything else rows * 3 * 4)
        assert report.bytes_verified == (0 if mode in ("off", False) else values.nbytes)
        assert report.bytes_extra == (values.nbytes - rows * 3 * 4 if everything else 0)
        assert ("1.1 MiB more than needed read on this rank" in report.summary()) == everything


def test_a_coordinator_outside_the_group_is_refused(move):
    with pytest.raises(ValidationError, match="coordinator_rank"):
        move(state(a=[1]), state(a=[0]), coordinator_rank=1)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_async_save_is_a_bool_or_a_writer(value):
    with memory_directory() as path, pytest.raises(ValidationError, match="async_save has to be a bool or a Backg"):
        SimulatedWorld(1).run(lambda comm: save_state_dict(state(a=[1]), path, comm, async_save=value))


def test_counters_are_not_rounded(move):
    source = {"optim.state.w.step": np.full((), 10001, np.float32), "position_ids": np.arange(4, dtype=np.int64)}
    for key, kind in (("optim.state.w.step", ml_dtypes.bfloat16), ("position_ids", np.float32)):
        given, target = {key: source[key]}, {key: np.zeros(source[key].shape, kind)}
        with pytest.raises(ValidationError, match="a cast would lose what the values mean"):
            move(given, target, dtype="cast")
        with provoked("transfer/resolution.py", "load into a target of the saved dtype"):
            move(given, target)
        exact = {key: np.zeros(source[key].shape, np.float64 if key.endswith("step") else np.int64)}
        move(given, exact, dtype="cast")
        assert exact[key].tolist() == source[key].tolist()
    # A parameter may have such a name.
    target = {"l.log_step": np.zeros(2, ml_dtypes.bfloat16)}
    move({"l.log_step": np.ones(2, np.float32)}, target, dtype="cast")
    assert target["l.log_step"].tolist() == [1, 1]


@pytest.mark.parametrize("states", [
    ("optim.state.w.exp_avg", "optim.state.w.step"), ("linear_0.w_0_moment1_0", "master_weights.linear_0.w_0"),
])  # fmt: skip
def test_states_under_names_of_others_are_asked_for_or_ignored_explicitly(move, states):
    source = {"w": np.ones(2, np.float32), **{key: np.ones(2, np.float32) for key in states}}
    with pytest.raises(ValidationError, match="no rank asks for [12] optimizer states"):
        move(source, {"w": np.zeros(2, np.float32)})
    target = {"w": np.zeros(2, np.float32)}
    assert move(source, target, optimizer_states="ignore").unexpected == sorted(states)
    assert target["w"].tolist() == [1, 1]
