"""What is asked of the replicas of a shard: policies by key, the same on every rank.

Tested in tests/live/test_replicas.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, ValidationError

ReplicaPolicy = Literal["equal", "close", "first"]
CheckReplicas = Union[bool, ReplicaPolicy, Mapping[Union[str, "re.Pattern[str]"], ReplicaPolicy]]

# In an array of policies. Where ranks describe a shard in different ways, the highest counts.
EQUAL, CLOSE, FIRST = range(3)
_CODES: dict[Any, int] = {"equal": EQUAL, "close": CLOSE, "first": FIRST}
_DEFAULT = "*"


class ReplicaPolicies:
    """Hold the meaning of ``check_replicas``.

    A key has the policy of the first pattern that matches it; else what its layer says (running statistics are
    ``"first"``); else the default. Extra state is never only close.

    Attributes:
        compares: Whether replicas are compared at all.
        agreed: The same in a form for JSON, to be compared across ranks.
    """

    def __init__(self, check_replicas: CheckReplicas) -> None:
        """Take the argument of a public call.

        Raises:
            ValidationError: It is none of the values that it can have.
        """
        self.compares = check_replicas is not False
        if isinstance(check_replicas, bool):
            check_replicas = "equal" if check_replicas else "first"
        by_pattern = check_replicas if isinstance(check_replicas, Mapping) else {_DEFAULT: check_replicas}
        bad = [
            f"{pattern!r}: {policy!r}"
            for pattern, policy in by_pattern.items()
            if not isinstance(pattern, (str, re.Pattern)) or not isinstance(policy, str) or policy not in _CODES
        ]
        if bad:
            raise ValidationError(
                [
                    f"check_replicas has {each}. Remedy: give 'equal', 'close' or 'first' for all keys, or a dict of "
                    "these by pattern, a glob or a compiled regular expression; True and False mean 'equal' and 'first'"
                    for each in bad
                ]
            )
        self._default = _CODES[by_pattern.get(_DEFAULT, "equal")]
        self._patterns = [
            (re.compile(fnmatch.translate(pattern)) if isinstance(pattern, str) else pattern, _CODES[policy])
            for pattern, policy in by_pattern.items()
            if pattern != _DEFAULT
        ]
        patterns = [[pattern.pattern, pattern.flags, code] for pattern, code in self._patterns]
        self.agreed = [self.compares, self._default, patterns]

    def of(self, keys: Sequence[str], weights: Sequence[Any]) -> np.ndarray:
        """Return the policy of each shard by its key, uint8 ``[n]``."""
        return np.asarray([self._of(key, weight) for key, weight in zip(keys, weights)], dtype=np.uint8)

    def _of(self, key: str, weight: Any) -> int:
        for pattern, code in self._patterns:
            if pattern.fullmatch(key):
                return code
        own = getattr(weight, "replicas", None)
        if own is not None:
            return max(_CODES[own], self._default)
        return EQUAL if self._default == CLOSE and key.startswith(EXTRA_STATE) else self._default
