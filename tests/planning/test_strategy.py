"""Strategies: their text, their ranks, and the layers of each stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.planning.strategy import Place, Strategy, aligned, parse_strategy, stage_layers
from tests.remedies.following import provoked

DEGREES = st.integers(1, 4)


def test_a_strategy_is_read():
    strategy = parse_strategy("tp=8, pp=16,vpp=2,dp=4,sharding=v2:4,ep=8,sep=1")
    assert strategy == Strategy(dp=4, pp=16, sharding=4, tp=8, vpp=2, ep=8, kind="v2")
    assert strategy.ranks == 8 * 16 * 4 * 4
    assert str(strategy) == "tp=8,pp=16,vpp=2,dp=4,ep=8,sharding=v2:4"
    assert parse_strategy("mp=2") == Strategy(tp=2)
    assert parse_strategy("dp=2,sharding=v1:2,ep=dp:2") == Strategy(dp=2, sharding=2, kind="v1", ep=2, experts="dp")
    over_tensor = parse_strategy("mp=2,sharding=v2:2,ep=mp:4")
    assert over_tensor == Strategy(tp=2, sharding=2, kind="v2", ep=4, experts="tp")
    assert str(over_tensor) == "tp=2,ep=tp:4,sharding=v2:2" and parse_strategy(str(over_tensor)) == over_tensor
    assert parse_strategy("") == Strategy()


@given(st.builds(Strategy, dp=DEGREES, pp=DEGREES, tp=DEGREES, sep=DEGREES, sharding=DEGREES, kind=st.just("v1")))
def test_the_text_of_a_strategy_is_read_back(strategy):
    assert parse_strategy(str(strategy)) == strategy
    places = [strategy.place(rank) for rank in range(strategy.ranks)]
    # Row-major: dp, pp, sharding, sep, tp.
    assert places == sorted(set(places))
    assert places[-1] == Place(
        strategy.dp - 1, strategy.pp - 1, strategy.sharding - 1, strategy.sep - 1, strategy.tp - 1
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tq=2", "unknown entry.*tq=2.*a name of tp .or mp., pp.*mesh=2x4:dp,mp"),
        ("tp", "unknown entry"),
        ("tp=0", "not a degree.*tp=0"),
        ("tp=-1", "not a degree"),
        ("tp=2.5", "not a degree"),
        ("tp=99999999999", "not a degree"),
        ("tp=2,mp=2", "twice"),
        ("sharding=4", "sharding without its kind.*KIND:DEGREE"),
        ("sharding=v3:4", "unknown kind of sharding.*a kind of v1, v2, stage2, stage3, muon"),
        ("vpp=2", "virtual stages need a pipeline"),
        ("dp=2,ep=4", "dp x sharding = 2"),
        ("dp=2,sharding=v2:2,ep=dp:4", "ep to divide dp = 2"),
        ("tp=2,ep=tp:4", "ep to divide dp x sharding x tp = 2"),
        ("dp=2,tp=2,ep=tp:1", "a multiple of tp=2"),
        ("dp=2,ep=pp:2", "unknown axis of experts.*ep=AXIS:DEGREE"),
    ],
)
def test_what_is_no_strategy_is_refused(text, words):
    with pytest.raises(ValidationError, match=words):
        parse_strategy(text)


def test_degrees_without_a_kind_are_refused():
    with pytest.raises(ValidationError, match="a sharded optimizer has a kind"):
        Strategy(sharding=2)
    with pytest.raises(ValidationError, match="unknown kind of sharding"):
        Strategy(sharding=2, kind="v9")


def test_layers_are_spread_over_stages_as_paddle_does():
    pipeline = parse_strategy("pp=4")
    # By hand, from SegmentLayers.uniform: later stages have one more.
    assert stage_layers(pipeline, 10) == ((0, 1), (2, 3), (4, 5, 6), (7, 8, 9))
    assert stage_layers(pipeline, 10, range(1, 9)) == ((0, 1, 2), (3, 4), (5, 6), (7, 8, 9))
    interleaved = parse_strategy("pp=2,vpp=2")
    assert stage_layers(interleaved, 10, range(1, 9)) == ((0, 1, 2, 5, 6), (3, 4, 7, 8, 9))
    assert stage_layers(Strategy(), 3) == ((0, 1, 2),)
    with provoked("planning/strategy.py", "pp x vpp can be ") as caught:
        stage_layers(pipeline, 3)
    assert str(caught.value).startswith("pp=4 does not fit the model: too few layers")
    assert str(caught.value).endswith("pp x vpp can be 3 at most")
    assert stage_layers(parse_strategy("pp=3"), 3) == ((0,), (1,), (2,))
    with provoked("planning/strategy.py", "give another pp, or vpp, whose product divides") as caught:
        stage_layers(pipeline, 10, range(6))
    assert "pp x vpp = 4; got 6 layers" in str(caught.value)
    for text in ("pp=3", "pp=3,vpp=2"):
        assert len(stage_layers(parse_strategy(text), 10, range(6))) == 3


def test_sizes_are_aligned_on_every_rank():
    assert [aligned(size, 4, 256) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert aligned(65, 2, 256, degree=4) == 512


@pytest.mark.parametrize(
    ("text", "places", "stride"),
    [
        ("dp=2,sharding=v2:2,ep=2", [0, 1, 0, 1], 2),
        ("dp=2,sharding=v2:2,ep=4", [0, 1, 2, 3], 2),
        ("dp=2,sharding=v1:2,ep=dp:2", [0, 0, 1, 1], 1),
        ("tp=2,sharding=v2:2,ep=2", [0, 0, 1, 1], 2),
        ("tp=2,sharding=v2:2,ep=tp:2", [0, 1, 0, 1], 1),
        ("tp=2,sharding=v2:2,ep=tp:4", [0, 1, 2, 3], 2),
        ("sharding=v2:4,ep=2", [0, 1, 0, 1], 2),
        ("dp=2,sharding=v2:3,ep=2", [0, 1, 0, 1, 0, 1], 0),
    ],
)
def test_experts_stand_on_ranks(text, places, stride):
    strategy = parse_strategy(text)
    assert [strategy.expert_place(strategy.place(rank)) for rank in range(strategy.ranks)] == places
    assert strategy.expert_stride == stride
