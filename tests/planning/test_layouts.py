"""Layouts without a job: whole tensors, each element owned once, at the size of thousands of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError, concat
from paddle_flexckpt.catalog.validate import group_replicas, validate_coverage, validate_shards
from paddle_flexckpt.planning.holder_sets import least_peak
from paddle_flexckpt.planning.layouts import ADAMW, Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import SHARDING_KINDS, Strategy, parse_strategy
from paddle_flexckpt.planning.write_plan import lay_lines, plan_write
from tests.property import examples
from tests.remedies.following import provoked


def tensors(layers: int, dtype: str = "float32", scale: int = 4) -> tuple[ModelTensor, ...]:
    """Layers of a column, a row and a norm, behind a tied embedding."""
    found = [ModelTensor("embedding", (8 * scale, 6), dtype, 0, (0, layers + 1))]
    for layer in range(1, layers + 1):
        found += [
            ModelTensor(f"{layer}.norm", (6,), dtype, layers=(layer,)),
            ModelTensor(f"{layer}.up", (6, 4 * scale), dtype, 1, (layer,)),
            ModelTensor(f"{layer}.down", (4 * scale, 6), dtype, -2, (layer,)),
            ModelTensor(f"{layer}.mask", (3,), "bool", layers=(layer,), is_trained=False),
        ]
    return (*found, ModelTensor("everywhere", (5, 7), dtype))


DEGREES = st.sampled_from([1, 2])


@st.composite
def strategies(draw):
    kind = draw(st.sampled_from([kind for kind in SHARDING_KINDS if kind != "muon"]))
    degree = 1 if kind == "none" else draw(st.integers(1, 4))
    tp = draw(st.sampled_from([1, 2, 4]))
    return Strategy(dp=draw(DEGREES), pp=draw(DEGREES), tp=tp, sharding=degree, kind=kind)


@examples(60)
@given(strategies(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([0, 30, 10**6]))
def test_every_element_has_an_owner(strategy, dtype, segment):
    model = Model(tensors(4, dtype), 6, frozenset(range(1, 5)), segment_size=segment)
    layout = Layout(model, strategy)
    job = concat([layout.catalog(rank) for rank in range(strategy.ranks)])
    # No shard outside its tensor, no hole, no overlap that is no replica.
    groups = group_replicas(job)
    assert validate_shards(job) == []
    coverage = validate_coverage(job, groups)
    assert (coverage.problems, len(coverage.overlaps)) == ([], 0)
    states = [state for state in ADAMW if not state.is_master or dtype == "bfloat16"]
    assert _names(job) == {
        *(each.name for each in model.tensors),
        *(f"{each.name}.{state.suffix}" for each in model.tensors if each.is_trained for state in states),
    }
    if strategy.kind in ("v1", "v2", "stage2"):
        # A rank's share of a moment has no copy among the ranks that share the optimizer.
        rows = np.flatnonzero([name.endswith("moment1_0") for name in np.asarray(job.keys, dtype=object)[job.key]])
        sharers = {
            (int(groups.of_row[row]), place.dp, place.pp, place.tp)
            for row in rows
            for place in [strategy.place(int(job.rank[row]))]
        }
        assert len(sharers) == len(rows)


LACKS = ("moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def of_muon(layers: int, dtype: str = "bfloat16") -> tuple[ModelTensor, ...]:
    """The same tensors, of which Muon steps those of two axes, but for the embedding."""
    found = tensors(layers, dtype)
    return tuple(
        replace(each, lacks=LACKS) if len(each.shape) > 1 and each.name != "embedding" else each for each in found
    )


@pytest.mark.parametrize("text", ["sharding=muon:3", "pp=2,dp=2,sharding=muon:2", "dp=2", "sharding=v2:2", "tp=2"])
def test_muon_keeps_matrices_whole_on_one_rank(text):
    model, strategy = Model(of_muon(4), 6, frozenset(range(1, 5))), parse_strategy(text)
    layout = Layout(model, strategy)
    check_many_at_once(layout)
    job = layout.catalogs(range(strategy.ranks))
    coverage = validate_coverage(job, group_replicas(job))
    assert (coverage.problems, len(coverage.overlaps)) == ([], 0)
    matrices = [each.name for each in model.tensors if each.lacks]
    assert not any(f"{name}.{state}" in _names(job) for name in matrices for state in LACKS)
    if strategy.kind != "muon":
        return
    names = np.asarray(job.keys, dtype=object)[job.key]
    for name in matrices:
        for state in ("moment1_0", "w_0"):
            rows = np.flatnonzero(names == f"{name}.{state}")
            assert not job.is_flattened[rows].any()
            places = [strategy.place(rank) for rank in job.rank[rows].tolist()]
            # A tensor of no layer has an owner in each stage.
            assert len({place.sharding for place in places}) == 1 or name == "everywhere"
            assert len({(place.dp, place.pp) for place in places}) == len(places)
    slices = np.flatnonzero([name.endswith("moment2_0") for name in names])
    assert job.is_flattened[slices].all()


def test_experts_of_muon_are_dealt_among_ranks_that_hold_the_same():
    experts = tuple(
        ModelTensor(f"experts.{n}.up", (4, 8 + n % 2), "bfloat16", expert=(n, 8), lacks=LACKS) for n in range(8)
    )
    layout = Layout(Model((ModelTensor("norm", (70,), "bfloat16"), *experts)), parse_strategy("sharding=muon:4,ep=2"))
    check_many_at_once(layout)
    owned = [
        sorted(name for name in _names(layout.catalog(rank)) if name.endswith("up.moment1_0")) for rank in range(4)
    ]
    assert [len(each) for each in owned] == [2] * 4
    assert owned[0] + owned[2] != owned[1] + owned[3]
    assert {int(name.split(".")[1]) // 4 for name in owned[0] + owned[2]} == {0}


def test_experts_are_spread_over_ranks_with_different_data():
    model = Model(tuple(ModelTensor(f"experts.{n}.up", (4, 8), tp_axis=1, expert=(n, 8)) for n in range(8)))
    layout = Layout(model, parse_strategy("dp=4,tp=2,ep=4"))
    found = [sorted({name.split(".")[1] for name in _names(layout.catalog(rank))}) for rank in range(8)]
    assert found == [["0", "1"]] * 2 + [["2", "3"]] * 2 + [["4", "5"]] * 2 + [["6", "7"]] * 2


def _names(catalog):
    return {catalog.keys[key] for key in np.unique(catalog.key)}


@pytest.mark.parametrize(
    ("text", "tensor", "words"),
    [
        ("tp=3", ModelTensor("w", (4, 6), tp_axis=0), r"'w'.*multiple of tp=3 along axis 0.*\[4, 6\]"),
        ("tp=2", ModelTensor("w", (4,), tp_axis=1), "cuts along no axis"),
        ("dp=3,ep=3", ModelTensor("w", (4,), expert=(0, 4)), "experts cannot be spread evenly"),
        ("dp=2,ep=2", ModelTensor("w", (4,), expert=(4, 4)), "no such expert.*a number from 0 to 3; got 4"),
        ("sharding=v1:2,ep=2", ModelTensor("w", (4,), expert=(0, 4)), "hold others.*'w'.*sharding=v2:2.*ep=dp:DEGREE"),
        ("sharding=stage2:2,ep=2", ModelTensor("w", (4,), expert=(0, 4)), "as if they were one"),
        ("sharding=stage3:2,ep=2", ModelTensor("w", (4,), expert=(0, 4)), "as if they were one"),
        ("sharding=muon:2", ModelTensor("w", (4,)), "nothing says which parameters are Muon's matrices.*--model"),
        ("dp=2,sharding=v2:3,ep=2", ModelTensor("w", (4,), expert=(0, 4)), "equally often.*divide sharding = 3"),
    ],
)
def test_what_a_strategy_cannot_cut_is_refused(text, tensor, words):
    with pytest.raises(ValidationError, match=words):
        Layout(Model((tensor,)), parse_strategy(text))


def test_a_degree_that_cuts_no_tensor_evenly_is_one_problem_with_the_degrees_that_fit():
    shapes = ((4, 8), (8, 6), (24, 16))
    model = Model(tuple(ModelTensor(f"w{row}", shape, tp_axis=0) for row, shape in enumerate(shapes)))
    with provoked("planning/layouts.py", " can be ") as caught:
        Layout(model, parse_strategy("tp=3"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.got, problem.code) == ("w0", "shape [4, 8], and 1 more tensor", "FC704")
    assert problem.remedy == "tp can be 1, 2, 4"
    with provoked("planning/layouts.py", " can be ") as caught:
        Layout(model, parse_strategy("tp=5"))
    assert caught.value.problems[0].got == "shape [4, 8], and 2 more tensors"
    for degree in (1, 2, 4):
        assert Layout(model, parse_strategy(f"tp={degree}")).catalog(0).keys


def test_a_degree_that_spreads_no_experts_evenly_is_one_problem_with_the_degrees_that_fit():
    names = [f"layers.{layer}.experts.{n}.up" for layer in range(3) for n in range(6)]
    model = Model(tuple(ModelTensor(name, (4,), expert=(int(name.split(".")[3]), 6)) for name in names))
    with provoked("planning/layouts.py", " can be ") as caught:
        Layout(model, parse_strategy("dp=4,ep=4"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.got, problem.code) == (names[0], "6 experts, and 17 more tensors", "FC704")
    assert problem.remedy == "ep can be 1, 2, 3, 6"
    for degree in (1, 2, 3, 6):
        assert Layout(model, parse_strategy(f"dp={degree},ep={degree}")).catalog(0).keys


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two tensors have one name"):
        Layout(Model((ModelTensor("w", (4,)), ModelTensor("w", (5,)))), Strategy())


def test_a_large_buffer_is_closed_when_it_is_full():
    """256 MiB of float32: the second buffer begins anew on the first rank."""
    big = 64 << 20
    layout = Layout(Model((ModelTensor("a", (big,)), ModelTensor("b", (64,)))), parse_strategy("sharding=v2:2"))
    first, second = layout.catalog(0), layout.catalog(1)
    ranges = {
        (rank, catalog.key_name(row)): (int(catalog.flat_start[row]), int(catalog.flat_stop[row]))
        for rank, catalog in enumerate((first, second))
        for row in range(len(catalog))
        if catalog.key_name(row).endswith("moment1_0")
    }
    assert ranges == {
        (0, "a.moment1_0"): (0, big // 2),
        (1, "a.moment1_0"): (big // 2, big),
        (0, "b.moment1_0"): (0, 64),
    }


def test_a_stage_is_shared_out_once(monkeypatch):
    calls = []
    whole = Layout._find_shared
    monkeypatch.setattr(Layout, "_find_shared", lambda self, *place: calls.append(place) or whole(self, *place))
    layout = Layout(Model(tensors(8), 10, frozenset(range(1, 9))), parse_strategy("tp=4,pp=4,dp=8,sharding=v2:4"))
    for rank in range(0, layout.strategy.ranks, 7):
        layout.catalog(rank)
    layout.catalogs(range(layout.strategy.ranks))
    assert len(calls) == 4


EXPERTS = tuple(ModelTensor(f"1.experts.{n}", (4, 8), "float16", 1, (1,), expert=(n, 8)) for n in range(8))


@pytest.mark.parametrize(
    "text",
    [
        *("tp=4,pp=2,dp=2,sharding=v2:3", "pp=2,sharding=v1:4", "tp=2,sharding=stage3:3", "dp=2,sharding=stage2:2"),
        *("dp=2,tp=2,ep=4,sharding=v2:4", "dp=4,tp=2,ep=tp:4", "ep=dp:2,dp=4,sharding=stage3:2,pp=2"),
    ],
)
def test_many_ranks_at_once_have_what_each_of_them_has(text):
    strategy = parse_strategy(text)
    experts = EXPERTS if strategy.ep > 1 else ()
    layout = Layout(Model((*tensors(4, "bfloat16"), *experts), 6, frozenset(range(1, 5)), segment_size=30), strategy)
    check_many_at_once(layout)


def check_many_at_once(layout):
    """Compares all ranks, and some in another order, with one after the other; and which keys any rank may have."""
    ranks = range(layout.strategy.ranks)
    for some in (ranks, [*ranks][::-3]):
        one = concat([layout.catalog(rank) for rank in some])
        many = layout.catalogs(some)
        for name in one.COLUMNS:
            assert getattr(many, name).dtype == getattr(one, name).dtype
            assert getattr(many, name).tolist() == getattr(one, name).tolist()
    assert np.unique(layout.catalogs(ranks).key).tolist() == np.flatnonzero(layout.held).tolist()


def test_ranks_without_states_that_are_cut_are_alike():
    model = Model(tensors(2), 4, states=())
    assert len({*map(Layout(model, parse_strategy("tp=2,sharding=v2:4")).kind, range(8))}) == 2
    assert len({*map(Layout(model, parse_strategy("tp=2,sharding=stage3:4")).kind, range(8))}) == 8


def expert(layer: int, number: int) -> ModelTensor:
    shape = 2048, 1024 + 256 * (layer % 2)
    return ModelTensor(f"{layer}.expert.{number}", shape, "bfloat16", None, (layer,), expert=(number, 8))


# 1.1 GB of weights: shards of some MiB, which can be split.
LARGE = (
    *(ModelTensor(f"{layer}.up", (2048, 8192), "bfloat16", 1, (layer,)) for layer in range(1, 9)),
    *(ModelTensor(f"{layer}.down", (8192, 2048), "bfloat16", 0, (layer,)) for layer in range(1, 9)),
    *(ModelTensor(f"{layer}.norm", (2048,), "bfloat16", None, (layer,)) for layer in range(1, 9)),
    *(expert(layer, number) for layer in range(1, 9) for number in range(8)),
)


@pytest.mark.parametrize(
    "strategy",
    [
        *("tp=2,dp=4", "tp=2,pp=4,dp=2", "tp=2,pp=8,sharding=v2:4", "pp=2,sharding=v1:4", "tp=2,sharding=stage3:4"),
        *("pp=2,ep=4,dp=8", "pp=4,vpp=2,dp=3", "tp=2,sep=2,dp=2,sharding=v2:2", "tp=4,ep=2,dp=4"),
    ],
)
def test_no_rank_writes_much_more_than_somebody_has_to(strategy):
    """Stages differ, so what the ranks of the largest own alone may be more than the mean."""
    degrees = parse_strategy(strategy)
    # Sharding V2 cuts the states of a tied embedding otherwise in each of its stages: these shards overlap.
    embedding = ModelTensor("embedding", (32000, 2048), "bfloat16", 0, (0, 9) if degrees.kind == "none" else (0,))
    layout = Layout(Model((embedding, *LARGE), 10, frozenset(range(1, 9))), degrees)
    job = concat([layout.catalog(rank) for rank in range(layout.strategy.ranks)])
    groups = group_replicas(job)
    plan = plan_write(job, "{}".format, groups=groups)
    written = validate_coverage(plan.catalog, group_replicas(plan.catalog))
    assert (written.problems, len(written.overlaps)) == ([], 0)
    assert plan.total_bytes == int(job.take(groups.first).byte_length.sum()) == plan.catalog.byte_length.sum()
    lines = lay_lines(job, groups, job.rank.astype(np.int64))
    assert plan.rank_bytes.max() <= 1.02 * least_peak(lines.sets, lines.amount, plan.rank_bytes)
    if layout.strategy.pp == 1:
        assert plan.imbalance <= 1.02
