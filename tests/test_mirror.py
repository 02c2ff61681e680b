"""Each module has its tests where one looks for them: in a file of its own name, or in one that its docstring names.

``saving/saver.py`` is tested in ``tests/saving/test_saver.py``, or says "Tested in tests/loading/test_policies.py."
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import HEAVY

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddle_flexckpt"
NAMED = re.compile(r"Tested in (tests/\S+\.py(?:(?:,| and|, and) tests/\S+\.py)*)\.")
#: Rooms whose modules do not all say it yet.
NOT_YET = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {
    "background",
    "cli",
    "communication",
    "loading",
    "manager",
    "media",
    "memory",
    "pages",
    "parallel",
    "ranks",
    "run_state",
    "saving",
    "tools",
    "transfer",
    "trainer",
} | {""}


def modules() -> list[str]:
    """Return each module with code of its own, as a path from the package."""
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    return [path.as_posix() for path in paths if path.name not in ("__init__.py", "__main__.py", "_version.py")]


def room_of(module: str) -> str:
    return module.rpartition("/")[0].partition("/")[0]


def named_tests(module: str) -> list[str]:
    """Return the test files that a module's docstring names."""
    text = ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))) or ""
    return [path for names in NAMED.findall(" ".join(text.split())) for path in re.findall(r"tests/\S+?\.py", names)]


def has_file_of_its_name(module: str) -> bool:
    folder, _, name = module.rpartition("/")
    return (ROOT / "tests" / folder / f"test_{name}").is_file()


@pytest.mark.parametrize("room", sorted({room_of(module) for module in modules()}))
def test_each_module_has_a_test_file_or_names_it(room):
    missing = []
    for module in modules():
        if room_of(module) != room:
            continue
        named = named_tests(module)
        assert all((ROOT / path).is_file() for path in named), f"{module} names a test file that is not there: {named}"
        if not named and not has_file_of_its_name(module):
            missing.append(module)
    assert not missing, "no test file of that name, and no line 'Tested in tests/...' in the docstring"


def test_files_that_the_design_page_names_are_there():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+/\w+\.py)`", text))
    assert len(named) > 20
    assert sorted(path for path in named if not any((top / path).is_file() for top in (ROOT, PACKAGE))) == []


def test_heavy_files_are_there():
    assert [path for path in HEAVY if not (ROOT / path).is_file()] == []
