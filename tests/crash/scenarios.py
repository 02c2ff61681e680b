"""All scenarios."""

from __future__ import annotations

from tests.crash.background import ASYNCHRONOUS
from tests.crash.managed import MANAGED
from tests.crash.nodes import NODES
from tests.crash.saves import REPAIRS, SAVES
from tests.crash.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (*SAVES, *REPAIRS, *ASYNCHRONOUS, *MANAGED, *NODES)


def find(name: str) -> Scenario:
    """Return the scenario of a name.

    Raises:
        StopIteration: There is none.
    """
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
