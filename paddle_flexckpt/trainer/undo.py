"""Changes of other libraries' classes and modules that can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Undo:
    """What has to be put back.

    Attributes:
        steps: In the order in which they were done.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, and notes what was there."""
        if name in vars(owner):
            before = vars(owner)[name]
            self.steps.append(lambda: setattr(owner, name, before))
        else:
            self.steps.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def keep_all(self, owner: Any) -> None:
        """Notes all attributes of a class."""
        before = dict(vars(owner))

        def put_back() -> None:
            for name in [name for name in vars(owner) if name not in before]:
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)

        self.steps.append(put_back)

    def put_back(self) -> None:
        """Puts everything back, the last first."""
        while self.steps:
            self.steps.pop()()
