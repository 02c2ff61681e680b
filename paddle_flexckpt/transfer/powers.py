"""Powers of beta for a source whose optimizer counts steps, as torch's do: their values after these steps.

Tested in tests/transfer/test_powers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paddle_flexckpt.optimizer_states import FIRST_MOMENTS, state_key

_POWER = re.compile(r"(.+)\.(beta([12])_pow_acc_0)", re.DOTALL)


class Facts:
    """Facts about a source besides its shards; by default none."""

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of its model; empty if there is none."""
        return {}

    def family(self) -> tuple[str, str]:
        """Return the family of models of Hugging Face's files, and the path of their configuration; "" if unknown."""
        return "", ""

    def progress(self, key: str) -> tuple[float, tuple[float, ...]] | None:
        """Return the number of steps of a moment, and its betas, by its key; None if they are not known."""
        return None


NOTHING = Facts()


class Power(NamedTuple):
    """A power of beta: its parameter, its state, and the number of the beta, 1 or 2."""

    parameter: str
    state: str
    number: int

    @classmethod
    def of(cls, key: str) -> Power | None:
        """Return the power of a key; None if it is another state."""
        match = _POWER.fullmatch(key)
        return None if match is None else cls(match[1], match[2], int(match[3]))

    @property
    def moments(self) -> list[str]:
        """Return the keys of the moments that it belongs to."""
        return [state_key(self.parameter, f"{name}_0") for name in FIRST_MOMENTS]

    def progress(self, facts: Facts, sources: Iterable[str]) -> tuple[float | None, float | None]:
        """Return the number of steps of moments under these keys, and the beta of this power; None: not known."""
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
