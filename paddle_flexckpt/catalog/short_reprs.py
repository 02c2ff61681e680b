"""A short ``repr`` of dataclasses with many or long fields. Tested in tests/catalog/test_short_reprs.py."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import fields
from typing import Any

_LONGEST = 60


class ShortRepr:
    """Base of dataclasses whose ``repr`` leaves out empty values and defaults, and counts the entries of long ones."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a subclass the method before ``dataclass`` would give it another."""
        super().__init_subclass__(**options)
        cls.__repr__ = ShortRepr.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        own = [each for each in fields(self) if each.repr]  # type: ignore[arg-type]
        told = [(each.name, getattr(self, each.name), each.default) for each in own]
        empty: tuple[Any, ...] = (None, "", [], {}, ())
        shown = (f"{name}={_short(value)}" for name, value, default in told if value not in (*empty, default))
        return f"{type(self).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= _LONGEST or isinstance(value, ShortRepr):
        return text
    if isinstance(value, Sized) and not isinstance(value, (str, bytes)):
        return f"<{len(value)} entries>"
    return f"{text[:_LONGEST]}..."
