"""Changes to attributes of other libraries' classes and modules, which can be reverted exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MISSING = object()


class Undo:
    """A record of changes, with a function for each that reverts it.

    Each ``install()`` makes its changes through an Undo, so that its ``uninstall()`` is exact.
    """

    def __init__(self) -> None:
        """Begin without changes."""
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
            before: The present value.
            value: The new value.
            package: The package whose modules are changed; "" for all modules.
        """
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or vars(module).get(name) is not before:
                continue
            if not package or module.__name__.partition(".")[0] == package:
                self.set(module, name, value)

    def record_all(self, owner: Any) -> None:
        """Record all attributes of a class, to restore them whatever happens to them."""
        before = dict(vars(owner))

        def put_back() -> None:
            for name in [name for name in vars(owner) if name not in before]:
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)

        self._steps.append(put_back)

    def call(self, step: Callable[[], object]) -> None:
        """Record a function that reverts another change."""
        self._steps.append(step)

    def __bool__(self) -> bool:
        """Return whether there is a change to revert."""
        return bool(self._steps)

    def put_back(self) -> None:
        """Revert all changes, the last one first."""
        while self._steps:
            self._steps.pop()()
