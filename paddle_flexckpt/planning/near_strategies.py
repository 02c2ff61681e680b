"""Strategies near one that a model cannot have.

Tested in tests/planning/test_near_strategies.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.planning.strategy import Strategy

#: The degrees that are varied, one at a time; the most lower ones that are tried of each.
_DEGREES, _LOWER = ("tp", "pp", "vpp", "sharding", "sep", "ep"), 5


def near_strategies(strategy: Strategy, fits: Callable[[Strategy], bool]) -> list[Strategy]:
    """Return strategies that fit, with one degree changed: to the nearest lower, and to the nearest higher one.

    Those come first whose number of ranks is the same, as data parallelism makes up for the degree, or nearly so.

    Args:
        strategy: One that does not fit.
        fits: Tells whether another one does. It is asked a few times for each degree above 1.
    """
    found: list[Strategy] = []
    for name in _DEGREES:
        degree = getattr(strategy, name)
        # Divisors and powers of two are what models and machines have.
        lower = {degree - 1, *(each for each in range(1, degree) if degree % each == 0 or each & (each - 1) == 0)}
        for degrees in (sorted(lower, reverse=True)[:_LOWER], [degree + 1, 2 * degree]) if degree > 1 else ():
            made = (_changed(strategy, name, each) for each in degrees)
            found += itertools.islice((each for each in made if each is not None and fits(each)), 1)
    return sorted(dict.fromkeys(found), key=lambda each: abs(each.ranks - strategy.ranks))


def _changed(strategy: Strategy, name: str, degree: int) -> Strategy | None:
    """Return a strategy with another degree, and as many ranks if that can be; None if there is no such strategy."""
    places = strategy.dp * getattr(strategy, name)
    keeps = name not in ("vpp", "ep") and places % degree == 0
    for more in [{"dp": places // degree}, {}] if keeps else [{}]:
        try:
            return replace(strategy, **{name: degree, **more})  # type: ignore[arg-type]
        except ValidationError:
            continue
    return None
