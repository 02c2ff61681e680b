"""A list of run-time replacements that can be undone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_MISSING = object()


class PatchSet:
    """Sets attributes and remembers what was there before.

    Every change that the CPU world makes to Paddle goes through one of these, so ``uninstall()`` is exact.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, which may not have existed before (a CPU build lacks many names)."""
        # vars() first: a class attribute read through getattr would lose its staticmethod wrapper.
        before = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, _MISSING)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class ModuleView:
    """Looks like a module, but some of its names are replaced.

    Some of Paddle's modules ask ``paddle.device`` or ``core`` whether there is a GPU and refuse to work without. Giving
    *that* module a view with other answers leaves the rest of Paddle with the true ones.
    """

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def replace_everywhere(patches: PatchSet, home: ModuleType, name: str, value: Any) -> None:
    """Replace ``home.name``, and the same object wherever ``from home import name`` has copied it."""
    before = getattr(home, name)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("paddle.") and vars(module).get(name) is before:
            patches.set(module, name, value)
