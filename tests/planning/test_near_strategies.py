"""Strategies near one that does not fit: which are tried, which are found, in which order."""

from __future__ import annotations

import pytest

from paddle_flexckpt.planning.strategy import Strategy, near_strategies, parse_strategy


def near(text, fits=lambda _: True):
    return [str(each) for each in near_strategies(parse_strategy(text), fits)]


@pytest.mark.parametrize(
    ("text", "fits", "found"),
    [
        # The nearest below and above; dp makes up for the degree where it can.
        ("tp=3", lambda it: 8 % it.tp == 0, ["tp=2", "tp=4"]),
        ("pp=6,dp=2", lambda it: 4 % it.pp == 0, ["pp=4,dp=3"]),
        ("pp=9", lambda it: 4 % it.pp == 0, ["pp=4"]),
        ("tp=16,dp=2", lambda it: 8 % it.tp == 0, ["tp=8,dp=4"]),
        # One degree at a time.
        ("tp=3,pp=3", lambda it: 8 % it.tp == 0 and 8 % it.pp == 0, []),
        ("tp=3,pp=2", lambda it: 8 % it.tp == 0, ["tp=2,pp=2", "tp=4,pp=2"]),
        # Virtual stages and experts do not change the number of ranks.
        ("pp=2,vpp=3", lambda it: it.pp * it.vpp == 4, ["pp=2,vpp=2"]),
        ("dp=4,ep=4", lambda it: 6 % it.ep == 0, ["dp=4,ep=2"]),
        ("dp=4", lambda it: True, []),
    ],
)
def test_found(text, fits, found):
    assert near(text, fits) == found


def test_few_are_tried():
    asked = []
    near("tp=64,pp=36,vpp=12,sharding=v2:64,sep=8,dp=2", lambda it: asked.append(it) is not None)
    assert 20 < len(asked) <= 5 * 7 and len(set(asked)) == len(asked)
    assert all(isinstance(each, Strategy) for each in asked)
