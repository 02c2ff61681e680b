"""Policies of replicas: how the replicas of each shard are compared, as ``check_replicas`` gives them.

Tested in tests/saving/test_replica_checks.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, ValidationError

ReplicaPolicy = Literal["equal", "all", "close", "first"]
CheckReplicas = Union[bool, ReplicaPolicy, Mapping[Union[str, "re.Pattern[str]"], ReplicaPolicy]]

# In an array of policies. If ranks give a shard different policies, the highest counts.
EQUAL, ALL, CLOSE, FIRST = range(4)
_CODES: dict[Any, int] = {"equal": EQUAL, "all": ALL, "close": CLOSE, "first": FIRST}
_DEFAULT = "*"


class ReplicaPolicies:
    """The meaning of ``check_replicas``.

    A key has the policy of the first pattern that matches it; else that of its layer (running statistics are
    ``"first"``); else the default. Extra state is never compared as ``"close"``.

    Attributes:
        compares: Whether replicas are compared at all.
        agreed: The same in a form for JSON, to be compared across ranks.
    """

    def __init__(self, check_replicas: CheckReplicas) -> None:
        """Take the argument of a public call."""
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
                    f"check_replicas has {each}. Remedy (FC101): give 'equal', 'all', 'close' or 'first' for all keys, "
                    "or a dict of these by pattern, a glob or a compiled regular expression; True and False mean "
                    "'equal' and 'first'"
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
        """Return the policy of each shard by its key, uint8 ``[n]``; a plain tensor is None in ``weights``."""
        policies = np.full(len(keys), self._default, dtype=np.uint8)
        if self._default == CLOSE:
            policies[[row for row, key in enumerate(keys) if key.startswith(EXTRA_STATE)]] = EQUAL
        given = [getattr(weight, "replicas", None) for weight in weights]
        own = [row for row, policy in enumerate(given) if policy is not None]
        policies[own] = [max(_CODES[given[row]], self._default) for row in own]
        for pattern, code in reversed(self._patterns):
            policies[[row for row, key in enumerate(keys) if pattern.fullmatch(key)]] = code
        return policies
