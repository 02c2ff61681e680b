"""Change attributes of other libraries' classes and modules, and take the changes back exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MISSING = object()


class Undo:
    """Make changes and hold what takes them back.

    ``install()`` of whatever kind makes its changes through one of these, so that its ``uninstall()`` is exact.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._steps: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, which may not have existed before."""
        # vars() first: a class attribute read through getattr would lose its staticmethod wrapper.
        before = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, _MISSING)
        self._steps.append(
            functools.partial(delattr, owner, name)
            if before is _MISSING
            else functools.partial(setattr, owner, name, before)
        )
        setattr(owner, name, value)

    def replace_everywhere(self, name: str, before: Any, value: Any, package: str = "") -> None:
        """Set ``name`` in every module that has ``before`` under it: its own, and those that imported it by name.

        Args:
            name: The name.
            before: What it stands for now.
            value: What it shall stand for.
            package: Look at the modules of this package alone.
        """
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or vars(module).get(name) is not before:
                continue
            if not package or module.__name__.partition(".")[0] == package:
                self.set(module, name, value)

    def keep_all(self, owner: Any) -> None:
        """Note all attributes of a class, to put them back whatever happens to them."""
        before = dict(vars(owner))

        def put_back() -> None:
            for name in [name for name in vars(owner) if name not in before]:
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)

        self._steps.append(put_back)

    def call(self, step: Callable[[], object]) -> None:
        """Note a function that takes another change back."""
        self._steps.append(step)

    def __bool__(self) -> bool:
        """Return whether there is anything to take back."""
        return bool(self._steps)

    def put_back(self) -> None:
        """Take everything back, the last change first."""
        while self._steps:
            self._steps.pop()()
