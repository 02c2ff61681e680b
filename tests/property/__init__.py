"""Property tests: hypothesis profiles here, random layouts and numpy oracles in :mod:`tests.property.layouts`.

The profile is chosen by ``HYPOTHESIS_PROFILE``. ``release`` looks at as many examples as a test says, the same on every
run. ``ci`` (default) looks at a fifth of them. ``brief`` looks at a tenth, where the same code runs on other versions.
``mutation`` looks at these without making a failing one smaller, since there only the failure counts. ``full`` looks at
20 times as many as a test says, at random.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

FULL_FACTOR = 20
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
_FACTOR = {"full": FULL_FACTOR, "release": 1, "ci": 0.2, "brief": 0.1, "mutation": 0.2}[PROFILE]
_SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile(
    "release", derandomize=True, database=None, deadline=None, max_examples=100, suppress_health_check=_SLOW_TO_DRAW
)
settings.register_profile("ci", settings.get_profile("release"), max_examples=20)
settings.register_profile("brief", settings.get_profile("release"), max_examples=10)
settings.register_profile("mutation", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile(
    "full", deadline=None, max_examples=100 * FULL_FACTOR, print_blob=True, suppress_health_check=_SLOW_TO_DRAW
)
settings.load_profile(PROFILE)


def examples(count: int) -> settings:
    """Decorator: look at ``count`` examples in the profile ``release``, and at the profile's share in the others."""
    return settings(max_examples=max(1, round(count * _FACTOR)))
