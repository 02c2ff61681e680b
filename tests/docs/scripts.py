"""Scripts of docs/, which is no package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.documents import ROOT


def script(name: str) -> ModuleType:
    """Import docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
