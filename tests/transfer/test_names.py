"""Other names of one state: forms, searches in a source's keys, and what ranks mean by raw names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.transfer.names import (
    ACCUMULATORS,
    NameIndex,
    RawState,
    SourceKeys,
    Unresolved,
    canonical,
    check_across_ranks,
    find_compatible,
    is_counted,
    raw_meanings,
    raw_parameter,
    split_raw,
    without_prefix,
)
from tests.property import examples

# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [
    ("linear_0.w_0.dist_moment1_0", "linear_0.w_0_moment1_0"),
    ("linear_0.w_0_moment1_3", "linear_0.w_0_moment1_0"),
    ("linear_0.w_0.dist_fp32_master_0_moment1_0", "linear_0.w_0_moment1_0"),
    ("linear_0.w_0_fp32_master_1_beta1_pow_acc_2", "linear_0.w_0.dist_beta1_pow_acc_0"),
    ("linear_0.w_0.dist__avg_squared_grad_0", "linear_0.w_0__avg_squared_grad_1"),
    ("master_weights.linear_0.w_0.dist", "linear_0.w_0_fp32_master_0"),
    ("opt.master_weights.linear_0.w_0", "opt.linear_0.w_0.dist_fp32_master_0"),
    ("master_weights.mine", "mine.dist_fp32_master_0"),
    ("mine.dist_moment2_max_0", "mine_moment2_max_0"),
    ("linear_0.w_0.dist_fp32_master_0_named_moment1_1", "linear_0.w_0_named_moment1_0"),
    ("linear_0.w_0.dist", "linear_0.w_0"),
    ("linear_0.w_0.dist.dist", "linear_0.w_0"),
])  # fmt: skip
def test_names_of_one_tensor_have_one_form(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize("name", [
    "a.weight", "a.weight.moment1_0", "a.weight.w_0", "a.dist.weight", "knn.dist", "scale_m_1", "agent_velocity_1",
    "layers.1.moment1_1", "linear_0.w_0_custom_1", "my_moment1_1", "linear_1.w_0", "batch_norm_0.w_2",
])  # fmt: skip
def test_other_names_stay_as_they_are(name):
    assert canonical(name) == name


def test_a_name_that_the_user_gave_has_to_be_known():
    assert canonical("mine_moment1_1") == "mine_moment1_1"
    assert canonical("mine_moment1_1", {"mine"}) == "mine_moment1_0"
    assert canonical("master_weights.mine") == "mine_fp32_master_0"
    assert split_raw("mine_moment1_1", {"mine"}) == ("mine", "moment1_0")


PARAMETERS = st.builds("{}_{}.{}_{}".format, st.sampled_from(["linear", "embedding", "layer_norm", "m", "moment1_0"]),
                       st.integers(0, 12), st.sampled_from("wb"), st.integers(0, 2))  # fmt: skip
DISTS = st.sampled_from(["", ".dist"])


@st.composite
def states(draw):
    """(parameter, state), and two of the raw names that it may have."""
    parameter = draw(PARAMETERS)
    state = draw(st.sampled_from([*ACCUMULATORS, "master"]))

    def name():
        dist, counter = draw(DISTS), draw(st.integers(0, 11))
        if state == "master":
            if draw(st.booleans()):
                return f"master_weights.{parameter}{dist}"
            return f"{parameter}{dist}_fp32_master_{counter}"
        master = draw(st.sampled_from(["", "_fp32_master_0", "_fp32_master_7"]))
        return f"{parameter}{dist}{master}_{state}_{counter}"

    return (parameter, state), name(), name()


@examples(100)
@given(states(), states())
def test_two_names_have_one_form_if_and_only_if_they_mean_one_state(left, right):
    (one, first, second), (other, third, _) = left, right
    assert canonical(first) == canonical(second)
    assert (canonical(first) == canonical(third)) == (one == other)
    assert canonical(canonical(first)) == canonical(first)


@examples(100)
@given(st.text("ab._01", min_size=1))
def test_prefixes_do_not_make_different_names_alike(name):
    index = NameIndex([f"optimizer.{name}", f"model.{name}x", "model.other"])
    assert index.find([name]) == [f"optimizer.{name}"]
    assert index.find([f"optimizer.optimizer.{name}"]) == [f"optimizer.{name}"]
    assert index.find([f"model.{name}"]) == [], "the model's is not the optimizer's"


def test_what_a_raw_name_consists_of():
    assert raw_parameter("linear_0.w_0.dist.dist") == "linear_0.w_0"
    assert raw_parameter("dist.w") == "dist.w"
    assert split_raw("linear_0.w_0") is None
    assert split_raw("a.weight.moment1_0") is None
    assert split_raw("opt.master_weights.linear_0.w_0.dist") == RawState("opt.linear_0.w_0", "w_0")
    assert split_raw("linear_0.w_0_fp32_master_3") == ("linear_0.w_0", "w_0")
    assert split_raw("linear_0.w_0.dist_fp32_master_3") == ("linear_0.w_0", "w_0")
    assert split_raw("mine_fp32_master_0_moment1_2") == ("mine", "moment1_0")
    assert split_raw("linear_0.b_1_name_moment2_4") == ("linear_0.b_1", "name_moment2_0")


def test_prefixes_are_taken_off_once():
    assert without_prefix("w") == [("", "w")]
    assert without_prefix("model.model.w") == [("", "model.model.w"), ("model.", "model.w")]
    assert without_prefix("optimizer.w") == [("", "optimizer.w"), ("optimizer.", "w")]


# -- searches ----------------------------------------------------------------------------------------------------------


def find(targets, source, claimed=None, **known):
    targets = [target if isinstance(target, Unresolved) else Unresolved(target, 3) for target in targets]
    return find_compatible(targets, SourceKeys(dict.fromkeys(source, (2,)), known), claimed or {})


def of(key, *state_names):
    """A state under a raw name, of which the state dict tells the structured ones."""
    return Unresolved(key, 3, state_names=state_names)


def test_each_target_gets_its_own_key():
    source = ["model.a.weight", "optimizer.linear_0.w_0_moment1_0", "optimizer.master_weights.linear_0.w_0", "more"]
    here = ["a.weight", "linear_0.w_0.dist_fp32_master_0_moment1_0", "linear_0.w_0.dist_fp32_master_0"]
    found = find([*here, "nothing"], source)
    assert found.names == dict(zip(here, source))
    assert found.by_raw_name == {here[1]: source[1], here[2]: source[2]}
    assert (found.taken, found.lost_by_raw_name, found.problems) == ({}, [], [])
    assert find(here, []).names == {}


def test_several_keys_for_one_target_are_a_problem():
    source = [f"linear_0.w_0_moment1_{number}" for number in range(7)]
    found = find(["linear_0.w_0.dist_moment1_0", "other"], source)
    (problem,) = found.problems
    assert (problem.key, problem.rank, problem.got) == ("linear_0.w_0.dist_moment1_0", 3, str(source[:5]))
    assert "several that may be meant" in problem.what
    assert f"({source[0]} -> linear_0.w_0.dist_moment1_0)" in problem.remedy
    assert found.names == {}
    assert len(find(["linear_0.w_0.dist_moment1_0"], source[:2]).problems) == 1


def test_a_key_that_another_target_has_by_its_own_name_is_taken():
    key, mine = "linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1"
    for owner, place, given_away in ((None, None, False), ("x", "y", False), (None, "x", False), ("x", "x", True)):
        found = find([Unresolved(mine, 0, place=place)], [key], {key: [("first", "z"), (key, owner)]})
        assert (found.names, found.taken) == (({mine: key}, {}) if given_away else ({}, {mine: "first"}))
        assert found.problems == []
    assert find([mine], [key], {"another": [("first", None)]}).names == {mine: key}


def test_several_targets_share_a_key_if_they_are_one_tensor():
    key, names = "linear_0.w_0_moment1_0", ["linear_0.w_0_moment1_1", "linear_0.w_0_moment1_2"]
    for places, alike in ((("x", "x"), True), (("x", "y"), False), ((None, None), False), (("x", None), False)):
        found = find([Unresolved(n, 2, place=place) for n, place in zip(names, places)], [key])
        assert found.names == dict.fromkeys(names, key)
        if alike:
            assert found.problems == []
            continue
        (problem,) = found.problems
        assert (problem.rank, problem.got, problem.key) == (2, f"targets {names}", None)
        assert repr(key) in problem.what
        assert "AOA statement for each of them" in problem.remedy
    more = [Unresolved(f"linear_0.w_0_moment1_{number}", 2) for number in range(1, 8)]
    assert find(more, [key]).problems[0].got == f"targets {[target.key for target in more[:5]]}"


def test_a_name_comes_before_aliases_and_these_before_raw_names():
    raw, target = "linear_0.w_0_moment1_0", Unresolved("a.moment1_0", 0, ("b.moment1_0",), ("linear_0.w_0_moment1_0",))
    assert find([target], ["model.a.moment1_0", "model.b.moment1_0", raw]).names == {target.key: "model.a.moment1_0"}
    found = find([target], ["model.b.moment1_0", raw])
    assert (found.names, found.by_raw_name) == ({target.key: "model.b.moment1_0"}, {})
    found = find([target], [raw])
    assert (found.names, found.by_raw_name) == ({target.key: raw}, {target.key: raw})


@pytest.mark.parametrize("source", ["a.weight.moment1_0", "optimizer.a.weight.moment1_0"])
@pytest.mark.parametrize("here", ["linear_0.w_0_moment1_0", "optimizer.linear_0.w_0.dist_moment1_3"])
@pytest.mark.parametrize("known", ["a.weight", "optimizer.a.weight"])
def test_a_raw_name_is_found_under_the_structured_one(source, here, known):
    found = find([of(here, f"{known}.moment1_0", "unknown.moment1_0")], [source])
    assert (found.names, found.by_raw_name) == ({here: source}, {})
    assert find([of(here, "b.weight.moment1_0")], [source]).names == {}
    master = find([of("master_weights.linear_0.w_0", "a.weight.w_0")], ["a.weight.w_0"])
    assert master.names == {"master_weights.linear_0.w_0": "a.weight.w_0"}


def test_a_structured_name_is_found_under_a_raw_one_that_the_source_has_recorded():
    raw, other = "optimizer.linear_1.w_0_moment1_0", "optimizer.linear_0.w_0_moment1_0"
    known = {raw: ["optimizer.a.weight.moment1_0"], other: ["optimizer.b.weight.moment1_0"]}
    target = Unresolved("a.weight.moment1_0", 3, raw_names=("linear_0.w_0_moment1_0",))
    for each in (target, of(other, "a.weight.moment1_0"), of("linear_7.w_0_moment1_0", "optimizer.a.weight.moment1_0")):
        found = find([each], [raw, other], **known)
        assert (found.names, found.by_raw_name, found.lost_by_raw_name) == ({each.key: raw}, {}, [])
    # What is another parameter's is not taken for its raw name, but said.
    found = find([target, of(raw, "c.weight.moment1_0")], [other, raw], **{**known, raw: ["d.weight.moment1_0"]})
    assert (found.names, found.lost_by_raw_name) == ({}, [target.key, raw])
    assert found.of_others == {target.key: known[other][0], raw: "d.weight.moment1_0"}
    # Where this side does not know it, the raw name has to do.
    found = find([other], [raw, other], **known)
    assert found.names == found.by_raw_name == {other: other}


def test_the_own_name_comes_first_among_several_of_one_state():
    raw = ["linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1"]
    known = {key: ["a.weight.moment1_0"] for key in raw}
    found = find([of(key, "a.weight.moment1_0") for key in raw], raw, **known)
    assert (found.names, found.problems) == (dict(zip(raw, raw)), [])
    assert (
        "several that may be meant"
        in find([of("x.w_0_moment1_0", "a.weight.moment1_0")], raw, **known).problems[0].what
    )


def test_only_own_names_are_looked_for_where_that_is_asked():
    key = "linear_0.w_0_moment1_0"
    targets = [Unresolved(key, 0), Unresolved("linear_1.w_0.dist_moment1_0", 0)]
    source = SourceKeys(dict.fromkeys([key, "linear_1.w_0_moment1_0"], (2,)), {})
    assert find_compatible(targets, source, {}, exact=True).names == {key: key}


def test_a_raw_name_that_a_user_gave_is_known_by_the_state():
    mine = of("mine_moment1_1", "a.weight.moment1_0")
    for source in ("mine_moment1_0", "mine_moment1_2"):
        assert find(["mine_moment1_1"], [source]).names == {}
        assert find([mine], [source]).names == {mine.key: source}
        structured = Unresolved("a.weight.moment1_0", 3, raw_names=("mine_moment1_1",))
        assert find([structured], [source]).names == {structured.key: source}
    assert find([mine], ["a.weight.moment1_0"]).names == {mine.key: "a.weight.moment1_0"}
    # It counts nothing, so it is believed, whatever the attribute is called by now.
    assert find([mine], [mine.key], **{mine.key: ["b.weight.moment1_0"]}).names == {mine.key: mine.key}


@pytest.mark.parametrize(
    "name", ["linear_0.w_0_moment1_0", "opt.linear_0.b_1.dist_moment1_3", "master_weights.a_0.w_0"]
)
def test_names_of_paddles_counter(name):
    assert is_counted(name)
    assert not any(map(is_counted, ("mine_moment1_0", "a.weight.moment1_0", "a.weight.w_0", "linear_0.w_0")))


def test_what_only_a_raw_name_could_find_is_told():
    structured = Unresolved("a.moment1_0", 0, raw_names=("linear_0.w_0_moment1_0",))
    raw = Unresolved("linear_0.w_0_moment1_0", 0)
    other = Unresolved("b.weight", 0)
    assert find([structured, raw, other], ["linear_5.w_0_moment1_0"]).lost_by_raw_name == [structured.key, raw.key]
    assert find([structured, raw, other], ["c.weight.moment1_0"]).lost_by_raw_name == [raw.key]


def test_raw_names_that_lead_to_some_states_alone_are_not_believed():
    def state(key, number):
        return Unresolved(key, 4, raw_names=(f"linear_{number}.w_0_moment1_0",))

    targets = [state("a.moment1_0", 0), state("b.moment1_0", 1), state("c.moment1_0", 2)]
    source = ["linear_0.w_0_moment1_0"]
    found = find([*targets, "linear_9.w_0_moment1_0"], source)
    (problem,) = found.problems
    assert found.by_raw_name == {"a.moment1_0": source[0]}
    assert (problem.key, problem.rank, problem.got) == ("b.moment1_0", 4, "2 states without a key")
    assert problem.expected == f"'linear_1.w_0_moment1_0', as target 'a.moment1_0' is there as {source[0]!r}"
    assert "AOA statements" in problem.remedy
    assert "raw names count layers" in problem.what
    (problem,) = find(targets[:2], source).problems
    assert (problem.rank, problem.got) == (4, "1 states without a key")
    all_there = [f"linear_{number}.w_0_moment1_0" for number in range(3)]
    assert find(targets, all_there).problems == []
    assert find([targets[0], "linear_9.w_0_moment1_0"], source).problems == []
    assert find(targets[1:], source).problems == []


def test_a_raw_name_whose_key_is_taken_is_not_believed_either():
    key = "linear_0.w_0_moment1_0"
    found = find([Unresolved("a.moment1_0", 0, raw_names=(key,))], [key], {key: [(key, None)]})
    assert (found.taken, found.by_raw_name, found.names) == ({"a.moment1_0": key}, {}, {})


# -- what ranks mean ---------------------------------------------------------------------------------------------------


def test_what_raw_names_mean_on_a_rank():
    assert raw_meanings([("a.weight", "model.a.weight", (), ()), ("x.moment1_0", "y.moment1_0", (), ())]) == {}
    known = ("optimizer.b.weight.moment1_0", "optimizer.model.a.weight.moment1_0")
    found = [
        ("a.weight", "model.a.weight", (), ()),
        ("b.w_0", "mine_fp32_master_0", (), ()),
        ("linear_3.w_0_moment1_1", "linear_3.w_0_moment1_0", (), ()),
        ("optimizer.linear_0.w_0.dist_moment1_0", "optimizer.linear_0.w_0_moment1_0", (), known),
        ("c.weight.moment1_0", "linear_1.w_0_moment1_0", ("d.weight.moment1_0",), ()),
        ("model.c.weight.w_0", "master_weights.linear_1.w_0", (), ()),
    ]
    assert raw_meanings(found) == {"linear_0.w_0": ["b.weight", "a.weight"], "linear_1.w_0": ["c.weight", "d.weight"]}
    # A name that a user gave counts no layers.
    assert raw_meanings([("b.w_0", "mine_fp32_master_0", (), ())]) == {}


def test_a_raw_name_means_one_parameter_on_all_ranks():
    check_across_ranks(
        [{"linear_0.w_0": ["a", "b"]}, {"linear_0.w_0": ["b", "c"]}, {"linear_0.w_0": ["c"]}, {}], "load"
    )
    check_across_ranks([{"linear_0.w_0": ["a"]}, {"linear_1.w_0": ["b"]}], "load")
    meanings = [{"linear_0.w_0": ["d", "c", "b", "a"]}, {"linear_0.w_0": ["h", "g", "f", "e"], "linear_1.w_0": ["x"]}]
    with pytest.raises(ValidationError) as caught:
        check_across_ranks(meanings, "loading here")
    (problem,) = caught.value.problems
    assert problem.got == "['a', 'b', 'c'] and ['e', 'f', 'g']"
    assert "'linear_0.w_0'" in problem.what
    assert "sharded_state_dict" in problem.remedy and "AOA statements" in problem.remedy
    assert "loading here" in str(caught.value)
    with pytest.raises(ValidationError):
        check_across_ranks([{"linear_1.w_0": ["y"]}, *meanings[1:]], "")
