"""What became of the runs of the campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Totals:
    """What became of the runs, by mistake.

    Attributes:
        equal: Every target held what it should.
        error: All ranks raised the same error of the library's.
        findings: ``(seed, mistake, what)``.
    """

    equal: Counter[str] = field(default_factory=Counter)
    error: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        self.equal.update(other.equal)
        self.error.update(other.error)
        self.findings += other.findings

    @property
    def runs(self) -> int:
        return sum(self.equal.values()) + sum(self.error.values()) + len(self.findings)

    def __str__(self) -> str:
        found = Counter(name for _, name, _ in self.findings)
        lines = [f"{'mistake':<58}{'equal':>8}{'error':>8}{'finding':>8}"]
        for name in sorted({*self.equal, *self.error, *found}):
            lines.append(f"{name:<58}{self.equal[name]:>8,}{self.error[name]:>8,}{found[name]:>8,}")
        total = sum(self.equal.values()), sum(self.error.values()), len(self.findings)
        return "\n".join([*lines, f"{'all':<58}" + "".join(f"{number:>8,}" for number in total)])
