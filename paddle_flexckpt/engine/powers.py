"""Powers of beta of a source whose optimizer counts its steps, as torch's do: what they are after so many steps.

Tested in tests/engine/test_powers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paddle_flexckpt.aoa.states import state_key

_POWER = re.compile(r"(.+)\.(beta([12])_pow_acc_0)", re.DOTALL)
_MOMENTS = ("moment1_0", "moment_0")


class Facts:
    """Tell what a source says besides its shards; by default nothing."""

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the model that it is of; nothing where there is none."""
        return {}

    def progress(self, key: str) -> tuple[float, tuple[float, ...]] | None:
        """Return after how many steps a moment is, and with which betas, by its key; None where that is not told."""
        return None


NOTHING = Facts()


class Power(NamedTuple):
    """Name a power of beta: whose it is, which state, and of which beta, 1 or 2."""

    parameter: str
    state: str
    number: int

    @classmethod
    def of(cls, key: str) -> Power | None:
        """Return the power that a key is of; None if it is of none."""
        match = _POWER.fullmatch(key)
        return None if match is None else cls(match[1], match[2], int(match[3]))

    @property
    def moments(self) -> list[str]:
        """Return the keys of the moments that it belongs to."""
        return [state_key(self.parameter, name) for name in _MOMENTS]

    def progress(self, facts: Facts, sources: Iterable[str]) -> tuple[float | None, float | None]:
        """Return after how many steps moments under these keys are, and the beta of this power; None: not told."""
        found = {progress for progress in map(facts.progress, sources) if progress is not None}
        if len(found) != 1:
            return None, None
        ((steps, betas),) = found
        return steps, betas[self.number - 1] if len(betas) >= self.number else None

    def statement(self, value: object) -> str:
        """Return the AOA statement that gives it a value."""
        from paddle_flexckpt.aoa.parser import quoted  # with the compiler, which most loads do not need

        return f'_ -> {quoted(self.parameter)}, states="{self.state}", fill={value}'

    def remedy(self, steps: float | None) -> str:
        """Say how to give it where it is not known, after so many steps, or None: not known either."""
        after, exponent = ("n steps", "(n + 1)") if steps is None else (f"{steps:g} steps", f"{steps + 1:g}")
        remedy = (
            f"the moments that are there need their power of beta{self.number}, which after {after} is "
            f"beta{self.number} ** {exponent}: give the number by the AOA statement '{self.statement('NUMBER')}'"
        )
        return remedy
